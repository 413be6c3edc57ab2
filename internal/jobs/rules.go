package jobs

import (
	"math"
	"slices"
	"time"

	"fleetd/internal/api"
)

// Standing reports whether the job goes on until its deadline, though no task is open.
func (j *Job) Standing() bool { return j.Spec.Follow || j.Repeats() }

// Repeats reports whether the job fires again and again.
func (j *Job) Repeats() bool { return j.Spec.When.Cron != "" }

// Idle reports whether the job is a schedule between two rounds, without an open task.
func (j *Job) Idle() bool {
	return j.Repeats() && (j.State == Scheduled || j.State == Paused && j.Before == Scheduled) && j.Counts.Open() == 0
}

// IsKnown reports whether this version knows the action. A job that a newer version has made may have another one.
func (j *Job) IsKnown() bool { return IsAction(j.Action) }

// AwaitsIdle reports whether tasks wait for the end of a conversation.
func (j *Job) AwaitsIdle() bool { return j.Spec.Busy == "wait" || j.IsRollout() }

// Zone returns the timezone of the job's schedule; it was checked.
func (j *Job) Zone() *time.Location {
	zone, err := time.LoadLocation(j.Spec.When.Timezone)
	if err != nil {
		return time.UTC
	}
	return zone
}

// New returns a job of a checked spec. devices is the text of its selection, limited to
// what its creator may select; text without terms is not valid.
func New(spec api.JobSpec, owner, ownerName, devices string, now time.Time) Job {
	now = now.UTC().Truncate(time.Microsecond)
	action, _ := ActionOf(&spec.Action) // Check has found one
	j := Job{ID: NewID(now), Owner: owner, OwnerName: ownerName, Devices: devices, Action: action.Name(), Spec: spec, State: Scheduled,
		NextAt: spec.When.At.UTC().Truncate(time.Microsecond), CreatedAt: now, Until: spec.When.Until.UTC().Truncate(time.Microsecond)}
	if spec.When.At.IsZero() {
		j.NextAt = time.Time{}
	}
	if j.Repeats() {
		from := now
		if j.NextAt.After(now) {
			from = j.NextAt.Add(-time.Microsecond)
		}
		j.NextAt, _ = j.schedule().Next(from) // Check has found one
	}
	return j
}

func (j *Job) schedule() Schedule { return Schedule{j.Spec.When.Cron, j.Zone()} }

// Due reports whether a scheduled job fires now, or a repeating one whose last round goes on.
func (j *Job) Due(now time.Time) bool {
	return (j.State == Scheduled || j.State == Running && j.Repeats() && j.Until.After(now)) && !j.NextAt.After(now)
}

// Fire begins a round: the job is Preparing until all its rows are written. A repeating job
// counts the firings that have passed as missed, but for the newest; if that is more than MissedAfter late, it is
// missed, too, and Fire reports false.
func (j *Job) Fire(now time.Time) bool {
	if !j.Due(now) {
		return false
	}
	if j.Repeats() {
		s := j.schedule()
		newest, _ := s.Last(now)
		passed := s.count(j.NextAt, now, maxMissed+1)
		j.NextAt, _ = s.Next(now)
		if now.Sub(newest) > MissedAfter {
			j.Missed += passed
			return false
		}
		j.Missed += passed - 1
		j.Round++
	}
	j.State, j.Cursor, j.Reserved, j.RoundN = Preparing, "", 0, 0
	j.Stage, j.StageEnd, j.Opened, j.Started, j.Held, j.PassedOK = 0, time.Time{}, 0, 0, 0, 0
	return true
}

// Prepared ends the preparing: stages count from the number of tasks that there are now.
func (j *Job) Prepared(now time.Time) {
	if j.State != Preparing {
		return
	}
	j.State = Running
	j.Cursor, j.Reserved = "", 0
	j.openStages()
	j.Settle(now)
}

