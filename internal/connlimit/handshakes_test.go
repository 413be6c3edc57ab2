package connlimit

import (
	"context"
	"crypto/tls"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"fleetd/internal/devicetest"
)

// handshakeServer serves TLS with LimitHandshakes.
type handshakeServer struct {
	url, address string
	slots        chan struct{}
	begun        atomic.Int64 // connections that have sent something
	computing    atomic.Int64
	most         atomic.Int64  // handshakes that computed at once
	finish       chan struct{} // one handshake ends its computation for each value
	waiting      atomic.Int64  // requests of /wait
	release      chan struct{}
}

// begunConn counts its connection with its first read.
type begunConn struct {
	net.Conn
	once  sync.Once
	begun *atomic.Int64
}

func (c *begunConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.once.Do(func() { c.begun.Add(1) })
	}
	return n, err
}

type begunListener struct {
	net.Listener
	begun *atomic.Int64
}

func (l begunListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &begunConn{Conn: c, begun: l.begun}, nil
}

func newHandshakeServer(t *testing.T) *handshakeServer {
	t.Helper()
	h := &handshakeServer{finish: make(chan struct{}), release: make(chan struct{})}
	pattern := httptest.NewUnstartedServer(nil)
	pattern.StartTLS()
	certificates := pattern.TLS.Certificates
	pattern.Close()
	var mu sync.Mutex
	// A handshake calls this between its first read and its first write.
	compute := func(*tls.ClientHelloInfo) (*tls.Config, error) {
		mu.Lock()
		h.most.Store(max(h.most.Load(), h.computing.Add(1)))
		mu.Unlock()
		<-h.finish
		h.computing.Add(-1)
		return nil, nil
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/wait", func(http.ResponseWriter, *http.Request) {
		h.waiting.Add(1)
		<-h.release
	})
	s := &http.Server{Handler: mux, ErrorLog: log.New(io.Discard, "", 0), TLSConfig: &tls.Config{Certificates: certificates, GetConfigForClient: compute}}
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := LimitHandshakes(s, begunListener{inner, &h.begun})
	h.slots, h.address, h.url = l.(*handshakeListener).slots, inner.Addr().String(), "https://"+inner.Addr().String()
	var serving sync.WaitGroup
	serving.Go(func() { _ = s.ServeTLS(l, "", "") })
	t.Cleanup(func() {
		_ = s.Close()
		serving.Wait()
	})
	return h
}

// get sends a request over a connection of its own.
func (h *handshakeServer) get(t *testing.T, path string, http2 bool) error {
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true, ForceAttemptHTTP2: http2}
	defer transport.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, h.url+path, nil)
	if err != nil {
		return err
	}
	response, err := (&http.Client{Transport: transport}).Do(r)
	if err != nil {
		return err
	}
	return response.Body.Close()
}

// finishAll ends the computations of n handshakes.
func (h *handshakeServer) finishAll(t *testing.T, n int) {
	t.Helper()
	for range n {
		select {
		case h.finish <- struct{}{}:
		case <-time.After(30 * time.Second):
			t.Fatal("no handshake computes")
		}
	}
}

// As many handshakes compute at once as there are slots, and requests that are worked on, silent clients and failed
// handshakes have none.
func TestLimitHandshakes(t *testing.T) {
	h := newHandshakeServer(t)
	var requests sync.WaitGroup
	for i := range 2 * cap(h.slots) {
		requests.Go(func() {
			if err := h.get(t, "/wait", i%2 == 0); err != nil {
				t.Error(err)
			}
		})
	}
	h.finishAll(t, 2*cap(h.slots))
	devicetest.Eventually(t, "all requests wait", func() bool { return h.waiting.Load() == int64(2*cap(h.slots)) })
	for i, sent := range []string{"", "\x16\x03\x01\x02\x00\x01", "GET / HTTP/1.1\r\n\r\n", "\x16\x03\x01\x00\x02\x01\x00"} {
		c, err := net.Dial("tcp", h.address)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		_, _ = io.WriteString(c, sent)
		if i%2 == 0 {
			_ = c.Close()
		}
	}
	begun := int64(2*cap(h.slots)) + 3 // all of those but the one that sends nothing
	devicetest.Eventually(t, "what the others sent was read", func() bool { return h.begun.Load() == begun })
	const count = 40
	var others sync.WaitGroup
	for i := range count {
		others.Go(func() {
			if err := h.get(t, "/", i%2 == 0); err != nil {
				t.Error(err)
			}
		})
	}
	devicetest.Eventually(t, "all handshakes have begun, and as many as there are slots compute", func() bool {
		return h.begun.Load() == begun+count && h.computing.Load() >= int64(cap(h.slots))
	})
	h.finishAll(t, count)
	others.Wait()
	if most := h.most.Load(); most != int64(cap(h.slots)) {
		t.Errorf("%d handshakes computed at once, with %d slots", most, cap(h.slots))
	}
	close(h.release)
	requests.Wait()
	devicetest.Eventually(t, "no slot is taken", func() bool { return len(h.slots) == 0 })
}
