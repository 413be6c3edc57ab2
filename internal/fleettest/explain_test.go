package fleettest

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/racetest"
	"fleetd/internal/store/storetest"
	"fleetd/simulator/firmware"
)

// explainFault is a row of the table.
type explainFault struct {
	fault string
	args  []string // of the simulator
	calls int      // made with a short timeout
	want  []string // one of these causes
	call  string   // cause of the last call
}

// explainFaults is the table of faults and the causes that they have, each seen by the node
// seenBy and asked on the node askedAt. unknown is never right.
var explainFaults = []explainFault{
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
	{fault: "hostile-text", want: []string{"well"}},
	// Faults of images show once a device has been upgraded.
	{fault: "crash-boot", want: []string{"well"}},
	{fault: "crash-later", want: []string{"well"}},
	{fault: "reject-image", want: []string{"well"}},
	{fault: "cut-download", want: []string{"well"}},
	{fault: "wrong-board", want: []string{"well"}},
	{fault: "foreign-server", want: []string{"well"}},
	{fault: "power-cut", want: []string{"well"}},
}

// seenBy and askedAt are the numbers of two nodes, for the row of a table.
func seenBy(row int) int { return row % 2 }

func askedAt(row int) int { return (seenBy(row) + 1 + row/2%2) % 3 }

// A fault that the simulator learns has to have its cause.
func TestEveryFaultHasARow(t *testing.T) {
	for _, fault := range firmware.FaultNames() {
		if !slices.ContainsFunc(explainFaults, func(f explainFault) bool { return f.fault == fault }) {
			t.Errorf("the table of causes lacks the fault %s", fault)
		}
	}
	for row, f := range explainFaults {
		if seenBy(row) == askedAt(row) {
			t.Errorf("the fault %s is asked on the node that saw it", f.fault)
		}
	}
}

// Every fault of a device and every outage has its cause, also on a node that did not see
// it.
func TestEveryFaultIsExplained(t *testing.T) {
	long(t)
	t.Parallel()
	db := storetest.Postgres(t)
	url, prefix, _, _ := natsServer(t)
	var nodes []*Node
	for i := range 3 {
		nodes = append(nodes, programs.Start(t, "--database", db.URL, "--nats", url, "--nats-prefix", prefix, "--secret", "one fleet, one secret", "--node", fmt.Sprintf("node-%d", i)))
	}
	awaitAcquainted(t, nodes)
	id := func(n int) string { return fmt.Sprintf("02:ee:00:00:00:%02x", n) }
	simulate := func(on *Node, n int, args ...string) *Simulation {
		return programs.Simulate(t, on.Info.OTA, append([]string{"--devices", "1", "--mac-base", id(n), "--seed", fmt.Sprint(n + 1)}, args...)...)
	}
	explained := func(on *Node, device string, limit time.Duration, want ...string) {
		t.Helper()
		on.explained(t, device, limit, want...)
	}

	lastCall := ""
	for i, f := range explainFaults {
		args := []string{"--transport", "mqtt"}
		if f.fault != "" {
			args = append(args, "--fault", f.fault)
		}
		simulate(nodes[seenBy(i)], i, append(args, f.args...)...)
	}
	for i, f := range explainFaults {
		seen, at := seenBy(i), askedAt(i)
		asked, device := nodes[at], id(i)
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
			asked.Await(t, f.fault+" answers late", 20*time.Second, func() bool {
				e, err := asked.ExplainCall(t.Context(), call)
				return err == nil && e.Cause == f.call
			})
		}
		t.Logf("fault %q, seen by node-%d, asked on node-%d:", f.fault, seen, at)
		explained(asked, device, 60*time.Second, f.want...)
		if f.call != "" {
			lastCall = call
			if e, err := nodes[3-seen-at].ExplainCall(t.Context(), call); err != nil || e.Cause != f.call {
				t.Errorf("%s: the call is %s, want %s: %+v, %v", f.fault, e.Cause, f.call, e, err)
			}
		}
	}

	const wakeable = "asleep"
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
	for _, o := range []struct {
		outage string
		device int
		limit  time.Duration
		cause  string
	}{
		{"its power is off", first, 20 * time.Second, "gone"},
		{"nobody wakes it", first + 1, 20 * time.Second, wakeable},
		{"it was revoked", revoked, 20 * time.Second, "revoked"},
		{"its token was rotated", rotated, 30 * time.Second, "old_generation"},
		{"a firewall", first + 5, 150 * time.Second, "connect_not_seen"}, // after 30 s, whatever the scale
		{"a token of another fleet", first + 6, 20 * time.Second, "wrong_token"},
		{"it is not a member", first + 7, 20 * time.Second, "stranger_refused"},
		{"nothing was ever seen of it", first + 8, 20 * time.Second, "never_seen"},
	} {
		t.Logf("%s, seen by node-2, asked on node-0:", o.outage)
		explained(asked, id(o.device), o.limit, o.cause)
	}
	// A key for some devices learns nothing of others, on any node.
	limited := asked.limitedTo(t, "device="+id(first))
	explained(limited, id(first), 20*time.Second, "gone")
	for _, device := range []string{id(first + 1), id(rotated)} {
		_, explainErr := apiclient.Get[api.Why](t.Context(), limited.Client, nil, "devices", device, "explain")
		_, logErr := apiclient.Get[api.Log](t.Context(), limited.Client, apiclient.Query{"limit": "10"}, "devices", device, "log")
		_, traceErr := limited.StartTrace(t.Context(), device, api.NewTrace{})
		_, callErr := limited.ExplainCall(t.Context(), lastCall)
		for what, err := range map[string]error{"explain": explainErr, "log": logErr, "trace": traceErr, "a call of another key": callErr} {
			if p := (*apiclient.Problem)(nil); !errors.As(err, &p) || p.Status != http.StatusNotFound {
				t.Errorf("%s of %s under a key for another device: %v", what, device, err)
			}
		}
	}
	if out, errs, status := asked.Command(t, "log", id(slices.IndexFunc(explainFaults, func(f explainFault) bool { return f.fault == "hostile-text" }))); status != 0 || strings.ContainsAny(out, "\x1b\x07\u202e") || !utf8.ValidString(out) {
		t.Errorf("log of a device with hostile texts: status %d\n%q%s", status, out, errs)
	}
	if r, err := apiclient.Get[api.Log](t.Context(), asked.Client, apiclient.Query{"limit": "1000"}, "refusals"); err != nil || len(r.Items) == 0 || r.Items[0].Device != id(first+7) || r.Items[0].Node != "node-2" {
		t.Errorf("refusals: %+v, %v", r, err)
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
	if e, err := apiclient.Get[api.Why](t.Context(), asked.Client, nil, "devices", id(lost), "explain"); err != nil || !slices.Contains(e.Missing, "node-2") {
		t.Errorf("with a node that was killed: %+v, %v", e, err)
	}
	explained(asked, id(lost), 60*time.Second, "node_lost")
}

