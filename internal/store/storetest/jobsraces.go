package storetest

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/jobs"
	"fleetd/internal/store/jobstore"
)

// execution identifies an attempt of a task: each may be sent once.
type execution struct {
	job     string
	device  devices.ID
	round   int64
	attempt int
}

// executions counts what simulated devices have done. It is safe for concurrent use.
type executions struct {
	mu   sync.Mutex
	done map[execution]int
}

func (x *executions) send(task jobs.Task) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.done == nil {
		x.done = map[execution]int{}
	}
	x.done[execution{task.Job, task.Device, task.Round, task.Attempt}]++
}

// check reports attempts that were sent more than once, and returns how many were sent.
func (x *executions) check(t testing.TB) int {
	t.Helper()
	for e, n := range x.done {
		if n > 1 {
			t.Errorf("%+v was sent %d times", e, n)
		}
	}
	return len(x.done)
}

// fewer returns how often a test does what takes long: with the race detector, less often.
func fewer(times, short int) int {
	if testing.Short() {
		return short
	}
	return times
}

func testTwoHolders(t *testing.T, f *jobFleet) {
	const many, lists = 200, 4
	var all []jobs.Candidate
	for range lists {
		j := f.create(t, many, nil)
		all = append(all, candidates(&j, macs(1, many)...)...)
	}
	var sent executions
	var nodes sync.WaitGroup
	began := time.Now()
	for n, s := range f.stores {
		for k := range 4 {
			nodes.Go(func() {
				instance := fmt.Sprint("i", n, k)
				random := rand.New(rand.NewPCG(uint64(n), uint64(k)))
				for range 12 {
					list := make([]jobs.Candidate, 0, 150)
					for _, i := range random.Perm(len(all))[:150] {
						list = append(list, all[i])
					}
					begun, _, err := s.Begin(t.Context(), "n", instance, list)
					if err != nil {
						t.Error(err)
						return
					}
					var ends []jobs.End
					for _, task := range begun {
						sent.send(task)
						ends = append(ends, jobs.End{Job: task.Job, Round: task.Round, Device: task.Device, Fence: task.Fence, Outcome: jobs.OK})
					}
					ended, _, err := s.End(t.Context(), instance, ends)
					if err != nil || len(ended) != len(begun) {
						t.Errorf("%d of %d ended, %v", len(ended), len(begun), err)
						return
					}
				}
			})
		}
	}
	nodes.Wait()
	f.check(t)
	n := sent.check(t)
	t.Logf("%d tasks in %s", n, time.Since(began).Round(time.Millisecond))
	if n < many {
		t.Errorf("only %d tasks ran", n)
	}
}

func testBeginAndCancel(t *testing.T, f *jobFleet) {
	const many, group = 400, 20
	rounds := fewer(25, 4) // 10,000 tasks
	var cancelled, ran int
	for range rounds {
		j := f.create(t, many, nil)
		begun := map[devices.ID]bool{}
		var both sync.WaitGroup
		cancel, at := make(chan struct{}), 1+group*rand.N(many/group)
		both.Go(func() {
			for first := 1; first <= many; first += group {
				if first == at {
					close(cancel)
				}
				list, _, err := f.stores[0].Begin(t.Context(), "n", "i", candidates(&j, macs(first, first+group-1)...))
				if err != nil {
					t.Error(err)
				}
				for _, task := range list {
					begun[task.Device] = true
				}
			}
		})
		both.Go(func() {
			<-cancel
			if _, err := f.stores[1].Edit(t.Context(), j.ID, func(j *jobs.Job) error { return j.Cancel(f.stores[1].Now()) }); err != nil {
				t.Error(err)
			}
			for {
				ended, _, err := f.stores[1].EndWaiting(t.Context(), j.ID, -1, "", jobs.CancelledT, "", 100)
				if err != nil {
					t.Error(err)
				}
				if len(ended) == 0 {
					return
				}
			}
		})
		both.Wait()
		var ends []jobs.End
		for after := ""; ; {
			list, next, err := f.stores[0].Tasks(t.Context(), jobs.TaskFilter{Job: j.ID, After: after, Limit: many})
			if err != nil {
				t.Fatal(err)
			}
			for _, task := range list {
				switch {
				case begun[task.Device] != (task.State == jobs.TaskRunning), !begun[task.Device] && task.Outcome != jobs.CancelledT:
					t.Fatalf("begun %t, and it is %s %s", begun[task.Device], task.State, task.Outcome)
				case begun[task.Device]:
					ran++
					ends = append(ends, jobs.End{Job: j.ID, Device: task.Device, Fence: task.Fence, Outcome: jobs.OK})
				default:
					cancelled++
				}
			}
			if after = next; next == "" {
				break
			}
		}
		if _, _, err := f.stores[0].End(t.Context(), "i", ends); err != nil {
			t.Fatal(err)
		}
	}
	f.check(t)
	t.Logf("%d were cancelled, %d ran", cancelled, ran)
	if cancelled+ran != rounds*many || cancelled == 0 || ran == 0 {
		t.Errorf("%d were cancelled, %d ran", cancelled, ran)
	}
}

