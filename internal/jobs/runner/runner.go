// Package runner does the tasks of jobs on the devices that are connected to this node. A task
// is sent only after its beginning is committed; if that fails, or takes too long, nothing is
// sent. The outcome is kept in memory until the database has it, and nothing else begins
// meanwhile.
package runner

import (
	"container/heap"
	"context"
	"iter"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/counters"
	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/jobs"
	"fleetd/internal/tasks"
	"fleetd/internal/timescale"
)

// Limits.
const (
	maxRunning    = 1024                   // tasks of this node at once
	maxOfJob      = 2000                   // waiting tasks of one job that scans keep in memory
	maxCandidates = 64 << 10               // waiting tasks in memory in all, about 200 bytes each
	maxRepeated   = 2 * maxCandidates      // with those that are to be repeated while their stage lets no others begin
	maxArrived    = 1 << 20                // devices whose tasks are to be read; beyond that scans find them
	perDevice     = 4                      // waiting tasks of a device that are read at once
	arrivedBatch  = 500                    // devices of one query
	scanPage      = 2000                   // rows of one query
	passTime      = 100 * time.Millisecond // of reading devices, and of scans, in one pass of the pump: what is known begins in between
	sharePerFree  = 3                      // a job takes no further place of the node once it has so many times those that are free
	beginTime     = 250 * time.Millisecond
	sendTime      = time.Second      // from the beginning of the commit to the bytes
	readTime      = 5 * time.Second  // of one query
	endTime       = 10 * time.Second // of one transaction that ends tasks
	endWait       = 5 * time.Millisecond
	groupWait     = 25 * time.Millisecond // to collect devices that connect together
	heldGroups    = 30                    // in which devices are read again after heldAfter
)

// Pauses before another attempt.
var (
	refreshEvery  = timescale.Of(5 * time.Second)
	refreshActive = timescale.Of(time.Second) // while tasks of devices here wait for their pace
	rescanEvery   = 5 * time.Minute           // in case a hint was lost
	againAfter    = timescale.Of(time.Second)
	talkingAfter  = timescale.Of(2 * time.Second)
	heldAfter     = timescale.Of(30 * time.Second) // and at most twice that: a device may have more tasks than were read, which may not begin
)

// Devices is what a Runner uses of the core.
type Devices interface {
	// Reserve is as of dispatch.Dispatcher.
	Reserve(id devices.ID, tools bool) (*dispatch.Reservation, error)
	// IsHere reports whether the device has a session on this node.
	IsHere(id devices.ID) bool
	// IsBusy is as of dispatch.Dispatcher.
	IsBusy(id devices.ID, idle bool) bool
	Keys() *access.Registry
	NewCallID() string
}

// Options of a Runner.
type Options struct {
	Store    jobs.Store
	Devices  Devices
	Node     string
	Instance string
	// MayBegin reports whether tasks may begin: the node is not stopping, and its lease is
	// valid.
	MayBegin func() bool
	Open     bool // callers without a token have all rights
	// Rollouts begins firmware tasks, and knows which devices must not restart.
	Rollouts Rollouts
	Log      *slog.Logger
}

// Rollouts begins firmware tasks, and knows which devices must not restart: rollout.Service.
type Rollouts interface {
	// Restart begins a waiting firmware task with a restart, which send sends after a last permission. It reports when to look at the device
	// again; zero: another step does that.
	Restart(ctx context.Context, job *jobs.Job, id devices.ID, send func(permit func() error) error) (again time.Duration)
	// MayRestart returns why a device must not restart now, or nil.
	MayRestart(ctx context.Context, id devices.ID) *devices.Error
}

// Stats are the counters of a Runner. They are safe for concurrent use.
type Stats struct {
	Conflicts atomic.Uint64 // tasks that this node wanted to begin, and that others began or held up
	Waited    counters.Histogram
	Waiting   atomic.Int64 // candidates in memory
	Running   atomic.Int64
}

