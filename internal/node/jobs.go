package node

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"sync/atomic"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/cluster"
	"fleetd/internal/counters"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
	"fleetd/internal/jobs/manager"
	"fleetd/internal/jobs/runner"
	"fleetd/internal/rollout"
	"fleetd/internal/store/jobstore"
	"fleetd/internal/tasks"
)

// hintEvery limits the hints to other nodes: each makes them read the open jobs.
const hintEvery = 250 * time.Millisecond

// jobsSide are the parts for jobs of this node.
type jobsSide struct {
	node    *node
	hints   chan struct{} // capacity 1: other nodes are to look for work
	store   *jobstore.Store
	runner  atomic.Pointer[runner.Runner] // its first commits may come before it is set
	manager *manager.Manager
	rollout *rollout.Service
	ended   counters.Map[endedKey]
	unknown atomic.Int64 // outcomes of jobs that are not repeatable
}

// endedKey is an action and an outcome.
type endedKey struct {
	action  string
	outcome jobs.Outcome
}

// startJobs starts to run and to manage jobs. The tasks that run when the node stops end before
// the sessions of the devices do.
func (n *node) startJobs() error {
	zone, err := time.LoadLocation(n.cfg.Timezone) // UTC if empty
	if err != nil {
		return err
	}
	s := &jobsSide{node: n, hints: make(chan struct{}, 1)}
	instance, options := rand.Text(), []jobstore.Option(nil)
	if n.leases != nil {
		instance, options = n.leases.Instance(), append(options, jobstore.Leases())
	}
	mayBegin := func() bool { return !n.draining.Load() && n.leases.IsLeased() }
	for _, action := range []string{"call", "message", "restart", "firmware"} {
		for _, outcome := range jobs.Outcomes {
			s.ended.Add(endedKey{action, outcome}, 0) // otherwise an alert on its increase would miss the first one
		}
	}
	holder := func(key string) access.Holder {
		h := n.service.Keys().Holder(key, clock.Now())
		h.Ended = h.Ended || key == access.KeyOpen && n.cfg.APIAuth != "none"
		return h
	}
	s.store = jobstore.New(n.store, n.log, append(options, jobstore.Notify(s.committed), jobstore.Holders(holder), jobstore.Known(n.readBegun()))...)
	s.startRollout(mayBegin)
	run := runner.New(runner.Options{Store: s.store, Devices: n.service, Node: n.cfg.Node, Instance: instance, MayBegin: mayBegin,
		Open: n.cfg.APIAuth == "none", Rollouts: s.rollout, Log: n.log})
	s.runner.Store(run)
	n.onStop(run.Close)
	s.manager = manager.New(manager.Options{Store: s.store, Fleet: n.service, Node: n.cfg.Node, Instance: instance, Hold: run.Hold, IsConnected: n.bus.up.Load, Gather: n.cluster.Gather, Leases: n.leases != nil, Zone: zone, Firmware: n.firmware, Expire: s.rollout.Expire, Owner: s.owner, Holder: holder, TakeRestored: n.restored.take, Compute: n.work.Computing.Enter, Log: n.log})
	n.onStop(s.manager.Close)
	n.cluster.OnGather(manager.Question, s.manager.Answer)
	n.service.Observe(run)
	n.service.Observe(s.rollout)
	n.service.OnCall(s.rollout.Busy)
	n.service.OnDecision(s.manager.OnDecision)
	n.jobs = s
	n.whileRunning(s.hint)
	n.whileRunning(s.noteBegun)
	return n.cluster.OnJobs(cluster.Jobs{Create: s.create, Look: func() {
		run.Hint()
		s.manager.Poke()
	}})
}

// drain lets the tasks that run end, at most for so long; none begins meanwhile.
func (s *jobsSide) drain(window time.Duration) {
	if s != nil { // else the node stops before it has begun
		s.runner.Load().Drain(window)
	}
}

// create creates the job of a request over NATS.
func (s *jobsSide) create(ctx context.Context, p access.Principal, body []byte, key string) ([]byte, error) {
	if s.node.draining.Load() {
		return nil, &devices.Error{Code: devices.CodeUnavailable, Part: "node", Detail: "this node is stopping; send the request again, another node answers it"}
	}
	job, err := jobs.ParseNew(body)
	if err != nil {
		return nil, err
	}
	j, _, err := s.manager.Create(ctx, p, job.JobSpec, manager.CreateOptions{Key: key, Confirmation: job.Confirmation})
	if err != nil {
		return nil, err
	}
	return json.Marshal(j)
}

// hint passes on hints to the other nodes, at most one every hintEvery, until ctx ends.
func (s *jobsSide) hint(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.hints:
		}
		s.node.cluster.HintWork()
		if !clock.Sleep(ctx, hintEvery) {
			return
		}
	}
}

