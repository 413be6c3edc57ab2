// Package tasks runs goroutines that a group waits for, and contains their panics.
package tasks

import (
	"context"
	"log/slog"
	"runtime/debug"
	"sync"
)

// Group runs tasks until it is closed. Its methods are safe for concurrent use.
type Group struct {
	log     *slog.Logger
	ctx     context.Context
	stop    context.CancelFunc
	running sync.WaitGroup
	mu      sync.RWMutex // no task starts once closing is set
	closing bool
}

// New returns a Group that logs panics of its tasks.
func New(log *slog.Logger) *Group {
	g := &Group{log: log}
	g.ctx, g.stop = context.WithCancel(context.Background())
	return g
}

// Context returns a context that ends with Wait; tasks must then return.
func (g *Group) Context() context.Context { return g.ctx }

// Run starts a task that Wait waits for; it reports false if the group is closing. It never blocks: callers
// may hold locks.
func (g *Group) Run(task func()) bool {
	if !g.mu.TryRLock() { // only Close holds it for writing
		return false
	}
	defer g.mu.RUnlock()
	if g.closing {
		return false
	}
	g.running.Go(func() {
		defer Contain(g.log, nil)
		task()
	})
	return true
}

// Close prevents new tasks. It does not wait.
func (g *Group) Close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closing = true
}

// Wait ends Context and waits for the tasks. Call it after Close.
func (g *Group) Wait() {
	g.stop()
	g.running.Wait()
}

// Contain recovers a panic of the goroutine that defers it, logs it, and calls after unless that is nil: a bug that one device
// triggers must not end the sessions of all others.
func Contain(log *slog.Logger, after func()) {
	if fault := recover(); fault != nil {
		log.Error("internal error (bug), please report it", "panic", fault, "stack", string(debug.Stack()))
		if after != nil {
			after()
		}
	}
}

// Signal wakes the goroutine that waits for a channel of capacity 1, or that will: once, however often it is called before.
func Signal(wake chan<- struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}