// awaitAcquainted waits until every node lists all: it learns of those that start after it
// when it next renews its lease.
func awaitAcquainted(t testing.TB, nodes []*Node) {
	t.Helper()
	for _, n := range nodes {
		n.Await(t, fmt.Sprintf("every node lists all %d", len(nodes)), 20*time.Second, func() bool {
			list, err := apiclient.Collect(apiclient.List[api.Node](t.Context(), n.Client, nil, "nodes"))
			return err == nil && len(list) == len(nodes)
		})
	}
}

// limitedTo returns the node as a key for some devices sees it.
func (n *Node) limitedTo(t testing.TB, selection string) *Node {
	t.Helper()
	key, err := n.CreateKey(t.Context(), api.NewKey{Name: "limited", Scopes: []string{"events:read"}, Devices: api.Selection{Text: selection}})
	if err != nil {
		t.Fatal(err)
	}
	client, err := apiclient.New(n.Info.API, key.Token)
	if err != nil {
		t.Fatal(err)
	}
	return &Node{Client: client, Info: n.Info}
}

// With the recorder off the rest explains a device: its state and the events.
func TestExplainWithRecorderOff(t *testing.T) {
	t.Parallel()
	n := programs.Start(t, "--recorder-memory", "0")
	sim := programs.Simulate(t, n.Info.OTA, "--devices", "6", "--mac-base", "02:ed:00:00:00:00", "--transport", "mqtt")
	n.AwaitReady(t, 6)
	devices := n.List(t)
	sim.Report(t)
	for _, d := range devices {
		if e := n.explained(t, d.ID, 20*time.Second, "gone"); len(e.Reach) != 0 || len(e.Evidence) == 0 {
			t.Errorf("%s: %+v", d.ID, e)
		}
	}
	if out, errs, status := n.Command(t, "explain", "--offline"); status != 3 || !regexp.MustCompile(`(?m)^gone +6 `).MatchString(out) {
		t.Errorf("explain --offline: status %d\n%s%s", status, out, errs)
	}
}

// Whoever knows the id of a device and nothing else neither fills its log nor changes why it is offline.
func TestStrangersDoNotFillTheLog(t *testing.T) {
	t.Parallel()
	n := programs.Start(t)
	const device = "02:ea:00:00:00:00"
	sim := programs.Simulate(t, n.Info.OTA, "--devices", "1", "--mac-base", device, "--transport", "mqtt")
	n.AwaitReady(t, 1)
	for range 200 {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, n.Info.OTA, strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Device-Id", device)
		r.Header.Set("Client-Id", "somebody")
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		_ = answer.Body.Close()
	}
	sim.Report(t)
	var kinds []string
	n.Await(t, "the end of its connection is in its log", 30*time.Second, func() bool {
		l, err := apiclient.Get[api.Log](t.Context(), n.Client, apiclient.Query{"kind": "closed", "limit": "10"}, "devices", device, "log")
		kinds = nil
		for _, x := range l.Items {
			kinds = append(kinds, x.Kind+" "+x.Cause)
		}
		return err == nil && slices.Contains(kinds, "closed gone")
	})
}

