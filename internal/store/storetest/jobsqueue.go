package storetest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
	"fleetd/internal/store/jobstore"
)

func testIdempotency(t *testing.T, f *jobFleet) {
	now := f.stores[0].Now()
	create := func(s *jobstore.Store, owner, key, hash string) (jobs.Job, bool, error) {
		j := jobs.New(jobSpec(t, now, nil), owner, "", "room=lab", now)
		j.Key, j.Hash = key, hash
		return s.Create(t.Context(), j, nil)
	}
	for round := range 20 {
		var mu sync.Mutex
		ids, created := map[string]bool{}, 0
		var all sync.WaitGroup
		for _, s := range f.stores {
			all.Go(func() {
				j, again, err := create(s, "owner", fmt.Sprint("key ", round), "hash")
				mu.Lock()
				defer mu.Unlock()
				if ids[j.ID] = true; !again {
					created++
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if len(ids) != 1 || created != 1 {
			t.Fatalf("%d jobs, %d created", len(ids), created)
		}
	}
	if _, _, err := create(f.stores[1], "owner", "key 0", "other"); !errors.Is(err, jobs.ErrConflict) {
		t.Errorf("the key with another body: %v", err)
	}
	if _, again, err := create(f.stores[1], "other", "key 0", "hash"); err != nil || again {
		t.Errorf("the key of another owner: %t, %v", again, err)
	}
	for range 2 {
		if _, again, err := create(f.stores[1], "owner", "", "hash"); err != nil || again {
			t.Errorf("without a key: %t, %v", again, err)
		}
	}
	f.Exec(t, `UPDATE jobs SET created_at = $1 WHERE idem = 'key 1'`, now.Add(-jobs.KeyLifetime-time.Minute).UnixMicro())
	if _, again, err := create(f.stores[2], "owner", "key 1", "other"); err != nil || again {
		t.Errorf("a key that has expired: %t, %v", again, err)
	}
}

func testQueueFull(t *testing.T, f *jobFleet) {
	s := f.stores[0]
	for range jobs.MaxDeviceTasks {
		f.create(t, 1, nil)
	}
	j := f.prepared(t, nil)
	if _, _, err := s.Create(t.Context(), j, rowsOf(&j, 1, 1)); !errors.Is(err, jobs.ErrQueueFull) {
		t.Fatalf("a job for a device whose queue is full: %v", err)
	}
	j = f.create(t, 2, nil)
	if task := f.task(t, j.ID, mac(1)); task.Outcome != jobs.Refused || task.Code != jobs.CodeQueueFull || j.Counts.Of(jobs.Refused) != 1 || j.Counts.Waiting != 1 {
		t.Errorf("%+v %+v", task, j.Counts)
	}
	f.check(t)
	now := s.Now()
	f.Exec(t, `UPDATE jobs SET waiting = waiting + $1 WHERE job = $2`, jobs.MaxOpenTasks-101, j.ID)
	k := jobs.New(jobSpec(t, now, nil), "o", "", "", now)
	if _, _, err := s.Create(t.Context(), k, nil); err != nil {
		t.Fatal(err)
	}
	k = f.prepared(t, nil)
	if _, _, err := s.Create(t.Context(), k, rowsOf(&k, 2, 3)); !errors.Is(err, jobs.ErrOpenTasks) {
		t.Errorf("more tasks than the fleet may have open: %v", err)
	}
	f.Exec(t, `UPDATE jobs SET waiting = waiting - $1 WHERE job = $2`, jobs.MaxOpenTasks-101, j.ID)
	for !testing.Short() {
		j := jobs.New(jobSpec(t, now, nil), "o", "", "", now)
		if _, _, err := s.Create(t.Context(), j, nil); err != nil {
			if !errors.Is(err, jobs.ErrOpenJobs) {
				t.Fatal(err)
			}
			break
		}
	}
	if n := f.Count(t, `SELECT count(*) FROM jobs WHERE ended_at = 0`); n != jobs.MaxOpenJobs && !testing.Short() {
		t.Errorf("%d open jobs", n)
	}
}

// The queue of a device has its limit also if several nodes add to it at once.
func testQueueFullTogether(t *testing.T, f *jobFleet) {
	const more = 12
	for range jobs.MaxDeviceTasks - 1 {
		f.create(t, 1, nil)
	}
	var added []jobs.Job
	for range more {
		j := f.prepared(t, nil)
		if _, _, err := f.stores[0].Create(t.Context(), j, nil); err != nil {
			t.Fatal(err)
		}
		added = append(added, j)
	}
	var wg sync.WaitGroup
	for n, j := range added {
		wg.Go(func() {
			_, err := f.stores[n%3].AddTasks(t.Context(), j.ID, "", "", rowsOf(&j, 1, 500), true)
			for began := time.Now(); errors.Is(err, context.DeadlineExceeded) && time.Since(began) < time.Minute; { // on a slow day
				_, err = f.stores[n%3].AddTasks(t.Context(), j.ID, "", "", rowsOf(&j, 1, 500), true)
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := f.Count(t, `SELECT count(*) FROM tasks WHERE state = 'waiting' AND device = $1`, string(mac(1))); n != jobs.MaxDeviceTasks {
		t.Errorf("%d tasks wait for one device", n)
	}
	f.check(t)
}

func testPreparing(t *testing.T, f *jobFleet) {
	j := f.prepared(t, func(s *api.JobSpec) {
		s.Stages = []api.JobStage{{OK: api.Amount{Percent: 10}}, {OK: api.Amount{Percent: 100}}}
	})
	if _, _, err := f.stores[0].Create(t.Context(), j, nil); err != nil {
		t.Fatal(err)
	}
	add := func(s *jobstore.Store, cursor string, first, last int, end bool) (jobs.Job, error) {
		j, err := s.AddTasks(t.Context(), j.ID, cursor, string(mac(last)), rowsOf(&j, first, last), end)
		f.check(t)
		return j, err
	}
	if got, err := add(f.stores[0], "", 1, 1000, false); err != nil || got.State != jobs.Preparing || got.Cursor != string(mac(1000)) || got.Counts.Waiting != 1000 {
		t.Fatalf("%+v, %v", got, err)
	}
	if begun := f.begin(t, "i", candidates(&j, mac(1))...); len(begun) != 0 {
		t.Fatal("a task begins while the job is preparing")
	}
	// Another node takes over; what the first one still sends is stale.
	if got, err := add(f.stores[1], string(mac(1000)), 900, 2000, false); err != nil || got.Counts.Waiting != 2000 {
		t.Fatalf("%+v, %v", got.Counts, err)
	}
	if _, err := add(f.stores[0], string(mac(1000)), 1001, 2000, false); !errors.Is(err, jobs.ErrStale) {
		t.Fatalf("a batch that was written by another node: %v", err)
	}
	got, err := add(f.stores[2], string(mac(2000)), 2001, 2100, true)
	if err != nil || got.State != jobs.Running || got.Counts.Waiting != 2100 || got.RoundN != 2100 || got.Opened != 210 {
		t.Fatalf("%+v, %v", got, err)
	}
	if _, err := add(f.stores[0], "", 2101, 2200, true); !errors.Is(err, jobs.ErrStale) {
		t.Fatalf("a job that is running: %v", err)
	}
	if _, err := f.stores[0].AddTasks(t.Context(), "none", "", "", nil, true); !errors.Is(err, devices.ErrNotFound) {
		t.Fatalf("an unknown job: %v", err)
	}

	follow := f.prepared(t, func(s *api.JobSpec) { s.Follow = true })
	if _, _, err := f.stores[0].Create(t.Context(), follow, nil); err != nil {
		t.Fatal(err)
	}
	for range 2 { // rows that exist are left alone
		if _, err := f.stores[0].AddTasks(t.Context(), follow.ID, "", "", rowsOf(&follow, 1, 2), true); err != nil {
			t.Fatal(err)
		}
	}
	got, err = f.stores[1].AddTasks(t.Context(), follow.ID, "", "", rowsOf(&follow, 1, 3), false)
	if err != nil || got.State != jobs.Running || got.Counts.Waiting != 3 {
		t.Fatalf("a device that came later: %+v, %v", got, err)
	}
	if same, err := f.stores[2].AddTasks(t.Context(), follow.ID, "", "", rowsOf(&follow, 1, 3), false); err != nil || same.Version != got.Version || same.Counts != got.Counts {
		t.Errorf("no device is new, and the job is written: %+v, %v", same, err)
	}
	f.check(t)

	empty := f.prepared(t, nil)
	if _, _, err := f.stores[0].Create(t.Context(), empty, nil); err != nil {
		t.Fatal(err)
	}
	if got, err := f.stores[0].AddTasks(t.Context(), empty.ID, "", "", nil, true); err != nil || got.State != jobs.Done {
		t.Fatalf("a selection without devices: %+v, %v", got, err)
	}
}

func testFence(t *testing.T, f *jobFleet) {
	j := f.create(t, 1, nil)
	first := f.begin(t, "a", candidates(&j, mac(1))...)[0]
	if got := f.end(t, first, func(e *jobs.End) { e.NotSent = true }); len(got) != 1 || got[0].State != jobs.TaskWaiting || got[0].Attempt != 0 {
		t.Fatalf("%+v", got)
	}
	second := f.begin(t, "a", candidates(&j, mac(1))...)[0]
	if second.Attempt != 1 || second.Fence != 2 {
		t.Fatalf("%+v", second)
	}
	// The report of the first beginning is repeated, since its commit was uncertain.
	if got := f.end(t, first, func(e *jobs.End) { e.NotSent = true }); len(got) != 0 {
		t.Fatalf("a repeated report ended another attempt: %+v", got)
	}
	other := second
	other.Instance = "b"
	if got := f.end(t, other, nil); len(got) != 0 {
		t.Fatalf("another instance ended it: %+v", got)
	}
	if got := f.begin(t, "b", candidates(&j, mac(1))...); len(got) != 0 {
		t.Fatalf("it begins twice: %+v", got)
	}
	if got := f.end(t, second, nil); len(got) != 1 || got[0].Outcome != jobs.OK {
		t.Fatalf("%+v", got)
	}
	if got := f.end(t, second, func(e *jobs.End) { e.Outcome = jobs.Failed }); len(got) != 0 {
		t.Fatalf("an ended task ended again: %+v", got)
	}
	j = f.create(t, 1, nil)
	task := f.begin(t, "a", candidates(&j, mac(1))...)[0]
	f.end(t, task, func(e *jobs.End) { e.NotSent, e.Halt = true, jobs.ReasonKey })
	if j = f.job(t, j.ID); j.State != jobs.Halted || j.Reason != jobs.ReasonKey || j.Counts.Waiting != 1 {
		t.Fatalf("%+v", j)
	}
}

func testAutomaticRetry(t *testing.T, f *jobFleet) {
	failed := func(e *jobs.End) { e.Outcome, e.Code = jobs.Failed, jobs.CodeToolError }
	j := f.create(t, 1, func(s *api.JobSpec) { s.Retry, s.Stop = &api.JobRetry{Failed: 1, After: "1h"}, &api.JobStop{Failed: 1} })
	task := f.begin(t, "a", candidates(&j, mac(1))...)[0]
	if got := f.end(t, task, failed); got[0].State != jobs.TaskWaiting || got[0].Code != jobs.CodeToolError || !got[0].DueAt.After(f.stores[0].Now()) {
		t.Fatalf("%+v", got)
	}
	if j = f.job(t, j.ID); j.State != jobs.Running || j.Counts.Waiting != 1 {
		t.Fatalf("a failure that is repeated counts for the stop rule: %+v", j)
	}
	if got := f.begin(t, "a", candidates(&j, mac(1))...); len(got) != 0 {
		t.Fatal("it begins before it is due")
	}
	f.Exec(t, `UPDATE tasks SET due_at = 1`)
	task = f.begin(t, "a", candidates(&j, mac(1))...)[0]
	if got := f.end(t, task, failed); task.Attempt != 2 || got[0].Outcome != jobs.Failed {
		t.Fatalf("%+v", got)
	}
	if j = f.job(t, j.ID); j.State != jobs.Halted || j.Reason != jobs.ReasonStop {
		t.Fatalf("%+v", j)
	}
	for repeatable, want := range map[bool]jobs.TaskState{false: jobs.TaskEnded, true: jobs.TaskWaiting} {
		j := f.create(t, 1, func(s *api.JobSpec) { s.Retry, s.Repeatable = &api.JobRetry{Failed: 1, After: "1h"}, repeatable })
		task := f.begin(t, "a", candidates(&j, mac(1))...)[0]
		if got := f.end(t, task, func(e *jobs.End) { e.Outcome = jobs.Unknown }); got[0].State != want {
			t.Errorf("unknown of a job that is repeatable %t: %+v", repeatable, got)
		}
	}
}

// While the device of a stage of one waits for its retry, no other device is tried; the stage halts when its last attempt has failed.
func testRetryInStages(t *testing.T, f *jobFleet) {
	j := f.create(t, 3, func(s *api.JobSpec) {
		s.Stages = []api.JobStage{{OK: api.Amount{Number: 1}}, {OK: api.Amount{Percent: 100}}}
		s.Retry = &api.JobRetry{Failed: 2, After: "1h"}
	})
	all := candidates(&j, macs(1, 3)...)
	begun := f.begin(t, "a", all...)
	if len(begun) != 1 {
		t.Fatalf("%d tasks begin in a stage of one", len(begun))
	}
	first, other := begun[0].Device, mac(1)
	if first == other {
		other = mac(2)
	}
	for attempt := 1; attempt <= 2; attempt++ {
		f.end(t, begun[0], func(e *jobs.End) { e.Outcome = jobs.Failed })
		if early := f.begin(t, "a", all...); len(early) != 0 {
			t.Fatalf("attempt %d failed, and %s begins before its retry", attempt, early[0].Device)
		}
		if got := f.job(t, j.ID); got.State != jobs.Running || got.Held != 1 || got.Started != 1 {
			t.Fatalf("attempt %d failed: %s %s, %d have begun, %d are to be repeated", attempt, got.State, got.Reason, got.Started, got.Held)
		}
		f.Exec(t, `UPDATE tasks SET due_at = 1 WHERE due_at > 0`)
		for id, want := range map[devices.ID]jobs.Wait{first: jobs.WaitNone, other: jobs.WaitStage} {
			got, task := f.job(t, j.ID), f.task(t, j.ID, id)
			if why := jobs.WaitOf(&got, &task, true, false, false, f.stores[0].Now()); why != want {
				t.Errorf("%s waits for %q, want %q", id, why, want)
			}
		}
		if begun = f.begin(t, "a", all...); len(begun) != 1 || begun[0].Device != first {
			t.Fatalf("when the retry is due, %+v begins, want %s", begun, first)
		}
	}
	f.end(t, begun[0], func(e *jobs.End) { e.Outcome = jobs.Failed })
	if got := f.job(t, j.ID); got.State != jobs.Halted || got.Reason != jobs.ReasonStage {
		t.Errorf("after the last attempt: %s %s", got.State, got.Reason)
	}
	resume := func() []jobs.Task {
		t.Helper()
		if _, err := f.stores[0].Edit(t.Context(), j.ID, func(j *jobs.Job) error { return j.Resume(f.stores[0].Now()) }); err != nil {
			t.Fatal(err)
		}
		return f.begin(t, "a", all...)
	}
	if _, _, _, err := f.stores[0].Retry(t.Context(), j.ID, j.Round, []jobs.Outcome{jobs.Failed}, "", 10); err != nil {
		t.Fatal(err)
	}
	if begun = resume(); len(begun) != 1 || begun[0].Device != first {
		t.Fatalf("retried by a person and resumed, %+v begins, want %s alone", begun, first)
	}
	f.end(t, begun[0], func(e *jobs.End) { e.Outcome = jobs.Failed })
	if begun = resume(); len(begun) != 1 || begun[0].Device == first {
		t.Errorf("resumed, %+v begins, want another device", begun)
	}
}

func testRetry(t *testing.T, f *jobFleet) {
	s := f.stores[0]
	j := f.create(t, 30, nil)
	for i, task := range f.begin(t, "a", candidates(&j, macs(1, 30)...)...) {
		f.end(t, task, func(e *jobs.End) { e.Outcome = []jobs.Outcome{jobs.OK, jobs.Failed, jobs.Unknown}[i%3] })
	}
	if j = f.job(t, j.ID); j.State != jobs.Done {
		t.Fatalf("%+v", j)
	}
	if n, next, got, err := s.Retry(t.Context(), j.ID, j.Round, []jobs.Outcome{jobs.Expired}, "", 100); n != 0 || next != "" || err != nil || got.State != jobs.Done {
		t.Fatalf("no task has the outcome: %d, %q, %+v, %v", n, next, got, err)
	}
	if n, next, got, err := s.Retry(t.Context(), j.ID, j.Round+1, []jobs.Outcome{jobs.Failed}, "", 100); n != 0 || next != "" || err != nil || got.State != jobs.Done {
		t.Fatalf("of another round: %d, %q, %+v, %v", n, next, got, err)
	}
	wanted := []jobs.Outcome{jobs.Failed, jobs.Unknown}
	n, next, got, err := s.Retry(t.Context(), j.ID, j.Round, wanted, "", 15)
	if n != 15 || next == "" || err != nil || got.State != jobs.Running || got.Counts.Waiting != 15 {
		t.Fatalf("%d, %q, %+v, %v", n, next, got, err)
	}
	f.check(t)
	// One that has failed again meanwhile is behind the position.
	f.end(t, f.begin(t, "b", candidates(&j, next)...)[0], func(e *jobs.End) { e.Outcome = jobs.Failed })
	if n, next, got, err := s.Retry(t.Context(), j.ID, j.Round, wanted, next, 15); n != 5 || next != "" || err != nil || got.Counts.Waiting != 19 {
		t.Fatalf("%d, %q, %+v, %v", n, next, got, err)
	}
	f.check(t)
	for _, task := range f.begin(t, "b", candidates(&j, macs(1, 30)...)...) {
		if task.Attempt != 2 {
			t.Errorf("attempt %d", task.Attempt)
		}
		f.end(t, task, nil)
	}
	if j = f.job(t, j.ID); j.State != jobs.Done || j.Counts.Of(jobs.OK) != 29 || j.Counts.Of(jobs.Failed) != 1 {
		t.Fatalf("%+v", j)
	}
	if _, err := s.Edit(t.Context(), f.create(t, 1, nil).ID, func(k *jobs.Job) error { j.ID = k.ID; return k.Cancel(s.Now()) }); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.EndWaiting(t.Context(), j.ID, -1, "", jobs.CancelledT, "", 10); err != nil {
		t.Fatal(err)
	}
	var refused *devices.Error
	if _, _, _, err := s.Retry(t.Context(), j.ID, j.Round, []jobs.Outcome{jobs.CancelledT}, "", 10); !errors.As(err, &refused) || refused.Code != devices.CodeConflict {
		t.Errorf("a cancelled job is retried: %v", err)
	}
	f.check(t)
}

func testLateAnswer(t *testing.T, f *jobFleet) {
	unknown := func(e *jobs.End) { e.Outcome, e.Code = jobs.Unknown, "device_timeout" }
	late := func(o jobs.Outcome) func(e *jobs.End) {
		return func(e *jobs.End) { e.Outcome, e.Late, e.Result = o, true, "result" }
	}
	j := f.create(t, 3, func(s *api.JobSpec) { s.Stop = &api.JobStop{Failed: 1} })
	begun := f.begin(t, "a", candidates(&j, macs(1, 2)...)...)
	f.end(t, begun[0], unknown)
	if got := f.end(t, begun[0], late(jobs.OK)); len(got) != 1 || !got[0].Late || got[0].Outcome != jobs.OK || got[0].Result != "result" || got[0].Code != "" {
		t.Fatalf("%+v", got)
	}
	if j = f.job(t, j.ID); j.State != jobs.Halted || j.Counts.Of(jobs.OK) != 1 || j.Counts.Of(jobs.Unknown) != 0 {
		t.Fatalf("a late answer continued the job, or is not counted: %+v", j)
	}
	if got := f.end(t, begun[0], late(jobs.Failed)); len(got) != 0 {
		t.Fatalf("a second late answer: %+v", got)
	}
	if got := f.end(t, begun[0], unknown); len(got) != 0 {
		t.Fatalf("unknown after the answer: %+v", got)
	}
	f.end(t, begun[1], unknown)
	if got := f.end(t, begun[1], late(jobs.Unknown)); len(got) != 0 {
		t.Fatalf("unknown replaced unknown: %+v", got)
	}
	// Both in one group.
	e := jobs.End{Job: begun[1].Job, Device: begun[1].Device, Fence: begun[1].Fence, Outcome: jobs.Failed}
	if got, _, err := f.stores[0].End(t.Context(), "a", []jobs.End{e, e}); err != nil || len(got) != 1 || !got[0].Late || got[0].Outcome != jobs.Failed {
		t.Fatalf("%+v, %v", got, err)
	}
	f.check(t)
}

func testLoseRunning(t *testing.T, f *jobFleet) {
	lose := func(self string) []jobs.Task {
		t.Helper()
		list, _, err := f.stores[0].LoseRunning(t.Context(), self, 100)
		if err != nil {
			t.Fatal(err)
		}
		f.check(t)
		return list
	}
	j := f.create(t, 3, nil)
	f.begin(t, "alive", candidates(&j, mac(1))...)
	task := f.begin(t, "dead", candidates(&j, mac(2))...)[0]
	if list := lose("alive"); len(list) != 0 {
		t.Fatalf("lost though it has just begun: %+v", list)
	}
	f.Exec(t, `UPDATE tasks SET begun_at = begun_at - 3000000 WHERE state = 'running'`)
	f.Exec(t, `INSERT INTO nodes (node, instance, beat, started_at, version, api, devices, schema) VALUES ('n', 'alive', 1, 1, '', '', 0, 0)`)
	self := ""
	if !f.Postgres {
		self = "alive"
	}
	if list := lose(self); len(list) != 1 || list[0].Device != mac(2) || list[0].Outcome != jobs.Unknown || list[0].Code != jobs.CodeNodeLost {
		t.Fatalf("%+v", list)
	}
	if list := lose(self); len(list) != 0 {
		t.Fatalf("%+v", list)
	}
	f.begin(t, "dead too", candidates(&j, mac(3))...)
	f.Exec(t, `UPDATE tasks SET begun_at = begun_at + 3600000000 WHERE state = 'running'`) // and then the clock was set back
	if list := lose(self); len(list) != 1 || list[0].Device != mac(3) {
		t.Fatalf("%+v", list)
	}
	// It was not dead but frozen, and the device has answered.
	if got := f.end(t, task, nil); len(got) != 1 || got[0].Outcome != jobs.OK || !got[0].Late {
		t.Fatalf("%+v", got)
	}
}