// Runner runs tasks. Its methods are safe for concurrent use.
type Runner struct {
	Options
	stats Stats
	tasks *tasks.Group
	ends  *ender
	stop  context.CancelFunc
	loop  sync.WaitGroup
	wake  chan struct{} // capacity 1

	totals  atomic.Pointer[Totals]
	rolling atomic.Bool // there are firmware jobs with open tasks
	failing atomic.Bool // the last pass failed, which was logged

	mu      sync.Mutex
	arrived map[devices.ID]struct{}
	updated map[string]jobs.Job
	later   map[devices.ID]time.Time // when to read the tasks of a device
	looks   looks                    // later in order of time; what later does not have is void
	hinted  bool                     // the open jobs are to be read
	running map[devices.ID]string    // devices with a task that has begun here, and its job
}

// New returns a running Runner; Close stops it.
func New(o Options) *Runner {
	ctx, stop := context.WithCancel(context.Background())
	r := &Runner{Options: o, tasks: tasks.New(o.Log), stop: stop, wake: make(chan struct{}, 1), arrived: map[devices.ID]struct{}{}, updated: map[string]jobs.Job{},
		hinted: true, later: map[devices.ID]time.Time{}, running: map[devices.ID]string{}}
	r.ends = newEnder(r)
	r.loop.Go(func() { newPump(r).run(ctx) })
	return r
}

// Stats returns the counters.
func (r *Runner) Stats() *Stats { return &r.stats }

// Drain waits for the tasks that run, at most so long. The caller lets no more begin: MayBegin.
func (r *Runner) Drain(limit time.Duration) {
	for end := time.Now().Add(limit); r.stats.Running.Load() > 0 && time.Now().Before(end); {
		time.Sleep(endWait)
	}
}

// Close begins no more tasks, ends those that run, and records how they ended.
func (r *Runner) Close() {
	r.stop()
	r.loop.Wait()
	r.tasks.Close()
	r.tasks.Wait() // cancels the calls that are left: their outcome is unknown
	r.ends.close()
}

// Totals are the open jobs of the fleet and their waiting tasks, in numbers.
type Totals struct {
	States map[jobs.State]int
	// Waiting are tasks by what their jobs wait for; WaitNone: only for their devices.
	Waiting map[jobs.Wait]int64
}

// Totals returns the numbers of open jobs, as last read. Do not change them.
func (r *Runner) Totals() Totals {
	if totals := r.totals.Load(); totals != nil {
		return *totals
	}
	return Totals{}
}

// Owner returns the caller as whom the jobs of an owner act. ok is false if this node does not have its key yet; the error says that
// the key has ended.
func (r *Runner) Owner(owner string) (p access.Principal, ok bool, err error) {
	return r.principal(owner)
}

// Rolling reports whether there are firmware jobs with open tasks, as far as this node knows.
func (r *Runner) Rolling() bool { return r.rolling.Load() }

// Hold returns what holds up a task that its job lets begin on a device, if the device is connected here: WaitDatabase,
// WaitOrder if another task of the device runs, or WaitBusy, else WaitNone. idle is whether the task awaits the end of a conversation.
func (r *Runner) Hold(id devices.ID, idle bool) (why jobs.Wait, here bool) {
	switch {
	case !r.Devices.IsHere(id):
		return jobs.WaitNone, false
	case r.failing.Load() || r.ends.isBlocked():
		return jobs.WaitDatabase, true
	case r.isRunning(id):
		return jobs.WaitOrder, true
	case r.Devices.IsBusy(id, idle):
		return jobs.WaitBusy, true
	}
	return jobs.WaitNone, true
}

// Connected implements session.Lifecycle: the device takes messages, and so restarts, whether it answers MCP or not.
func (r *Runner) Connected(id devices.ID, session string) { r.Ready(id, session) }

// Ready implements session.Lifecycle: the device can be called. Devices that connect within the
// same groupWait are looked up together.
func (r *Runner) Ready(id devices.ID, _ string) {
	r.lookAt(id, groupWait-time.Duration(clock.Reading(time.Now()))%groupWait)
}

// Gone implements session.Lifecycle.
func (r *Runner) Gone(devices.ID, string, devices.CloseReason) {}

// CheckedIn implements session.Lifecycle.
func (r *Runner) CheckedIn(devices.Check) {}

// Look reads the waiting tasks of a device soon, if it is connected here.
func (r *Runner) Look(ids ...devices.ID) {
	r.keep(slices.Values(ids))
	tasks.Signal(r.wake)
}

