package database

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Place names a database without user and password: `sqlite:/absolute/path` or
// `postgres://host:port/name`. Two settings with the same place mean the same
//
//	An error wraps ErrConfig.
func Place(text, dir string) (string, error) {
	path := filepath.Join(dir, FileName)
	if given, ok := strings.CutPrefix(text, "sqlite:"); ok {
		path = given
	} else if text != "sqlite" {
		config, err := pgx.ParseConfig(text)
		if err != nil {
			return "", fmt.Errorf("%w: %s", ErrConfig, OneLine(err))
		}
		return "postgres://" + net.JoinHostPort(config.Host, strconv.Itoa(int(config.Port))) + "/" + config.Database, nil
	}
	path, err := filepath.Abs(path)
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrConfig, err)
	}
	return "sqlite:" + path, nil
}

// SQLitePath is the file of a place that Place returned; false for Postgres.
func SQLitePath(place string) (path string, ok bool) { return strings.CutPrefix(place, "sqlite:") }

// DumpCommand is the command that backs up a Postgres database into file. It
// never holds the password: pg_dump asks for it, or finds it in PGPASSWORD or
// ~/.pgpass.
func DumpCommand(text, file string) (string, error) {
	u, err := url.Parse(text)
	if err != nil {
		return "", fmt.Errorf("%w: its setting is no URL", ErrConfig) // err may hold the password
	}
	if u.User != nil {
		u.User = url.User(u.User.Username())
	}
	query := u.Query()
	query.Del("password")
	u.RawQuery = query.Encode()
	return "pg_dump --format=custom --no-owner --file=" + quoteShell(file) + " " + quoteShell(u.String()), nil
}

// quoteShell makes one word of a POSIX shell.
func quoteShell(word string) string { return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'" }

// Copy is what CopySQLite found in the copy.
type Copy struct {
	Schema      int64  // version of the schema
	Fingerprint string // of the fleet's secret; empty if no node used the database yet
}

// CopySQLite writes a copy of the database in path into the file to, which
// must not exist. The copy is one moment of the database, what stands in its
// log included, however much is being written; writers do not wait for it. It
// is checked before CopySQLite returns, and small: free pages are left out.
// The directory of to must not be readable by others. Nothing is left behind
// in to if there is an error.
func CopySQLite(ctx context.Context, path, to string) (c Copy, err error) {
	if _, err := os.Stat(path); err != nil {
		return c, fmt.Errorf("the database: %w", err)
	}
	file, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600) // SQLite would make it for everybody to read
	if err == nil {
		err = file.Close()
	}
	if err != nil {
		return c, fmt.Errorf("copy the database: %w", err)
	}
	defer func() {
		if err != nil {
			_ = os.Remove(to) // it may not be there
		}
	}()
	err = onSQLite(path, func(db *sql.DB) error {
		_, err := db.ExecContext(ctx, `VACUUM INTO $1`, to)
		return err
	})
	if err != nil {
		return c, fmt.Errorf("copy the database %s: %s", path, OneLine(err))
	}
	err = onSQLite(to, func(db *sql.DB) error {
		var verdict string
		if err := db.QueryRowContext(ctx, `PRAGMA quick_check(1)`).Scan(&verdict); err != nil {
			return err
		}
		if verdict != "ok" {
			return fmt.Errorf("%s; the database is damaged", verdict)
		}
		if err := db.QueryRowContext(ctx, `SELECT max(version_id) FROM goose_db_version WHERE is_applied`).Scan(&c.Schema); err != nil {
			return fmt.Errorf("it is no database of fleetd: %w", err)
		}
		err := db.QueryRowContext(ctx, `SELECT value FROM fleet WHERE key = $1`, FingerprintKey).Scan(&c.Fingerprint)
		if errors.Is(err, sql.ErrNoRows) {
			return nil
		}
		return err
	})
	if err != nil {
		return c, fmt.Errorf("check the copy of the database %s: %s", path, OneLine(err))
	}
	return c, nil
}

// EndLineage has the next node that opens the database begin another lineage: what
// it restores is a history that others may have followed further.
func EndLineage(ctx context.Context, path string) error {
	err := onSQLite(path, func(db *sql.DB) error {
		var there bool
		err := db.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE name = 'fleet_revision')`).Scan(&there)
		if err != nil || !there { // of a version without one
			return err
		}
		_, err = db.ExecContext(ctx, `UPDATE fleet_revision SET lineage = ''`)
		return err
	})
	if err != nil {
		return fmt.Errorf("begin another lineage in %s: %s", path, OneLine(err))
	}
	return nil
}

// onSQLite opens a file that is there already, for as long as use runs. It
// leaves the journal mode as it is.
func onSQLite(path string, use func(*sql.DB) error) error {
	db, err := sql.Open("sqlite", "file:"+(&url.URL{Path: path}).EscapedPath()+"?mode=rw&_pragma=busy_timeout(5000)")
	if err != nil {
		return err
	}
	db.SetMaxOpenConns(1)
	return errors.Join(use(db), db.Close())
}
