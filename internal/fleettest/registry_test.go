package fleettest

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

// The database is away from three nodes for FLEETD_TEST_AWAY (a minute; by hand 10m),
// one of which is started meanwhile from its snapshot, with 300 devices that boot,
// connect, move and are called: all members come in, those revoked do not, unknown
// wait, edits are refused at once. Afterwards every answer is in the log, and rows
// and nodes are what the log has.
func TestMembersWithoutTheDatabase(t *testing.T) {
	long(t)
	t.Parallel()
	away := time.Minute
	if text := os.Getenv("FLEETD_TEST_AWAY"); text != "" {
		var err error
		if away, err = time.ParseDuration(text); err != nil {
			t.Fatalf("FLEETD_TEST_AWAY: %v", err)
		}
	}
	const each = 150
	c := programs.StartCluster(t, ClusterOptions{Seed: 8})
	k := c.NewChecker(t)
	simulate := func(base string, devices int, args ...string) *Simulation {
		return programs.Simulate(t, c.OTA, append([]string{"--devices", fmt.Sprint(devices), "--mac-base", base + ":00:00:00:00", "--seed", "8",
			"--profile", "fw-2.4,fw-2.1", "--ramp", "60", "--reconnect", "500ms", "--reconnect-jitter", "2s"}, args...)...)
	}
	stay, leave, bad := simulate("02:e1", each), simulate("02:e2", each), simulate("02:e3", 2)
	c.AwaitReady(t, 2*each+2, 60*time.Second)
	random := rand.New(rand.NewPCG(8, 8))
	device := func(base string, n int) string { return fmt.Sprintf("%s:00:00:00:%02x", base, n) }
	var ids []string
	for n := range each {
		ids = append(ids, device("02:e1", n))
		if a := k.Edit(n%3, device("02:e2", n), []string{"name", "label:room"}[n%2]); a.Code != "ok" {
			t.Fatal(a)
		}
	}
	for n := range 2 { // these two do not come again
		if a := k.Revoke(n, device("02:e3", n)); a.Code != "ok" {
			t.Fatal(a)
		}
	}
	leave.Report(t)
	bad.Report(t)
	for _, n := range c.Nodes {
		n.AwaitStored(t)
	}

	c.Nodes[2].Kill(t)
	c.HTTP.Break(2, Cut)
	c.MQTT.Break(2, Cut)
	c.BreakSQL(Cut)
	begun := time.Now()
	c.Nodes[2].Run(t)
	c.HTTP.Break(2, None)
	c.MQTT.Break(2, None)
	load := c.StartLoad(t, ids, LoadOptions{Seed: 8, Callers: 4, Pause: 100 * time.Millisecond, Timeout: 15 * time.Second})
	back, bad, unknown := simulate("02:e2", each), simulate("02:e3", 2), simulate("02:e4", 5)
	c.Nodes[0].Await(t, "all members are in", 45*time.Second, func() bool { return c.Held(t) == 2*each })
	t.Logf("all members are in %v after the database went", time.Since(begun).Round(time.Second))
	if held := c.Nodes[2].Metric(t, "fleetd_devices"); held == 0 {
		t.Error("nobody came to the node that started from its snapshot")
	}
	for round := 0; time.Since(begun) < away-10*time.Second; round++ {
		via := random.IntN(3)
		if a := k.Edit(via, device("02:e2", random.IntN(each)), []string{"name", "label:room"}[round%2]); a.Code != "unavailable" || a.End.Sub(a.Begun) > 2*time.Second {
			t.Errorf("without the database, after %v: %v", a.End.Sub(a.Begun), a)
		}
		if round%20 == 10 { // the devices of one node move to the others
			c.HTTP.Break(via, Cut)
			c.MQTT.Break(via, Cut)
			time.Sleep(2 * time.Second) // without a way for the devices
			c.HTTP.Break(via, None)
			c.MQTT.Break(via, None)
		}
		time.Sleep(300 * time.Millisecond) // the outage lasts for many edits
	}
	revoked := device("02:e2", 7)
	if a := k.Revoke(1, revoked); a.Code != "unrecorded" {
		t.Error(a)
	}
	c.Nodes[0].Await(t, "who was revoked meanwhile is out, all others are in", 30*time.Second, func() bool { return c.Held(t) == 2*each-1 })
	for i, n := range c.Nodes {
		for _, id := range []string{revoked, device("02:e3", 0), device("02:e3", 1)} {
			if status := n.otaStatus(t, id); status != 403 && status != 401 && status != 200 {
				t.Errorf("node-%d answers the check of the revoked device %s with %d", i, id, status)
			}
		}
	}
	for _, sim := range []*Simulation{bad, unknown} {
		for _, d := range sim.Report(t).Devices {
			if d.Connects != 0 {
				t.Errorf("%s has connected %d times, and is %s", d.ID, d.Connects, d.State)
			}
		}
	}
	time.Sleep(away - time.Since(begun)) // the rest of the outage
	c.BreakSQL(None)
	c.Nodes[0].Await(t, "edits are answered again", 30*time.Second, func() bool { return k.Edit(0, ids[0], "name").Code == "ok" })
	c.Nodes[0].Await(t, "all but the revoked are in", 30*time.Second, func() bool { return c.Held(t) == 2*each-1 })
	load.Stop()
	outcomes := load.Outcomes()
	t.Logf("answers: %v; calls: %v", k.Answers(), outcomes)
	failed := 0 // while their devices move
	for outcome, n := range outcomes {
		if outcome != "ok" {
			failed += n
		}
	}
	if outcomes["ok"] < 5*failed || len(load.wrong) > 0 || len(load.slow) > 0 {
		t.Errorf("calls: %v, wrong %v, slow %v", outcomes, load.wrong, load.slow)
	}
	k.Check()
	for _, sim := range []*Simulation{stay, back} {
		if r := sim.Report(t); r.Totals.DuplicateCallIDs != 0 {
			t.Errorf("%d calls were executed twice", r.Totals.DuplicateCallIDs)
		}
	}
}

