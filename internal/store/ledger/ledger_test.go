package ledger_test

import (
	"testing"

	"go.uber.org/goleak"

	"fleetd/internal/store/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestSQLite(t *testing.T) {
	t.Parallel()
	storetest.RunLedger(t, storetest.SQLite)
}

func TestPostgres(t *testing.T) {
	t.Parallel()
	storetest.RunLedger(t, storetest.OnePostgres(t))
}
