package fleettest

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// held returns one device of each node, by what the nodes report. Rows of
// devices that have just connected may be on their way.
func (c *Cluster) held(t *testing.T) (one []string) {
	t.Helper()
	c.Nodes[0].Await(t, "each node holds a device", 10*time.Second, func() bool {
		one = make([]string, len(c.Nodes))
		for _, d := range c.Nodes[0].List(t) {
			for i := range c.Nodes {
				if d.Node == fmt.Sprintf("node-%d", i) {
					one[i] = d.ID
				}
			}
		}
		return !slices.Contains(one, "")
	})
	return one
}

// The packets between one node and NATS are lost for half a minute, and nobody
// gets an error: its own devices are called as before, and others are reported
// be so within 6 s and then at once, and it heals by itself.
func TestNATSDropped(t *testing.T) {
	long(t)
	t.Parallel()
	c := programs.StartCluster(t, ClusterOptions{Nodes: 2, Seed: 3})
	sim := programs.Simulate(t, c.OTA, "--devices", "12", "--mac-base", "02:da:00:00:00:00", "--wake", "1s", "--seed", "3")
	c.AwaitReady(t, 12, 30*time.Second)
	mine := c.held(t)
	cut, other := c.Nodes[0], c.Nodes[1]

	c.NATS[0].Break(0, Stalled)
	begun := time.Now()
	noticed := map[string]time.Duration{}
	for time.Since(begun) < scaled(30*time.Second) {
		for name, call := range map[string]struct {
			via *Node
			id  string
		}{"out": {cut, mine[1]}, "in": {other, mine[0]}} {
			asked := time.Now()
			_, err := call.via.Volume(t, call.id, 20*time.Second)
			took := time.Since(asked)
			if code := problemCode(err); code != "unavailable" {
				t.Errorf("%s, %v after the cut: %s", name, time.Since(begun), code)
			}
			switch {
			case took > scaledWait(6*time.Second):
				t.Errorf("%s: answered after %v", name, took)
			case took < 500*time.Millisecond && noticed[name] == 0:
				noticed[name] = time.Since(begun)
			case took > scaledWait(time.Second) && noticed[name] != 0:
				t.Errorf("%s: noticed at %v, and %v later a call took %v", name, noticed[name], time.Since(begun), took)
			}
		}
		for i, n := range c.Nodes {
			if r, err := n.Volume(t, mine[i], 5*time.Second); err != nil || r.IsError || r.Node != fmt.Sprintf("node-%d", i) {
				t.Errorf("a device of node-%d, called there: %+v, %v", i, r, err)
			}
		}
		time.Sleep(200 * time.Millisecond)
	}
	t.Logf("noticed after %v", noticed)
	for _, name := range []string{"out", "in"} {
		if noticed[name] == 0 || noticed[name] > scaledWait(10*time.Second) {
			t.Errorf("%s: noticed after %v", name, noticed[name])
		}
	}
	c.NATS[0].Break(0, None)
	c.Nodes[0].Await(t, "every node calls every device again", 10*time.Second, func() bool {
		for i, id := range mine {
			for _, n := range c.Nodes {
				if r, err := n.Volume(t, id, 5*time.Second); err != nil || r.Node != fmt.Sprintf("node-%d", i) {
					return false
				}
			}
		}
		return true
	})
	if r := sim.Report(t); r.Totals.DuplicateCallIDs != 0 {
		t.Errorf("%d calls were executed twice", r.Totals.DuplicateCallIDs)
	}
}

