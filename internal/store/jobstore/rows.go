package jobstore

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
	"fleetd/internal/store/database"
)

// never is the ready_at of jobs that only another change lets begin tasks.
const never = int64(math.MaxInt64)

// Columns of jobs: those that never change, those that only people change, and those that the
// work itself changes.
var (
	fixedColumns = append(database.Text("job", "owner", "owner_name", "idem", "hash", "action", "confirmed", "devices", "bundle"), database.Bigint("created_at")...)
	givenColumns = database.Text("spec")
	movedColumns = append(database.Text("state", "reason", "prior", "prepared_to"), database.Bigint("version", "ready_at", "stage", "stage_end", "opened", "started", "held",
		"passed_ok", "round", "round_n", "next_at", "tat", "missed", "reserved", "waiting", "running", "n_ok", "n_failed", "n_unknown", "n_refused",
		"n_expired", "n_cancelled", "n_already", "n_superseded", "n_gone", "begun_at", "until", "ended_at", "harmed", "provable", "astray")...)
	jobColumns = slices.Concat(fixedColumns, givenColumns, movedColumns)
	jobRows    = database.Rows{Table: "jobs", Columns: jobColumns}
	jobMoves   = database.Rows{Table: "jobs", Columns: slices.Concat(database.Text("job"), movedColumns), Keys: 1}
	jobNames   = database.Names("j.", jobColumns)
)

// Columns of tasks.
var (
	keyColumns  = append(database.Text("job", "device"), database.Bigint("round")...)
	taskColumns = slices.Concat(keyColumns, endColumns, database.Bigint("seq", "spread"))
	endColumns  = slices.Concat(database.Text("state", "instance", "node", "call_id", "outcome", "code", "detail", "result", "phase", "elf_before", "elf_target", "rollout"),
		database.Bigint("due_at", "attempt", "fence", "begun_at", "ended_at", "limit_at"), database.Boolean("late"))
	taskRows  = database.Rows{Table: "tasks", Columns: taskColumns}
	taskEnds  = database.Rows{Table: "tasks", Columns: slices.Concat(keyColumns, endColumns), Keys: len(keyColumns)}
	taskNames = database.Names("t.", taskColumns)
)

// readyAt returns a time before which the job lets no task begin unless its row changes; 0: it may
// now. It may be earlier than the truth, never later.
func readyAt(j *jobs.Job, now time.Time) int64 {
	wait, at := j.FleetGate(now)
	switch {
	case wait == jobs.WaitNone:
		return 0
	case j.State != jobs.Running || at.IsZero():
		return never
	}
	return clock.Micros(at)
}

// fixed, given and moved return the values of the columns.
func fixed(j *jobs.Job) []any {
	return []any{j.ID, j.Owner, database.Clean(j.OwnerName), j.Key, j.Hash, j.Action, textOf(j.Confirmed), database.Clean(j.Devices), j.Group, clock.Micros(j.CreatedAt)}
}

func given(j *jobs.Job) []any { return []any{textOf(&j.Spec)} }

func moved(j *jobs.Job, now time.Time) []any {
	values := []any{string(j.State), database.Clean(j.Reason), string(j.Before), database.Clean(j.Cursor), j.Version, readyAt(j, now), int64(j.Stage), clock.Micros(j.StageEnd), j.Opened, j.Started, j.Held,
		j.PassedOK, j.Round, j.RoundN, clock.Micros(j.NextAt), clock.Micros(j.TAT), j.Missed, j.Reserved, j.Counts.Waiting, j.Counts.Running}
	for _, n := range j.Counts.Ended {
		values = append(values, n)
	}
	return append(values, clock.Micros(j.BegunAt), clock.Micros(j.Until), clock.Micros(j.EndedAt), j.Harmed, j.Provable, j.Astray)
}

// textOf encodes what was decoded from JSON before, or is plain text.
func textOf(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic("jobstore: " + err.Error())
	}
	return database.Clean(string(text))
}

