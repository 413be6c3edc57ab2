// Package manager creates, shows and changes jobs for their callers, and does the fleet's
// periodic work on them: it fires schedules, writes the tasks of selections, and ends what
// has expired or been left by nodes that are lost. What devices are sent is the work of
// package runner.
package manager

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/devices/registry"
	"fleetd/internal/jobs"
	"fleetd/internal/selector"
	"fleetd/internal/tasks"
)

// Fleet is what a Manager uses of the core.
type Fleet interface {
	Guard() *access.Guard
	Permit(ctx context.Context, principal access.Principal, scope access.Scope, id devices.ID) error
	PermitMessage(ctx context.Context, principal access.Principal, body []byte) error
	Each(ctx context.Context, principal access.Principal, sel selector.Selector, f func([]devices.View) error) error
	List(ctx context.Context, q devices.ListQuery) (views []devices.View, next string, err error)
	Counts(ctx context.Context, principal access.Principal, sel selector.Selector) (devices.Counts, error)
	Views(ctx context.Context, ids []devices.ID) ([]devices.View, error)
	Catalog(ctx context.Context, h devices.Hash) (*catalog.Catalog, error)
	Registry() *registry.Registry
	// NoteChange records a change, or the attempt, in the audit.
	NoteChange(principal access.Principal, action string, id devices.ID, detail string, err error)
}

// Options of a Manager.
type Options struct {
	Store    jobs.Store
	Fleet    Fleet
	Node     string
	Instance string // of this process, as in its lease
	// Hold is as of runner.Runner.
	Hold func(id devices.ID, idle bool) (why jobs.Wait, here bool)
	// IsConnected reports whether other nodes can be reached.
	IsConnected func() bool
	Gather      devices.Gather
	// Leases reports whether nodes have leases; without them running tasks of other
	// instances are those of an earlier start.
	Leases bool
	Zone   *time.Location // of schedules without one
	// Firmware keeps and judges the images of firmware jobs.
	Firmware Firmware
	// Expire ends the phases of firmware tasks whose time has passed: rollout.Service.
	Expire func(context.Context) error
	// Owner returns the caller as whom the jobs of an owner act; ok is false if that key has ended, or is not known yet.
	Owner func(owner string) (p access.Principal, ok bool)
	// Holder tells whose key the owner of a job is.
	Holder func(key string) access.Holder
	// TakeRestored reports, once, that the database was restored, and whether as a planned move. May be nil.
	TakeRestored func() (planned, ok bool)
	// Compute waits for a place in which a page of the tasks of a selection is written, and returns what gives it back. Nil: there is always one.
	Compute func(context.Context) (leave func(), err error)
	Log     *slog.Logger
}

// Manager is safe for concurrent use.
type Manager struct {
	Options
	turn    turn
	silent  silentNodes
	gone    goneDevices
	wake    chan struct{} // capacity 1: there may be periodic work
	tasks   *tasks.Group
	stopped sync.WaitGroup
	stop    context.CancelFunc
}

// New returns a running Manager; Close stops it.
func New(o Options) *Manager {
	ctx, stop := context.WithCancel(context.Background())
	m := &Manager{Options: o, wake: make(chan struct{}, 1), tasks: tasks.New(o.Log), stop: stop}
	m.turn = newTurn(m)
	m.stopped.Go(func() { m.turn.run(ctx) })
	return m
}

// Close ends the periodic work and waits for it.
func (m *Manager) Close() {
	m.stop()
	m.stopped.Wait()
	m.tasks.Close()
	m.tasks.Wait()
}

// Poke starts the periodic work now, if this node does it. It does not block.
func (m *Manager) Poke() {
	tasks.Signal(m.wake)
}

// OnDecision ends the tasks of a device that is no longer known, together with those of others that leave meanwhile. It does not
// block; the id is empty if any device may have changed.
func (m *Manager) OnDecision(id devices.ID) {
	if id != "" && !m.Fleet.Registry().Status(id, "").Known && m.gone.add(id) {
		m.tasks.Run(m.forgetGone)
	}
}

// forgetGone ends the tasks of devices that have left, until there are none.
func (m *Manager) forgetGone() {
	for {
		ids := m.gone.take()
		if len(ids) == 0 {
			return
		}
		ids = slices.DeleteFunc(ids, func(id devices.ID) bool { return m.Fleet.Registry().Status(id, "").Known })
		ctx, cancel := context.WithTimeout(m.tasks.Context(), time.Minute)
		err := m.Store.Forget(ctx, ids...)
		cancel()
		if err != nil {
			m.Log.Warn("cannot end the tasks of forgotten devices; they expire", "devices", len(ids), "error", err)
		}
	}
}

// goneDevices are those that have left and may have tasks. It is safe for concurrent use.
type goneDevices struct {
	mu    sync.Mutex
	ids   []devices.ID
	taken bool // somebody ends the tasks, and takes what is added
}

// add reports whether the caller is to end the tasks of what was added.
func (g *goneDevices) add(id devices.ID) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.ids = append(g.ids, id)
	first := !g.taken
	g.taken = true
	return first
}

// take returns what was added since the last take; after an empty one, the next to add is to take it.
func (g *goneDevices) take() []devices.ID {
	g.mu.Lock()
	defer g.mu.Unlock()
	ids := g.ids
	g.ids, g.taken = nil, len(ids) > 0
	return ids
}

// Erase ends the tasks of a forgotten device and deletes what it answered.
func (m *Manager) Erase(ctx context.Context, id devices.ID) error {
	return errors.Join(m.Store.Forget(ctx, id), m.Store.Erase(ctx, id))
}

// job returns a job that the caller may see.
func (m *Manager) job(ctx context.Context, p access.Principal, scope access.Scope, id string) (jobs.Job, error) {
	if err := m.Fleet.Permit(ctx, p, scope, ""); err != nil {
		return jobs.Job{}, err
	}
	unknown := devices.Errorf(devices.CodeNotFound, "unknown job %q; GET /v1/jobs lists them", devices.Clip(id))
	if !jobs.IsID(id) {
		return jobs.Job{}, unknown
	}
	j, err := m.Store.Job(ctx, id)
	switch {
	case err != nil && devices.AsError(err).Code == devices.CodeNotFound:
		return j, unknown
	case err != nil:
		return j, err
	case p.Caller.OwnJobsOnly() && !p.Owns(j.Owner):
		return j, unknown
	}
	return j, nil
}
