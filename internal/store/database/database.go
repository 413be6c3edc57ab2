// Package database opens the database of a fleet, SQLite or Postgres, and contains what all its
// users share: connection pools, the schema, the classification of errors, and the stored form of
// text and times.
package database

import (
	"cmp"
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
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
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
	statementTimeout = 10 * time.Second // after which Postgres cancels a statement
	// idleTimeout is after which Postgres ends a transaction that sends nothing: that of a frozen node
	// would keep its locks, and other nodes could not end its tasks.
	idleTimeout     = 30 * time.Second
	connectTimeout  = 3 * time.Second
	checkTimeout    = 6 * time.Second // longer than SQLite's busy_timeout
	sqliteReaders   = 4
	postgresReaders = 6 // with the five of the other pools: 11 per node
	postgresJobs    = 2 // one that begins tasks, and one that ends them
)

// DB is an opened database; it hides the differences of the two. It is safe for concurrent use.
type DB struct {
	Where string // for people, without the password
	// Slot is the slot of fleet_counts that this process writes.
	Slot int64

	Write  *sql.DB // one connection, of the journal
	Ledger *sql.DB // one connection, of the ledger
	Jobs   *sql.DB // of the transactions of jobs: two connections, with SQLite one
	Admin  *sql.DB // one connection that migrates and probes
	Read   *sql.DB // several that read

	dialect goose.Dialect
	turn    chan struct{} // SQLite: capacity 1, held by the writer; nil: not needed
	// checkpoints is nil on Postgres.
	checkpoints *checkpointer
	prepared    sync.Map // prepared to its *sql.Stmt of Write, which ends with it
	kept        sync.Map // text to its *sql.Stmt of Read, see Kept
	keptN       atomic.Int64
}

// Postgres reports whether the database is Postgres; it is SQLite otherwise.
func (db *DB) Postgres() bool { return db.dialect == goose.DialectPostgres }

// Lock returns a clause at the end of a query, such as FOR UPDATE. On SQLite it is empty: the transaction has the whole database.
func (db *DB) Lock(clause string) string {
	if db.Postgres() {
		return " " + clause
	}
	return ""
}

// Turn waits for the turn to write, until release. SQLite allows one writer at a time, and
// connections poll for it with growing pauses; so the transactions of one process that may be
// long take turns instead. On Postgres it returns at once.
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

// Open parses the URL and creates the pools. It fails only for a bad URL or, with SQLite, a file
// that cannot be created; it does not connect.
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
		return nil, fmt.Errorf("%w: sqlite: needs the path of a file, such as sqlite:/var/lib/fleetd.db", ErrConfig)
	}
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	// SQLite would make it readable for everyone; its -wal and -shm have the same mode.
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	if err := file.Close(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	name := "file:" + (&url.URL{Path: path}).EscapedPath() + "?_pragma=busy_timeout(5000)"
	// A statement that may fail halfway keeps the pages it changes in a journal of its own,
	// which would be a file by default.
	const journal = "&_txlock=immediate&_pragma=temp_store(MEMORY)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_pragma=journal_size_limit(67108864)" + autoCheckpoint
	// The pages that the batches of an import change repeatedly must fit into the cache: the
	// last ones of each range of the indexes. Those of 100,000 tasks are half as many.
	const ledger = journal + "&_pragma=cache_size(-65536)"
	const jobs = journal + "&_pragma=cache_size(-32768)"
	db := &DB{Where: "the SQLite file " + path, dialect: goose.DialectSQLite3, turn: make(chan struct{}, 1)}
	var checkpoints *sql.DB
	for _, pool := range []struct {
		db   **sql.DB
		name string
		size int
	}{{&db.Write, name + journal, 1}, {&db.Ledger, name + ledger, 1}, {&db.Jobs, name + jobs, 1}, {&db.Admin, name + journal, 1}, {&checkpoints, name, 1}, {&db.Read, name + "&_pragma=query_only(1)", sqliteReaders}} {
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
	config.ConnectTimeout = cmp.Or(config.ConnectTimeout, connectTimeout)
	// A server that stopped responding is detected within about 15 s even by a reader without
	// a deadline.
	dialer := &net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 6 * time.Second, Interval: 3 * time.Second, Count: 3}}
	config.DialFunc = dialer.DialContext
	if config.RuntimeParams["application_name"] == "" {
		config.RuntimeParams["application_name"] = "fleetd"
	}
	admin := *config.Copy() // a migration may take long
	config.RuntimeParams["statement_timeout"] = fmt.Sprint(statementTimeout.Milliseconds())
	config.RuntimeParams["idle_in_transaction_session_timeout"] = fmt.Sprint(idleTimeout.Milliseconds())
	// A plan made while a table was empty scans it completely, and would be kept until the
	// table is analyzed, while an import fills it.
	planned := *config.Copy()
	planned.RuntimeParams["plan_cache_mode"] = "force_custom_plan"
	// Tasks are found by their keys, and begun in the order of devices, which only nested
	// loops keep. Pages of them are read in the order of an index: by a bitmap, all tasks of
	// a job without statistics would be read and sorted for each page.
	keyed := *planned.Copy()
	for _, way := range []string{"enable_hashjoin", "enable_mergejoin", "enable_bitmapscan"} {
		keyed.RuntimeParams[way] = "off"
	}
	db := &DB{
		Where:   fmt.Sprintf("the Postgres database %q of user %q at %s", config.Database, config.User, net.JoinHostPort(config.Host, fmt.Sprint(config.Port))),
		dialect: goose.DialectPostgres, Slot: rand.Int64N(countSlots),
		Write: stdlib.OpenDB(*config), Ledger: stdlib.OpenDB(planned), Jobs: stdlib.OpenDB(keyed), Read: stdlib.OpenDB(*config), Admin: stdlib.OpenDB(admin),
	}
	db.Write.SetMaxOpenConns(1)
	db.Ledger.SetMaxOpenConns(1)
	db.Jobs.SetMaxOpenConns(postgresJobs)
	db.Jobs.SetMaxIdleConns(postgresJobs)
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
	// The writer last: closing it copies the SQLite log into the file.
	for _, pool := range []*sql.DB{db.Read, db.Admin, db.Jobs, db.Ledger, db.Write} {
		if closed := pool.Close(); FaultOf(closed) != FaultLost { // a lost connection need not be closed
			err = errors.Join(err, closed)
		}
	}
	return err
}

