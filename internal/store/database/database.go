// Package database opens the database of a fleet, SQLite or Postgres, and holds
// what everybody who uses it shares: its pools, its schema, what its errors mean,
// and the form in which text and times are stored.
package database

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
	_ "modernc.org/sqlite" // the driver "sqlite"

	"fleetd/migrations"
)

// FileName is the SQLite file in the data directory.
const FileName = "fleetd.db"

const (
	statementTimeout = 10 * time.Second // Postgres ends a statement that runs longer
	connectTimeout   = 3 * time.Second
	checkTimeout     = 6 * time.Second // longer than SQLite's busy_timeout
	sqliteReaders    = 4
	postgresReaders  = 6 // with the three that write: 9 per node
)

// DB is an opened database and the little in which the two differ. All its
// methods may be called from any goroutine.
type DB struct {
	Where string // for people, without the password
	// MaxRows is the most rows of one statement with numbered parameters, a power
	// of two. Postgres gains up to 128. SQLite looks the name of each parameter up
	// by walking a list, so that its cost grows with their square; and a statement
	// costs it no round trip.
	MaxRows int
	// Slot is the slot of fleet_counts that this process writes.
	Slot int64

	Write  *sql.DB // one connection, of the journal
	Ledger *sql.DB // one connection, of the ledger
	Admin  *sql.DB // one connection that migrates and probes
	Read   *sql.DB // several that read

	dialect goose.Dialect
	turn    chan struct{} // SQLite: capacity 1, held by who writes; nil: no turns
	// checkpoints is nil on Postgres.
	checkpoints *checkpointer
}

// Postgres tells whether the database is Postgres; it is SQLite otherwise.
func (db *DB) Postgres() bool { return db.dialect == goose.DialectPostgres }

// Turn waits for the turn to write, which release gives back. SQLite has one
// writer at a time, and its own way of waiting is to look again after ever longer
// pauses; the transactions of one process that may be long take turns instead.
// On Postgres it returns at once.
func (db *DB) Turn(ctx context.Context) (release func(), err error) {
	if db.turn == nil {
		return func() {}, nil
	}
	select {
	case db.turn <- struct{}{}:
		return func() {
			<-db.turn
			db.checkpoints.written()
		}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Open reads the URL and makes the pools. Only a bad URL or, with
// SQLite, a file that cannot be made is an error; nothing is dialled.
func Open(text, dir string) (*DB, error) {
	if text == "sqlite" {
		return openSQLite(filepath.Join(dir, FileName))
	}
	if path, ok := strings.CutPrefix(text, "sqlite:"); ok {
		return openSQLite(path)
	}
	if strings.HasPrefix(text, "postgres://") || strings.HasPrefix(text, "postgresql://") {
		return openPostgres(text)
	}
	return nil, fmt.Errorf("%w: its setting must be sqlite, sqlite:PATH or a URL such as postgres://user:password@host:5432/fleetd", ErrConfig)
}

func openSQLite(path string) (*DB, error) {
	if path == "" || strings.HasPrefix(path, ":memory:") {
		return nil, fmt.Errorf("%w: sqlite: needs the path of a file", ErrConfig)
	}
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	// SQLite would make it readable for everyone; its -wal and -shm follow it.
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	if err := file.Close(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	name := "file:" + (&url.URL{Path: path}).EscapedPath() + "?_pragma=busy_timeout(5000)"
	// A statement that may fail halfway keeps the pages it changes in a journal of its
	// own, which is otherwise a file.
	const journal = "&_txlock=immediate&_pragma=temp_store(MEMORY)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_pragma=journal_size_limit(67108864)" + autoCheckpoint
	// The pages that the batches of an import change again and again must fit into
	// the cache: the last ones of each range of the indexes.
	const ledger = journal + "&_pragma=cache_size(-65536)"
	db := &DB{Where: "the SQLite file " + path, dialect: goose.DialectSQLite3, MaxRows: 8, turn: make(chan struct{}, 1)}
	var checkpoints *sql.DB
	for _, pool := range []struct {
		db   **sql.DB
		name string
		size int
	}{{&db.Write, name + journal, 1}, {&db.Ledger, name + ledger, 1}, {&db.Admin, name + journal, 1}, {&checkpoints, name, 1}, {&db.Read, name + "&_pragma=query_only(1)", sqliteReaders}} {
		if *pool.db, err = sql.Open("sqlite", pool.name); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrConfig, err)
		}
		(*pool.db).SetMaxOpenConns(pool.size)
		(*pool.db).SetMaxIdleConns(pool.size)
	}
	db.checkpoints = startCheckpointer(checkpoints, db.turn)
	return db, nil
}

func openPostgres(text string) (*DB, error) {
	config, err := pgx.ParseConfig(text)
	if err != nil {
		return nil, fmt.Errorf("%w: %s", ErrConfig, OneLine(err))
	}
	if config.ConnectTimeout == 0 {
		config.ConnectTimeout = connectTimeout
	}
	// A server that vanished is noticed within about 15 s even by a reader
	// that has no deadline.
	dialer := &net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 6 * time.Second, Interval: 3 * time.Second, Count: 3}}
	config.DialFunc = dialer.DialContext
	if config.RuntimeParams["application_name"] == "" {
		config.RuntimeParams["application_name"] = "fleetd"
	}
	admin := *config.Copy() // a migration may take its time
	config.RuntimeParams["statement_timeout"] = fmt.Sprint(statementTimeout.Milliseconds())
	// A plan that was made while a table was empty reads all of it, and would be
	// kept until the table is analyzed: an import grows it faster than that.
	planned := *config.Copy()
	planned.RuntimeParams["plan_cache_mode"] = "force_custom_plan"
	db := &DB{
		Where:   fmt.Sprintf("the Postgres database %q of user %q at %s", config.Database, config.User, net.JoinHostPort(config.Host, fmt.Sprint(config.Port))),
		dialect: goose.DialectPostgres, MaxRows: 128, Slot: rand.Int64N(countSlots),
		Write: stdlib.OpenDB(*config), Ledger: stdlib.OpenDB(planned), Read: stdlib.OpenDB(*config), Admin: stdlib.OpenDB(admin),
	}
	db.Write.SetMaxOpenConns(1)
	db.Ledger.SetMaxOpenConns(1)
	db.Admin.SetMaxOpenConns(1)
	db.Read.SetMaxOpenConns(postgresReaders)
	db.Read.SetConnMaxIdleTime(5 * time.Minute)
	return db, nil
}

