package backup

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
	"fleetd/internal/store"
	"fleetd/internal/store/database"
	"fleetd/internal/store/jobstore"
	"fleetd/internal/store/ledger"
)

// jobFor creates a job that calls a tool of these devices.
func jobFor(t *testing.T, s *jobstore.Store, ids ...devices.ID) jobs.Job {
	t.Helper()
	spec := api.JobSpec{Action: api.JobAction{Call: &api.JobCall{Tool: "self.count"}}, Select: "a"}
	if err := jobs.Check(&spec, time.UTC, s.Now()); err != nil {
		t.Fatal(err)
	}
	j := jobs.New(spec, "owner", "", "a", s.Now())
	j.Fire(s.Now())
	var rows []jobs.Task
	for _, id := range ids {
		rows = append(rows, jobs.Task{Device: id, Seq: s.Now().UnixMicro(), Spread: jobs.Spread(j.ID, id)})
	}
	j, _, err := s.Create(t.Context(), j, rows)
	if err != nil {
		t.Fatal(err)
	}
	return j
}

// A backup is made while tasks run; the queue goes on, and the backup is restored: what ran since does
// not run again by itself.
func TestRestoreHaltsJobs(t *testing.T) {
	dir, cfg := used(t)
	live, err := store.Open(t.Context(), "sqlite", dir, quiet)
	if err != nil {
		t.Fatal(err)
	}
	s := jobstore.New(live, quiet)
	running := jobFor(t, s, "a", "b", "c", "d")
	paused := jobFor(t, s, "e")
	stopped := jobFor(t, s, "f")
	cancelled := jobFor(t, s, "g")
	done := jobFor(t, s, "h")
	begin := func(s *jobstore.Store, j jobs.Job, ids ...devices.ID) []jobs.Task {
		t.Helper()
		var list []jobs.Candidate
		for _, id := range ids {
			list = append(list, jobs.Candidate{Job: j.ID, Device: id})
		}
		begun, _, err := s.Begin(t.Context(), "n", "i", list)
		if err != nil {
			t.Fatal(err)
		}
		return begun
	}
	end := func(task jobs.Task) {
		t.Helper()
		if _, _, err := s.End(t.Context(), "i", []jobs.End{{Job: task.Job, Device: task.Device, Fence: task.Fence, Outcome: jobs.OK}}); err != nil {
			t.Fatal(err)
		}
	}
	edit := func(s *jobstore.Store, j jobs.Job, f func(j *jobs.Job) error) jobs.Job {
		t.Helper()
		j, err := s.Edit(t.Context(), j.ID, f)
		if err != nil {
			t.Fatal(err)
		}
		return j
	}
	end(begin(s, running, "a")[0])
	at := begin(s, running, "b", "c")
	edit(s, paused, func(j *jobs.Job) error { return j.Pause("lunch") })
	edit(s, stopped, func(j *jobs.Job) error { j.Halt(jobs.ReasonStop); return nil })
	begin(s, cancelled, "g")
	edit(s, cancelled, func(j *jobs.Job) error { return j.Cancel(s.Now()) })
	end(begin(s, done, "h")[0])

	report, err := Backup(t.Context(), cfg, t.TempDir(), false)
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range append(at, begin(s, running, "d")...) { // today's calls
		end(task)
	}
	if err := live.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(t.TempDir(), "restored")
	if _, err := Restore(report.Path, to, false, false); err != nil {
		t.Fatal(err)
	}
	restored, err := store.Open(t.Context(), "sqlite", to, quiet)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = restored.Close(t.Context()) })
	s = jobstore.New(restored, quiet)
	for _, c := range []struct {
		job            jobs.Job
		state          jobs.State
		reason         string
		unknown, waits int64
	}{
		{running, jobs.Halted, jobs.ReasonRestored, 2, 1},
		{paused, jobs.Halted, jobs.ReasonRestored, 0, 1},
		{stopped, jobs.Halted, jobs.ReasonStop, 0, 1},
		{cancelled, jobs.Cancelled, "", 1, 0},
		{done, jobs.Done, "", 0, 0},
	} {
		got, err := s.Job(t.Context(), c.job.ID)
		if err != nil || got.State != c.state || got.Reason != c.reason || got.Counts.Running != 0 || got.Counts.Of(jobs.Unknown) != c.unknown || got.Counts.Waiting != c.waits {
			t.Errorf("%+v, %v; want %s %s, %d unknown, %d waiting", got, err, c.state, c.reason, c.unknown, c.waits)
		}
		list, _, err := s.Tasks(t.Context(), jobs.TaskFilter{Job: c.job.ID, Limit: 10})
		if err != nil {
			t.Fatal(err)
		}
		for _, task := range list {
			if task.State == jobs.TaskRunning || (task.Outcome == jobs.Unknown) != (task.Code == jobs.CodeRestored) || task.Outcome == jobs.Unknown && (task.Detail == "" || task.EndedAt.IsZero()) {
				t.Errorf("%+v", task)
			}
		}
		if begun := begin(s, c.job, "a", "b", "c", "d", "e", "f", "g", "h"); len(begun) != 0 {
			t.Errorf("it begins without a person: %+v", begun)
		}
	}
	// A person who has looked at it may go on with what has not begun.
	if j := edit(s, running, func(j *jobs.Job) error { return j.Resume(s.Now()) }); j.State != jobs.Running {
		t.Errorf("%+v", j)
	}
	if begun := begin(s, running, "a", "b", "c", "d"); len(begun) != 1 || begun[0].Device != "d" {
		t.Errorf("%+v", begun)
	}
	if j := edit(s, paused, func(j *jobs.Job) error { return j.Resume(s.Now()) }); j.State != jobs.Running {
		t.Errorf("%+v", j)
	}
}

