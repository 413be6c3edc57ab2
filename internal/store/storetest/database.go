// Package storetest is the suite that package store passes on every database
// it supports. The databases are real: a SQLite file, and a Postgres server
// where there is one.
package storetest

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
	_ "modernc.org/sqlite"             // the driver "sqlite"
)

// Environment names the URL of a Postgres server whose user may create
// databases. Without it a local one is tried.
const Environment = "FLEETD_TEST_POSTGRES"

// NotRun starts the reason of every test that is skipped because the machine
// lacks something, so that a summary can name what did not run.
const NotRun = "NOT RUN: "

// Database is an empty database of one test.
type Database struct {
	URL      string  // for store.Open
	Raw      *sql.DB // the same database beside the store
	Postgres bool
}

// Address is host and port of a Postgres database.
func (d Database) Address(t testing.TB) string {
	t.Helper()
	u, err := url.Parse(d.URL)
	if err != nil {
		t.Fatal(err)
	}
	if u.Port() == "" {
		return net.JoinHostPort(u.Hostname(), "5432")
	}
	return u.Host
}

// Via is the URL with another host and port.
func (d Database) Via(t testing.TB, address string) string {
	t.Helper()
	u, err := url.Parse(d.URL)
	if err != nil {
		t.Fatal(err)
	}
	u.Host = address
	return u.String()
}

// Exec runs SQL beside the store.
func (d Database) Exec(t testing.TB, text string, args ...any) {
	t.Helper()
	if _, err := d.Raw.Exec(text, args...); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
}

// Count is the one number that a query returns.
func (d Database) Count(t testing.TB, text string, args ...any) (n int) {
	t.Helper()
	if err := d.Raw.QueryRow(text, args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return n
}

// Maker makes an empty database that is gone after the test.
type Maker func(t testing.TB) Database

// SQLite makes a file. Its name has what a URL would misread.
func SQLite(t testing.TB) Database {
	path := filepath.Join(t.TempDir(), "odd name?%41#.db")
	raw, err := sql.Open("sqlite", "file:"+(&url.URL{Path: path}).EscapedPath()+"?_pragma=busy_timeout(10000)")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := raw.Close(); err != nil {
			t.Error(err)
		}
	})
	return Database{URL: "sqlite:" + path, Raw: raw}
}

// Postgres makes a database on the server of Environment, else on the local
// one. Without a server the test is skipped with NotRun.
func Postgres(t testing.TB) Database {
	t.Helper()
	server, admin := findPostgres(t)
	random := make([]byte, 8)
	if _, err := rand.Read(random); err != nil {
		t.Fatal(err)
	}
	name := "fleetd_test_" + hex.EncodeToString(random)
	if _, err := admin.Exec("CREATE DATABASE " + name + " ENCODING 'UTF8' TEMPLATE template0"); err != nil {
		t.Fatal(err)
	}
	// No test takes the power from this server, so commits need not wait for its disk.
	if _, err := admin.Exec("ALTER DATABASE " + name + " SET synchronous_commit = off"); err != nil {
		t.Fatal(err)
	}
	u := *server
	u.Path = "/" + name
	t.Cleanup(func() {
		if _, err := admin.Exec("DROP DATABASE " + name + " WITH (FORCE)"); err != nil {
			t.Error(err)
		}
		if err := admin.Close(); err != nil {
			t.Error(err)
		}
	})
	return Database{URL: u.String(), Raw: openPostgres(t, u.String()), Postgres: true}
}

// OnePostgres makes a database for all parts of a test, which run one after the other: each
// finds it empty. To make and to drop one takes the server longer than most parts do.
func OnePostgres(whole testing.TB) Maker {
	db := Postgres(whole)
	return func(t testing.TB) Database {
		t.Helper()
		db.Exec(t, "DROP SCHEMA public CASCADE")
		db.Exec(t, "CREATE SCHEMA public")
		part := db
		part.Raw = openPostgres(t, db.URL) // without statements that were prepared for other tables
		return part
	}
}

// openPostgres opens connections that are closed with the test.
func openPostgres(t testing.TB, url string) *sql.DB {
	t.Helper()
	raw, err := sql.Open("pgx", url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := raw.Close(); err != nil {
			t.Error(err)
		}
	})
	return raw
}

// findPostgres returns a server that answers, and a connection to it.
func findPostgres(t testing.TB) (*url.URL, *sql.DB) {
	t.Helper()
	candidates := []string{
		"postgres://root@127.0.0.1:5432/postgres?sslmode=disable",
		"postgres://postgres@127.0.0.1:5432/postgres?sslmode=disable",
	}
	if given := os.Getenv(Environment); given != "" {
		candidates = []string{given}
	}
	var reasons []string
	for _, candidate := range candidates {
		u, err := url.Parse(candidate)
		if err != nil {
			t.Fatalf("%s: %v", Environment, err)
		}
		db, err := sql.Open("pgx", candidate)
		if err != nil {
			t.Fatalf("%s: %v", Environment, err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
		err = db.PingContext(ctx)
		cancel()
		if err == nil {
			return u, db
		}
		reasons = append(reasons, err.Error())
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
	}
	t.Skip(NotRun + "no Postgres answers; give one in " + Environment + ": " + strings.Join(strings.Fields(strings.Join(reasons, "; ")), " "))
	return nil, nil
}
