package database

import (
	"context"
	"database/sql"
	"errors"
)

// Queryer is a *sql.DB, a *sql.Tx or a *sql.Conn.
type Queryer interface {
	QueryContext(ctx context.Context, text string, args ...any) (*sql.Rows, error)
}

// maxKept is how many statements are kept; later ones are compiled for each query.
const maxKept = 64

// keeper is what Kept returns.
type keeper struct{ *DB }

// Kept returns what runs frequent queries, whose texts are always the same: on SQLite by prepared statements, which are kept,
// since compiling may cost more than running. The driver of Postgres keeps statements itself.
func (db *DB) Kept() Queryer { return keeper{db} }

// QueryContext implements Queryer.
func (k keeper) QueryContext(ctx context.Context, text string, args ...any) (*sql.Rows, error) {
	known, ok := k.kept.Load(text)
	if !ok {
		if k.Postgres() || k.keptN.Load() >= maxKept {
			return k.Read.QueryContext(ctx, text, args...)
		}
		stmt, err := k.Read.PrepareContext(ctx, text)
		if err != nil {
			return nil, err
		}
		if known, ok = k.kept.LoadOrStore(text, stmt); ok { // another caller was first
			_ = stmt.Close()
		} else {
			k.keptN.Add(1)
		}
	}
	return known.(*sql.Stmt).QueryContext(ctx, args...)
}

// Collect runs a query and reads all its rows.
func Collect[T any](ctx context.Context, db Queryer, scan func(func(...any) error) (T, error), text string, args ...any) ([]T, error) {
	return CollectAbout(ctx, db, 0, scan, text, args...)
}

// CollectAbout is Collect for about n rows, for which there is room from the start.
func CollectAbout[T any](ctx context.Context, db Queryer, n int, scan func(func(...any) error) (T, error), text string, args ...any) ([]T, error) {
	rows, err := db.QueryContext(ctx, text, args...)
	if err != nil {
		return nil, err
	}
	var out []T
	if n > 0 {
		out = make([]T, 0, n)
	}
	for rows.Next() {
		row, err := scan(rows.Scan)
		if err != nil {
			return nil, errors.Join(err, rows.Close())
		}
		out = append(out, row)
	}
	return out, rows.Err()
}

// Read runs a query on the readers and reads all its rows, as one of Host's reads; doing is for its errors.
func Read[T any](ctx context.Context, h Host, doing string, scan func(func(...any) error) (T, error), text string, args ...any) ([]T, error) {
	return ReadFrom(ctx, h, h.Database().Read, doing, scan, text, args...)
}

// ReadFrom is Read with other connections, or kept statements.
func ReadFrom[T any](ctx context.Context, h Host, from Queryer, doing string, scan func(func(...any) error) (T, error), text string, args ...any) ([]T, error) {
	ctx, cancel, err := h.BeginRead(ctx)
	if err != nil {
		return nil, err
	}
	defer cancel()
	rows, err := Collect(ctx, from, scan, text, args...)
	if err != nil {
		return nil, h.UseError(ctx, doing, err)
	}
	return rows, nil
}

// One is Read for one row, if there is one.
func One[T any](ctx context.Context, h Host, doing string, scan func(func(...any) error) (T, error), text string, args ...any) (row T, found bool, err error) {
	rows, err := Read(ctx, h, doing, scan, text, args...)
	if found = len(rows) > 0; found {
		row = rows[0]
	}
	return row, found, err
}

// Exec runs a statement of a pool, a connection or a transaction, and returns how many rows it changed.
func Exec(ctx context.Context, x interface {
	ExecContext(ctx context.Context, text string, args ...any) (sql.Result, error)
}, text string, args ...any) (int64, error) {
	result, err := x.ExecContext(ctx, text, args...)
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

// Change is Exec with the limits and errors of Read.
func Change(ctx context.Context, h Host, pool *sql.DB, doing, text string, args ...any) (int64, error) {
	ctx, cancel, err := h.BeginRead(ctx)
	if err != nil {
		return 0, err
	}
	defer cancel()
	n, err := Exec(ctx, pool, text, args...)
	if err != nil {
		return 0, h.UseError(ctx, doing, err)
	}
	return n, nil
}

// Scalar reads rows of one column.
func Scalar[T any](scan func(...any) error) (v T, err error) {
	err = scan(&v)
	return v, err
}
