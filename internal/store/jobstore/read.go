package jobstore

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"strings"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
	"fleetd/internal/store/database"
)

func scanPlain(scan func(...any) error) (jobs.Job, error) { return scanJob(scan) }

// Job implements jobs.Store.
func (s *Store) Job(ctx context.Context, id string) (jobs.Job, error) {
	j, found, err := database.One(ctx, s.host, "reading a job", scanPlain, `SELECT `+jobNames+` FROM jobs j WHERE j.job = $1`, database.Clean(id))
	if err == nil && !found {
		err = fmt.Errorf("job %s: %w", id, devices.ErrNotFound)
	}
	return j, err
}

// Repeated implements jobs.Store.
func (s *Store) Repeated(ctx context.Context, owner, key, hash string) (jobs.Job, error) {
	j, found, err := database.One(ctx, s.host, "looking for a repeated job", scanPlain, `SELECT `+jobNames+` FROM jobs j WHERE j.owner = $1 AND j.idem = $2 AND j.idem <> ''`, owner, key)
	switch {
	case err != nil:
		return jobs.Job{}, err
	case !found || !j.CreatedAt.After(s.Now().Add(-jobs.KeyLifetime)):
		return jobs.Job{}, devices.ErrNotFound
	case j.Hash != hash:
		return jobs.Job{}, jobs.ErrConflict
	}
	return j, nil
}

// Open implements jobs.Store.
func (s *Store) Open(ctx context.Context) ([]jobs.Job, error) {
	return database.Read(ctx, s.host, "reading the open jobs", scanPlain, `SELECT `+jobNames+` FROM jobs j WHERE j.ended_at = 0 ORDER BY j.job`)
}

// conditions is a list of conditions with their parameters.
type conditions struct {
	text []string
	args []any
}

// add adds a condition with one %s for each parameter.
func (c *conditions) add(text string, args ...any) {
	for _, arg := range args {
		c.args = append(c.args, arg)
		text = strings.Replace(text, "%s", "$"+strconv.Itoa(len(c.args)), 1)
	}
	c.text = append(c.text, text)
}

// owner adds the condition that a column has an owner or one of its children.
func (c *conditions) owner(column, owner string) {
	c.add("("+column+" = %s OR "+column+" > %s AND "+column+" < %s)", owner, owner+"/", owner+"0") // 0 follows the slash
}

func (c *conditions) where() string {
	if len(c.text) == 0 {
		return ""
	}
	return " WHERE " + strings.Join(c.text, " AND ")
}

// limit adds LIMIT for one row more than a page has.
func (c *conditions) limit(n int) string {
	c.args = append(c.args, int64(n)+1)
	return " LIMIT $" + strconv.Itoa(len(c.args))
}

// maxFiltered is how many rows one page with a filter reads at most. Where few match, the page is short although more follow.
const maxFiltered = 20_000

// Jobs implements jobs.Store.
func (s *Store) Jobs(ctx context.Context, f jobs.Filter) (list []jobs.Job, next string, err error) {
	var c conditions
	if f.Open || f.State != "" && f.State.Open() {
		c.text = append(c.text, "j.ended_at = 0") // those are found by an index
	}
	if f.State != "" {
		c.add("j.state = %s", string(f.State))
	}
	if f.Action != "" {
		c.add("j.action = %s", database.Clean(f.Action))
	}
	if f.Owner != "" {
		c.owner("j.owner", f.Owner)
	}
	if f.Group != "" {
		c.add("j.bundle = %s", database.Clean(f.Group))
	}
	if f.Device != "" {
		c.add("EXISTS (SELECT 1 FROM tasks t WHERE t.job = j.job AND t.device = %s)", database.Clean(string(f.Device)))
	}
	if f.After != "" {
		c.add("j.job < %s", database.Clean(f.After))
	}
	list, err = database.Read(ctx, s.host, "listing jobs", scanPlain, `SELECT `+jobNames+` FROM jobs j`+c.where()+` ORDER BY j.job DESC`+c.limit(f.Limit), c.args...)
	if len(list) > f.Limit {
		list = list[:f.Limit]
		next = list[f.Limit-1].ID
	}
	return list, next, err
}

// Tasks implements jobs.Store.
func (s *Store) Tasks(ctx context.Context, f jobs.TaskFilter) (list []jobs.Task, next string, err error) {
	var c conditions
	c.add("t.job = %s", database.Clean(f.Job))
	if f.After != "" {
		device, round, ok := cutLast(f.After)
		if !ok {
			return nil, "", devices.Errorf(devices.CodeBadRequest, "unknown cursor; pass next_cursor from the previous page")
		}
		c.add("(t.device, t.round) > (%s, %s)", device, round)
	}
	if f.Outcome != "" || f.Open || f.Running {
		end, err := database.Read(ctx, s.host, "listing tasks", func(scan func(...any) error) (t jobs.Task, err error) {
			err = scan(&t.Device, &t.Round)
			return t, err
		}, `SELECT t.device, t.round FROM tasks t`+c.where()+` ORDER BY t.device, t.round LIMIT 1 OFFSET `+strconv.Itoa(maxFiltered-1), c.args...)
		if err != nil {
			return nil, "", err
		}
		if len(end) > 0 {
			c.add("(t.device, t.round) <= (%s, %s)", string(end[0].Device), end[0].Round)
			next = cursorOf(&end[0])
		}
	}
	if f.Outcome != "" {
		c.add("t.outcome = %s", string(f.Outcome))
	}
	if f.Running {
		c.text = append(c.text, "t.state = 'running'")
	}
	if f.Open {
		c.text = append(c.text, "t.state <> 'ended'")
	}
	list, err = database.Read(ctx, s.host, "listing tasks", scanOne, `SELECT `+taskNames+` FROM tasks t`+c.where()+` ORDER BY t.device, t.round`+c.limit(f.Limit), c.args...)
	if len(list) > f.Limit {
		list = list[:f.Limit]
		next = cursorOf(&list[f.Limit-1])
	}
	return list, next, err
}

