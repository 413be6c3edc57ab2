package node

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/cluster"
	"fleetd/internal/devices"
)

// The lease of a node: it beats in the database, and whoever sees the beat
// stand still for leaseTime by a clock of its own declares the node lost.
const (
	beatEvery  = 3 * time.Second
	leaseTime  = 15 * time.Second
	loseAtMost = time.Minute     // for one lost node, before it is tried again
	answerTime = 2 * time.Second // for other nodes to answer a claim
)

// members are the nodes of the fleet as this node sees them.
type members struct {
	node  *node
	lease devices.Lease

	lost   atomic.Int64 // nodes declared lost here
	beats  bool         // there was a lease
	lostAt time.Time    // when this node last heard that it had been declared lost; zero once that is made good

	mu     sync.Mutex
	latest []devices.Lease
	seen   map[string]sight // by node
	looked time.Time        // when the leases were last read
}

// sight is when a beat was first seen.
type sight struct {
	instance string
	beat     int64
	at       time.Time
}

func newMembers(n *node) *members {
	return &members{node: n, seen: map[string]sight{}, lease: devices.Lease{Node: n.cfg.Node, Instance: rand.Text(), Started: n.started, Version: n.cfg.Version}}
}

// run keeps the lease until ctx ends, and then gives it back.
func (m *members) run(ctx context.Context) {
	ticker := time.NewTicker(beatEvery)
	defer ticker.Stop()
	twice := false
	for {
		lost, err := m.beat(ctx)
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
			if err := m.node.store.DropNode(end, m.lease); err != nil {
				m.node.log.Debug("lease not given back", "error", err)
			}
			return
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
	blind := now.Sub(m.looked) > 2*beatEvery // the database was away, or this node did not run
	m.looked = now
	for _, l := range leases {
		s := m.seen[l.Node]
		if blind { // nobody is lost for what could not be seen
			s.at = now
			m.seen[l.Node] = s
		}
		if s.instance != l.Instance || s.beat != l.Beat {
			m.seen[l.Node] = sight{l.Instance, l.Beat, now}
			if l.Node == m.lease.Node && l.Instance != m.lease.Instance && s.instance == l.Instance {
				err = errNodeTwice // it lives: its beat went on while we looked
			}
			continue
		}
		if now.Sub(s.at) >= leaseTime && l.Instance != m.lease.Instance {
			lost = append(lost, l)
		}
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

// lose marks the devices of a dead node, then forgets it.
func (m *members) lose(ctx context.Context, l devices.Lease) {
	ctx, cancel := context.WithTimeout(ctx, loseAtMost)
	defer cancel()
	devices, err := m.node.service.LoseNode(ctx, l.Node, m.node.store.OnlineOf)
	if err == nil {
		err = m.node.store.DropNode(ctx, l)
	}
	if err != nil {
		m.node.log.Warn("lost node not cleared away yet", "lost", l.Node, "error", err)
		return
	}
	m.lost.Add(1)
	m.node.log.Warn("node lost", "lost", l.Node, "devices", devices)
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
		s, known := m.seen[l.Node]
		return l.Node != m.lease.Node && (!known || s.instance != l.Instance || s.beat != l.Beat || time.Since(s.at) < leaseTime)
	})
}

// nodes are those with a lease, this one always among them.
func (m *members) nodes() []devices.Node {
	m.mu.Lock()
	defer m.mu.Unlock()
	own := devices.Node{Name: m.lease.Node, Version: m.lease.Version, Started: m.lease.Started, Devices: m.node.held(), API: m.node.apiURL()}
	out := []devices.Node{own}
	for _, l := range m.latest {
		if l.Node != own.Name {
			out = append(out, devices.Node{Name: l.Node, Version: l.Version, Started: l.Started, Devices: l.Devices, API: l.API})
		}
	}
	return out
}

// shared tells whether there can be other nodes: they share a database.
func (n *node) shared() bool { return strings.HasPrefix(n.cfg.Database, "postgres") }

// join makes sure that the nodes on this NATS are of this fleet. It is asked
// again when NATS or the database comes up late; what was known then is not
// asked twice.
func (n *node) join(ctx context.Context) error {
	n.joining.Lock()
	defer n.joining.Unlock()
	private := n.cfg.NATS == "embedded" && n.cfg.NATSListen == "" // nobody else is there
	if private || n.joined || !n.bus.up.Load() {
		return nil
	}
	database, err := n.store.FleetID(ctx)
	if err != nil {
		n.log.Debug("the fleet's id is not known yet", "error", err)
	}
	err = n.cluster.Join(ctx, cluster.Fleet{Node: n.cfg.Node, Database: database, Secret: n.mint.Fingerprint()})
	switch {
	case errors.Is(err, cluster.ErrOtherFleet):
		return fmt.Errorf("--nats: %w", err)
	case err != nil:
		n.log.Warn("the other nodes could not be asked", "error", err)
		return nil
	}
	n.joined = database != ""
	return nil
}

// joinLate is join once the node runs: it ends a node that does not belong here.
func (n *node) joinLate() {
	if err := n.join(context.Background()); err != nil {
		select {
		case n.serveErr <- err:
		default: // it ends for other reasons
		}
	}
}

// rejoin makes good what was missed while the node was cut off from the others:
// they may have taken devices over, admitted some and revoked others.
func (n *node) rejoin() {
	if !n.shared() {
		return
	}
	n.service.Reassert()
	ctx, cancel := context.WithTimeout(context.Background(), loseAtMost)
	defer cancel()
	if err := n.service.Reload(ctx); err != nil {
		n.log.Warn("news of other nodes could not be read", "error", err)
	}
}

// alive tells the core which other nodes there may be; nil if none.
func (n *node) alive() func(string) bool {
	if !n.shared() {
		return nil
	}
	n.members = newMembers(n)
	return func(name string) bool {
		ctx, cancel := context.WithTimeout(context.Background(), beatEvery)
		defer cancel()
		n.members.mu.Lock()
		defer n.members.mu.Unlock()
		if n.members.latest == nil {
			leases, err := n.store.Leases(ctx)
			if err != nil {
				return true // rather a device too many than one too few
			}
			n.members.latest = leases
		}
		return slices.ContainsFunc(n.members.latest, func(l devices.Lease) bool { return l.Node == name })
	}
}
