package manager

import (
	"encoding/json"
	"slices"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
)

func TestEvents(t *testing.T) {
	stages := []api.JobStage{{OK: api.Amount{Number: 1}}, {OK: api.Amount{Percent: 100}}}
	for _, c := range []struct {
		name      string
		from, to  jobs.State
		fromStage int
		stage     int
		first     bool
		want      []devices.EventKind
	}{
		{name: "created", from: "", to: jobs.Running},
		{name: "created with all tasks refused", from: "", to: jobs.Done, want: []devices.EventKind{devices.EventJobDone}},
		{name: "prepared", from: jobs.Preparing, to: jobs.Running},
		{name: "the first task", from: jobs.Running, to: jobs.Running, first: true, want: []devices.EventKind{devices.EventJobStarted}},
		{name: "another task", from: jobs.Running, to: jobs.Running},
		{name: "next stage", from: jobs.Running, to: jobs.Running, stage: 1, want: []devices.EventKind{devices.EventJobStage}},
		{name: "the last stage has passed", from: jobs.Running, to: jobs.Running, fromStage: 1, stage: 2},
		{name: "next round", from: jobs.Running, to: jobs.Preparing, fromStage: 2},
		{name: "pause", from: jobs.Running, to: jobs.Paused, want: []devices.EventKind{devices.EventJobPaused}},
		{name: "an edit while paused", from: jobs.Paused, to: jobs.Paused},
		{name: "stop rule", from: jobs.Running, to: jobs.Halted, want: []devices.EventKind{devices.EventJobHalted}},
		{name: "stop rule of a paused job", from: jobs.Paused, to: jobs.Halted, want: []devices.EventKind{devices.EventJobHalted}},
		{name: "a late answer does not halt again", from: jobs.Halted, to: jobs.Halted},
		{name: "resume", from: jobs.Halted, to: jobs.Running, want: []devices.EventKind{devices.EventJobResumed}},
		{name: "resume before its time", from: jobs.Paused, to: jobs.Scheduled, want: []devices.EventKind{devices.EventJobResumed}},
		{name: "advance", from: jobs.Halted, to: jobs.Running, stage: 1, want: []devices.EventKind{devices.EventJobResumed, devices.EventJobStage}},
		{name: "expires while paused", from: jobs.Paused, to: jobs.Done, want: []devices.EventKind{devices.EventJobDone}},
		{name: "cancel", from: jobs.Halted, to: jobs.Cancelled, want: []devices.EventKind{devices.EventJobCancelled}},
		{name: "its last task ends", from: jobs.Cancelled, to: jobs.Cancelled},
		{name: "done", from: jobs.Running, to: jobs.Done, want: []devices.EventKind{devices.EventJobDone}},
		{name: "retry", from: jobs.Done, to: jobs.Running, want: []devices.EventKind{devices.EventJobResumed}},
	} {
		j := jobs.Job{ID: "j", Owner: "k", State: c.to, Stage: c.stage, Version: 3, Spec: api.JobSpec{Stages: stages, When: &api.JobWhen{}}}
		var kinds []devices.EventKind
		for _, e := range Events([]jobs.Change{{Job: j, From: c.from, FromStage: c.fromStage, First: c.first}}, nil, time.Now()) {
			kinds = append(kinds, e.Kind)
			if e.Job != "j" || e.Device != "" || e.Seq != 3 || e.MsgID != "j-3-"+string(e.Kind) {
				t.Errorf("%s: %+v", c.name, e)
			}
		}
		if !slices.Equal(kinds, c.want) {
			t.Errorf("%s: %v, want %v", c.name, kinds, c.want)
		}
	}
}

// The tasks of a transaction come before the end of their job, with distinct ids.
func TestTaskEvents(t *testing.T) {
	j := jobs.Job{ID: "j", State: jobs.Done, Version: 7, Owner: "k", Spec: api.JobSpec{Note: "a \"note\"", When: &api.JobWhen{}}}
	j.Counts.Ended[0] = 2
	list := Events([]jobs.Change{{Job: j, From: jobs.Running}}, []jobs.Task{
		{Job: "j", Round: 2, Device: "aa:bb:cc:dd:ee:ff", State: jobs.TaskEnded, Outcome: jobs.OK, Attempt: 1, Call: "c", Late: true},
		{Job: "j", Round: 2, Device: "x", State: jobs.TaskWaiting, Code: "tool_error", Attempt: 2},
		{Job: "unknown", Device: "x"},
	}, time.Now())
	if len(list) != 3 || list[0].Kind != devices.EventTask || list[0].Device != "aa:bb:cc:dd:ee:ff" || list[1].Device != "x" || list[2].Kind != devices.EventJobDone {
		t.Fatalf("%+v", list)
	}
	if want := `"job":"j","round":2,"attempt":1,"state":"ended","outcome":"ok","code":"","late":true,"call":"c","owner":"k"`; string(list[0].Fields) != want || list[0].Job != "j" || list[0].MsgID != "aabbccddeeff-j-2-7" {
		t.Errorf("%+v: %s", list[0], list[0].Fields)
	}
	var done struct {
		State, Note string
		Counts      api.JobCounts
	}
	if err := json.Unmarshal([]byte("{"+string(list[2].Fields)+"}"), &done); err != nil || done.State != "done" || done.Note != j.Spec.Note || done.Counts.OK != 2 {
		t.Errorf("%+v, %v", done, err)
	}
}