// A planned move keeps schedules that have no open task; the report says what was halted, and the lineage that it was planned.
func TestRestoreReportsSchedules(t *testing.T) {
	dir, cfg := used(t)
	live, err := store.Open(t.Context(), "sqlite", dir, quiet)
	if err != nil {
		t.Fatal(err)
	}
	s := jobstore.New(live, quiet)
	schedule := func(change func(j *jobs.Job) error) jobs.Job {
		t.Helper()
		spec := api.JobSpec{Action: api.JobAction{Call: &api.JobCall{Tool: "self.count"}}, Select: "a", When: &api.JobWhen{Cron: "0 7 * * *"}}
		if err := jobs.Check(&spec, time.UTC, s.Now()); err != nil {
			t.Fatal(err)
		}
		j, _, err := s.Create(t.Context(), jobs.New(spec, "owner", "", "a", s.Now()), nil)
		if err != nil {
			t.Fatal(err)
		}
		if change != nil {
			if j, err = s.Edit(t.Context(), j.ID, change); err != nil {
				t.Fatal(err)
			}
		}
		return j
	}
	idle := schedule(nil)
	paused := schedule(func(j *jobs.Job) error { return j.Pause("lunch") })
	firing := schedule(func(j *jobs.Job) error { j.State = jobs.Preparing; return nil })
	once := jobFor(t, s, "a")
	report, err := Backup(t.Context(), cfg, t.TempDir(), false)
	if err != nil {
		t.Fatal(err)
	}
	if err := live.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	for keep, want := range map[bool]Halted{false: {Jobs: 4, Schedules: 3}, true: {Jobs: 2, Schedules: 1, Kept: 2}} {
		to := filepath.Join(t.TempDir(), "restored")
		restored, err := Restore(report.Path, to, false, keep)
		// security: K43
		if err != nil || restored.Halted != want {
			t.Errorf("keep %t: %+v, %v", keep, restored.Halted, err)
		}
		opened, err := store.Open(t.Context(), "sqlite", to, quiet)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = opened.Close(context.Background()) })
		for _, c := range []struct {
			job   jobs.Job
			state jobs.State // if schedules are kept
		}{{idle, jobs.Scheduled}, {paused, jobs.Paused}, {firing, jobs.Halted}, {once, jobs.Halted}} {
			if !keep {
				c.state = jobs.Halted
			}
			j, err := jobstore.New(opened, quiet).Job(t.Context(), c.job.ID)
			// security: K43
			if err != nil || j.State != c.state {
				t.Errorf("keep %t: %s is %s, want %s: %v", keep, c.job.ID, j.State, c.state, err)
			}
		}
		head, err := ledger.New(opened, quiet).Head(t.Context())
		if err != nil || database.IsPlannedMove(head.Lineage) != keep {
			t.Errorf("keep %t: lineage %q, %v", keep, head.Lineage, err)
		}
	}
}
