package storetest_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"fleetd/internal/store/database"
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

// A plan that Postgres keeps from when a table had one row does not compare each later row with each id.
func TestPlanOfIDSet(t *testing.T) {
	t.Parallel()
	db := storetest.Postgres(t)
	condition, _ := database.IDSet(true, "device", "$1", []string{"a"})
	db.Exec(t, `CREATE TABLE few (device TEXT PRIMARY KEY)`)
	db.Exec(t, `INSERT INTO few VALUES ('a')`)
	db.Exec(t, `ANALYZE few`)
	db.Raw.SetMaxOpenConns(1)
	db.Exec(t, `SET plan_cache_mode = force_generic_plan`)
	db.Exec(t, `PREPARE of_few (text[]) AS SELECT device FROM few WHERE `+condition)
	rows, err := db.Raw.Query(`EXPLAIN (COSTS OFF) EXECUTE of_few ('{a,b,c}')`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var line string
		if err := rows.Scan(&line); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(line, "ANY (") {
			t.Errorf("the plan has %q", strings.TrimSpace(line))
		}
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
}

func BenchmarkSQLite(b *testing.B)   { storetest.Benchmark(b, storetest.SQLite) }
func BenchmarkPostgres(b *testing.B) { storetest.Benchmark(b, storetest.Postgres) }

func BenchmarkSQLiteLists(b *testing.B)   { storetest.BenchmarkLists(b, storetest.SQLite) }
func BenchmarkPostgresLists(b *testing.B) { storetest.BenchmarkLists(b, storetest.Postgres) }
