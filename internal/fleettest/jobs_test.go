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

// awaitJob waits until a job has this state.
func (n *Node) awaitJob(t *testing.T, id, state string) (j api.Job) {
	t.Helper()
	n.Await(t, "job "+id+" is "+state, time.Minute, func() bool {
		var err error
		j, err = n.Job(t.Context(), id)
		return err == nil && j.State == state
	})
	return j
}

// a call for a device that is away is made when
// it is back, once, although the node was killed meanwhile.
func TestCallLater(t *testing.T) {
	t.Parallel()
	node := programs.Start(t)
	const id = "02:f1:ee:00:00:00"
	sim := programs.Simulate(t, node.Info.OTA, "--devices", "1")
	node.AwaitReady(t, 1)
	first := sim.Report(t) // it ends the simulation
	node.Await(t, "the device is away", 30*time.Second, func() bool { return node.Ready(t) == 0 })
	call := []string{"call", id, volume, "volume=40", `marker:="later"`, "--later", "1h", "--json", "--key", "once"}
	out, errs, status := node.Command(t, call...)
	var queued api.QueuedCall
	if status != 0 || json.Unmarshal([]byte(out), &queued) != nil || queued.Job == "" {
		t.Fatalf("status %d: %s %s", status, out, errs)
	}
	if again, _, _ := node.Command(t, call...); again != out {
		t.Errorf("the same key: %s", again)
	}
	if out, errs, _ := node.Command(t, "queue", id); !strings.Contains(out, queued.Job) || !strings.Contains(out, "offline") {
		t.Errorf("the queue of a device that is away:\n%s%s", out, errs)
	}
	node.Kill(t)
	node.Run(t)
	sim = programs.Simulate(t, node.Info.OTA, "--devices", "1")
	j := node.awaitJob(t, queued.Job, "done")
	if j.Counts.OK != 1 || j.Counts.Total != 1 {
		t.Errorf("%+v", j.Counts)
	}
	if r := sim.Report(t); r.Totals.Markers["later"] != 1 || first.Totals.CallsTotal != 0 {
		t.Errorf("executed %d times, and %d before", r.Totals.Markers["later"], first.Totals.CallsTotal)
	}
}

// A job of a console key without the scope for user-only tools calls none of them, although its parent may.
func TestJobOfAChild(t *testing.T) {
	t.Parallel()
	node := programs.Start(t)
	programs.Simulate(t, node.Info.OTA, "--devices", "1")
	node.AwaitReady(t, 1)
	code, err := apiclient.Send[api.ConsoleCode](t.Context(), node.Client, apiclient.Request{Method: "POST", Path: []string{"console", "codes"}, Body: api.NewConsoleCode{Scopes: []string{"devices:read", "tools:call", "jobs"}}})
	if err != nil {
		t.Fatal(err)
	}
	key, err := apiclient.Send[api.CreatedKey](t.Context(), node.Client, apiclient.Request{Method: "POST", Path: []string{"console", "keys"}, Body: api.ConsoleLogin{Code: code.Code}})
	if err != nil {
		t.Fatal(err)
	}
	child, err := apiclient.New(node.Info.API, key.Token)
	if err != nil {
		t.Fatal(err)
	}
	job := api.NewJob{JobSpec: api.JobSpec{Devices: []string{"02:f1:ee:00:00:00"}, Action: api.JobAction{Call: &api.JobCall{Tool: "self.get_system_info"}}}}
	for by, want := range map[*apiclient.Client]int64{node.Client: 0, child: 1} {
		j, err := apiclient.Send[api.Job](t.Context(), by, apiclient.Request{Method: "POST", Path: []string{"jobs"}, Body: job})
		if err != nil {
			t.Fatal(err)
		}
		// security: K21
		if j = node.awaitJob(t, j.ID, "done"); j.Counts.Refused != want || j.Counts.OK != 1-want || j.CreatedBy != "admin token" {
			t.Errorf("%d refused of a job by %s, want %d: %+v", j.Counts.Refused, j.CreatedBy, want, j.Counts)
		}
	}
}

