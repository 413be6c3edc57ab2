// Package lease keeps the lease of a node in the database and watches those of the others: nodes that no longer renew
// theirs are lost, and one of the others marks their devices as offline.
package lease

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/counters"
	"fleetd/internal/devices"
	"fleetd/internal/tasks"
	"fleetd/internal/timescale"
)

// Lifetime is the time after which a node that observes no renewal of a lease, by its own clock, declares the other
// node lost.
var Lifetime = timescale.Of(15 * time.Second)

var (
	answerTime   = timescale.Of(2 * time.Second)        // for responses of other nodes to a claim
	newNodeEvery = timescale.Of(500 * time.Millisecond) // between looks for nodes that have just started
	orphanEvery  = timescale.Of(time.Minute)            // between checks for devices of nodes without a lease
)

const (
	beatsPerLifetime = 5
	// cleanupLifetimes is how many lifetimes pass before the next node takes over the cleanup after a lost one.
	cleanupLifetimes = 2
	// cleanupLimit is the time limit for the cleanup after one lost node, before it is tried again.
	cleanupLimit = time.Minute
)

// Database has the leases and the devices that nodes hold. Implementations are safe for concurrent use.
type Database interface {
	// Beat writes the lease and returns all; begun is set if it was not there.
	Beat(ctx context.Context, l devices.Lease) (leases []devices.Lease, begun bool, err error)
	Leases(ctx context.Context) ([]devices.Lease, error)
	// EndLease deletes a lease; DropNode does so for a node that holds no device.
	EndLease(ctx context.Context, l devices.Lease) error
	DropNode(ctx context.Context, l devices.Lease) error
	NodesWithoutLease(ctx context.Context) ([]string, error)
	OnlineOf(ctx context.Context, node string, after devices.ID, limit int) ([]devices.Presence, error)
}

// Fleet acts for nodes that are lost, this one or another. Implementations are safe for concurrent use.
type Fleet interface {
	// Reassert claims the devices of this node, so that nodes that now hold one respond; Reannounce publishes them as online.
	Reassert()
	Reannounce()
	// MarkNodeLost marks the devices of a node as offline, but for those that this node holds.
	MarkNodeLost(ctx context.Context, node string, online func(ctx context.Context, node string, after devices.ID, limit int) ([]devices.Presence, error)) (marked int, err error)
}

// Options of New. All are required.
type Options struct {
	Node     string
	Version  string
	Started  time.Time
	Lifetime time.Duration
	Database Database
	Devices  func() int    // how many are connected to this node
	API      func() string // the address of this node's API
	// Refresh reads the changes of the registry, after each renewal: they arrive so even while NATS is away. The next
	// renewals do not wait for it.
	Refresh func(ctx context.Context)
	// IsConnected reports whether the other nodes can be reached.
	IsConnected func() bool
	Log         *slog.Logger
}

// Nodes contains the nodes of the fleet as this node observes them. Its methods are safe for concurrent use.
type Nodes struct {
	opt   Options
	every time.Duration // between renewals
	fleet Fleet         // from Run on
	lease devices.Lease

	lost     atomic.Int64 // nodes declared lost by this node
	hadLease bool         // a lease was written
	lostAt   time.Time    // when this node learned that it was declared lost; zero after it has announced its devices again

	// beatAt is when the last renewal of the lease that succeeded was begun.
	beatAt atomic.Pointer[time.Time]

	start readLeases // before the first beat
	since readLeases // after it, for a node that is not among the latest

	mu       sync.Mutex
	latest   []devices.Lease
	monitor  Monitor
	cleaning map[string]bool // cleanups in progress, by instance, or by name for orphaned devices
	tasks    sync.WaitGroup
}

// New returns the nodes before any was observed. It does no I/O.
func New(opt Options) *Nodes {
	m := &Nodes{opt: opt, every: opt.Lifetime / beatsPerLifetime, cleaning: map[string]bool{},
		lease: devices.Lease{Node: opt.Node, Instance: rand.Text(), Started: opt.Started, Version: opt.Version}}
	m.start.every, m.since.every = m.every, newNodeEvery
	m.monitor = m.newMonitor()
	return m
}

