package connlimit

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/devicetest"
)

// serveTimed runs a handler on a limited listener with this write limit.
func serveTimed(t *testing.T, limit time.Duration, handler http.Handler) (address string, limiter *Listener) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	limited := NewLimiter(0, 0, nil).LimitCallers(l)
	limited.timed = limit
	serveOn(t, limited, handler)
	return l.Addr().String(), limited
}

// servePiped is serveTimed in memory, for a synctest bubble.
func servePiped(t *testing.T, handler http.Handler) (pipes *devicetest.Pipes, limiter *Listener) {
	t.Helper()
	pipes = devicetest.NewPipes()
	limited := NewLimiter(0, 0, nil).LimitCallers(pipes)
	serveOn(t, limited, handler)
	return pipes, limited
}

// serveOn runs a handler on a listener until the test ends.
func serveOn(t *testing.T, limited *Listener, handler http.Handler) {
	t.Helper()
	server := &http.Server{Handler: handler, ConnContext: WithConn}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(limited) // ends with Close
	}()
	t.Cleanup(func() {
		_ = server.Close()
		<-done
	})
}

func dial(t *testing.T, address, request string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if _, err := io.WriteString(c, request); err != nil {
		t.Fatal(err)
	}
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	return c
}

// A client that does not read is closed; a slow one reads the whole response.
func TestClientsThatDoNotRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		large := bytes.Repeat([]byte("x"), 20*writePiece)
		result := make(chan error, 2)
		pipes, limiter := servePiped(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, err := w.Write(large)
			result <- err
		}))
		begun := time.Now()
		dialPiped(t, pipes, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		// security: N30
		if err := <-result; err == nil || limiter.Slow.Load() != 1 || time.Since(begun) != WriteTime {
			t.Errorf("a client that does not read was counted %d times, after %v: %v", limiter.Slow.Load(), time.Since(begun), err)
		}
		slow := dialPiped(t, pipes, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		buffer := make([]byte, writePiece)
		for read := 0; read < len(large); {
			time.Sleep(WriteTime - time.Millisecond)
			n, err := slow.Read(buffer)
			if err != nil {
				t.Fatalf("a slow client is closed after %d bytes: %v", read, err)
			}
			read += n
		}
		if err := <-result; err != nil || limiter.Slow.Load() != 1 {
			t.Errorf("a slow client: %v, and %d are counted", err, limiter.Slow.Load())
		}
	})
}

// dialPiped is dial for servePiped.
func dialPiped(t *testing.T, pipes *devicetest.Pipes, request string) net.Conn {
	t.Helper()
	c, err := pipes.DialContext(t.Context(), "", "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if _, err := io.WriteString(c, request); err != nil {
		t.Fatal(err)
	}
	return c
}

// A deadline set by the handler takes precedence over that of the connection.
func TestGivenWriteDeadline(t *testing.T) {
	result := make(chan time.Duration, 1)
	address, _ := serveTimed(t, time.Hour, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		begun := time.Now()
		if err := http.NewResponseController(w).SetWriteDeadline(begun.Add(100 * time.Millisecond)); err != nil {
			t.Error(err)
		}
		_, _ = w.Write(make([]byte, 32<<20)) // ends with the handler's deadline
		result <- time.Since(begun)
	}))
	dial(t, address, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	select {
	case <-result:
	case <-time.After(10 * time.Second):
		t.Fatal("the handler's deadline has no effect")
	}
}

// A connection stays open after a body that was read or has arrived, and is closed
// after one that has not.
func TestConnectionsAfterBodies(t *testing.T) {
	for _, tc := range []struct {
		name, body string
		read       bool
		goesOn     bool
	}{
		{"read", "0123456789", true, true},
		{"arrived", "0123456789", false, true},
		{"never arrives", "", false, false},
		{"arrives too slowly", "01234", true, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			address, _ := serveTimed(t, WriteTime, RespondEarly(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if tc.read {
					_, _ = io.Copy(io.Discard, r.Body) // a body that ends early gets a response as well
				}
				_, _ = w.Write([]byte("ok"))
			}), BodyPace{Grace: 200 * time.Millisecond, Rate: 1 << 20}))
			c := dial(t, address, fmt.Sprintf("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n%s", tc.body))
			in := bufio.NewReader(c)
			answer, err := http.ReadResponse(in, nil)
			if err != nil || answer.StatusCode != http.StatusOK {
				t.Fatal(answer, err)
			}
			_, _ = io.Copy(io.Discard, answer.Body) // two bytes
			// security: N30
			if answer.Close == tc.goesOn {
				t.Errorf("the connection is closed: %v", answer.Close)
			}
			if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil && tc.goesOn {
				t.Fatal(err)
			}
			second, err := http.ReadResponse(in, nil)
			if (err == nil && second.StatusCode == http.StatusOK) != tc.goesOn {
				t.Errorf("a second request on the connection: %v", err)
			}
		})
	}
}