func testLimitsTogether(t *testing.T, f *jobFleet) {
	const many, together = 400, 10
	j := f.create(t, many, func(s *api.JobSpec) {
		s.Pace = &api.JobPace{Rate: "100/s", Concurrency: together}
		s.Stages = []api.JobStage{{OK: api.Amount{Number: 20}}, {OK: api.Amount{Percent: 100}}}
	})
	began := time.Now()
	var running, begunAll atomic.Int64
	var nodes sync.WaitGroup
	for n, s := range f.stores {
		for k := range 6 {
			nodes.Go(func() {
				instance := fmt.Sprint("i", n, k)
				// On a slow day it goes on until there is something to judge.
				for time.Since(began) < 2*time.Second || begunAll.Load() < 20 && time.Since(began) < time.Minute {
					list, err := s.Waiting(t.Context(), j.ID, -1, 20)
					if err != nil || len(list) == 0 {
						return
					}
					begun, _, err := s.Begin(t.Context(), "n", instance, list)
					if err != nil {
						t.Error(err)
						return
					}
					begunAll.Add(int64(len(begun)))
					if now := running.Add(int64(len(begun))); now > together {
						t.Errorf("%d tasks run at once", now)
					}
					time.Sleep(rand.N(10 * time.Millisecond)) // the tasks take their time, so that those of several callers overlap
					running.Add(-int64(len(begun)))
					for _, task := range begun {
						if _, _, err := s.End(t.Context(), instance, []jobs.End{{Job: j.ID, Device: task.Device, Fence: task.Fence, Outcome: jobs.OK}}); err != nil {
							t.Error(err)
						}
					}
				}
			})
		}
	}
	nodes.Wait()
	f.check(t)
	lasted := time.Since(began)
	n := begunAll.Load()
	if most := 100 + int64(lasted.Seconds()*100) + 1; n > most || n < 20 {
		t.Errorf("%d tasks began within %s; at most %d may, and the first stage has 20", n, lasted, most)
	}
	t.Logf("%d tasks began within %s", n, lasted)
	if _, err := f.stores[0].Edit(t.Context(), j.ID, func(j *jobs.Job) error { return j.Pause("") }); err != nil { // else it comes first
		t.Fatal(err)
	}
	// One stage admits as many as it wants successes, and no more.
	j = f.create(t, 100, func(s *api.JobSpec) {
		s.Stages = []api.JobStage{{OK: api.Amount{Number: 7}}, {OK: api.Amount{Percent: 100}}}
	})
	var all sync.WaitGroup
	begunAll.Store(0)
	for n, s := range f.stores {
		all.Go(func() {
			for first := 1; first < 100; first += 5 {
				begun, _, err := s.Begin(t.Context(), "n", fmt.Sprint("i", n), candidates(&j, macs(first, first+4)...))
				if err != nil {
					t.Error(err)
				}
				begunAll.Add(int64(len(begun)))
			}
		})
	}
	all.Wait()
	if n := begunAll.Load(); n != 7 {
		t.Errorf("a stage of 7 began %d tasks", n)
	}
	f.check(t)
}

