package store

import (
	"testing"
	"time"

	"fleetd/internal/store/database"
)

func TestStatementsFitTheirColumns(t *testing.T) {
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
	values := s.values(new(T))
	if len(values) != len(s.Columns) {
		t.Fatalf("%s: %d values for %d columns", s.Table, len(values), len(s.Columns))
	}
	database.Arrays(s.Columns, [][]any{values}) // panics if a value is not of its column's type
}