// A node that stops lets the tasks that it runs end, also without another node: none is unknown, and their job goes on.
func TestStopLetsTasksEnd(t *testing.T) {
	t.Parallel()
	const fleet = 3
	node := programs.Start(t)
	sim := programs.Simulate(t, node.Info.OTA, "--devices", fmt.Sprint(fleet), "--fault", "slow", "--slow", "3s")
	node.AwaitReady(t, fleet)
	out, errs, status := node.Command(t, "jobs", "run", "device=*", volume, "volume=40", "--concurrency", "2", "--rate", "unlimited", "--stop", "1", "--yes", "--json")
	var j api.Job
	if status != 0 || json.Unmarshal([]byte(out), &j) != nil {
		t.Fatalf("%d %s %s", status, out, errs)
	}
	node.Await(t, "two tasks run", 30*time.Second, func() bool {
		j, err := node.Job(t.Context(), j.ID)
		return err == nil && j.Counts.Running == 2
	})
	node.Stop(t)
	node.Run(t)
	if j := node.awaitJob(t, j.ID, "done"); j.Counts.OK != fleet || j.Counts.Unknown != 0 {
		t.Errorf("%+v", j.Counts)
	}
	if r := sim.Report(t); r.Totals.CallsTotal != fleet {
		t.Errorf("%d calls for %d tasks", r.Totals.CallsTotal, fleet)
	}
}

// The first steps: plan, run, follow, report.
func TestJobs(t *testing.T) {
	t.Parallel()
	const fleet = 40
	node := programs.Start(t)
	sim := programs.Simulate(t, node.Info.OTA, "--devices", fmt.Sprint(fleet), "--ramp", "40/s")
	node.AwaitReady(t, fleet)
	node.AwaitStored(t)
	if _, errs, status := node.Command(t, "devices", "edit", "device=*", "room=lab", "--yes"); status != 0 {
		t.Fatal(errs)
	}
	out, errs, status := node.Command(t, "jobs", "run", "room=lab", volume, "volume=40", "--dry-run")
	if status != 0 || !strings.Contains(out, "40, 40 connected") {
		t.Errorf("%d %s %s", status, out, errs)
	}
	if _, errs, status = node.Command(t, "jobs", "run", "room=lab", volume, "volume=40"); status != 2 || !strings.Contains(errs, "add --yes") {
		t.Errorf("without a yes: %d %s", status, errs)
	}
	out, errs, status = node.Command(t, "jobs", "run", "room=lab", volume, "volume=40", "--rate", "unlimited", "--yes", "--watch")
	if status != 0 || !strings.Contains(out, "done: 40 of 40 done, 40 ok") {
		t.Fatalf("%d %s %s", status, out, errs)
	}
	id := strings.Fields(out)[1]
	out, _, _ = node.Command(t, "jobs", "report", id)
	if lines := strings.Split(strings.TrimSpace(out), "\n"); len(lines) != fleet+1 || !strings.Contains(lines[1], ",ended,,ok,") {
		t.Errorf("the report has %d lines: %s", len(lines), tail(out, 500))
	}
	// Values that the tool refuses reach no device.
	out, _, status = node.Command(t, "jobs", "run", "room=lab", volume, "volume=400", "--yes", "--watch", "--rate", "unlimited")
	if status != 2 || !strings.Contains(out, "40 refused") {
		t.Errorf("%d %s", status, out)
	}
	// A stop rule halts; a person continues.
	out, _, status = node.Command(t, "jobs", "run", "room=lab", "self.nothing.here", "--yes", "--watch", "--rate", "unlimited", "--concurrency", "1", "--stop", "2")
	if status != 2 || !strings.Contains(out, "40 refused") {
		t.Errorf("a tool that no device has: %d %s", status, out)
	}
	if r := sim.Report(t); r.Totals.CallsTotal != fleet || r.Totals.DuplicateCallIDs != 0 {
		t.Errorf("%d calls, %d twice", r.Totals.CallsTotal, r.Totals.DuplicateCallIDs)
	}
}
