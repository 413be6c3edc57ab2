package database

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
)

// Host is the store, which monitors the database for its parts.
type Host interface {
	Database() *DB
	Log() *slog.Logger
	// Usable returns nil while the database is usable. It does no I/O.
	Usable() error
	// BeginRead starts a read, of at most ReadTimeout: it fails at once while the database is
	// unreachable.
	BeginRead(ctx context.Context) (context.Context, context.CancelFunc, error)
	// UseError wraps an error of the database, and requests a check of the database if the error
	// may mean that it is unreachable.
	UseError(ctx context.Context, doing string, err error) error
}

// FingerprintKey is the key, in the table fleet, of the fingerprint of the database's secret.
const FingerprintKey = "secret_fingerprint"

// ReadTimeout limits a read if its caller does not.
const ReadTimeout = 5 * time.Second

// IDSet returns a condition that is true for these sorted ids, and its argument: one statement for
// any number. On Postgres it is a subquery, of which every plan makes a table: with a plan that is kept from when the table was
// empty, "= ANY" would compare each row with each id.
func IDSet[T ~string](postgres bool, column, place string, ids []T) (condition string, arg any) {
	texts := devices.Texts(ids)
	if postgres {
		return column + " IN (SELECT unnest(CAST(" + place + " AS TEXT[])))", texts
	}
	text, err := json.Marshal(texts)
	if err != nil {
		panic(err) // cannot fail for strings
	}
	return column + " IN (SELECT value FROM json_each(" + place + "))", string(text)
}

// SetFact is a statement that sets a value of the table fleet: its arguments are the key and the value. With a condition appended it
// changes a value only if the present one meets it.
const SetFact = `INSERT INTO fleet (key, value) VALUES ($1, $2) ON CONFLICT (key) DO UPDATE SET value = excluded.value`

// Due is a statement that changes a row if work which one node does in each period is due, and records that it was done: the text
// and its arguments. key is that of the time in the table fleet. A recorded time in the future comes from a wrong clock, and is ignored.
func Due(key string, now time.Time, every time.Duration) (text string, args []any) {
	number := func(t time.Time) string { return fmt.Sprintf("%020d", clock.Micros(t)) } // ordered as text
	return SetFact + ` WHERE fleet.value < $3 OR fleet.value > $4`, []any{key, number(now), number(now.Add(-every)), number(now.Add(every))}
}

const factQuery = `SELECT value FROM fleet WHERE key = $1`

// ReadFact is Fact as a read of its own; doing is for its errors.
func ReadFact(ctx context.Context, h Host, doing, key string) (value string, err error) {
	value, _, err = One(ctx, h, doing, Scalar[string], factQuery, key)
	return value, err
}

// Fact returns a value of the table fleet; empty if there is none. from is a pool, a connection or a transaction.
func Fact(ctx context.Context, from interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}, key string) (value string, err error) {
	err = from.QueryRowContext(ctx, factQuery, key).Scan(&value)
	if errors.Is(err, sql.ErrNoRows) {
		return "", nil
	}
	return value, err
}
