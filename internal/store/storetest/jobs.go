package storetest

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
	"fleetd/internal/store"
	"fleetd/internal/store/jobstore"
)

// RunJobs runs the suite of package jobstore.
func RunJobs(t *testing.T, makeDatabase Maker) {
	for _, test := range []struct {
		name string
		run  func(t *testing.T, f *jobFleet)
	}{
		{"every field of a job and a task comes back", testJobRoundTrip},
		{"a job of a few devices is running when it is created", testSmallJob},
		{"a key creates one job, from three stores at once", testIdempotency},
		{"limits of the queue", testQueueFull},
		{"the queue of a device is limited over three stores", testQueueFullTogether},
		{"preparing is continued by another node", testPreparing},
		{"ends are fenced", testFence},
		{"a failed task is repeated", testAutomaticRetry},
		{"a failed task keeps its place in the stage", testRetryInStages},
		{"retried by a person", testRetry},
		{"a late answer replaces unknown", testLateAnswer},
		{"a task of an ended process is unknown", testLoseRunning},
		{"the queue of a device keeps its order", testQueueOrder},
		{"who is not due holds nobody up", testNotDue},
		{"an action of a newer version", testUnknownAction},
		{"waiting tasks end", testEndWaiting},
		{"a deadline that has passed", testDeadline},
		{"a forgotten device", testForget},
		{"the answers of a forgotten device", testErase},
		{"lists of jobs and tasks", testJobLists},
		{"a confirmation is used once", testConfirm},
		{"one process has the turn", testTurn},
		{"the clock is stepped", testClockSteps},
		{"the clock is stepped in a rollout", testPhaseSteps},
		{"a node starts after a step", testStartAfterStep},
		{"ended jobs are deleted", testPruneJobs},
		{"old rounds of a repeating job are deleted", testRoundsAreLimited},
		{"a page with a filter reads a bounded number of rows", testFilteredPages},
		{"text that Postgres refuses, in jobs", testJobText},
		{"a process without a lease begins nothing", testBeginLease},
		{"two nodes that hold the same devices", testTwoHolders},
		{"a device that another node takes meanwhile", testTakenDevice},
		{"begin and cancel at once", testBeginAndCancel},
		{"limits hold over three stores", testLimitsTogether},
		{"nothing begins after the stop rule", testStopTogether},
		{"random work keeps the counters true", testRandomJobs},
		{"three nodes at work", testJobsTogether},
		{"a transaction that is killed", testKilledTransaction},
		{"a commit whose outcome is unknown", testUncertainBegin},
		{"every commit is reported", testReported},
		{"keys have shares of the queue of a device", testShares},
		{"keys have shares of the open tasks", testShareOfTasks},
		{"keys have shares of the open jobs", testShareOfJobs},
		{"shares of what comes again", testShareAgain},
		{"ended jobs of a key are limited", testEndedJobsAreLimited},
		{"confirmations of a key are limited", testConfirmationsAreLimited},
		{"a database whose history went backwards", testHistoryBackwards},
		{"steps of firmware tasks", testSteps},
		{"what a check may find of firmware tasks", testOutlook},
		{"firmware tasks in the queue of a device", testStepsInOrder},
		{"three nodes roll out at once", testStepsTogether},
		{"jobs of one release", testGroups},
		{"an image that is deleted while a job is created", testImageInUse},
		{"why a device has another image", testImageCauses},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, newJobFleet(t, makeDatabase(t))) })
	}
}

// jobFleet is a database with stores of jobs, as nodes have them.
type jobFleet struct {
	Database
	stores []*jobstore.Store
	host   *store.Store // one of theirs
	log    commitLog
	images changes // that the stores saw
}

// commitLog records what stores report.
type commitLog struct {
	mu      sync.Mutex
	changed map[string]map[int64]jobs.Change // by job and version
	twice   []string
	ended   []jobs.Task
}

func (l *commitLog) add(changed []jobs.Change, ended []jobs.Task) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range changed {
		versions := l.changed[c.Job.ID]
		if versions == nil {
			versions = map[int64]jobs.Change{}
			l.changed[c.Job.ID] = versions
		}
		if _, ok := versions[c.Job.Version]; ok {
			l.twice = append(l.twice, fmt.Sprintf("%s version %d", c.Job.ID, c.Job.Version))
		}
		versions[c.Job.Version] = c
	}
	l.ended = append(l.ended, ended...)
}

// check compares each change with the one before.
func (l *commitLog) check(t testing.TB) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.twice) > 0 {
		t.Errorf("reported twice: %v", l.twice)
	}
	for id, versions := range l.changed {
		for n, c := range versions {
			before, ok := versions[n-1]
			if ok && (c.From != before.Job.State || c.FromStage != before.Job.Stage || c.FromOpen != before.Job.Counts.Open()) {
				t.Errorf("job %s version %d: from %s, stage %d, %d open; was %s, stage %d, %d open", id, n, c.From, c.FromStage, c.FromOpen,
					before.Job.State, before.Job.Stage, before.Job.Counts.Open())
			}
		}
	}
}

