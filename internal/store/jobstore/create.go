package jobstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
	"fleetd/internal/store/database"
)

// creating is the advisory lock of Postgres under which jobs are created and tasks are added, so that the
// limits of the fleet and of each device hold exactly. It is taken before the rows of jobs.
const creating = 7218110243

func (t *transaction) lockCreating(ctx context.Context) error {
	if !t.db.Postgres() { // the transaction has the whole database
		return nil
	}
	_, err := t.exec(ctx, `SELECT pg_advisory_xact_lock($1)`, int64(creating))
	return err
}

// Create implements jobs.Store.
func (s *Store) Create(ctx context.Context, j jobs.Job, tasks []jobs.Task) (stored jobs.Job, again bool, err error) {
	err = s.transact(ctx, "creating a job", func(ctx context.Context, t *transaction) (err error) {
		stored, again, err = t.create(ctx, j, tasks)
		return err
	})
	return stored, again, err
}

// CreateGroup implements jobs.Store.
func (s *Store) CreateGroup(ctx context.Context, list []jobs.Job) (stored []jobs.Job, again bool, err error) {
	err = s.transact(ctx, "creating a group of jobs", func(ctx context.Context, t *transaction) error {
		stored = nil
		for i := range list {
			j, repeated, err := t.create(ctx, list[i], nil)
			if err != nil {
				return err
			}
			if repeated { // j is the first job of the group that there is
				again = true
				stored, err = database.Collect(ctx, t.tx, scanPlain, `SELECT `+jobNames+` FROM jobs j WHERE j.bundle = $1 AND j.bundle <> '' ORDER BY j.job`, j.Group)
				return err
			}
			stored = append(stored, j)
		}
		return nil
	})
	return stored, again, err
}

func (t *transaction) create(ctx context.Context, j jobs.Job, tasks []jobs.Task) (stored jobs.Job, again bool, err error) {
	if err := t.lockCreating(ctx); err != nil {
		return j, false, err
	}
	if j.Key != "" {
		stored, again, err = t.repeated(ctx, &j)
		if again || err != nil {
			return stored, again, err
		}
	}
	if f := j.Spec.Action.Firmware; f != nil { // its deletion waits until this job can be seen
		rows, err := database.Collect(ctx, t.tx, database.Scalar[string], `SELECT sha256 FROM firmware WHERE sha256 = $1`+t.db.Lock("FOR KEY SHARE"), f.Image)
		if err == nil && len(rows) == 0 {
			err = database.Rule(devices.Errorf(devices.CodeNotFound, "the firmware image %s was deleted", f.Image))
		}
		if err != nil {
			return j, false, err
		}
	}
	if err := t.checkShare(ctx, j.Owner, 1, int64(len(tasks))); err != nil {
		return j, false, err
	}
	if len(tasks) > 0 {
		if j.State != jobs.Preparing || len(tasks) > jobs.MaxDevices {
			return j, false, database.Rule(fmt.Errorf("job %s is %s and has %d tasks; only a job that is preparing is created with tasks, at most %d", j.ID, j.State, len(tasks), jobs.MaxDevices))
		}
		full, err := t.full(ctx, j.Owner, tasks)
		if err != nil {
			return j, false, err
		}
		if len(tasks) == 1 && full[tasks[0].Device] {
			return j, false, database.Rule(jobs.ErrQueueFull)
		}
		if err := t.insert(ctx, &j, tasks, func(task *jobs.Task) *devices.Error { return ifFull(full, task) }); err != nil {
			return j, false, err
		}
		j.Prepared(t.now)
	}
	j.Settle(t.now)
	j.Version = 1
	t.changed = append(t.changed, jobs.Change{Job: j})
	_, err = jobRows.Write(ctx, t.tx, t.db, [][]any{slices.Concat(fixed(&j), given(&j), moved(&j, t.now))})
	return j, false, err
}

// repeated returns the job that the owner has created with this key, if it is not too old.
func (t *transaction) repeated(ctx context.Context, j *jobs.Job) (stored jobs.Job, again bool, err error) {
	list, err := database.Collect(ctx, t.tx, func(scan func(...any) error) (jobs.Job, error) { return scanJob(scan) },
		`SELECT `+jobNames+` FROM jobs j WHERE j.owner = $1 AND j.idem = $2 AND j.idem <> ''`, j.Owner, j.Key)
	if err != nil || len(list) == 0 {
		return jobs.Job{}, false, err
	}
	stored = list[0]
	if !stored.CreatedAt.After(t.now.Add(-jobs.KeyLifetime)) {
		_, err := t.exec(ctx, `UPDATE jobs SET idem = '' WHERE job = $1`, stored.ID)
		return jobs.Job{}, false, err
	}
	if stored.Hash != j.Hash {
		return jobs.Job{}, false, database.Rule(jobs.ErrConflict)
	}
	return stored, true, nil
}