// Close closes all pools.
func (db *DB) Close() (err error) {
	if db.checkpoints != nil {
		err = db.checkpoints.close()
	}
	// The writer last: its end folds the SQLite log into the file.
	for _, pool := range []*sql.DB{db.Read, db.Admin, db.Ledger, db.Write} {
		if closed := pool.Close(); FaultOf(closed) != FaultLost { // what was lost needs no end
			err = errors.Join(err, closed)
		}
	}
	return err
}

// Upgrade brings the schema to the version of this program. Only migrating may
// take longer than checkTimeout.
func (db *DB) Upgrade(ctx context.Context, log *slog.Logger) error {
	options := []goose.ProviderOption{goose.WithLogger(goose.NopLogger()), goose.WithDisableGlobalRegistry(true), goose.WithGoMigrations(db.goMigrations(log)...)}
	check, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	if db.dialect == goose.DialectPostgres {
		if err := db.preparePostgres(check); err != nil {
			return err
		}
		// Another node may be migrating for long: ask every second for a day.
		locker, err := lock.NewPostgresSessionLocker(lock.WithLockTimeout(1, 86400))
		if err != nil {
			return fmt.Errorf("migration lock: %w", err)
		}
		options = append(options, goose.WithSessionLocker(locker))
	}
	provider, err := goose.NewProvider(db.dialect, db.Admin, migrations.FS, options...)
	if err != nil {
		return fmt.Errorf("reading the migrations: %w", err)
	}
	for last := int64(-1); ; {
		have, want, err := provider.GetVersions(check)
		if err != nil {
			return fmt.Errorf("reading the schema version: %w", err)
		}
		if have > want {
			return fmt.Errorf("%w: %s has schema version %d and this fleetd knows up to %d; start a newer fleetd", ErrConfig, db.Where, have, want)
		}
		if have == want {
			return nil
		}
		if db.Postgres() && have < versionRegistry {
			if err := db.stopsOthers(ctx); err != nil {
				return err
			}
		}
		applied, err := db.migrate(ctx, provider, log)
		if err == nil {
			log.Info("database schema migrated", "from", have, "to", want, "files", len(applied))
			return nil
		}
		// SQLite has no lock for this: two processes may apply the same file,
		// and one of them fails while the schema goes on.
		if db.dialect != goose.DialectSQLite3 || have == last {
			return fmt.Errorf("migrating the schema: %w", err)
		}
		last = have
	}
}

// migrate applies what is missing, and logs that it goes on.
func (db *DB) migrate(ctx context.Context, provider *goose.Provider, log *slog.Logger) ([]*goose.MigrationResult, error) {
	// A migration in Go runs on a connection beside that of the lock.
	db.Admin.SetMaxOpenConns(2)
	defer db.Admin.SetMaxOpenConns(1)
	began := time.Now()
	done := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(logEvery)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				log.Info("migrating the database", "since", time.Since(began).Round(time.Second))
			case <-done:
				return
			}
		}
	}()
	defer func() { close(done); <-ended }()
	return provider.Up(ctx)
}

// preparePostgres makes sure of what SQLite has built in: text in UTF-8, and
// the collation that the schema names. Byte order makes lists come in the same
// order on both databases, and its indexes survive an upgrade of the server's
// C library.
func (db *DB) preparePostgres(ctx context.Context) error {
	var encoding string
	var collated bool
	err := db.Admin.QueryRowContext(ctx, `SELECT current_setting('server_encoding'), to_regcollation('"binary"') IS NOT NULL`).Scan(&encoding, &collated)
	if err != nil {
		return fmt.Errorf("asking the database for its encoding: %w", err)
	}
	if encoding != "UTF8" {
		return fmt.Errorf("%w: %s has the encoding %s; create it with ENCODING 'UTF8'", ErrConfig, db.Where, encoding)
	}
	if collated {
		return nil
	}
	tx, err := db.Admin.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("creating the collation: %w", err)
	}
	// IF NOT EXISTS alone is no protection from another node doing the same.
	_, err = tx.ExecContext(ctx, `SELECT pg_advisory_xact_lock(7218110241)`)
	if err == nil {
		_, err = tx.ExecContext(ctx, `CREATE COLLATION IF NOT EXISTS "binary" (provider = libc, locale = 'C')`)
	}
	if err != nil {
		return fmt.Errorf("creating the collation: %w", errors.Join(err, tx.Rollback()))
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("creating the collation: %w", err)
	}
	return nil
}
