package runner

import (
	"context"
	"slices"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
)

// queue is a store with the waiting tasks of one device.
type queue struct {
	store
	list  []jobs.Candidate
	calls int
}

func (q *queue) WaitingOf(_ context.Context, _ []devices.ID, perDevice int, without []string) (list []jobs.Candidate, _ []devices.ID, _ error) {
	q.calls++
	for _, c := range q.list {
		if len(list) < perDevice && !slices.Contains(without, c.Job) {
			list = append(list, c)
		}
	}
	return list, nil, nil
}

// Of a device whose oldest tasks may not begin, for whatever reason, one that may is found, and it is read again
// for those that may later.
func TestTasksAfterOthersAreFound(t *testing.T) {
	for _, c := range []struct {
		name  string
		hold  func(j *jobs.Job)
		calls int
	}{
		{"paused", func(j *jobs.Job) { j.State = jobs.Paused }, 2},
		{"a full stage", func(j *jobs.Job) { j.Opened = 0 }, 2},
		{"concurrency", func(j *jobs.Job) { j.Counts.Running = 10 }, 2},
		{"not due", nil, 2},
		{"nothing", func(*jobs.Job) {}, 1},
	} {
		q := &queue{}
		p := newPump(&Runner{Options: Options{Store: q, Devices: hub{}}, wake: make(chan struct{}, 1), running: map[devices.ID]string{}, later: map[devices.ID]time.Time{}})
		for i, id := range []string{"a", "b", "c", "d", "e"} {
			j := jobs.Job{ID: id, Action: "call", State: jobs.Running, Until: time.Unix(2000, 0), Opened: 10, Counts: jobs.Counts{Waiting: 1}}
			j.Spec.Action.Restart = &api.JobRestart{}
			j.Spec.When, j.Spec.Pace = &api.JobWhen{}, &api.JobPace{Rate: "unlimited", Concurrency: 10}
			task := jobs.Candidate{Job: id, Device: "x", Seq: int64(i)}
			switch {
			case i >= perDevice:
			case c.hold != nil:
				c.hold(&j)
			default:
				task.DueAt = time.Unix(1500, 0)
			}
			q.list = append(q.list, task)
			p.update(j)
		}
		if err := p.read(t.Context(), map[devices.ID]struct{}{"x": {}}); err != nil || q.calls != c.calls || (len(p.r.later) == 1) != (c.calls == 2) {
			t.Errorf("%s: %d queries, %d devices are read again, %v", c.name, q.calls, len(p.r.later), err)
		}
		if c.hold == nil {
			continue // their jobs are open: the database returns a later task that is due before them
		}
		want := "e"
		if c.calls == 1 {
			want = "a"
		}
		if w := p.choose(); len(w) != 1 || w[0].Job != want {
			t.Errorf("%s: chosen: %+v", c.name, w)
		}
	}
}