// ifFull returns why a task finds no place in the queue of its device; nil if it does.
func ifFull(full map[devices.ID]bool, task *jobs.Task) *devices.Error {
	if full[task.Device] {
		return jobs.ErrQueueFull
	}
	return nil
}

// insert writes new tasks of a locked job, and counts them. Those for which refuse returns an error are
// refused.
func (t *transaction) insert(ctx context.Context, j *jobs.Job, tasks []jobs.Task, refuse func(*jobs.Task) *devices.Error) error {
	rows := make([][]any, len(tasks))
	ended, provable := map[jobs.Outcome]int{}, 0
	for i, task := range tasks {
		task.Job, task.Round = j.ID, j.Round
		if no := refuse(&task); no != nil && task.Outcome == "" {
			task.Outcome, task.Code, task.Detail = jobs.Refused, string(no.Code), no.Detail
		}
		if task.State = jobs.TaskWaiting; task.Outcome != "" {
			task.State, task.EndedAt = jobs.TaskEnded, t.now
			t.ended = append(t.ended, task)
			ended[task.Outcome]++
		} else if task.Rollout != nil && task.Rollout.Provable {
			provable++
		}
		rows[i] = taskValues(&task)
	}
	slices.SortFunc(rows, func(a, b []any) int { return strings.Compare(a[1].(string), b[1].(string)) })
	if _, err := taskRows.Write(ctx, t.tx, t.db, rows); err != nil {
		return err
	}
	j.Added(len(tasks), ended, provable)
	return nil
}

// AddTasks implements jobs.Store.
func (s *Store) AddTasks(ctx context.Context, id, cursor, next string, tasks []jobs.Task, last bool) (j jobs.Job, err error) {
	if cursor == "" && next == "" && !last { // most of the time no device is new: then nobody waits for a transaction
		there, err := s.there(ctx, id, tasks)
		if err != nil {
			return j, err
		}
		if tasks = slices.DeleteFunc(slices.Clone(tasks), func(task jobs.Task) bool { return there[task.Device] }); len(tasks) == 0 {
			return s.Job(ctx, id)
		}
	}
	whole := true
	j, err = s.change(ctx, "preparing a job", id, true, func(ctx context.Context, t *transaction, row *locked) (err error) {
		follows := row.Spec.Follow && (row.State == jobs.Running || row.State == jobs.Paused && row.Before == jobs.Running || row.State == jobs.Halted && row.Before == jobs.Running)
		if row.Cursor != cursor || row.State != jobs.Preparing && !follows {
			return database.Rule(jobs.ErrStale)
		}
		before := row.RoundN
		if whole, err = t.addTasks(ctx, &row.Job, tasks); err != nil || row.State != jobs.Preparing && row.RoundN == before {
			return err
		}
		if row.State == jobs.Preparing {
			if row.Cursor = next; last {
				row.Prepared(t.now)
			}
		}
		t.touch(row)
		return nil
	})
	if err == nil && !whole {
		err = jobs.ErrOpenTasks
	}
	return j, err
}

// there returns those devices of tasks that have one of the current round of a job.
func (s *Store) there(ctx context.Context, id string, tasks []jobs.Task) (map[devices.ID]bool, error) {
	ids := make([]string, len(tasks))
	for i := range tasks {
		ids[i] = string(tasks[i].Device)
	}
	from, arg := s.tasksOf(ids, `t.round = (SELECT round FROM jobs WHERE job = $1)`)
	there := map[devices.ID]bool{}
	_, err := database.Read(ctx, s.host, "looking for new devices of a job", func(scan func(...any) error) (id devices.ID, err error) {
		err = scan(&id)
		there[id] = true
		return id, err
	}, `SELECT t.device FROM `+from, id, arg)
	return there, err
}

// tasksOf returns what follows FROM for the tasks t of devices in the job $1 with a condition, and $2. Each device is looked up by itself:
// for a list, Postgres reads all tasks of a job of which it has no statistics yet.
func (s *Store) tasksOf(ids []string, condition string) (from string, arg any) {
	condition = `t.job = $1 AND t.device = d.value AND ` + condition
	if s.db.Postgres() {
		return `unnest($2::text[]) AS d(value) CROSS JOIN LATERAL (SELECT * FROM tasks t WHERE ` + condition + ` OFFSET 0) t`, ids
	}
	return `json_each($2) d CROSS JOIN tasks t ON ` + condition, textOf(ids)
}