// scanJob reads the columns jobNames, and then those of more.
func scanJob(scan func(...any) error, more ...any) (j jobs.Job, err error) {
	var confirmed, spec string
	var created, ready, stageEnd, next, tat, begun, until, ended int64
	to := []any{&j.ID, &j.Owner, &j.OwnerName, &j.Key, &j.Hash, &j.Action, &confirmed, &j.Devices, &j.Group, &created, &spec,
		&j.State, &j.Reason, &j.Before, &j.Cursor, &j.Version, &ready, &j.Stage, &stageEnd, &j.Opened, &j.Started, &j.Held,
		&j.PassedOK, &j.Round, &j.RoundN, &next, &tat, &j.Missed, &j.Reserved, &j.Counts.Waiting, &j.Counts.Running}
	for i := range j.Counts.Ended {
		to = append(to, &j.Counts.Ended[i])
	}
	if err := scan(append(append(to, &begun, &until, &ended, &j.Harmed, &j.Provable, &j.Astray), more...)...); err != nil {
		return j, err
	}
	j.CreatedAt, j.StageEnd, j.NextAt, j.TAT = clock.Instant(created), clock.Instant(stageEnd), clock.Instant(next), clock.Instant(tat)
	j.BegunAt, j.Until, j.EndedAt = clock.Instant(begun), clock.Instant(until), clock.Instant(ended)
	if err := json.Unmarshal([]byte(confirmed), &j.Confirmed); err != nil {
		return j, fmt.Errorf("the rules of job %s cannot be read: %w", j.ID, err)
	}
	if err := json.Unmarshal([]byte(spec), &j.Spec); err != nil {
		return j, fmt.Errorf("the document of job %s cannot be read: %w", j.ID, err)
	}
	if j.Spec.When == nil {
		j.Spec.When = &api.JobWhen{} // the rules count on what jobs.Check fills in
	}
	if j.Spec.Pace == nil {
		j.Spec.Pace = &api.JobPace{Rate: jobs.DefaultRate, Concurrency: jobs.DefaultTogether}
	}
	return j, nil
}

func taskValues(t *jobs.Task) []any {
	return append(endValues(t), t.Seq, t.Spread)
}

// endValues returns the key and the columns that an end changes.
func endValues(t *jobs.Task) []any {
	rollout := ""
	if t.Rollout != nil {
		rollout = textOf(t.Rollout)
	}
	if t.State == jobs.TaskEnded {
		t.Phase, t.LimitAt = jobs.PhaseNone, time.Time{}
	}
	return []any{t.Job, string(t.Device), t.Round, string(t.State), t.Instance, database.Clean(t.Node), t.Call, string(t.Outcome), t.Code,
		database.Clean(t.Detail), database.Clean(t.Result), string(t.Phase), t.Before, t.Target, rollout,
		clock.Micros(t.DueAt), int64(t.Attempt), t.Fence, clock.Micros(t.BegunAt), clock.Micros(t.EndedAt), clock.Micros(t.LimitAt), t.Late}
}

// scanTask reads the columns taskNames, and then those of more.
func scanTask(scan func(...any) error, more ...any) (t jobs.Task, err error) {
	var due, begun, ended, limit int64
	var rollout string
	to := []any{&t.Job, &t.Device, &t.Round, &t.State, &t.Instance, &t.Node, &t.Call, &t.Outcome, &t.Code, &t.Detail, &t.Result, &t.Phase, &t.Before, &t.Target, &rollout,
		&due, &t.Attempt, &t.Fence, &begun, &ended, &limit, &t.Late, &t.Seq, &t.Spread}
	err = scan(append(to, more...)...)
	t.DueAt, t.BegunAt, t.EndedAt, t.LimitAt = clock.Instant(due), clock.Instant(begun), clock.Instant(ended), clock.Instant(limit)
	if err == nil && rollout != "" {
		t.Rollout = &jobs.Rollout{}
		if err := json.Unmarshal([]byte(rollout), t.Rollout); err != nil {
			return t, fmt.Errorf("the rollout of a task of job %s cannot be read: %w", t.Job, err)
		}
	}
	return t, err
}

