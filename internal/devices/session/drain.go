package session

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
)

const (
	// closeAtOnce is how many sessions CloseAll closes concurrently.
	closeAtOnce = 256
	// callGrace is how long after the window a drained device may take to answer its
	// calls.
	callGrace = 10 * time.Second
	// drainPoll is how often a drained device is checked for open calls and an active
	// conversation.
	drainPoll = 50 * time.Millisecond
	// speechPause is how long a conversation must be without traffic to count as paused.
	speechPause = 2 * time.Second
)

// CloseAll ends every session on this node.
func (s *Hub) CloseAll(reason devices.CloseReason) {
	// Closing may write a last message, which blocks on a stuck connection.
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

// Drain moves the devices to other nodes: it accepts no new connections, and closes the
// sessions one by one over the window in random order, so that the devices do not all
// reconnect at once. A device first answers its calls; one with an active conversation
// stays until a pause or the end of the window. Drain returns early if ctx ends.
func (s *Hub) Drain(ctx context.Context, window time.Duration) {
	s.accepting.Lock()
	s.draining = true
	s.accepting.Unlock()
	var sessions []*Session
	s.Sessions(func(x *Session) { sessions = append(sessions, x) })
	rand.Shuffle(len(sessions), func(i, j int) { sessions[i], sessions[j] = sessions[j], sessions[i] })
	begun := time.Now()
	end := begun.Add(window)
	var wg sync.WaitGroup
	defer wg.Wait()
	for i, x := range sessions {
		due := begun.Add(window * time.Duration(i) / time.Duration(len(sessions)))
		if !clock.Sleep(ctx, time.Until(due)) {
			return
		}
		wg.Go(func() {
			x.awaitPause(ctx, end)
			x.awaitCalls(ctx, end.Add(callGrace))
			x.Close(devices.CloseDraining)
		})
	}
}

// awaitPause waits for a pause in the device's conversation, at most until end.
func (x *Session) awaitPause(ctx context.Context, end time.Time) {
	var last uint64
	var since time.Time
	x.pollUntil(ctx, end, func() bool {
		c := x.entry.conversation.Load()
		if c == nil || c.IsOver() {
			return true
		}
		if now := c.Traffic(); now != last || since.IsZero() {
			last, since = now, time.Now()
		}
		return time.Since(since) >= speechPause
	})
}

// awaitCalls refuses new calls and waits for those in progress.
func (x *Session) awaitCalls(ctx context.Context, end time.Time) {
	x.mu.Lock()
	x.draining = true
	x.mu.Unlock()
	x.pollUntil(ctx, end, func() bool {
		x.mu.Lock()
		defer x.mu.Unlock()
		return x.inFlight == 0
	})
}

// pollUntil waits until done returns true, the session ends, or time is up.
func (x *Session) pollUntil(ctx context.Context, end time.Time, done func() bool) {
	for !done() && x.closeReason() == "" && time.Now().Before(end) && ctx.Err() == nil {
		time.Sleep(drainPoll)
	}
}