// newJobFleet opens three nodes on Postgres, and one on SQLite that is named three times.
func newJobFleet(t testing.TB, db Database) *jobFleet {
	f := &jobFleet{Database: db, log: commitLog{changed: map[string]map[int64]jobs.Change{}}}
	t.Cleanup(func() { f.log.check(t) })
	for range 3 {
		if f.host == nil || db.Postgres {
			f.host = openStore(t, db.URL, store.OnImage(f.images.add))
		}
		if len(f.stores) == 0 || db.Postgres {
			f.stores = append(f.stores, jobstore.New(f.host, slog.New(slog.DiscardHandler), jobstore.Notify(f.log.add), jobstore.Holders(ownerKind)))
		} else {
			f.stores = append(f.stores, f.stores[0])
		}
	}
	return f
}

// jobSpec returns a checked job without limits, changed by change.
func jobSpec(t testing.TB, now time.Time, change func(s *api.JobSpec)) api.JobSpec {
	t.Helper()
	spec := api.JobSpec{Action: api.JobAction{Call: &api.JobCall{Tool: "self.test"}}, Select: "room=lab", Pace: &api.JobPace{Rate: jobs.RateUnlimited, Concurrency: 100_000}}
	if change != nil {
		change(&spec)
	}
	if err := jobs.Check(&spec, time.UTC, now); err != nil {
		t.Fatal(err)
	}
	return spec
}

// prepared returns a job that is preparing, to be created with tasks.
func (f *jobFleet) prepared(t testing.TB, change func(s *api.JobSpec)) jobs.Job {
	t.Helper()
	return f.preparedAt(t, f.stores[0].Now(), change)
}

// preparedAt is prepared at a time.
func (f *jobFleet) preparedAt(t testing.TB, now time.Time, change func(s *api.JobSpec)) jobs.Job {
	t.Helper()
	j := jobs.New(jobSpec(t, now, change), "owner", "Owner", "room=lab", now)
	if !j.Fire(now) {
		t.Fatal("the job does not fire")
	}
	return j
}

// rows returns tasks of a job for the devices from first to last.
func rowsOf(j *jobs.Job, first, last int) (rows []jobs.Task) {
	for n := first; n <= last; n++ {
		rows = append(rows, jobs.Task{Device: mac(n), Seq: j.CreatedAt.UnixMicro(), Spread: jobs.Spread(j.ID, mac(n))})
	}
	return rows
}

// create creates a job with tasks for the devices 1 to n, that runs at once.
func (f *jobFleet) create(t testing.TB, n int, change func(s *api.JobSpec)) jobs.Job {
	t.Helper()
	j := f.prepared(t, change)
	rows := rowsOf(&j, 1, n)
	stored, again, err := f.stores[0].Create(t.Context(), j, rows[:min(n, jobs.MaxDevices)])
	if err != nil || again {
		t.Fatalf("creating: %v, %t", err, again)
	}
	if n > jobs.MaxDevices {
		t.Fatal("create makes jobs of at most 1,000 devices")
	}
	return stored
}

// candidates returns candidates of a job for these devices.
func candidates(j *jobs.Job, ids ...devices.ID) (list []jobs.Candidate) {
	for _, id := range ids {
		list = append(list, jobs.Candidate{Job: j.ID, Round: j.Round, Device: id, Seq: j.CreatedAt.UnixMicro(), Spread: jobs.Spread(j.ID, id)})
	}
	return list
}

func macs(first, last int) (ids []devices.ID) {
	for n := first; n <= last; n++ {
		ids = append(ids, mac(n))
	}
	return ids
}

// begin begins candidates with the first store.
func (f *jobFleet) begin(t testing.TB, instance string, list ...jobs.Candidate) []jobs.Task {
	t.Helper()
	begun, _, err := f.stores[0].Begin(t.Context(), "node-"+instance, instance, list)
	if err != nil {
		t.Fatal(err)
	}
	f.check(t)
	return begun
}

// end ends a task that instance runs.
func (f *jobFleet) end(t testing.TB, task jobs.Task, change func(e *jobs.End)) []jobs.Task {
	t.Helper()
	e := jobs.End{Job: task.Job, Round: task.Round, Device: task.Device, Fence: task.Fence, Outcome: jobs.OK}
	if change != nil {
		change(&e)
	}
	ended, _, err := f.stores[0].End(t.Context(), task.Instance, []jobs.End{e})
	if err != nil {
		t.Fatal(err)
	}
	f.check(t)
	return ended
}

