package session

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"fleetd/internal/devices"
)

const (
	// closeAtOnce bounds the sessions that CloseAll ends at one time.
	closeAtOnce = 256
	// finishCalls is how long beyond the window a device that is let go may take
	// to answer what it was asked.
	finishCalls = 10 * time.Second
	// drainLook is how often a device that is let go is looked at: whether its
	// calls are answered, and whether it still talks.
	drainLook = 50 * time.Millisecond
	// talkPause is how long nothing may pass in a conversation before it counts
	// as over.
	talkPause = 2 * time.Second
)

// CloseAll ends every session of this node.
func (s *Hub) CloseAll(reason devices.CloseReason) {
	// Closing may write a last word, which a stuck connection does not take.
	var closing sync.WaitGroup
	places := make(chan struct{}, closeAtOnce)
	s.table.each(func(e *entry) {
		if e.session.Load() == nil && e.conversation.Load() == nil {
			return
		}
		places <- struct{}{}
		closing.Go(func() {
			defer func() { <-places }()
			if session := e.session.Load(); session != nil {
				session.Close(reason)
			}
			if c := e.conversation.Load(); c != nil {
				c.End() // its connection was lost before
			}
		})
	})
	closing.Wait()
}

// Leave sends the devices to other nodes: no more come in, and those that are
// here are let go one by one over the window, in no order, so that they do not
// all knock at the same door at once. A device first answers what it was asked;
// one that is talking stays until it pauses or the window is over. It returns
// early with ctx.
func (s *Hub) Leave(ctx context.Context, window time.Duration) {
	s.accepting.Lock()
	s.leaving = true
	s.accepting.Unlock()
	var here []*Session
	s.Sessions(func(x *Session) { here = append(here, x) })
	rand.Shuffle(len(here), func(i, j int) { here[i], here[j] = here[j], here[i] })
	begun := time.Now()
	end := begun.Add(window)
	var going sync.WaitGroup
	defer going.Wait()
	for i, x := range here {
		due := begun.Add(window * time.Duration(i) / time.Duration(len(here)))
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Until(due)):
		}
		going.Go(func() {
			x.finishTalk(ctx, end)
			x.finishCalls(ctx, end.Add(finishCalls))
			x.Close(devices.CloseDraining)
		})
	}
}

// finishTalk returns when nothing passes in the device's conversation, at the
// latest at end.
func (x *Session) finishTalk(ctx context.Context, end time.Time) {
	var last uint64
	var since time.Time
	x.until(ctx, end, func() bool {
		c := x.entry.conversation.Load()
		if c == nil || c.IsOver() {
			return true
		}
		if now := c.Traffic(); now != last || since.IsZero() {
			last, since = now, time.Now()
		}
		return time.Since(since) >= talkPause
	})
}

// finishCalls refuses new calls and returns when those before are answered.
func (x *Session) finishCalls(ctx context.Context, end time.Time) {
	x.mu.Lock()
	x.leaving = true
	x.mu.Unlock()
	x.until(ctx, end, func() bool {
		x.mu.Lock()
		defer x.mu.Unlock()
		return x.inFlight == 0
	})
}

// until looks until done says so, the session ends, or time is up.
func (x *Session) until(ctx context.Context, end time.Time, done func() bool) {
	for !done() && x.closeReason() == "" && time.Now().Before(end) && ctx.Err() == nil {
		time.Sleep(drainLook)
	}
}