// Added counts new tasks of the round, some of which have ended without beginning. If the round runs already, the current stage opens as
// many more as it wants more.
func (j *Job) Added(tasks int, ended map[Outcome]int, provable int) {
	j.Provable += int64(provable)
	before := j.wanted()
	j.RoundN += int64(tasks)
	waiting := int64(tasks)
	for o, n := range ended {
		j.Counts.Ended[outcomeIndex(o)] += int64(n)
		waiting -= int64(n)
	}
	j.Counts.Waiting += waiting
	j.Reserved = max(0, j.Reserved-waiting)
	if j.State != Preparing {
		j.Opened += j.wanted() - before
	}
}

// Reserve decides whether a job that is preparing may write the rows of n devices: share is how many open tasks its key may add
// now, and limit how many it could add to a fleet without any. A job that has to wait keeps its state with ReasonLimit.
func (j *Job) Reserve(n, share, limit int64) {
	switch {
	case j.State != Preparing || j.Reserved > 0 || j.RoundN > 0:
	case n <= share:
		j.Reserved, j.Reason = n, ""
	case n > limit:
		j.Halt(ReasonLimit)
	default:
		j.Reason = ReasonLimit
	}
}

// wants returns how many successes the stage wants in all.
func (j *Job) wants(stage int) int64 {
	ok := j.Spec.Stages[stage].OK
	n := ok.Number
	of := j.eligible()
	if n == 0 {
		n = ceilShare(ok.Percent, of)
	}
	return min(max(n, 1), of)
}

// ceilShare returns how many of a number a share in percent is, rounded up, but not for the error of a fraction.
func ceilShare(percent float64, of int64) int64 {
	return int64(math.Ceil(percent*float64(of)/100 - 1e-9))
}

// eligible is the number of the round's tasks that could be carried out. A job with stages has one round.
func (j *Job) eligible() int64 {
	return max(0, j.RoundN-j.Counts.Of(Refused)-j.Counts.Of(Already)-j.Counts.Of(Gone))
}

// wanted is what the current stage wants until it passes.
func (j *Job) wanted() int64 {
	if j.Stage >= len(j.Spec.Stages) || !j.StageEnd.IsZero() {
		return 0
	}
	return j.wants(j.Stage)
}

// missing returns how many successes the current stage wants beside those that it has, and those that may come of tasks which run
// or wait to be repeated.
func (j *Job) missing() int64 {
	return max(0, j.wants(j.Stage)-j.PassedOK-j.Counts.Running-j.Held)
}

// openStages lets as many tasks begin as the current stage misses successes.
func (j *Job) openStages() {
	if len(j.Spec.Stages) == 0 || j.Stage >= len(j.Spec.Stages) {
		j.Opened = math.MaxInt64
		return
	}
	j.Opened = max(j.Opened, j.Started+j.missing())
}

// Gate returns why this node may begin no task of the job now, and when that may change by itself; zero:
// it is not known. Tasks of a job with a closed gate are not due: they hold no other task up.
func (j *Job) Gate(now time.Time) (Wait, time.Time) {
	wait, at := j.FleetGate(now)
	if wait == WaitNone && !j.IsKnown() {
		return WaitNode, time.Time{}
	}
	return wait, at
}

// FleetGate is Gate for nodes that know the action.
func (j *Job) FleetGate(now time.Time) (Wait, time.Time) {
	switch j.State {
	case Running:
	case Paused:
		return WaitPaused, time.Time{}
	case Halted:
		return WaitHalted, time.Time{}
	default:
		return WaitLater, j.NextAt
	}
	if !j.Until.After(now) {
		return WaitLater, time.Time{} // its tasks are about to expire
	}
	if w := j.Spec.When.Window; w != nil {
		window := Window{Schedule{w.Cron, j.Zone()}, durationOf(w.For, 0)}
		if open, next := window.Open(now); !open {
			return WaitWindow, next
		}
	}
	if j.Full() && j.Held == 0 {
		return WaitStage, j.StageEnd
	}
	if j.Counts.Running >= int64(j.Spec.Pace.Concurrency) {
		return WaitPace, time.Time{}
	}
	if n, at := j.arrivals(now); n == 0 {
		return WaitPace, at
	}
	return WaitNone, time.Time{}
}

