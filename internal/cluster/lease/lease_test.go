package lease

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
	"fleetd/internal/store"
	"fleetd/internal/store/ledger"
	"fleetd/internal/store/storetest"
)

// silent is a connection that takes everything and answers nothing.
type silent struct{}

func (silent) SendControl([]byte) error  { return nil }
func (silent) Close(devices.CloseReason) {}

// node is a node as far as leases need it.
type node struct {
	name    string
	started time.Time
	store   *store.Store
	ledger  *ledger.Ledger
	service *fleet.Service
	nodes   *Nodes
}

// sharing returns nodes over one database.
func sharing(t *testing.T, names ...string) (nodes []*node) {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	db, err := store.Open(t.Context(), "sqlite", t.TempDir(), log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	for _, name := range names {
		ports := devicetest.New()
		n := &node{name: name, store: db, started: time.Now()}
		n.nodes = New(Options{Node: name, Lifetime: Lifetime, Started: n.started, Database: db, Devices: func() int { return 0 }, API: func() string { return "http://127.0.0.1" },
			Refresh: func(context.Context) {}, IsConnected: func() bool { return true }, Log: log})
		n.ledger = ledger.New(db, log)
		t.Cleanup(n.ledger.Close)
		n.service = fleet.New(fleet.Config{Node: name, CallsPerDevice: 1, Handshakes: 4, IsNodeAlive: n.nodes.Has},
			fleet.Ports{Records: db, Catalogs: db, Ledger: n.ledger, Publisher: ports, Directory: ports, Router: ports, Vision: ports, Audio: ports, Audit: ports, Log: log})
		t.Cleanup(n.service.Close)
		if err := n.service.Registry().Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		n.nodes.fleet = n.service
		nodes = append(nodes, n)
	}
	return nodes
}

func (n *node) accept(t *testing.T, id devices.ID) {
	t.Helper()
	if _, err := n.service.Accept(devices.Identity{Device: id, ClientID: "c", Transport: devices.TransportMQTT}, silent{}); err != nil {
		t.Fatal(err)
	}
	n.awaitRow(t, id, true)
}

func (n *node) awaitRow(t *testing.T, id devices.ID, online bool) {
	t.Helper()
	devicetest.Eventually(t, "the row is offline", func() bool {
		row, err := n.store.Find(t.Context(), id)
		return err == nil && row.Presence.Online == online
	})
}

func (n *node) beat(t *testing.T) []devices.Lease {
	t.Helper()
	lost, err := n.nodes.beat(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return lost
}

// stoodStill makes every lease look as if it had not moved for long, up to this
// time ago.
func (m *Nodes) stoodStill(ago time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	m.monitor = m.newMonitor()
	for at := now.Add(-Lifetime - 2*m.monitor.CleanupDelay); at.Before(now.Add(-ago)); at = at.Add(m.every) {
		m.monitor.Observe(m.latest, at)
	}
}

// A node that continues while another marks its devices as lost learns of it, and announces
// its devices.
func TestResumedNodeReannounces(t *testing.T) {
	nodes := sharing(t, "a", "c")
	a, c := nodes[0], nodes[1]
	const id = devices.ID("02:00:00:00:00:01")
	a.accept(t, id)
	a.beat(t)
	c.beat(t)
	c.nodes.stoodStill(0)
	lost := c.beat(t)
	if len(lost) != 1 || lost[0].Node != "a" {
		t.Fatalf("lost: %v", lost)
	}
	a.beat(t) // it resumes
	c.nodes.cleanUpLost(t.Context(), lost[0])
	c.nodes.tasks.Wait()
	c.awaitRow(t, id, false)
	a.beat(t)
	if a.nodes.lostAt.IsZero() {
		t.Fatal("a has not learned that it was declared lost")
	}
	a.nodes.lostAt = time.Now().Add(-answerTime)
	a.nodes.reannounce()
	a.awaitRow(t, id, true)
}

// What a node left online when it was killed is lost, and what its next start
// holds is not, though its clock was an hour ahead in one of them.
func TestRestartedNodeKeepsItsDevices(t *testing.T) {
	nodes := sharing(t, "a", "c")
	a, c := nodes[0], nodes[1]
	old := devices.Lease{Node: "a", Instance: "killed", Beat: 7, Started: a.started.Add(2 * time.Hour)}
	if _, _, err := a.store.Beat(t.Context(), old); err != nil {
		t.Fatal(err)
	}
	const gone, back = devices.ID("02:00:00:00:00:01"), devices.ID("02:00:00:00:00:02")
	storetest.AddMember(t, c.store, devices.Device{ID: gone})
	c.store.SavePresence(devices.Presence{Device: gone, Epoch: 1, Seq: 1, Online: true, Node: "a", ConnectedAt: a.started.Add(2 * time.Hour)})
	a.accept(t, back)
	c.awaitRow(t, gone, true)
	a.beat(t)
	c.beat(t)
	a.nodes.lease.Started = a.started.Add(time.Hour)
	a.nodes.stoodStill(0)
	c.nodes.stoodStill(0)
	lost := a.beat(t)
	if others := c.beat(t); len(others) != 0 || len(lost) != 1 || lost[0].Instance != "killed" {
		t.Fatalf("lost for its next start: %v, for another node: %v", lost, others)
	}
	a.nodes.cleanUpLost(t.Context(), lost[0])
	a.nodes.tasks.Wait()
	c.awaitRow(t, gone, false)
	c.awaitRow(t, back, true)
	a.beat(t)
	if !a.nodes.lostAt.IsZero() {
		t.Error("a takes itself for lost")
	}
	if nodes := c.nodes.All(); len(nodes) != 2 {
		t.Errorf("nodes: %v", nodes)
	}
}

// No node is lost for a time in which the leases could not be read.
func TestNoLossWhileDatabaseIsAway(t *testing.T) {
	nodes := sharing(t, "a", "c")
	a, c := nodes[0], nodes[1]
	a.beat(t)
	c.beat(t)
	c.nodes.stoodStill(Lifetime) // then the database was away
	if lost := c.beat(t); len(lost) != 0 {
		t.Errorf("lost: %v", lost)
	}
}

// A slow read of the registry delays no renewal: the others would declare the node lost.
func TestSlowReadOfTheRegistry(t *testing.T) {
	n := sharing(t, "a")[0]
	reads := make(chan struct{})
	n.nodes.opt.Refresh = func(ctx context.Context) {
		select {
		case reads <- struct{}{}:
			<-ctx.Done()
		case <-ctx.Done():
		}
	}
	ctx, stop := context.WithCancel(t.Context())
	var run sync.WaitGroup
	run.Go(func() { n.nodes.Run(ctx, n.service) })
	defer run.Wait()
	defer stop()
	<-reads
	devicetest.Eventually(t, "the lease is renewed", func() bool {
		leases, err := n.store.Leases(t.Context())
		return err == nil && len(leases) == 1 && leases[0].Beat > 3
	})
}

// Before its first beat a node reads the leases once, however many devices it
// checks, and takes a node as alive while it cannot read them.
func TestLeasesAreReadOnceAtTheStart(t *testing.T) {
	for _, fails := range []bool{false, true} {
		reads := 0
		l := readLeases{every: time.Minute}
		for range 3000 {
			found, err := l.leases(func(context.Context) ([]devices.Lease, error) {
				reads++
				if fails {
					return nil, devices.ErrDatabase
				}
				return []devices.Lease{{Node: "a"}}, nil
			})
			if (err != nil) != fails || !fails && len(found) != 1 {
				t.Fatalf("%v, %v", found, err)
			}
		}
		if reads != 1 {
			t.Errorf("%d reads, want 1", reads)
		}
	}
}

// The devices of a node that has just started are not offline until the next beat of the others.
func TestNewNodeIsThereAtOnce(t *testing.T) {
	nodes := sharing(t, "a", "b")
	a, b := nodes[0], nodes[1]
	a.beat(t)
	b.beat(t)
	if !a.nodes.Has("b") {
		t.Error("node b has a lease, and node a does not find it until its next beat")
	}
	if a.nodes.Has("c") {
		t.Error("node c has no lease")
	}
}

// Devices of a node that could not write its last rows are cleaned up at the second
// check.
func TestOrphans(t *testing.T) {
	n := sharing(t, "a")[0]
	const id = devices.ID("02:00:00:00:00:01")
	storetest.AddMember(t, n.store, devices.Device{ID: id})
	n.store.SavePresence(devices.Presence{Device: id, Epoch: 1, Seq: 1, Online: true, Node: "gone"})
	n.awaitRow(t, id, true)
	n.beat(t)
	first := n.nodes.cleanUpOrphaned(t.Context(), nil)
	if len(first) != 1 {
		t.Fatalf("orphaned: %v", first)
	}
	n.nodes.cleanUpOrphaned(t.Context(), first)
	n.nodes.tasks.Wait()
	n.awaitRow(t, id, false)
}
