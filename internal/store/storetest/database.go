// Package storetest is the suite that package store passes on every database
// it supports. The databases are real: a SQLite file, and a Postgres server
// where there is one.
package storetest

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
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

// OnePostgres makes a database with its schema for all parts of a test, which run one after the other: each finds the rows
// of a new database. To make a schema takes the server longer than most parts do, so that it is made once, and again after a
// part that changed it.
func OnePostgres(whole testing.TB) Maker {
	db := Postgres(whole)
	schema, renew := "", ""
	return func(t testing.TB) Database {
		t.Helper()
		part := db
		part.Raw = openPostgres(t, db.URL) // without statements that were prepared for other tables
		if schema != "" && schema == schemaOf(t, part) {
			part.Exec(t, renew)
			return part
		}
		part.Clear(t)
		closeStore(t, openStore(t, part.URL))
		renew = keepRows(t, part)
		schema = schemaOf(t, part)
		return part
	}
}

// Clear removes the schema, as if no store had ever opened the database.
func (d Database) Clear(t testing.TB) {
	t.Helper()
	if d.Postgres { // the collation of all text is in it, so that the kept rows go, too
		d.Exec(t, "DROP SCHEMA IF EXISTS kept CASCADE; DROP SCHEMA public CASCADE; CREATE SCHEMA public")
	}
}

// keepRows copies the rows of all tables and returns the statements that bring them back.
func keepRows(t testing.TB, d Database) (renew string) {
	t.Helper()
	rows, err := d.Raw.Query("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
	if err != nil {
		t.Fatal(err)
	}
	var tables []string
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			t.Fatal(err)
		}
		tables = append(tables, name)
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		t.Fatal(err)
	}
	d.Exec(t, "CREATE SCHEMA kept")
	for _, name := range tables {
		// A new file for each table is what takes long, but one with many dead rows would slow the part down.
		renew += fmt.Sprintf("DO $$ BEGIN IF pg_relation_size('public.%[1]s') > 65536 THEN TRUNCATE public.%[1]s; ELSE DELETE FROM public.%[1]s; END IF; END $$;", name)
		if d.Count(t, "SELECT count(*) FROM public."+name) > 0 {
			d.Exec(t, "CREATE TABLE kept."+name+" AS TABLE public."+name)
			renew += "INSERT INTO public." + name + " TABLE kept." + name + ";"
		}
	}
	return renew
}

// schemaOf describes the tables of the schema, with their columns and indexes; it is empty without kept rows.
func schemaOf(t testing.TB, d Database) (text string) {
	t.Helper()
	err := d.Raw.QueryRow(`SELECT coalesce((SELECT string_agg(concat_ws(' ', table_name, column_name, data_type, is_nullable, column_default), ';' ORDER BY table_name, ordinal_position)
  FROM information_schema.columns WHERE table_schema = 'public')
 || (SELECT string_agg(indexdef, ';' ORDER BY indexname) FROM pg_indexes WHERE schemaname = 'public'), '')
 WHERE EXISTS (SELECT 1 FROM pg_namespace WHERE nspname = 'kept')`).Scan(&text)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		t.Fatal(err)
	}
	return text
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