// GateOf is Gate for one waiting task: a stage may be open for those alone that are to be repeated.
func (j *Job) GateOf(t *Task, now time.Time) Wait {
	gate, _ := j.Gate(now)
	if (gate == WaitNone || gate == WaitPace) && j.IsFullFor(t) {
		return WaitStage
	}
	return gate
}

// IsOnHold reports whether the stage has passed and waits for Advance.
func (j *Job) IsOnHold() bool {
	return j.State == Running && j.Stage < len(j.Spec.Stages) && j.Spec.Stages[j.Stage].Hold && !j.StageEnd.IsZero()
}

// Full reports whether the stage lets no task begin for the first time.
func (j *Job) Full() bool { return j.Started >= j.Opened }

// IsFullFor reports whether the stage has no place for a task. The last places are for devices that can be proved, as far as there are any.
func (j *Job) IsFullFor(t *Task) bool {
	places := j.Opened - j.Started
	if !t.isProvable() {
		places -= j.Provable
	}
	return places <= 0 && !j.holds(t)
}

// rate returns the rate of the job's pace, which was checked.
func (j *Job) rate() Rate {
	rate, _ := ParseRate(j.Spec.Pace.Rate)
	return rate
}

// arrivals returns how many tasks the rate admits now, and when it admits the next one.
func (j *Job) arrivals(now time.Time) (int64, time.Time) {
	rate := j.rate()
	if rate.Interval == 0 {
		return math.MaxInt64, time.Time{}
	}
	tat := j.TAT
	if tat.Before(now) {
		tat = now
	}
	room := time.Duration(rate.Burst)*rate.Interval - tat.Sub(now)
	if n := int64(room / rate.Interval); n > 0 {
		return n, time.Time{}
	}
	return 0, now.Add(rate.Interval - room)
}

// SetPace changes the pace. A new rate counts from now on: what the old one has used does not count for it.
func (j *Job) SetPace(pace *api.JobPace) {
	if pace.Rate != j.Spec.Pace.Rate {
		j.TAT = time.Time{}
	}
	j.Spec.Pace = pace
}

// Room is how many waiting tasks of a job may begin now: in all, and for the first time.
type Room struct{ all, fresh int64 }

// Has reports whether there is room for a task that began before, or for one that did not.
func (r *Room) Has(began bool) bool { return r.all > 0 && (began || r.fresh > 0) }

// Take takes the room of one task.
func (r *Room) Take(began bool) {
	r.all--
	if !began {
		r.fresh--
	}
}

// Room returns how many waiting tasks may begin now.
func (j *Job) Room(now time.Time) Room {
	if gate, _ := j.Gate(now); gate != WaitNone {
		return Room{}
	}
	fits, _ := j.arrivals(now)
	return Room{all: min(fits, j.Counts.Waiting, int64(j.Spec.Pace.Concurrency)-j.Counts.Running), fresh: j.Opened - max(j.Started, 0)}
}

// Start counts a waiting task, for which there is Room, as running. Attempt is what it was while it waited.
func (j *Job) Start(now time.Time, t *Task) {
	j.Counts.Waiting--
	j.Counts.Running++
	switch {
	case j.holds(t):
		j.Held--
	case t.Round == j.Round:
		j.Started++
		j.countProvable(t, -1)
	}
	if rate := j.rate(); rate.Interval > 0 {
		if j.TAT.Before(now) {
			j.TAT = now
		}
		j.TAT = j.TAT.Add(rate.Interval)
	}
	if j.BegunAt.IsZero() {
		j.BegunAt = now
	}
}

// Return undoes Start.
func (j *Job) Return(t *Task) {
	j.Counts.Waiting++
	j.Counts.Running--
	switch {
	case j.holds(t):
		j.Held++
	case t.Round == j.Round:
		j.Started--
		j.countProvable(t, 1)
	}
	j.TAT = j.TAT.Add(-j.rate().Interval)
}

// countProvable counts a task that waits for its first attempt, or waits no more.
func (j *Job) countProvable(t *Task, n int64) {
	if t.isProvable() {
		j.Provable += n
	}
}

