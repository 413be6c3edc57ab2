package jobstore

import (
	"context"
	"fmt"
	"slices"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
	"fleetd/internal/store/database"
)

// Step implements jobs.Store.
func (s *Store) Step(ctx context.Context, id string, device devices.ID, f func(s *jobs.Step, ahead bool) error) (task jobs.Task, err error) {
	err = s.transact(ctx, "moving a firmware task on", func(ctx context.Context, t *transaction) error {
		j, err := t.lockOne(ctx, id)
		if err != nil {
			return err
		}
		all := map[string]*locked{id: j}
		k := key{id, device, j.Round}
		found, err := t.tasks(ctx, []key{k})
		if err != nil {
			return err
		}
		if found[k] == nil {
			return database.Rule(fmt.Errorf("job %s has no task of device %s: %w", id, device, devices.ErrNotFound))
		}
		step := jobs.Step{Job: &j.Job, Task: found[k], Now: t.now}
		before := *found[k]
		var loaded int64
		var gate string
		if before.Rollout != nil {
			loaded, gate = before.Rollout.Bytes, before.Rollout.Gate
		}
		ahead := false
		if before.State == jobs.TaskWaiting {
			if ahead, err = t.isAhead(ctx, all, &before); err != nil {
				return err
			}
		}
		if err := f(&step, ahead); err != nil {
			return database.Rule(err)
		}
		if before.State != step.Task.State && step.Task.State == jobs.TaskRunning {
			if err := t.countBegin(ctx); err != nil {
				return err
			}
		}
		if before.State != jobs.TaskEnded && step.Task.State != jobs.TaskRunning && (step.Task.State == jobs.TaskEnded || before.State == jobs.TaskRunning) {
			t.ended = append(t.ended, *step.Task)
		}
		if _, err := taskEnds.Write(ctx, t.tx, t.db, [][]any{endValues(step.Task)}); err != nil {
			return conflictOf(t, err)
		}
		if err := t.mark(ctx, &step); err != nil {
			return err
		}
		t.touch(j)
		_, err = t.write(ctx, all)
		task = *step.Task
		if r := task.Rollout; err == nil && r != nil && (task.Phase != before.Phase || r.Bytes != loaded || r.Gate != gate) {
			t.changed[len(t.changed)-1].Stepped = &task
		}
		return err
	})
	return task, err
}

// isAhead reports whether another task of the device runs, or is due before this one.
func (t *transaction) isAhead(ctx context.Context, all map[string]*locked, task *jobs.Task) (bool, error) {
	running, err := database.Collect(ctx, t.tx, database.Scalar[string], `SELECT r.job FROM tasks r WHERE r.device = $1 AND r.state = 'running'`, string(task.Device))
	if err != nil || len(running) > 0 {
		return true, err
	}
	first, err := t.firstDue(ctx, all, []string{string(task.Device)})
	return len(first) > 0 && (first[0].Seq < task.Seq || first[0].Seq == task.Seq && first[0].Job < task.Job), err
}

// mark writes what a step says about its device.
func (t *transaction) mark(ctx context.Context, s *jobs.Step) error {
	const insert = `INSERT INTO firmware_devices (device, barred_until, reason, unconfirmed_at) VALUES ($1, $2, $3, $4) ON CONFLICT (device) DO UPDATE SET `
	if s.Flashed {
		if _, err := t.exec(ctx, insert+`unconfirmed_at = excluded.unconfirmed_at`, string(s.Task.Device), int64(0), "", clock.Micros(t.now)); err != nil {
			return err
		}
	}
	if s.Checked {
		if _, err := t.exec(ctx, confirm, string(s.Task.Device)); err != nil {
			return err
		}
	}
	if s.Bar == "" {
		return nil
	}
	_, err := t.exec(ctx, insert+`barred_until = excluded.barred_until, reason = excluded.reason`, string(s.Task.Device), clock.Micros(t.now.Add(jobs.BarTime)), database.Clean(s.Bar), int64(0))
	return err
}

// ofFirmware is a condition on jobs j.
const ofFirmware = ` AND j.action = 'firmware'`

// Outlook implements jobs.Store.
func (s *Store) Outlook(ctx context.Context, device devices.ID, elf string) (o jobs.Outlook, err error) {
	_, err = database.ReadFrom(ctx, s.host, s.db.Kept(), "looking for firmware tasks of a device", func(scan func(...any) error) (none struct{}, err error) {
		return none, scan(&o.Open, &o.Moves, &o.Ready, &o.Unconfirmed)
	}, `SELECT count(*), coalesce(max(CASE WHEN t.state = 'running' OR t.elf_target = $2 AND $2 <> '' THEN 1 ELSE 0 END), 0) = 1,
 coalesce(max(CASE WHEN j.ready_at <= $3 THEN 1 ELSE 0 END), 0) = 1,
 EXISTS (SELECT 1 FROM firmware_devices f WHERE f.device = $1 AND f.unconfirmed_at > 0)`+queued+ofFirmware, database.Clean(string(device)), database.Clean(elf), clock.Micros(s.Now()))
	return o, err
}

// Rolling implements jobs.Store.
func (s *Store) Rolling(ctx context.Context, device devices.ID) ([]jobs.Queued, error) {
	list, err := s.queue(ctx, device, ofFirmware)
	if i := slices.IndexFunc(list, func(q jobs.Queued) bool { return q.Task.State == jobs.TaskRunning }); i >= 0 {
		list = list[i : i+1]
	}
	return list, err
}

