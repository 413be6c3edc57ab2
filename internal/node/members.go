package node

import (
	"context"
	"crypto/rand"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/cluster"
	"fleetd/internal/devices"
	"fleetd/internal/timescale"
)

// The lease of a node: it beats in the database, and whoever sees the beat
// stand still for leaseTime by a clock of its own declares the node lost.
var (
	beatEvery   = timescale.Of(3 * time.Second)
	leaseTime   = timescale.Of(15 * time.Second)
	answerTime  = timescale.Of(2 * time.Second)  // for other nodes to answer a claim
	orphanEvery = timescale.Of(time.Minute)      // looks for devices of nodes that have no lease
	clearTurn   = timescale.Of(30 * time.Second) // before the next node clears away after a lost one
)

// stampsAll begins the instance of a node that stamps claims and news, too: those
// without a stamp are taken while there is another.
const stampsAll = "s2-"

// loseAtMost is the time for one lost node, before it is tried again.
const loseAtMost = time.Minute

// members are the nodes of the fleet as this node sees them.
type members struct {
	node  *node
	lease devices.Lease

	lost       atomic.Int64 // nodes declared lost here
	stamped    atomic.Bool  // all nodes stamp what they ask others, as far as is known
	stampedAll atomic.Bool  // claims and news as well
	beats      bool         // there was a lease
	lostAt     time.Time    // when this node last heard that it had been declared lost; zero once that is made good

	start startLook

	mu     sync.Mutex
	latest []devices.Lease
	seen   cluster.Beats
	losing map[string]bool // by instance, or name for orphans: being cleared away
	tasks  sync.WaitGroup
}

func newMembers(n *node) *members {
	m := &members{node: n, losing: map[string]bool{},
		lease: devices.Lease{Node: n.cfg.Node, Instance: stampsAll + rand.Text(), Started: n.started, Version: n.cfg.Version, Stamps: true}}
	m.seen = cluster.Beats{Own: m.lease, Every: beatEvery, Life: leaseTime, Turn: clearTurn}
	return m
}

// run keeps the lease until ctx ends, and then gives it back.
func (m *members) run(ctx context.Context) {
	defer m.tasks.Wait()
	ticker := time.NewTicker(beatEvery)
	defer ticker.Stop()
	orphans := time.NewTicker(orphanEvery)
	defer orphans.Stop()
	var suspects []string
	twice := false
	for {
		lost, err := m.beat(ctx)
		if err == nil { // so that a change is known within a beat even without NATS
			m.node.refresh(ctx)
		}
		switch {
		case errors.Is(err, errNodeTwice):
			if !twice {
				m.node.log.Error("another node of the fleet has this node's name; give each its own --node")
			}
			twice = true
		case err == nil:
			twice = false
		}
		for _, l := range lost {
			m.lose(ctx, l)
		}
		m.reappear()
		select {
		case <-ctx.Done():
			end, cancel := context.WithTimeout(context.Background(), beatEvery)
			defer cancel()
			if err := m.node.store.EndLease(end, m.lease); err != nil {
				m.node.log.Debug("lease not given back", "error", err)
			}
			return
		case <-orphans.C:
			suspects = m.orphans(ctx, suspects)
		case <-ticker.C:
		}
	}
}

var errNodeTwice = errors.New("another node has this name")

// beat renews the lease and returns those that stood still.
func (m *members) beat(ctx context.Context) (lost []devices.Lease, err error) {
	m.lease.Beat++
	m.lease.Devices, m.lease.API = m.node.held(), m.node.apiURL()
	leases, begun, err := m.node.store.Beat(ctx, m.lease)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	if begun && m.beats {
		m.node.log.Warn("other nodes took this node for lost")
		m.node.service.Reassert() // who holds a device of ours by now says so
		m.lostAt = now
	}
	m.beats = true
	m.mu.Lock()
	defer m.mu.Unlock()
	m.latest = leases
	m.stamped.Store(!slices.ContainsFunc(leases, func(l devices.Lease) bool { return !l.Stamps }))
	m.stampedAll.Store(!slices.ContainsFunc(leases, func(l devices.Lease) bool { return !strings.HasPrefix(l.Instance, stampsAll) }))
	lost, twice := m.seen.Look(leases, now)
	if twice {
		err = errNodeTwice
	}
	return lost, err
}

// reappear announces what this node still holds although it was declared lost,
// once the others had time to say what is theirs by now.
func (m *members) reappear() {
	if m.lostAt.IsZero() || time.Since(m.lostAt) < answerTime || !m.node.bus.up.Load() {
		return
	}
	m.lostAt = time.Time{}
	m.node.service.Reappear()
}

