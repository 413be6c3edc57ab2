package node

import (
	"bytes"
	"net/http"
	"sync"
)

// sharedAnswer makes one response at a time for all waiting requests, because anyone may
// request the metrics, and collecting them takes long. A request gets a response whose
// collection began after the request arrived.
type sharedAnswer struct {
	next http.Handler
	turn chan struct{} // capacity 1

	mu      sync.Mutex
	pending map[string]*pendingAnswer // not started yet, by the headers that it depends on
}

type pendingAnswer struct {
	header http.Header
	status int
	body   bytes.Buffer
	done   chan struct{} // closed when the response is complete
}

func newSharedAnswer(next http.Handler) *sharedAnswer {
	return &sharedAnswer{next: next, turn: make(chan struct{}, 1), pending: map[string]*pendingAnswer{}}
}

// ServeHTTP serves one request.
func (s *sharedAnswer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a, first := s.join(r)
	if first {
		s.make(a, r)
	}
	select {
	case <-a.done:
	case <-r.Context().Done():
		return
	}
	for name, values := range a.header {
		w.Header()[name] = values
	}
	if a.status != 0 {
		w.WriteHeader(a.status)
	}
	_, _ = w.Write(a.body.Bytes()) // fails only if the client has disconnected
}

// keyOf returns the headers that a response depends on.
func keyOf(r *http.Request) string {
	return r.Header.Get("Accept") + "\n" + r.Header.Get("Accept-Encoding")
}

// join returns the response that the request shares; first is set for the request that makes it.
func (s *sharedAnswer) join(r *http.Request) (a *pendingAnswer, first bool) {
	key := keyOf(r)
	s.mu.Lock()
	defer s.mu.Unlock()
	if a = s.pending[key]; a == nil {
		a, first = &pendingAnswer{header: http.Header{}, done: make(chan struct{})}, true
		s.pending[key] = a
	}
	return a, first
}

// make makes a response when it is its turn, even if its first request has been cancelled.
func (s *sharedAnswer) make(a *pendingAnswer, r *http.Request) {
	defer close(a.done)
	s.turn <- struct{}{}
	defer func() { <-s.turn }()
	s.mu.Lock()
	delete(s.pending, keyOf(r))
	s.mu.Unlock()
	s.next.ServeHTTP(a, r)
}

// Header implements http.ResponseWriter.
func (a *pendingAnswer) Header() http.Header { return a.header }

// WriteHeader implements http.ResponseWriter.
func (a *pendingAnswer) WriteHeader(status int) { a.status = status }

// Write implements http.ResponseWriter.
func (a *pendingAnswer) Write(b []byte) (int, error) { return a.body.Write(b) }
