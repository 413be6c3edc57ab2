package jobstore

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"strings"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/jobs"
	"fleetd/internal/store/database"
)

func sortQueue(list []jobs.Queued) {
	slices.SortFunc(list, func(a, b jobs.Queued) int {
		return cmp.Or(cmp.Compare(a.Task.Seq, b.Task.Seq), cmp.Compare(a.Task.Job, b.Task.Job), cmp.Compare(a.Task.Round, b.Task.Round))
	})
}

// turnKey is the key of the turn in the table fleet. The value is a number that its holder raises, a space, and the instance
// that has it.
const turnKey = "jobs_turn"

// TakeTurn implements jobs.Store. On SQLite, which one process uses, it is always true.
func (s *Store) TakeTurn(ctx context.Context, instance string, lasts time.Duration) (mine bool, err error) {
	if err := s.host.Usable(); err != nil {
		return false, err
	}
	ctx, cancel := context.WithTimeout(ctx, txTimeout)
	defer cancel()
	if err := s.measure(ctx); err != nil {
		return false, s.host.UseError(ctx, "reading the clock", err)
	}
	if !s.db.Postgres() {
		return true, nil
	}
	now := time.Now()
	held, err := database.Fact(ctx, s.db.Read, turnKey)
	if err != nil {
		return false, s.host.UseError(ctx, "reading who has the turn of the jobs", err)
	}
	count, holder, _ := strings.Cut(held, " ")
	if held != "" && holder != instance && !s.turns.HasStopped(turnKey, held, now, lasts) {
		return false, nil
	}
	n, _ := strconv.ParseUint(count, 10, 64) // 0 if nobody had it
	taken, err := database.Exec(ctx, s.db.Jobs, database.SetFact+` WHERE fleet.value = $3`,
		turnKey, strconv.FormatUint(n+1, 10)+" "+instance, held)
	if err != nil {
		return false, s.host.UseError(ctx, "taking the turn of the jobs", err)
	}
	return taken > 0, nil
}

// Prune implements jobs.Store.
func (s *Store) Prune(ctx context.Context, before time.Time, limit int) (deleted int, err error) {
	err = s.transact(ctx, "deleting old jobs", func(ctx context.Context, t *transaction) error {
		deleted = 0
		if _, err := t.exec(ctx, `DELETE FROM job_confirmations WHERE until <= $1`, clock.Micros(t.now)); err != nil {
			return err
		}
		old, err := database.Collect(ctx, t.tx, database.Scalar[string], `SELECT job FROM jobs WHERE ended_at > 0 AND ended_at < $1 ORDER BY ended_at, job LIMIT $2`, clock.Micros(before), int64(min(limit, 100)))
		if err != nil {
			return err
		}
		many, err := t.tooMany(ctx)
		if err != nil {
			return err
		}
		ids := append(old, slices.DeleteFunc(many, func(id string) bool { return slices.Contains(old, id) })...)
		if len(ids) == 0 {
			return nil
		}
		all, err := t.lock(ctx, ids)
		if err != nil {
			return err
		}
		for _, id := range ids {
			j := all[id]
			if deleted >= limit || j == nil || j.EndedAt.IsZero() || slices.Contains(old, id) && !j.EndedAt.Before(before) { // retried meanwhile
				continue
			}
			if err := t.prune(ctx, j, limit, &deleted); err != nil {
				return err
			}
		}
		_, err = t.write(ctx, all)
		return err
	})
	return deleted, err
}

// tooMany returns the oldest ended jobs of a key without admin that has more than it may.
func (t *transaction) tooMany(ctx context.Context) ([]string, error) {
	ended, key := map[string]int64{}, ""
	_, err := database.Collect(ctx, t.tx, func(scan func(...any) error) (none struct{}, err error) {
		var owner string
		var n int64
		err = scan(&owner, &n)
		if ended[access.KeyOf(owner)] += n; ended[access.KeyOf(owner)] > jobs.MaxEndedJobs && !t.holder(owner).Admin {
			key = access.KeyOf(owner)
		}
		return none, err
	}, `SELECT owner, count(*) FROM jobs WHERE ended_at > 0 GROUP BY owner`)
	if err != nil || key == "" {
		return nil, err
	}
	c := conditions{text: []string{"ended_at > 0"}}
	c.owner("owner", key)
	return database.Collect(ctx, t.tx, database.Scalar[string], `SELECT job FROM (SELECT job, ended_at FROM jobs`+c.where()+` ORDER BY ended_at DESC, job DESC LIMIT `+strconv.Itoa(jobs.MaxOpenTasks)+` OFFSET `+strconv.Itoa(jobs.MaxEndedJobs)+`) j
 ORDER BY ended_at, job LIMIT 100`, c.args...)
}

// prune deletes tasks of a locked job, and the job with the last one. What stays is counted.
func (t *transaction) prune(ctx context.Context, j *locked, limit int, deleted *int) error {
	list, err := database.Collect(ctx, t.tx, scanOne, `SELECT `+taskNames+` FROM tasks t WHERE t.job = $1 ORDER BY t.device, t.round LIMIT $2`, j.ID, int64(limit-*deleted))
	if err != nil {
		return err
	}
	if len(list) > 0 {
		last := &list[len(list)-1]
		if _, err := t.exec(ctx, `DELETE FROM tasks WHERE job = $1 AND (device, round) <= ($2, $3)`, j.ID, string(last.Device), last.Round); err != nil {
			return err
		}
	}
	for i := range list {
		j.Uncount(&list[i])
	}
	*deleted += len(list)
	if j.Counts.Total() > 0 {
		j.touched = true
		return nil
	}
	*deleted++
	_, err = t.exec(ctx, `DELETE FROM jobs WHERE job = $1`, j.ID)
	return err
}
