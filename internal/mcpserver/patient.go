package mcpserver

import (
	"errors"
	"net/http"
	"strings"
	"sync"
	"time"
)

// Timing of answers.
const (
	writePatience = 10 * time.Second // a reader this slow is let go
	heartbeat     = 15 * time.Second // between signs of life on a stream, for proxies
	netBuffer     = 2048             // bytes that net/http keeps to count them
)

// patient is an answer that a slow reader cannot hold up for ever, and that
// shows signs of life while it is a silent stream of events.
type patient struct {
	inner   http.ResponseWriter
	control *http.ResponseController

	mu      sync.Mutex
	written int
	last    time.Time // of a write, or of the beginning
	begun   bool
	events  bool
	ended   bool
}

func newPatient(w http.ResponseWriter) *patient {
	now := time.Now()
	return &patient{inner: w, control: http.NewResponseController(w), last: now}
}

// Header returns the headers of the answer.
func (p *patient) Header() http.Header { return p.inner.Header() }

// WriteHeader sends the status.
func (p *patient) WriteHeader(status int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.beginLocked()
	p.inner.WriteHeader(status)
}

// Write sends bytes; the SDK writes an event in one piece.
func (p *patient) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.writeLocked(b)
}

func (p *patient) writeLocked(b []byte) (int, error) {
	if p.ended {
		return 0, http.ErrHandlerTimeout
	}
	p.beginLocked()
	p.last = time.Now()
	// Also for a short answer: there may be others in front of it that nobody reads.
	p.written += len(b)
	if err := p.control.SetWriteDeadline(p.last.Add(writePatience)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return 0, err
	}
	return p.inner.Write(b)
}

func (p *patient) beginLocked() {
	if p.begun {
		return
	}
	p.begun = true
	if p.events = strings.HasPrefix(p.inner.Header().Get("Content-Type"), "text/event-stream"); p.events {
		p.inner.Header().Set("X-Accel-Buffering", "no") // or nginx holds events back
	}
}

// due tells whether a stream was silent for long. One that is being written to
// is not.
func (p *patient) due(now time.Time) bool {
	if !p.mu.TryLock() {
		return false
	}
	defer p.mu.Unlock()
	return p.events && !p.ended && now.Sub(p.last) >= heartbeat
}

// beat writes a comment, which clients ignore.
func (p *patient) beat() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, err := p.writeLocked([]byte(":\n\n")); err == nil {
		_ = p.control.Flush() // the next write fails if the client is gone
	}
}

// Flush sends what is buffered.
func (p *patient) Flush() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.ended {
		_ = p.control.Flush() // the next write fails if the client is gone
	}
}

// abort ends a write that nobody reads, without waiting for it.
func (p *patient) abort() {
	_ = p.control.SetWriteDeadline(time.Now()) // the write ends by its own deadline if this fails
}

// end lets nobody write any more: the handler returns.
func (p *patient) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	if p.written > 0 {
		if p.written > netBuffer {
			_ = p.control.Flush() // while the deadline holds
		}
		_ = p.control.SetWriteDeadline(time.Time{}) // the connection is closed with the answer if this fails
	}
}
