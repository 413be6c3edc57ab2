package manager

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
	"fleetd/internal/selector"
	"fleetd/internal/timescale"
)

// Times of the periodic work.
var (
	turnEvery   = timescale.Of(time.Second)
	idleEvery   = timescale.Of(3 * time.Second) // while no job is due
	turnLasts   = timescale.Of(5 * time.Second)
	followEvery = timescale.Of(time.Minute)
	pruneEvery  = timescale.Of(time.Minute)
	countEvery  = timescale.Of(10 * time.Second) // the selection of a job that does not fit
)

const (
	turnTime = time.Minute // of one turn; the next one goes on
	// sliceTime is how long one pass does slices of long work, one of each job in turn: what is short is not late by more.
	sliceTime  = time.Second
	loseBatch  = 500
	pruneBatch = 1000
	pruneTime  = 250 * time.Millisecond // of one pass
)

// turn is the fleet's periodic work on jobs. At most one node does it at a time; what it does
// may be done twice, since every step is a transaction that looks at the job again.
type turn struct {
	m          *Manager
	until      time.Time // of the turn that this process has, by its own clock
	follows    map[string]*following
	superseded map[string]int64     // the round for which older ones were ended
	counted    map[string]time.Time // when the selection of a job that does not fit was counted last
	stuck      map[string]bool      // jobs that cannot go on, which was logged
	pruned     time.Time
	next       time.Time // when there is work at the latest, by this process's clock

	halts    bool // the database was restored, and jobs are to be halted
	planned  bool // with halts: it was a planned move
	reported bool // what is halted for that reason was logged

	sliceTime time.Duration // sliceTime, less in tests
	sliced    bool          // this pass has done a slice
	ends      time.Time     // until when it does more
	more      bool          // it left some
	nextJob   string        // the first job for which there was no time
	failed    bool          // the last turn failed, which was logged
}

// following is how far a job with follow has looked for devices that came to match its selection.
type following struct {
	next  time.Time        // when to look again
	known bool             // all devices were looked at
	at    devices.Position // of the registry at that time
	// While all devices are looked at: the last one, and the position when that began.
	after string
	began devices.Position
}

func newTurn(m *Manager) turn {
	return turn{m: m, follows: map[string]*following{}, superseded: map[string]int64{}, counted: map[string]time.Time{}, stuck: map[string]bool{}, sliceTime: sliceTime}
}

func (t *turn) run(ctx context.Context) {
	ticker := time.NewTicker(turnEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			if time.Now().Before(t.next) {
				continue
			}
		case <-t.m.wake:
		}
		limited, cancel := context.WithTimeout(ctx, turnTime)
		err := t.once(limited)
		cancel()
		switch {
		case ctx.Err() != nil:
			return
		case err != nil && !t.failed:
			t.m.Log.Warn("jobs: the periodic work failed; it is tried again each second", "error", err)
		case err == nil && t.failed:
			t.m.Log.Info("jobs: the periodic work goes on")
		}
		t.failed = err != nil
	}
}

// take reports whether this process may do the work now.
func (t *turn) take(ctx context.Context) (bool, error) {
	begun := time.Now()
	if begun.Before(t.until.Add(-turnLasts / 2)) {
		return true, nil
	}
	ok, err := t.m.Store.TakeTurn(ctx, t.m.Instance, turnLasts)
	if ok && err == nil {
		t.until = begun.Add(turnLasts)
	}
	return ok && err == nil, err
}

var errTurnLost = errors.New("another node does the periodic work")

