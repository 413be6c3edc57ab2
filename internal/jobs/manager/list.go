package manager

import (
	"context"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
)

// Limits of lists.
const (
	defaultLimit = 100
	maxLimit     = 1000
	maxQueues    = 50 // queues of devices that one page of tasks looks up
)

// Query selects jobs of a list; empty members select all.
type Query struct {
	State, Action, Device, Group, Cursor string
	Open, Own                            bool // only jobs that have not ended, or that the caller has created
	Limit                                int  // 1 to 1000; 0: 100
}

// TaskQuery selects tasks of a job.
type TaskQuery struct {
	Job, Outcome, Reason, Cursor string
	Running                      bool // only tasks that run
	Limit                        int  // 1 to 1000; 0: 100
}

func limitOf(n int) int {
	if n <= 0 {
		return defaultLimit
	}
	return min(n, maxLimit)
}

// List returns jobs that the caller may see, newest first.
func (m *Manager) List(ctx context.Context, p access.Principal, q Query) (api.List[api.Job], error) {
	out := api.List[api.Job]{Items: []api.Job{}}
	if err := m.Fleet.Permit(ctx, p, access.ScopeJobsRead, ""); err != nil {
		return out, err
	}
	f := jobs.Filter{State: jobs.State(q.State), Open: q.Open, Action: q.Action, Group: q.Group, After: q.Cursor, Limit: limitOf(q.Limit)}
	if q.Device != "" {
		id, err := devices.ParseID(q.Device)
		if err != nil {
			return out, devices.Errorf(devices.CodeBadRequest, "device: %v", err)
		}
		if err := m.Fleet.Permit(ctx, p, access.ScopeJobsRead, id); err != nil {
			return out, err
		}
		f.Device = id
	}
	if q.Own || p.Caller.OwnJobsOnly() {
		f.Owner = p.Self()
	}
	list, next, err := m.Store.Jobs(ctx, f)
	if err != nil {
		return out, err
	}
	for i := range list {
		out.Items = append(out.Items, jobView(&list[i]))
	}
	out.NextCursor = next
	return out, nil
}

// Get returns a job that the caller may see.
func (m *Manager) Get(ctx context.Context, p access.Principal, id string) (api.Job, error) {
	j, err := m.job(ctx, p, access.ScopeJobsRead, id)
	if err != nil {
		return api.Job{}, err
	}
	return jobView(&j), nil
}

// Tasks returns tasks of a job, in order of device and round. With Reason a page may be short
// although more follow.
func (m *Manager) Tasks(ctx context.Context, p access.Principal, q TaskQuery) (api.List[api.Task], error) {
	out := api.List[api.Task]{Items: []api.Task{}}
	j, err := m.job(ctx, p, access.ScopeJobsRead, q.Job)
	if err != nil {
		return out, err
	}
	if q.Outcome != "" && !jobs.IsOutcome(q.Outcome) {
		return out, devices.Errorf(devices.CodeBadRequest, "unknown outcome %q", devices.Clip(q.Outcome))
	}
	list, next, err := m.Store.Tasks(ctx, jobs.TaskFilter{Job: j.ID, Outcome: jobs.Outcome(q.Outcome), Open: q.Reason != "", Running: q.Running, After: q.Cursor, Limit: limitOf(q.Limit)})
	if err != nil {
		return out, err
	}
	views, err := m.explain(ctx, &j, list, true)
	if err != nil {
		return out, err
	}
	for _, t := range views {
		if q.Reason == "" || t.Reason == q.Reason {
			out.Items = append(out.Items, t)
		}
	}
	out.NextCursor = next
	return out, nil
}

// EachTask calls f with all tasks of a job, a page at a time, in order of device and round.
func (m *Manager) EachTask(ctx context.Context, p access.Principal, id string, f func([]api.Task) error) error {
	j, err := m.job(ctx, p, access.ScopeJobsRead, id)
	if err != nil {
		return err
	}
	q := jobs.TaskFilter{Job: j.ID, Limit: maxLimit}
	for {
		list, next, err := m.Store.Tasks(ctx, q)
		if err != nil {
			return err
		}
		views, err := m.explain(ctx, &j, list, false)
		if err != nil {
			return err
		}
		if len(views) > 0 {
			if err := f(views); err != nil {
				return err
			}
		}
		if next == "" {
			return nil
		}
		q.After = next
	}
}