// holds reports whether a task keeps its place in the stage while it waits.
func (j *Job) holds(t *Task) bool { return t.Attempt > 0 && t.Round == j.Round }

// Retried returns a running task of the round to waiting, to be repeated. It has used its part of the rate, and keeps its place
// in the stage.
func (j *Job) Retried() {
	j.Counts.Waiting++
	j.Counts.Running--
	j.Held++
}

// RetryAt returns when a task with this outcome is due again, and false if it has ended. attempt is the number of attempts so far.
func (j *Job) RetryAt(o Outcome, attempt int, now time.Time) (time.Time, bool) {
	retry := j.Spec.Retry
	if retry == nil || attempt > retry.Failed || o != Failed && !(o == Unknown && j.Spec.Repeatable) {
		return time.Time{}, false
	}
	return now.Add(durationOf(retry.After, DefaultRetry)), true
}

// Record counts a running task that ended with this outcome, and applies the stop rule if the outcome may be what
// breaks it: a job that was resumed goes on until one more fails. Call Settle after the last one of a transaction.
func (j *Job) Record(t *Task, o Outcome) {
	before := j.done()
	j.Counts.Running--
	j.ended(t, o)
	if o == OK {
		j.PassedOK++
	}
	j.judge(before, harm(o))
}

// ended counts an outcome. The stop rule counts it in place of the harm that the open task had come to.
func (j *Job) ended(t *Task, o Outcome) {
	j.Counts.Ended[outcomeIndex(o)]++
	if t.IsHarmed() {
		j.Harmed--
	}
}

// judge applies the stop rule after a change: one more failed, or so many have ended that a share counts. before is what done was.
func (j *Job) judge(before int64, harmed bool) {
	s := j.Spec.Stop
	if j.Stage < len(j.Spec.Stages) && j.Spec.Stages[j.Stage].Stop != nil {
		s = j.Spec.Stages[j.Stage].Stop
	}
	if s != nil && (harmed || before < int64(s.Of) && j.done() >= int64(s.Of)) {
		j.stop(s)
	}
}

// harm reports whether a stop rule counts an outcome.
func harm(o Outcome) bool { return o == Failed || o == Unknown }

// done is the number of tasks that have ended, of those that could be carried out, with those that the stop rule counts already.
func (j *Job) done() int64 {
	c := &j.Counts
	return c.Total() - c.Open() - c.Of(Refused) - c.Of(Already) - c.Of(Gone) + j.Harmed
}

// RecordWaiting counts a waiting task that ended with this outcome.
func (j *Job) RecordWaiting(t *Task, o Outcome) {
	before := j.done()
	j.Counts.Waiting--
	if j.holds(t) {
		j.Held--
	} else {
		j.countProvable(t, -1)
	}
	j.ended(t, o)
	j.judge(before, harm(o))
}

// Correct moves the count of an ended task to another outcome. It never continues a halted job, nor
// opens or closes a stage that has passed.
func (j *Job) Correct(t *Task, o Outcome) {
	j.Counts.Ended[outcomeIndex(t.Outcome)]--
	j.Counts.Ended[outcomeIndex(o)]++
	switch {
	case o == OK:
		j.PassedOK++
	case t.Outcome == OK:
		j.PassedOK--
	}
}

// Again counts an ended task of the round as waiting.
func (j *Job) Again(t *Task) {
	j.Counts.Ended[outcomeIndex(t.Outcome)]--
	j.Counts.Waiting++
	if j.holds(t) {
		j.Held++
	} else {
		j.countProvable(t, 1)
	}
	if t.Outcome == OK {
		j.PassedOK--
	}
}

// stop halts a job whose stop rule is broken, also while a further round is prepared.
func (j *Job) stop(s *api.JobStop) {
	if j.State != Running && j.State != Paused && j.State != Preparing {
		return
	}
	ended := j.done()
	harmed := j.Counts.Of(Failed) + j.Counts.Of(Unknown) + j.Harmed
	over := s.Failed > 0 && harmed >= int64(s.Failed)
	if share, err := api.ParseAmount(s.Share); err == nil && ended >= int64(s.Of) {
		over = over || harmed >= ceilShare(share.Percent, ended)
	}
	if over {
		j.Halt(ReasonStop)
	}
}

