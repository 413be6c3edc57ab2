package fleettest

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/store/storetest"
)

// Three nodes over one database and one NATS are one fleet: every API calls
// every device in one hop, a device that moves is held by one node, and what a
// node that was killed held goes offline once and is callable again as soon as
// it is back elsewhere.
func TestThreeNodes(t *testing.T) {
	t.Parallel()
	db := storetest.Postgres(t)
	url, prefix, _, _ := natsServer(t)
	var nodes []*Node
	for i := range 3 {
		nodes = append(nodes, programs.Start(t, "--database", db.URL, "--nats", url, "--nats-prefix", prefix, "--secret", "one fleet, one secret", "--node", fmt.Sprintf("node-%d", i)))
	}
	call := func(n *Node, id string) (apiclient.CallResult, error) {
		return n.Call(t.Context(), id, volume, apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":9}`), Timeout: 5 * time.Second})
	}
	const each = 4
	var sims []*Simulation
	id := func(node, device int) string { return fmt.Sprintf("02:c%d:00:00:00:%02x", node, device) }
	for i, n := range nodes {
		sims = append(sims, programs.Simulate(t, n.Info.OTA, "--devices", fmt.Sprint(each), "--mac-base", id(i, 0), "--seed", fmt.Sprint(i+1)))
	}
	for i, n := range nodes {
		n.Await(t, "its devices are ready", 20*time.Second, func() bool { return n.Metric(t, "fleetd_devices", `mcp_state="ready"`) == each })
		_ = i
	}
	for i := range nodes {
		for at, n := range nodes {
			r, err := call(n, id(i, 1))
			if err != nil || r.IsError || r.Node != fmt.Sprintf("node-%d", i) {
				t.Errorf("node %d calls a device of node %d: %+v, %v", at, i, r, err)
			}
		}
	}
	nodes[0].Await(t, "every node lists all three", 20*time.Second, func() bool {
		for _, n := range nodes {
			seen := 0
			for _, err := range apiclient.List[api.Node](t.Context(), n.Client, nil, "nodes") {
				if err != nil {
					return false
				}
				seen++
			}
			if seen != 3 {
				return false
			}
		}
		return true
	})

	// Their events are one stream, also on a NATS server of an older version.
	for event, err := range nodes[1].Events(t.Context(), apiclient.EventOptions{After: "1"}) {
		if err != nil || len(event.Data) == 0 {
			t.Errorf("the first event: %+v, %v", event, err)
		}
		break
	}

	for _, other := range []struct{ database, secret, sentence string }{
		{db.URL, "another secret, and no better one", "another secret"},
		{storetest.Postgres(t).URL, "one fleet, one secret", "has another database"},
		{"sqlite", "another secret, and no better one", "has another secret"},
	} {
		log := programs.Refused(t, "--database", other.database, "--nats", url, "--nats-prefix", prefix, "--secret", other.secret, "--node", "foreign")
		if !strings.Contains(log, other.sentence) {
			t.Errorf("a node of another fleet was refused with\n%s\nwant a sentence with %q", log, other.sentence)
		}
	}

	// Node 2 dies; its devices boot again and are sent to node 0.
	nodes[2].Kill(t)
	if _, err := call(nodes[0], id(2, 0)); problemCode(err) != "unavailable" { // whether the node lives is not known yet
		t.Errorf("a device of the dead node: %v", err)
	}
	sims[2].Report(t)
	moved := programs.Simulate(t, nodes[0].Info.OTA, "--devices", "2", "--mac-base", id(2, 0), "--seed", "3")
	nodes[0].Await(t, "what came back is callable", 20*time.Second, func() bool {
		r, err := call(nodes[1], id(2, 0))
		return err == nil && r.Node == "node-0"
	})
	nodes[1].Await(t, "the dead node is gone, and its devices with it", 40*time.Second, func() bool {
		d, err := nodes[1].Device(t.Context(), id(2, 3))
		back, backErr := nodes[1].Device(t.Context(), id(2, 1))
		return err == nil && d.State == "offline" && backErr == nil && back.State == "online"
	})
	nodes[1].Await(t, "the metrics say so", 10*time.Second, func() bool {
		return nodes[1].Metric(t, "fleetd_nodes") == 2 && nodes[0].Metric(t, "fleetd_nodes_lost_total")+nodes[1].Metric(t, "fleetd_nodes_lost_total") > 0
	})
	if n := db.Count(t, "SELECT count(*) FROM nodes"); n != 2 {
		t.Errorf("%d nodes have a lease", n)
	}
	if n := db.Count(t, "SELECT count(*) FROM presence WHERE reason = 'node_lost'"); n != each-2 {
		t.Errorf("%d devices count as lost with their node, want %d", n, each-2)
	}
	for _, s := range append(sims[:2], moved) {
		if r := s.Report(t); r.Totals.Crashes != 0 || r.Totals.DuplicateCallIDs != 0 {
			t.Errorf("%+v", r.Totals)
		}
	}
}

// A node that joins while the others are too busy to answer checks again, and stops once
// they turn out to be another fleet.
func TestOtherFleetThatAnswersLate(t *testing.T) {
	t.Parallel()
	url, prefix, _, conn := natsServer(t)
	var asked atomic.Int32
	if _, err := conn.Subscribe(prefix+".fleet", func(msg *nats.Msg) {
		if asked.Add(1) > 3 { // three checks come from its start
			_ = msg.Respond([]byte(`{"node":"busy","database":"theirs","secret":"theirs"}`))
		}
	}); err != nil {
		t.Fatal(err)
	}
	if err := conn.Flush(); err != nil {
		t.Fatal(err)
	}
	log := programs.Refused(t, "--nats", url, "--nats-prefix", prefix)
	// security: N3
	if !strings.Contains(log, "node busy has another secret") {
		t.Errorf("asked %d times; the node ended with\n%s", asked.Load(), log)
	}
}