func scanOne(scan func(...any) error) (jobs.Task, error) { return scanTask(scan) }

// locked is a job whose row this transaction has locked.
type locked struct {
	jobs.Job
	before  jobs.Change // without its job
	begun   bool        // before
	touched bool
}

// lock reads and locks jobs, in order of id. Those that do not exist are left out.
func (t *transaction) lock(ctx context.Context, ids []string) (map[string]*locked, error) {
	condition, arg := database.IDSet(t.db.Postgres(), "j.job", "$1", sortedIDs(ids))
	list, err := database.Collect(ctx, t.tx, func(scan func(...any) error) (*locked, error) {
		j, err := scanJob(scan)
		return &locked{Job: j, before: jobs.Change{From: j.State, FromStage: j.Stage, FromOpen: j.Counts.Open()}, begun: !j.BegunAt.IsZero()}, err
	}, "SELECT "+jobNames+" FROM jobs j WHERE "+condition+" ORDER BY j.job"+t.db.Lock("FOR UPDATE"), arg)
	all := make(map[string]*locked, len(list))
	for _, j := range list {
		all[j.ID] = j
	}
	t.now = t.Store.Now() // it may have waited for the locks
	return all, err
}

// lockOne is lock of one job that must exist.
func (t *transaction) lockOne(ctx context.Context, id string) (*locked, error) {
	all, err := t.lock(ctx, []string{id})
	if err != nil {
		return nil, err
	}
	j := all[id]
	if j == nil {
		return nil, database.Rule(fmt.Errorf("job %s: %w", id, devices.ErrNotFound))
	}
	return j, nil
}

// change runs a transaction in which f changes one job, whose row is locked and is written if it was touched. With creating, it
// has the lock of lockCreating.
func (s *Store) change(ctx context.Context, doing, id string, creating bool, f func(ctx context.Context, t *transaction, row *locked) error) (j jobs.Job, err error) {
	err = s.transact(ctx, doing, func(ctx context.Context, t *transaction) error {
		if creating {
			if err := t.lockCreating(ctx); err != nil {
				return err
			}
		}
		row, err := t.lockOne(ctx, id)
		if err != nil {
			return err
		}
		if err := f(ctx, t, row); err != nil {
			return err
		}
		_, err = t.write(ctx, map[string]*locked{id: row})
		j = row.Job
		return err
	})
	return j, err
}

// write writes touched jobs with their next versions, and returns them.
func (t *transaction) write(ctx context.Context, all map[string]*locked) (changed []jobs.Change, err error) {
	var rows [][]any
	for _, j := range all {
		if !j.touched {
			continue
		}
		j.Version++
		rows = append(rows, append([]any{j.ID}, moved(&j.Job, t.now)...))
		change := j.before
		change.Job, change.First = j.Job, !j.begun && !j.BegunAt.IsZero()
		changed = append(changed, change)
	}
	slices.SortFunc(rows, func(a, b []any) int { return strings.Compare(a[0].(string), b[0].(string)) })
	slices.SortFunc(changed, func(a, b jobs.Change) int { return strings.Compare(a.Job.ID, b.Job.ID) })
	t.changed = append(t.changed, changed...)
	_, err = jobMoves.Write(ctx, t.tx, t.db, rows)
	return changed, err
}

// touch notes that the job's row is to be written, after the rules that time brings.
func (t *transaction) touch(j *locked) {
	j.Settle(t.now)
	j.touched = true
}

// sortedIDs returns the ids of a list once, sorted.
func sortedIDs(ids []string) []string { return slices.Compact(slices.Sorted(slices.Values(ids))) }
