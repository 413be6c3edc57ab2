package runner

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/jobs"
)

// key is a task.
type key struct {
	job    string
	round  int64
	device devices.ID
}

func keyOf(c *jobs.Candidate) key { return key{c.Job, c.Round, c.Device} }

// jobState is an open job with its waiting tasks for devices that are connected here.
type jobState struct {
	job  jobs.Job
	list []*jobs.Candidate
	have map[key]*jobs.Candidate

	scannedAt            time.Time // zero: never
	round, size, waiting int64     // of the job at the last scan
	least                int64     // the fewest waiting tasks that the job had since then
	cursor               int64     // of a scan that is not complete
	more                 bool
	left                 bool  // the scan left tasks out that the stage did not let begin
	ended                int64 // tasks that had ended
}

// endedOf returns how many tasks of a job have ended.
func endedOf(j *jobs.Job) int64 { return j.Counts.Total() - j.Counts.Open() }

// needsScan reports whether there may be waiting tasks that are not in memory.
func (s *jobState) needsScan(now time.Time) bool {
	if s.job.State != jobs.Running || s.job.Counts.Waiting == 0 {
		return false
	}
	return s.scannedAt.IsZero() || s.round != s.job.Round || s.size != s.job.RoundN || s.job.Counts.Waiting > s.waiting ||
		s.more && (s.job.Full() || len(s.list) < maxOfJob/2) || s.left && !s.job.Full() || s.job.Counts.Waiting > s.least && now.Sub(s.scannedAt) > againScan || now.Sub(s.scannedAt) > rescanEvery
}

// pump decides which tasks begin. One goroutine uses it.
type pump struct {
	r       *Runner
	jobs    map[string]*jobState
	total   int       // candidates in memory
	batch   int       // tasks that are begun at once, at most
	refresh time.Time // when to read the open jobs
	failed  bool      // the last pass failed, which was logged
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
			if !p.failed {
				p.r.Log.Warn("jobs: tasks cannot begin; trying again each second", "error", err)
			}
			next = time.Now().Add(againAfter)
		case p.failed:
			p.r.Log.Info("jobs: tasks begin again")
		}
		p.failed = err != nil
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
	if err := p.read(ctx, arrived); err != nil {
		p.r.Look(keys(arrived)...)
		return next, err
	}
	if hinted || !now.Before(p.refresh) {
		if err := p.open(ctx); err != nil {
			p.r.Hint()
			return next, err
		}
	}
	for _, s := range p.jobs {
		if s.needsScan(now) {
			if err := p.scan(ctx, s); err != nil {
				return next, err
			}
		}
	}
	if err := p.begin(ctx); err != nil {
		return next, err
	}
	return p.next(), nil
}

func keys(set map[devices.ID]struct{}) (list []devices.ID) {
	for id := range set {
		list = append(list, id)
	}
	return list
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
	switch {
	case !j.State.Open():
		p.drop(j.ID)
	case s == nil:
		p.jobs[j.ID] = &jobState{job: j, have: map[key]*jobs.Candidate{}, least: j.Counts.Waiting, ended: endedOf(&j)}
	case s.job.Version < j.Version:
		if s.job = j; endedOf(&j) < s.ended { // some are repeated
			s.scannedAt, s.more = time.Time{}, false
		}
		s.least = min(s.least, j.Counts.Waiting)
		s.ended = endedOf(&j)
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
		waiting := s.job.Counts.Waiting
		if (gate == jobs.WaitNone || gate == jobs.WaitPace) && s.job.Full() {
			totals.Waiting[jobs.WaitStage] += waiting - s.job.Held
			waiting = s.job.Held
		}
		totals.Waiting[gate] += waiting
	}
	p.r.totals.Store(&totals)
	return nil
}

// read reads the waiting tasks of devices that are connected here.
func (p *pump) read(ctx context.Context, arrived map[devices.ID]struct{}) error {
	var ids []devices.ID
	for id := range arrived {
		if !p.r.Devices.IsHere(id) {
			delete(arrived, id)
			continue
		}
		ids = append(ids, id)
	}
	ctx, cancel := context.WithTimeout(ctx, readTime)
	defer cancel()
	for len(ids) > 0 {
		part := ids[:min(arrivedBatch, len(ids))]
		list, running, err := p.r.Store.WaitingOf(ctx, part, perDevice)
		if err != nil {
			return err
		}
		for _, id := range running { // perhaps on the node that it came from, which may give the task back
			if !p.r.isRunning(id) {
				p.r.lookAt(id, againAfter)
			}
		}
		for i := range list {
			if err := p.add(ctx, list[i]); err != nil {
				return err
			}
		}
		for _, id := range part {
			delete(arrived, id)
		}
		ids = ids[len(part):]
	}
	return nil
}

