package jobstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5/pgconn"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
	"fleetd/internal/store/database"
)

// Begin implements jobs.Store.
func (s *Store) Begin(ctx context.Context, node, instance string, list []jobs.Candidate) (begun []jobs.Task, changed []jobs.Change, err error) {
	if _, tested := s.history.get(); !tested && len(list) > 0 {
		if err := s.CheckHistory(ctx); err != nil {
			return nil, nil, err
		}
	}
	for len(list) > 0 {
		n := min(len(list), jobs.BeginBatch)
		var tasks []jobs.Task
		var rows []jobs.Change
		err := s.transact(ctx, "beginning tasks", func(ctx context.Context, t *transaction) (err error) {
			tasks, rows, err = t.begin(ctx, node, instance, list[:n])
			return err
		})
		switch {
		case errors.Is(err, errBackwards):
			tasks, rows = nil, nil // CheckHistory halts their jobs
			if err := s.CheckHistory(ctx); err != nil {
				return begun, changed, err
			}
		case errors.Is(err, devices.ErrUncertain):
			return append(begun, tasks...), changed, err
		case err != nil:
			return begun, changed, err
		}
		begun, changed, list = append(begun, tasks...), append(changed, rows...), list[n:]
	}
	return begun, changed, nil
}

// key identifies a task.
type key struct {
	job    string
	device devices.ID
	round  int64
}