func (t *turn) once(ctx context.Context) error {
	if err := t.restored(ctx); err != nil {
		return err
	}
	if ok, err := t.take(ctx); !ok {
		return err
	}
	if err := t.m.Store.CheckHistory(ctx); err != nil {
		return err
	}
	open, err := t.m.Store.Open(ctx)
	if err != nil {
		return err
	}
	seen := map[string]bool{}
	for i := range open {
		seen[open[i].ID] = true
	}
	first, _ := slices.BinarySearchFunc(open, t.nextJob, func(j jobs.Job, id string) int { return cmp.Compare(j.ID, id) })
	t.next, t.ends, t.sliced, t.more, t.nextJob = t.nextOf(open), time.Now().Add(t.sliceTime), false, false, ""
	var errs []error
	for queue := slices.Concat(open[first:], open[:first]); len(queue) > 0; {
		var again []jobs.Job
		for i := range queue {
			begun := time.Now()
			j, left, err := t.job(ctx, queue[i])
			if err := t.noteStuck(queue[i].ID, err); err != nil {
				errs = append(errs, err)
			}
			if ok, err := t.take(ctx); !ok {
				return errors.Join(append(errs, err)...)
			}
			if err == nil && left && !t.more {
				again = append(again, j)
				if err := t.rest(ctx, begun); err != nil {
					return err
				}
			}
		}
		queue = again
	}
	ended := func(id string) bool { return !seen[id] }
	maps.DeleteFunc(t.follows, func(id string, _ *following) bool { return ended(id) })
	maps.DeleteFunc(t.superseded, func(id string, _ int64) bool { return ended(id) })
	maps.DeleteFunc(t.counted, func(id string, _ time.Time) bool { return ended(id) })
	maps.DeleteFunc(t.stuck, func(id string, _ bool) bool { return ended(id) })
	err = errors.Join(append(errs, t.lose(ctx), t.m.Expire(ctx), t.prune(ctx))...)
	if t.more && err == nil {
		t.m.Poke()
	}
	return err
}

// restored halts the jobs of a database that was restored, and reports once what is halted for that reason.
func (t *turn) restored(ctx context.Context) error {
	if t.m.TakeRestored != nil && !t.halts {
		t.planned, t.halts = t.m.TakeRestored()
	}
	if t.halts {
		if err := t.m.Store.HaltRestored(ctx, t.planned); err != nil {
			return err
		}
		t.halts, t.reported = false, false
	}
	if t.reported {
		return nil
	}
	open, err := t.m.Store.Open(ctx)
	if err != nil {
		return err
	}
	t.reported = true
	halted, schedules := 0, 0
	for i := range open {
		if j := &open[i]; j.State == jobs.Halted && j.Reason == jobs.ReasonRestored {
			halted++
			if j.Repeats() {
				schedules++
			}
		}
	}
	if halted > 0 {
		t.m.Log.Warn("jobs are halted since the database was restored, and nothing of them runs until somebody resumes them: fleetd jobs --state halted shows them, fleetd jobs resume JOB continues one",
			"jobs", halted, "schedules", schedules)
	}
	return nil
}

// noteStuck logs that one job cannot go on, once. It returns errors that are not of this job alone.
func (t *turn) noteStuck(id string, err error) error {
	switch {
	case err == nil, errors.Is(err, jobs.ErrStale):
		delete(t.stuck, id)
		return nil
	case errors.Is(err, devices.ErrDatabase), errors.Is(err, errTurnLost), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case !t.stuck[id]:
		t.stuck[id] = true
		t.m.Log.Warn("a job cannot go on; it is tried again each second", "job", id, "error", err)
	}
	return nil
}

// nextOf returns when one of the jobs is to be moved on, at most idleEvery from now. Changes by
// other nodes are found then.
func (t *turn) nextOf(open []jobs.Job) time.Time {
	now := t.m.Store.Now()
	next := now.Add(idleEvery)
	for i := range open {
		j := &open[i]
		for _, at := range []time.Time{j.NextAt, j.Until, j.StageEnd} {
			if at.After(now) && at.Before(next) {
				next = at
			}
		}
		if j.State == jobs.Preparing && j.Reason == "" || j.Due(now) || !j.State.Open() && j.Counts.Waiting > 0 {
			next = now
		}
	}
	return time.Now().Add(next.Sub(now))
}