// explain returns tasks of a job with the reasons of those that wait. With queues it looks up
// whether older tasks of their devices are ahead, where nothing else holds them up.
func (m *Manager) explain(ctx context.Context, j *jobs.Job, list []jobs.Task, queues bool) ([]api.Task, error) {
	now := m.Store.Now()
	var ids []devices.ID
	for i := range list {
		if list[i].State == jobs.TaskWaiting {
			ids = append(ids, list[i].Device)
		}
	}
	known, err := m.views(ctx, ids)
	if err != nil {
		return nil, err
	}
	out := make([]api.Task, 0, len(list))
	var held holders
	looked := 0
	for i := range list {
		t := &list[i]
		if t.State != jobs.TaskWaiting {
			out = append(out, taskView(t, jobs.WaitNone))
			continue
		}
		v := known[t.Device]
		why := m.waitOf(j, t, &v, false, now)
		if why == jobs.WaitNone && queues && looked < maxQueues {
			looked++
			queue, err := m.Store.Queue(ctx, t.Device)
			if err != nil {
				return nil, err
			}
			if isBehind(queue, t, now) {
				why = jobs.WaitOrder
			}
		}
		out = append(out, taskView(t, why))
		held.add(len(out)-1, j, why, &v)
	}
	return out, m.askHolders(ctx, held, out)
}

// views returns the devices that are known, by id.
func (m *Manager) views(ctx context.Context, ids []devices.ID) (map[devices.ID]devices.View, error) {
	out := make(map[devices.ID]devices.View, len(ids))
	if len(ids) == 0 {
		return out, nil
	}
	list, err := m.Fleet.Views(ctx, ids)
	for _, v := range list {
		out[v.Device.ID] = v
	}
	return out, err
}

func (m *Manager) waitOf(j *jobs.Job, t *jobs.Task, v *devices.View, ahead bool, now time.Time) jobs.Wait {
	connected := v.State == devices.StateOnline || v.State == devices.StateContested && v.Presence.Online
	return jobs.WaitOf(j, t, connected, v.Dormant, ahead, now)
}

// isAhead reports whether a task lets later ones of its device wait.
func isAhead(q *jobs.Queued, now time.Time) bool {
	if q.Task.State == jobs.TaskRunning {
		return true
	}
	return q.Job.GateOf(&q.Task, now) == jobs.WaitNone && !q.Task.DueAt.After(now)
}

// isBehind reports whether another task of the queue comes before t.
func isBehind(queue []jobs.Queued, t *jobs.Task, now time.Time) bool {
	for i := range queue {
		q := &queue[i]
		if q.Task.Job == t.Job && q.Task.Round == t.Round {
			return false
		}
		if isAhead(q, now) {
			return true
		}
	}
	return false
}

// Queue returns the open tasks of a device in their order. A limited key sees those of its own
// jobs.
func (m *Manager) Queue(ctx context.Context, p access.Principal, device devices.ID) ([]api.Task, error) {
	if err := m.Fleet.Permit(ctx, p, access.ScopeJobsRead, device); err != nil {
		return nil, err
	}
	if err := m.Fleet.Registry().CheckKnown(device); err != nil {
		return nil, err
	}
	return m.queue(ctx, p, device, func(*jobs.Job) bool { return true })
}

// queue returns those of the open tasks of a device whose jobs are wanted.
func (m *Manager) queue(ctx context.Context, p access.Principal, device devices.ID, wanted func(*jobs.Job) bool) ([]api.Task, error) {
	queue, err := m.Store.Queue(ctx, device)
	if err != nil {
		return nil, err
	}
	views, err := m.views(ctx, []devices.ID{device})
	if err != nil {
		return nil, err
	}
	now, v, ahead := m.Store.Now(), views[device], false
	out := []api.Task{}
	var held holders
	for i := range queue {
		q := &queue[i]
		why := jobs.WaitNone
		if q.Task.State == jobs.TaskWaiting {
			why = m.waitOf(&q.Job, &q.Task, &v, ahead, now)
		}
		ahead = ahead || isAhead(q, now)
		if wanted(&q.Job) && (!p.Caller.OwnJobsOnly() || p.Owns(q.Job.Owner)) {
			out = append(out, taskView(&q.Task, why))
			if q.Task.State == jobs.TaskWaiting {
				held.add(len(out)-1, &q.Job, why, &v)
			}
		}
	}
	return out, m.askHolders(ctx, held, out)
}
