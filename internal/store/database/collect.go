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