// Overdue implements jobs.Store.
func (s *Store) Overdue(ctx context.Context, limit int) ([]jobs.Task, error) {
	return database.Read(ctx, s.host, "looking for firmware tasks that stand still", scanOne,
		`SELECT `+taskNames+` FROM tasks t WHERE t.phase <> '' AND t.limit_at <= $1 ORDER BY t.limit_at LIMIT $2`, clock.Micros(s.Now()), int64(limit))
}

// Rolled implements jobs.Store.
func (s *Store) Rolled(ctx context.Context, device devices.ID, elf string) (jobs.Task, error) {
	task, found, err := database.One(ctx, s.host, "looking for an ended firmware task", scanOne,
		`SELECT `+taskNames+` FROM tasks t WHERE t.device = $1 AND t.elf_target <> '' AND (t.elf_target = $2 OR $2 = '') AND t.state = 'ended' ORDER BY t.ended_at DESC LIMIT 1`, string(device), elf)
	if err == nil && !found {
		err = devices.ErrNotFound
	}
	return task, err
}

// Supersede implements jobs.Store.
func (s *Store) Supersede(ctx context.Context, id string, ids []devices.ID) error {
	if len(ids) == 0 {
		return nil
	}
	condition, arg := database.IDSet(s.db.Postgres(), "t.device", "$2", ids)
	from := ` FROM tasks t JOIN jobs j ON j.job = t.job WHERE t.state = 'waiting' AND j.action = 'firmware' AND t.job < $1 AND ` + condition
	older, err := database.Read(ctx, s.host, "looking for older firmware tasks", database.Scalar[string], `SELECT DISTINCT t.job`+from, id, arg)
	if err != nil || len(older) == 0 { // most of the time there are none: then nobody waits for a transaction
		return err
	}
	return s.transact(ctx, "superseding firmware tasks", func(ctx context.Context, t *transaction) error {
		all, err := t.lock(ctx, older)
		if err != nil {
			return err
		}
		list, err := database.Collect(ctx, t.tx, scanOne, `SELECT `+taskNames+from, id, arg)
		if err != nil {
			return err
		}
		list = slices.DeleteFunc(list, func(task jobs.Task) bool { return all[task.Job] == nil })
		return t.endWaiting(ctx, all, list, jobs.Superseded, "")
	})
}

// changed selects the tasks whose devices the job has changed, or may have.
const changed = ` FROM tasks t WHERE t.job = $1 AND t.elf_target <> '' AND t.elf_before <> t.elf_target AND (t.state = 'running' OR t.outcome IN ('ok', 'failed', 'unknown', 'already'))`

// Changed implements jobs.Store.
func (s *Store) Changed(ctx context.Context, id string) (map[string]int64, error) {
	out := map[string]int64{}
	_, err := database.Read(ctx, s.host, "counting what a firmware job has changed", func(scan func(...any) error) (none struct{}, err error) {
		var before string
		var n int64
		err = scan(&before, &n)
		out[before] = n
		return none, err
	}, `SELECT t.elf_before, count(*)`+changed+` GROUP BY t.elf_before`, id)
	return out, err
}

// ChangedOf implements jobs.Store.
func (s *Store) ChangedOf(ctx context.Context, id string, ids []devices.ID) (map[devices.ID]string, error) {
	out := map[devices.ID]string{}
	condition, arg := database.IDSet(s.db.Postgres(), "t.device", "$2", ids)
	_, err := database.Read(ctx, s.host, "reading what a firmware job has changed", func(scan func(...any) error) (none struct{}, err error) {
		var device devices.ID
		var before string
		err = scan(&device, &before)
		out[device] = before
		return none, err
	}, `SELECT t.device, t.elf_before`+changed+` AND `+condition, id, arg)
	return out, err
}

// Marks implements jobs.Store.
func (s *Store) Marks(ctx context.Context, ids []devices.ID) (map[devices.ID]jobs.Mark, error) {
	out := map[devices.ID]jobs.Mark{}
	condition, arg := database.IDSet(s.db.Postgres(), "device", "$1", ids)
	_, err := database.ReadFrom(ctx, s.host, s.db.Kept(), "reading which devices are barred from firmware", func(scan func(...any) error) (none struct{}, err error) {
		var device devices.ID
		var m jobs.Mark
		var barred, unconfirmed int64
		err = scan(&device, &barred, &m.Reason, &unconfirmed)
		m.BarredUntil, m.Unconfirmed = clock.Instant(barred), clock.Instant(unconfirmed)
		out[device] = m
		return none, err
	}, `SELECT device, barred_until, reason, unconfirmed_at FROM firmware_devices WHERE `+condition, arg)
	return out, err
}

// Unbar implements jobs.Store.
func (s *Store) Unbar(ctx context.Context, id devices.ID) error {
	return s.transactions.Exec(ctx, "lifting a bar", `UPDATE firmware_devices SET barred_until = 0, reason = '' WHERE device = $1`, string(id))
}

// confirm notes that a device has checked in.
const confirm = `UPDATE firmware_devices SET unconfirmed_at = 0 WHERE device = $1`

// ConfirmImage implements jobs.Store.
func (s *Store) ConfirmImage(ctx context.Context, id devices.ID) error {
	return s.transactions.Exec(ctx, "noting that a device has checked in", confirm, string(id))
}