func testStopTogether(t *testing.T, f *jobFleet) {
	const stop, together = 3, 8
	for range fewer(10, 3) {
		j := f.create(t, 200, func(s *api.JobSpec) {
			s.Pace.Concurrency, s.Stop = together, &api.JobStop{Failed: stop}
		})
		var halted atomic.Bool
		var harmed atomic.Int64
		var nodes sync.WaitGroup
		for n, s := range f.stores {
			for k := range 4 {
				nodes.Go(func() {
					instance := fmt.Sprint("i", n, k)
					for range 20 {
						was := halted.Load()
						list, err := s.Waiting(t.Context(), j.ID, rand.Int64N(1<<62), 5)
						if err != nil {
							t.Error(err)
							return
						}
						begun, _, err := s.Begin(t.Context(), "n", instance, list)
						if err != nil {
							t.Error(err)
							return
						}
						if was && len(begun) > 0 {
							t.Errorf("%d tasks began after the halt", len(begun))
						}
						for _, task := range begun {
							harmed.Add(1)
							_, changed, err := s.End(t.Context(), instance, []jobs.End{{Job: j.ID, Device: task.Device, Fence: task.Fence, Outcome: jobs.Failed}})
							if err != nil || len(changed) != 1 {
								t.Error(changed, err)
							} else if changed[0].Job.State == jobs.Halted {
								halted.Store(true)
							}
						}
					}
				})
			}
		}
		nodes.Wait()
		f.check(t)
		if j = f.job(t, j.ID); j.State != jobs.Halted || j.Reason != jobs.ReasonStop || j.Counts.Running != 0 {
			t.Errorf("%+v", j)
		}
		if n := harmed.Load(); n > stop+together || n < stop {
			t.Errorf("%d devices came to harm, at most %d may", n, stop+together)
		}
		if _, err := f.stores[0].Edit(t.Context(), j.ID, func(j *jobs.Job) error { return j.Cancel(f.stores[0].Now()) }); err != nil {
			t.Fatal(err)
		}
		if _, _, err := f.stores[0].EndWaiting(t.Context(), j.ID, -1, "", jobs.CancelledT, "", 1000); err != nil {
			t.Fatal(err)
		}
	}
}