func (m *Nodes) newMonitor() Monitor {
	return Monitor{Self: m.lease, Every: m.every, Lifetime: m.opt.Lifetime, CleanupDelay: cleanupLifetimes * m.opt.Lifetime}
}

// Instance identifies this process of the node.
func (m *Nodes) Instance() string { return m.lease.Instance }

// Run renews the lease and cleans up after lost nodes until ctx ends, and then deletes the lease.
func (m *Nodes) Run(ctx context.Context, fleet Fleet) {
	m.fleet = fleet
	defer m.tasks.Wait()
	renewed := make(chan struct{}, 1)
	m.tasks.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-renewed:
				m.opt.Refresh(ctx)
			}
		}
	})
	ticker := time.NewTicker(m.every)
	defer ticker.Stop()
	orphanTick := time.NewTicker(orphanEvery)
	defer orphanTick.Stop()
	var suspects []string
	twice := false
	for {
		lost, err := m.beat(ctx)
		if err == nil {
			tasks.Signal(renewed)
		}
		switch {
		case errors.Is(err, errNodeTwice):
			if !twice {
				m.opt.Log.Error("another node of the fleet has the same name; set a different --node on each")
			}
			twice = true
		case err == nil:
			twice = false
		}
		for _, l := range lost {
			m.cleanUpLost(ctx, l)
		}
		m.reannounce()
		select {
		case <-ctx.Done():
			end, cancel := context.WithTimeout(context.Background(), m.every)
			defer cancel()
			if err := m.opt.Database.EndLease(end, m.lease); err != nil {
				m.opt.Log.Debug("cannot delete the lease", "error", err)
			}
			return
		case <-orphanTick.C:
			suspects = m.cleanUpOrphaned(ctx, suspects)
		case <-ticker.C:
		}
	}
}

var errNodeTwice = errors.New("another node has this name")

// beat renews the lease and returns the leases that were not renewed for their lifetime.
func (m *Nodes) beat(ctx context.Context) (lost []devices.Lease, err error) {
	m.lease.Beat++
	m.lease.Devices, m.lease.API = m.opt.Devices(), m.opt.API()
	asked := time.Now()
	leases, begun, err := m.opt.Database.Beat(ctx, m.lease)
	if err != nil {
		return nil, err
	}
	m.beatAt.Store(&asked)
	now := time.Now()
	if begun && m.hadLease {
		m.opt.Log.Warn("other nodes declared this node lost")
		m.fleet.Reassert() // nodes that now hold its devices respond
		m.lostAt = now
	}
	m.hadLease = true
	m.mu.Lock()
	defer m.mu.Unlock()
	m.latest = leases
	lost, twice := m.monitor.Observe(leases, now)
	if twice {
		err = errNodeTwice
	}
	return lost, err
}

// reannounce announces the devices of this node after it was declared lost, when the other
// nodes have had time to respond.
func (m *Nodes) reannounce() {
	if m.lostAt.IsZero() || time.Since(m.lostAt) < answerTime || !m.opt.IsConnected() {
		return
	}
	m.lostAt = time.Time{}
	m.fleet.Reannounce()
}

// runCleanup runs a cleanup after a node, at most one per node at a time, in a goroutine, so that
// this node's own lease is renewed meanwhile.
func (m *Nodes) runCleanup(ctx context.Context, name string, task func(ctx context.Context)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.cleaning[name] {
		return
	}
	m.cleaning[name] = true
	m.tasks.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, cleanupLimit)
		defer cancel()
		task(ctx)
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.cleaning, name)
	})
}

// cleanUpLost marks the devices of a lost node, then deletes its lease.
func (m *Nodes) cleanUpLost(ctx context.Context, l devices.Lease) {
	m.runCleanup(ctx, l.Instance, func(ctx context.Context) {
		lost, err := m.fleet.MarkNodeLost(ctx, l.Node, m.opt.Database.OnlineOf)
		// If it is still running, it must learn that it was declared lost.
		end := m.opt.Database.DropNode
		if lost > 0 {
			end = m.opt.Database.EndLease
		}
		if err == nil || lost > 0 {
			err = errors.Join(err, end(ctx, l))
		}
		if err != nil {
			m.opt.Log.Warn("cannot clean up after a lost node; trying again", "lost", l.Node, "devices", lost, "error", err)
			return
		}
		m.lost.Add(1)
		m.opt.Log.Warn("node lost", "lost", l.Node, "devices", lost)
	})
}

