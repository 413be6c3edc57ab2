package jobstore_test

import (
	"testing"

	"go.uber.org/goleak"

	"fleetd/internal/store/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestSQLite(t *testing.T) {
	t.Parallel()
	storetest.RunJobs(t, storetest.SQLite)
}

func TestPostgres(t *testing.T) {
	t.Parallel()
	storetest.RunJobs(t, storetest.OnePostgres(t))
}

func BenchmarkSQLite(b *testing.B)   { storetest.BenchmarkJobs(b, storetest.SQLite) }
func BenchmarkPostgres(b *testing.B) { storetest.BenchmarkJobs(b, storetest.Postgres) }

func TestTaskPages(t *testing.T) {
	storetest.RunPages(t, storetest.Postgres(t))
}