// add takes a candidate, of a job that may be new to this node.
func (p *pump) add(ctx context.Context, c jobs.Candidate) error {
	s := p.jobs[c.Job]
	if s == nil {
		j, err := p.r.Store.Job(ctx, c.Job)
		if devices.AsError(orNil(err)).Code == devices.CodeNotFound {
			return nil
		}
		if err != nil {
			return err
		}
		p.update(j)
		if s = p.jobs[c.Job]; s == nil {
			return nil
		}
	}
	p.insert(s, c, maxCandidates) // it is the next one of its device
	return nil
}

// orNil makes AsError usable for nil.
func orNil(err error) error {
	if err == nil {
		return &devices.Error{}
	}
	return err
}

// insert reports whether there is room for more. Without, a scan finds the candidate later.
func (p *pump) insert(s *jobState, c jobs.Candidate, most int) bool {
	if known := s.have[keyOf(&c)]; known != nil {
		*known = c // it may have begun on another node
		return true
	}
	all := maxCandidates
	if c.Began && s.job.Full() { // the others in memory cannot begin
		most, all = 2*maxCandidates, 2*maxCandidates
	}
	if len(s.list) >= most || p.total >= all {
		if !s.more || s.cursor >= c.Spread {
			s.cursor = c.Spread - 1
		}
		s.more = true
		return false
	}
	s.have[keyOf(&c)] = &c
	s.list = append(s.list, &c)
	p.total++
	return true
}

// scan reads the waiting tasks of a job, and keeps those of devices that are connected here.
func (p *pump) scan(ctx context.Context, s *jobState) error {
	after := int64(-1)
	if s.more && s.round == s.job.Round && s.size == s.job.RoundN && (!s.left || s.job.Full()) {
		after = s.cursor
	} else {
		s.left = false
	}
	s.round, s.size, s.waiting, s.least = s.job.Round, s.job.RoundN, s.job.Counts.Waiting, s.job.Counts.Waiting
	s.scannedAt, s.more = time.Now(), false
	for rows := 0; rows < scanRows; {
		limited, cancel := context.WithTimeout(ctx, readTime)
		list, err := p.r.Store.Waiting(limited, s.job.ID, after, scanPage)
		cancel()
		if err != nil {
			s.scannedAt = time.Time{}
			return err
		}
		for i := range list {
			switch {
			case !p.r.Devices.IsHere(list[i].Device):
			case !list[i].Began && s.job.Full():
				s.left = true
			case !p.insert(s, list[i], maxOfJob):
				s.cursor = after
				return nil
			}
			after = list[i].Spread
		}
		if len(list) < scanPage {
			return nil
		}
		rows += len(list)
	}
	s.cursor, s.more = after, true
	return nil
}

// wish is a candidate with its device's slot.
type wish struct {
	jobs.Candidate
	slot *dispatch.Reservation
}

// begin begins what may begin now, in groups.
func (p *pump) begin(ctx context.Context) error {
	for ctx.Err() == nil && !p.r.ends.isBlocked() && p.r.MayBegin() {
		wishes := p.choose()
		if len(wishes) == 0 {
			return nil
		}
		if err := p.commit(ctx, wishes); err != nil {
			return err
		}
	}
	return nil
}

// byAge returns the jobs with candidates, those with the oldest first: of each device only the oldest
// task may begin.
func (p *pump) byAge() []*jobState {
	type aged struct {
		seq int64
		*jobState
	}
	var list []aged
	for _, s := range p.jobs {
		if len(s.list) > 0 {
			oldest := slices.MinFunc(s.list, func(a, b *jobs.Candidate) int { return cmp.Compare(a.Seq, b.Seq) })
			list = append(list, aged{oldest.Seq, s})
		}
	}
	slices.SortFunc(list, func(a, b aged) int { return cmp.Or(cmp.Compare(a.seq, b.seq), cmp.Compare(a.job.ID, b.job.ID)) })
	states := make([]*jobState, len(list))
	for i := range list {
		states[i] = list[i].jobState
	}
	return states
}

// choose takes candidates whose jobs let them begin, and reserves their devices.
func (p *pump) choose() (wishes []wish) {
	now := p.r.Store.Now()
	most := min(p.batch, maxRunning-int(p.r.stats.Running.Load()))
	chosen := map[devices.ID]bool{}
	for _, s := range p.byAge() {
		if len(wishes) >= most {
			break
		}
		room := s.job.Room(now)
		kept := s.list[:0]
		for i := range s.list {
			c := s.list[i]
			if len(wishes) >= most || !room.Has(c.Began) {
				kept = append(kept, c)
				continue
			}
			if slot := p.reserve(s, c, chosen, now); slot != nil {
				wishes = append(wishes, wish{*c, slot})
				chosen[c.Device] = true
				room.Take(c.Began)
			}
			delete(s.have, keyOf(c))
			p.total--
		}
		clear(s.list[len(kept):])
		s.list = kept
	}
	return wishes
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
	slot, err := p.r.Devices.Reserve(c.Device)
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
		p.r.setRunning(t.Device, true)
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
