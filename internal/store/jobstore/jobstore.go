// Package jobstore keeps jobs and tasks in the database. It implements jobs.Store.
//
// Every transaction that changes tasks locks the rows of their jobs first, in order of id, lets
// the rules of package jobs change them in memory, and writes them together with the tasks. So
// concurrency, rate, stages and stop rules hold exactly over all nodes, and the counters of a job
// always equal its tasks. Two jobs may want the same device at once: the unique index tasks_one
// decides, and its entries are made in the order of devices, so that transactions do not wait for
// each other in a circle.
//
// On SQLite every commit reaches the disk (synchronous=FULL) before it is answered; on Postgres
// the server's synchronous_commit decides.
package jobstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
	"fleetd/internal/store/database"
)

const (
	// txTimeout limits one transaction, if its caller does not.
	txTimeout = 10 * time.Second
	// attempts is how often a transaction is tried that fails for a passing reason, such as
	// a deadlock.
	attempts = 5
)

// Store implements jobs.Store.
type Store struct {
	host     database.Host
	db       *database.DB
	log      *slog.Logger
	leases   bool
	wall     func() time.Time // the clock of the node
	notify   func([]jobs.Change, []jobs.Task)
	holder   func(key string) access.Holder
	history  history
	turns    database.Watch
	measured atomic.Pointer[measurement]
	// Conflicts counts transactions that were made again because another node began a task of
	// the same device at the same time.
	Conflicts atomic.Int64
}

var _ jobs.Store = (*Store)(nil)

// Option is an option of New.
type Option func(*Store)

// Leases sets that processes have leases in the table nodes: one without a lease begins nothing.
func Leases() Option { return func(s *Store) { s.leases = true } }

// Clock sets the clock of the node in place of clock.Now, which decides on SQLite.
func Clock(wall func() time.Time) Option { return func(s *Store) { s.wall = wall } }

// Notify sets what is called after every commit, with the jobs whose rows were written and the tasks that
// ended, or that failed and wait to be repeated. It must not block. An outcome of COMMIT that is not known is not reported.
func Notify(f func(changed []jobs.Change, ended []jobs.Task)) Option {
	return func(s *Store) { s.notify = f }
}

// Holders sets what tells whose keys the owners of jobs are, for the shares of the limits. Without it all are
// administrators.
func Holders(of func(key string) access.Holder) Option { return func(s *Store) { s.holder = of } }

// New returns a Store in a database.
func New(host database.Host, log *slog.Logger, options ...Option) *Store {
	s := &Store{host: host, db: host.Database(), log: log, wall: clock.Now, notify: func([]jobs.Change, []jobs.Task) {},
		holder: func(string) access.Holder { return access.Holder{Admin: true} }}
	for _, option := range options {
		option(s)
	}
	return s
}

// transaction is one attempt to write.
type transaction struct {
	*Store
	tx    *sql.Tx
	now   time.Time
	steps time.Duration // of the clock that now is of

	begun   int64         // of the counter of beginnings, after this commit; 0: it began none
	changed []jobs.Change // for notify
	ended   []jobs.Task
}

// ruleError is an error of the rules: the transaction is rolled back, and it is returned as it is.
type ruleError struct{ err error }

func (e *ruleError) Error() string { return e.err.Error() }

// rule wraps an error of the rules.
func rule(err error) error {
	if err == nil {
		return nil
	}
	return &ruleError{err}
}

// transact runs a transaction and commits it. run may be called several times.
func (s *Store) transact(ctx context.Context, doing string, run func(ctx context.Context, t *transaction) error) error {
	if s.measured.Load() == nil {
		if err := s.measure(ctx); err != nil {
			return s.host.UseError(ctx, "reading the clock", err)
		}
	}
	return s.try(ctx, doing, func(ctx context.Context, t *transaction) error {
		if err := t.checkClock(ctx); err != nil {
			return err
		}
		return run(ctx, t)
	})
}

// try is transact by the clock as it was measured, whatever became of it.
func (s *Store) try(ctx context.Context, doing string, run func(ctx context.Context, t *transaction) error) error {
	ctx, cancel := context.WithTimeout(ctx, txTimeout)
	defer cancel()
	for attempt := 1; ; attempt++ {
		if err := s.host.Usable(); err != nil {
			return err
		}
		unknown, err := s.attempt(ctx, run)
		var refused *ruleError
		switch {
		case err == nil:
			return nil
		case errors.As(err, &refused):
			return refused.err
		case errors.Is(err, errStepped):
			if err := s.measure(ctx); err != nil {
				return s.host.UseError(ctx, "reading the clock", err)
			}
			attempt--
			continue
		case unknown:
			return fmt.Errorf("%w: %w", devices.ErrUncertain, s.host.UseError(ctx, doing, err))
		case ctx.Err() != nil, database.FaultOf(err) != database.FaultTransient, attempt == attempts:
			return s.host.UseError(ctx, doing, err)
		}
		s.log.Warn("a transaction of jobs failed and is repeated", "doing", doing, "error", database.OneLine(err))
		pause := time.NewTimer(time.Duration(attempt*attempt) * 5 * time.Millisecond)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
		}
	}
}

// attempt makes one attempt. unknown means that it may have been committed.
func (s *Store) attempt(ctx context.Context, run func(ctx context.Context, t *transaction) error) (unknown bool, err error) {
	release, err := s.db.Turn(ctx)
	if err != nil {
		return false, err
	}
	defer release()
	tx, err := s.db.Jobs.BeginTx(ctx, nil)
	if err != nil {
		return false, err
	}
	t := &transaction{Store: s, tx: tx, now: s.Now()}
	if m := s.measured.Load(); m != nil {
		t.steps = m.steps
	}
	if err := run(ctx, t); err != nil {
		if again := tx.Rollback(); again != nil && !errors.Is(again, sql.ErrTxDone) {
			return false, errors.Join(err, again)
		}
		return false, err
	}
	if err := tx.Commit(); err != nil {
		return true, err
	}
	s.history.confirm(t.begun)
	if len(t.changed) > 0 {
		s.notify(t.changed, t.ended)
	}
	return false, nil
}

// exec runs a statement and returns how many rows it changed.
func (t *transaction) exec(ctx context.Context, text string, args ...any) (int64, error) {
	result, err := t.tx.ExecContext(ctx, text, args...)
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

// forUpdate locks the rows of a query. On SQLite the transaction has the whole database.
func (t *transaction) forUpdate() string {
	if t.db.Postgres() {
		return " FOR UPDATE"
	}
	return ""
}
