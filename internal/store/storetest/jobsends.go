package storetest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
	"fleetd/internal/store/jobstore"
)

func testEndWaiting(t *testing.T, f *jobFleet) {
	s := f.stores[0]
	j := f.create(t, 10, nil)
	running := f.begin(t, "i", candidates(&j, mac(1), mac(2))...)
	ended, got, err := s.EndWaiting(t.Context(), j.ID, -1, mac(3), jobs.CancelledT, "", 100)
	if err != nil || len(ended) != 1 || ended[0].Device != mac(3) || got.Counts.Of(jobs.CancelledT) != 1 || got.State != jobs.Running {
		t.Fatalf("%+v, %+v, %v", ended, got, err)
	}
	f.check(t)
	if ended, _, err = s.EndWaiting(t.Context(), j.ID, -1, mac(1), jobs.CancelledT, "", 100); err != nil || len(ended) != 0 {
		t.Fatalf("a running task was cancelled: %+v, %v", ended, err)
	}
	if ended, _, err = s.EndWaiting(t.Context(), j.ID, 0, "", jobs.Superseded, "", 100); err != nil || len(ended) != 0 {
		t.Fatalf("of a round below 0: %+v, %v", ended, err)
	}
	if ended, _, err = s.EndWaiting(t.Context(), j.ID, 1, mac(4), jobs.Superseded, "code", 100); err != nil || len(ended) != 1 || ended[0].Code != "code" {
		t.Fatalf("of a round below 1: %+v, %v", ended, err)
	}
	if _, err := s.Edit(t.Context(), j.ID, func(j *jobs.Job) error { return j.Cancel(s.Now()) }); err != nil {
		t.Fatal(err)
	}
	for _, want := range []int{4, 2, 0} {
		if ended, got, err = s.EndWaiting(t.Context(), j.ID, -1, "", jobs.CancelledT, "", 4); err != nil || len(ended) != want {
			t.Fatalf("%d ended, %v", len(ended), err)
		}
		f.check(t)
	}
	// Those that run end by themselves, or are cancelled with their job.
	f.end(t, running[0], nil)
	if list := f.end(t, running[1], func(e *jobs.End) { e.NotSent = true }); len(list) != 1 || list[0].Outcome != jobs.CancelledT {
		t.Fatalf("%+v", list)
	}
	if got = f.job(t, j.ID); got.State != jobs.Cancelled || got.Counts.Open() != 0 || got.Counts.Of(jobs.OK) != 1 || got.Counts.Of(jobs.CancelledT) != 8 {
		t.Fatalf("%+v", got)
	}
	// A newer round supersedes what was not sent, and what would be repeated.
	repeats := f.create(t, 3, func(s *api.JobSpec) { s.Retry = &api.JobRetry{Failed: 1} })
	begun := f.begin(t, "i", candidates(&repeats, macs(1, 3)...)...)
	if _, err := s.Edit(t.Context(), repeats.ID, func(j *jobs.Job) error { j.Round, j.Started = j.Round+1, 0; return nil }); err != nil {
		t.Fatal(err)
	}
	if list := f.end(t, begun[0], func(e *jobs.End) { e.NotSent = true }); len(list) != 1 || list[0].Outcome != jobs.Superseded {
		t.Fatalf("%+v", list)
	}
	if list := f.end(t, begun[1], func(e *jobs.End) { e.Outcome = jobs.Failed }); len(list) != 1 || list[0].Outcome != jobs.Failed {
		t.Fatalf("%+v", list)
	}
	k := f.create(t, 2, nil)
	if _, got, err = s.EndWaiting(t.Context(), k.ID, -1, "", jobs.Expired, "", 100); err != nil || got.State != jobs.Done {
		t.Fatalf("%+v, %v", got, err)
	}
	if _, _, err := s.EndWaiting(t.Context(), "none", -1, "", jobs.Expired, "", 100); !errors.Is(err, devices.ErrNotFound) {
		t.Fatalf("an unknown job: %v", err)
	}
}

func testDeadline(t *testing.T, f *jobFleet) {
	j := f.create(t, 1, nil)
	if _, err := f.stores[0].Edit(t.Context(), j.ID, func(j *jobs.Job) error { j.Until = f.stores[0].Now(); return nil }); err != nil {
		t.Fatal(err)
	}
	if got := f.begin(t, "i", candidates(&j, mac(1))...); len(got) != 0 {
		t.Fatal("a task begins after its deadline")
	}
}

