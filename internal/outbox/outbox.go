// Package outbox orders the writes of one connection: whoever finds it free
// writes on its own goroutine, others leave their message in a bounded queue,
// and what gathers there is written by a task that ends when it is empty. An
// idle connection has no parked writer and no buffer.
package outbox

import (
	"bytes"
	"errors"
	"sync"
)

// Errors of Send.
var (
	ErrClosed = errors.New("connection is closed")
	ErrFull   = errors.New("too many bytes wait for this connection")
)

// Writer is the connection behind a Box.
type Writer interface {
	// Write writes one message of a kind that only the connection knows,
	// within a bounded time. It is called by one goroutine at a time.
	Write(kind int, msg []byte) error
	// Go runs a task that the connection's owner waits for.
	Go(task func())
}

// Box is the outgoing side of one connection. The zero value is ready; it is
// safe for concurrent use.
type Box struct {
	mu      sync.Mutex
	closed  bool // takes nothing more
	told    bool // Close was called
	writing bool // someone owns the write side
	queue   []message
	queued  int // bytes in queue
}

type message struct {
	kind int
	data []byte
}

// Hold takes the write side before anything is sent: messages queue until
// Flush. Call it once, on a fresh Box.
func (b *Box) Hold() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.writing = true
}

// Send writes msg, or queues a copy behind what is being written. ErrFull
// means that more than limit bytes would wait; other errors are the writer's,
// after which the Box is closed: the peer may have got a part, and what would
// follow it is not what it waits for. Any error means that the peer does not
// get the whole of msg.
func (b *Box) Send(w Writer, kind int, msg []byte, limit int) error {
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return ErrClosed
	}
	if b.writing {
		defer b.mu.Unlock()
		return b.queueLocked(kind, msg, limit)
	}
	b.writing = true
	b.mu.Unlock()
	err := w.Write(kind, msg)
	b.mu.Lock()
	defer b.mu.Unlock()
	if err != nil {
		b.closeLocked()
	}
	if b.closed || len(b.queue) == 0 {
		b.writing = false
		return err
	}
	w.Go(func() { b.Flush(w) }) // what came meanwhile is not this caller's to wait for
	return nil
}

// Queue is Send for callers that must not wait: a task writes msg.
func (b *Box) Queue(w Writer, kind int, msg []byte, limit int) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return ErrClosed
	}
	err := b.queueLocked(kind, msg, limit)
	if err == nil && !b.writing {
		b.writing = true
		w.Go(func() { b.Flush(w) })
	}
	return err
}

func (b *Box) queueLocked(kind int, msg []byte, limit int) error {
	if b.queued+len(msg) > limit {
		return ErrFull
	}
	b.queue = append(b.queue, message{kind, bytes.Clone(msg)})
	b.queued += len(msg)
	return nil
}

// Flush writes what is queued and gives the write side back.
func (b *Box) Flush(w Writer) {
	for {
		b.mu.Lock()
		queue := b.queue
		b.queue, b.queued = nil, 0
		if len(queue) == 0 || b.closed {
			b.writing = false
			b.mu.Unlock()
			return
		}
		b.mu.Unlock()
		for _, m := range queue {
			if w.Write(m.kind, m.data) != nil {
				b.mu.Lock()
				b.closeLocked() // the reader sees the broken connection and ends the session
				b.writing = false
				b.mu.Unlock()
				return
			}
		}
	}
}

// Close drops what is queued and refuses more; true the first time.
func (b *Box) Close() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.told {
		return false
	}
	b.told = true
	b.closeLocked()
	return true
}

func (b *Box) closeLocked() {
	b.closed = true
	b.queue, b.queued = nil, 0
}

// IfOpen calls f unless the Box is closed, and holds Close off meanwhile.
func (b *Box) IfOpen(f func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.closed {
		f()
	}
}