func cursorOf(t *jobs.Task) string { return string(t.Device) + "," + strconv.FormatInt(t.Round, 10) }

// cutLast parses the cursor of Tasks.
func cutLast(cursor string) (device string, round int64, ok bool) {
	i := strings.LastIndexByte(cursor, ',')
	if i < 0 || !database.IsText(cursor) {
		return "", 0, false
	}
	round, err := strconv.ParseInt(cursor[i+1:], 10, 64)
	return cursor[:i], round, err == nil
}

// Columns of a jobs.Candidate, as scanCandidate reads them before those of more.
const candidateNames = `t.job, t.round, t.device, t.seq, t.spread, t.due_at, t.attempt > 0 AS began`

func scanCandidate(scan func(...any) error, more ...any) (c jobs.Candidate, err error) {
	var due int64
	err = scan(append([]any{&c.Job, &c.Round, &c.Device, &c.Seq, &c.Spread, &due, &c.Began}, more...)...)
	c.DueAt = clock.Instant(due)
	return c, err
}

// Waiting implements jobs.Store.
func (s *Store) Waiting(ctx context.Context, id string, after int64, limit int) ([]jobs.Candidate, error) {
	return database.Read(ctx, s.host, "reading waiting tasks", func(scan func(...any) error) (jobs.Candidate, error) { return scanCandidate(scan) },
		`SELECT `+candidateNames+` FROM tasks t WHERE t.job = $1 AND t.state = 'waiting' AND t.spread > $2 ORDER BY t.spread LIMIT $3`,
		id, after, int64(limit))
}

// WaitingOf implements jobs.Store. One statement reads both: a task that is given back in between
// would be in neither list.
func (s *Store) WaitingOf(ctx context.Context, ids []devices.ID, perDevice int, without []string) (list []jobs.Candidate, running []devices.ID, err error) {
	if len(ids) == 0 {
		return nil, nil, nil
	}
	names := devices.Texts(ids)
	const columns = `SELECT ` + candidateNames
	const order = ` ORDER BY CASE WHEN t.due_at <= $2 AND (SELECT j.ready_at FROM jobs j WHERE j.job = t.job AND (t.attempt > 0 OR j.started < j.opened)) <= $2 THEN 0 ELSE 1 END, t.seq, t.job, t.round`
	text := `SELECT job, round, device, seq, spread, due_at, began, FALSE AS runs FROM (` + columns + `, row_number() OVER (PARTITION BY t.device` + order + `) AS place
 FROM tasks t WHERE t.device IN (SELECT value FROM json_each($1)) AND t.state = 'waiting' AND t.job NOT IN (SELECT value FROM json_each($4))) q WHERE place <= $3
 UNION ALL ` + columns + `, TRUE FROM tasks t WHERE t.device IN (SELECT value FROM json_each($1)) AND t.state = 'running' ORDER BY device, seq, job, round`
	without = append([]string{}, without...) // not nil, which is NULL
	set, but := any(textOf(names)), any(textOf(without))
	if s.db.Postgres() {
		// One lookup for each device: for a list, the planner may read all waiting tasks.
		text = `SELECT t.*, FALSE AS runs FROM unnest($1::text[]) AS d(device) CROSS JOIN LATERAL (` + columns + ` FROM tasks t
 WHERE t.device = d.device AND t.state = 'waiting' AND NOT t.job = ANY($4::text[])` + order + ` LIMIT $3) t
 UNION ALL SELECT t.*, TRUE FROM unnest($1::text[]) AS d(device) CROSS JOIN LATERAL (` + columns + ` FROM tasks t
 WHERE t.device = d.device AND t.state = 'running') t ORDER BY device, seq, job, round`
		set, but = sortedIDs(names), without
	}
	type row struct {
		jobs.Candidate
		runs bool
	}
	rows, err := database.Read(ctx, s.host, "reading the queues of devices", func(scan func(...any) error) (r row, err error) {
		r.Candidate, err = scanCandidate(scan, &r.runs)
		return r, err
	}, text, set, clock.Micros(s.Now()), int64(min(perDevice, math.MaxInt32)), but)
	for i := range rows {
		if rows[i].runs {
			running = append(running, rows[i].Device)
		} else {
			list = append(list, rows[i].Candidate)
		}
	}
	return list, running, err
}

// scanQueued reads the columns jobNames and taskNames.
func scanQueued(scan func(...any) error) (q jobs.Queued, err error) {
	q.Task, err = scanTask(func(task ...any) (err error) {
		q.Job, err = scanJob(scan, task...)
		return err
	})
	return q, err
}

// Queue implements jobs.Store.
func (s *Store) Queue(ctx context.Context, id devices.ID) ([]jobs.Queued, error) {
	return s.queue(ctx, id, "")
}

// queued selects the open tasks of device $1 with their jobs.
const queued = ` FROM tasks t JOIN jobs j ON j.job = t.job WHERE (t.device = $1 AND t.state = 'waiting' OR t.device = $1 AND t.state = 'running')`

// queue is Queue with a further condition on jobs j.
func (s *Store) queue(ctx context.Context, id devices.ID, condition string) ([]jobs.Queued, error) {
	list, err := database.ReadFrom(ctx, s.host, s.db.Kept(), "reading the queue of a device", scanQueued, `SELECT `+jobNames+`, `+taskNames+queued+condition, database.Clean(string(id)))
	sortQueue(list)
	return list, err
}