// testTakenDevice begins a task while another node is about to begin one of the same device.
func testTakenDevice(t *testing.T, f *jobFleet) {
	if !f.Postgres {
		t.Skip("LACKS: SQLite has one writer")
	}
	a, b := f.create(t, 2, nil), f.create(t, 1, nil)
	other, err := f.Raw.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Rollback() }() // it is committed below
	for _, text := range []string{`UPDATE jobs SET waiting = 0, running = 1 WHERE job = $1`, `UPDATE tasks SET state = 'running', instance = 'other' WHERE job = $1`} {
		if _, err := other.Exec(text, b.ID); err != nil {
			t.Fatal(err)
		}
	}
	result := make(chan []jobs.Task, 1)
	go func() {
		begun, _, err := f.stores[0].Begin(t.Context(), "n", "i", candidates(&a, macs(1, 2)...))
		if err != nil {
			t.Error(err)
		}
		result <- begun
	}()
	devicetest.Eventually(t, "the transaction waits", func() bool {
		return f.Count(t, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`) > 0
	})
	if err := other.Commit(); err != nil {
		t.Fatal(err)
	}
	if begun := <-result; len(begun) != 1 || begun[0].Device != mac(2) || f.stores[0].Conflicts.Load() != 1 {
		t.Errorf("%+v, %d conflicts", begun, f.stores[0].Conflicts.Load())
	}
	f.check(t)
}

// testKilledTransaction ends the connection of a transaction that waits.
func testKilledTransaction(t *testing.T, f *jobFleet) {
	if !f.Postgres {
		t.Skip("LACKS: SQLite has no connections that break")
	}
	j := f.create(t, 3, nil)
	lock, err := f.Raw.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = lock.Rollback() }() // it is committed below
	if _, err := lock.Exec(`SELECT 1 FROM jobs WHERE job = $1 FOR UPDATE`, j.ID); err != nil {
		t.Fatal(err)
	}
	failed := make(chan error, 1)
	go func() {
		begun, _, err := f.stores[0].Begin(t.Context(), "n", "i", candidates(&j, macs(1, 3)...))
		if err == nil || len(begun) > 0 {
			err = fmt.Errorf("%d begun, %w", len(begun), err)
		}
		failed <- err
	}()
	devicetest.Eventually(t, "the transaction waits and is ended", func() bool {
		return f.Count(t, `SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`) > 0
	})
	if err := <-failed; !errors.Is(err, devices.ErrDatabase) || errors.Is(err, devices.ErrUncertain) {
		t.Errorf("a transaction that was ended before its commit: %v", err)
	}
	if err := lock.Commit(); err != nil {
		t.Fatal(err)
	}
	f.check(t)
	if n := f.Count(t, `SELECT waiting FROM jobs WHERE version = 1`); n != 3 {
		t.Errorf("%d tasks wait", n)
	}
	var begun []jobs.Task
	devicetest.Eventually(t, "the database is used again", func() bool {
		var err error
		begun, _, err = f.stores[0].Begin(t.Context(), "n", "i", candidates(&j, macs(1, 3)...))
		return err == nil
	})
	if len(begun) != 3 {
		t.Errorf("%d begun", len(begun))
	}
}

// testUncertainBegin cuts the connection inside COMMIT: the server commits, and the client cannot know.
func testUncertainBegin(t *testing.T, f *jobFleet) {
	if !f.Postgres {
		t.Skip("LACKS: SQLite has no connections that break")
	}
	j := f.create(t, 2, nil)
	f.Exec(t, `CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(1); RETURN NULL; END $$`)
	f.Exec(t, `CREATE CONSTRAINT TRIGGER slow AFTER UPDATE ON jobs DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION slow()`)
	proxy := NewProxy(t, f.Address(t))
	proxy.Start()
	host := openStore(t, f.Via(t, proxy.Address()))
	s := jobstore.New(host, slog.New(slog.DiscardHandler))
	cut := make(chan struct{})
	go func() {
		defer close(cut)
		devicetest.Eventually(t, "the commit is on its way", func() bool {
			return f.Count(t, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'`) > 0
		})
		proxy.Stop()
	}()
	begun, _, err := s.Begin(t.Context(), "n", "i", candidates(&j, macs(1, 2)...))
	<-cut
	if !errors.Is(err, devices.ErrUncertain) || !errors.Is(err, devices.ErrDatabase) || len(begun) != 2 {
		t.Fatalf("%d may have begun, %v", len(begun), err)
	}
	devicetest.Eventually(t, "the server commits", func() bool { return f.Count(t, `SELECT count(*) FROM tasks WHERE state = 'running'`) == 2 })
	f.Exec(t, `DROP TRIGGER slow ON jobs`)
	proxy.Start()
	waitReady(t, host)
	var ends []jobs.End
	for _, task := range begun {
		ends = append(ends, jobs.End{Job: task.Job, Device: task.Device, Fence: task.Fence, NotSent: true})
	}
	for _, want := range []int{2, 0} {
		if ended, _, err := s.End(t.Context(), "i", ends); err != nil || len(ended) != want {
			t.Fatalf("%+v, %v", ended, err)
		}
	}
	f.check(t)
	if got := f.job(t, j.ID); got.Counts.Waiting != 2 || got.Started != 0 {
		t.Errorf("%+v", got)
	}
}
