package runner

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/jobs"
)

// pump decides which tasks begin. One goroutine uses it.
type pump struct {
	r       *Runner
	jobs    map[string]*jobState
	total   int       // candidates in memory
	batch   int       // tasks that are begun at once, at most
	nextJob string    // id from which on jobs take their turns
	refresh time.Time // when to read the open jobs
	until   time.Time // when this pass ends to read
}

func newPump(r *Runner) *pump {
	return &pump{r: r, jobs: map[string]*jobState{}, batch: jobs.BeginBatch}
}

func (p *pump) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-p.r.wake:
		}
		next, err := p.pass(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			if !p.r.failing.Load() {
				p.r.Log.Warn("jobs: tasks cannot begin; trying again each second", "error", err)
			}
			next = time.Now().Add(againAfter)
		case p.r.failing.Load():
			p.r.Log.Info("jobs: tasks begin again")
		}
		p.r.failing.Store(err != nil)
		p.r.stats.Waiting.Store(int64(p.total))
		timer.Reset(max(time.Until(next), time.Millisecond))
	}
}

// pass does what is due, and returns when to look again at the latest.
func (p *pump) pass(ctx context.Context) (next time.Time, err error) {
	p.r.due(time.Time{})
	arrived, updated, hinted := p.r.take()
	for _, j := range updated {
		p.update(j)
	}
	now := time.Now()
	p.until = now.Add(passTime)
	err = p.read(ctx, arrived)
	p.r.keep(maps.Keys(arrived)) // those that are left
	if err != nil {
		return next, err
	}
	if hinted || !now.Before(p.refresh) {
		if err := p.open(ctx); err != nil {
			p.r.keepHint()
			return next, err
		}
	}
	unread, err := p.scanAll(ctx, now)
	if err != nil {
		return next, err
	}
	begun, err := p.begin(ctx)
	if err != nil || begun || unread || len(arrived) > 0 {
		return time.Now(), err
	}
	return p.next(), nil
}

// next returns when something may begin by the passing of time.
func (p *pump) next() time.Time {
	next, now := p.refresh, p.r.Store.Now()
	soon := func(at time.Time) {
		if at.Before(next) {
			next = at
		}
	}
	next = p.r.due(next)
	for _, s := range p.jobs {
		if len(s.list) == 0 {
			continue
		}
		soon(p.refresh.Add(refreshActive - refreshEvery))
		if gate, at := s.job.Gate(now); gate != jobs.WaitNone && !at.IsZero() {
			soon(time.Now().Add(at.Sub(now)))
		}
	}
	return next
}

// update takes a newer state of a job.
func (p *pump) update(j jobs.Job) {
	s := p.jobs[j.ID]
	if j.IsRollout() && j.Counts.Open() > 0 {
		p.r.rolling.Store(true) // open unsets it
	}
	switch {
	case !j.State.Open():
		p.drop(j.ID)
	case s == nil:
		p.jobs[j.ID] = &jobState{job: j, have: map[key]*jobs.Candidate{}}
	case s.job.Version < j.Version:
		if isRetried(&s.job, &j) {
			s.scannedAt, s.more = time.Time{}, false
		}
		s.job = j
	}
}

// drop leaves a job out. The devices whose next task was of it may have tasks of other jobs.
func (p *pump) drop(id string) {
	s := p.jobs[id]
	if s == nil {
		return
	}
	for i := range s.list {
		p.r.Look(s.list[i].Device)
	}
	p.total -= len(s.list)
	delete(p.jobs, id)
}

// open reads the open jobs.
func (p *pump) open(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readTime)
	defer cancel()
	list, err := p.r.Store.Open(ctx)
	if err != nil {
		return err
	}
	p.refresh = time.Now().Add(refreshEvery)
	seen := make(map[string]bool, len(list))
	p.r.rolling.Store(slices.ContainsFunc(list, func(j jobs.Job) bool { return j.IsRollout() }))
	for _, j := range list {
		seen[j.ID] = j.State.Open()
		p.update(j)
	}
	totals := Totals{map[jobs.State]int{}, map[jobs.Wait]int64{}}
	now := p.r.Store.Now()
	for id, s := range p.jobs {
		if !seen[id] {
			p.drop(id)
			continue
		}
		totals.States[s.job.State]++
		gate, _ := s.job.Gate(now)
		totals.Waiting[gate] += s.job.Held
		totals.Waiting[s.job.GateOf(&jobs.Task{}, now)] += s.job.Counts.Waiting - s.job.Held
	}
	p.r.totals.Store(&totals)
	return nil
}

// wish is a candidate with its device's slot.
type wish struct {
	jobs.Candidate
	slot *dispatch.Reservation
}

