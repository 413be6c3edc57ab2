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
	"log/slog"
	"sync/atomic"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/jobs"
	"fleetd/internal/store/database"
)

const (
	// txTimeout limits one transaction, if its caller does not.
	txTimeout = 10 * time.Second
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

	transactions database.Transactions
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
	s := &Store{host: host, db: host.Database(), log: log, transactions: database.Transactions{Host: host, Pool: host.Database().Jobs, Limit: txTimeout}, wall: clock.Now, notify: func([]jobs.Change, []jobs.Task) {},
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

// transact runs a transaction and commits it. run may be called several times. Errors are as of database.Transactions.
func (s *Store) transact(ctx context.Context, doing string, run func(ctx context.Context, t *transaction) error) error {
	ctx, cancel := context.WithTimeout(ctx, txTimeout)
	defer cancel()
	for again := false; ; again = true {
		if s.measured.Load() == nil || again {
			if err := s.measure(ctx); err != nil {
				return s.host.UseError(ctx, "reading the clock", err)
			}
		}
		err := s.try(ctx, doing, func(ctx context.Context, t *transaction) error {
			if err := t.checkClock(ctx); err != nil {
				return err
			}
			return run(ctx, t)
		})
		if !errors.Is(err, errStepped) {
			return err
		}
	}
}

// try is transact by the clock as it was measured, whatever became of it.
func (s *Store) try(ctx context.Context, doing string, run func(ctx context.Context, t *transaction) error) error {
	var t *transaction
	err := s.transactions.Run(ctx, doing, func(ctx context.Context, tx *sql.Tx) error {
		t = &transaction{Store: s, tx: tx, now: s.Now()}
		if m := s.measured.Load(); m != nil {
			t.steps = m.steps
		}
		return run(ctx, t)
	})
	if err != nil {
		return err
	}
	s.history.confirm(t.begun)
	if len(t.changed) > 0 {
		s.notify(t.changed, t.ended)
	}
	return nil
}

// exec runs a statement and returns how many rows it changed.
func (t *transaction) exec(ctx context.Context, text string, args ...any) (int64, error) {
	return database.Exec(ctx, t.tx, text, args...)
}