func (t *transaction) begin(ctx context.Context, node, instance string, list []jobs.Candidate) ([]jobs.Task, []jobs.Change, error) {
	var ids, names []string
	wanted := make(map[key]bool, len(list))
	for _, c := range list {
		ids, names = append(ids, c.Job), append(names, string(c.Device))
		wanted[key{c.Job, c.Device, c.Round}] = true
	}
	if t.leases {
		var alive bool
		if err := t.tx.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM nodes WHERE instance = $1)`, instance).Scan(&alive); err != nil || !alive {
			return nil, nil, err
		}
	}
	all, err := t.lock(ctx, ids)
	if err != nil {
		return nil, nil, err
	}
	first, err := t.firstDue(ctx, all, sortedIDs(names))
	if err != nil {
		return nil, nil, err
	}
	// Those of a job in its own order, so that a limit does not favour the devices with the
	// smallest ids.
	first = slices.DeleteFunc(first, func(task jobs.Task) bool {
		return !wanted[key{task.Job, task.Device, task.Round}] || all[task.Job] == nil
	})
	slices.SortFunc(first, func(a, b jobs.Task) int {
		return cmp.Or(cmp.Compare(a.Job, b.Job), cmp.Compare(a.Spread, b.Spread), cmp.Compare(a.Device, b.Device))
	})
	var granted []jobs.Task
	for n := 0; len(first) > 0; first, n = first[n:], 0 {
		j := all[first[0].Job]
		for room := j.Room(t.now); n < len(first) && first[n].Job == j.ID; n++ {
			if began := first[n].Attempt > 0; room.Has(began) {
				room.Take(began)
				j.Start(t.now, &first[n])
				j.touched = true
				granted = append(granted, first[n])
			}
		}
	}
	if err := t.start(ctx, node, instance, granted); err != nil {
		return nil, nil, err
	}
	changed, err := t.write(ctx, all)
	if err == nil && len(granted) > 0 {
		err = t.countBegin(ctx) // last, since other nodes wait for the lock of its row
	}
	return granted, changed, err
}

// firstDue returns, of each device without a running task, the oldest waiting task that is due and
// whose job lets it begin now: the only one that may begin.
func (t *transaction) firstDue(ctx context.Context, all map[string]*locked, ids []string) (first []jobs.Task, err error) {
	closed := []string{}
	known := map[string]bool{} // jobs whose gate was checked; true: open
	for id, j := range all {
		gate, _ := j.Gate(t.now)
		if known[id] = gate == jobs.WaitNone; !known[id] {
			closed = append(closed, id)
		}
	}
	for len(ids) > 0 {
		slices.Sort(closed)
		list, err := t.oldest(ctx, ids, closed)
		if err != nil {
			return nil, err
		}
		var others, again []string
		for i := range list {
			if _, ok := known[list[i].Job]; !ok {
				others = append(others, list[i].Job)
			}
		}
		if err := t.gates(ctx, sortedIDs(others), known); err != nil {
			return nil, err
		}
		for i := range list {
			switch {
			case known[list[i].Job]:
				first = append(first, list[i])
			default:
				again = append(again, string(list[i].Device))
			}
		}
		for _, id := range sortedIDs(others) {
			if !known[id] {
				closed = append(closed, id)
			}
		}
		ids = again
	}
	return first, nil
}

// gates reads jobs that hold up a device, and notes whether their gates are open. Their rows are
// not locked: if one changes meanwhile, this transaction counts as the earlier one.
func (t *transaction) gates(ctx context.Context, ids []string, known map[string]bool) error {
	if len(ids) == 0 {
		return nil
	}
	condition, arg := database.IDSet(t.db.Postgres(), "j.job", "$1", ids)
	list, err := database.Collect(ctx, t.tx, func(scan func(...any) error) (jobs.Job, error) { return scanJob(scan) },
		"SELECT "+jobNames+" FROM jobs j WHERE "+condition, arg)
	for i := range list {
		gate, _ := list[i].Gate(t.now)
		known[list[i].ID] = gate == jobs.WaitNone
	}
	return err
}

// oldest returns, of each of these devices without a running task, the oldest waiting task that is
// due and whose job may be ready, other than those that are closed. Of a full stage (jobs.Job.Full) it
// is one that began before.
func (t *transaction) oldest(ctx context.Context, ids, closed []string) ([]jobs.Task, error) {
	now := clock.Micros(t.now)
	if t.db.Postgres() {
		// NOT EXISTS would become a join that reads all running tasks of the fleet.
		return database.Collect(ctx, t.tx, scanOne, `SELECT `+taskNames+` FROM unnest($1::text[]) AS d(device) CROSS JOIN LATERAL (
 SELECT w.* FROM tasks w JOIN jobs j ON j.job = w.job WHERE w.device = d.device AND w.state = 'waiting' AND w.due_at <= $2 AND j.ready_at <= $2 AND NOT w.job = ANY($3::text[])
  AND (w.attempt > 0 OR j.started < j.opened)
 ORDER BY w.seq, w.job, w.round LIMIT 1) t WHERE (SELECT r.job FROM tasks r WHERE r.device = d.device AND r.state = 'running') IS NULL`, ids, now, closed)
	}
	return database.Collect(ctx, t.tx, scanOne, `SELECT `+taskNames+` FROM json_each($1) d JOIN tasks t ON t.rowid = (
 SELECT w.rowid FROM tasks w JOIN jobs j ON j.job = w.job WHERE w.device = d.value AND w.state = 'waiting' AND w.due_at <= $2 AND j.ready_at <= $2 AND w.job NOT IN (SELECT value FROM json_each($3))
  AND (w.attempt > 0 OR j.started < j.opened)
 ORDER BY w.seq, w.job, w.round LIMIT 1) WHERE NOT EXISTS (SELECT 1 FROM tasks r WHERE r.device = d.value AND r.state = 'running')`, textOf(ids), now, textOf(closed))
}

// start makes granted tasks running. If another node has begun one of the same device since they
// were read, the unique index refuses them. That one has been committed by then, so that the next attempt leaves the device out.
func (t *transaction) start(ctx context.Context, node, instance string, tasks []jobs.Task) error {
	if len(tasks) == 0 {
		return nil
	}
	for i := range tasks {
		task := &tasks[i]
		task.State, task.Instance, task.Node, task.BegunAt = jobs.TaskRunning, instance, database.Clean(node), t.now
		task.Attempt++
		task.Fence++
	}
	return conflictOf(t, t.startRows(ctx, tasks))
}

// conflictOf returns database.ErrConcurrent, for another attempt, if another node has begun a task of the same device meanwhile.
func conflictOf(t *transaction, err error) error {
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok && pg.Code == "23505" {
		t.Conflicts.Add(1)
		return database.ErrConcurrent
	}
	return err
}

var (
	startRows    = database.Text("job", "device")
	startColumns = append(startRows, database.Bigint("round")...)
)

// startRows makes waiting tasks running, in the order of devices.
func (t *transaction) startRows(ctx context.Context, tasks []jobs.Task) error {
	now, node, instance := clock.Micros(t.now), tasks[0].Node, tasks[0].Instance
	rows := make([][]any, len(tasks))
	for i, task := range tasks {
		rows[i] = []any{task.Job, string(task.Device), task.Round}
	}
	const set = `state = 'running', attempt = attempt + 1, fence = fence + 1, instance = $1, node = $2, begun_at = $3`
	if t.db.Postgres() {
		// The condition on the state is one that no partial index fits: the planner would read
		// all waiting tasks of the fleet.
		n, err := t.exec(ctx, `UPDATE tasks t SET `+set+` FROM (SELECT * FROM `+database.Unnest(startColumns, 3)+` AS u(job, device, round) ORDER BY u.device COLLATE "binary") v
 WHERE t.job = v.job AND t.device = v.device AND t.round = v.round AND t.state IN ('waiting', '')`,
			append([]any{instance, node, now}, database.Arrays(startColumns, rows)...)...)
		if err == nil && n != int64(len(rows)) {
			err = fmt.Errorf("internal error (bug): %d of %d tasks were waiting", n, len(rows))
		}
		return err
	}
	statement, err := t.tx.PrepareContext(ctx, `UPDATE tasks SET `+set+` WHERE job = $4 AND device = $5 AND round = $6 AND state = 'waiting'`)
	if err != nil {
		return err
	}
	for _, row := range rows {
		if _, err := statement.ExecContext(ctx, append([]any{instance, node, now}, row...)...); err != nil {
			return errors.Join(err, statement.Close())
		}
	}
	return statement.Close()
}
