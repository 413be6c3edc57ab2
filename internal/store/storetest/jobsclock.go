package storetest

import (
	"log/slog"
	"net/url"
	"sync/atomic"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/clock"
	"fleetd/internal/jobs"
	"fleetd/internal/store/jobstore"
)

// Stepped returns the Postgres database with a clock that step moves, for who connects by its URL: a function of a schema before
// pg_catalog takes the place of the server's.
func (d Database) Stepped(t testing.TB) (stepped Database, step func(by time.Duration)) {
	t.Helper()
	d.Exec(t, `CREATE SCHEMA stepped`)
	t.Cleanup(func() { d.Exec(t, `DROP SCHEMA stepped CASCADE`) })
	d.Exec(t, `CREATE TABLE stepped.step (us BIGINT NOT NULL)`)
	d.Exec(t, `INSERT INTO stepped.step VALUES (0)`)
	for _, name := range []string{"clock_timestamp", "now"} {
		d.Exec(t, `CREATE FUNCTION stepped.`+name+`() RETURNS timestamptz LANGUAGE sql VOLATILE AS
 'SELECT pg_catalog.`+name+`() + (SELECT us FROM stepped.step) * interval ''1 microsecond'''`)
	}
	u, err := url.Parse(d.URL)
	if err != nil {
		t.Fatal(err)
	}
	query := u.Query()
	query.Set("search_path", "public,stepped,pg_catalog")
	u.RawQuery = query.Encode()
	return Database{URL: u.String(), Raw: d.Raw, Postgres: true}, func(by time.Duration) { d.Exec(t, `UPDATE stepped.step SET us = $1`, by.Microseconds()) }
}

// steppedStores returns three nodes of a database whose clock step moves, on SQLite one node whose own clock does.
func (f *jobFleet) steppedStores(t *testing.T) (stores []*jobstore.Store, step func(d time.Duration)) {
	t.Helper()
	discard := slog.New(slog.DiscardHandler)
	if !f.Postgres {
		var off atomic.Int64
		wall := func() time.Time { return clock.Now().Add(time.Duration(off.Load())) }
		s := jobstore.New(openStore(t, f.URL), discard, jobstore.Clock(wall), jobstore.Holders(ownerKind))
		return []*jobstore.Store{s, s, s}, func(d time.Duration) { off.Store(int64(d)) }
	}
	db, step := f.Stepped(t)
	for range 3 {
		stores = append(stores, jobstore.New(openStore(t, db.URL), discard, jobstore.Holders(ownerKind)))
	}
	return stores, step
}

// measure has nodes measure the clock, as each does when it looks whose turn it is.
func measure(t *testing.T, stores ...*jobstore.Store) {
	t.Helper()
	for _, s := range stores {
		if _, err := s.TakeTurn(t.Context(), "i", time.Hour); err != nil {
			t.Fatal(err)
		}
	}
}

// What lasts goes on as if the clock was not stepped: the pause of a rate, on the node that measures the step and on one that
// has not measured it yet.
func testClockSteps(t *testing.T, f *jobFleet) {
	stores, step := f.steppedStores(t)
	f.stores = stores
	measure(t, stores[:2]...)
	j := f.create(t, 4, func(s *api.JobSpec) {
		s.Pace = &api.JobPace{Rate: "1/m", Concurrency: 10}
		s.Retry = &api.JobRetry{Failed: 3, After: "10m"}
	})
	task := f.begin(t, "i", candidates(&j, mac(1))...)[0]
	f.end(t, task, func(e *jobs.End) { e.Outcome, e.Code = jobs.Failed, jobs.CodeToolError })
	begun := time.Now()
	for n, d := range []time.Duration{-time.Hour, time.Hour, 0} {
		step(d)
		first, second := stores[n%2], stores[(n+1)%2]
		before := first.Now()
		measure(t, first)
		if moved := first.Now().Sub(before); (moved-d).Abs() > 2*time.Second && n == 0 {
			t.Errorf("the times of people moved by %v, not by %v", moved, d)
		}
		left := time.Minute - time.Since(begun)
		if pause := f.job(t, j.ID).TAT.Sub(first.Now()); (pause - left).Abs() > 2*time.Second {
			t.Errorf("after a step to %v the rate pauses for %v, not %v", d, pause, left)
		}
		left = 10*time.Minute - time.Since(begun)
		if pause := f.task(t, j.ID, mac(1)).DueAt.Sub(first.Now()); (pause - left).Abs() > 2*time.Second {
			t.Errorf("after a step to %v a failed task waits for %v, not %v", d, pause, left)
		}
		if list, _, err := second.Begin(t.Context(), "n", "i", candidates(&j, mac(2))); err != nil || len(list) != 0 {
			t.Errorf("a node that had not measured the step begins %v, %v", list, err)
		}
		if apart := second.Now().Sub(first.Now()).Abs(); apart > 2*time.Second {
			t.Errorf("the nodes are %v apart", apart)
		}
	}
	// A minute later the next one begins.
	f.Exec(t, `UPDATE jobs SET tat = tat - 60000000`)
	if list, _, err := stores[0].Begin(t.Context(), "n", "i", candidates(&j, mac(2))); err != nil || len(list) != 1 {
		t.Errorf("%v, %v", list, err)
	}
}