// isWork reports whether other nodes may have something to do after a change: not if a task was given back, whose device the node looks at
// to which it is connected.
func isWork(c *jobs.Change) bool {
	return c.Job.State != c.From || c.Job.Stage != c.FromStage || c.Job.Counts.Open() > c.FromOpen
}

// committed passes on what a transaction has changed, and publishes it.
func (s *jobsSide) committed(changed []jobs.Change, ended []jobs.Task) {
	if r := s.runner.Load(); r != nil {
		r.Update(changed)
	}
	s.count(changed, ended)
	for i := range changed {
		if isWork(&changed[i]) {
			tasks.Signal(s.hints)
			break
		}
	}
	for _, e := range manager.Events(changed, ended, s.store.Now()) {
		s.node.events.Publish(e)
	}
}

// count counts what a transaction has changed.
func (s *jobsSide) count(changed []jobs.Change, ended []jobs.Task) {
	byID := map[string]*jobs.Job{}
	for i := range changed {
		byID[changed[i].Job.ID] = &changed[i].Job
	}
	for i := range ended {
		t := &ended[i]
		j := byID[t.Job]
		if j == nil || t.State != jobs.TaskEnded {
			continue
		}
		s.ended.Add(endedKey{j.Action, t.Outcome}, 1)
		if t.Outcome == jobs.Unknown && !j.Spec.Repeatable {
			s.unknown.Add(1)
		}
	}
	for i := range changed {
		c := &changed[i]
		if c.Job.State == jobs.Halted && c.From != jobs.Halted {
			s.node.log.Warn("a job halted; fleetd jobs shows why, and fleetd jobs resume continues it", "job", c.Job.ID, "reason", c.Job.Reason)
		}
	}
}

// metrics adds the metrics of jobs.
func (s *jobsSide) metrics(r *counters.Registry) {
	r.Counter("tasks_ended_total", "Tasks of jobs that this node ended, by action and outcome.", "action", "outcome").Read(func(emit counters.Emit) {
		s.ended.Each(func(k endedKey, n int64) { emit(float64(n), k.action, string(k.outcome)) })
	})
	states := r.Gauge("jobs", "Open jobs of the fleet by state, as this node last read them.", "state")
	states.Read(func(emit counters.Emit) {
		count := s.runner.Load().Totals().States
		for _, state := range []jobs.State{jobs.Scheduled, jobs.Preparing, jobs.Running, jobs.Paused, jobs.Halted} {
			emit(float64(count[state]), string(state))
		}
	})
	r.Gauge("tasks_waiting", "Waiting tasks of the fleet, as this node last read them, by what their jobs wait for: `later`, `window`, `stage`, `pace`, `paused`, `halted`; "+
		"`device`: only for their devices, which are away, busy or have older tasks.", "reason").Read(func(emit counters.Emit) {
		count := s.runner.Load().Totals().Waiting
		for _, reason := range []jobs.Wait{jobs.WaitLater, jobs.WaitWindow, jobs.WaitStage, jobs.WaitPace, jobs.WaitPaused, jobs.WaitHalted} {
			emit(float64(count[reason]), string(reason))
		}
		emit(float64(count[jobs.WaitNone]), "device")
	})
	counters.Value(r.Counter("tasks_unknown_total", "Tasks that this node ended with an unknown outcome, of jobs that are not repeatable: somebody has to look at these devices."), s.unknown.Load)
	r.Counter("offers_total", "OTA checks of devices with a firmware task, by what became of them: `offered`; `repeated`, the same offer again; `waiting`, the job or the device may not begin yet; `refused`, the device may not get the image; "+
		"`unready`, the database or the image was not at hand; `crowded`, all places of downloads were taken.", "result").Read(func(emit counters.Emit) {
		s.rollout.Offers.Each(func(result string, n int64) { emit(float64(n), result) })
	})
	r.Counter("downloads_total", "Downloads of firmware images: `complete`, `broken`, or `cut` by the end of the node.", "result").Read(func(emit counters.Emit) {
		s.rollout.Downloads.Each(func(result string, n int64) { emit(float64(n), result) })
	})
	stats := s.runner.Load().Stats()
	counters.Value(r.Gauge("tasks_running", "Tasks of jobs that run on devices of this node."), stats.Running.Load)
	counters.Value(r.Gauge("tasks_candidates", "Waiting tasks for devices of this node that are in memory, at most 65,536."), stats.Waiting.Load)
	counters.Value(r.Counter("task_begin_conflicts_total", "Tasks that this node wanted to begin and could not: another task of the device was first, or the job's limits were reached."), stats.Conflicts.Load)
	r.Histogram("task_wait_seconds", "Time from the creation of a task to its beginning.", &stats.Waited)
}
