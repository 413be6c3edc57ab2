package fleettest

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

// jobEvent is what this test reads of events of jobs and tasks.
type jobEvent struct {
	apiclient.Event
	Job, Device, Outcome, State string
	Counts                      api.JobCounts
}

// awaitJobEvents reads events of jobs and tasks after a position, until last is true.
func (n *Node) awaitJobEvents(t *testing.T, o apiclient.EventOptions, last func(e jobEvent) bool) (list []jobEvent) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for event, err := range n.Events(ctx, o) {
		if err != nil {
			t.Fatal(err)
		}
		if event.Type != "task" && !strings.HasPrefix(event.Type, "job.") {
			continue
		}
		e := jobEvent{Event: event}
		if err := json.Unmarshal(event.Data, &e); err != nil {
			t.Fatalf("%s: %v", event.Data, err)
		}
		if list = append(list, e); last(e) {
			return list
		}
	}
	t.Fatalf("no last event after %d", len(list))
	return nil
}

// The events of a job tell what happened, in order, and are read again from any of their ids.
func TestJobEvents(t *testing.T) {
	t.Parallel()
	const fleet = 5
	node := programs.Start(t)
	programs.Simulate(t, node.Info.OTA, "--devices", "5")
	node.AwaitReady(t, fleet)
	node.AwaitStored(t)
	j, err := node.CreateJob(t.Context(), api.NewJob{JobSpec: api.JobSpec{Select: "device=*", Note: "dim",
		Action: api.JobAction{Call: &api.JobCall{Tool: volume, Arguments: json.RawMessage(`{"volume":7}`)}},
		Stages: []api.JobStage{{OK: api.Amount{Number: 1}, Hold: true}, {OK: api.Amount{Percent: 100}}}}}, "")
	if err != nil {
		t.Fatal(err)
	}
	first := node.awaitJobEvents(t, apiclient.EventOptions{After: "0"}, func(e jobEvent) bool { return e.Type == "task" })
	for _, verb := range []string{"pause", "resume", "advance"} {
		if _, err := node.DoJob(t.Context(), j.ID, verb); err != nil {
			t.Fatal(err)
		}
		if verb == "pause" {
			node.Await(t, "metrics show why the others wait", 30*time.Second, func() bool {
				return node.Metric(t, "fleetd_tasks_waiting", `reason="paused"`) == fleet-1 && node.Metric(t, "fleetd_jobs", `state="paused"`) == 1
			})
		}
	}
	all := node.awaitJobEvents(t, apiclient.EventOptions{After: "0"}, func(e jobEvent) bool { return e.Type == "job.done" })
	var types []string
	for _, e := range all {
		types = append(types, e.Type)
		if e.Job != j.ID || e.Type == "task" && (e.Outcome != "ok" || e.Device == "") {
			t.Errorf("%s %s", e.Type, e.Data)
		}
	}
	want := []string{"job.started", "task", "job.paused", "job.resumed", "job.stage", "task", "task", "task", "task", "job.done"}
	if !slices.Equal(types, want) {
		t.Errorf("%v, want %v", types, want)
	}
	if c := all[len(all)-1].Counts; c.OK != fleet || c.Total != fleet {
		t.Errorf("%+v", c)
	}
	rest := node.awaitJobEvents(t, apiclient.EventOptions{After: first[len(first)-1].ID}, func(e jobEvent) bool { return e.Type == "job.done" })
	if len(first) != 2 || len(first)+len(rest) != len(all) || rest[0].ID != all[2].ID {
		t.Errorf("%d events, then %d of %d", len(first), len(rest), len(all))
	}
}

// A job is created over NATS, once for its key, and is in the audit; the other nodes receive a hint.
func TestJobOverNATS(t *testing.T) {
	t.Parallel()
	const fleet = 6
	c := programs.StartCluster(t, ClusterOptions{Nodes: 3})
	programs.Simulate(t, c.OTA, "--devices", "6")
	c.AwaitReady(t, fleet, time.Minute)
	c.Nodes[0].AwaitStored(t)
	nc, err := nats.Connect(c.bus.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	key, err := c.Nodes[0].CreateKey(t.Context(), api.NewKey{Name: "planner", Scopes: []string{"jobs", "tools:call"}})
	if err != nil {
		t.Fatal(err)
	}
	request := func(body string) (answer struct{ ID, State, Code, Detail string }) {
		t.Helper()
		for {
			reply, err := nc.RequestMsg(&nats.Msg{Subject: "fleetd.v1.cmd.jobs", Data: []byte(body), Header: nats.Header{"Fleetd-Token": {key.Token}, "Idempotency-Key": {"once"}}}, 20*time.Second)
			if err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal(reply.Data, &answer); err != nil {
				t.Fatalf("%s: %v", reply.Data, err)
			}
			if answer.Code != "unauthorized" || t.Context().Err() != nil { // a node that does not have the key yet
				return answer
			}
			answer.Code = ""
		}
	}
	body := `{"action":{"call":{"tool":"` + volume + `","arguments":{"volume":7}}},"select":"device=*"}`
	first := request(body)
	if first.ID == "" || request(body).ID != first.ID {
		t.Fatalf("%+v", first)
	}
	if a := request(strings.Replace(body, "7}", "8}", 1)); a.Code != "conflict" {
		t.Errorf("another body: %+v", a)
	}
	if a := request(`{"action":{"restart":{}},"selects":"device=*"}`); a.Code != "bad_request" || !strings.Contains(a.Detail, "selects") {
		t.Errorf("an unknown member: %+v", a)
	}
	j := c.Nodes[1].awaitJob(t, first.ID, "done")
	if j.Counts.OK != fleet || j.CreatedBy != "planner" {
		t.Errorf("%+v", j)
	}
	c.Nodes[2].Await(t, "the creation is in the audit, once", 20*time.Second, func() bool {
		entries, err := apiclient.Collect(apiclient.List[api.AuditEntry](t.Context(), c.Nodes[2].Client, apiclient.Query{"key": key.ID}, "audit"))
		n := 0
		for _, e := range entries {
			if e.Action == "create job" && e.Outcome == "ok" && e.Via == "nats" && strings.HasSuffix(e.Detail, first.ID) {
				n++
			}
		}
		return err == nil && n == 1
	})
	hints := 0.0
	for _, n := range c.Nodes {
		hints += n.Metric(t, "fleetd_nats_requests_total", `verb="work"`)
	}
	if hints == 0 {
		t.Error("no node received a hint")
	}
}
