package database

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
)

// Attempts at one transaction.
const (
	maxAttempts   = 5  // that fail for a passing reason, such as a deadlock
	maxConcurrent = 50 // that fail with ErrConcurrent
)

// ErrConcurrent is returned by a transaction that another one has overtaken: it is repeated at once, with the new state.
var ErrConcurrent = errors.New("another transaction has written the same row")

// ruleError is an error of who made the transaction, not of the database.
type ruleError struct{ err error }

// Error implements error.
func (e *ruleError) Error() string { return fmt.Sprint(e.err) }

// Rule wraps an error with which a transaction is rolled back and that Run returns as it is; nil is one, too.
func Rule(err error) error { return &ruleError{err} }

// Transactions runs transactions of one pool. It is safe for concurrent use.
type Transactions struct {
	Host  Host
	Pool  *sql.DB
	Limit time.Duration // of one transaction with all its attempts
}

// Run runs a transaction and commits it; run may be called several times. An error that was wrapped by Rule is returned as it
// is. All others wrap devices.ErrDatabase, and devices.ErrUncertain if it is not known whether the transaction was committed.
func (x *Transactions) Run(ctx context.Context, doing string, run func(ctx context.Context, tx *sql.Tx) error) error {
	ctx, cancel := context.WithTimeout(ctx, x.Limit)
	defer cancel()
	for attempt, overtaken := 1, 0; ; attempt++ {
		if err := x.Host.Usable(); err != nil {
			return err
		}
		unknown, err := x.Host.Database().Attempt(ctx, x.Pool, run)
		var rule *ruleError
		switch {
		case err == nil:
			return nil
		case errors.As(err, &rule):
			return rule.err
		case unknown:
			return fmt.Errorf("%w: %w", devices.ErrUncertain, x.Host.UseError(ctx, doing, err))
		case errors.Is(err, ErrConcurrent) && overtaken < maxConcurrent && ctx.Err() == nil:
			overtaken++
			attempt--
			continue
		case ctx.Err() != nil, FaultOf(err) != FaultTransient, attempt == maxAttempts:
			return x.Host.UseError(ctx, doing, err)
		}
		x.Host.Log().Warn("a transaction failed and is repeated", "doing", doing, "error", OneLine(err))
		clock.Sleep(ctx, time.Duration(attempt*attempt)*5*time.Millisecond)
	}
}

// Exec runs a transaction of one statement.
func (x *Transactions) Exec(ctx context.Context, doing, text string, args ...any) error {
	return x.Run(ctx, doing, func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, text, args...)
		return err
	})
}

// One runs a transaction of one statement; none is the error if that changes no row.
func (x *Transactions) One(ctx context.Context, doing string, none error, text string, args ...any) error {
	return x.Run(ctx, doing, func(ctx context.Context, tx *sql.Tx) error {
		n, err := Exec(ctx, tx, text, args...)
		if err == nil && n == 0 {
			return Rule(none)
		}
		return err
	})
}

// Attempt runs a transaction once, when it has the turn to write. unknown means that it may have been committed.
func (db *DB) Attempt(ctx context.Context, pool *sql.DB, run func(ctx context.Context, tx *sql.Tx) error) (unknown bool, err error) {
	release, err := db.Turn(ctx)
	if err != nil {
		return false, err
	}
	defer release()
	tx, err := pool.BeginTx(ctx, nil)
	if err != nil {
		return false, err
	}
	if err := run(ctx, tx); err != nil {
		// The error of a lost connection is more specific.
		if again := tx.Rollback(); again != nil && !errors.Is(again, sql.ErrTxDone) {
			return false, errors.Join(err, again)
		}
		return false, err
	}
	err = tx.Commit()
	return err != nil, err
}
