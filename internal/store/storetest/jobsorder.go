package storetest

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/jobs"
)

func testQueueOrder(t *testing.T, f *jobFleet) {
	a, b, c := f.create(t, 2, nil), f.create(t, 2, nil), f.create(t, 2, nil)
	all := append(append(candidates(&c, mac(1), mac(2)), candidates(&b, mac(1), mac(2))...), candidates(&a, mac(1), mac(2))...)
	queue, err := f.stores[0].Queue(t.Context(), mac(1))
	if err != nil || len(queue) != 3 || queue[0].Job.ID != a.ID || queue[1].Task.Job != b.ID || queue[2].Job.ID != c.ID || queue[2].Task.Device != mac(1) {
		t.Fatalf("%+v, %v", queue, err)
	}
	if got := f.begin(t, "i", append(candidates(&b, mac(1)), candidates(&c, mac(2))...)...); len(got) != 0 {
		t.Fatalf("younger tasks begin: %+v", got)
	}
	for _, want := range []jobs.Job{a, b, c} {
		begun := f.begin(t, "i", all...)
		if len(begun) != 2 || begun[0].Job != want.ID || begun[1].Job != want.ID {
			t.Fatalf("%+v", begun)
		}
		if got := f.begin(t, "i", all...); len(got) != 0 {
			t.Fatalf("a second task of a device begins: %+v", got)
		}
		if _, running, err := f.stores[0].WaitingOf(t.Context(), macs(1, 3), 1, nil); err != nil || !slices.Equal(running, macs(1, 2)) {
			t.Fatalf("devices with a task that runs: %v, %v", running, err)
		}
		for _, task := range begun {
			f.end(t, task, nil)
		}
	}
	if list, _, err := f.stores[0].WaitingOf(t.Context(), macs(1, 2), 9, nil); err != nil || len(list) != 0 {
		t.Errorf("%+v, %v", list, err)
	}
}

// A node that does not know an action begins none of it, holds nobody up, and keeps the job as it is for those that do.
func testUnknownAction(t *testing.T, f *jobFleet) {
	const spec = `{"action":{"levitate":{"by":3}},"select":"room=lab","pace":{"rate":"unlimited","concurrency":9}}`
	j, known := f.create(t, 2, nil), f.create(t, 1, nil)
	f.Exec(t, `UPDATE jobs SET action = 'levitate', spec = $1 WHERE job = $2`, spec, j.ID)
	for _, edit := range []func(*jobs.Job) error{func(j *jobs.Job) error { return j.Pause("lunch") }, func(x *jobs.Job) error { return x.Resume(f.stores[0].Now()) }} {
		if _, err := f.stores[0].Edit(t.Context(), j.ID, edit); err != nil {
			t.Fatal(err)
		}
	}
	if n := f.Count(t, `SELECT count(*) FROM jobs WHERE job = $1 AND action = 'levitate' AND spec = $2 AND ready_at = 0`, j.ID, spec); n != 1 {
		t.Error("the job is not as the newer version wrote it, or is not ready for it")
	}
	if got := f.begin(t, "i", append(candidates(&j, mac(1), mac(2)), candidates(&known, mac(1))...)...); len(got) != 1 || got[0].Job != known.ID {
		t.Errorf("begun: %+v", got)
	}
	stored, task := f.job(t, j.ID), f.task(t, j.ID, mac(2))
	if why := jobs.WaitOf(&stored, &task, true, false, false, f.stores[0].Now()); why != jobs.WaitNode {
		t.Errorf("its task waits for %q", why)
	}
}

func testNotDue(t *testing.T, f *jobFleet) {
	s := f.stores[0]
	closed := func(change func(s *api.JobSpec), edit func(j *jobs.Job) error) jobs.Job {
		t.Helper()
		j := f.create(t, 2, change)
		if edit != nil {
			if _, err := s.Edit(t.Context(), j.ID, edit); err != nil {
				t.Fatal(err)
			}
		}
		return j
	}
	now := s.Now()
	window := now.Add(-2 * time.Hour)
	list := []jobs.Job{
		closed(nil, func(j *jobs.Job) error { return j.Pause("lunch") }),
		closed(nil, func(j *jobs.Job) error { j.Halt(jobs.ReasonStop); return nil }),
		closed(func(s *api.JobSpec) {
			s.When = &api.JobWhen{Timezone: "UTC", Window: &api.JobWindow{Cron: fmt.Sprintf("%d %d * * *", window.Minute(), window.Hour()), For: "1h"}}
		}, nil),
		closed(nil, func(j *jobs.Job) error { j.Until = now; return nil }),
	}
	// The window was open when the row was written last.
	f.Exec(t, `UPDATE jobs SET ready_at = 0 WHERE job = $1`, list[2].ID)
	full := closed(func(s *api.JobSpec) { s.Pace.Concurrency = 1 }, nil)
	if got := f.begin(t, "i", candidates(&full, mac(2))...); len(got) != 1 {
		t.Fatalf("%+v", got)
	}
	list = append(list, full)
	retried := f.create(t, 1, nil)
	f.Exec(t, `UPDATE tasks SET due_at = $1 WHERE job = $2`, now.Add(time.Hour).UnixMicro(), retried.ID)
	last := f.create(t, 1, nil)
	var all []jobs.Candidate
	for i := range list {
		all = append(all, candidates(&list[i], mac(1))...)
	}
	all = append(all, candidates(&retried, mac(1))...)
	if got := f.begin(t, "i", all...); len(got) != 0 {
		t.Fatalf("a task that may not begin: %+v", got)
	}
	if got, _, err := s.WaitingOf(t.Context(), macs(1, 1), 2, nil); err != nil || len(got) != 2 || got[1].Job != last.ID && got[0].Job != last.ID {
		t.Errorf("the task that may begin is not among %+v, %v", got, err)
	}
	var without []string
	for i := range list {
		without = append(without, list[i].ID)
	}
	if got, _, err := s.WaitingOf(t.Context(), macs(1, 1), 1, without); err != nil || len(got) != 1 || got[0].Job != last.ID {
		t.Errorf("without the jobs that let nothing begin: %+v, %v", got, err)
	}
	if got := f.begin(t, "i", candidates(&last, mac(1))...); len(got) != 1 {
		t.Fatal("tasks that are not due hold a younger one up")
	}
}
