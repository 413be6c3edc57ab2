package node

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"sync"
	"time"
)

func (n *node) httpErrors() *log.Logger { return log.New(httpLog{n.log}, "", 0) }

// serve runs an HTTP server until it is shut down; anything else ends the node.
func (n *node) serve(flag string, s *http.Server, l net.Listener) {
	requests, end := context.WithCancel(context.Background())
	s.BaseContext = func(net.Listener) context.Context { return requests }
	// The limits of connections, bodies and unread bytes are made for HTTP/1.1: with HTTP/2, which ServeTLS would add, one
	// connection opens streams without number. Devices do not know it.
	s.Protocols = new(http.Protocols)
	s.Protocols.SetHTTP1(true)
	done := make(chan struct{})
	go func() {
		defer close(done)
		var err error
		if s.TLSConfig != nil {
			err = s.ServeTLS(l, "", "")
		} else {
			err = s.Serve(l)
		}
		if !errors.Is(err, http.ErrServerClosed) {
			n.serveErr <- fmt.Errorf("--%s: %w", flag, err)
		}
	}()
	n.onStop(func() {
		for _, grace := range []time.Duration{callGrace, answerGrace} {
			ctx, cancel := context.WithTimeout(context.Background(), grace)
			err := s.Shutdown(ctx)
			cancel()
			if err == nil {
				break
			}
			end() // cancels requests that have not ended, which then send an error
		}
		_ = s.Close()
		<-done
		end()
	})
}

// whileRunning runs a task until the node stops, before it stops parts that were started earlier.
func (n *node) whileRunning(task func(context.Context)) {
	ctx, stop := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() { task(ctx) })
	n.onStop(func() {
		stop()
		done.Wait()
	})
}