// Halt halts an open job that a person may continue.
func (j *Job) Halt(reason string) {
	if !j.State.Open() || j.State == Halted {
		return
	}
	if j.State != Paused {
		j.Before = j.State
	}
	j.State, j.Reason = Halted, reason
}

// Settle moves a job on as far as its counts and the time allow: stages pass, halt or open, and a
// job without open tasks is done, or scheduled again. Every transaction that changes the
// job's tasks calls it last, and the periodic work for time that passes.
func (j *Job) Settle(now time.Time) {
	for j.State == Running && j.Stage < len(j.Spec.Stages) {
		if j.StageEnd.IsZero() {
			if j.PassedOK < j.wants(j.Stage) {
				if j.Counts.Running == 0 && j.Full() && j.Held == 0 && j.Counts.Waiting > 0 {
					j.Halt(ReasonStage)
				}
				break
			}
			j.StageEnd = now.Add(durationOf(j.Spec.Stages[j.Stage].Soak, 0))
		}
		if j.Spec.Stages[j.Stage].Hold || j.StageEnd.After(now) {
			break
		}
		j.nextStage(now)
	}
	switch {
	case j.State == Cancelled && j.Counts.Open() == 0 && j.EndedAt.IsZero():
		j.EndedAt = now
	case !j.State.Open() || j.Counts.Open() > 0:
	case !j.Until.After(now):
		j.finish(now)
	case j.State != Running: // also one that is preparing
	case j.Repeats():
		j.State = Scheduled
	case !j.Standing():
		j.finish(now)
	}
	if j.State == Scheduled && j.Repeats() && j.NextAt.After(j.Until) && j.Counts.Open() == 0 {
		j.finish(now)
	}
}

func (j *Job) nextStage(now time.Time) {
	j.Stage++
	j.StageEnd = time.Time{}
	j.openStages()
}

func (j *Job) finish(now time.Time) {
	j.State, j.EndedAt, j.Reserved = Done, now, 0
}

// AtRisk returns how many devices can come to harm before the job halts by itself, of total. Failures that are repeated count after
// their last attempt, and others begin meanwhile.
func AtRisk(spec *api.JobSpec, total int64) int64 {
	if spec.Retry != nil && spec.Retry.Failed > 0 {
		return total
	}
	most := total
	together := int64(spec.Pace.Concurrency)
	if s := spec.Stop; s != nil {
		if s.Failed > 0 {
			most = min(most, int64(s.Failed)+together)
		}
		if share, err := api.ParseAmount(s.Share); err == nil {
			most = min(most, max(int64(s.Of), ceilShare(share.Percent, total))+together)
		}
	}
	return min(most, total)
}

// WaitOf returns why a waiting task waits, as far as its job, its own due time and its device's connection and queue
// hold it up; WaitNone: they do not. ahead is whether an older task of the device is due or running.
func WaitOf(j *Job, t *Task, connected, dormant, ahead bool, now time.Time) Wait {
	gate := j.GateOf(t, now)
	switch {
	case gate == WaitPaused || gate == WaitHalted || gate == WaitLater:
		return gate
	case t.DueAt.Equal(NotByItself) && connected:
		return WaitLater
	case t.DueAt.After(now) && !t.DueAt.Equal(NotByItself):
		return WaitRetry
	case !connected && dormant:
		return WaitAsleep
	case !connected:
		return WaitOffline
	case gate != WaitNone:
		return gate
	case ahead:
		return WaitOrder
	}
	return WaitNone
}

// IsOutcome reports whether a text names an outcome.
func IsOutcome(text string) bool { return slices.Contains(Outcomes, Outcome(text)) }

// Uncount takes an ended task that is deleted out of the counts.
func (j *Job) Uncount(t *Task) {
	j.Counts.Ended[outcomeIndex(t.Outcome)]--
	if j.holds(t) {
		j.Started--
	}
}