// Operators edit the same devices through three nodes at once, with clocks five
// minutes apart, then with NATS cut between the nodes, then with the database cut
// from one of them: what was answered holds everywhere, and the log has all of it.
func TestEditsOnAllNodes(t *testing.T) {
	t.Parallel()
	c := programs.StartCluster(t, ClusterOptions{Seed: 9, Clocks: []time.Duration{-5 * time.Minute, 0, 5 * time.Minute}})
	sim := programs.Simulate(t, c.OTA, "--devices", "9", "--mac-base", "02:e5:00:00:00:00", "--seed", "9")
	c.AwaitReady(t, 9, 60*time.Second)
	k := c.NewChecker(t)
	phase := func(lasts time.Duration) (codes map[int]map[string]int) {
		end := time.Now().Add(lasts)
		codes = map[int]map[string]int{}
		var mu sync.Mutex
		var editors sync.WaitGroup
		for via := range c.Nodes {
			for n := range 3 {
				editors.Go(func() {
					random := rand.New(rand.NewPCG(uint64(via), uint64(n)))
					for time.Now().Before(end) {
						aspect := []string{"name", "label:room", "label:floor", fmt.Sprint("label:node-", via)}[random.IntN(4)]
						a := k.Edit(via, fmt.Sprintf("02:e5:00:00:00:%02x", random.IntN(9)), aspect)
						mu.Lock()
						if codes[via] == nil {
							codes[via] = map[string]int{}
						}
						codes[via][a.Code]++
						mu.Unlock()
						time.Sleep(20 * time.Millisecond) // edits go on through every phase
					}
				})
			}
		}
		editors.Wait()
		return codes
	}
	only := func(when string, codes map[string]int, want string) {
		if len(codes) != 1 || codes[want] == 0 {
			t.Errorf("%s: %v", when, codes)
		}
	}
	for via, codes := range phase(scaled(8 * time.Second)) {
		only(fmt.Sprint("node-", via), codes, "ok")
	}
	for i := range c.NATS {
		c.NATS[i].Break(0, Stalled)
	}
	for via, codes := range phase(scaled(15 * time.Second)) {
		only(fmt.Sprintf("node-%d without NATS", via), codes, "ok")
	}
	for i := range c.NATS {
		c.NATS[i].Break(0, None)
	}
	c.SQL[1].Break(0, Cut)
	c.Nodes[1].Await(t, "the node notices that its database is away", 10*time.Second, func() bool { return k.Edit(1, "02:e5:00:00:00:00", "name").Code == "unavailable" })
	for via, codes := range phase(scaled(15 * time.Second)) {
		want := "ok"
		if via == 1 {
			want = "unavailable"
		}
		only(fmt.Sprintf("node-%d while node-1 has no database", via), codes, want)
	}
	c.SQL[1].Break(0, None)
	c.Nodes[1].Await(t, "node-1 edits again", 20*time.Second, func() bool { return k.Edit(1, "02:e5:00:00:00:00", "name").Code == "ok" })
	log := k.Check()
	t.Logf("%d changes; answers: %v", len(log), k.Answers())
	var earlier bool // the clocks disagree, and nobody goes by them
	for i := 1; i < len(log); i++ {
		earlier = earlier || log[i].At.Before(log[i-1].At.Add(-4*time.Minute))
	}
	if !earlier {
		t.Error("the clocks of the nodes do not show in the log")
	}
	sim.Report(t)
}