func testForget(t *testing.T, f *jobFleet) {
	a, b, c := f.create(t, 2, nil), f.create(t, 2, nil), f.create(t, 2, nil)
	task := f.begin(t, "i", candidates(&a, mac(1))...)[0]
	for range 2 {
		if err := f.stores[0].Forget(t.Context(), mac(1)); err != nil {
			t.Fatal(err)
		}
		f.check(t)
	}
	for _, j := range []jobs.Job{a, b, c} {
		if got := f.job(t, j.ID); got.Counts.Of(jobs.Gone) != 1 || got.Counts.Waiting != 1 {
			t.Errorf("%+v", got.Counts)
		}
	}
	if got := f.end(t, task, nil); len(got) != 0 {
		t.Errorf("%+v", got)
	}
	// Many that leave together, in several transactions.
	const many = jobs.BeginBatch + 100
	large := f.create(t, many+1, nil)
	f.begin(t, "i", candidates(&large, macs(3, 10)...)...)
	if err := f.stores[0].Forget(t.Context(), macs(1, many)...); err != nil {
		t.Fatal(err)
	}
	f.check(t)
	if got := f.job(t, large.ID); got.Counts.Of(jobs.Gone) != many || got.Counts.Waiting != 1 || got.Counts.Running != 0 {
		t.Errorf("%+v", got.Counts)
	}
	if err := f.stores[0].Forget(t.Context()); err != nil {
		t.Error(err)
	}
}

// What a forgotten device answered is deleted, and no late answer comes back; the outcomes and the answers of others stay.
func testErase(t *testing.T, f *jobFleet) {
	s := f.stores[0]
	j, k := f.create(t, 2, nil), f.create(t, 1, nil)
	answer := func(e *jobs.End) { e.Result, e.Detail = "17 degrees", "in the kitchen" }
	f.end(t, f.begin(t, "i", candidates(&j, mac(1))...)[0], answer)
	f.end(t, f.begin(t, "i", candidates(&j, mac(2))...)[0], answer)
	late := f.begin(t, "i", candidates(&k, mac(1))...)[0]
	f.end(t, late, func(e *jobs.End) { answer(e); e.Outcome = jobs.Unknown })
	for range 2 {
		if err := s.Erase(t.Context(), mac(1)); err != nil {
			t.Fatal(err)
		}
	}
	if got := f.end(t, late, answer); len(got) != 0 {
		t.Errorf("a late answer after that: %+v", got)
	}
	f.check(t)
	for job, want := range map[string]map[devices.ID]string{j.ID: {mac(1): "ok", mac(2): "ok 17 degrees in the kitchen"}, k.ID: {mac(1): "unknown"}} {
		list, _, err := s.Tasks(t.Context(), jobs.TaskFilter{Job: job, Limit: 10})
		if err != nil || len(list) != len(want) {
			t.Fatalf("%+v, %v", list, err)
		}
		for _, task := range list {
			if got := strings.TrimSpace(fmt.Sprint(task.Outcome, " ", task.Result, " ", task.Detail)); got != want[task.Device] {
				t.Errorf("the task of %s: %q, want %q", task.Device, got, want[task.Device])
			}
		}
	}
}

