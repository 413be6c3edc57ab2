package fleettest

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"fleetd/internal/apiclient"
	"fleetd/internal/store/storetest"
)

// explainFaults is the table of faults and the causes that they have, each seen by the node
// of its number and asked on another one. unknown is never right.
var explainFaults = []struct {
	fault string
	args  []string // of the simulator
	calls int      // made with a short timeout
	want  []string // one of these causes
	call  string   // cause of the last call
}{
	{fault: "", want: []string{"well"}},
	{fault: "silent", want: []string{"mcp_silent"}},
	{fault: "slow", calls: 2, want: []string{"main_loop_busy"}, call: "answered_late"},
	{fault: "late-reply", args: []string{"--late", "3s"}, calls: 2, want: []string{"main_loop_busy"}, call: "answered_late"},
	{fault: "unescaped-error", want: []string{"well"}},
	{fault: "cursor-loop", want: []string{"tools_missing", "mcp_failed"}},
	{fault: "oversize-tool", want: []string{"tools_missing", "mcp_failed"}},
	{fault: "dup-hello", args: []string{"--talk"}, want: []string{"well"}},
	{fault: "clone", args: []string{"--time-scale", "0.05"}, want: []string{"cloned", "contested"}},
	{fault: "flap", args: []string{"--time-scale", "0.05"}, want: []string{"flapping", "cloned"}},
	{fault: "bad-frame", want: []string{"well", "protocol", "flapping"}},
	{fault: "udp-loss", args: []string{"--talk"}, want: []string{"well"}},
	{fault: "udp-reorder", args: []string{"--talk"}, want: []string{"well"}},
	{fault: "nat", args: []string{"--talk"}, want: []string{"well", "udp_silent"}},
}