// cleanUpOrphaned cleans up devices of nodes that have no lease now and had none at the
// previous check: these nodes could not write their last rows.
func (m *Nodes) cleanUpOrphaned(ctx context.Context, before []string) (now []string) {
	now, err := m.opt.Database.NodesWithoutLease(ctx)
	if err != nil {
		return nil
	}
	for _, name := range now {
		if !slices.Contains(before, name) {
			continue
		}
		m.runCleanup(ctx, name, func(ctx context.Context) {
			lost, err := m.fleet.MarkNodeLost(ctx, name, m.opt.Database.OnlineOf)
			m.opt.Log.Warn("devices of a node without a lease are marked offline", "lost", name, "devices", lost, "error", err)
		})
	}
	return now
}

// Others reports whether another node is alive that devices can use. It reads the leases,
// so that a node that has just started counts.
func (m *Nodes) Others(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, m.every)
	defer cancel()
	leases, err := m.opt.Database.Leases(ctx)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err != nil {
		leases = m.latest
	}
	return slices.ContainsFunc(leases, func(l devices.Lease) bool {
		return l.Node != m.lease.Node && m.monitor.IsAlive(l, time.Now())
	})
}

// All returns the nodes with a lease, the latest start of each; always including this one.
func (m *Nodes) All() []devices.Node {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := []devices.Node{{Name: m.lease.Node, Version: m.lease.Version, Started: m.lease.Started, Devices: m.opt.Devices(), API: m.opt.API()}}
	for _, l := range m.latest {
		n := devices.Node{Name: l.Node, Version: l.Version, Started: l.Started, Devices: l.Devices, API: l.API}
		switch i := slices.IndexFunc(out, func(n devices.Node) bool { return n.Name == l.Node }); {
		case i < 0:
			out = append(out, n)
		case i > 0 && n.Started.After(out[i].Started):
			out[i] = n
		}
	}
	return out
}

// IsLeased reports whether no other node can have declared this one lost. As the methods below, it may be called on nil, which is a node
// without others.
func (m *Nodes) IsLeased() bool {
	if m == nil {
		return true
	}
	beat := m.beatAt.Load()
	return beat != nil && time.Since(*beat) < m.opt.Lifetime*2/3
}

// Has reports whether a node has a lease. If the leases cannot be read it returns true
// before the first beat, because treating a lost node as alive does less harm than the reverse.
func (m *Nodes) Has(name string) bool {
	m.mu.Lock()
	leases := m.latest
	m.mu.Unlock()
	if leases == nil { // before the first beat
		var err error
		if leases, err = m.start.leases(m.opt.Database.Leases); err != nil {
			return true
		}
	}
	has := func(l devices.Lease) bool { return l.Node == name }
	if slices.ContainsFunc(leases, has) {
		return true
	}
	newer, _ := m.since.leases(m.opt.Database.Leases) // it may have started after the latest beat
	return slices.ContainsFunc(newer, has)
}

// readLeases reads the leases between beats, at most once per interval: they are needed for
// each device that other nodes hold.
type readLeases struct {
	every time.Duration
	mu    sync.Mutex
	at    time.Time
	found []devices.Lease
	err   error
}

func (l *readLeases) leases(read func(context.Context) ([]devices.Lease, error)) ([]devices.Lease, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.at.IsZero() || time.Since(l.at) >= l.every {
		ctx, cancel := context.WithTimeout(context.Background(), l.every)
		defer cancel()
		l.found, l.err = read(ctx)
		l.at = time.Now()
	}
	return l.found, l.err
}

// Metrics adds the metrics of the nodes.
func (m *Nodes) Metrics(r *counters.Registry) {
	counters.Value(r.Gauge("nodes", "Live nodes of the fleet as observed by this node, including itself; 1 with SQLite."), func() int {
		if m == nil {
			return 1
		}
		return len(m.All())
	})
	counters.Value(r.Counter("nodes_lost_total", "Nodes that this node declared lost; other nodes count the same ones."), m.Lost)
}

// Lost is how many nodes this one has declared lost.
func (m *Nodes) Lost() int64 {
	if m == nil {
		return 0
	}
	return m.lost.Load()
}