// problemCall returns the id of a call that failed.
func problemCall(err error) string {
	var p *apiclient.Problem
	if errors.As(err, &p) {
		return p.Call
	}
	return ""
}

// explained waits until a node answers with one of the causes, and returns the explanation.
func (n *Node) explained(t testing.TB, device string, limit time.Duration, want ...string) (last api.Why) {
	t.Helper()
	for deadline := time.Now().Add(scaledWait(limit)); time.Now().Before(deadline); time.Sleep(200 * time.Millisecond) {
		var err error
		if last, err = apiclient.Get[api.Why](t.Context(), n.Client, nil, "devices", device, "explain"); err == nil && slices.Contains(want, last.Cause) {
			t.Logf("%-17s %-17s %s", device, last.Cause, last.Sentence)
			return last
		}
	}
	t.Errorf("%s: %s, want %v\n%+v", device, last.Cause, want, last)
	return last
}

// Of a fleet with more devices offline than a page has, all are explained; those that went
// away together have what they have in common as their cause. Both asked on another node than
// the one that saw it.
func TestManyOfflineDevicesAreExplained(t *testing.T) {
	t.Parallel()
	known, together := racetest.Size(1500, 1100), 20 // known is more than one page
	db := storetest.Postgres(t)
	url, prefix, _, _ := natsServer(t)
	var nodes []*Node
	for i := range 2 {
		nodes = append(nodes, programs.Start(t, "--database", db.URL, "--nats", url, "--nats-prefix", prefix, "--secret", "one fleet, one secret", "--node", fmt.Sprintf("node-%d", i)))
	}
	seen, asked := nodes[0], nodes[1]
	lines := []string{"id,client_id,label.room"}
	for i := range known {
		lines = append(lines, fmt.Sprintf("02:e9:00:01:%02x:%02x,client-%d,room-%d", i>>8, i&255, i, i%2))
	}
	file := filepath.Join(t.TempDir(), "devices.csv")
	if err := os.WriteFile(file, []byte(strings.Join(lines, "\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, errs, status := seen.Command(t, "devices", "import", file); status != 0 {
		t.Fatalf("import: %s%s", out, errs)
	}
	sim := programs.Simulate(t, seen.Info.OTA, "--devices", fmt.Sprint(together), "--mac-base", "02:e9:00:00:00:00", "--seed", "1", "--transport", "mqtt")
	// Counts of a selection are cached for 10 s, metrics are not.
	seen.Await(t, "all are online", time.Minute, func() bool { return seen.Metric(t, "fleetd_devices", `mcp_state="ready"`) == float64(together) })
	sim.Report(t)
	one := "02:e9:00:00:00:07"
	all := fmt.Sprintf("%d others with the address 127.0.0.1 went away within 5 s of it: look at the network, not the device", together-1)
	asked.Await(t, "the others are counted", 30*time.Second, func() bool {
		e, err := apiclient.Get[api.Why](t.Context(), asked.Client, nil, "devices", one, "explain")
		return err == nil && e.Cause == "gone" && strings.Contains(e.Sentence, all)
	})
	begun := time.Now()
	out, errs, status := asked.Command(t, "explain", "--offline")
	if t.Logf("fleetd explain --offline of %d devices: status %d after %v\n%s%s", known+together, status, time.Since(begun), out, errs); status != 3 {
		t.Errorf("status %d", status)
	}
	for _, want := range []string{fmt.Sprintf(`never_seen +%d +\S`, known), fmt.Sprintf(`gone +%d +\S`, together)} {
		if !regexp.MustCompile(`(?m)^` + want).MatchString(out) {
			t.Errorf("no line is %s", want)
		}
	}
	if out, _, status := asked.Command(t, "explain", "--offline", "--select", "room=room-1"); status != 3 || !strings.Contains(out, fmt.Sprint(known/2)) || strings.Contains(out, "gone") {
		t.Errorf("of a selection: status %d\n%s", status, out)
	}
}

// What happens while the database or NATS is away has its cause, too, and the answer names what could not be read.
func TestOutagesAreExplained(t *testing.T) {
	long(t)
	t.Parallel()
	const count = 15
	c := programs.StartCluster(t, ClusterOptions{Seed: 28})
	sims := map[string]*Simulation{}
	for i := range count {
		id := fmt.Sprintf("02:ef:00:00:00:%02x", i)
		sims[id] = programs.Simulate(t, c.OTA, "--devices", "1", "--mac-base", id, "--seed", fmt.Sprint(i+1), "--transport", "mqtt")
	}
	c.AwaitReady(t, count, time.Minute)
	awaitAcquainted(t, c.Nodes) // without the database they learn of no new one
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
		t.Errorf("the node that does not answer is not named: %+v", e)
	}
	e := c.Nodes[2].explained(t, stays, 20*time.Second, "well", "node_lost")
	if !slices.Contains(e.Missing, "node-1") {
		t.Errorf("asked on the node that is cut off: %+v", e)
	}
	c.NATS[2].Break(0, None)
	for _, id := range []string{stays, cut} {
		asked.explained(t, id, 30*time.Second, "well")
	}
}