// lose ends the running tasks of processes that are lost.
func (t *turn) lose(ctx context.Context) error {
	self := t.m.Instance
	if t.m.Leases {
		self = ""
	}
	for {
		ended, _, err := t.m.Store.LoseRunning(ctx, self, loseBatch)
		if err != nil {
			return err
		}
		if len(ended) > 0 {
			t.m.Log.Warn("tasks of a process that has ended have an unknown outcome", "tasks", len(ended))
		}
		if len(ended) < loseBatch {
			return nil
		}
	}
}

// prune deletes jobs that ended long ago, and the oldest of keys with too many.
func (t *turn) prune(ctx context.Context) error {
	if time.Since(t.pruned) < pruneEvery {
		return nil
	}
	for begun := time.Now(); time.Since(begun) < pruneTime; {
		n, err := t.m.Store.Prune(ctx, t.m.Store.Now().Add(-jobs.Kept), pruneBatch)
		if n == 0 || err != nil {
			t.pruned = time.Now()
			return err
		}
	}
	t.next = time.Now() // it goes on with the next pass
	return nil
}

// slice reports whether this pass has time for a slice of long work of a job; one slice it always has. The first job without
// any has the first one of the next pass.
func (t *turn) slice(id string) bool {
	if t.sliced && time.Now().After(t.ends) {
		if !t.more {
			t.more, t.nextJob = true, id
		}
		return false
	}
	t.sliced = true
	return true
}

// rest pauses for as long as a slice has taken: calls meanwhile wait for the processor no longer than that.
func (t *turn) rest(ctx context.Context, begun time.Time) error {
	if !clock.Sleep(ctx, time.Since(begun)) {
		return ctx.Err()
	}
	return nil
}

// job moves one job on, by one slice at most where there is much to do; left is whether some of that remains.
func (t *turn) job(ctx context.Context, j jobs.Job) (_ jobs.Job, left bool, err error) {
	m := t.m
	if !j.State.Open() {
		return t.end(ctx, j, -1, jobs.CancelledT)
	}
	now := m.Store.Now()
	if m.Holder(j.Owner).Ended && j.State != jobs.Halted {
		j, err = m.Store.Edit(ctx, j.ID, func(j *jobs.Job) error {
			j.Halt(jobs.ReasonKey)
			return nil
		})
		return j, false, err
	}
	if !j.Until.After(now) {
		if j, left, err = t.end(ctx, j, -1, jobs.Expired); err != nil || left {
			return j, left, err
		}
		return j, false, t.settle(ctx, &j)
	}
	if j.Due(now) {
		if j, err = m.Store.Edit(ctx, j.ID, func(j *jobs.Job) error {
			if !j.Due(m.Store.Now()) {
				return jobs.ErrStale
			}
			j.Fire(m.Store.Now())
			return nil
		}); err != nil {
			return j, false, err
		}
	}
	if j.State == jobs.Preparing {
		if !t.slice(j.ID) {
			return j, true, nil
		}
		fits := false
		if j, fits, err = t.reserve(ctx, j); err != nil || !fits {
			return j, false, err
		}
		if j, err = t.preparePage(ctx, j); err != nil || j.State == jobs.Preparing {
			return j, true, err
		}
		t.follows[j.ID] = &following{next: time.Now().Add(followEvery)}
	}
	if j.State == jobs.Running && j.Round > 1 && t.superseded[j.ID] < j.Round {
		if j, left, err = t.end(ctx, j, j.Round, jobs.Superseded); err != nil || left {
			return j, left, err
		}
		t.superseded[j.ID] = j.Round
	}
	if err := t.m.bringBack(ctx, &j); err != nil {
		return j, false, err
	}
	if j.Spec.Follow && j.State == jobs.Running {
		if j, left, err = t.follow(ctx, j); err != nil || left {
			return j, left, err
		}
	}
	return j, false, t.settle(ctx, &j)
}