func testJobLists(t *testing.T, f *jobFleet) {
	s := f.stores[0]
	var ids []string
	begun := s.Now()
	for n := range 7 {
		j := f.preparedAt(t, begun.Add(time.Duration(n-7)*time.Millisecond), func(s *api.JobSpec) { // ids have milliseconds
			if n%2 == 1 {
				s.Action = api.JobAction{Restart: &api.JobRestart{}}
			}
		})
		j.Owner = fmt.Sprint("owner ", n%3)
		if n == 4 {
			j.Owner = "owner 1/child"
		}
		if _, _, err := s.Create(t.Context(), j, rowsOf(&j, n+1, n+2)); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, j.ID)
	}
	if _, err := s.Edit(t.Context(), ids[0], func(j *jobs.Job) error { return j.Pause("") }); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		f    jobs.Filter
		want []int
	}{
		{jobs.Filter{}, []int{6, 5, 4, 3, 2, 1, 0}},
		{jobs.Filter{State: jobs.Paused}, []int{0}},
		{jobs.Filter{State: jobs.Running, Action: "restart"}, []int{5, 3, 1}},
		{jobs.Filter{Owner: "owner 1"}, []int{4, 1}},
		{jobs.Filter{Owner: "owner 1/child"}, []int{4}},
		{jobs.Filter{Owner: "owner"}, nil},
		{jobs.Filter{Device: mac(3)}, []int{2, 1}},
		{jobs.Filter{Device: mac(3), Owner: "owner 2"}, []int{2}},
		{jobs.Filter{Device: mac(30)}, nil},
	} {
		var got []string
		for test.f.Limit = 2; ; {
			page, next, err := s.Jobs(t.Context(), test.f)
			if err != nil || len(page) > 2 {
				t.Fatal(len(page), err)
			}
			for _, j := range page {
				got = append(got, j.ID)
			}
			if test.f.After = next; next == "" {
				break
			}
		}
		var want []string
		for _, n := range test.want {
			want = append(want, ids[n])
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%+v: %v, want %v", test.f, got, want)
		}
	}
	j := f.create(t, 25, nil)
	for _, task := range f.begin(t, "i", candidates(&j, macs(11, 20)...)...) {
		if task.Device >= mac(15) {
			f.end(t, task, nil)
		}
	}
	for _, test := range []struct {
		f    jobs.TaskFilter
		want []devices.ID
	}{
		{jobs.TaskFilter{}, macs(1, 25)},
		{jobs.TaskFilter{Outcome: jobs.OK}, macs(15, 20)},
		{jobs.TaskFilter{Open: true}, append(macs(1, 14), macs(21, 25)...)},
		{jobs.TaskFilter{Outcome: jobs.Failed}, nil},
	} {
		var got []devices.ID
		test.f.Job, test.f.Limit = j.ID, 4
		for {
			page, next, err := s.Tasks(t.Context(), test.f)
			if err != nil || len(page) > 4 {
				t.Fatal(len(page), err)
			}
			for _, task := range page {
				got = append(got, task.Device)
			}
			if test.f.After = next; next == "" {
				break
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(test.want) {
			t.Errorf("%+v: %v, want %v", test.f, got, test.want)
		}
	}
	var refused *devices.Error
	if _, _, err := s.Tasks(t.Context(), jobs.TaskFilter{Job: j.ID, After: "x", Limit: 1}); !errors.As(err, &refused) || refused.Code != devices.CodeBadRequest {
		t.Errorf("a cursor that is not valid: %v", err)
	}
	var last int64 = -1
	n := 0
	for {
		list, err := s.Waiting(t.Context(), j.ID, last, 4)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range list {
			if c.Spread <= last || c.Job != j.ID || c.Spread != jobs.Spread(j.ID, c.Device) {
				t.Errorf("%+v after %d", c, last)
			}
			last = c.Spread
			n++
		}
		if len(list) < 4 {
			break
		}
	}
	if n != 15 {
		t.Errorf("%d tasks wait", n)
	}
	if list, _, err := s.WaitingOf(t.Context(), macs(1, 8), 1, nil); err != nil || len(list) != 8 || list[0].Job != j.ID {
		t.Errorf("%+v, %v", list, err)
	}
}

func testConfirm(t *testing.T, f *jobFleet) {
	s := f.stores[0]
	if err := s.Confirm(t.Context(), "digest", "owner", "hash", []string{"rule"}); err != nil {
		t.Fatal(err)
	}
	take := func(digest, owner, hash string, want error) {
		t.Helper()
		rules, err := f.stores[1].TakeConfirm(t.Context(), digest, owner, hash)
		if !errors.Is(err, want) || want == nil && (err != nil || len(rules) != 1 || rules[0] != "rule") {
			t.Errorf("%s %s %s: %v, %v", digest, owner, hash, rules, err)
		}
	}
	take("other", "owner", "hash", devices.ErrNotFound)
	take("digest", "other", "hash", devices.ErrNotFound)
	take("digest", "owner", "other", devices.ErrNotFound)
	take("digest", "owner", "hash", nil)
	take("digest", "owner", "hash", devices.ErrNotFound)
	if err := s.Confirm(t.Context(), "declined", "owner", "hash", []string{"rule"}); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.DropConfirm(t.Context(), "declined", "owner"), s.DropConfirm(t.Context(), "declined", "owner")); err != nil {
		t.Fatal(err)
	}
	take("declined", "owner", "hash", devices.ErrNotFound)
	if err := s.Confirm(t.Context(), "late", "owner", "hash", []string{"rule"}); err != nil {
		t.Fatal(err)
	}
	f.Exec(t, `UPDATE job_confirmations SET until = until - $1`, (jobs.ConfirmLifetime + time.Second).Microseconds())
	take("late", "owner", "hash", devices.ErrNotFound)
	if _, err := s.Prune(t.Context(), time.Unix(1, 0), 10); err != nil {
		t.Fatal(err)
	}
	if n := f.Count(t, `SELECT count(*) FROM job_confirmations`); n != 0 {
		t.Errorf("%d confirmations are left", n)
	}
}

