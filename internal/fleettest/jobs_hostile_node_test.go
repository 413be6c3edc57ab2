package fleettest

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

// Case 4, and a database that is away in the middle: nothing begins without it, calls that people make go on,
// what expired meanwhile was not sent, and the rest goes on.
func TestJobsWithoutTheDatabase(t *testing.T) {
	long(t)
	t.Parallel()
	const count = 100
	c := programs.StartCluster(t, ClusterOptions{Nodes: 2, Seed: 31})
	var ids []string
	for i := range count {
		ids = append(ids, fmt.Sprintf("02:ba:00:00:00:%02x", i))
	}
	sim := programs.Simulate(t, c.OTA, "--devices", fmt.Sprint(count), "--mac-base", ids[0], "--fault", "late-reply", "--late", "2s")
	const direct = "02:bf:00:00:00:00"
	programs.Simulate(t, c.OTA, "--devices", "1", "--mac-base", direct)
	c.AwaitReady(t, count+1, time.Minute)
	a := newJobAccount(31, c.Nodes, ids)
	away := scaled(time.Minute)
	until := api.At(time.Now().Add(away / 2))
	for range 10 { // each device takes two seconds for a call
		a.create(t, func(j *api.NewJob) { j.When = &api.JobWhen{Until: until} })
	}
	a.create(t, nil)
	c.Nodes[0].Await(t, "tasks run", 10*time.Second, func() bool { return c.DB.Count(t, "SELECT count(*) FROM tasks WHERE state = 'running'") > count/2 })
	c.BreakSQL(Cut)
	load := c.StartLoad(t, []string{direct}, LoadOptions{Seed: 31, Callers: 4, Pause: 50 * time.Millisecond, Timeout: 5 * time.Second})
	time.Sleep(time.Second) // a commit that was on its way
	const begun = "SELECT count(*) FROM tasks WHERE state <> 'waiting'"
	before := c.DB.Count(t, begun)
	time.Sleep(away)
	if n := c.DB.Count(t, begun); n != before {
		t.Errorf("%d tasks began without the database", n-before)
	}
	c.BreakSQL(None)
	a.settle(t, time.Minute)
	load.Stop()
	if outcomes := load.Outcomes(); len(outcomes) != 1 || outcomes["ok"] < 100 {
		t.Errorf("calls meanwhile: %v", outcomes)
	}
	outcomes := a.judge(t, sim.Report(t))
	if outcomes["ok"]+outcomes["expired"] != 11*count || outcomes["expired"] < 5*count || outcomes["ok"] < count {
		t.Errorf("outcomes %v", outcomes)
	}
	t.Log(outcomes)
}

