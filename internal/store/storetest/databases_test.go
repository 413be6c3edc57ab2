package storetest_test

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"fleetd/internal/store/storetest"
)

// The suites run here and not in package store: its own tests are in the package, which with the suites beside them would
// compile storetest once more.

func TestMain(m *testing.M) {
	if url := os.Getenv(childURL); url != "" {
		if err := runChild(url); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	goleak.VerifyTestMain(m)
}

func TestSQLite(t *testing.T) {
	t.Parallel()
	storetest.Run(t, storetest.SQLite)
}

func TestPostgres(t *testing.T) {
	t.Parallel()
	storetest.Run(t, storetest.OnePostgres(t))
}

func TestPostgresLists(t *testing.T) {
	t.Parallel()
	storetest.RunLists(t, storetest.OnePostgres(t))
}

func TestPostgresNetwork(t *testing.T) {
	t.Parallel()
	storetest.RunNetwork(t, storetest.OnePostgres(t))
}

func BenchmarkSQLite(b *testing.B)   { storetest.Benchmark(b, storetest.SQLite) }
func BenchmarkPostgres(b *testing.B) { storetest.Benchmark(b, storetest.Postgres) }

func BenchmarkSQLiteLists(b *testing.B)   { storetest.BenchmarkLists(b, storetest.SQLite) }
func BenchmarkPostgresLists(b *testing.B) { storetest.BenchmarkLists(b, storetest.Postgres) }
