package jobstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"fleetd/internal/jobs"
	"fleetd/internal/store/database"
)

// begunKey is the key in the table fleet of a counter that goes up with each commit that begins tasks. A database that has
// begun fewer than this process knows was restored, or lost commits: what it shows as waiting may have run.
const begunKey = "jobs_begun"

// History is what a process knows of the beginnings of tasks.
type History struct {
	Lineage string // of the database; empty: nothing is known
	Begun   int64  // commits that began tasks
}

// history is the newest History that a Store knows.
type history struct {
	mu     sync.Mutex
	known  History
	tested bool // the database was compared with it
}

func (h *history) get() (History, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.known, h.tested
}

// confirm notes a commit.
func (h *history) confirm(n int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.known.Begun = max(h.known.Begun, n)
}

// compare reports whether a database has fewer beginnings than were known of its lineage before it was read. What it has of
// another lineage is known from then on.
func (h *history) compare(before History, lineage string, n int64) (backwards bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.known.Lineage != lineage {
		h.known = History{lineage, n}
	}
	h.tested = true
	return before.Lineage == lineage && n < before.Begun
}

// Known sets what an earlier process with the same data directory noted.
func Known(h History) Option { return func(s *Store) { s.history.known = h } }

// History returns what is to be noted for the next process.
func (s *Store) History() History {
	known, _ := s.history.get()
	return known
}

var errBackwards = errors.New("the database has begun fewer tasks than this process knows")

// countBegin counts this commit, and returns errBackwards if the database is older than what this process knows.
func (t *transaction) countBegin(ctx context.Context) error {
	err := t.tx.QueryRowContext(ctx, `INSERT INTO fleet (key, value) VALUES ($1, '1') ON CONFLICT (key) DO UPDATE SET value = CAST(CAST(fleet.value AS BIGINT) + 1 AS TEXT) RETURNING CAST(value AS BIGINT)`,
		begunKey).Scan(&t.begun)
	if known, _ := t.history.get(); err == nil && t.begun <= known.Begun {
		return database.Rule(errBackwards)
	}
	return err
}

// CheckHistory implements jobs.Store.
func (s *Store) CheckHistory(ctx context.Context) error {
	type head struct {
		lineage string
		n       int64
	}
	before, _ := s.history.get() // tasks may begin while the database is read
	is, found, err := database.One(ctx, s.host, "reading how many tasks have begun", func(scan func(...any) error) (h head, err error) {
		err = scan(&h.lineage, &h.n)
		return h, err
	}, `SELECT f.lineage, COALESCE((SELECT CAST(value AS BIGINT) FROM fleet WHERE key = $1), 0) FROM fleet_revision f WHERE f.one = 1`, begunKey)
	if err != nil || !found {
		return err
	}
	if !s.history.compare(before, is.lineage, is.n) {
		return nil
	}
	s.log.Warn("the database has begun fewer tasks of jobs than this node knows, as after a restore: all open jobs are halted", "begun", is.n, "known", before.Begun)
	return s.HaltRestored(ctx, false)
}

// HaltRestored implements jobs.Store.
func (s *Store) HaltRestored(ctx context.Context, planned bool) error {
	return s.transact(ctx, "halting the jobs of a restored database", func(ctx context.Context, t *transaction) error {
		ids, err := database.Collect(ctx, t.tx, database.Scalar[string], `SELECT job FROM jobs WHERE ended_at = 0`)
		if err != nil {
			return err
		}
		all, err := t.lock(ctx, ids)
		if err != nil {
			return err
		}
		for id, j := range all {
			before := j.State
			if planned && j.Idle() {
				delete(all, id)
				continue
			}
			j.Halt(jobs.ReasonRestored)
			j.touched = j.State != before
		}
		running, err := database.Collect(ctx, t.tx, scanOne, `SELECT `+taskNames+` FROM tasks t WHERE t.state = 'running'`)
		if err != nil {
			return err
		}
		running = slices.DeleteFunc(running, func(task jobs.Task) bool { return all[task.Job] == nil })
		for i := range running {
			running[i].Detail = "it ran when the database was restored; it is not known whether the device did it"
		}
		if err := t.endWaiting(ctx, all, running, jobs.Unknown, jobs.CodeRestored); err != nil {
			return err
		}
		// The next beginning is above what every node knows.
		known, _ := t.history.get()
		t.begun = known.Begun + 1
		_, err = t.exec(ctx, database.SetFact+` WHERE CAST(fleet.value AS BIGINT) < $3`,
			begunKey, fmt.Sprint(t.begun), t.begun)
		return err
	})
}
