package storetest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
	"fleetd/internal/store/jobstore"
)

// worker does random work on a store, as a node does.
type worker struct {
	t        testing.TB
	s        *jobstore.Store
	random   *rand.Rand
	instance string
	jobs     []string
	running  []jobs.Task
	late     []jobs.Task // ended as unknown
	sent     *executions
}

func (w *worker) must(err error) {
	var rule *devices.Error
	if err != nil && !errors.As(err, &rule) && !errors.Is(err, jobs.ErrStale) {
		w.t.Errorf("%s: %v", w.instance, err)
	}
}

// step does one thing.
func (w *worker) step() {
	id := w.jobs[w.random.IntN(len(w.jobs))]
	ctx := w.t.Context()
	now := w.s.Now()
	edit := func(f func(j *jobs.Job) error) {
		_, err := w.s.Edit(ctx, id, f)
		w.must(err)
	}
	switch n := w.random.IntN(100); {
	case n < 40:
		list, err := w.s.Waiting(ctx, id, w.random.Int64N(1<<62), 1+w.random.IntN(20))
		if w.random.IntN(2) == 0 {
			var ids []devices.ID
			for range 1 + w.random.IntN(10) {
				ids = append(ids, mac(1+w.random.IntN(50)))
			}
			list, _, err = w.s.WaitingOf(ctx, ids, 3, nil)
		}
		w.must(err)
		begun, _, err := w.s.Begin(ctx, "n", w.instance, list)
		w.must(err)
		w.running = append(w.running, begun...)
	case n < 80 && len(w.running) > 0:
		var list []jobs.End
		for k := 1 + w.random.IntN(len(w.running)); k > 0; k-- {
			task := w.running[0]
			w.running = w.running[1:]
			e := jobs.End{Job: task.Job, Round: task.Round, Device: task.Device, Fence: task.Fence}
			switch outcome := w.random.IntN(10); {
			case outcome < 3:
				e.NotSent = true
			default:
				w.sent.send(task)
				e.Outcome = []jobs.Outcome{jobs.OK, jobs.OK, jobs.OK, jobs.Failed, jobs.Failed, jobs.Unknown, jobs.Refused}[outcome-3]
			}
			if e.Outcome == jobs.Unknown {
				w.late = append(w.late, task)
			}
			if w.random.IntN(100) == 0 {
				e.Halt = jobs.ReasonConfirmation
			}
			list = append(list, e)
		}
		_, _, err := w.s.End(ctx, w.instance, list)
		w.must(err)
	case n < 83 && len(w.late) > 0:
		task := w.late[0]
		w.late = w.late[1:]
		_, _, err := w.s.End(ctx, w.instance, []jobs.End{{Job: task.Job, Round: task.Round, Device: task.Device, Fence: task.Fence, Outcome: jobs.OK, Late: true}})
		w.must(err)
	case n < 85:
		edit(func(j *jobs.Job) error { return j.Pause("") })
	case n < 92:
		edit(func(j *jobs.Job) error { return j.Resume(now) })
	case n < 94:
		edit(func(j *jobs.Job) error { return j.Advance(now) })
	case n < 95:
		_, _, err := w.s.EndWaiting(ctx, id, -1, mac(1+w.random.IntN(50)), jobs.CancelledT, "", 10)
		w.must(err)
	case n < 96:
		w.must(w.s.Forget(ctx, mac(1+w.random.IntN(50))))
	case n < 99:
		j, err := w.s.Job(ctx, id)
		w.must(err)
		_, _, _, err = w.s.Retry(ctx, id, j.Round, []jobs.Outcome{jobs.OK, jobs.Failed, jobs.CancelledT, jobs.Gone, jobs.Unknown}, mac(w.random.IntN(50)), 10)
		w.must(err)
	default:
		edit(func(j *jobs.Job) error { j.Settle(now); return nil })
	}
}

// randomJobs creates jobs of all kinds for the devices 1 to 50.
func (f *jobFleet) randomJobs(t testing.TB) (ids []string) {
	for _, change := range []func(s *api.JobSpec){
		nil,
		func(s *api.JobSpec) { s.Pace.Concurrency = 4 },
		func(s *api.JobSpec) { s.Pace.Rate = "1000/s" },
		func(s *api.JobSpec) { s.Retry, s.Repeatable = &api.JobRetry{Failed: 3, After: "0s"}, true },
		func(s *api.JobSpec) {
			s.Stages = []api.JobStage{{OK: api.Amount{Number: 3}}, {OK: api.Amount{Percent: 30}, Hold: true}, {OK: api.Amount{Percent: 100}}}
		},
		func(s *api.JobSpec) {
			s.Stages, s.Retry = []api.JobStage{{OK: api.Amount{Number: 3}}, {OK: api.Amount{Percent: 100}}}, &api.JobRetry{Failed: 2, After: "0s"}
		},
		func(s *api.JobSpec) { s.Stop = &api.JobStop{Failed: 5} },
		func(s *api.JobSpec) { s.Follow = true },
	} {
		ids = append(ids, f.create(t, 50, change).ID)
	}
	return ids
}

func testRandomJobs(t *testing.T, f *jobFleet) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	var sent executions
	w := &worker{t: t, s: f.stores[0], random: rand.New(rand.NewPCG(seed, 1)), instance: "i", jobs: f.randomJobs(t), sent: &sent}
	for range fewer(300, 60) {
		w.step()
		f.check(t)
	}
	sent.check(t)
}

func testJobsTogether(t *testing.T, f *jobFleet) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	ids := f.randomJobs(t)
	var sent executions
	var workers []*worker
	var all sync.WaitGroup
	stop := make(chan struct{})
	for n, s := range f.stores {
		for k := range 16 {
			w := &worker{t: t, s: s, random: rand.New(rand.NewPCG(seed, uint64(100*n+k))), instance: fmt.Sprint("i", n, "-", k), jobs: ids, sent: &sent}
			workers = append(workers, w)
			all.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
						w.step()
					}
				}
			})
		}
	}
	// The workers run for 4 s, whatever the machine achieves in that.
	for until := time.Now().Add(4 * time.Second); time.Now().Before(until); time.Sleep(200 * time.Millisecond) {
		f.check(t)
	}
	close(stop)
	all.Wait()
	f.check(t)
	// What no worker has ended is lost with it.
	left := 0
	for _, w := range workers {
		left += len(w.running)
	}
	f.Exec(t, `UPDATE tasks SET begun_at = begun_at - 3000000 WHERE state = 'running'`)
	self := ""
	if !f.Postgres {
		self = "none"
	}
	for {
		lost, _, err := f.stores[0].LoseRunning(t.Context(), self, 100)
		if err != nil {
			t.Fatal(err)
		}
		if len(lost) == 0 {
			break
		}
	}
	f.check(t)
	if n := f.Count(t, `SELECT count(*) FROM tasks WHERE state = 'running'`); n != 0 {
		t.Errorf("%d tasks run", n)
	}
	conflicts := int64(0)
	for i, s := range f.stores {
		if i == 0 || s != f.stores[0] {
			conflicts += s.Conflicts.Load()
		}
	}
	t.Logf("%d attempts were sent, %d tasks were lost, %d conflicts", sent.check(t), left, conflicts)
}
