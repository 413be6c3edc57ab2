package database

import (
	"cmp"
	"context"
	"database/sql"
	"slices"
	"strconv"
	"strings"
)

// Rows writes many rows with few statements: on Postgres one with an array for each column, on
// SQLite several with many rows each.
type Rows struct {
	Table   string
	Columns []Column
	// Keys is how many of the columns, the first ones, identify the rows to update; 0: rows are inserted.
	Keys int
	// Conflict is the text after ON CONFLICT for rows to insert; empty: none.
	Conflict string
	// Limit is the largest number of rows of one statement of SQLite, a power of two; 0: sqliteRows.
	Limit int
}

// Column is a column of Rows.
type Column struct {
	Name string
	Type string // of Postgres: text, bigint, boolean
	// Value is an expression with ? for the new value, for rows to update; empty: the new value.
	Value string
}

// Text returns columns of the type text.
func Text(names ...string) []Column { return columnsOf("text", names) }

// Bigint returns columns of the type bigint.
func Bigint(names ...string) []Column { return columnsOf("bigint", names) }

// Boolean returns columns of the type boolean.
func Boolean(names ...string) []Column { return columnsOf("boolean", names) }

func columnsOf(kind string, names []string) (list []Column) {
	for _, name := range names {
		list = append(list, Column{Name: name, Type: kind})
	}
	return list
}

// Names returns the names of columns, each after the prefix.
func Names(prefix string, columns []Column) string {
	var names []string
	for _, c := range columns {
		names = append(names, prefix+c.Name)
	}
	return strings.Join(names, ", ")
}

// sqliteRows is the default of Rows.Limit. Parameters of SQLite have no names, which it would have to look up.
const sqliteRows = 32

// text returns the statement that writes the rows of a VALUES or SELECT.
func (r *Rows) text(values string) string {
	names := Names("", r.Columns)
	if r.Keys == 0 {
		if r.Conflict != "" {
			values += " ON CONFLICT " + r.Conflict
		}
		return "INSERT INTO " + r.Table + " (" + names + ") " + values
	}
	var where, set []string
	for i, c := range r.Columns {
		value := "v." + c.Name
		if i < r.Keys {
			where = append(where, r.Table+"."+c.Name+" = "+value)
			continue
		}
		if c.Value != "" {
			value = strings.ReplaceAll(c.Value, "?", value)
		}
		set = append(set, c.Name+" = "+value)
	}
	return "WITH v (" + names + ") AS (" + values + ") UPDATE " + r.Table + " SET " + strings.Join(set, ", ") + " FROM v WHERE " + strings.Join(where, " AND ")
}

// sqlite returns the statement for n rows. Columns that SQLite computes with have a type only if
// the first row has one.
func (r *Rows) sqlite(n int) string {
	row := "(?" + strings.Repeat(", ?", len(r.Columns)-1) + ")"
	return r.text("VALUES " + row + strings.Repeat(", "+row, n-1))
}

// take returns how many of the rows the next statement of SQLite writes: a power of two, so that few
// texts have to be prepared.
func (r *Rows) take(rows int) int {
	n := 1
	for n*2 <= min(rows, cmp.Or(r.Limit, sqliteRows)) {
		n *= 2
	}
	return n
}

// prepared identifies a prepared statement of SQLite.
type prepared struct {
	rows *Rows
	n    int
}

// Prepare prepares the statements for up to n rows before a transaction of DB.Write occupies the
// only connection; Write uses them from then on. The driver of Postgres does that itself.
func (r *Rows) Prepare(ctx context.Context, db *DB, n int) error {
	if n == 0 || db.Postgres() {
		return nil
	}
	for n = r.take(n); n > 0; n /= 2 {
		if _, known := db.prepared.Load(prepared{r, n}); known {
			continue
		}
		stmt, err := db.Write.PrepareContext(ctx, r.sqlite(n))
		if err != nil {
			return err
		}
		db.prepared.Store(prepared{r, n}, stmt)
	}
	return nil
}

// Write writes rows with values in the order of the columns (string, int64 or bool), and returns
// how many were changed.
func (r *Rows) Write(ctx context.Context, tx *sql.Tx, db *DB, rows [][]any) (changed int64, err error) {
	if len(rows) == 0 {
		return 0, nil
	}
	if db.Postgres() {
		return Exec(ctx, tx, r.text("SELECT * FROM "+Unnest(r.Columns, 0)), Arrays(r.Columns, rows)...)
	}
	var stmt *sql.Stmt // for ready rows; it ends with the transaction
	for ready := 0; len(rows) > 0; {
		n := r.take(len(rows))
		if known, ok := db.prepared.Load(prepared{r, n}); n != ready && ok {
			stmt = tx.StmtContext(ctx, known.(*sql.Stmt))
		} else if n != ready {
			if stmt, err = tx.PrepareContext(ctx, r.sqlite(n)); err != nil {
				return changed, err
			}
		}
		ready = n
		result, err := stmt.ExecContext(ctx, slices.Concat(rows[:n]...)...)
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
	_, err := labelRows.Write(ctx, tx, db, rows)
	return err
}
