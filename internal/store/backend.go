package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
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
	postgresReaders  = 6 // with the writer and the admin connection: 8 per node
)

// backend is an opened database and the little in which the two differ. It
// holds three pools: one connection that writes, one that migrates and
// probes, and several that read.
type backend struct {
	where   string // for people, without the password
	dialect goose.Dialect
	// maxRows is the most rows of one statement, a power of two. Postgres
	// gains up to 128. SQLite looks the name of each parameter up by walking a
	// list, so that its cost grows with their square; and a statement costs it
	// no round trip.
	maxRows            int
	write, read, admin *sql.DB
}

// openBackend reads the URL and makes the pools. Only a bad URL or, with
// SQLite, a file that cannot be made is an error; nothing is dialled.
func openBackend(text, dir string) (*backend, error) {
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

func openSQLite(path string) (*backend, error) {
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
	const journal = "&_txlock=immediate&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_pragma=journal_size_limit(67108864)"
	b := &backend{where: "the SQLite file " + path, dialect: goose.DialectSQLite3, maxRows: 8}
	for _, pool := range []struct {
		db   **sql.DB
		name string
		size int
	}{{&b.write, name + journal, 1}, {&b.admin, name + journal, 1}, {&b.read, name + "&_pragma=query_only(1)", sqliteReaders}} {
		if *pool.db, err = sql.Open("sqlite", pool.name); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrConfig, err)
		}
		(*pool.db).SetMaxOpenConns(pool.size)
		(*pool.db).SetMaxIdleConns(pool.size)
	}
	return b, nil
}

func openPostgres(text string) (*backend, error) {
	config, err := pgx.ParseConfig(text)
	if err != nil {
		return nil, fmt.Errorf("%w: %s", ErrConfig, oneLine(err))
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
	b := &backend{
		where:   fmt.Sprintf("the Postgres database %q of user %q at %s", config.Database, config.User, net.JoinHostPort(config.Host, fmt.Sprint(config.Port))),
		dialect: goose.DialectPostgres, maxRows: 128,
		write: stdlib.OpenDB(*config), read: stdlib.OpenDB(*config), admin: stdlib.OpenDB(admin),
	}
	b.write.SetMaxOpenConns(1)
	b.admin.SetMaxOpenConns(1)
	b.read.SetMaxOpenConns(postgresReaders)
	b.read.SetConnMaxIdleTime(5 * time.Minute)
	return b, nil
}

func (b *backend) close() error {
	// The writer last: its end folds the SQLite log into the file.
	return errors.Join(b.read.Close(), b.admin.Close(), b.write.Close())
}

// upgrade brings the schema to the version of this program. Only migrating may
// take longer than checkTimeout.
func (b *backend) upgrade(ctx context.Context, log *slog.Logger) error {
	options := []goose.ProviderOption{goose.WithLogger(goose.NopLogger()), goose.WithDisableGlobalRegistry(true)}
	check, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	if b.dialect == goose.DialectPostgres {
		if err := b.preparePostgres(check); err != nil {
			return err
		}
		// Another node may be migrating for long: ask every second for a day.
		locker, err := lock.NewPostgresSessionLocker(lock.WithLockTimeout(1, 86400))
		if err != nil {
			return fmt.Errorf("migration lock: %w", err)
		}
		options = append(options, goose.WithSessionLocker(locker))
	}
	provider, err := goose.NewProvider(b.dialect, b.admin, migrations.FS, options...)
	if err != nil {
		return fmt.Errorf("reading the migrations: %w", err)
	}
	for last := int64(-1); ; {
		have, want, err := provider.GetVersions(check)
		if err != nil {
			return fmt.Errorf("reading the schema version: %w", err)
		}
		if have > want {
			return fmt.Errorf("%w: %s has schema version %d and this fleetd knows up to %d; start a newer fleetd", ErrConfig, b.where, have, want)
		}
		if have == want {
			return nil
		}
		applied, err := provider.Up(ctx)
		if err == nil {
			log.Info("database schema migrated", "from", have, "to", want, "files", len(applied))
			return nil
		}
		// SQLite has no lock for this: two processes may apply the same file,
		// and one of them fails while the schema goes on.
		if b.dialect != goose.DialectSQLite3 || have == last {
			return fmt.Errorf("migrating the schema: %w", err)
		}
		last = have
	}
}

// preparePostgres makes sure of what SQLite has built in: text in UTF-8, and
// the collation that the schema names. Byte order makes lists come in the same
// order on both databases, and its indexes survive an upgrade of the server's
// C library.
func (b *backend) preparePostgres(ctx context.Context) error {
	var encoding string
	var collated bool
	err := b.admin.QueryRowContext(ctx, `SELECT current_setting('server_encoding'), to_regcollation('"binary"') IS NOT NULL`).Scan(&encoding, &collated)
	if err != nil {
		return fmt.Errorf("asking the database for its encoding: %w", err)
	}
	if encoding != "UTF8" {
		return fmt.Errorf("%w: %s has the encoding %s; create it with ENCODING 'UTF8'", ErrConfig, b.where, encoding)
	}
	if collated {
		return nil
	}
	tx, err := b.admin.BeginTx(ctx, nil)
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