// clear runs a task that clears away after a node, one at a time of each, while
// this node's own beat goes on.
func (m *members) clear(ctx context.Context, name string, task func(ctx context.Context)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.losing[name] {
		return
	}
	m.losing[name] = true
	m.tasks.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, loseAtMost)
		defer cancel()
		task(ctx)
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.losing, name)
	})
}

// lose marks the devices of a dead node, then forgets it.
func (m *members) lose(ctx context.Context, l devices.Lease) {
	before := m.successor(l)
	m.clear(ctx, l.Instance, func(ctx context.Context) {
		lost, err := m.node.service.LoseNode(ctx, l.Node, before, m.node.store.OnlineOf)
		// Should it live after all, it has to learn what was done to it.
		end := m.node.store.DropNode
		if lost > 0 {
			end = m.node.store.EndLease
		}
		if err == nil || lost > 0 {
			err = errors.Join(err, end(ctx, l))
		}
		if err != nil {
			m.node.log.Warn("lost node not cleared away yet", "lost", l.Node, "devices", lost, "error", err)
			return
		}
		m.lost.Add(1)
		m.node.log.Warn("node lost", "lost", l.Node, "devices", lost)
	})
}

// successor is when a node of the same name started again; zero if it did not.
func (m *members) successor(l devices.Lease) (started time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, other := range m.latest {
		if other.Node == l.Node && other.Started.After(l.Started) && (started.IsZero() || other.Started.Before(started)) {
			started = other.Started
		}
	}
	return started
}

// orphans clears away devices of nodes that have no lease, and had none a
// while ago: a node that could not write its last rows before it ended.
func (m *members) orphans(ctx context.Context, before []string) (now []string) {
	now, err := m.node.store.Orphans(ctx)
	if err != nil {
		return nil
	}
	for _, name := range now {
		if !slices.Contains(before, name) {
			continue
		}
		m.clear(ctx, name, func(ctx context.Context) {
			lost, err := m.node.service.LoseNode(ctx, name, time.Time{}, m.node.store.OnlineOf)
			m.node.log.Warn("devices of a node that is gone", "lost", name, "devices", lost, "error", err)
		})
	}
	return now
}

// others tells whether another node lives, to which devices can go. It looks
// once more: a node that has just come counts.
func (m *members) others(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, beatEvery)
	defer cancel()
	leases, err := m.node.store.Leases(ctx)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err != nil {
		leases = m.latest
	}
	return slices.ContainsFunc(leases, func(l devices.Lease) bool {
		return l.Node != m.lease.Node && m.seen.Lives(l, time.Now())
	})
}

// nodes are those with a lease, the latest start of each, this one always among
// them.
func (m *members) nodes() []devices.Node {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := []devices.Node{{Name: m.lease.Node, Version: m.lease.Version, Started: m.lease.Started, Devices: m.node.held(), API: m.node.apiURL()}}
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

// alive tells the core which other nodes there may be; nil if none.
func (n *node) alive() func(string) bool {
	if !n.shared() {
		return nil
	}
	n.members = newMembers(n)
	return n.members.has
}

// stamped tells whether all nodes stamp what they ask others.
func (n *node) stamped() bool { return n.members == nil || n.members.stamped.Load() }

// allStamped tells whether they stamp claims and news, too.
func (n *node) allStamped() bool { return n.members == nil || n.members.stampedAll.Load() }

// has tells whether a node has a lease. While that cannot be read the answer is
// yes: a device too many is better than one too few.
func (m *members) has(name string) bool {
	m.mu.Lock()
	leases := m.latest
	m.mu.Unlock()
	if leases == nil { // before the first beat
		var err error
		if leases, err = m.start.leases(m.node.store.Leases); err != nil {
			return true
		}
	}
	return slices.ContainsFunc(leases, func(l devices.Lease) bool { return l.Node == name })
}

// startLook reads the leases before the first beat, once for all questions
// within a beat: at its start a node has one for each device that others hold.
type startLook struct {
	mu    sync.Mutex
	at    time.Time
	found []devices.Lease
	err   error
}

func (l *startLook) leases(read func(context.Context) ([]devices.Lease, error)) ([]devices.Lease, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.at.IsZero() || time.Since(l.at) >= beatEvery {
		ctx, cancel := context.WithTimeout(context.Background(), beatEvery)
		defer cancel()
		l.found, l.err = read(ctx)
		l.at = time.Now()
	}
	return l.found, l.err
}
