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

// kept is a prepared statement in place of its text.
type kept struct{ *sql.Stmt }

func (k kept) QueryContext(ctx context.Context, _ string, args ...any) (*sql.Rows, error) {
	return k.Stmt.QueryContext(ctx, args...)
}

// Kept returns what runs a frequent query: on SQLite the prepared statement, which is kept, since compiling may cost more than
// running it. The driver of Postgres keeps statements itself.
func (db *DB) Kept(ctx context.Context, text string) Queryer {
	if known, ok := db.kept.Load(text); ok {
		return known.(kept)
	}
	if db.Postgres() || db.keptN.Load() >= maxKept {
		return db.Read
	}
	stmt, err := db.Read.PrepareContext(ctx, text)
	if err != nil {
		return db.Read // which returns the error
	}
	if known, other := db.kept.LoadOrStore(text, kept{stmt}); other { // another caller was first
		_ = stmt.Close()
		return known.(kept)
	}
	db.keptN.Add(1)
	return kept{stmt}
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