// addTasks writes rows of a locked job; whole is whether none was left out for the share of its owner.
func (t *transaction) addTasks(ctx context.Context, j *jobs.Job, tasks []jobs.Task) (whole bool, err error) {
	if len(tasks) == 0 {
		return true, nil
	}
	ids := make([]string, len(tasks))
	for i := range tasks {
		ids[i] = string(tasks[i].Device)
	}
	if err := t.thin(ctx, j, ids); err != nil {
		return false, err
	}
	from, arg := t.tasksOf(ids, `t.round = $3`)
	there := map[devices.ID]bool{}
	_, err = database.Collect(ctx, t.tx, func(scan func(...any) error) (id devices.ID, err error) {
		err = scan(&id)
		there[id] = true
		return id, err
	}, `SELECT t.device FROM `+from, j.ID, arg, j.Round)
	if err != nil {
		return false, err
	}
	added := make([]jobs.Task, 0, len(tasks))
	for _, task := range tasks {
		if !there[task.Device] {
			there[task.Device] = true
			added = append(added, task)
		}
	}
	if len(added) == 0 {
		return true, nil
	}
	full, err := t.full(ctx, j.Owner, added)
	if err != nil {
		return false, err
	}
	h, err := t.held(ctx)
	if err != nil {
		return false, err
	}
	whole = true
	share := j.Reserved + access.Share(jobs.MaxOpenTasks, h.tasks, j.Owner, t.holder)
	if j.State != jobs.Preparing && int64(len(added)) > share {
		added, whole = added[:share], false
	}
	return whole, t.insert(ctx, j, added, func(task *jobs.Task) *devices.Error {
		if no := ifFull(full, task); no != nil {
			return no
		}
		if share--; share < 0 {
			return jobs.ErrOpenTasks
		}
		return nil
	})
}

// thin deletes the ended tasks that devices have in rounds of a locked job that are not kept, at most PrepareBatch, and takes them out of
// the counts. A new round deletes more than it adds, so that a job which had more comes to the limit, too.
func (t *transaction) thin(ctx context.Context, j *jobs.Job, ids []string) error {
	last := j.Round - jobs.KeptRounds
	if last < 1 {
		return nil
	}
	from, arg := t.tasksOf(ids, `t.round <= $3 AND t.state = 'ended'`)
	from += ` ORDER BY t.device, t.round LIMIT $4`
	list, err := database.Collect(ctx, t.tx, func(scan func(...any) error) (task jobs.Task, err error) {
		err = scan(&task.Device, &task.Round, &task.Outcome)
		return task, err
	}, `SELECT t.device, t.round, t.outcome FROM `+from, j.ID, arg, last, int64(jobs.PrepareBatch))
	if err != nil || len(list) == 0 {
		return err
	}
	for i := range list {
		j.Uncount(&list[i])
	}
	_, err = t.exec(ctx, `DELETE FROM tasks WHERE (job, device, round) IN (SELECT t.job, t.device, t.round FROM `+from+`)`, j.ID, arg, last, int64(jobs.PrepareBatch))
	return err
}

// Edit implements jobs.Store.
func (s *Store) Edit(ctx context.Context, id string, f func(j *jobs.Job) error) (jobs.Job, error) {
	return s.change(ctx, "changing a job", id, false, func(ctx context.Context, t *transaction, row *locked) (err error) {
		before := textOf(&row.Spec)
		if err := f(&row.Job); err != nil {
			return database.Rule(err)
		}
		row.touched = true
		if text := textOf(&row.Spec); text != before {
			_, err = t.exec(ctx, `UPDATE jobs SET spec = $1 WHERE job = $2`, text, id)
		}
		return err
	})
}

// Confirm implements jobs.Store.
func (s *Store) Confirm(ctx context.Context, digest, owner, hash string, rules []string) error {
	return s.transact(ctx, "storing a confirmation request", func(ctx context.Context, t *transaction) error {
		if _, err := t.exec(ctx, `DELETE FROM job_confirmations WHERE digest IN (SELECT digest FROM job_confirmations WHERE owner = $1 ORDER BY until DESC LIMIT $2 OFFSET $3)`,
			owner, int64(jobs.MaxConfirmations), int64(jobs.MaxConfirmations-1)); err != nil {
			return err
		}
		_, err := t.exec(ctx, `INSERT INTO job_confirmations (digest, owner, hash, rules, until) VALUES ($1, $2, $3, $4, $5) ON CONFLICT (digest) DO NOTHING`,
			digest, owner, hash, textOf(rules), clock.Micros(t.now.Add(jobs.ConfirmLifetime)))
		return err
	})
}

// TakeConfirm implements jobs.Store.
func (s *Store) TakeConfirm(ctx context.Context, digest, owner, hash string) (rules []string, err error) {
	err = s.transact(ctx, "taking a confirmation", func(ctx context.Context, t *transaction) error {
		var text string
		err := t.tx.QueryRowContext(ctx, `DELETE FROM job_confirmations WHERE digest = $1 AND owner = $2 AND hash = $3 AND until > $4 RETURNING rules`,
			digest, owner, hash, clock.Micros(t.now)).Scan(&text)
		if errors.Is(err, sql.ErrNoRows) {
			return database.Rule(devices.ErrNotFound)
		}
		if err != nil {
			return err
		}
		return json.Unmarshal([]byte(text), &rules)
	})
	return rules, err
}

// DropConfirm implements jobs.Store.
func (s *Store) DropConfirm(ctx context.Context, digest, owner string) error {
	return s.transactions.Exec(ctx, "dropping a confirmation request", `DELETE FROM job_confirmations WHERE digest = $1 AND owner = $2`, digest, owner)
}
