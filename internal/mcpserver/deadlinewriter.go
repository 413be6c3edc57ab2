package mcpserver

import (
	"errors"
	"net/http"
	"strings"
	"sync"
	"time"
)

// Timing of responses.
const (
	writeTimeout = 10 * time.Second // per write; slower clients are disconnected
	heartbeat    = 15 * time.Second // between heartbeats on a stream, which keep proxies from closing it
	netBuffer    = 2048             // bytes that net/http buffers to compute Content-Length
)

// deadlineWriter is a response with a deadline for each write, and with heartbeats
// while it is an idle event stream.
type deadlineWriter struct {
	inner   http.ResponseWriter
	control *http.ResponseController

	mu      sync.Mutex
	written int
	last    time.Time // last write, or the start
	started bool
	events  bool
	ended   bool
}

func newDeadlineWriter(w http.ResponseWriter) *deadlineWriter {
	now := time.Now()
	return &deadlineWriter{inner: w, control: http.NewResponseController(w), last: now}
}

// Header returns the headers of the response.
func (p *deadlineWriter) Header() http.Header { return p.inner.Header() }

// WriteHeader sends the status.
func (p *deadlineWriter) WriteHeader(status int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.startLocked()
	p.inner.WriteHeader(status)
}

// Write sends bytes; the SDK writes each event with one call.
func (p *deadlineWriter) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.writeLocked(b)
}

func (p *deadlineWriter) writeLocked(b []byte) (int, error) {
	if p.ended {
		return 0, http.ErrHandlerTimeout
	}
	p.startLocked()
	p.last = time.Now()
	// Short responses need a deadline, too: unread ones before them may fill the buffers.
	p.written += len(b)
	if err := p.control.SetWriteDeadline(p.last.Add(writeTimeout)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return 0, err
	}
	return p.inner.Write(b)
}

func (p *deadlineWriter) startLocked() {
	if p.started {
		return
	}
	p.started = true
	if p.events = strings.HasPrefix(p.inner.Header().Get("Content-Type"), "text/event-stream"); p.events {
		p.inner.Header().Set("X-Accel-Buffering", "no") // else nginx buffers events
	}
}

// heartbeatDue reports whether a heartbeat is due. It returns false while a write is in
// progress.
func (p *deadlineWriter) heartbeatDue(now time.Time) bool {
	if !p.mu.TryLock() {
		return false
	}
	defer p.mu.Unlock()
	return p.events && !p.ended && now.Sub(p.last) >= heartbeat
}

// writeHeartbeat writes a comment, which clients ignore.
func (p *deadlineWriter) writeHeartbeat() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, err := p.writeLocked([]byte(":\n\n")); err == nil {
		_ = p.control.Flush() // the next write fails if the client has disconnected
	}
}

// Flush sends buffered bytes.
func (p *deadlineWriter) Flush() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.ended {
		_ = p.control.Flush() // the next write fails if the client has disconnected
	}
}

// abort makes a blocked write fail, without waiting for it.
func (p *deadlineWriter) abort() {
	_ = p.control.SetWriteDeadline(time.Now()) // if this fails, the write ends by its own deadline
}

// end refuses further writes, and returns how many bytes were written; the handler is about to return.
func (p *deadlineWriter) end() (sent int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	if p.written > 0 {
		if p.written > netBuffer {
			_ = p.control.Flush() // while the deadline is set
		}
		_ = p.control.SetWriteDeadline(time.Time{}) // if this fails, the connection is closed with the response
	}
	return int64(p.written)
}
