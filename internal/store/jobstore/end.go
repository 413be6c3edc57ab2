package jobstore

import (
	"context"
	"slices"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
	"fleetd/internal/store/database"
)

// lostAfter is how long a task has run before it counts as lost: its process may have begun it
// while another node removed its lease.
const lostAfter = 2 * time.Second

// End implements jobs.Store.
func (s *Store) End(ctx context.Context, instance string, list []jobs.End) (ended []jobs.Task, changed []jobs.Change, err error) {
	for len(list) > 0 {
		n := min(len(list), jobs.BeginBatch)
		var tasks []jobs.Task
		var rows []jobs.Change
		if err := s.transact(ctx, "ending tasks", func(ctx context.Context, t *transaction) (err error) {
			tasks, rows, err = t.end(ctx, instance, list[:n])
			return err
		}); err != nil {
			return ended, changed, err
		}
		ended, changed, list = append(ended, tasks...), append(changed, rows...), list[n:]
	}
	return ended, changed, nil
}

// end ends running tasks that instance has begun, or with an empty instance any.
func (t *transaction) end(ctx context.Context, instance string, list []jobs.End) (ended []jobs.Task, changed []jobs.Change, err error) {
	var ids []string
	keys := make([]key, len(list))
	for i, e := range list {
		ids, keys[i] = append(ids, e.Job), key{e.Job, e.Device, e.Round}
	}
	all, err := t.lock(ctx, ids)
	if err != nil {
		return nil, nil, err
	}
	tasks, err := t.tasks(ctx, keys)
	if err != nil {
		return nil, nil, err
	}
	var order []key
	seen := map[key]bool{}
	for i := range list {
		e := &list[i]
		j, task := all[e.Job], tasks[keys[i]]
		if j == nil || task == nil || task.Fence != e.Fence || instance != "" && task.Instance != instance || !t.apply(j, task, e) {
			continue
		}
		if !seen[keys[i]] { // a late answer may be in the same group
			seen[keys[i]] = true
			order = append(order, keys[i])
		}
	}
	rows := make([][]any, len(order))
	for i, k := range order {
		rows[i], ended = endValues(tasks[k]), append(ended, *tasks[k])
	}
	if _, err := taskEnds.Write(ctx, t.tx, t.db, rows); err != nil {
		return nil, nil, err
	}
	for _, j := range all {
		if j.touched {
			t.touch(j)
		}
	}
	t.ended = append(t.ended, ended...)
	changed, err = t.write(ctx, all)
	return ended, changed, err
}

// apply applies an end to a task and its job. It reports false if the task is not in a state that
// ends so.
func (t *transaction) apply(j *locked, task *jobs.Task, e *jobs.End) bool {
	answer := !e.NotSent && (e.Outcome == jobs.OK || e.Outcome == jobs.Failed)
	switch {
	case task.State == jobs.TaskRunning:
		t.applyRunning(j, task, e)
	case task.State == jobs.TaskEnded && task.Outcome == jobs.Unknown && answer:
		j.Correct(task, e.Outcome)
		t.fill(task, e)
		task.Late = true
	default:
		return false
	}
	j.touched = true
	if e.Halt != "" {
		j.Halt(e.Halt)
	}
	return true
}

func (t *transaction) applyRunning(j *locked, task *jobs.Task, e *jobs.End) {
	if e.NotSent {
		task.Attempt--
		j.Return(task)
		task.State, task.DueAt = jobs.TaskWaiting, e.Again
		outcome := jobs.Outcome("")
		switch {
		case !j.State.Open():
			outcome = jobs.CancelledT
		case task.Round < j.Round:
			outcome = jobs.Superseded
		}
		if outcome != "" {
			j.RecordWaiting(task, outcome)
			task.State, task.Outcome, task.EndedAt = jobs.TaskEnded, outcome, t.now
		}
		return
	}
	t.fill(task, e)
	task.Late = e.Late
	if again, ok := j.RetryAt(e.Outcome, task.Attempt, t.now); ok && j.State.Open() && task.Round == j.Round {
		j.Retried()
		task.State, task.DueAt, task.Outcome, task.EndedAt = jobs.TaskWaiting, again, "", time.Time{}
		return
	}
	j.Record(task, e.Outcome)
}

