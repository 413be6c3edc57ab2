package store

import (
	"strings"
	"testing"
	"time"
)

func TestStatementsFitBothDatabases(t *testing.T) {
	all := newStatements(time.Now)
	fits(t, &all.facts)
	fits(t, &all.image)
	fits(t, &all.session)
	fits(t, &all.presence)
	fits(t, &all.seen)
	fits(t, &all.catalogs)
	fits(t, &all.history)
}

func fits[T any](t *testing.T, s *statement[T]) {
	t.Helper()
	values := s.values(nil, new(T))
	if len(values) != len(s.columns) || strings.Count(s.postgres(), "$") != len(s.columns) {
		t.Fatalf("%s: %d values for %d columns: %s", s.name, len(values), len(s.columns), s.postgres())
	}
	s.arrays(values) // panics if a value is not of its column's type
	left, statements := GroupRows, 0
	for left > 0 {
		n := s.take(left)
		if n < 1 || n > left || n&(n-1) != 0 {
			t.Fatalf("%s: %d of %d rows", s.name, n, left)
		}
		// SQLite allows 32766 parameters.
		if got := strings.Count(s.sqlite(n), "?"); got != n*len(s.columns) || got > 32766 {
			t.Fatalf("%s: %d parameters for %d rows of %d values", s.name, got, n, len(s.columns))
		}
		left -= n
		statements++
	}
	if statements > GroupRows/8+3 {
		t.Errorf("%s: %d statements for a group", s.name, statements)
	}
}
