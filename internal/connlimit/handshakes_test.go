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
)

// handshakeServer serves TLS with LimitHandshakes.
type handshakeServer struct {
	url, address string
	slots        chan struct{}
	most         atomic.Int64 // handshakes that computed at once
	release      chan struct{}
	waiting      atomic.Int64 // requests of /wait
}

func newHandshakeServer(t *testing.T) *handshakeServer {
	t.Helper()
	h := &handshakeServer{release: make(chan struct{})}
	pattern := httptest.NewUnstartedServer(nil)
	pattern.StartTLS()
	certificates := pattern.TLS.Certificates
	pattern.Close()
	var computing atomic.Int64
	// A handshake calls this between its first read and its first write.
	compute := func(*tls.ClientHelloInfo) (*tls.Config, error) {
		h.most.Store(max(h.most.Load(), computing.Add(1)))
		time.Sleep(2 * time.Millisecond)
		computing.Add(-1)
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
	l := LimitHandshakes(s, inner)
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
	for h.waiting.Load() != int64(2*cap(h.slots)) {
		time.Sleep(time.Millisecond)
	}
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
	var others sync.WaitGroup
	for i := range 40 {
		others.Go(func() {
			if err := h.get(t, "/", i%2 == 0); err != nil {
				t.Error(err)
			}
		})
	}
	others.Wait()
	if most := h.most.Load(); most > int64(cap(h.slots)) {
		t.Errorf("%d handshakes computed at once, with %d slots", most, cap(h.slots))
	}
	close(h.release)
	requests.Wait()
	for deadline := time.Now().Add(10 * time.Second); len(h.slots) > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d slots are still taken", len(h.slots))
		}
	}
}