// begin begins one group of what may begin now, and reports whether there was any: what came meanwhile is read before the next one.
func (p *pump) begin(ctx context.Context) (more bool, err error) {
	if p.r.ends.isBlocked() || !p.r.MayBegin() {
		return false, nil
	}
	wishes := p.choose()
	if len(wishes) == 0 {
		return false, nil
	}
	if wishes = p.roll(wishes); len(wishes) == 0 {
		return true, nil
	}
	return true, p.commit(ctx, wishes)
}

// turn is a job that may begin tasks of a group.
type turn struct {
	*jobState
	room  jobs.Room
	taken int               // places of the node that its tasks have
	kept  []*jobs.Candidate // those before at that stay in memory
	at    int               // in list
}

// turns returns the jobs that may begin tasks now, in order of id from the one that is next.
func (p *pump) turns(now time.Time) (list []*turn) {
	for _, s := range p.jobs {
		if room := s.job.Room(now); len(s.list) > 0 && room.Has(true) {
			list = append(list, &turn{jobState: s, room: room, kept: s.list[:0]})
		}
	}
	slices.SortFunc(list, func(a, b *turn) int { return cmp.Compare(a.job.ID, b.job.ID) })
	first, _ := slices.BinarySearchFunc(list, p.nextJob, func(x *turn, id string) int { return cmp.Compare(x.job.ID, id) })
	return slices.Concat(list[first:], list[:first])
}

// firstOf returns, of each device with candidates of several jobs, the one that is first in its queue: no other may begin.
func firstOf(list []*turn, now time.Time) map[devices.ID]*jobs.Candidate {
	first := map[devices.ID]*jobs.Candidate{}
	if len(list) < 2 {
		return first
	}
	for _, x := range list {
		for _, c := range x.list {
			if c.DueAt.After(now) || !x.room.Has(c.Began) {
				continue
			}
			if other := first[c.Device]; other == nil || cmp.Or(cmp.Compare(c.Seq, other.Seq), cmp.Compare(c.Job, other.Job)) < 0 {
				first[c.Device] = c
			}
		}
	}
	return first
}

// choose takes candidates whose jobs let them begin, and reserves their devices. Jobs take a place of the node in turn; one that
// has sharePerFree times as many places as are free leaves these to others.
func (p *pump) choose() (wishes []wish) {
	now := p.r.Store.Now()
	list := p.turns(now)
	first, places := firstOf(list, now), p.r.places()
	free := maxRunning
	for _, n := range places {
		free -= n
	}
	for _, x := range list {
		x.taken = places[x.job.ID]
	}
	chosen := map[devices.ID]bool{}
	for waiting := list; len(waiting) > 0; {
		rest := waiting[:0:0]
		for i, x := range waiting {
			if len(wishes) >= p.batch || free == 0 {
				p.nextJob, rest = waiting[i].job.ID, nil
				break
			}
			if x.taken >= sharePerFree*free {
				continue
			}
			w, ok := p.chooseOf(x, first, chosen, now)
			if !ok {
				continue
			}
			wishes, free = append(wishes, w), free-1
			rest = append(rest, x)
		}
		waiting = rest
	}
	for _, x := range list {
		kept := append(x.kept, x.list[x.at:]...)
		clear(x.list[len(kept):])
		x.list = kept
	}
	return wishes
}

// chooseOf takes the next candidate of a job that may begin; ok is false if there is none.
func (p *pump) chooseOf(x *turn, first map[devices.ID]*jobs.Candidate, chosen map[devices.ID]bool, now time.Time) (w wish, ok bool) {
	for ; x.at < len(x.list) && x.room.Has(true); x.at++ {
		c := x.list[x.at]
		if other := first[c.Device]; !x.room.Has(c.Began) || other != nil && other != c && !c.DueAt.After(now) {
			x.kept = append(x.kept, c)
			continue
		}
		slot := p.reserve(x.jobState, c, chosen, now)
		delete(x.have, keyOf(c))
		p.total--
		if slot == nil {
			continue
		}
		x.at++
		x.taken++
		x.room.Take(c.Began)
		chosen[c.Device] = true
		return wish{*c, slot}, true
	}
	return wish{}, false
}

