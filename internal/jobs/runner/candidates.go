package runner

import (
	"context"
	"slices"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/jobs"
)

// The waiting tasks that the pump keeps in memory, and how they are read.

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

	scannedAt   time.Time // zero: never
	round, size int64     // of the job at the last scan
	cursor      int64     // of a scan that is not complete
	more        bool
	left        bool // the scan left tasks out that the stage did not let begin
}

// isRetried reports whether ended tasks of a job are to be repeated since an earlier state of it.
func isRetried(before, after *jobs.Job) bool {
	ended := func(j *jobs.Job) int64 { return j.Counts.Total() - j.Counts.Open() }
	return ended(after) < ended(before) || slices.ContainsFunc([]jobs.Outcome{jobs.Failed, jobs.Refused, jobs.Expired, jobs.CancelledT}, func(o jobs.Outcome) bool {
		return after.Counts.Of(o) < before.Counts.Of(o)
	})
}

// needsScan reports whether there may be waiting tasks that are not in memory; room is whether it can take more. One that was given
// back needs none: the node that gave it back looks at its device again, and so does one to which the device went meanwhile.
func (s *jobState) needsScan(now time.Time, room bool) bool {
	if s.job.State != jobs.Running || s.job.Counts.Waiting == 0 || !s.job.IsKnown() || !s.job.BeginsByItself() {
		return false
	}
	switch ago := now.Sub(s.scannedAt); {
	case s.scannedAt.IsZero(), s.round != s.job.Round, s.size != s.job.RoundN:
		return true
	case s.left && !s.job.Full(): // the stage has opened
		return true
	case s.more && (s.job.Full() || room && len(s.list) < maxOfJob/2):
		return true
	default:
		return ago > rescanEvery
	}
}

// read reads the waiting tasks of devices that are connected here, for as long as this pass has, and leaves the others in arrived.
func (p *pump) read(ctx context.Context, arrived map[devices.ID]struct{}) error {
	var ids []devices.ID
	for id := range arrived {
		if !p.r.Devices.IsHere(id) {
			delete(arrived, id)
			continue
		}
		ids = append(ids, id)
	}
	g := gates{p, p.r.Store.Now(), map[string]bool{}}
	for len(ids) > 0 {
		part := ids[:min(arrivedBatch, len(ids))]
		held, err := p.readQueues(ctx, part, nil, &g)
		if err == nil && len(held) > 0 {
			_, err = p.readQueues(ctx, held, g.closed(), &g)
		}
		if err != nil {
			return err
		}
		for _, id := range held {
			p.r.lookAgain(id)
		}
		for _, id := range part {
			delete(arrived, id)
		}
		if ids = ids[len(part):]; time.Now().After(p.until) {
			return nil
		}
	}
	return nil
}

// readQueues reads the next waiting tasks of devices, without those of some jobs, and returns the devices that may have
// more, while no job lets one of these begin.
func (p *pump) readQueues(ctx context.Context, ids []devices.ID, without []string, g *gates) (held []devices.ID, err error) {
	ctx, cancel := context.WithTimeout(ctx, readTime)
	defer cancel()
	list, running, err := p.r.Store.WaitingOf(ctx, ids, perDevice, without)
	if err != nil {
		return nil, err
	}
	for _, id := range running { // perhaps on the node that it came from, which may give the task back
		if !p.r.isRunning(id) {
			p.r.lookAt(id, againAfter)
		}
	}
	for i := range list {
		if _, known := g.open[list[i].Job]; known && p.jobs[list[i].Job] == nil {
			continue // its job has ended
		}
		if err := p.add(ctx, list[i]); err != nil {
			return nil, err
		}
		if p.jobs[list[i].Job] == nil {
			g.open[list[i].Job] = false
		}
	}
	for first, n := 0, 0; first < len(list); first = n { // the tasks of one device
		for n = first + 1; n < len(list) && list[n].Device == list[first].Device; n++ {
		}
		if n-first == perDevice && !slices.ContainsFunc(list[first:n], g.begins) {
			held = append(held, list[first].Device)
		}
	}
	return held, nil
}

// gates are those of the jobs at one moment: a window takes some time to compute.
type gates struct {
	p    *pump
	now  time.Time
	open map[string]bool // by job; those that were asked for
}

func (g *gates) isOpen(s *jobState) bool {
	open, known := g.open[s.job.ID]
	if !known {
		gate, _ := s.job.Gate(g.now)
		open = gate == jobs.WaitNone
		g.open[s.job.ID] = open
	}
	return open
}

