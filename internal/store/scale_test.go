//go:build scale

package store_test

import (
	"testing"

	"fleetd/internal/store/storetest"
)

func TestSQLiteManyLists(t *testing.T)   { storetest.MeasureLists(t, storetest.SQLite, 1000) }
func TestPostgresManyLists(t *testing.T) { storetest.MeasureLists(t, storetest.Postgres, 1000) }
