package node

import (
	"testing"

	"fleetd/internal/api"
	"fleetd/internal/jobs"
)

// Other nodes read the open jobs when there may be work for them: not for a task that begins, ends, or is given back.
func TestWorkForOtherNodes(t *testing.T) {
	before := jobs.Job{State: jobs.Running, Counts: jobs.Counts{Waiting: 10, Running: 2}}
	for _, c := range []struct {
		name   string
		change func(j *jobs.Job)
		want   bool
	}{
		{"another state", func(j *jobs.Job) { j.State = jobs.Paused }, true},
		{"another stage", func(j *jobs.Job) { j.Stage++ }, true},
		{"new tasks, or some that are repeated", func(j *jobs.Job) { j.Counts.Waiting++ }, true},
		{"a task begins", func(j *jobs.Job) { j.Start(j.CreatedAt, &jobs.Task{}) }, false},
		{"a task ends", func(j *jobs.Job) { j.Record(&jobs.Task{}, jobs.OK) }, false},
		{"a task is given back", func(j *jobs.Job) { j.Counts.Running--; j.Counts.Waiting++ }, false},
	} {
		j := before
		j.Spec.Pace = &api.JobPace{Rate: jobs.RateUnlimited}
		c.change(&j)
		if got := isWork(&jobs.Change{Job: j, From: before.State, FromOpen: before.Counts.Open()}); got != c.want {
			t.Errorf("%s: %t", c.name, got)
		}
	}
}