// keep leaves devices whose tasks are to be read to the next pass.
func (r *Runner) keep(ids iter.Seq[devices.ID]) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id := range ids {
		if len(r.arrived) < maxArrived {
			r.arrived[id] = struct{}{}
		}
	}
}

// lookAt is Look after a pause.
func (r *Runner) lookAt(id devices.ID, pause time.Duration) { r.lookFrom(id, time.Now().Add(pause)) }

// lookAgain is Look after heldAfter or some more, together with other devices and not with all of them.
func (r *Runner) lookAgain(id devices.ID) {
	at := time.Now().Add(heldAfter + rand.N(heldAfter))
	r.lookFrom(id, at.Add(-time.Duration(clock.Reading(at))%(heldAfter/heldGroups)))
}

func (r *Runner) lookFrom(id devices.ID, at time.Time) {
	r.mu.Lock()
	if known, ok := r.later[id]; !ok || at.Before(known) {
		r.later[id] = at
		heap.Push(&r.looks, look{at, id})
	}
	r.mu.Unlock()
	tasks.Signal(r.wake)
}

// due moves devices whose time has come to the arrived ones, and returns when to look again at the latest: now, if there
// are some.
func (r *Runner) due(next time.Time) time.Time {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.looks) > 0 {
		first := r.looks[0]
		if at, ok := r.later[first.id]; ok && at.Equal(first.at) {
			if first.at.After(now) {
				if first.at.Before(next) {
					next = first.at
				}
				break
			}
			delete(r.later, first.id)
			r.arrived[first.id] = struct{}{}
			next = now
		}
		heap.Pop(&r.looks)
	}
	return next
}

// look is when the tasks of a device are to be read.
type look struct {
	at time.Time
	id devices.ID
}

// looks is a heap by time.
type looks []look

// Len implements heap.Interface.
func (l looks) Len() int { return len(l) }

// Less implements heap.Interface.
func (l looks) Less(i, j int) bool { return l[i].at.Before(l[j].at) }

// Swap implements heap.Interface.
func (l looks) Swap(i, j int) { l[i], l[j] = l[j], l[i] }

// Push implements heap.Interface.
func (l *looks) Push(x any) { *l = append(*l, x.(look)) }

// Pop implements heap.Interface.
func (l *looks) Pop() any {
	last := (*l)[len(*l)-1]
	*l = (*l)[:len(*l)-1]
	return last
}

// Update gives the runner the state of jobs after a transaction. It does not block.
func (r *Runner) Update(changed []jobs.Change) {
	r.mu.Lock()
	for i := range changed {
		j := &changed[i].Job
		if known, ok := r.updated[j.ID]; !ok || known.Version < j.Version {
			r.updated[j.ID] = *j
		}
	}
	r.mu.Unlock()
	tasks.Signal(r.wake)
}

// Hint makes the runner read the open jobs: another node has changed some.
func (r *Runner) Hint() {
	r.keepHint()
	tasks.Signal(r.wake)
}

// keepHint leaves the reading of the open jobs to the next pass.
func (r *Runner) keepHint() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hinted = true
}

// take returns and clears what has arrived.
func (r *Runner) take() (arrived map[devices.ID]struct{}, updated map[string]jobs.Job, hinted bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	arrived, updated, hinted = r.arrived, r.updated, r.hinted
	r.arrived, r.updated, r.hinted = map[devices.ID]struct{}{}, map[string]jobs.Job{}, false
	return arrived, updated, hinted
}

func (r *Runner) isRunning(id devices.ID) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.running[id]
	return ok
}

// places returns how many tasks of each job run here.
func (r *Runner) places() map[string]int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := map[string]int{}
	for _, job := range r.running {
		n[job]++
	}
	return n
}

// setRunning notes the job of the task that runs on a device; empty: the task has ended.
func (r *Runner) setRunning(id devices.ID, job string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if job != "" {
		r.running[id] = job
		delete(r.later, id) // the end reads its tasks
		r.stats.Running.Add(1)
		return
	}
	delete(r.running, id)
	r.stats.Running.Add(-1)
}
