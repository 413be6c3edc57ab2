package database

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"fleetd/internal/clock"
)

// Location returns a database without user and password: `sqlite:/absolute/path` or
// `postgres://host:port/name`. Two settings with the same location mean the same
//
//	An error wraps ErrConfig.
func Location(text, dir string) (string, error) {
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

// SQLitePath returns the file of a location; ok is false for Postgres.
func SQLitePath(place string) (path string, ok bool) { return strings.CutPrefix(place, "sqlite:") }

// DumpCommand returns the command that backs up a Postgres database into file. It does not
// contain the password: pg_dump prompts for it, or finds it in PGPASSWORD or ~/.pgpass.
func DumpCommand(text, file string) (string, error) {
	u, err := url.Parse(text)
	if err != nil {
		return "", fmt.Errorf("%w: its setting is not a URL", ErrConfig) // err may contain the password
	}
	if u.User != nil {
		u.User = url.User(u.User.Username())
	}
	query := u.Query()
	query.Del("password")
	u.RawQuery = query.Encode()
	return "pg_dump --format=custom --no-owner --file=" + quoteShell(file) + " " + quoteShell(u.String()), nil
}

// quoteShell quotes one word for a POSIX shell.
func quoteShell(word string) string { return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'" }

// Copy describes a copy of a database.
type Copy struct {
	Schema      int64  // version of the schema
	Fingerprint string // of the fleet's secret; empty if no node has used the database yet
}

// CopySQLite writes a copy of the database in path into the new file to. The copy is consistent
// and includes the write-ahead log, even during writes; writers do not wait for it. It is checked
// before CopySQLite returns, and has no free pages. Others must not be able to read the directory
// of to. After an error the file does not exist.
func CopySQLite(ctx context.Context, path, to string) (c Copy, err error) {
	if _, err := os.Stat(path); err != nil {
		return c, fmt.Errorf("the database: %w", err)
	}
	file, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600) // SQLite would make it readable for everybody
	if err == nil {
		err = file.Close()
	}
	if err != nil {
		return c, fmt.Errorf("copy the database: %w", err)
	}
	defer func() {
		if err != nil {
			_ = os.Remove(to) // it may not exist
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
			return fmt.Errorf("it is not a database of fleetd: %w", err)
		}
		var err error
		c.Fingerprint, err = Fact(ctx, db, FingerprintKey)
		return err
	})
	if err != nil {
		return c, fmt.Errorf("check the copy of the database %s: %s", path, OneLine(err))
	}
	return c, nil
}

// plannedMove begins the names of lineages that a planned move of the fleet began: the node that used the database before
// was stopped.
const plannedMove = "move-"

// IsPlannedMove reports whether a planned move began a lineage: its schedules go on.
func IsPlannedMove(lineage string) bool { return strings.HasPrefix(lineage, plannedMove) }

// EndLineage starts another lineage: the restored history may differ from the one that other nodes have followed. planned
// is whether nothing has happened since the backup was made.
func EndLineage(ctx context.Context, path string, planned bool) error {
	lineage := "" // the next node that opens the database sets one
	if planned {
		lineage = plannedMove + rand.Text()
	}
	err := onSQLite(path, func(db *sql.DB) error {
		var there bool
		err := db.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE name = 'fleet_revision')`).Scan(&there)
		if err != nil || !there { // of a version without revisions
			return err
		}
		_, err = db.ExecContext(ctx, `UPDATE fleet_revision SET lineage = $1`, lineage)
		return err
	})
	if err != nil {
		return fmt.Errorf("start another lineage in %s: %s", path, OneLine(err))
	}
	return nil
}

// Halted is what HaltJobs did.
type Halted struct {
	Jobs      int // that are halted because the database was restored
	Schedules int // of these, those that repeat
	Kept      int // schedules that go on
}

// idleSchedules is a condition on jobs: schedules between two rounds, without an open task (jobs.Job.Idle).
const idleSchedules = `COALESCE(json_extract(spec, '$.when.cron'), '') <> '' AND (state = 'scheduled' OR state = 'paused' AND prior = 'scheduled') AND waiting + running = 0`

// HaltJobs halts all jobs of a restored database that have not ended, and ends running tasks as
// unknown: what has run since the backup was made must not run again unless a person wants it. With planned, schedules
// without an open task go on: nothing has run since.
func HaltJobs(ctx context.Context, path string, planned bool, now time.Time) (h Halted, err error) {
	keep := "FALSE"
	if planned {
		keep = idleSchedules
	}
	err = onSQLite(path, func(db *sql.DB) error {
		var there bool
		err := db.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE name = 'jobs')`).Scan(&there)
		if err != nil || !there { // of a version without jobs
			return err
		}
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		for _, text := range []string{
			`UPDATE jobs SET prior = CASE WHEN state = 'paused' THEN prior ELSE state END, state = 'halted', reason = 'restored' WHERE state NOT IN ('halted', 'done', 'cancelled') AND NOT (` + keep + `)`,
			`UPDATE jobs SET n_unknown = n_unknown + running, running = 0, version = version + 1, ready_at = 9223372036854775807 WHERE ended_at = 0 AND NOT (` + keep + `)`,
			`UPDATE jobs SET ended_at = $1 WHERE state = 'cancelled' AND ended_at = 0 AND waiting = 0`,
			`UPDATE tasks SET state = 'ended', outcome = 'unknown', code = 'restored', ended_at = $1,
 detail = 'it ran while the backup was made that was restored; it is not known whether the device did it' WHERE state = 'running'`,
		} {
			args := []any{clock.Micros(now)}
			if !strings.Contains(text, "$1") {
				args = nil
			}
			if _, err := tx.ExecContext(ctx, text, args...); err != nil {
				return errors.Join(err, tx.Rollback())
			}
		}
		if err := tx.QueryRowContext(ctx, `SELECT COALESCE(sum(state = 'halted' AND reason = 'restored'), 0), COALESCE(sum(state = 'halted' AND reason = 'restored' AND COALESCE(json_extract(spec, '$.when.cron'), '') <> ''), 0),
 COALESCE(sum(`+keep+`), 0) FROM jobs WHERE ended_at = 0`).Scan(&h.Jobs, &h.Schedules, &h.Kept); err != nil {
			return errors.Join(err, tx.Rollback())
		}
		return tx.Commit()
	})
	if err != nil {
		return h, fmt.Errorf("halt the jobs in %s: %s", path, OneLine(err))
	}
	return h, nil
}

// onSQLite opens an existing file while use runs. It does not change the journal mode.
func onSQLite(path string, use func(*sql.DB) error) error {
	db, err := sql.Open("sqlite", "file:"+(&url.URL{Path: path}).EscapedPath()+"?mode=rw&_pragma=busy_timeout(5000)")
	if err != nil {
		return err
	}
	db.SetMaxOpenConns(1)
	return errors.Join(use(db), db.Close())
}
