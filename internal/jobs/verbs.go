package jobs

import (
	"time"

	"fleetd/internal/devices"
)

// Verbs of people. Each returns an error of CodeConflict if the job's state does not allow it.

// Pause stops tasks from beginning; those that run end by themselves.
func (j *Job) Pause(reason string) error {
	if j.State == Paused || j.State == Halted || !j.State.Open() {
		return j.conflict("paused", "a job that is open and neither paused nor halted")
	}
	j.Before, j.State, j.Reason = j.State, Paused, reason
	return nil
}

// Resume continues a paused or halted job. A stage that did not pass opens as many tasks as it
// misses successes; the stop rule counts from here on as before, so that it may halt at the next failure.
func (j *Job) Resume(now time.Time) error {
	if j.State != Paused && j.State != Halted {
		return j.conflict("resumed", "a paused or halted job")
	}
	if j.Reason == ReasonStage && j.Stage < len(j.Spec.Stages) {
		j.Opened = j.Started + j.missing()
	}
	j.State, j.Reason, j.Before = j.Before, "", ""
	j.Settle(now)
	return nil
}

// Cancel ends the job: its waiting tasks end as cancelled (Store.EndWaiting), running ones by
// themselves; it has ended when the last one has, so that the periodic work finds it.
func (j *Job) Cancel(now time.Time) error {
	if !j.State.Open() {
		return j.conflict("cancelled", "an open job")
	}
	j.State, j.Reserved = Cancelled, 0
	j.Settle(now)
	return nil
}

// Advance opens the next stage, whether this one has passed or not.
func (j *Job) Advance(now time.Time) error {
	if j.State != Running && !(j.State == Halted && j.Reason == ReasonStage) || j.Stage >= len(j.Spec.Stages) {
		return j.conflict("advanced", "a running job with a stage that is not the last")
	}
	if j.State == Halted {
		j.State, j.Reason, j.Before = j.Before, "", ""
	}
	j.nextStage(now)
	j.Settle(now)
	return nil
}

// Reopen makes a job that is done run again, for tasks that are to be repeated. A schedule that has come to its end does
// not begin again.
func (j *Job) Reopen(now time.Time) error {
	if j.State == Cancelled || j.State == Preparing {
		return j.conflict("retried", "a job that was not cancelled")
	}
	if j.State == Done || j.State == Scheduled {
		j.State, j.Reason, j.EndedAt = Running, "", time.Time{}
		if !j.Until.After(now.Add(time.Minute)) {
			j.Until = now.Add(DefaultUntil)
			if j.Repeats() {
				j.NextAt = j.Until.Add(time.Microsecond)
			}
		}
	}
	return nil
}

func (j *Job) conflict(done, needs string) error {
	return devices.Errorf(devices.CodeConflict, "job %s is %s and cannot be %s; that needs %s", j.ID, j.State, done, needs)
}
