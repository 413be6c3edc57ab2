package webhooks

import (
	"context"
	"errors"
	"slices"
	"sync"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/tasks"
)

// reader reads the event streams once, for all webhooks of the node that keep up with it.
type reader struct {
	m       *Manager
	started chan struct{} // capacity 1: it has a webhook

	mu      sync.Mutex // comes before worker.mu
	at      devices.EventPosition
	reading bool
	workers []*worker
}

// errUnused ends the reading.
var errUnused = errors.New("no webhook reads the streams")

// noWait is an ended context: rights are judged by what is in memory.
var noWait = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// join gives a worker to the reader, if the worker has read all that the reader has. Otherwise it has to catch up first.
func (r *reader) join(w *worker) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.read == (devices.EventPosition{}) || w.ctx.Err() != nil {
		return false
	}
	if !r.reading {
		r.at, r.reading = w.read, true
		tasks.Signal(r.started)
	}
	for i, seq := range r.at {
		if w.read[i] < seq {
			return false
		}
	}
	w.shared = true
	r.workers = append(r.workers, w)
	return true
}

// leave takes a worker from the reader.
func (r *reader) leave(w *worker) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.workers = slices.DeleteFunc(r.workers, func(other *worker) bool { return other == w })
}

// run reads while there are webhooks.
func (r *reader) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.started:
		}
		for {
			r.mu.Lock()
			at := r.at
			r.mu.Unlock()
			if err := r.m.opt.Events.Follow(ctx, devices.EventQuery{After: at}, r.event); errors.Is(err, errUnused) {
				break
			}
			if !clock.Sleep(ctx, followPause) {
				return
			}
		}
	}
}

// event gives an event to the workers. One whose window is full leaves, so that no other waits for it.
func (r *reader) event(e devices.StreamEvent) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.workers) == 0 {
		r.reading = false
		return errUnused
	}
	before := r.at
	r.at = e.ID
	r.workers = slices.DeleteFunc(r.workers, func(w *worker) bool { return !r.give(w, e, before) })
	return nil
}

// give reports whether the worker has taken the event. A bug that the event triggers ends this worker alone.
func (r *reader) give(w *worker, e devices.StreamEvent, before devices.EventPosition) (taken bool) {
	defer func() {
		if !taken {
			w.leftReader()
		}
	}()
	defer tasks.Contain(r.m.opt.Log, w.broke)
	err := w.take(&e, before)
	if err != nil && !errors.Is(err, errFull) {
		w.cancel()
	}
	return err == nil
}
