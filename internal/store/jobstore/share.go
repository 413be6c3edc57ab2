package jobstore

import (
	"context"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
	"fleetd/internal/store/database"
)

// heldQuery reads what the keys hold. What a key held counts no longer when its job has halted because it ended.
const heldQuery = `SELECT owner, count(*), COALESCE(sum(waiting + running + reserved), 0) FROM jobs
 WHERE ended_at = 0 AND NOT (state = 'halted' AND reason = '` + jobs.ReasonKey + `') GROUP BY owner`

// held is what the keys hold of the limits of the fleet.
type held struct{ jobs, tasks map[string]int64 }

func newHeld() *held { return &held{map[string]int64{}, map[string]int64{}} }

func (h *held) scan(scan func(...any) error) (none struct{}, err error) {
	var owner string
	var open, tasks int64
	err = scan(&owner, &open, &tasks)
	h.jobs[owner], h.tasks[owner] = open, tasks
	return none, err
}

// checkShare returns an error if this owner may not have so many more open jobs and tasks. The caller has the lock of
// lockCreating.
func (t *transaction) checkShare(ctx context.Context, owner string, more, tasks int64) error {
	h, err := t.held(ctx)
	switch {
	case err != nil:
		return err
	case more > access.Share(jobs.MaxOpenJobs, h.jobs, owner, t.holder):
		return database.Rule(jobs.ErrOpenJobs)
	case tasks > access.Share(jobs.MaxOpenTasks, h.tasks, owner, t.holder):
		return database.Rule(jobs.ErrOpenTasks)
	}
	return nil
}

func (t *transaction) held(ctx context.Context) (*held, error) {
	h := newHeld()
	_, err := database.Collect(ctx, t.tx, h.scan, heldQuery)
	return h, err
}

// Room implements jobs.Store.
func (s *Store) Room(ctx context.Context, owner string) (int64, error) {
	h := newHeld()
	_, err := database.Read(ctx, s.host, "reading the shares of the keys", h.scan, heldQuery)
	return access.Share(jobs.MaxOpenTasks, h.tasks, owner, s.holder), err
}

// Reserve implements jobs.Store.
func (s *Store) Reserve(ctx context.Context, id string, n int64) (jobs.Job, error) {
	return s.change(ctx, "reserving the tasks of a job", id, true, func(ctx context.Context, t *transaction, row *locked) error {
		h, err := t.held(ctx)
		if err != nil {
			return err
		}
		before := row.Job
		row.Reserve(n, access.Share(jobs.MaxOpenTasks, h.tasks, row.Owner, t.holder), access.Share(jobs.MaxOpenTasks, nil, row.Owner, t.holder))
		row.touched = row.Reserved != before.Reserved || row.State != before.State || row.Reason != before.Reason
		return nil
	})
}

// Take implements jobs.Store.
func (s *Store) Take(ctx context.Context, id, owner, name string, f func(j *jobs.Job) error) (jobs.Job, error) {
	return s.change(ctx, "taking over a job", id, true, func(ctx context.Context, t *transaction, row *locked) error {
		if err := t.checkShare(ctx, owner, 1, row.Counts.Open()+row.Reserved); err != nil {
			return err
		}
		row.Owner, row.OwnerName, row.Key = owner, name, ""
		if err := f(&row.Job); err != nil {
			return database.Rule(err)
		}
		row.touched = true
		_, err := t.exec(ctx, `UPDATE jobs SET owner = $1, owner_name = $2, idem = '' WHERE job = $3`, owner, database.Clean(name), id)
		return err
	})
}

// full returns those devices of tasks in whose queues this owner has no place.
func (t *transaction) full(ctx context.Context, owner string, tasks []jobs.Task) (map[devices.ID]bool, error) {
	ids := make([]string, len(tasks))
	for i := range tasks {
		ids[i] = string(tasks[i].Device)
	}
	// One lookup for each device: for a list, the planner may read all waiting tasks.
	from, arg := `json_each($1) d CROSS JOIN tasks t ON t.device = d.value AND t.state = 'waiting' JOIN jobs j ON j.job = t.job`, any(textOf(ids))
	device, count := "d.value", "count(*)"
	if t.db.Postgres() {
		from, arg = `unnest($1::text[]) AS d(device) CROSS JOIN LATERAL (SELECT t.job, count(*) AS n FROM tasks t WHERE t.device = d.device AND t.state = 'waiting' GROUP BY t.job) t
 JOIN jobs j ON j.job = t.job`, ids
		device, count = "d.device", "sum(t.n)::bigint"
	}
	queues := map[devices.ID]map[string]int64{}
	_, err := database.Collect(ctx, t.tx, func(scan func(...any) error) (none struct{}, err error) {
		var id devices.ID
		var key string
		var n int64
		err = scan(&id, &key, &n)
		if queues[id] == nil {
			queues[id] = map[string]int64{}
		}
		queues[id][key] = n
		return none, err
	}, `SELECT `+device+`, j.owner, `+count+` FROM `+from+` WHERE NOT (j.state = 'halted' AND j.reason = '`+jobs.ReasonKey+`') GROUP BY `+device+`, j.owner`, arg)
	full := map[devices.ID]bool{}
	for id, queue := range queues {
		full[id] = access.Share(jobs.MaxDeviceTasks, queue, owner, t.holder) == 0
	}
	return full, err
}