// end ends a slice of the waiting tasks of a job, of rounds below round, or with round < 0 of all; left is whether others may follow.
func (t *turn) end(ctx context.Context, j jobs.Job, round int64, outcome jobs.Outcome) (_ jobs.Job, left bool, err error) {
	if j.Counts.Waiting == 0 {
		return j, false, nil
	}
	if !t.slice(j.ID) {
		return j, true, nil
	}
	ended, j, err := t.m.Store.EndWaiting(ctx, j.ID, round, "", outcome, "", endBatch)
	return j, len(ended) == endBatch, err
}

// settle applies the time that has passed.
func (t *turn) settle(ctx context.Context, j *jobs.Job) error {
	after, now := *j, t.m.Store.Now()
	after.Settle(now)
	if after.State == j.State && after.Stage == j.Stage && after.StageEnd.Equal(j.StageEnd) {
		return nil
	}
	_, err := t.m.Store.Edit(ctx, j.ID, func(j *jobs.Job) error {
		j.Settle(now)
		return nil
	})
	return err
}

// reserve decides whether a job whose preparing begins has room for the tasks of its selection. fits is whether its tasks may be
// written now; while its devices are counted they may not.
func (t *turn) reserve(ctx context.Context, j jobs.Job) (_ jobs.Job, fits bool, err error) {
	if j.Reason == jobs.ReasonLimit && time.Since(t.counted[j.ID]) < countEvery {
		return j, false, nil
	}
	if j.Cursor != "" || j.Reserved > 0 || j.RoundN > 0 {
		return j, true, nil
	}
	room, err := t.m.Store.Room(ctx, j.Owner)
	if err != nil {
		return j, false, err
	}
	limited, cancel := context.WithTimeout(ctx, t.sliceTime)
	defer cancel()
	n, err := t.m.sizeOf(limited, &j, room)
	if err != nil && limited.Err() != nil && ctx.Err() == nil { // the fleet goes on counting: a later pass gets the number
		return j, false, nil
	}
	var syntax *selector.SyntaxError
	if errors.As(err, &syntax) { // of another version
		t.m.Log.Warn("a job is halted: its selection cannot be read", "job", j.ID, "error", err)
		j, err = t.m.Store.Edit(ctx, j.ID, func(j *jobs.Job) error {
			j.Halt(jobs.ReasonSelect)
			return nil
		})
		return j, false, err
	}
	if err != nil {
		return j, false, err
	}
	if j, err = t.m.Store.Reserve(ctx, j.ID, n); err == nil && j.Reason == jobs.ReasonLimit {
		t.counted[j.ID] = time.Now()
	}
	return j, err == nil && j.State == jobs.Preparing && j.Reason != jobs.ReasonLimit, err
}

// pageSize is how many rows one transaction of preparing writes.
const pageSize = 200

// preparePage writes the tasks of the next devices of a job's selection.
func (t *turn) preparePage(ctx context.Context, j jobs.Job) (jobs.Job, error) {
	if t.m.Compute != nil {
		leave, err := t.m.Compute(ctx)
		if err != nil {
			return j, err
		}
		defer leave()
	}
	at := j.CreatedAt
	if j.Repeats() {
		at = t.m.Store.Now()
	}
	ids, next, err := t.page(ctx, &j, j.Cursor)
	if err != nil {
		return j, err
	}
	return t.write(ctx, j, j.Cursor, next, ids, at, next == "")
}

