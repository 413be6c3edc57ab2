// Package writequeue orders the writes of one connection. A caller that finds the
// connection idle writes on its own goroutine. Other callers add their message to a
// bounded queue, which a task writes; the task ends when the queue is empty. An idle
// connection thus has neither a writer goroutine nor a buffer.
package writequeue

import (
	"bytes"
	"errors"
	"sync"

	"fleetd/internal/devices"
)

// ErrClosed is an error of Send.
var ErrClosed = errors.New("connection is closed")

// Writer is the connection that a Queue writes to.
type Writer interface {
	// Write writes one message within a bounded time. The meaning of kind is up to
	// the connection. It is called by one goroutine at a time.
	Write(kind int, msg []byte) error
	// Go runs a task that the connection's owner waits for.
	Go(task func())
}

// Queue is the outgoing side of one connection. The zero value is ready to use. It is
// safe for concurrent use.
type Queue struct {
	mu          sync.Mutex
	closed      bool // accepts no more messages
	closeCalled bool // Close was called
	writing     bool // a caller or a task is writing
	queue       []message
	queued      int // bytes in queue
}

type message struct {
	kind int
	data []byte
}

// Hold makes messages wait in the queue until Flush, so that another message can be
// written first. Call it once, on a new Queue.
func (b *Queue) Hold() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.writing = true
}

// Send writes msg, or queues a copy of it if another write is in progress. devices.ErrOverloaded
// means that more than limit bytes would be queued. Other errors are those of the
// writer; they close the Queue, because the peer may have received a part of the
// message. After any error the peer does not receive the whole of msg.
func (b *Queue) Send(w Writer, kind int, msg []byte, limit int) error {
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
	w.Go(func() { b.Flush(w) }) // this caller does not wait for messages that others queued
	return nil
}

// Enqueue is Send for callers that must not wait: a task writes msg.
func (b *Queue) Enqueue(w Writer, kind int, msg []byte, limit int) error {
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

func (b *Queue) queueLocked(kind int, msg []byte, limit int) error {
	if b.queued+len(msg) > limit {
		return devices.ErrOverloaded
	}
	b.queue = append(b.queue, message{kind, bytes.Clone(msg)})
	b.queued += len(msg)
	return nil
}

// Flush writes the queued messages until none is left.
func (b *Queue) Flush(w Writer) {
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
				b.closeLocked() // the reader gets an error and ends the session
				b.writing = false
				b.mu.Unlock()
				return
			}
		}
	}
}

// Close drops queued messages and refuses further ones. It returns true the first time.
func (b *Queue) Close() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closeCalled {
		return false
	}
	b.closeCalled = true
	b.closeLocked()
	return true
}

func (b *Queue) closeLocked() {
	b.closed = true
	b.queue, b.queued = nil, 0
}

// IfOpen calls f unless the Queue is closed. Close waits until f returns.
func (b *Queue) IfOpen(f func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.closed {
		f()
	}
}
