//go:build scale

package store_test

import (
	"testing"

	"fleetd/internal/store/storetest"
)

func TestSQLiteLists(t *testing.T)   { storetest.RunLists(t, storetest.SQLite, 1000) }
func TestPostgresLists(t *testing.T) { storetest.RunLists(t, storetest.Postgres, 1000) }