func testPruneJobs(t *testing.T, f *jobFleet) {
	s := f.stores[0]
	end := func(j jobs.Job, n int) {
		for _, task := range f.begin(t, "i", candidates(&j, macs(1, n)...)...) {
			f.end(t, task, nil)
		}
	}
	old, younger := f.create(t, 25, nil), f.create(t, 2, nil)
	end(old, 25)
	end(younger, 2)
	open := f.create(t, 1, nil)
	before := f.job(t, old.ID).EndedAt.Add(time.Microsecond)
	total := 0
	for range 4 {
		n, err := s.Prune(t.Context(), before, 10)
		if err != nil || n > 11 {
			t.Fatal(n, err)
		}
		total += n
		f.check(t)
	}
	if total != 26 || f.Count(t, `SELECT count(*) FROM jobs`) != 2 || f.Count(t, `SELECT count(*) FROM tasks`) != 3 {
		t.Errorf("%d rows were deleted", total)
	}
	if n, err := s.Prune(t.Context(), s.Now().Add(time.Hour), 10); err != nil || n != 3 || f.job(t, open.ID).State != jobs.Running {
		t.Errorf("%d, %v", n, err)
	}
}

func testRoundsAreLimited(t *testing.T, f *jobFleet) {
	s := f.stores[0]
	now := s.Now()
	j := jobs.New(jobSpec(t, now, func(s *api.JobSpec) { s.When = &api.JobWhen{Cron: "* * * * *"} }), "owner", "Owner", "room=lab", now)
	if j, _, _ = s.Create(t.Context(), j, nil); j.State != jobs.Scheduled {
		t.Fatalf("%+v", j)
	}
	const devices, rounds = 3, jobs.KeptRounds + 10
	for range rounds {
		var err error
		if j, err = s.Edit(t.Context(), j.ID, func(j *jobs.Job) error { j.NextAt = now; j.Fire(now); return nil }); err != nil || j.State != jobs.Preparing {
			t.Fatalf("%+v, %v", j, err)
		}
		if j, err = s.AddTasks(t.Context(), j.ID, "", "", rowsOf(&j, 1, devices), true); err != nil {
			t.Fatal(err)
		}
		for i, task := range f.begin(t, "i", candidates(&j, macs(1, devices)...)...) {
			f.end(t, task, func(e *jobs.End) { e.Outcome = []jobs.Outcome{jobs.OK, jobs.Failed, jobs.Unknown}[i%3] })
		}
	}
	f.check(t)
	oldest, count := f.Count(t, `SELECT min(round) FROM tasks`), f.Count(t, `SELECT count(*) FROM tasks`)
	if j = f.job(t, j.ID); oldest != rounds-jobs.KeptRounds+1 || count != devices*jobs.KeptRounds || j.Counts.Of(jobs.Failed) != jobs.KeptRounds {
		t.Errorf("after %d rounds, %d tasks since round %d, %+v", rounds, count, oldest, j.Counts)
	}
}

func testFilteredPages(t *testing.T, f *jobFleet) {
	s := f.stores[0]
	j := f.create(t, 1, nil)
	f.end(t, f.begin(t, "i", candidates(&j, mac(1))...)[0], nil)
	const rows = 25_000
	f.Exec(t, fmt.Sprintf(`INSERT INTO tasks (job, device, round, seq, spread, state, due_at, attempt, fence, instance, node, call_id, outcome, code, detail, result, late, begun_at, ended_at)
 WITH RECURSIVE i(n) AS (SELECT 100001 UNION ALL SELECT n + 1 FROM i WHERE n < %d)
 SELECT job, 'x' || i.n, round, seq, spread, state, due_at, attempt, fence, instance, node, call_id, CASE WHEN i.n = %[1]d THEN 'failed' ELSE outcome END, code, detail, result, late, begun_at, ended_at FROM tasks, i`, 100_000+rows))
	pages, after := 0, ""
	var found []jobs.Task
	for {
		list, next, err := s.Tasks(t.Context(), jobs.TaskFilter{Job: j.ID, Outcome: jobs.Failed, After: after, Limit: 10})
		if err != nil {
			t.Fatal(err)
		}
		pages++
		found = append(found, list...)
		if after = next; next == "" {
			break
		}
	}
	if pages != 2 || len(found) != 1 || found[0].Device != devices.ID(fmt.Sprint("x", 100_000+rows)) {
		t.Errorf("%d pages, %+v", pages, found)
	}
	if list, next, err := s.Tasks(t.Context(), jobs.TaskFilter{Job: j.ID, Outcome: jobs.OK, Limit: 10}); err != nil || len(list) != 10 || next == "" {
		t.Errorf("a page that is full: %d, %q, %v", len(list), next, err)
	}
}