// What was answered before a restore of an older copy of the database is gone, and
// every node follows the restored one, devices included.
func TestFleetFollowsARestore(t *testing.T) {
	t.Parallel()
	c := programs.StartCluster(t, ClusterOptions{Seed: 10})
	sim := programs.Simulate(t, c.OTA, "--devices", "6", "--mac-base", "02:e6:00:00:00:00", "--seed", "10")
	c.AwaitReady(t, 6, 60*time.Second)
	k := c.NewChecker(t)
	for n := range 6 {
		k.Edit(n%3, fmt.Sprintf("02:e6:00:00:00:%02x", n), "name")
	}
	for _, n := range c.Nodes {
		n.AwaitStored(t)
	}
	kept := c.copyRegistry(t)
	yesterday := len(k.answers)
	for n := range 6 {
		k.Edit(n%3, fmt.Sprintf("02:e6:00:00:00:%02x", n), "label:room")
	}
	k.Edit(0, "02:e6:00:00:00:00", "name")
	lost := slices.Clone(k.answers[yesterday:])
	k.answers = k.answers[:yesterday]
	kept.restore(t)
	for _, a := range lost[:3] { // the restored history goes on differently
		if b := k.Edit(a.Via, a.Device, "label:floor"); b.Code != "ok" {
			t.Error(b)
		}
	}
	log := k.Check()
	for _, a := range lost {
		for _, change := range log {
			if strings.Contains(string(change.Value), `"`+a.Value+`"`) {
				t.Errorf("%v, and it is in the restored log", a)
			}
		}
	}
	for i, n := range c.Nodes {
		if restored := n.Metric(t, "fleetd_registry_restored_total"); restored != 1 {
			t.Errorf("node-%d noticed %v restores", i, restored)
		}
		if warnings := strings.Count(n.Log.String(), "the log of changes went backwards"); warnings != 1 {
			t.Errorf("node-%d warned %d times", i, warnings)
		}
	}
	sim.Report(t)
}

// registryTables are what a restore of the registry replaces.
var registryTables = []string{"changes", "devices", "device_labels", "fleet_counts", "credential_exceptions", "fleet_revision"}

// copied is the registry at one time.
type copied struct{ c *Cluster }

func (c *Cluster) copyRegistry(t testing.TB) copied {
	t.Helper()
	for _, table := range registryTables {
		c.DB.Exec(t, "CREATE TABLE yesterday_"+table+" AS SELECT * FROM "+table)
	}
	return copied{c}
}

