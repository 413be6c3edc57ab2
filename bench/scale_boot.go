package main

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"
)

// bootTimes say how long a start took.
type bootTimes struct{ listens, answers, ready time.Duration }

// start runs a node, and waits until it is ready.
func (k *known) start(ctx context.Context) (*daemon, bootTimes, error) {
	if err := os.Remove(filepath.Join(k.dir, "run.json")); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, bootTimes{}, err
	}
	watching, cancel := context.WithTimeout(ctx, scaleStart)
	defer cancel()
	var times bootTimes
	watched := make(chan error, 1)
	go func() { watched <- times.watch(watching, k.port, time.Now()) }()
	d, err := startIn(ctx, scaleStart, k.b.opt.program, k.dir, k.settings...)
	if err != nil {
		cancel()
		<-watched
		return nil, bootTimes{}, err
	}
	if err := <-watched; err != nil {
		d.end()
		return nil, bootTimes{}, err
	}
	return d, times, nil
}

// watch waits for a node to listen, to answer, and to be ready.
func (t *bootTimes) watch(ctx context.Context, address string, begun time.Time) error {
	for ; ; time.Sleep(2 * time.Millisecond) {
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
		if err == nil {
			t.listens = time.Since(begun)
			_ = c.Close() // it served its purpose
			break
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	client := http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	for ; ; time.Sleep(5 * time.Millisecond) {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/readyz", nil)
		if err != nil {
			return err
		}
		response, err := client.Do(request)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		} else if err != nil {
			continue // it is starting
		}
		_, err = io.Copy(io.Discard, response.Body)
		_ = response.Body.Close() // read to its end
		if t.answers == 0 {
			t.answers = time.Since(begun)
		}
		if err == nil && response.StatusCode == http.StatusOK {
			t.ready = time.Since(begun)
			return nil
		}
	}
}