// testPhaseSteps: a phase of a firmware task, the pause before its next restart and a bar last as long as they would without a step, and a task
// that waits for the next start of its device goes on doing so.
func testPhaseSteps(t *testing.T, f *jobFleet) {
	stores, step := f.steppedStores(t)
	f.stores = stores
	measure(t, stores[:2]...)
	j := f.rollout(t, 4, nil)
	f.step(t, &j, 1, func(s *jobs.Step) {
		s.Task.DueAt = s.Now.Add(10 * time.Minute)
		offer(s)
		flash(s)
	})
	f.step(t, &j, 2, func(s *jobs.Step) { s.Task.DueAt = jobs.NotByItself })
	f.step(t, &j, 3, func(s *jobs.Step) { s.Bar = "twice" })
	f.step(t, &j, 4, func(s *jobs.Step) {
		offer(s)
		flash(s)
		s.See(formerCheck)
	})
	begun := time.Now()
	for _, d := range []time.Duration{-time.Hour, time.Hour} {
		step(d)
		measure(t, stores[0])
		now := stores[0].Now()
		marks, err := stores[0].Marks(t.Context(), macs(3, 3))
		if err != nil {
			t.Fatal(err)
		}
		task := f.task(t, j.ID, mac(1))
		for name, c := range map[string]struct {
			until time.Time
			lasts time.Duration
		}{"the start": {task.LimitAt, 15 * time.Minute}, "the restart": {task.DueAt, 10 * time.Minute}, "the next offer": {f.task(t, j.ID, mac(4)).LimitAt, 10 * time.Minute}, "the bar": {marks[mac(3)].BarredUntil, 24 * time.Hour}} {
			if left := c.lasts - time.Since(begun); (c.until.Sub(now) - left).Abs() > 2*time.Second {
				t.Errorf("after a step to %v, %s: %v are left, not %v", d, name, c.until.Sub(now), left)
			}
		}
		if due := f.task(t, j.ID, mac(2)).DueAt; !due.Equal(jobs.NotByItself) {
			t.Errorf("after a step to %v, the task of a next start is due at %v", d, due)
		}
	}
}

// testStartAfterStep: a node that starts between a step of the clock and its measurement by another node takes that one's word for
// it. It does not take the step back, which the other node would follow in turn.
func testStartAfterStep(t *testing.T, f *jobFleet) {
	stores, step := f.steppedStores(t)
	f.stores = stores
	measure(t, stores[:2]...)
	j := f.create(t, 4, func(s *api.JobSpec) { s.Pace = &api.JobPace{Rate: "1/m", Concurrency: 10} })
	f.begin(t, "i", candidates(&j, mac(1))...)
	begun := time.Now()
	step(-time.Hour)
	check := func() {
		t.Helper()
		left := time.Minute - time.Since(begun)
		if pause := f.job(t, j.ID).TAT.Sub(stores[2].Now()); (pause - left).Abs() > 2*time.Second {
			t.Errorf("the rate pauses for %v, not %v", pause, left)
		}
	}
	for range 3 {
		measure(t, stores[2], stores[0], stores[1])
		check()
	}
	measure(t, stores[2])
	check()
}

// testTurn: one process has the turn until it has not renewed it for as long as it lasts, whatever the clocks say.
func testTurn(t *testing.T, f *jobFleet) {
	const lasts = 300 * time.Millisecond
	take := func(n int, instance string) bool {
		t.Helper()
		mine, err := f.stores[n].TakeTurn(t.Context(), instance, lasts)
		if err != nil {
			t.Fatal(err)
		}
		return mine
	}
	for range 2 {
		if !take(0, "a") {
			t.Fatal("nobody has the turn")
		}
	}
	if !f.Postgres {
		return
	}
	for until := time.Now().Add(2 * lasts); time.Now().Before(until); time.Sleep(lasts / 10) {
		if take(1, "b") || take(2, "c") {
			t.Fatal("two have the turn")
		}
		if !take(0, "a") {
			t.Fatal("its holder has it no longer")
		}
	}
	f.Exec(t, `UPDATE fleet SET value = '12345 other' WHERE key = 'jobs_turn'`) // by a process that the others have not seen
	if take(1, "b") || take(2, "c") {
		t.Fatal("a turn is taken that may have just begun")
	}
	time.Sleep(lasts)
	if !take(1, "b") || take(2, "c") {
		t.Fatal("a turn that has ended is not taken, or twice")
	}
	const skew = 10 * time.Minute
	s := jobstore.New(openStore(t, f.URL), slog.New(slog.DiscardHandler), jobstore.Clock(func() time.Time { return clock.Now().Add(skew) }))
	if _, err := s.TakeTurn(t.Context(), "d", time.Second); err != nil {
		t.Fatal(err)
	}
	if off := s.Now().Sub(f.stores[2].Now()).Abs(); off > time.Second {
		t.Errorf("the clocks of two nodes that are %s apart are still %s apart", skew, off)
	}
}