// job reads a job.
func (f *jobFleet) job(t testing.TB, id string) jobs.Job {
	t.Helper()
	j, err := f.stores[0].Job(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return j
}

// task reads the task of a device.
func (f *jobFleet) task(t testing.TB, id string, device devices.ID) jobs.Task {
	t.Helper()
	for after := ""; ; {
		list, next, err := f.stores[0].Tasks(t.Context(), jobs.TaskFilter{Job: id, After: after, Limit: 500})
		if err != nil {
			t.Fatal(err)
		}
		for _, task := range list {
			if task.Device == device {
				return task
			}
		}
		if after = next; next == "" {
			t.Fatalf("job %s has no task of %s", id, device)
		}
	}
}

// check compares the counters of all jobs with their rows, and looks for what no order of
// transactions may leave.
func (f *jobFleet) check(t testing.TB) {
	t.Helper()
	var wrong []string
	rows, err := f.Raw.QueryContext(t.Context(), `SELECT j.job, j.state, j.waiting - (SELECT count(*) FROM tasks t WHERE t.job = j.job AND t.state = 'waiting'),
 j.running - (SELECT count(*) FROM tasks t WHERE t.job = j.job AND t.state = 'running'),
 j.started - (SELECT count(*) FROM tasks t WHERE t.job = j.job AND t.round = j.round AND t.attempt > 0),
 j.held - (SELECT count(*) FROM tasks t WHERE t.job = j.job AND t.round = j.round AND t.attempt > 0 AND t.state = 'waiting'),`+outcomeDifferences()+` FROM jobs j`)
	if err != nil {
		t.Fatal(err)
	}
	for rows.Next() {
		var id, state string
		n := make([]int, 4+len(jobs.Outcomes))
		to := []any{&id, &state}
		for i := range n {
			to = append(to, &n[i])
		}
		if err := rows.Scan(to...); err != nil {
			t.Fatal(err)
		}
		if slices.ContainsFunc(n, func(n int) bool { return n != 0 }) {
			wrong = append(wrong, fmt.Sprintf("%s %s: counted minus rows %v", id, state, n))
		}
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		t.Fatal(err)
	}
	if len(wrong) > 0 {
		t.Fatalf("counters differ from the rows (waiting, running, started, held, then outcomes):\n%s", strings.Join(wrong, "\n"))
	}
	if n := f.Count(t, `SELECT count(*) FROM tasks WHERE (state = 'ended') <> (outcome <> '')`); n > 0 {
		t.Fatalf("%d tasks have an outcome and are open, or have none and ended", n)
	}
	if n := f.Count(t, `SELECT count(*) FROM (SELECT device FROM tasks WHERE state = 'running' GROUP BY device HAVING count(*) > 1) d`); n > 0 {
		t.Fatalf("%d devices have two running tasks", n)
	}
}

func outcomeDifferences() string {
	var list []string
	for _, o := range jobs.Outcomes {
		list = append(list, fmt.Sprintf(" j.n_%s - (SELECT count(*) FROM tasks t WHERE t.job = j.job AND t.state = 'ended' AND t.outcome = '%s')", o, o))
	}
	return strings.Join(list, ",")
}

// sameJob compares jobs, and their documents as JSON.
func sameJob(t testing.TB, a, b jobs.Job) bool {
	t.Helper()
	x, err := json.Marshal(a.Spec)
	if err != nil {
		t.Fatal(err)
	}
	y, err := json.Marshal(b.Spec)
	if err != nil {
		t.Fatal(err)
	}
	a.Spec, b.Spec = api.JobSpec{}, api.JobSpec{}
	return string(x) == string(y) && reflect.DeepEqual(a, b)
}

func testJobRoundTrip(t *testing.T, f *jobFleet) {
	s := f.stores[0]
	now := s.Now()
	j := jobs.New(jobSpec(t, now, func(s *api.JobSpec) {
		s.Action.Call.Arguments = []byte(`{"a":"ä"}`)
		s.When = &api.JobWhen{At: api.At(now.Add(time.Hour)), Window: &api.JobWindow{Cron: "0 2 * * *", For: "3h"}}
		s.Stages = []api.JobStage{{OK: api.Amount{Percent: 5}, Soak: "30m", Hold: true}}
		s.Stop, s.Retry, s.Repeatable, s.Note = &api.JobStop{Failed: 2, Share: "5%"}, &api.JobRetry{Failed: 3, After: "10m"}, true, "note"
	}), "owner", "Owner", "room=lab", now)
	j.Key, j.Hash, j.Confirmed = "key", "hash", []string{"rule 1", "rule 2"}
	stored, again, err := s.Create(t.Context(), j, nil)
	if err != nil || again {
		t.Fatal(err, again)
	}
	if got := f.job(t, j.ID); !sameJob(t, got, stored) || got.Version != 1 {
		t.Errorf("the job comes back as\n%+v, it was\n%+v", got, stored)
	}
	full, err := s.Edit(t.Context(), j.ID, func(j *jobs.Job) error {
		j.State, j.Reason, j.Before = jobs.Halted, "Mittag", jobs.Preparing
		j.Stage, j.StageEnd, j.Opened, j.Started, j.Held, j.PassedOK, j.Round, j.NextAt, j.Cursor, j.RoundN = 1, now, 2, 3, 7, 4, 5, now, "dev", 6
		j.TAT, j.Missed, j.BegunAt, j.Until, j.EndedAt = now, 7, now, now, now
		j.Spec.Note = "another note"
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := f.job(t, j.ID); !sameJob(t, got, full) || got.Version != 2 || got.Spec.Note != "another note" || got.Missed != 7 || got.RoundN != 6 {
		t.Errorf("after the change it comes back as\n%+v, it was\n%+v", got, full)
	}
	f.Exec(t, `UPDATE jobs SET started = 0, held = 0`) // it has no tasks
	if _, err := s.Job(t.Context(), "none"); !errors.Is(err, devices.ErrNotFound) {
		t.Errorf("an unknown job: %v", err)
	}
	want := errors.New("no")
	if _, err := s.Edit(t.Context(), j.ID, func(j *jobs.Job) error { j.Missed = 0; return want }); !errors.Is(err, want) || f.job(t, j.ID).Missed != 7 {
		t.Errorf("an error of the change: %v", err)
	}
	if _, err := s.Edit(t.Context(), "none", func(*jobs.Job) error { return nil }); !errors.Is(err, devices.ErrNotFound) {
		t.Errorf("a change of an unknown job: %v", err)
	}

	k := f.create(t, 1, nil)
	begun := f.begin(t, "i", candidates(&k, mac(1))...)
	if len(begun) != 1 {
		t.Fatal("the task does not begin")
	}
	if got := f.task(t, k.ID, mac(1)); !reflect.DeepEqual(got, begun[0]) || got.Attempt != 1 || got.Fence != 1 || got.Instance != "i" || got.Node != "node-i" || got.BegunAt.IsZero() {
		t.Errorf("the task comes back as\n%+v, it was\n%+v", got, begun[0])
	}
	ended := f.end(t, begun[0], func(e *jobs.End) {
		e.Outcome, e.Code, e.Detail, e.Result, e.Call = jobs.Failed, jobs.CodeToolError, "detail", strings.Repeat("ä", jobs.MaxResult), "call"
	})
	if got := f.task(t, k.ID, mac(1)); !reflect.DeepEqual(got, ended[0]) || got.Call != "call" || got.Code != jobs.CodeToolError || got.Result != strings.Repeat("ä", jobs.MaxResult/2) {
		t.Errorf("the ended task comes back as\n%+v, it was\n%+v", got, ended[0])
	}
}

func testSmallJob(t *testing.T, f *jobFleet) {
	j := f.create(t, 3, nil)
	if j.State != jobs.Running || j.Counts.Waiting != 3 || j.RoundN != 3 {
		t.Fatalf("%+v", j)
	}
	f.check(t)
	begun, changed, err := f.stores[0].Begin(t.Context(), "node", "i", candidates(&j, macs(1, 3)...))
	if err != nil || len(begun) != 3 || len(changed) != 1 || !changed[0].First || changed[0].From != jobs.Running {
		t.Fatalf("%d begun, %+v, %v", len(begun), changed, err)
	}
	var list []jobs.End
	for _, task := range begun {
		list = append(list, jobs.End{Job: task.Job, Device: task.Device, Fence: task.Fence, Outcome: jobs.OK})
	}
	ended, changed, err := f.stores[0].End(t.Context(), "i", list)
	if err != nil || len(ended) != 3 || len(changed) != 1 || changed[0].First || changed[0].From != jobs.Running || changed[0].Job.State != jobs.Done {
		t.Fatalf("%d ended, %+v, %v", len(ended), changed, err)
	}
	f.check(t)
	if j = f.job(t, j.ID); j.State != jobs.Done || j.Counts.Of(jobs.OK) != 3 || j.EndedAt.IsZero() {
		t.Fatalf("%+v", j)
	}
	if open, err := f.stores[0].Open(t.Context()); err != nil || len(open) != 0 {
		t.Errorf("%d jobs are open, %v", len(open), err)
	}
	if _, _, err := f.stores[0].Create(t.Context(), jobs.New(jobSpec(t, f.stores[0].Now(), nil), "o", "", "", f.stores[0].Now()), []jobs.Task{{Device: "x"}}); err == nil {
		t.Error("a job that is not preparing is created with tasks")
	}
}
