package connlimit

import (
	"context"
	"errors"
	"runtime"
	"sync/atomic"
	"time"
)

// slotShare is the part of the threads that run Go code on which the requests of one caller compute at once,
// one at least, and computingShare that of all callers together, two at least, so that no caller has all of them. Go's scheduler
// takes 10 ms for each request that computes, one after the other: as long as threads are left, calls do not wait for these turns.
const (
	slotShare      = 4
	computingShare = 2
)

// slotTime is how long a request keeps a slot: one that waits for a database which does not
// answer does not compute.
const slotTime = 500 * time.Millisecond

// slotsOfCaller is how many slots a caller has.
func slotsOfCaller() int { return max(1, runtime.GOMAXPROCS(0)/slotShare) }

// Slot is a place in which a request computes, one of its caller's and one of the node's. It belongs to one goroutine. A nil *Slot is
// always there.
type Slot struct {
	ctx    context.Context // of the request
	places []Places
	hold   *hold
}

// hold is the time from taking places to giving them back.
type hold struct {
	places []Places
	ended  atomic.Bool
	lease  *time.Timer
}

// enter takes one place of each kind, in this order, or returns the cause of the end of ctx. Who came first is first.
func enter(ctx context.Context, places ...Places) (*hold, error) {
	for i, p := range places {
		select {
		case p <- struct{}{}:
		case <-ctx.Done():
			for _, taken := range places[:i] {
				<-taken
			}
			return nil, context.Cause(ctx)
		}
	}
	h := &hold{places: places}
	h.lease = time.AfterFunc(slotTime, h.end)
	return h, nil
}

// leave gives the places back before their time.
func (h *hold) leave() {
	h.lease.Stop()
	h.end()
}

func (h *hold) end() {
	if h.ended.CompareAndSwap(false, true) {
		for _, p := range h.places {
			<-p
		}
	}
}

// Places bound how many requests of one kind are worked on at once, of all who send them. Requests that wait
// for the same commit go on together, and as many as there are connections would delay every other
// request. It is safe for concurrent use.
type Places chan struct{}

// Enter waits for a place, and returns what gives it back, or the error of ctx. After slotTime a place
// is given back by itself. leave may be called any number of times.
func (p Places) Enter(ctx context.Context) (leave func(), err error) {
	h, err := enter(ctx, p)
	if err != nil {
		return nil, err
	}
	return h.leave, nil
}

// Compute waits for a slot of the caller, at most WorkWait; then it returns ErrTooMuchWork. The
// request leaves the slot at its end, and gives it back while it waits for its client. A nil
// *Work has any number.
func (w *Work) Compute(ctx context.Context, caller string) (*Slot, error) {
	if w == nil {
		return nil, nil
	}
	s := &Slot{ctx: ctx, places: []Places{w.of(caller).places, w.Computing}}
	for _, p := range s.places {
		if len(p) == cap(p) {
			w.Waited.Add(1)
			break
		}
	}
	waiting, cancel := context.WithTimeoutCause(ctx, w.wait, ErrTooMuchWork)
	defer cancel()
	var err error
	if s.hold, err = enter(waiting, s.places...); err != nil {
		if errors.Is(err, ErrTooMuchWork) {
			w.Refused.Add(1)
		}
		return nil, err
	}
	return s, nil
}

// Leave gives the slot back. Any number of times.
func (s *Slot) Leave() {
	if s == nil || s.hold == nil {
		return
	}
	s.hold.leave()
	s.hold = nil
}

// Pause gives the slot back while f waits, for a client or a device. A request that has left it, or
// whose client has gone, does not take it again.
func (s *Slot) Pause(f func()) {
	if s == nil || s.hold == nil {
		f()
		return
	}
	s.Leave()
	f()
	s.hold, _ = enter(s.ctx, s.places...) // others have theirs for slotTime at most
}