// restore puts the copy in place of what there is, while no node writes.
func (x copied) restore(t testing.TB) {
	t.Helper()
	tx, err := x.c.DB.Raw.Begin()
	if err != nil {
		t.Fatal(err)
	}
	exec := func(text string) {
		if _, err := tx.Exec(text); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
	}
	for _, table := range registryTables {
		exec("LOCK TABLE " + table + " IN EXCLUSIVE MODE") // which readers, that have their own order, do not wait for
	}
	for _, table := range registryTables {
		exec("DELETE FROM " + table)
		var columns string // without those that Postgres fills in
		if err := tx.QueryRow("SELECT string_agg(quote_ident(column_name), ', ') FROM information_schema.columns WHERE table_name = $1 AND is_generated = 'NEVER'", table).Scan(&columns); err != nil {
			t.Fatal(err)
		}
		exec("INSERT INTO " + table + " (" + columns + ") SELECT " + columns + " FROM yesterday_" + table)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
}

// A file of 10,000 devices (1,000 in short tests) with three faults names them by line and column, and
// nothing of it is taken; without them the devices are there, and the export, read
// again, changes nothing.
func TestImportOfTenThousand(t *testing.T) {
	t.Parallel()
	rows := 10_000
	if testing.Short() {
		rows = 1_000
	}
	node := programs.Start(t)
	dir := t.TempDir()
	lines := []string{"id,name,client_id,label.room"}
	for i := range rows {
		lines = append(lines, fmt.Sprintf("02:e7:00:%02x:%02x:%02x,lamp %d,client-%d,room-%d", i>>16, i>>8&255, i&255, i, i, i%50))
	}
	write := func(name string, lines []string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	sound := write("sound.csv", lines)
	lines[17] = "no/id,lamp,client,room"
	lines[rows/2] = lines[rows/2-1]
	lines[rows-1] = strings.Replace(lines[rows-1], "room-", strings.Repeat("x", 300), 1)
	stdout, stderr, status := node.Command(t, "devices", "import", write("faulty.csv", lines))
	column := strings.Index(lines[rows-1], "xxx") + 1
	if want := []string{"18:1: ", fmt.Sprintf("%d:1: ", rows/2+1), fmt.Sprintf("%d:%d: ", rows, column)}; status == 0 || !allIn(stderr, want) || stdout != "" {
		t.Errorf("status %d\n%s%s\nwant %q", status, stdout, stderr, want)
	}
	if n := len(node.List(t)); n != 0 {
		t.Errorf("%d devices of a file that was refused", n)
	}
	if stdout, stderr, status := node.Command(t, "devices", "import", sound); status != 0 || !strings.Contains(stdout, fmt.Sprintf("%d rows: %d created, 0 changed, 0 unchanged", rows, rows)) {
		t.Fatalf("status %d\n%s%s", status, stdout, stderr)
	}
	exported := filepath.Join(dir, "exported.csv")
	if _, stderr, status := node.Command(t, "devices", "export", "-o", exported); status != 0 {
		t.Fatal(stderr)
	}
	content, err := os.ReadFile(exported)
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(content), "\n"); n != rows+1 || !strings.Contains(string(content), "\n02:e7:00:00:02:bc,lamp 700,") {
		t.Errorf("%d lines of export: %.300s", n, content)
	}
	if stdout, stderr, status := node.Command(t, "devices", "import", exported); status != 0 || !strings.Contains(stdout, fmt.Sprintf("%d rows: 0 created, 0 changed, %d unchanged", rows, rows)) {
		t.Errorf("status %d\n%s%s", status, stdout, stderr)
	}
	if counts, err := apiclient.Get[api.FleetCounts](t.Context(), node.Client, apiclient.Query{"select": "room=room-7"}, "fleet"); err != nil || counts.Total != int64(rows/50) {
		t.Errorf("%d devices in room-7, %v", counts.Total, err)
	}
	if _, err := node.PatchSelected(t.Context(), "room=room-7", api.SelectionEdit{Labels: map[string]*string{"room": nil}}); err != nil {
		t.Error(err)
	}
	if counts, err := apiclient.Get[api.FleetCounts](t.Context(), node.Client, apiclient.Query{"select": "!room"}, "fleet"); err != nil || counts.Total != int64(rows/50) {
		t.Errorf("%d devices without a room, %v", counts.Total, err)
	}
}

func allIn(text string, parts []string) bool {
	for _, part := range parts {
		if !strings.Contains(text, part) {
			return false
		}
	}
	return true
}
