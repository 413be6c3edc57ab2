package storetest

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
	"fleetd/internal/store/jobstore"
)

// ownerKind is whose keys the owners of jobs are in these tests: those that begin with key are plain keys, with gone ended
// ones; others are administrators.
func ownerKind(owner string) access.Holder {
	return access.Holder{Admin: !strings.HasPrefix(owner, "key") && !strings.HasPrefix(owner, "gone"), Ended: strings.HasPrefix(owner, "gone")}
}

// owned creates a job of an owner for the devices from first to last.
func (f *jobFleet) owned(t testing.TB, store int, owner string, first, last int) (jobs.Job, error) {
	t.Helper()
	now := f.stores[0].Now()
	j := jobs.New(jobSpec(t, now, nil), owner, owner, "room=lab", now)
	if !j.Fire(now) {
		t.Fatal("the job does not fire")
	}
	stored, _, err := f.stores[store].Create(t.Context(), j, rowsOf(&j, first, last))
	return stored, err
}

// fill creates jobs of one task for a device until the queue is full, from three stores at once, and returns how many there
// are.
func (f *jobFleet) fill(t testing.TB, owner string, device int) int {
	t.Helper()
	var mu sync.Mutex
	var wg sync.WaitGroup
	n := 0
	for store := range f.stores {
		wg.Go(func() {
			for {
				_, err := f.owned(t, store, owner, device, device)
				if errors.Is(err, jobs.ErrQueueFull) {
					return
				}
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				n++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return n
}

func testShares(t *testing.T, f *jobFleet) {
	for _, c := range []struct {
		owner string
		want  int
	}{{"key 1", 37}, {"key 2", 19}, {"admin", 44}, {"key 3", 0}} {
		if n := f.fill(t, c.owner, 1); n != c.want {
			t.Errorf("%s has %d places in the queue of a device, want %d", c.owner, n, c.want)
		}
	}
	f.Exec(t, `UPDATE jobs SET owner = 'gone' WHERE owner = 'key 1'`)
	if n := f.fill(t, "key 2", 1); n == 0 {
		t.Error("what an ended key held counts")
	}
	f.check(t)
}

func testShareOfTasks(t *testing.T, f *jobFleet) {
	s := f.stores[0]
	first, err := f.owned(t, 0, "key 1", 1, 2)
	if err != nil {
		t.Fatal(err)
	}
	f.Exec(t, `UPDATE jobs SET reserved = 374000 WHERE job = $1`, first.ID)
	if room, err := s.Room(t.Context(), "key 1"); err != nil || room != 998 {
		t.Errorf("room for %d, %v", room, err)
	}
	if _, err := f.owned(t, 1, "key 1", 1, 999); !errors.Is(err, jobs.ErrOpenTasks) {
		t.Errorf("more than the share: %v", err)
	}
	if _, err := f.owned(t, 1, "admin", 1, 999); err != nil {
		t.Error(err)
	}
	// A selection reserves its tasks before their rows are written, all or none.
	waits := f.prepared(t, nil)
	waits.Owner = "key 1"
	if _, _, err := s.Create(t.Context(), waits, nil); err != nil {
		t.Fatal(err)
	}
	reserve := func(n int64) jobs.Job {
		t.Helper()
		j, err := s.Reserve(t.Context(), waits.ID, n)
		if err != nil {
			t.Fatal(err)
		}
		return j
	}
	if j := reserve(999); j.State != jobs.Preparing || j.Reason != jobs.ReasonLimit || j.Reserved != 0 {
		t.Errorf("%+v", j)
	}
	f.Exec(t, `UPDATE jobs SET reserved = 0 WHERE job = $1`, first.ID)
	if j := reserve(3); j.State != jobs.Preparing || j.Reason != "" || j.Reserved != 3 {
		t.Errorf("%+v", j)
	}
	f.Exec(t, `UPDATE jobs SET reserved = 375000 WHERE job = $1`, first.ID)
	j, err := s.AddTasks(t.Context(), waits.ID, "", string(mac(3)), rowsOf(&waits, 1, 2), false)
	if err != nil || j.Counts.Waiting != 2 || j.Reserved != 1 {
		t.Fatalf("%+v %v", j, err)
	}
	// The selection has grown meanwhile, and there is no room for more.
	j, err = s.AddTasks(t.Context(), waits.ID, string(mac(3)), "", rowsOf(&waits, 3, 6), true)
	if err != nil || j.State != jobs.Running || j.Counts.Waiting != 3 || j.Counts.Of(jobs.Refused) != 3 || j.Reserved != 0 {
		t.Errorf("%+v %v", j, err)
	}
	if task := f.task(t, waits.ID, mac(6)); task.Code != jobs.CodeLimit {
		t.Errorf("%+v", task)
	}
	f.Exec(t, `UPDATE jobs SET reserved = 0 WHERE job = $1`, first.ID)
	f.check(t)
	// A job that follows its selection leaves out what does not fit, and the caller learns that.
	follows := f.prepared(t, func(s *api.JobSpec) { s.Follow = true })
	follows.Owner = "key 1"
	if follows, _, err = s.Create(t.Context(), follows, rowsOf(&follows, 1, 1)); err != nil {
		t.Fatal(err)
	}
	f.Exec(t, `UPDATE jobs SET reserved = 375000 WHERE job = $1`, first.ID)
	if j, err := s.AddTasks(t.Context(), follows.ID, "", "", rowsOf(&follows, 1, 3), false); !errors.Is(err, jobs.ErrOpenTasks) || j.Counts.Total() != 1 {
		t.Errorf("%+v %v", j, err)
	}
	f.Exec(t, `UPDATE jobs SET reserved = 0 WHERE job = $1`, first.ID)
	// A selection that never fits halts its job.
	large := f.prepared(t, nil)
	large.Owner = "key 2"
	if _, _, err := s.Create(t.Context(), large, nil); err != nil {
		t.Fatal(err)
	}
	if j, err := s.Reserve(t.Context(), large.ID, 375_001); err != nil || j.State != jobs.Halted || j.Reason != jobs.ReasonLimit {
		t.Errorf("%+v %v", j, err)
	}
}

// Tasks that are repeated, and jobs that are taken over, need a share as new ones do.
func testShareAgain(t *testing.T, f *jobFleet) {
	s := f.stores[0]
	done, err := f.owned(t, 0, "key 1", 1, 2)
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range f.begin(t, "i", candidates(&done, macs(1, 2)...)...) {
		f.end(t, task, func(e *jobs.End) { e.Outcome = jobs.Failed })
	}
	other, err := f.owned(t, 0, "key 1", 5, 5)
	if err != nil {
		t.Fatal(err)
	}
	f.Exec(t, `UPDATE jobs SET reserved = 375000 WHERE job = $1`, other.ID)
	if _, _, _, err := s.Retry(t.Context(), done.ID, done.Round, []jobs.Outcome{jobs.Failed}, "", 10); !errors.Is(err, jobs.ErrOpenTasks) {
		t.Errorf("repeated: %v", err)
	}
	if _, err := s.Edit(t.Context(), other.ID, func(j *jobs.Job) error { j.Halt(jobs.ReasonKey); return nil }); err != nil {
		t.Fatal(err)
	}
	resume := func(j *jobs.Job) error { return j.Resume(s.Now()) }
	f.Exec(t, `UPDATE jobs SET reserved = 375000, idem = 'once' WHERE job = $1`, other.ID)
	if _, err := s.Take(t.Context(), other.ID, "key 2", "Key 2", resume); !errors.Is(err, jobs.ErrOpenTasks) {
		t.Errorf("taken over: %v", err)
	}
	if _, _, _, err := s.Retry(t.Context(), done.ID, done.Round, []jobs.Outcome{jobs.Failed}, "", 10); err != nil {
		t.Errorf("what a job that halted with its key holds counts: %v", err)
	}
	f.Exec(t, `UPDATE jobs SET reserved = 0 WHERE job = $1`, other.ID)
	j, err := s.Take(t.Context(), other.ID, "key 2", "Key 2", resume)
	if err != nil || j.State != jobs.Running || j.Owner != "key 2" || j.OwnerName != "Key 2" {
		t.Fatalf("%+v %v", j, err)
	}
	if j := f.job(t, other.ID); j.Owner != "key 2" || j.OwnerName != "Key 2" || j.Key != "" || j.State != jobs.Running {
		t.Errorf("%+v", j)
	}
	f.check(t)
}

func testShareOfJobs(t *testing.T, f *jobFleet) {
	f.copyJobs(t, "key 1", 374, 0)
	create := func(owner string) error {
		_, err := f.owned(t, 1, owner, 1, 1)
		return err
	}
	if one, two := create("key 1"), create("key 1"); one != nil || !errors.Is(two, jobs.ErrOpenJobs) {
		t.Errorf("the last job of a share: %v, one more: %v", one, two)
	}
	if err := errors.Join(create("key 2"), create("admin")); err != nil {
		t.Error(err)
	}
}

// copyJobs makes n jobs of an owner, without tasks, that ended at a time; 0: they are open.
func (f *jobFleet) copyJobs(t testing.TB, owner string, n int, endedAt int64) {
	t.Helper()
	now := f.stores[0].Now()
	model := jobs.New(jobSpec(t, now, nil), owner, owner, "room=lab", now)
	if _, _, err := f.stores[0].Create(t.Context(), model, nil); err != nil {
		t.Fatal(err)
	}
	rows, err := f.Raw.QueryContext(t.Context(), `SELECT * FROM jobs WHERE job = $1`, model.ID)
	if err != nil {
		t.Fatal(err)
	}
	names, err := rows.Columns()
	if err := errors.Join(err, rows.Close()); err != nil {
		t.Fatal(err)
	}
	list := strings.Join(names, ", ")
	numbered := strings.Replace(strings.Replace(", "+list+",", ", job,", ", 'n' || i.n,", 1), ", ended_at,", ", CASE WHEN 0 = %[4]d THEN 0 ELSE %[4]d + i.n END,", 1)
	f.Exec(t, fmt.Sprintf(`INSERT INTO jobs (%[1]s) WITH RECURSIVE i(n) AS (SELECT 10000001 UNION ALL SELECT n + 1 FROM i WHERE n < 10000000 + %[2]d) SELECT `+strings.Trim(numbered, ", ")+
		` FROM i, jobs WHERE job = '%[3]s'`, list, n-1, model.ID, endedAt))
	if endedAt > 0 {
		f.Exec(t, `UPDATE jobs SET ended_at = $1 WHERE job = $2`, endedAt, model.ID)
	}
}

// The oldest ended jobs of a key go when it has too many.
func testEndedJobsAreLimited(t *testing.T, f *jobFleet) {
	s := f.stores[0]
	ended := s.Now().Add(-time.Hour).UnixMicro()
	f.copyJobs(t, "key 1", jobs.MaxEndedJobs+150, ended)
	f.Exec(t, `UPDATE jobs SET job = 'a' || job, owner = 'admin' WHERE owner = 'key 1'`)
	f.copyJobs(t, "key 1", jobs.MaxEndedJobs+150, ended)
	for deleted, pass := 0, 0; ; pass++ {
		n, err := s.Prune(t.Context(), s.Now().Add(-jobs.Kept), 1000)
		if err != nil || pass > 10 {
			t.Fatal(n, err)
		}
		if deleted += n; n == 0 {
			if deleted != 150 {
				t.Errorf("%d jobs were deleted", deleted)
			}
			break
		}
	}
	if n := f.Count(t, `SELECT count(*) FROM jobs WHERE owner = 'key 1' AND ended_at < $1`, ended+10_000_150); n != 0 {
		t.Errorf("%d of the oldest are left", n)
	}
}

func testConfirmationsAreLimited(t *testing.T, f *jobFleet) {
	s, until := f.stores[0], f.stores[0].Now().Add(time.Minute).UnixMicro()
	f.Exec(t, fmt.Sprintf(`INSERT INTO job_confirmations (digest, owner, hash, rules, until) WITH RECURSIVE i(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM i WHERE n < 10000) SELECT 'd' || n, 'key 1', 'h', '[]', %d + n FROM i`, until))
	for n := range 3 {
		if err := s.Confirm(t.Context(), fmt.Sprint("new ", n), "key 1", "h", nil); err != nil {
			t.Fatal(err)
		}
	}
	if n := f.Count(t, `SELECT count(*) FROM job_confirmations`); n != jobs.MaxConfirmations {
		t.Errorf("%d confirmations", n)
	}
	if _, err := s.TakeConfirm(t.Context(), "d3", "key 1", "h"); !errors.Is(err, devices.ErrNotFound) {
		t.Errorf("the oldest is there: %v", err)
	}
	if _, err := s.TakeConfirm(t.Context(), "new 0", "key 1", "h"); err != nil {
		t.Errorf("the newest is not: %v", err)
	}
}

// A database that has begun fewer tasks than this process knows was restored: nothing that waits in it begins.
func testHistoryBackwards(t *testing.T, f *jobFleet) {
	f.Exec(t, `UPDATE fleet_revision SET lineage = 'one'`)
	s := f.stores[0]
	if err := s.CheckHistory(t.Context()); err != nil {
		t.Fatal(err)
	}
	j := f.create(t, 4, nil)
	cron := jobs.New(jobSpec(t, s.Now(), nil), "owner", "Owner", "room=lab", s.Now())
	if _, _, err := s.Create(t.Context(), cron, nil); err != nil {
		t.Fatal(err)
	}
	f.end(t, f.begin(t, "i", candidates(&j, mac(1))...)[0], nil)
	was := f.Count(t, `SELECT CAST(value AS BIGINT) FROM fleet WHERE key = 'jobs_begun'`)
	f.begin(t, "i", candidates(&j, mac(2))...)
	note := s.History()
	if note.Lineage != "one" || note.Begun != int64(was)+1 {
		t.Fatalf("%+v after %d", note, was)
	}
	back := func() { // what ran since the backup waits again
		f.Exec(t, `UPDATE fleet SET value = $1 WHERE key = 'jobs_begun'`, fmt.Sprint(was))
	}
	back()
	begun, _, err := s.Begin(t.Context(), "n", "i", candidates(&j, mac(3)))
	if err != nil || len(begun) != 0 {
		t.Fatalf("begun: %+v, %v", begun, err)
	}
	halted := f.job(t, j.ID)
	if halted.State != jobs.Halted || halted.Reason != jobs.ReasonRestored || halted.Counts.Of(jobs.Unknown) != 1 || halted.Counts.Running != 0 {
		t.Errorf("%+v", halted)
	}
	if c := f.job(t, cron.ID); c.State != jobs.Halted || c.Reason != jobs.ReasonRestored {
		t.Errorf("%+v", c)
	}
	f.check(t)
	// A person who has looked resumes it, and it begins.
	if _, err := s.Edit(t.Context(), j.ID, func(j *jobs.Job) error { return j.Resume(s.Now()) }); err != nil {
		t.Fatal(err)
	}
	if begun := f.begin(t, "i", candidates(&j, mac(3))...); len(begun) != 1 {
		t.Errorf("%+v", begun)
	}
	// A process that starts with the note of an earlier one knows, too, before it begins anything.
	back()
	next := jobstore.New(openStore(t, f.URL), slog.New(slog.DiscardHandler), jobstore.Known(note), jobstore.Notify(f.log.add))
	if begun, _, err := next.Begin(t.Context(), "n", "i2", candidates(&j, mac(4))); err != nil || len(begun) != 0 || f.job(t, j.ID).State != jobs.Halted {
		t.Errorf("%+v, %v", begun, err)
	}
	// A note of another lineage says nothing: who restored the database has halted its jobs.
	f.Exec(t, `UPDATE fleet_revision SET lineage = 'two'`)
	if _, err := s.Edit(t.Context(), j.ID, func(j *jobs.Job) error { return j.Resume(s.Now()) }); err != nil {
		t.Fatal(err)
	}
	back()
	other := jobstore.New(openStore(t, f.URL), slog.New(slog.DiscardHandler), jobstore.Known(note), jobstore.Notify(f.log.add))
	if begun, _, err := other.Begin(t.Context(), "n", "i2", candidates(&j, mac(4))); err != nil || len(begun) != 1 {
		t.Errorf("%+v, %v", begun, err)
	}
}
