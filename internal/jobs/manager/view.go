package manager

import (
	"math"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/jobs"
)

// jobView returns a job as the API shows it.
func jobView(j *jobs.Job) api.Job {
	c := &j.Counts
	out := api.Job{ID: j.ID, Group: j.Group, State: string(j.State), Reason: j.Reason, Action: j.Action, Select: j.Spec.Select, Spec: j.Spec, Round: j.Round, Until: at(j.Until), Missed: j.Missed,
		CreatedBy: j.OwnerName, CreatedAt: at(j.CreatedAt), BegunAt: at(j.BegunAt), EndedAt: at(j.EndedAt),
		Counts: api.JobCounts{Total: c.Total(), Waiting: c.Waiting, Running: c.Running, OK: c.Of(jobs.OK), Failed: c.Of(jobs.Failed), Unknown: c.Of(jobs.Unknown),
			Refused: c.Of(jobs.Refused), Expired: c.Of(jobs.Expired), Cancelled: c.Of(jobs.CancelledT), Already: c.Of(jobs.Already),
			Superseded: c.Of(jobs.Superseded), Gone: c.Of(jobs.Gone)}}
	if n := len(j.Spec.Stages); n > 0 {
		out.Stage = min(j.Stage+1, n)
	}
	if j.IsOnHold() {
		out.Reason = jobs.ReasonHold
	}
	if j.State.Open() && j.State != jobs.Halted && (j.Repeats() || j.State == jobs.Scheduled) {
		out.NextAt = at(j.NextAt)
	}
	return out
}

func at(t time.Time) api.Time {
	if t.IsZero() {
		return api.Time{}
	}
	return api.At(t.UTC())
}

// taskView returns a task as the API shows it; why is the reason of a waiting one.
func taskView(t *jobs.Task, why jobs.Wait) api.Task {
	out := api.Task{Job: t.Job, Round: t.Round, Device: string(t.Device), State: string(t.State), Reason: string(why), DueAt: at(t.DueAt), Attempt: t.Attempt,
		Outcome: string(t.Outcome), Code: t.Code, Detail: t.Detail, Result: t.Result, Late: t.Late, Node: t.Node, Call: t.Call, BegunAt: at(t.BegunAt), EndedAt: at(t.EndedAt)}
	if t.DueAt.Equal(jobs.NotByItself) {
		out.DueAt = api.Time{}
	}
	if r := t.Rollout; r != nil && t.Target != "" {
		out.Firmware = &api.TaskFirmware{Phase: string(t.Phase), Proven: r.Proven, Before: t.Before, Offers: r.Offers, Flashes: r.Flashes, Restarts: r.Restarts, Bytes: r.Bytes, Size: r.Size}
		if t.Phase == jobs.PhaseProving {
			out.Firmware.Gate = r.Gate
		}
	}
	if !t.BegunAt.IsZero() && !t.EndedAt.IsZero() {
		out.DurationMS = max(0, t.EndedAt.Sub(t.BegunAt).Milliseconds())
	}
	return out
}

// estimate returns how long the pace takes for n tasks, in whole seconds: 0 only if there is none, or no limit.
func estimate(pace *api.JobPace, n int64) time.Duration {
	rate, err := jobs.ParseRate(pace.Rate)
	if err != nil || n == 0 || rate.Interval > math.MaxInt64/time.Duration(n) {
		return 0
	}
	d := rate.Interval * time.Duration(n)
	if whole := d.Truncate(time.Second); whole != d {
		return whole + time.Second
	}
	return d
}
