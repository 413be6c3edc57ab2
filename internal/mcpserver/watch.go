package mcpserver

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/tasks"
)

const (
	watchQueue = 1024            // events that wait for slow sessions
	watchRetry = 2 * time.Second // before a broken stream is opened again
)

// watch reads the fleet's events once for all sessions of this node.
type watch struct {
	events      Events
	log         *slog.Logger
	notify      func(devices.StreamEvent)
	needsEvents func(devices.ID) bool
	onReport    func(devices.ID) // called when a device reported a change of its own data
	queue       chan devices.StreamEvent
	dropped     atomic.Bool // events were dropped: anything may have changed

	mu      sync.Mutex
	waiters map[devices.ID]map[chan struct{}]struct{}
}

func newWatch(events Events, log *slog.Logger, wants func(devices.ID) bool, report func(devices.ID), notify func(devices.StreamEvent)) *watch {
	return &watch{events: events, log: log, needsEvents: wants, onReport: report, notify: notify, queue: make(chan devices.StreamEvent, watchQueue),
		waiters: map[devices.ID]map[chan struct{}]struct{}{}}
}

// follow reads events until ctx ends.
func (w *watch) follow(ctx context.Context) {
	var last devices.EventPosition
	for ctx.Err() == nil {
		err := w.events.Follow(ctx, devices.EventQuery{After: last, NoJobs: true}, func(e devices.StreamEvent) error {
			last = e.ID
			w.accept(e)
			return nil
		})
		if ctx.Err() != nil {
			return
		}
		w.log.Debug("the event stream was interrupted; reopening it", "error", err)
		if last == (devices.EventPosition{}) { // without a position, missed events cannot be read later
			w.dropped.Store(true)
		}
		clock.Sleep(ctx, watchRetry)
	}
}

// accept passes on one event and never blocks.
func (w *watch) accept(e devices.StreamEvent) {
	w.mu.Lock()
	for ch := range w.waiters[e.Device] {
		tasks.Signal(ch)
	}
	w.mu.Unlock()
	switch e.Kind {
	case devices.EventOnline, devices.EventCatalog, devices.EventPending:
		w.onReport(e.Device)
	}
	if !e.Gap && !w.needsEvents(e.Device) {
		return
	}
	select {
	case w.queue <- e:
	default:
		w.dropped.Store(true)
	}
}

// deliver passes queued events to sessions until ctx ends.
func (w *watch) deliver(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case e := <-w.queue:
			if w.dropped.Swap(false) {
				e.Gap = true
			}
			w.notify(e)
		}
	}
}

// wait returns a channel that signals events of one device.
func (w *watch) wait(id devices.ID) (event <-chan struct{}, end func()) {
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
