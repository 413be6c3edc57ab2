package manager

import (
	"context"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
)

// endBatch is how many tasks one transaction ends or repeats.
const endBatch = 500

const (
	// cancelTime limits how long a request ends waiting tasks; the periodic work ends the others.
	cancelTime = 500 * time.Millisecond
	retryTime  = 30 * time.Second
)

// VerbOptions are what comes with a verb.
type VerbOptions struct {
	Outcomes []string // of retry: the outcomes of tasks to be repeated; none: failed
	Reason   string   // of pause: for people
}

// Edit changes pace, deadline, note or stop rule of an open job.
func (m *Manager) Edit(ctx context.Context, p access.Principal, id string, e api.JobEdit) (api.Job, error) {
	j, err := m.edit(ctx, p, id, e)
	m.Fleet.NoteChange(p, "edit job", "", "job "+devices.Clip(id), err)
	return j, err
}

func (m *Manager) edit(ctx context.Context, p access.Principal, id string, e api.JobEdit) (api.Job, error) {
	seen, err := m.job(ctx, p, access.ScopeJobs, id)
	if err == nil {
		_, err = m.permitAction(ctx, p, &seen.Spec)
	}
	if err != nil {
		return api.Job{}, err
	}
	j, err := m.Store.Edit(ctx, id, func(j *jobs.Job) error {
		if now := jobView(j); e.IfMatch != "" && e.IfMatch != now.Revision() {
			return devices.Errorf(devices.CodeStale, "job %s was changed since it was read; read it again and repeat your change", j.ID)
		}
		if !j.State.Open() {
			return devices.Errorf(devices.CodeConflict, "job %s is %s and cannot be changed; only open jobs can", j.ID, j.State)
		}
		if err := jobs.CheckEdit(&e, j, m.Store.Now()); err != nil {
			return err
		}
		if e.Pace != nil {
			j.SetPace(e.Pace)
		}
		if e.Stop != nil {
			j.Spec.Stop = e.Stop
		}
		if e.Note != nil {
			j.Spec.Note = *e.Note
		}
		if e.Until != nil {
			j.Until = e.Until.UTC().Truncate(time.Microsecond)
			when := *j.Spec.When
			when.Until = api.At(j.Until)
			j.Spec.When = &when
		}
		return nil
	})
	if err != nil {
		return api.Job{}, err
	}
	return jobView(&j), nil
}

// Do applies a verb to a job: pause, resume, cancel, retry or advance.
func (m *Manager) Do(ctx context.Context, p access.Principal, id, verb string, o VerbOptions) (api.Job, error) {
	detail := "job " + devices.Clip(id)
	j, err := m.do(ctx, p, id, verb, o, &detail)
	m.Fleet.NoteChange(p, devices.Clip(verb)+" job", "", detail, err)
	return j, err
}

// do adds to the detail of the audit what the verb changes besides.
func (m *Manager) do(ctx context.Context, p access.Principal, id, verb string, o VerbOptions, detail *string) (api.Job, error) {
	seen, err := m.job(ctx, p, access.ScopeJobs, id)
	if err == nil && verb != "pause" && verb != "cancel" { // more of it happens
		_, err = m.permitAction(ctx, p, &seen.Spec)
	}
	if err != nil {
		return api.Job{}, err
	}
	var j jobs.Job
	now := m.Store.Now()
	switch verb {
	case "pause":
		j, err = m.Store.Edit(ctx, id, func(j *jobs.Job) error { return j.Pause(o.Reason) })
	case "resume":
		resume := func(j *jobs.Job) error { return j.Resume(now) }
		if seen.Reason != jobs.ReasonKey && !m.Holder(seen.Owner).Ended {
			j, err = m.Store.Edit(ctx, id, resume)
			break
		}
		*detail += ", which becomes that of this key and was that of " + seen.OwnerName + " (" + seen.Owner + ")"
		j, err = m.Store.Take(ctx, id, p.Owner(), p.Name(), resume)
	case "advance":
		j, err = m.Store.Edit(ctx, id, func(j *jobs.Job) error { return j.Advance(now) })
	case "cancel":
		j, err = m.cancel(ctx, id, now)
	case "retry":
		j, err = m.retry(ctx, id, o.Outcomes)
	default:
		err = devices.Errorf(devices.CodeBadRequest, "unknown verb %q; use pause, resume, cancel, retry or advance", devices.Clip(verb))
	}
	if err != nil {
		return api.Job{}, err
	}
	m.Poke()
	return jobView(&j), nil
}

// cancel ends a job, and its waiting tasks as far as there is time.
func (m *Manager) cancel(ctx context.Context, id string, now time.Time) (jobs.Job, error) {
	j, err := m.Store.Edit(ctx, id, func(j *jobs.Job) error { return j.Cancel(now) })
	if err != nil {
		return j, err
	}
	ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), 2*cancelTime)
	defer stop()
	for begun := time.Now(); j.Counts.Waiting > 0 && time.Since(begun) < cancelTime; {
		ended, next, err := m.Store.EndWaiting(ctx, id, -1, "", jobs.CancelledT, "", endBatch)
		if err != nil {
			break // it is cancelled all the same
		}
		if j = next; len(ended) < endBatch {
			break
		}
	}
	return j, nil
}

// retry returns ended tasks to waiting.
func (m *Manager) retry(ctx context.Context, id string, names []string) (jobs.Job, error) {
	outcomes := []jobs.Outcome{jobs.Failed}
	if len(names) > 0 {
		outcomes = nil
	}
	for _, name := range names {
		switch o := jobs.Outcome(name); o {
		case jobs.Failed, jobs.Unknown, jobs.Refused, jobs.Expired, jobs.CancelledT:
			outcomes = append(outcomes, o)
		default:
			return jobs.Job{}, devices.Errorf(devices.CodeBadRequest, "tasks with the outcome %q cannot be repeated; use failed, unknown, refused, expired or cancelled", devices.Clip(name))
		}
	}
	ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), retryTime)
	defer stop()
	before, err := m.Store.Job(ctx, id)
	if err != nil {
		return before, err
	}
	if before.State == jobs.Cancelled || before.State == jobs.Preparing {
		return before, (&before).Reopen(m.Store.Now())
	}
	// The position goes forward: a task that has failed again by now is not repeated once more.
	for after := devices.ID(""); ; {
		_, next, j, err := m.Store.Retry(ctx, id, before.Round, outcomes, after, endBatch)
		if err != nil || next == "" {
			return j, err
		}
		after = next
	}
}

// CancelTask ends a device's waiting task of a job. A task that runs is CodeConflict.
func (m *Manager) CancelTask(ctx context.Context, p access.Principal, device devices.ID, job string) error {
	err := m.cancelTask(ctx, p, device, job)
	m.Fleet.NoteChange(p, "cancel task", device, "job "+devices.Clip(job), err)
	return err
}

func (m *Manager) cancelTask(ctx context.Context, p access.Principal, device devices.ID, job string) error {
	if err := m.Fleet.Permit(ctx, p, access.ScopeJobs, device); err != nil {
		return err
	}
	j, err := m.job(ctx, p, access.ScopeJobs, job)
	if err != nil {
		return err
	}
	ended, _, err := m.Store.EndWaiting(ctx, j.ID, -1, device, jobs.CancelledT, "", endBatch)
	if err != nil {
		return err
	}
	if len(ended) == 0 {
		return devices.Errorf(devices.CodeConflict, "job %s has no waiting task for device %s; one that runs ends by itself", j.ID, device)
	}
	return nil
}