// follow writes tasks of devices that came to match the selection of a job: of all of them, a page at a time, or of those that the
// registry has changed since then.
func (t *turn) follow(ctx context.Context, j jobs.Job) (_ jobs.Job, left bool, err error) {
	f := t.follows[j.ID]
	if f == nil { // another process has prepared it
		f = &following{}
		t.follows[j.ID] = f
	}
	if time.Now().Before(f.next) {
		return j, false, nil
	}
	if !t.slice(j.ID) {
		return j, true, nil
	}
	var ids []devices.ID
	next, whole := "", true
	if f.after == "" {
		f.began = t.m.Fleet.Registry().Position()
		if f.known {
			ids, whole, err = t.changed(ctx, &j, f.at)
		}
	}
	if err == nil && whole {
		ids, next, err = t.page(ctx, &j, f.after)
	}
	known := true
	for part := range slices.Chunk(ids, pageSize) {
		if err != nil {
			break
		}
		if j, err = t.write(ctx, j, "", "", part, t.m.Store.Now(), false); errors.Is(err, jobs.ErrOpenTasks) {
			known, err = false, nil // the next look at all devices adds the others
		}
	}
	if err != nil {
		return j, false, err
	}
	if f.after = next; next != "" {
		return j, true, nil
	}
	f.known, f.at, f.next = known, f.began, time.Now().Add(followEvery)
	return j, false, nil
}

// changed returns the devices that match a job's selection among those that the registry has changed since a position; whole is
// whether all devices are to be looked at: the changes are not in memory, or the selection depends on what devices report.
func (t *turn) changed(ctx context.Context, j *jobs.Job, since devices.Position) (ids []devices.ID, whole bool, err error) {
	sel, err := selector.Parse(j.Devices)
	if err != nil {
		return nil, false, err
	}
	changes, ok := t.m.Fleet.Registry().Recent(since)
	if !ok || sel.Identity() != nil {
		return nil, true, nil
	}
	seen := map[devices.ID]bool{}
	for i := range changes {
		if id := changes[i].Device; id != "" && !seen[id] && t.m.Fleet.Registry().Status(id, "").Known {
			seen[id] = true
			ids = append(ids, id)
		}
	}
	views, err := t.m.Fleet.Views(ctx, ids)
	ids = ids[:0]
	for i := range views {
		if d := &views[i].Device; sel.MatchIdentity(string(d.ID), d.Labels) {
			ids = append(ids, d.ID)
		}
	}
	return ids, false, err
}

// page returns devices of a job's selection after a cursor, and the next one; empty: the last
// page.
func (t *turn) page(ctx context.Context, j *jobs.Job, after string) (ids []devices.ID, next string, err error) {
	if f := j.Spec.Action.Firmware; f != nil && f.RollbackOf != "" { // the devices need not match the selection any more
		list, next, err := t.m.Store.Tasks(ctx, jobs.TaskFilter{Job: f.RollbackOf, After: after, Limit: pageSize})
		for i := range list {
			if t.m.Fleet.Registry().Status(list[i].Device, "").Known {
				ids = append(ids, list[i].Device)
			}
		}
		return ids, next, err
	}
	if len(j.Spec.Devices) > 0 { // at most PrepareBatch
		for _, id := range j.Spec.Devices {
			if t.m.Fleet.Registry().Status(devices.ID(id), "").Known {
				ids = append(ids, devices.ID(id))
			}
		}
		return ids, "", t.m.Fleet.Registry().CheckReady()
	}
	q, err := query(j.Devices, after)
	if err != nil {
		return nil, "", err
	}
	q.Limit = pageSize
	views, next, err := t.m.Fleet.List(ctx, q)
	for i := range views {
		ids = append(ids, views[i].Device.ID)
	}
	return ids, next, err
}

// write adds tasks for devices.
func (t *turn) write(ctx context.Context, j jobs.Job, cursor, next string, ids []devices.ID, at time.Time, last bool) (jobs.Job, error) {
	if len(ids) == 0 && !last && cursor == next {
		return j, nil
	}
	rows := make([]jobs.Task, 0, len(ids))
	for _, id := range ids {
		rows = append(rows, taskOf(&j, id, at))
	}
	if j.IsRollout() {
		var err error
		if rows, err = t.m.judged(ctx, &j, rows); err != nil {
			return j, err
		}
	}
	after, err := t.m.Store.AddTasks(ctx, j.ID, cursor, next, rows, last)
	if err != nil {
		return j, err
	}
	return after, nil
}
