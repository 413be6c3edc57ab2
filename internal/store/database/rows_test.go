package database

import (
	"strings"
	"testing"
)

// The rows of a group are written with few statements, none of them with more parameters than SQLite allows.
func TestFewStatementsForManyRows(t *testing.T) {
	for _, r := range []Rows{{Table: "t", Columns: make([]Column, 20)}, {Table: "t", Columns: make([]Column, 20), Limit: 8, Keys: 1}} {
		statements := 0
		for left := 511; left > 0; statements++ {
			n := r.take(left)
			if n < 1 || n > left || n&(n-1) != 0 {
				t.Fatalf("%d of %d rows", n, left)
			}
			if got := strings.Count(r.sqlite(n), "?"); got != n*len(r.Columns) || got > 32766 {
				t.Fatalf("%d parameters for %d rows of %d values", got, n, len(r.Columns))
			}
			left -= n
		}
		if statements > 511/8+3 {
			t.Errorf("%d statements", statements)
		}
	}
}

func TestTextOfRows(t *testing.T) {
	columns := []Column{{Name: "a", Type: "text"}, {Name: "b", Type: "bigint"}, {Name: "c", Type: "bigint", Value: "max(?, t.c)"}}
	for want, r := range map[string]Rows{
		"INSERT INTO t (a, b, c) VALUES (?, ?, ?), (?, ?, ?)":                                                                   {Table: "t", Columns: columns},
		"INSERT INTO t (a, b, c) VALUES (?, ?, ?), (?, ?, ?) ON CONFLICT (a) DO NOTHING":                                        {Table: "t", Columns: columns, Conflict: "(a) DO NOTHING"},
		"WITH v (a, b, c) AS (VALUES (?, ?, ?), (?, ?, ?)) UPDATE t SET c = max(v.c, t.c) FROM v WHERE t.a = v.a AND t.b = v.b": {Table: "t", Columns: columns, Keys: 2},
	} {
		if got := r.sqlite(2); got != want {
			t.Errorf("%s\nwant %s", got, want)
		}
	}
}