// The database is away from every node for a minute: no call on a connected
// device fails, no node declares another lost, and the rows of devices that came and
// went meanwhile are complete afterwards.
func TestDatabaseAway(t *testing.T) {
	long(t)
	t.Parallel()
	c := programs.StartCluster(t, ClusterOptions{Nodes: 2, Seed: 4})
	stays := programs.Simulate(t, c.OTA, "--devices", "10", "--mac-base", "02:db:00:00:00:00", "--seed", "4")
	goes := programs.Simulate(t, c.OTA, "--devices", "5", "--mac-base", "02:dc:00:00:00:00", "--seed", "5")
	c.AwaitReady(t, 15, 30*time.Second)
	for _, n := range c.Nodes {
		n.AwaitStored(t)
	}
	var ids []string
	for i := range 10 {
		ids = append(ids, fmt.Sprintf("02:db:00:00:00:%02x", i))
	}
	c.BreakSQL(Cut)
	load := c.StartLoad(t, ids, LoadOptions{Seed: 4, Callers: 4, Pause: 50 * time.Millisecond, Timeout: 5 * time.Second})
	time.Sleep(scaled(20 * time.Second)) // the database is away for a minute
	goes.Report(t)
	comes := programs.Simulate(t, c.OTA, "--devices", "7", "--profile", "fw-2.1", "--mac-base", "02:dd:00:00:00:00", "--seed", "6")
	time.Sleep(scaled(40 * time.Second))
	for i := range c.SQL {
		time.Sleep(scaled(time.Second)) // one node sees that the others' rows do not change
		c.SQL[i].Break(0, None)
	}
	// Unknown devices that were refused try again 10, 30 and 70 s after that, as the firmware does.
	c.Nodes[0].Await(t, "the rows are complete", 80*time.Second, func() bool {
		return c.DB.Count(t, "SELECT count(*) FROM devices") == 22 && c.DB.Count(t, "SELECT count(DISTINCT device) FROM catalog_history") == 22 &&
			c.DB.Count(t, "SELECT count(*) FROM presence WHERE online") == 17 && c.DB.Count(t, "SELECT count(*) FROM presence WHERE NOT online") == 5
	})
	time.Sleep(scaled(5 * time.Second)) // a beat and a look later nobody is lost either
	load.Stop()
	if outcomes := load.Outcomes(); len(outcomes) != 1 || outcomes["ok"] < int(500*scale()) {
		t.Errorf("calls on connected devices: %v", outcomes)
	}
	if lost := c.DB.Count(t, "SELECT count(*) FROM presence WHERE reason = 'node_lost'"); lost != 0 {
		t.Errorf("%d devices count as lost", lost)
	}
	for _, d := range append(stays.Report(t).Devices, comes.Report(t).Devices...) {
		if c.DB.Count(t, "SELECT count(*) FROM catalog_history WHERE device = $1 AND catalog = $2", d.ID, d.CatalogSHA256) != 1 {
			t.Errorf("%s: its list %s is not in the history", d.ID, d.CatalogSHA256)
		}
	}
}

// A node is frozen while its devices move elsewhere, for longer than its lease,
// and goes on: nobody waits for it longer than 6 s, nothing is done twice, and
// it steps back.
func TestFrozenNode(t *testing.T) {
	long(t)
	t.Parallel()
	c := programs.StartCluster(t, ClusterOptions{Seed: 5})
	s := &storm{Cluster: c, t: t, checking: "a frozen node"}
	s.sims = []*Simulation{programs.Simulate(t, c.OTA, "--devices", "30", "--mac-base", "02:df:00:00:00:00", "--reconnect", "500ms", "--reconnect-jitter", "500ms", "--seed", "5")}
	for i := range 30 {
		s.ids = append(s.ids, fmt.Sprintf("02:df:00:00:00:%02x", i))
	}
	c.AwaitReady(t, len(s.ids), 30*time.Second)
	s.load = c.StartLoad(t, s.ids, LoadOptions{Seed: 5, Callers: 6, Pause: 30 * time.Millisecond, Timeout: 20 * time.Second, Patience: scaledWait(6 * time.Second)})
	c.Nodes[0].Await(t, "devices are called", 10*time.Second, func() bool { return s.load.Outcomes()["ok"] > 0 })

	clients := c.bus.NumClients()
	c.Nodes[0].Freeze(t)
	frozen := time.Now()
	up := s.load.Down(0)
	c.MQTT.Break(0, Cut) // the devices notice; the node cannot
	c.Nodes[1].Await(t, "the NATS server gives the node up, and its devices are elsewhere", 30*time.Second, func() bool {
		return c.bus.NumClients() < clients && c.Nodes[1].Metric(t, "fleetd_devices")+c.Nodes[2].Metric(t, "fleetd_devices") == float64(len(s.ids))
	})
	t.Logf("given up %v after the freeze", time.Since(frozen).Round(time.Millisecond))
	time.Sleep(scaled(4 * time.Second)) // a call that was sent there is lost after three
	moved := s.load.Outcomes()
	time.Sleep(scaled(12 * time.Second)) // the lease runs out
	if after := s.load.Outcomes(); after["ok"] <= moved["ok"] || len(after) != len(moved) {
		t.Errorf("calls until the node was given up: %v; later: %v", moved, after)
	} else {
		for outcome, n := range after {
			if outcome != "ok" && n != moved[outcome] {
				t.Errorf("calls still fail after that: %v, then %v", moved, after)
			}
		}
	}
	c.MQTT.Break(0, None)
	c.Nodes[0].Thaw(t)
	thawed := time.Now()
	time.Sleep(time.Second) // the node catches up, and may fail calls meanwhile
	up()
	if !s.rest(10 * time.Second) {
		t.Error("the node did not step back")
	}
	t.Logf("at rest %v after the thaw", time.Since(thawed).Round(time.Millisecond))
	s.load.Stop()
	s.agree()
	s.account()
	if held := c.Nodes[0].Metric(t, "fleetd_devices"); held != 0 {
		t.Errorf("it holds %v devices, all of which have moved", held)
	}
	if c.Nodes[0].Metric(t, "fleetd_process_stalls_total") == 0 {
		t.Error("it did not notice that it was frozen")
	}
	t.Logf("calls: %v", s.load.Outcomes())
	for _, v := range s.violations {
		t.Error(v)
	}
}