// Every fault of a device and every outage has its cause, also on a node that did not see
// it.
func TestEveryFaultIsExplained(t *testing.T) {
	t.Parallel()
	db := storetest.Postgres(t)
	url, prefix, _, _ := natsServer(t)
	var nodes []*Node
	for i := range 3 {
		nodes = append(nodes, programs.Start(t, "--database", db.URL, "--nats", url, "--nats-prefix", prefix, "--secret", "one fleet, one secret", "--node", fmt.Sprintf("node-%d", i)))
	}
	nodes[0].Await(t, "every node lists all three", 20*time.Second, func() bool {
		list, err := apiclient.Collect(nodes[0].Nodes(t.Context()))
		return err == nil && len(list) == 3
	})
	id := func(n int) string { return fmt.Sprintf("02:ee:00:00:00:%02x", n) }
	simulate := func(on *Node, n int, args ...string) *Simulation {
		return programs.Simulate(t, on.Info.OTA, append([]string{"--devices", "1", "--mac-base", id(n), "--seed", fmt.Sprint(n + 1)}, args...)...)
	}
	explained := func(on *Node, device string, limit time.Duration, want ...string) {
		t.Helper()
		on.explained(t, device, limit, want...)
	}

	for i, f := range explainFaults {
		args := []string{"--transport", "mqtt"}
		if f.fault != "" {
			args = append(args, "--fault", f.fault)
		}
		simulate(nodes[i%2], i, append(args, f.args...)...)
	}
	for i, f := range explainFaults {
		asked, device := nodes[(i+1)%3], id(i)
		call := ""
		if f.calls > 0 {
			asked.Await(t, f.fault+" is ready", 40*time.Second, func() bool {
				d, err := asked.Device(t.Context(), device)
				return err == nil && d.MCP.State == "ready"
			})
		}
		for range f.calls {
			_, err := asked.Call(t.Context(), device, volume, apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":9}`), Timeout: time.Second})
			if call = problemCall(err); call == "" {
				t.Errorf("%s: the call did not time out: %v", f.fault, err)
			}
			time.Sleep(4 * time.Second)
		}
		explained(asked, device, 60*time.Second, f.want...)
		if f.call != "" {
			if e, err := nodes[(i+2)%3].ExplainCall(t.Context(), call); err != nil || e.Cause != f.call {
				t.Errorf("%s: the call is %s, want %s: %s, %v", f.fault, e.Cause, f.call, e.Raw, err)
			}
		}
	}

	// Outages. The node that sees them is the third.
	seen, asked := nodes[2], nodes[0]
	const first = 0x40
	post := func(n int) {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, seen.Info.OTA, strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Device-Id", id(n))
		r.Header.Set("Client-Id", "c-"+id(n))
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		_ = answer.Body.Close()
	}
	connect := func(n int) {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, strings.TrimSuffix(seen.Info.OTA, "ota/")+"v1/", nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Device-Id", id(n))
		r.Header.Set("Client-Id", "c-"+id(n))
		r.Header.Set("Authorization", "Bearer wrong")
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		_ = answer.Body.Close()
	}
	gone, sleeping, revoked, rotated, lost := simulate(seen, first, "--transport", "mqtt"), simulate(seen, first+1, "--transport", "websocket"), first+2, first+3, first+4
	for _, n := range []int{revoked, rotated, lost} {
		simulate(seen, n, "--transport", "mqtt", "--time-scale", "0.02")
	}
	for n := first; n <= lost; n++ {
		explained(asked, id(n), 30*time.Second, "well")
	}
	post(first + 5)    // a firewall: the configuration, then nothing
	post(first + 6)    // a member
	connect(first + 6) // with a wrong token
	connect(first + 7) // of a device that is not a member
	gone.Report(t)
	sleeping.Report(t)
	if _, errs, status := asked.Command(t, "devices", "revoke", id(revoked)); status != 0 {
		t.Errorf("revoke: %s", errs)
	}
	for _, verb := range []string{"revoke", "approve"} { // its credentials are those from before
		if _, errs, status := asked.Command(t, "devices", verb, id(rotated)); status != 0 {
			t.Errorf("%s: %s", verb, errs)
		}
	}
	explained(asked, id(first), 20*time.Second, "gone")
	explained(asked, id(first+1), 20*time.Second, "asleep")
	explained(asked, id(revoked), 20*time.Second, "revoked")
	explained(asked, id(rotated), 30*time.Second, "old_generation")
	explained(asked, id(first+5), 150*time.Second, "connect_not_seen") // after 30 s, whatever the scale
	explained(asked, id(first+6), 20*time.Second, "wrong_token")
	explained(asked, id(first+7), 20*time.Second, "stranger_refused")
	explained(asked, id(first+8), 20*time.Second, "never_seen")
	if r, err := asked.Refusals(t.Context()); err != nil || len(r.Items) == 0 || r.Items[0].Device != id(first+7) || r.Items[0].Node != "node-2" {
		t.Errorf("refusals: %s, %v", r.Raw, err)
	}
	out, errs, status := asked.Command(t, "explain", "--offline")
	if t.Logf("fleetd explain --offline: status %d\n%s%s", status, out, errs); status != 3 || !strings.Contains(out, "connect_not_seen") || !strings.Contains(out, "revoked") {
		t.Errorf("explain --offline: status %d", status)
	}
	if out, errs, status := asked.Command(t, "log", id(first)); status != 0 || !strings.Contains(out, "closed") || !strings.Contains(out, "connected") {
		t.Errorf("log: status %d\n%s%s", status, out, errs)
	}
	// A node that does not answer is named, and one that is lost is a cause.
	seen.Kill(t)
	if e, err := asked.ExplainDevice(t.Context(), id(lost)); err != nil || !slices.Contains(e.Missing, "node-2") {
		t.Errorf("with a node that was killed: %s, %v", e.Raw, err)
	}
	explained(asked, id(lost), 60*time.Second, "node_lost")
}

// problemCall returns the id of a call that failed.
func problemCall(err error) string {
	var p *apiclient.Problem
	if errors.As(err, &p) {
		return p.Call()
	}
	return ""
}

// explained waits until a node answers with one of the causes, and returns the explanation.
func (n *Node) explained(t testing.TB, device string, limit time.Duration, want ...string) (last apiclient.Why) {
	t.Helper()
	for deadline := time.Now().Add(scaledWait(limit)); time.Now().Before(deadline); time.Sleep(200 * time.Millisecond) {
		var err error
		if last, err = n.ExplainDevice(t.Context(), device); err == nil && slices.Contains(want, last.Cause) {
			t.Logf("%-17s %-17s %s", device, last.Cause, last.Sentence)
			return last
		}
	}
	t.Errorf("%s: %s, want %v\n%s", device, last.Cause, want, last.Raw)
	return last
}

// What happens while the database or NATS is away has its cause, too, and the answer names what could not be read.
func TestOutagesAreExplained(t *testing.T) {
	t.Parallel()
	const count = 15
	c := programs.StartCluster(t, ClusterOptions{Seed: 28})
	sims := map[string]*Simulation{}
	for i := range count {
		id := fmt.Sprintf("02:ef:00:00:00:%02x", i)
		sims[id] = programs.Simulate(t, c.OTA, "--devices", "1", "--mac-base", id, "--seed", fmt.Sprint(i+1), "--transport", "mqtt")
	}
	c.AwaitReady(t, count, time.Minute)
	held := map[string][]string{}
	for _, d := range c.Nodes[0].List(t) {
		held[d.Node] = append(held[d.Node], d.ID)
	}
	asked, other, alone := c.Nodes[0], held["node-1"], held["node-2"]
	if len(other) < 3 || len(alone) < 1 {
		t.Fatalf("another seed is needed: %v", held)
	}
	before, during, stays := other[0], other[1], other[2]
	sims[before].Report(t)
	asked.explained(t, before, 20*time.Second, "gone")

	c.BreakSQL(Cut)
	sims[during].Report(t)
	for _, id := range []string{before, during} {
		asked.explained(t, id, 20*time.Second, "gone")
	}
	asked.explained(t, stays, 20*time.Second, "well")
	c.BreakSQL(None)

	// The devices of a node without NATS are connected, and other nodes cannot tell.
	c.NATS[2].Break(0, Cut)
	cut := alone[0]
	c.Nodes[2].explained(t, cut, 20*time.Second, "well")
	if e := asked.explained(t, cut, 20*time.Second, "well", "node_lost"); !slices.Contains(e.Missing, "node-2") {
		t.Errorf("the node that does not answer is not named: %s", e.Raw)
	}
	e := c.Nodes[2].explained(t, stays, 20*time.Second, "well", "node_lost")
	if !slices.Contains(e.Missing, "node-1") {
		t.Errorf("asked on the node that is cut off: %s", e.Raw)
	}
	c.NATS[2].Break(0, None)
	for _, id := range []string{stays, cut} {
		asked.explained(t, id, 30*time.Second, "well")
	}
}
