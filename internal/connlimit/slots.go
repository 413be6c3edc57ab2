package connlimit

import (
	"context"
	"runtime"
	"sync/atomic"
	"time"

	"fleetd/internal/background"
)

// slotShare is the part of the node's threads that the requests of one caller compute on at
// once, one at least. The kernel divides a processor among threads in steps of a few
// milliseconds, and prefers those that waited; Go's scheduler takes 10 ms for each request
// that computes, one after the other. So as long as threads are left, the number of one
// caller's requests does not delay those of others.
const slotShare = 4

// slotTime is how long a request keeps a slot: one that waits for a database which does not
// answer does not compute.
const slotTime = 500 * time.Millisecond

// slotsOfCaller is how many slots a caller has.
func slotsOfCaller() int { return max(1, runtime.GOMAXPROCS(0)/slotShare) }

// Slot is a place in which a request computes. It belongs to one goroutine. A nil *Slot is
// always there.
type Slot struct {
	places  chan struct{}
	threads *background.Threads
	share   chan struct{} // of the threads
	hold    *hold
}

// hold is the time from taking a place to giving it back.
type hold struct {
	places chan struct{}
	ended  atomic.Bool
	lease  *time.Timer
}

// newHold is the hold of a place that was taken.
func newHold(places chan struct{}) *hold {
	h := &hold{places: places}
	h.lease = time.AfterFunc(slotTime, h.end)
	return h
}

// leave gives the place back before its time.
func (h *hold) leave() {
	h.lease.Stop()
	h.end()
}

func (h *hold) end() {
	if h.ended.CompareAndSwap(false, true) {
		<-h.places
	}
}

// Places bound how many requests of one kind are worked on at once, of all who send them. Requests that wait
// for the same commit go on together, and as many as there are connections would delay every other
// request. It is safe for concurrent use.
type Places chan struct{}

// Enter waits for a place, and returns what gives it back, or the error of ctx. After slotTime a place
// is given back by itself. leave may be called any number of times.
func (p Places) Enter(ctx context.Context) (leave func(), err error) {
	select {
	case p <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	h := newHold(p)
	return h.leave, nil
}

// Compute waits for a slot of the caller, at most WorkWait; then it returns ErrTooMuchWork. The
// request leaves the slot at its end, and gives it back while it waits for its client. A nil
// *Work has any number.
func (w *Work) Compute(ctx context.Context, caller string) (*Slot, error) {
	if w == nil {
		return nil, nil
	}
	of := w.of(caller)
	s := &Slot{places: of.places, threads: w.Threads, share: of.threads}
	select {
	case s.places <- struct{}{}:
	default:
		w.Waited.Add(1)
		timer := time.NewTimer(w.wait)
		defer timer.Stop()
		select {
		case s.places <- struct{}{}:
		case <-timer.C:
			w.Refused.Add(1)
			return nil, ErrTooMuchWork
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	s.begin()
	return s, nil
}

func (s *Slot) begin() { s.hold = newHold(s.places) }

// threadShare is the part of the threads of lower priority that one caller has: a request keeps its
// thread while it waits for its client. Without a thread it computes at the priority of calls.
const threadShare = 2

// Run runs f, which computes in the slot, on a thread of lower priority, if the caller's share
// has one left.
func (s *Slot) Run(f func()) {
	if s == nil {
		f()
		return
	}
	select {
	case s.share <- struct{}{}:
		defer func() { <-s.share }()
		s.threads.Run(f)
	default:
		f()
	}
}

// Leave gives the slot back. Any number of times.
func (s *Slot) Leave() {
	if s == nil || s.hold == nil {
		return
	}
	s.hold.leave()
	s.hold = nil
}

// Pause gives the slot back while f waits, for a client or a device. A request that has left it
// does not take it again.
func (s *Slot) Pause(f func()) {
	if s == nil || s.hold == nil {
		f()
		return
	}
	s.Leave()
	f()
	s.places <- struct{}{} // another request has it for slotTime at most
	s.begin()
}