// Upgrade migrates the schema to the version of this program. Only migrating may take longer than
// checkTimeout.
func (db *DB) Upgrade(ctx context.Context, log *slog.Logger) error {
	options := []goose.ProviderOption{goose.WithLogger(goose.NopLogger()), goose.WithDisableGlobalRegistry(true)}
	check, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	if db.dialect == goose.DialectPostgres {
		if err := db.preparePostgres(check); err != nil {
			return err
		}
		// Another node may be migrating for long: retry every second for a day.
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
		if have >= want { // a newer node has migrated it, or this one
			return db.Check(check)
		}
		if have > 0 {
			if err := CheckMigratable(have); err != nil {
				return fmt.Errorf("%w: %s: %w", ErrConfig, db.Where, err)
			}
			if db.Postgres() && have < migrations.Lowest {
				if err := db.CheckOldNodes(ctx, migrations.Lowest); err != nil {
					return err
				}
			}
		}
		applied, err := db.migrate(ctx, provider, log)
		if err == nil {
			log.Info("database schema migrated", "from", have, "to", want, "files", len(applied))
			return nil
		}
		// SQLite has no lock for this: if two processes apply the same file, one of them fails
		// while the schema is migrated.
		if db.dialect != goose.DialectSQLite3 || have == last {
			return fmt.Errorf("migrating the schema: %w", err)
		}
		last = have
	}
}

// Check returns an error unless the database answers and this program may use it: a newer one may have migrated it meanwhile.
func (db *DB) Check(ctx context.Context) error {
	var text string
	if err := db.Admin.QueryRowContext(ctx, `SELECT value FROM fleet WHERE key = $1`, lowestKey).Scan(&text); err != nil {
		return fmt.Errorf("reading the lowest schema version: %w", err)
	}
	lowest, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return fmt.Errorf("%w: the lowest schema version in %s cannot be read: %w", ErrConfig, db.Where, err)
	}
	if known := SchemaVersion(); lowest > known {
		return fmt.Errorf("%w: %s needs a fleetd that supports schema version %d, but this one supports only versions up to %d; start a newer fleetd", ErrConfig, db.Where, lowest, known)
	}
	return nil
}

// lowestKey is that of the lowest schema version which a program must support, in the table fleet.
const lowestKey = "lowest_schema"

// logEvery is the longest time between two log lines of a migration.
const logEvery = 5 * time.Second

// migrate applies missing migrations, and logs the progress.
func (db *DB) migrate(ctx context.Context, provider *goose.Provider, log *slog.Logger) ([]*goose.MigrationResult, error) {
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

// preparePostgres ensures what SQLite has built in: text in UTF-8, and the collation of the schema.
// Byte order gives lists the same order on both databases, and keeps indexes valid after an
// upgrade of the server's C library.
func (db *DB) preparePostgres(ctx context.Context) error {
	var encoding string
	var collated bool
	err := db.Admin.QueryRowContext(ctx, `SELECT current_setting('server_encoding'), to_regcollation('"binary"') IS NOT NULL`).Scan(&encoding, &collated)
	if err != nil {
		return fmt.Errorf("reading the encoding of the database: %w", err)
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
	// IF NOT EXISTS does not protect from another node doing the same.
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