// RunPages checks on a Postgres database of its own, which counts the rows that are read, that a page of tasks is added to a large job,
// or ended, without reading the others: Postgres has no statistics of a job whose tasks were just written, and expects few.
func RunPages(t *testing.T, db Database) {
	f := newJobFleet(t, db)
	f.Exec(t, `ALTER TABLE tasks SET (autovacuum_enabled = false)`)
	const others, added = 25_000, 200
	fill := func(job string, round int, state jobs.TaskState, outcome jobs.Outcome) {
		f.Exec(t, fmt.Sprintf(`INSERT INTO tasks (job, device, round, seq, spread, state, due_at, attempt, fence, instance, node, call_id, outcome, code, detail, result, late, begun_at, ended_at)
 SELECT %s, 'x' || i.n, %d, 0, i.n, '%s', 0, 0, 0, '', '', '', '%s', '', '', '', false, 0, 0 FROM generate_series(1, %d) i(n)`, job, round, state, outcome, others))
	}
	fill(`'small' || i.n / 20`, 0, jobs.TaskWaiting, "")
	f.Exec(t, `ANALYZE tasks`)
	add := func(j jobs.Job, round int, state jobs.TaskState, outcome jobs.Outcome) {
		t.Helper()
		fill(`'`+j.ID+`'`, round, state, outcome)
		after, err := f.stores[0].AddTasks(t.Context(), j.ID, "", "", rowsOf(&j, 101, 100+added), false)
		if err != nil || after.Counts.Waiting != j.Counts.Waiting+added {
			t.Errorf("%d tasks, and before %d: %v", after.Counts.Waiting, j.Counts.Waiting, err)
		}
	}
	large := f.create(t, 1, func(s *api.JobSpec) { s.Follow = true })
	add(large, 0, jobs.TaskWaiting, "")
	if ended, _, err := f.stores[0].EndWaiting(t.Context(), large.ID, -1, "", jobs.CancelledT, "", added); err != nil || len(ended) != added {
		t.Errorf("%d tasks were ended: %v", len(ended), err)
	}
	now := f.stores[0].Now()
	j := jobs.New(jobSpec(t, now, func(s *api.JobSpec) { s.When = &api.JobWhen{Cron: "* * * * *"} }), "owner", "Owner", "room=lab", now)
	j, _, err := f.stores[0].Create(t.Context(), j, nil)
	if err == nil {
		j, err = f.stores[0].Edit(t.Context(), j.ID, func(j *jobs.Job) error { j.NextAt, j.Round = now, jobs.KeptRounds+10; j.Fire(now); return nil })
	}
	if err != nil {
		t.Fatal(err)
	}
	add(j, 1, jobs.TaskEnded, jobs.OK)
	// The servers of connections count what they have read when these end.
	const connections = ` FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'fleetd'`
	for f.Exec(t, `SELECT pg_terminate_backend(pid)`+connections); f.Count(t, `SELECT count(*)`+connections) > 0; time.Sleep(time.Millisecond) {
	}
	if n := f.Count(t, `SELECT (SELECT seq_tup_read FROM pg_stat_user_tables WHERE relname = 'tasks') + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE relname = 'tasks')`); n > others/2 {
		t.Errorf("%d rows were read to add %d tasks twice, and to end as many", n, added)
	}
}