// fill makes a task ended.
func (t *transaction) fill(task *jobs.Task, e *jobs.End) {
	task.State, task.Outcome, task.Code, task.Detail, task.Result, task.EndedAt = jobs.TaskEnded, e.Outcome, e.Code, devices.Cut(database.Clean(e.Detail), jobs.MaxDetail), devices.Cut(database.Clean(e.Result), jobs.MaxResult), t.now
	if e.Call != "" {
		task.Call = e.Call
	}
}

// tasks reads tasks of locked jobs.
func (t *transaction) tasks(ctx context.Context, keys []key) (map[key]*jobs.Task, error) {
	found := make(map[key]*jobs.Task, len(keys))
	keep := func(scan func(...any) error) (none struct{}, err error) {
		task, err := scanTask(scan)
		found[key{task.Job, task.Device, task.Round}] = &task
		return none, err
	}
	rows := make([][]any, len(keys))
	for i, k := range keys {
		rows[i] = []any{k.job, string(k.device), k.round}
	}
	if t.db.Postgres() {
		_, err := database.Collect(ctx, t.tx, keep, "SELECT "+taskNames+" FROM "+database.Unnest(keyColumns, 0)+
			" AS v(job, device, round) JOIN tasks t ON t.job = v.job AND t.device = v.device AND t.round = v.round", database.Arrays(keyColumns, rows)...)
		return found, err
	}
	statement, err := t.tx.PrepareContext(ctx, "SELECT "+taskNames+" FROM tasks t WHERE t.job = ? AND t.device = ? AND t.round = ?")
	if err != nil {
		return nil, err
	}
	defer func() { _ = statement.Close() }() // the transaction ends, too
	for _, row := range rows {
		if err := func() error {
			list, err := statement.QueryContext(ctx, row...)
			if err != nil {
				return err
			}
			defer func() { _ = list.Close() }() // Err reports what Next met
			for list.Next() {
				if _, err := keep(list.Scan); err != nil {
					return err
				}
			}
			return list.Err()
		}(); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// LoseRunning implements jobs.Store.
func (s *Store) LoseRunning(ctx context.Context, self string, limit int) (ended []jobs.Task, changed []jobs.Change, err error) {
	lost := ` NOT EXISTS (SELECT 1 FROM nodes n WHERE n.instance = t.instance) AND t.instance <> $1`
	if self != "" {
		lost = ` t.instance <> $1`
	}
	now := s.Now()
	// Most of the time there are none: then nobody waits for a transaction.
	list, err := database.Read(ctx, s.host, "looking for tasks of ended nodes", func(scan func(...any) error) (jobs.End, error) {
		task, err := scanTask(scan)
		return jobs.End{Job: task.Job, Round: task.Round, Device: task.Device, Fence: task.Fence, Outcome: jobs.Unknown, Code: jobs.CodeNodeLost,
			Detail: "node " + task.Node + " ended while it ran the task; it is not known whether the device did it"}, err
	}, `SELECT `+taskNames+` FROM tasks t WHERE t.state = 'running' AND t.phase = '' AND (t.begun_at < $2 OR t.begun_at > $3) AND`+lost+` LIMIT $4`,
		self, clock.Micros(now.Add(-lostAfter)), clock.Micros(now.Add(lostAfter)), int64(limit)) // a later beginning is of before the clock was set back
	if err != nil || len(list) == 0 {
		return nil, nil, err
	}
	err = s.transact(ctx, "ending the tasks of ended nodes", func(ctx context.Context, t *transaction) (err error) {
		ended, changed, err = t.end(ctx, "", list)
		return err
	})
	return ended, changed, err
}

// EndWaiting implements jobs.Store.
func (s *Store) EndWaiting(ctx context.Context, id string, round int64, device devices.ID, outcome jobs.Outcome, code string, limit int) (ended []jobs.Task, j jobs.Job, err error) {
	err = s.transact(ctx, "ending waiting tasks", func(ctx context.Context, t *transaction) error {
		row, err := t.lockOne(ctx, id)
		if err != nil {
			return err
		}
		where, args := ` WHERE t.job = $1 AND t.state = 'waiting'`, []any{id, int64(limit)}
		if round >= 0 {
			where, args = where+` AND t.round < $3`, append(args, round)
		}
		if device != "" {
			where += ` AND t.device = $` + string(rune('1'+len(args)))
			args = append(args, string(device))
		}
		ended, err = database.Collect(ctx, t.tx, scanOne, `SELECT `+taskNames+` FROM tasks t`+where+` ORDER BY t.spread LIMIT $2`, args...)
		if err != nil {
			return err
		}
		if len(ended) == 0 && !row.State.Open() { // it may have lost its last task in another way
			row.touched = row.EndedAt.IsZero() && row.Counts.Open() == 0
		}
		if err := t.endWaiting(ctx, map[string]*locked{id: row}, ended, outcome, code); err != nil {
			return err
		}
		j = row.Job
		return nil
	})
	return ended, j, err
}

// endWaiting ends open tasks of locked jobs, and writes both.
func (t *transaction) endWaiting(ctx context.Context, all map[string]*locked, list []jobs.Task, outcome jobs.Outcome, code string) error {
	rows := make([][]any, len(list))
	for i := range list {
		task, j := &list[i], all[list[i].Job]
		outcome, code := outcome, code
		if task.IsHarmed() {
			outcome, code = jobs.Failed, task.Code
		}
		if task.State == jobs.TaskRunning {
			j.Record(task, outcome)
		} else {
			j.RecordWaiting(task, outcome)
		}
		task.State, task.Outcome, task.Code, task.EndedAt = jobs.TaskEnded, outcome, code, t.now
		rows[i] = endValues(task)
		j.touched = true
	}
	if _, err := taskEnds.Write(ctx, t.tx, t.db, rows); err != nil {
		return err
	}
	for _, j := range all {
		if j.touched {
			t.touch(j)
		}
	}
	t.ended = append(t.ended, list...)
	_, err := t.write(ctx, all)
	return err
}

// Forget implements jobs.Store.
func (s *Store) Forget(ctx context.Context, ids ...devices.ID) error {
	for part := range slices.Chunk(devices.Texts(ids), jobs.BeginBatch) {
		for left := true; left; {
			var err error
			if left, err = s.forget(ctx, part); err != nil {
				return err
			}
		}
	}
	return nil
}

// forget ends open tasks of devices, at most BeginBatch, and reports whether there may be others.
func (s *Store) forget(ctx context.Context, ids []string) (left bool, err error) {
	text, arg := s.openOf(ids, "t.job")
	found, err := database.Read(ctx, s.host, "looking for the tasks of forgotten devices", database.Scalar[string], text, arg, int64(jobs.BeginBatch))
	if err != nil || len(found) == 0 { // most of the time there are none: then nobody waits for a transaction
		return false, err
	}
	err = s.transact(ctx, "ending the tasks of forgotten devices", func(ctx context.Context, t *transaction) error {
		all, err := t.lock(ctx, found)
		if err != nil {
			return err
		}
		text, arg := s.openOf(ids, taskNames)
		list, err := database.Collect(ctx, t.tx, scanOne, text, arg, int64(jobs.BeginBatch))
		if err != nil {
			return err
		}
		list = slices.DeleteFunc(list, func(task jobs.Task) bool { return all[task.Job] == nil }) // of a job that came meanwhile
		return t.endWaiting(ctx, all, list, jobs.Gone, "")
	})
	return len(found) == jobs.BeginBatch, err
}

// openOf returns a query of columns of the open tasks of devices, with the devices and a limit as parameters.
func (s *Store) openOf(ids []string, columns string) (text string, arg any) {
	// One lookup for each device: for a list, the planner may read all waiting tasks.
	of := func(state string) string {
		return `SELECT ` + columns + ` FROM json_each($1) d CROSS JOIN tasks t ON t.device = d.value AND t.state = '` + state + `'`
	}
	arg = textOf(ids)
	if s.db.Postgres() {
		of = func(state string) string {
			return `SELECT ` + columns + ` FROM unnest($1::text[]) AS d(device) CROSS JOIN LATERAL (SELECT w.* FROM tasks w WHERE w.device = d.device AND w.state = '` + state + `') t`
		}
		arg = ids
	}
	return of("waiting") + ` UNION ALL ` + of("running") + ` LIMIT $2`, arg
}

// Erase implements jobs.Store.
func (s *Store) Erase(ctx context.Context, id devices.ID) error {
	// The fence keeps late answers out. There is no index of devices alone: the tasks are found in each job.
	return s.transactions.Exec(ctx, "deleting the answers of a forgotten device",
		`UPDATE tasks SET detail = '', result = '', fence = fence + 1 WHERE device = $1 AND state = 'ended' AND job IN (SELECT job FROM jobs)`, string(id))
}

// Retry implements jobs.Store.
func (s *Store) Retry(ctx context.Context, id string, round int64, outcomes []jobs.Outcome, after devices.ID, limit int) (n int, next devices.ID, j jobs.Job, err error) {
	j, err = s.change(ctx, "retrying tasks", id, true, func(ctx context.Context, t *transaction, row *locked) error {
		n, next = 0, ""
		if row.Round != round {
			return nil
		}
		condition, arg := database.IDSet(t.db.Postgres(), "t.outcome", "$3", outcomes)
		list, err := database.Collect(ctx, t.tx, scanOne, `SELECT `+taskNames+` FROM tasks t WHERE t.job = $1 AND t.round = $2 AND t.state = 'ended' AND `+condition+` AND t.device > $4 ORDER BY t.device LIMIT $5`,
			id, round, arg, string(after), int64(limit))
		if err != nil {
			return err
		}
		if n = len(list); n == limit {
			next = list[n-1].Device
		}
		if n == 0 {
			return nil
		}
		if err := t.checkRetry(ctx, &row.Job, list); err != nil {
			return err
		}
		if err := row.Reopen(t.now); err != nil {
			return database.Rule(err)
		}
		rows := make([][]any, n)
		for i := range list {
			task := &list[i]
			row.Again(task)
			task.State, task.DueAt, task.EndedAt = jobs.TaskWaiting, time.Time{}, time.Time{}
			task.Outcome, task.Code, task.Detail, task.Result, task.Late = "", "", "", "", false
			task.Before, task.Target, task.Rollout = "", "", task.Rollout.Again()
			rows[i] = endValues(task)
		}
		t.touch(row)
		_, err = taskEnds.Write(ctx, t.tx, t.db, rows)
		return err
	})
	return n, next, j, err
}

// checkRetry returns an error if tasks of a job do not fit the shares of its owner again.
func (t *transaction) checkRetry(ctx context.Context, j *jobs.Job, list []jobs.Task) error {
	open := int64(0)
	if !j.EndedAt.IsZero() {
		open = 1
	}
	if err := t.checkShare(ctx, j.Owner, open, int64(len(list))); err != nil {
		return err
	}
	full, err := t.full(ctx, j.Owner, list)
	if err != nil {
		return err
	}
	for i := range list {
		if full[list[i].Device] {
			return database.Rule(devices.Errorf(devices.CodeQueueFull, "device %s: %s", list[i].Device, jobs.ErrQueueFull.Detail))
		}
	}
	return nil
}