// reserve takes a slot of the candidate's device; without one its tasks are read again later.
func (p *pump) reserve(s *jobState, c *jobs.Candidate, chosen map[devices.ID]bool, now time.Time) *dispatch.Reservation {
	if pause := c.DueAt.Sub(now); pause > 0 {
		p.r.lookAt(c.Device, pause)
		return nil
	}
	if chosen[c.Device] || p.r.isRunning(c.Device) {
		return nil // its end reads the device's tasks
	}
	action, known := jobs.ActionOf(&s.job.Spec.Action)
	if !known { // its gate is closed here
		return nil
	}
	slot, err := p.r.Devices.Reserve(c.Device, action.NeedsTools())
	switch {
	case errors.Is(err, devices.ErrNoHolder):
		return nil // it connects again, here or elsewhere
	case err != nil:
		p.r.lookAt(c.Device, againAfter)
		return nil
	case s.job.AwaitsIdle() && slot.IsTalking():
		slot.Release()
		p.r.lookAt(c.Device, talkingAfter)
		return nil
	}
	return slot
}

// roll begins the firmware tasks of a group, each by itself, and returns the others.
func (p *pump) roll(wishes []wish) (others []wish) {
	for _, w := range wishes {
		s := p.jobs[w.Job]
		if s == nil || !s.job.IsRollout() {
			others = append(others, w)
			continue
		}
		job, id := s.job, w.Device
		p.r.setRunning(id, w.Job)
		begin := func() {
			again := p.r.roll(&job, id, w.slot)
			w.slot.Release()
			p.r.setRunning(id, "")
			if again > 0 {
				p.r.lookAt(id, again)
			}
		}
		if !p.r.tasks.Run(begin) {
			w.slot.Release()
			p.r.setRunning(id, "")
		}
	}
	return others
}

// roll begins a firmware task with a restart of its device.
func (r *Runner) roll(job *jobs.Job, id devices.ID, slot *dispatch.Reservation) (again time.Duration) {
	who, ok, err := r.principal(job.Owner)
	if !ok && err == nil {
		return refreshEvery
	}
	return r.Rollouts.Restart(r.tasks.Context(), job, id, func(permit func() error) error {
		ctx, cancel := context.WithTimeout(r.tasks.Context(), dispatch.DefaultTimeout)
		defer cancel()
		return slot.Message(ctx, devices.Message{ID: r.Devices.NewCallID(), Device: id, Body: json.RawMessage(devices.RestartMessage), Principal: who, Job: job.ID}, permit)
	})
}

// commit commits the beginning of a group, and sends what has begun.
func (p *pump) commit(ctx context.Context, wishes []wish) error {
	list := make([]jobs.Candidate, len(wishes))
	for i := range wishes {
		list[i] = wishes[i].Candidate
	}
	asked := time.Now()
	limited, cancel := context.WithTimeout(ctx, p.groupTime())
	begun, changed, err := p.r.Store.Begin(limited, p.r.Node, p.r.Instance, list)
	cancel()
	p.adapt(time.Since(asked), err)
	slots := make(map[key]*dispatch.Reservation, len(wishes))
	for i := range wishes {
		slots[keyOf(&list[i])] = wishes[i].slot
	}
	defer func() {
		for k, slot := range slots { // did not begin
			slot.Release()
			p.r.lookAt(k.device, againAfter)
		}
	}()
	if err != nil {
		p.r.ends.addUncertain(begun) // perhaps they began
		return err
	}
	for i := range changed {
		p.update(changed[i].Job)
	}
	for i := range begun {
		t := begun[i]
		k := key{t.Job, t.Round, t.Device}
		slot, s := slots[k], p.jobs[t.Job]
		if slot == nil || s == nil {
			p.r.ends.add(notSent(&t, time.Time{}))
			continue
		}
		delete(slots, k)
		p.r.setRunning(t.Device, t.Job)
		run := &run{r: p.r, task: t, job: s.job, slot: slot, asked: asked}
		if !p.r.tasks.Run(run.do) {
			run.finish(notSent(&t, time.Time{}))
		}
	}
	p.r.stats.Conflicts.Add(uint64(len(slots)))
	return nil
}

// adapt makes groups smaller if the database does not begin them in time, and larger if it has time left: where
// a full group always takes too long, nothing would begin.
func (p *pump) adapt(took time.Duration, err error) {
	switch {
	case err != nil:
		p.batch = max(p.batch/2, 1)
	case took < beginTime/2:
		p.batch = min(p.batch*2, jobs.BeginBatch)
	}
}

// groupTime is how long a group may take. Calls of its devices wait meanwhile; one task has all the time that
// leaves some to send it, since a database that is slower than this begins nothing else.
func (p *pump) groupTime() time.Duration {
	if p.batch == 1 {
		return sendTime * 3 / 4
	}
	return beginTime
}

// notSent gives a task back that has begun.
func notSent(t *jobs.Task, again time.Time) jobs.End {
	return jobs.End{Job: t.Job, Round: t.Round, Device: t.Device, Fence: t.Fence, NotSent: true, Again: again}
}