// begins reports whether a task is due and its job lets it begin.
func (g *gates) begins(c jobs.Candidate) bool {
	s := g.p.jobs[c.Job]
	return s != nil && !c.DueAt.After(g.now) && g.isOpen(s) && (c.Began || !s.job.Full())
}

// closed returns the jobs that let no task begin.
func (g *gates) closed() (ids []string) {
	for _, s := range g.p.jobs {
		g.isOpen(s)
	}
	for id, open := range g.open {
		if !open {
			ids = append(ids, id)
		}
	}
	return ids
}

// add takes a candidate, of a job that may be new to this node.
func (p *pump) add(ctx context.Context, c jobs.Candidate) error {
	s := p.jobs[c.Job]
	if s == nil {
		j, err := p.r.Store.Job(ctx, c.Job)
		if devices.CodeOf(err) == devices.CodeNotFound {
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

// insert reports whether there is room for more. Without, a scan finds the candidate later. Where the memory is full, jobs with
// more candidates than others leave their room to those with fewer.
func (p *pump) insert(s *jobState, c jobs.Candidate, most int) bool {
	if !s.job.BeginsByItself() {
		return true
	}
	if known := s.have[keyOf(&c)]; known != nil {
		*known = c // it may have begun on another node
		return true
	}
	all := maxCandidates
	if c.Began && s.job.Full() { // the others in memory cannot begin
		most, all = maxRepeated, maxRepeated
	}
	if len(s.list) >= most || p.total >= all && !p.makeRoom(s) {
		s.skip(&c)
		return false
	}
	s.have[keyOf(&c)] = &c
	s.list = append(s.list, &c)
	p.total++
	return true
}

// skip leaves a candidate to a later scan.
func (s *jobState) skip(c *jobs.Candidate) {
	if !s.more || s.cursor >= c.Spread {
		s.cursor = c.Spread - 1
	}
	s.more = true
}

// hasRoom reports whether the memory takes candidates of a job: each has its part of it, and what others leave free.
func (p *pump) hasRoom(s *jobState) bool {
	return p.total < maxCandidates || len(s.list) < maxCandidates/len(p.jobs)
}

// makeRoom drops a candidate of the job with the most of them for one with less than its part, and reports whether it has.
func (p *pump) makeRoom(s *jobState) bool {
	if !p.hasRoom(s) {
		return false
	}
	largest := s
	for _, other := range p.jobs {
		if len(other.list) > len(largest.list) {
			largest = other
		}
	}
	if largest == s {
		return false
	}
	last := len(largest.list) - 1
	c := largest.list[last]
	largest.skip(c)
	delete(largest.have, keyOf(c))
	largest.list[last] = nil
	largest.list = largest.list[:last]
	p.total--
	return true
}

// scanAll scans the jobs that need it, for as long as this pass has, and reports whether some of it is left.
func (p *pump) scanAll(ctx context.Context, now time.Time) (unread bool, err error) {
	p.until = time.Now().Add(passTime)
	for _, s := range p.jobs { // in an order that differs
		if !s.needsScan(now, p.hasRoom(s)) {
			continue
		}
		if unread || time.Now().After(p.until) {
			return true, nil
		}
		if unread, err = p.scan(ctx, s); err != nil {
			return false, err
		}
	}
	return unread, nil
}

// scan reads the waiting tasks of a job, and keeps those of devices that are connected here. It reports whether it goes on in the
// next pass.
func (p *pump) scan(ctx context.Context, s *jobState) (unread bool, err error) {
	after := int64(-1)
	if s.more && s.round == s.job.Round && s.size == s.job.RoundN && (!s.left || s.job.Full()) {
		after = s.cursor
	} else {
		s.left = false
	}
	s.round, s.size = s.job.Round, s.job.RoundN
	s.scannedAt, s.more = time.Now(), false
	for {
		limited, cancel := context.WithTimeout(ctx, readTime)
		list, err := p.r.Store.Waiting(limited, s.job.ID, after, scanPage)
		cancel()
		if err != nil {
			s.scannedAt = time.Time{}
			return false, err
		}
		for i := range list {
			switch {
			case !p.r.Devices.IsHere(list[i].Device):
			case !list[i].Began && s.job.Full():
				s.left = true
			case !p.insert(s, list[i], maxOfJob):
				s.cursor = after
				return false, nil
			}
			after = list[i].Spread
		}
		if len(list) < scanPage {
			return false, nil
		}
		if time.Now().After(p.until) {
			s.cursor, s.more = after, true
			return true, nil
		}
	}
}
