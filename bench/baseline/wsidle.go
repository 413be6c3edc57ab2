package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/gorilla/websocket"

	"fleetd/bench/load"
	"fleetd/simulator/firmware"
)

// Load of idle devices.
const (
	idleDialers = 16
	idleRest    = 2 * time.Second // from the last device to the reading
)

// loadIdle measures what connected devices cost that have sent a hello.
func loadIdle(ctx context.Context, arguments []string, out io.Writer) error {
	o := newOptions("wsidle")
	n := o.Int("n", 10_000, "devices")
	mode := o.choice("mode", "server, one goroutine for a device and small or shared buffers", "tuned")
	secure := o.Bool("tls", false, "encrypt")
	if err := o.positive(arguments, n); err != nil {
		return err
	}
	var asIs, collected series
	for range *o.runs {
		perDevice, err := idleRun(*n, func() (server, error) { return startServer(nil, "wsidle", strconv.FormatBool(*secure)) },
			func(address string) ([]net.Conn, error) { return connectIdle(ctx, address, *n, *secure) })
		if err != nil {
			return err
		}
		asIs, collected = append(asIs, perDevice[0]), append(collected, perDevice[1])
	}
	_, err := fmt.Fprintf(out, "mode=%s tls=%v n=%d: RSS/device as-is %s B | after GC %s B\n", *mode, *secure, *n, asIs.text(0), collected.text(0))
	return err
}

// idleRun measures the bytes of resident memory that a server needs for each of n devices: as they are, and after a garbage
// collection.
func idleRun(n int, start func() (server, error), connect func(address string) ([]net.Conn, error)) (perDevice [2]float64, err error) {
	s, err := start()
	if err != nil {
		return perDevice, err
	}
	defer s.Stop()
	empty, err := s.collected()
	if err != nil {
		return perDevice, err
	}
	conns, err := connect(s.Address)
	defer func() {
		for _, c := range conns {
			if c != nil {
				_ = c.Close() // it was measured
			}
		}
	}()
	if err != nil {
		return perDevice, err
	}
	time.Sleep(idleRest)
	for i, read := range []func() (state, error){s.state, s.collected} {
		now, err := read()
		if err != nil {
			return perDevice, err
		}
		perDevice[i] = float64(now.Resident-empty.Resident) / float64(n)
	}
	return perDevice, nil
}

// connectIdle connects devices, each of which sends its hello and waits for the answer, so that the server has read and written
// once.
func connectIdle(ctx context.Context, address string, n int, secure bool) ([]net.Conn, error) {
	var config *tls.Config
	if secure {
		config = &tls.Config{InsecureSkipVerify: true} // the certificate is the server's own
	}
	conns := make([]net.Conn, n)
	return conns, load.InParallel(idleDialers, n, func() (func(i int) error, func(), error) {
		return func(i int) (err error) {
			var line *firmware.Line
			if conns[i], line, err = load.Attach(ctx, address, i, config); err != nil {
				return err
			}
			if err := line.Send(load.Hello(attached)); err != nil {
				return err
			}
			_, err = line.Receive()
			return err
		}, func() {}, nil
	})
}

// attached is how attached devices log in, as far as their hello shows it.
var attached = firmware.Login{URL: "ws://baseline/ws", Version: 1}

var helloReply = []byte(`{"type":"hello","transport":"websocket","session_id":"` + session +
	`","audio_params":{"format":"opus","sample_rate":24000,"channels":1,"frame_duration":60}}`)

// serveIdle answers every message with a hello. The argument is whether it encrypts.
func serveIdle(arguments []string) error {
	up := websocket.Upgrader{ReadBufferSize: 256, WriteBufferSize: 1024, WriteBufferPool: &sync.Pool{}}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /ws", func(w http.ResponseWriter, r *http.Request) {
		if c, err := up.Upgrade(w, r, nil); err == nil {
			go echoHello(c) // the goroutine of the request ends, and its buffers with it
		}
	})
	var wrap func(net.Listener) (net.Listener, error)
	if len(arguments) == 1 && arguments[0] == "true" {
		wrap = func(l net.Listener) (net.Listener, error) {
			certificate, err := load.SelfSigned()
			return tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{certificate}}), err
		}
	}
	l, err := listen(wrap, mux)
	if err != nil {
		return err
	}
	return answer(l.Addr().String(), nil)
}

func echoHello(c *websocket.Conn) {
	defer func() { _ = c.Close() }()
	for {
		_, r, err := c.NextReader()
		if err != nil {
			return
		}
		b := buffers.Get().(*bytes.Buffer)
		b.Reset()
		_, err = b.ReadFrom(r)
		buffers.Put(b)
		if err != nil || c.WriteMessage(websocket.TextMessage, helloReply) != nil {
			return
		}
	}
}
