package manager

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/jobs"
	"fleetd/internal/selector"
	"fleetd/internal/tasks"
)

// smallEnds is a store that ends ten tasks where it is asked for more, and takes its time for that.
type smallEnds struct {
	jobs.Store
	takes time.Duration
	calls int
}

func (s *smallEnds) EndWaiting(ctx context.Context, id string, round int64, device devices.ID, outcome jobs.Outcome, code string, limit int) ([]jobs.Task, jobs.Job, error) {
	s.calls++
	time.Sleep(s.takes)
	ended, j, err := s.Store.EndWaiting(ctx, id, round, device, outcome, code, 10)
	if len(ended) == 10 {
		ended = make([]jobs.Task, limit)
	}
	return ended, j, err
}

// To cancel a job with many tasks takes a moment; the periodic work ends the others, a slice in each pass, and other jobs go on.
func TestEndingManyTasksHoldsNobodyUp(t *testing.T) {
	m := newManager(t)
	s := &smallEnds{Store: m.Store, takes: cancelTime / 4}
	m.Store = s
	j := m.fill(t, 100)
	cancelled, err := m.Do(t.Context(), devicetest.Admin, j.ID, "cancel", VerbOptions{})
	if err != nil || cancelled.State != string(jobs.Cancelled) || s.calls > 4 || cancelled.Counts.Waiting == 0 {
		t.Fatalf("%d transactions in the request, %+v, %v", s.calls, cancelled, err)
	}
	other := m.create(t, "room=lab", "")
	s.takes, s.calls = 0, 0
	pass := newTurn(m.Manager)
	pass.sliceTime = time.Nanosecond
	for n := range 2 {
		if err := pass.once(t.Context()); err != nil {
			t.Fatal(err)
		}
		if s.calls != 1 {
			t.Errorf("after pass %d, %d slices of the ends were done", n+1, s.calls)
		}
	}
	if j := m.stored(t, other); j.State != jobs.Running {
		t.Errorf("beside the job that ends, another one is %s", j.State)
	}
	pass.sliceTime = time.Minute
	if err := pass.once(t.Context()); err != nil {
		t.Fatal(err)
	}
	if j := m.stored(t, j.ID); j.Counts.Waiting != 0 || j.EndedAt.IsZero() {
		t.Errorf("after a pass that has time: %+v", j)
	}
}

// pagedFleet counts the pages of devices that are read.
type pagedFleet struct {
	Fleet
	pages int
}

func (f *pagedFleet) List(ctx context.Context, q devices.ListQuery) ([]devices.View, string, error) {
	f.pages++
	return f.Fleet.List(ctx, q)
}

// A job with follow looks at all devices in slices, once, and then at those that have changed; without a new device it is not written.
func TestFollowReadsWhatChanged(t *testing.T) {
	m := newManager(t)
	f := &pagedFleet{Fleet: m.Fleet}
	m.Fleet = f
	m.Put(t, 2*pageSize+1)
	created, _, err := m.Create(t.Context(), devicetest.Admin, api.JobSpec{Action: callSpec("self.get").Action, Select: "room=store", Follow: true}, CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pass := newTurn(m.Manager)
	look := func() {
		t.Helper()
		if f := pass.follows[created.ID]; f != nil {
			f.next = time.Time{}
		}
		if err := pass.once(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for m.stored(t, created.ID).State != jobs.Running {
		look()
	}
	before := m.stored(t, created.ID)
	pass.sliceTime = time.Nanosecond
	f.pages = 0
	for range 3 {
		look()
	}
	if j := m.stored(t, created.ID); j.Version != before.Version || f.pages != 3 {
		t.Errorf("the first look reads %d pages in three passes, and makes version %d of %d", f.pages, j.Version, before.Version)
	}
	look()
	if j := m.stored(t, created.ID); j.Version != before.Version || f.pages != 3 {
		t.Errorf("nothing has changed: %d pages, version %d of %d", f.pages, j.Version, before.Version)
	}
	m.ports.Put(devices.Member{ID: "02:00:00:00:ff:01", ClientID: "c", Labels: map[string]string{"room": "store"}})
	m.ports.Put(devices.Member{ID: "02:00:00:00:ff:02", ClientID: "c", Labels: map[string]string{"room": "shop"}})
	look()
	if j := m.stored(t, created.ID); j.Counts.Total() != 2*pageSize+2 || f.pages != 3 {
		t.Errorf("after a device that matches and one that does not: %d tasks, %d pages", j.Counts.Total(), f.pages)
	}
}

// forgetting is a store that counts how often tasks of devices that have left are looked for, and takes its time for that.
type forgetting struct {
	jobs.Store
	devices, calls atomic.Int64
	begun, release chan struct{}
}

func (s *forgetting) Forget(_ context.Context, ids ...devices.ID) error {
	if s.calls.Add(1) == 1 {
		close(s.begun)
	}
	<-s.release
	s.devices.Add(int64(len(ids)))
	return nil
}

// Devices that leave together are looked for together.
func TestDevicesThatLeaveTogether(t *testing.T) {
	m := newManager(t)
	s := &forgetting{Store: m.Store, begun: make(chan struct{}), release: make(chan struct{})}
	m.Store, m.tasks = s, tasks.New(m.Log)
	const many = 1000
	m.OnDecision("02:00:00:00:00:00")
	<-s.begun
	for i := 1; i < many; i++ {
		m.OnDecision(devices.ID(fmt.Sprintf("02:00:00:00:%02x:%02x", i>>8, i&255)))
	}
	m.OnDecision(lamp) // known
	close(s.release)
	devicetest.Eventually(t, "all are looked for", func() bool { return s.devices.Load() == many })
	m.tasks.Close()
	m.tasks.Wait()
	if n := s.calls.Load(); n > 2 {
		t.Errorf("%d devices are looked for in %d transactions", many, n)
	}
	m.OnDecision("02:00:00:00:00:00") // after the end
}

// slowCounts is a fleet that counts one selection until counted.
type slowCounts struct {
	Fleet
	slow    string
	counted bool
}

func (f *slowCounts) Counts(ctx context.Context, p access.Principal, sel selector.Selector) (devices.Counts, error) {
	if sel.String() != f.slow || f.counted {
		return devices.Counts{Total: 1}, nil
	}
	<-ctx.Done()
	return devices.Counts{}, ctx.Err()
}

// A job whose selection takes long to count has no tasks until it is counted, and other jobs go on meanwhile.
func TestCountingHoldsNobodyUp(t *testing.T) {
	m := newManager(t)
	slow, other := m.create(t, "room in (hall,lab)", ""), m.create(t, "room=lab", "")
	m.Store = &fewTasks{Store: m.Store, room: 1} // fewer than there are devices: they are counted
	counts := &slowCounts{Fleet: m.Fleet, slow: "room in (hall,lab)"}
	m.Fleet = counts
	pass := newTurn(m.Manager)
	pass.sliceTime = 50 * time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for range 2 { // the slow one may have used up the time of the first pass
		if err := pass.once(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if j := m.stored(t, other); j.State != jobs.Running {
		t.Errorf("beside the job that is counted, another one is %s", j.State)
	}
	if j := m.stored(t, slow); j.State != jobs.Preparing || j.Counts.Total() != 0 {
		t.Errorf("while its devices are counted, the job is %s with %d tasks", j.State, j.Counts.Total())
	}
	counts.counted = true
	pass.sliceTime = time.Minute
	if err := pass.once(ctx); err != nil {
		t.Fatal(err)
	}
	if j := m.stored(t, slow); j.State != jobs.Running {
		t.Errorf("after its devices are counted, the job is %s", j.State)
	}
}