// A large body that keeps its rate is read to its end, however long it takes.
func TestBodyThatKeepsItsRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		result := make(chan error, 1)
		pipes, _ := servePiped(t, RespondEarly(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			_, err := io.Copy(io.Discard, r.Body)
			result <- err
		}), DefaultPace))
		const pieces = 20
		piece := make([]byte, 2*DefaultPace.Rate)
		begun := time.Now()
		c := dialPiped(t, pipes, fmt.Sprintf("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n", pieces*len(piece)))
		for range pieces {
			time.Sleep(2 * time.Second)
			if _, err := c.Write(piece); err != nil {
				t.Fatal(err)
			}
		}
		if err := <-result; err != nil || time.Since(begun) < 3*DefaultPace.Grace {
			t.Errorf("after %v: %v", time.Since(begun), err)
		}
	})
}

// A client that waits for 100 Continue is refused without one.
func TestRefusalOfABodyNotYetSent(t *testing.T) {
	address, _ := serveTimed(t, WriteTime, RespondEarly(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusForbidden)
	}), DefaultPace))
	c := dial(t, address, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\nExpect: 100-continue\r\n\r\n")
	line := make([]byte, len("HTTP/1.1 403"))
	// security: N30
	if _, err := io.ReadFull(c, line); err != nil || string(line) != "HTTP/1.1 403" {
		t.Errorf("%s, %v", line, err)
	}
}

// A client that sends its whole body before it reads, as most libraries do, receives the refusal instead of a reset.
func TestRefusalOfALargeBody(t *testing.T) {
	const size = 24 << 20 // bytes; more than the buffers of both sides
	address, _ := serveTimed(t, WriteTime, RespondEarly(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "no", http.StatusForbidden)
	}), DefaultPace))
	c := dial(t, address, fmt.Sprintf("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n", size))
	piece := make([]byte, 1<<20)
	for range size / len(piece) {
		if _, err := c.Write(piece); err != nil {
			t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond) // 10 MiB/s, and more than 2 s
	}
	answer, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	if body, err := io.ReadAll(answer.Body); answer.StatusCode != http.StatusForbidden || string(body) != "no\n" || err != nil || !answer.Close {
		t.Errorf("%d, %q, %v, closed %v", answer.StatusCode, body, err, answer.Close)
	}
}

// The rest of a refused body is read with pauses: a client that sends as fast as it can would keep a processor busy.
func TestRestOfARefusedBody(t *testing.T) {
	const size = 8 << 20
	took := make(chan time.Duration, 1)
	refuse := RespondEarly(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "no", http.StatusForbidden)
	}), DefaultPace)
	address, _ := serveTimed(t, WriteTime, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		begun := time.Now()
		refuse.ServeHTTP(w, r)
		took <- time.Since(begun)
	}))
	c := dial(t, address, fmt.Sprintf("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n", size))
	if _, err := c.Write(make([]byte, size)); err != nil {
		t.Fatal(err)
	}
	if d := <-took; d < size/writePiece*latePause {
		t.Errorf("%d bytes were read in %v", size, d)
	}
}

// The pace of a route replaces that of the listener; with both, the shorter deadline
// would end a body that keeps the longer one.
func TestOnePace(t *testing.T) {
	got := make(chan bool, 1)
	address, _ := serveTimed(t, WriteTime, RespondEarly(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		listeners := r.Body
		PaceBody(w, r, BodyPace{Grace: time.Minute})
		body, paced := r.Body.(*pacedBody)
		got <- r.Body == listeners && paced && body.pace.Grace == time.Minute && body.pace.Late == DefaultPace.Late
	}), DefaultPace))
	dial(t, address, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx")
	if !<-got {
		t.Error("both paces apply to one body")
	}
}
