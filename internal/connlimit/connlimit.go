// Package connlimit limits the connections of a front end: their rate, their number,
// the share of each address, failed logins and floods.
package connlimit

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

// ErrFull is returned by Acquire when the queue is full or the wait too long.
var ErrFull = errors.New("too many devices connect at once; try again")

// QueueLimits configure an AdmissionQueue.
type QueueLimits struct {
	Rate    float64       // connections admitted per second
	Burst   int           // admitted at once after a pause
	Waiting int           // connections that may wait; more are refused at once
	MaxWait time.Duration // longest wait in the queue
}

// AdmissionQueue admits connections at a limited rate. Connections above the rate
// wait unanswered instead of being refused, because a device that is refused may not
// reconnect until a person wakes it. It is safe for concurrent use.
type AdmissionQueue struct {
	limits  QueueLimits
	limit   *rate.Limiter
	waiting atomic.Int64
}

// NewAdmissionQueue returns an AdmissionQueue.
func NewAdmissionQueue(l QueueLimits) *AdmissionQueue {
	return &AdmissionQueue{limits: l, limit: rate.NewLimiter(rate.Limit(l.Rate), l.Burst)}
}

// Enter returns nil when the connection is admitted, or ErrFull.
func (r *AdmissionQueue) Enter(ctx context.Context) error {
	if r.limit.Allow() {
		return nil
	}
	defer r.waiting.Add(-1)
	if r.waiting.Add(1) > int64(r.limits.Waiting) {
		return ErrFull
	}
	ctx, cancel := context.WithTimeout(ctx, r.limits.MaxWait)
	defer cancel()
	if r.limit.Wait(ctx) != nil {
		return ErrFull
	}
	return nil
}

// List contains the connections of a front end and counts its tasks: one per
// connection, from Add to Remove, and those started with Go. The zero value is ready
// to use. It is safe for concurrent use.
type List[C comparable] struct {
	mu     sync.Mutex
	conns  map[C]struct{}
	closed bool
	tasks  sync.WaitGroup
}

// Add adds a connection. It returns false if the front end is closing.
func (l *List[C]) Add(c C) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	if l.conns == nil {
		l.conns = map[C]struct{}{}
	}
	l.conns[c] = struct{}{}
	l.tasks.Add(1)
	return true
}

// Remove removes a connection and ends its task. Call it once for each Add.
func (l *List[C]) Remove(c C) {
	l.mu.Lock()
	delete(l.conns, c)
	l.mu.Unlock()
	l.tasks.Done()
}

// Go runs a task that Wait waits for.
func (l *List[C]) Go(task func()) { l.tasks.Go(task) }

// Len returns the number of connections.
func (l *List[C]) Len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.conns)
}

// Append appends the connections for which pick returns true to dst. It calls pick
// with the list locked.
func (l *List[C]) Append(dst []C, pick func(C) bool) []C {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.conns {
		if pick(c) {
			dst = append(dst, c)
		}
	}
	return dst
}

// Close makes Add refuse further connections.
func (l *List[C]) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
}

// Wait waits until every connection is removed and every task has ended.
func (l *List[C]) Wait() { l.tasks.Wait() }
