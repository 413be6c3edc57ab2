//go:build scale

package ledger_test

import (
	"testing"

	"fleetd/internal/store/storetest"
)

func TestSQLiteScale(t *testing.T)   { storetest.RunScale(t, storetest.SQLite) }
func TestPostgresScale(t *testing.T) { storetest.RunScale(t, storetest.Postgres) }

func TestSQLiteImport(t *testing.T)   { storetest.RunImport(t, storetest.SQLite) }
func TestPostgresImport(t *testing.T) { storetest.RunImport(t, storetest.Postgres) }
