// Package lobby is the entrance of a front end: the room where connections wait
// when too many come at once, and the list of those that are in.
package lobby

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

// ErrFull is what those hear who do not get a place, or wait too long for
// their turn.
var ErrFull = errors.New("too many devices connect at once; try again")

// Limits of a Room.
type Limits struct {
	Rate     float64       // connections let in per second
	Burst    int           // at once, after a pause
	Waiting  int           // connections that may wait; more are refused at once
	Patience time.Duration // longest wait
}

// Room lets connections in at a rate. Above it they wait unanswered instead of
// being refused, since a refused device may not come back until someone wakes
// it. It is safe for concurrent use.
type Room struct {
	limits  Limits
	limit   *rate.Limiter
	waiting atomic.Int64
}

// NewRoom returns a Room.
func NewRoom(l Limits) *Room {
	return &Room{limits: l, limit: rate.NewLimiter(rate.Limit(l.Rate), l.Burst)}
}

// Enter returns when it is the caller's turn, or with ErrFull.
func (r *Room) Enter(ctx context.Context) error {
	if r.limit.Allow() {
		return nil
	}
	defer r.waiting.Add(-1)
	if r.waiting.Add(1) > int64(r.limits.Waiting) {
		return ErrFull
	}
	ctx, cancel := context.WithTimeout(ctx, r.limits.Patience)
	defer cancel()
	if r.limit.Wait(ctx) != nil {
		return ErrFull
	}
	return nil
}

// List is the connections of a front end, and the tasks that it has to wait
// for: one per connection, from Add to Remove, and those started with Go. The
// zero value is ready; it is safe for concurrent use.
type List[C comparable] struct {
	mu     sync.Mutex
	in     map[C]struct{}
	closed bool
	tasks  sync.WaitGroup
}

// Add puts a connection on the list; false if the front end is closing.
func (l *List[C]) Add(c C) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	if l.in == nil {
		l.in = map[C]struct{}{}
	}
	l.in[c] = struct{}{}
	l.tasks.Add(1)
	return true
}

// Remove takes a connection off the list; its task ends with that. Call it once
// for each Add.
func (l *List[C]) Remove(c C) {
	l.mu.Lock()
	delete(l.in, c)
	l.mu.Unlock()
	l.tasks.Done()
}

// Go runs a task that Wait waits for.
func (l *List[C]) Go(task func()) { l.tasks.Go(task) }

// Len is the number of connections.
func (l *List[C]) Len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.in)
}

// Append appends the connections that pick chooses; it is called with the list
// locked.
func (l *List[C]) Append(dst []C, pick func(C) bool) []C {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.in {
		if pick(c) {
			dst = append(dst, c)
		}
	}
	return dst
}

// Close refuses further connections.
func (l *List[C]) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
}

// Wait returns when every connection is removed and every task has ended.
func (l *List[C]) Wait() { l.tasks.Wait() }
