package storetest

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"fleetd/internal/jobs"
)

// BenchmarkJobs measures the writing of rows, and tasks that begin and end in groups.
func BenchmarkJobs(b *testing.B, makeDatabase Maker) {
	b.Run("prepare", func(b *testing.B) {
		f := newJobFleet(b, makeDatabase(b))
		for b.Loop() {
			f.prepare(b, jobs.PrepareBatch)
		}
		b.ReportMetric(float64(b.N*jobs.PrepareBatch)/b.Elapsed().Seconds(), "rows/s")
	})
	b.Run("queue of a device", func(b *testing.B) {
		f := newJobFleet(b, makeDatabase(b))
		f.prepare(b, 1000)
		for b.Loop() {
			if queue, err := f.stores[0].Queue(b.Context(), mac(7)); err != nil || len(queue) != 1 {
				b.Fatalf("%d tasks, %v", len(queue), err)
			}
		}
	})
	for _, group := range []int{1, 16, 100, 500} {
		b.Run(fmt.Sprint("tasks in groups of ", group), func(b *testing.B) { benchmarkTasks(b, newJobFleet(b, makeDatabase(b)), group, 1) })
	}
	b.Run("tasks of 4 callers in groups of 16", func(b *testing.B) { benchmarkTasks(b, newJobFleet(b, makeDatabase(b)), 16, 4) })
}

// prepare creates a job for the devices 1 to n, in batches as the periodic work does.
func (f *jobFleet) prepare(t testing.TB, n int) jobs.Job {
	j := f.prepared(t, nil)
	j, _, err := f.stores[0].Create(t.Context(), j, nil)
	for first := 1; err == nil && first <= n; first += jobs.PrepareBatch {
		last := min(n, first+jobs.PrepareBatch-1)
		j, err = f.stores[0].AddTasks(t.Context(), j.ID, j.Cursor, string(mac(last)), rowsOf(&j, first, last), last == n)
	}
	if err != nil {
		t.Fatal(err)
	}
	return j
}

// benchmarkTasks begins and ends tasks of five jobs for 1,000 devices each, or fewer where the groups are small.
func benchmarkTasks(b *testing.B, f *jobFleet, group, callers int) {
	devices := min(fewer(1000, 100), 100*group)
	var next atomic.Int64
	var list []jobs.Job
	tasks := 0
	for b.Loop() {
		b.StopTimer()
		list = list[:0]
		for range 5 {
			list = append(list, f.prepare(b, devices))
		}
		b.StartTimer()
		for i := range list {
			next.Store(1)
			var all sync.WaitGroup
			for c := range callers {
				all.Go(func() {
					s, instance := f.stores[0], fmt.Sprint("i", c)
					for {
						first := int(next.Add(int64(group))) - group
						if first > devices {
							return
						}
						begun, _, err := s.Begin(b.Context(), "n", instance, candidates(&list[i], macs(first, min(first+group-1, devices))...))
						if err != nil {
							b.Error(err)
							return
						}
						ends := make([]jobs.End, len(begun))
						for k, task := range begun {
							ends[k] = jobs.End{Job: task.Job, Device: task.Device, Fence: task.Fence, Outcome: jobs.OK}
						}
						if _, _, err := s.End(b.Context(), instance, ends); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			all.Wait()
			tasks += devices
		}
	}
	b.ReportMetric(float64(tasks)/b.Elapsed().Seconds(), "tasks/s")
}
