//go:build !race

package storetest_test

import (
	"testing"

	"fleetd/internal/store/storetest"
)

// The translated SQLite takes ten times as long with the race detector; what is
// above it runs with that on Postgres.
func TestSQLiteLists(t *testing.T) { storetest.RunLists(t, storetest.SQLite) }