// Case 9: what ends between the creation of a task and its beginning keeps it from being sent.
func TestRightsAtTheBeginning(t *testing.T) {
	t.Parallel()
	const base = "02:bb:00:00:00:0"
	node := programs.Start(t)
	simulate := func(profile string) *Simulation {
		return programs.Simulate(t, node.Info.OTA, "--devices", "6", "--mac-base", base+"0", "--profile", profile)
	}
	first := simulate("fw-2.4")
	node.AwaitReady(t, 6)
	if _, err := node.PatchSelected(t.Context(), "device=*", api.SelectionEdit{Labels: map[string]*string{"room": new("lab")}}); err != nil {
		t.Fatal(err)
	}
	first.Report(t)
	node.Await(t, "the devices are away", 30*time.Second, func() bool { return node.Ready(t) == 0 })

	a := newJobAccount(0, []*Node{node}, nil)
	// by creates a job for a device, as a key.
	by := func(device string, key api.NewKey, tool string) (job string, keyID string) {
		t.Helper()
		key.Scopes = []string{"devices:read", "tools:call", "tools:call:user", "jobs", "jobs:read"}
		made, err := node.CreateKey(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		client, err := apiclient.New(node.Info.API, made.Token)
		if err != nil {
			t.Fatal(err)
		}
		marker := fmt.Sprint("m", len(a.all))
		spec := markedJob(marker, device)
		spec.Action.Call.Tool = tool
		j, err := apiclient.Send[api.Job](t.Context(), client, apiclient.Request{Method: "POST", Path: []string{"jobs"}, Body: spec})
		if err != nil {
			t.Fatal(err)
		}
		a.all[j.ID] = marker
		return j.ID, made.ID
	}
	revokedJob, revoked := by(base+"0", api.NewKey{Name: "revoked"}, volume)
	denied, _ := by(base+"1", api.NewKey{Name: "denied"}, volume)
	forgotten, _ := by(base+"2", api.NewKey{Name: "forgotten"}, volume)
	unlabelled, _ := by(base+"3", api.NewKey{Name: "label", Devices: api.Selection{Text: "room=lab"}}, volume)
	vanished, _ := by(base+"4", api.NewKey{Name: "tool"}, "self.get_system_info")
	stays, _ := by(base+"5", api.NewKey{Name: "stays", Devices: api.Selection{Text: "room=lab"}}, volume)

	if _, err := node.RevokeKey(t.Context(), revoked); err != nil {
		t.Fatal(err)
	}
	policy := `{"version":1,"rules":[{"name":"quiet","devices":{"device":"` + base + `1"},"tools":["` + volume + `"],"action":"deny"}]}`
	if _, err := node.SetPolicy(t.Context(), json.RawMessage(policy), 0); err != nil {
		t.Fatal(err)
	}
	if err := node.Forget(t.Context(), base+"2"); err != nil {
		t.Fatal(err)
	}
	if _, err := node.PatchSelected(t.Context(), "device="+base+"3", api.SelectionEdit{Labels: map[string]*string{"room": nil}}); err != nil {
		t.Fatal(err)
	}

	sim := simulate("fw-1.9") // without its tool
	node.awaitJob(t, stays, "done")
	for name, tt := range map[string]struct{ job, state, outcome, code string }{
		"key":    {revokedJob, "halted", "", ""},
		"policy": {denied, "done", "refused", "tool_denied"},
		"device": {forgotten, "done", "gone", ""},
		"label":  {unlabelled, "done", "refused", "forbidden"},
		"tool":   {vanished, "done", "refused", "tool_unknown"},
		"stays":  {stays, "done", "ok", ""},
	} {
		j := node.awaitJob(t, tt.job, tt.state)
		if row := a.rows(t, tt.job)[0]; row.Outcome != tt.outcome || tt.code != "" && row.Code != tt.code {
			t.Errorf("%s: %s %s, %s %s %s", name, j.State, j.Reason, row.Outcome, row.Code, row.Detail)
		}
		// security: K21
		if name == "key" && (j.Reason != "key" || j.Counts.Waiting != 1) {
			t.Errorf("the job of a key that has ended: %s, %+v", j.Reason, j.Counts)
		}
	}
	if r := sim.Report(t); r.Totals.CallsTotal != 1 || r.Totals.Markers[a.all[stays]] != 1 {
		t.Errorf("executed: %v", r.Totals.Markers)
	}
}

// Case 12: of the rounds that came while a device was away it gets the newest, once.
func TestMinuteJob(t *testing.T) {
	long(t)
	t.Parallel()
	const id = "02:bc:00:00:00:00"
	node := programs.Start(t)
	first := programs.Simulate(t, node.Info.OTA, "--devices", "1", "--mac-base", id)
	node.AwaitReady(t, 1)
	first.Report(t)
	node.Await(t, "the device is away", 30*time.Second, func() bool { return node.Ready(t) == 0 })
	a := newJobAccount(0, []*Node{node}, []string{id})
	job := a.create(t, func(j *api.NewJob) { j.When = &api.JobWhen{Cron: "* * * * *"} })
	node.Await(t, "two rounds have come", 3*time.Minute, func() bool {
		j, err := node.Job(t.Context(), job)
		return err == nil && j.Round == 2 && j.Counts.Waiting == 1
	})
	sim := programs.Simulate(t, node.Info.OTA, "--devices", "1", "--mac-base", id)
	node.Await(t, "the newest is done", 20*time.Second, func() bool {
		j, err := node.Job(t.Context(), job)
		return err == nil && j.Counts.OK == 1
	})
	j, err := node.DoJob(t.Context(), job, "cancel")
	if c := j.Counts; err != nil || c.OK != 1 || c.Superseded != 1 || c.Total != 2 || j.Missed != 0 {
		t.Errorf("%+v, %v", j, err)
	}
	if r := sim.Report(t); r.Totals.Markers["m0"] != 1 {
		t.Errorf("executed: %v", r.Totals.Markers)
	}
}

// Case 12: the clocks of two nodes differ by ten minutes; a job that begins at a time begins at that time by the
// database's clock, whichever node has the device.
func TestClocksOfJobs(t *testing.T) {
	long(t)
	t.Parallel()
	const count = 10
	c := programs.StartCluster(t, ClusterOptions{Nodes: 2, Seed: 32, Clocks: []time.Duration{10 * time.Minute, 0}})
	var ids []string
	for i := range count {
		ids = append(ids, fmt.Sprintf("02:bd:00:00:00:%02x", i))
	}
	sim := programs.Simulate(t, c.OTA, "--transport", "mqtt", "--devices", fmt.Sprint(count), "--mac-base", ids[0])
	c.AwaitReady(t, count, time.Minute)
	for i := range c.Nodes {
		c.heldBy(t, i, ids[0][:15], 1)
	}
	at := time.Now().Add(4 * time.Second)
	a := newJobAccount(32, nil, ids)
	for i := range c.Nodes { // each creates one
		a.nodes = c.Nodes[i : i+1]
		a.create(t, func(j *api.NewJob) { j.When = &api.JobWhen{At: api.At(at), Until: api.At(at.Add(time.Minute))} })
	}
	time.Sleep(time.Until(at) - time.Second)
	if n := c.DB.Count(t, "SELECT count(*) FROM tasks WHERE state <> 'waiting'"); n != 0 {
		t.Errorf("%d tasks began early", n)
	}
	c.Nodes[0].Await(t, "all have begun in time", 10*time.Second, func() bool {
		return c.DB.Count(t, "SELECT count(*) FROM tasks WHERE outcome = 'ok'") == 2*count
	})
	if r := sim.Report(t); r.Totals.MarkersRepeated != 0 || r.Totals.CallsTotal != 2*count {
		t.Errorf("%v, %d repeated", r.Totals.Markers, r.Totals.MarkersRepeated)
	}
}

// Case 13: a job over many devices is accepted at once, its rows cost no memory that grows with them, its
// report streams, and a thousand jobs may be open.
func TestJobOfManyDevices(t *testing.T) {
	long(t)
	t.Parallel()
	const many = 15_000 // 100,000 tasks are in make bench: with the race detector, 50,000 take six minutes
	node := programs.Start(t)
	var file strings.Builder
	file.WriteString("id,label.room\n")
	for i := range many {
		fmt.Fprintf(&file, "02:be:00:%02x:%02x:%02x,hall\n", i>>16, i>>8&255, i&255)
	}
	if r, err := node.ImportDevices(t.Context(), strings.NewReader(file.String()), apiclient.ImportOptions{}); err != nil || r.Created != many {
		t.Fatalf("%+v, %v", r, err)
	}
	memory := node.Metric(t, "process_resident_memory_bytes")
	spec := markedJob("hall")
	spec.Select = "room=hall"
	begun := time.Now()
	j, err := node.CreateJob(t.Context(), spec, "")
	accepted := time.Since(begun)
	if err != nil || accepted > 2*time.Second {
		t.Errorf("accepted after %v: %v", accepted, err)
	}
	node.Await(t, "all tasks wait", time.Minute, func() bool {
		j, err = node.Job(t.Context(), j.ID)
		return err == nil && j.Counts.Waiting == many
	})
	prepared := time.Since(begun)
	a := newJobAccount(0, []*Node{node}, nil)
	if rows := a.rows(t, j.ID); len(rows) != many || rows[0].State != "waiting" {
		t.Errorf("the report has %d rows", len(rows))
	}
	grown := node.Metric(t, "process_resident_memory_bytes") - memory
	if grown > 100<<20 {
		t.Errorf("%d MiB more for %d tasks", int(grown)>>20, many)
	}
	for range 999 {
		later := markedJob("later", "02:be:00:00:00:00")
		later.When = &api.JobWhen{At: api.At(time.Now().Add(time.Hour))}
		if _, err = node.CreateJob(t.Context(), later, ""); err != nil {
			t.Fatal(err)
		}
	}
	if _, err = node.CreateJob(t.Context(), spec, ""); problemCode(err) != "limit_reached" {
		t.Errorf("job 1,001: %v", err)
	}
	t.Logf("accepted after %v, prepared after %v, %d MiB", accepted, prepared, int(grown)>>20)
}