func testJobText(t *testing.T, f *jobFleet) {
	const bad = "a\x00b\xffc"
	const clean = "a\uFFFDb\uFFFDc"
	j := f.prepared(t, func(s *api.JobSpec) { s.Note = bad })
	j.OwnerName, j.Devices, j.Confirmed = bad, bad, []string{bad}
	if _, _, err := f.stores[0].Create(t.Context(), j, rowsOf(&j, 1, 1)); err != nil {
		t.Fatal(err)
	}
	if _, err := f.stores[0].Edit(t.Context(), j.ID, func(j *jobs.Job) error { j.Reason = bad; return nil }); err != nil {
		t.Fatal(err)
	}
	if got := f.job(t, j.ID); got.OwnerName != clean || got.Reason != clean || got.Devices != clean {
		t.Errorf("%+v", got)
	}
	begun, _, err := f.stores[0].Begin(context.Background(), bad, "i", candidates(&j, mac(1)))
	if err != nil || len(begun) != 1 {
		t.Fatal(begun, err)
	}
	got := f.end(t, begun[0], func(e *jobs.End) { e.Outcome, e.Detail, e.Result = jobs.Failed, bad, bad })
	if len(got) != 1 || got[0].Detail != clean || got[0].Result != clean {
		t.Errorf("%+v", got)
	}
	for _, id := range []string{bad, ""} {
		if _, err := f.stores[0].Job(t.Context(), id); !errors.Is(err, devices.ErrNotFound) {
			t.Errorf("job %q: %v", id, err)
		}
		if _, err := f.stores[0].Queue(t.Context(), devices.ID(id)); err != nil {
			t.Errorf("queue of %q: %v", id, err)
		}
	}
}

func testBeginLease(t *testing.T, f *jobFleet) {
	if !f.Postgres {
		t.Skip("LACKS: nodes share a database on Postgres alone")
	}
	s := jobstore.New(openStore(t, f.URL), slog.New(slog.DiscardHandler), jobstore.Leases())
	j := f.create(t, 1, nil)
	if begun, _, err := s.Begin(t.Context(), "node", "i", candidates(&j, mac(1))); err != nil || len(begun) != 0 {
		t.Fatalf("without a lease: %+v, %v", begun, err)
	}
	f.Exec(t, `INSERT INTO nodes (node, instance, beat, started_at, version, api, devices, schema) VALUES ('n', 'i', 1, 1, '', '', 0, 0)`)
	if begun, _, err := s.Begin(t.Context(), "node", "i", candidates(&j, mac(1))); err != nil || len(begun) != 1 {
		t.Fatalf("with a lease: %+v, %v", begun, err)
	}
}

// What a transaction changed is reported once it is committed, with what was before, whichever method made it.
func testReported(t *testing.T, f *jobFleet) {
	s := f.stores[0]
	j := f.create(t, 4, func(s *api.JobSpec) { s.Stop = &api.JobStop{Failed: 1} })
	f.end(t, f.begin(t, "i", candidates(&j, mac(1))...)[0], func(e *jobs.End) { e.Outcome = jobs.Failed })
	if _, err := s.Edit(t.Context(), j.ID, func(*jobs.Job) error { return errors.New("no") }); err == nil {
		t.Error("a refused edit succeeds")
	}
	if _, err := s.Edit(t.Context(), j.ID, func(j *jobs.Job) error { return j.Resume(s.Now()) }); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.EndWaiting(t.Context(), j.ID, -1, mac(2), jobs.CancelledT, "", 1); err != nil {
		t.Fatal(err)
	}
	if _, _, _, err := s.Retry(t.Context(), j.ID, j.Round, []jobs.Outcome{jobs.CancelledT}, "", 1); err != nil {
		t.Fatal(err)
	}
	for n := 2; n <= 4; n++ {
		if err := s.Forget(t.Context(), mac(n)); err != nil {
			t.Fatal(err)
		}
	}
	f.log.mu.Lock()
	defer f.log.mu.Unlock()
	versions := f.log.changed[j.ID]
	var seen []string
	for n := int64(1); n <= int64(len(versions)); n++ {
		c := versions[n]
		seen = append(seen, fmt.Sprintf("%s-%s %t", c.From, c.Job.State, c.First))
	}
	want := []string{"-running false", "running-running true", "running-halted false", "halted-running false", "running-running false", "running-running false",
		"running-running false", "running-running false", "running-done false"}
	if !slices.Equal(seen, want) {
		t.Errorf("%v, want %v", seen, want)
	}
	var ended []string
	for _, task := range f.log.ended {
		ended = append(ended, string(task.Outcome))
	}
	if want := []string{"failed", "cancelled", "gone", "gone", "gone"}; !slices.Equal(ended, want) {
		t.Errorf("ended: %v, want %v", ended, want)
	}
}
