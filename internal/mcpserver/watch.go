package mcpserver

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/devices"
)

const (
	watchQueue = 1024            // events that wait for slow sessions
	watchAgain = 2 * time.Second // after the stream broke off
)

// watch reads the fleet's events once for all sessions of this node.
type watch struct {
	events Events
	log    *slog.Logger
	notify func(devices.StreamEvent)
	wants  func(devices.ID) bool
	report func(devices.ID) // that a device said something of itself
	queue  chan devices.StreamEvent
	missed atomic.Bool // events did not fit: anything may have changed

	mu      sync.Mutex
	waiters map[devices.ID]map[chan struct{}]struct{}
}

func newWatch(events Events, log *slog.Logger, wants func(devices.ID) bool, report func(devices.ID), notify func(devices.StreamEvent)) *watch {
	return &watch{events: events, log: log, wants: wants, report: report, notify: notify, queue: make(chan devices.StreamEvent, watchQueue),
		waiters: map[devices.ID]map[chan struct{}]struct{}{}}
}

// follow reads until ctx ends.
func (w *watch) follow(ctx context.Context) {
	var last devices.EventPosition
	for ctx.Err() == nil {
		err := w.events.Follow(ctx, devices.EventQuery{After: last}, func(e devices.StreamEvent) error {
			last = e.ID
			w.take(e)
			return nil
		})
		if ctx.Err() != nil {
			return
		}
		w.log.Debug("the event stream broke off", "error", err)
		if last == (devices.EventPosition{}) { // what happens until it is back cannot be asked for
			w.missed.Store(true)
		}
		select {
		case <-ctx.Done():
		case <-time.After(watchAgain):
		}
	}
}

// take passes one event on and never waits.
func (w *watch) take(e devices.StreamEvent) {
	w.mu.Lock()
	for ch := range w.waiters[e.Device] {
		select {
		case ch <- struct{}{}:
		default: // it has yet to look at the one before
		}
	}
	w.mu.Unlock()
	switch e.Kind {
	case devices.EventOnline, devices.EventCatalog, devices.EventPending:
		w.report(e.Device)
	}
	if !e.Gap && !w.wants(e.Device) {
		return
	}
	select {
	case w.queue <- e:
	default:
		w.missed.Store(true)
	}
}

// tell passes the events on to sessions until ctx ends.
func (w *watch) tell(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case e := <-w.queue:
			if w.missed.Swap(false) {
				e.Gap = true
			}
			w.notify(e)
		}
	}
}

// wait returns a channel that tells of events of one device.
func (w *watch) wait(id devices.ID) (happened <-chan struct{}, end func()) {
	ch := make(chan struct{}, 1)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.waiters[id] == nil {
		w.waiters[id] = map[chan struct{}]struct{}{}
	}
	w.waiters[id][ch] = struct{}{}
	return ch, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.waiters[id], ch)
		if len(w.waiters[id]) == 0 {
			delete(w.waiters, id)
		}
	}
}
