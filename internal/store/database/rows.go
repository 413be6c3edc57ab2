package database

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"slices"
	"strconv"
	"strings"
)

// Rows inserts many rows with few statements: on Postgres one with an array for each column, on
// SQLite several with many rows each.
type Rows struct {
	Table   string
	Columns []Column
	// Conflict is the text after ON CONFLICT; empty: none.
	Conflict string
}

// Column is a column of Rows.
type Column struct {
	Name string
	Type string // of Postgres: text, bigint, boolean
}

// Text returns columns of the type text.
func Text(names ...string) []Column { return columnsOf("text", names) }

// Bigint returns columns of the type bigint.
func Bigint(names ...string) []Column { return columnsOf("bigint", names) }

// Boolean returns columns of the type boolean.
func Boolean(names ...string) []Column { return columnsOf("boolean", names) }

func columnsOf(kind string, names []string) (list []Column) {
	for _, name := range names {
		list = append(list, Column{name, kind})
	}
	return list
}

func (r *Rows) names() string {
	var names []string
	for _, c := range r.Columns {
		names = append(names, c.Name)
	}
	return strings.Join(names, ", ")
}

// sqliteRows is the largest number of rows of one statement of SQLite. Its parameters have no
// names, so SQLite need not look them up.
const sqliteRows = 32

// Insert inserts rows with values in the order of the columns (string, int64 or bool), and returns
// how many were changed.
func (r *Rows) Insert(ctx context.Context, tx *sql.Tx, db *DB, rows [][]any) (changed int64, err error) {
	if len(rows) == 0 {
		return 0, nil
	}
	head := "INSERT INTO " + r.Table + " (" + r.names() + ") "
	tail := ""
	if r.Conflict != "" {
		tail = " ON CONFLICT " + r.Conflict
	}
	if db.Postgres() {
		result, err := tx.ExecContext(ctx, head+"SELECT * FROM "+Unnest(r.Columns, 0)+tail, Arrays(r.Columns, rows)...)
		if err != nil {
			return 0, err
		}
		return result.RowsAffected()
	}
	var full *sql.Stmt // of sqliteRows rows
	if len(rows) >= 2*sqliteRows {
		if full, err = tx.PrepareContext(ctx, head+"VALUES "+questions(sqliteRows, len(r.Columns))+tail); err != nil {
			return 0, err
		}
		defer func() { err = errors.Join(err, full.Close()) }()
	}
	args := make([]any, 0, min(len(rows), sqliteRows)*len(r.Columns))
	for len(rows) > 0 {
		n := PowerOfTwo(len(rows), sqliteRows)
		args = args[:0]
		for _, row := range rows[:n] {
			args = append(args, row...)
		}
		var result sql.Result
		if full != nil && n == sqliteRows {
			result, err = full.ExecContext(ctx, args...)
		} else {
			result, err = tx.ExecContext(ctx, head+"VALUES "+questions(n, len(r.Columns))+tail, args...)
		}
		if err != nil {
			return changed, err
		}
		k, err := result.RowsAffected()
		if err != nil {
			return changed, err
		}
		changed += k
		rows = rows[n:]
	}
	return changed, nil
}

// Unnest returns `unnest($1::text[], $2::bigint[])`, with the first parameter after skip.
func Unnest(columns []Column, skip int) string {
	var parts []string
	for i, c := range columns {
		parts = append(parts, "$"+strconv.Itoa(skip+i+1)+"::"+c.Type+"[]")
	}
	return "unnest(" + strings.Join(parts, ", ") + ")"
}

// Arrays returns the parameters of Unnest.
func Arrays(columns []Column, rows [][]any) []any {
	args := make([]any, len(columns))
	for i, c := range columns {
		switch c.Type {
		case "bigint":
			args[i] = array[int64](rows, i)
		case "boolean":
			args[i] = array[bool](rows, i)
		default:
			args[i] = array[string](rows, i)
		}
	}
	return args
}

func array[T any](rows [][]any, column int) []T {
	list := make([]T, len(rows))
	for i, row := range rows {
		list[i] = row[column].(T)
	}
	return list
}

// questions returns `(?, ?), (?, ?)` for two rows of two columns.
func questions(rows, columns int) string {
	one := "(?" + strings.Repeat(", ?", columns-1) + ")"
	return one + strings.Repeat(", "+one, rows-1)
}

// Label is a row of device_labels.
type Label struct{ Key, Value, Device string }

var labelRows = Rows{Table: "device_labels", Columns: Text("key", "value", "device"), Conflict: "DO NOTHING"}

// InsertLabels inserts missing rows of labels in the order of their keys.
func (db *DB) InsertLabels(ctx context.Context, tx *sql.Tx, labels []Label) error {
	slices.SortFunc(labels, func(a, b Label) int {
		return cmp.Or(cmp.Compare(a.Key, b.Key), cmp.Compare(a.Value, b.Value), cmp.Compare(a.Device, b.Device))
	})
	rows := make([][]any, len(labels))
	for i, l := range labels {
		rows[i] = []any{l.Key, l.Value, l.Device}
	}
	_, err := labelRows.Insert(ctx, tx, db, rows)
	return err
}
