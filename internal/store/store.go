package store

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/store/database"
	"fleetd/internal/store/records"
)

const (
	// openPatience is how long Open waits for a database before it returns a
	// degraded store.
	openPatience = 5 * time.Second
	// probeTimeout bounds one look whether the database answers.
	probeTimeout = 2 * time.Second
	// downInterval and upInterval are the pauses between looks.
	downInterval = time.Second
	upInterval   = 5 * time.Second
	// flapPause is how long a database that was usable for less than
	// downInterval is left alone.
	flapPause = 250 * time.Millisecond
)

// ErrConfig is database.ErrConfig.
var ErrConfig = database.ErrConfig

// FileName is the SQLite file in the data directory.
const FileName = database.FileName

// Store keeps records in one database. All methods may be called from any
// goroutine.
type Store struct {
	*records.Records

	backend     *database.DB
	log         *slog.Logger
	onReady     func()
	onOutranked func(devices.Presence)
	stats       Stats
	queue       *queue
	writer      *writer
	kept        kept
	now         func() time.Time

	health      atomic.Pointer[health]
	healthMu    sync.Mutex    // serialises changes of health
	doubt       chan struct{} // capacity 1: look at the database now
	fingerprint atomic.Pointer[string]
	opened      atomic.Bool // Open has returned: nobody else reports a refusal

	stopWriter, stopWatch context.CancelFunc
	writerDone, watchDone chan struct{}
	closing               sync.Once
	closeErr              error
}

// health is whether the database can be used; changed is closed when another
// health takes its place.
type health struct {
	err     error // nil: usable
	changed chan struct{}
}

var errNotReached = errors.New("not reached yet")

// Option changes how a store is opened.
type Option func(*Store)

// OnReady has f called each time the database becomes usable: at Open, and
// after every outage. f runs on the goroutine that watches the database, may
// use the store, and must not wait for long.
func OnReady(f func()) Option { return func(s *Store) { s.onReady = f } }

// Clock gives the store another clock than time.Now for what Prune goes by.
func Clock(now func() time.Time) Option { return func(s *Store) { s.now = now } }

// Open opens `sqlite` (the file FileName in dir), `sqlite:PATH` or
// `postgres://...` and brings its schema up to date. An error that wraps
// ErrConfig is one sentence for the operator. A database that cannot be
// reached within 5 s is no error: the store is degraded, and a background
// goroutine connects, migrates and lets the writer go on once it can. ctx
// bounds Open only. log must not be nil.
func Open(ctx context.Context, url, dir string, log *slog.Logger, options ...Option) (*Store, error) {
	backend, err := database.Open(url, dir)
	if err != nil {
		return nil, err
	}
	s := &Store{
		backend: backend, log: log, onReady: func() {}, onOutranked: func(devices.Presence) {}, now: time.Now, doubt: make(chan struct{}, 1),
		writerDone: make(chan struct{}), watchDone: make(chan struct{}),
	}
	for _, option := range options {
		option(s)
	}
	s.Records = records.New(s, s.now)
	s.health.Store(&health{err: fmt.Errorf("%w: %w", devices.ErrDatabase, errNotReached), changed: make(chan struct{})})
	s.queue = newQueue(&s.stats)
	s.writer = &writer{store: s, texts: newStatements(s.now), statements: map[statementKey]*sql.Stmt{}}

	writerCtx, stopWriter := context.WithCancel(context.WithoutCancel(ctx))
	watchCtx, stopWatch := context.WithCancel(context.WithoutCancel(ctx))
	s.stopWriter, s.stopWatch = stopWriter, stopWatch
	go s.writer.run(writerCtx)
	go s.watch(watchCtx)

	first, cancel := context.WithTimeout(ctx, openPatience)
	defer cancel()
	err = s.firstLook(first)
	if errors.Is(err, database.ErrConfig) || ctx.Err() != nil {
		now, cancel := context.WithCancel(ctx)
		cancel()
		return nil, errors.Join(err, s.Close(now))
	}
	s.opened.Store(true)
	return s, nil
}

// firstLook waits for the outcome of the first attempt to use the database.
func (s *Store) firstLook(ctx context.Context) error {
	h := s.health.Load()
	if !errors.Is(h.err, errNotReached) {
		return h.err
	}
	select {
	case <-h.changed:
		return s.health.Load().err
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", devices.ErrDatabase, ctx.Err())
	}
}

// Ready returns nil while the database can be used and the writer makes
// progress, else why not: an error that wraps devices.ErrDatabase or
// ErrConfig. It does no I/O.
func (s *Store) Ready() error {
	if err := s.health.Load().err; err != nil {
		return err
	}
	if stuck := s.writer.stuck.Load(); stuck != nil {
		return *stuck
	}
	return nil
}

// WaitReady returns once the database can be used. It gives up with an error
// that wraps ErrConfig if only the operator can make it usable, and with one
// that wraps devices.ErrDatabase when ctx ends.
func (s *Store) WaitReady(ctx context.Context) error {
	for {
		h := s.health.Load()
		if h.err == nil || errors.Is(h.err, database.ErrConfig) {
			return h.err
		}
		select {
		case <-h.changed:
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", h.err, ctx.Err())
		}
	}
}

// Database is the opened database, which the store closes.
func (s *Store) Database() *database.DB { return s.backend }

// Usable returns nil while the database can be used, else why not. It does no I/O.
func (s *Store) Usable() error { return s.health.Load().err }

// Reading implements database.Host.
func (s *Store) Reading(ctx context.Context) (context.Context, context.CancelFunc, error) {
	if err := s.health.Load().err; err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, database.ReadTimeout)
	return ctx, cancel, nil
}

// UseError implements database.Host.
func (s *Store) UseError(ctx context.Context, doing string, err error) error {
	switch {
	case errors.Is(err, database.ErrConfig):
		return err
	case errors.Is(ctx.Err(), context.Canceled):
		return fmt.Errorf("%s: %w", doing, ctx.Err()) // the caller went away, not the database
	case ctx.Err() != nil:
		s.raiseDoubt() // too slow for this caller; that alone does not make it unusable
		return fmt.Errorf("%w: %s: %w", devices.ErrDatabase, doing, ctx.Err())
	case database.FaultOf(err) == database.FaultLost:
		s.suspect(err)
	}
	return fmt.Errorf("%w: %s: %w", devices.ErrDatabase, doing, err)
}

// Stats are the counters, to be read at any time.
func (s *Store) Stats() *Stats { return &s.stats }

// Fingerprint ties the database to one fleet: the first caller's fp is stored,
// and a different one is refused with an error that wraps ErrConfig. While the
// database is away it returns an error that wraps devices.ErrDatabase; the
// check is then made before the database is used again, and its refusal shows
// in Ready and WaitReady.
func (s *Store) Fingerprint(ctx context.Context, fp string) error {
	s.fingerprint.Store(&fp)
	if err := s.health.Load().err; err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	if err := s.checkFingerprint(ctx); err != nil {
		return s.UseError(ctx, "checking the fleet's fingerprint", err)
	}
	return nil
}

func (s *Store) checkFingerprint(ctx context.Context) error {
	fp := s.fingerprint.Load()
	if fp == nil {
		return nil
	}
	stored, err := s.fact(ctx, database.FingerprintKey, *fp)
	if err != nil {
		return err
	}
	if stored != *fp {
		return fmt.Errorf("%w: %s belongs to a fleet with another secret; give this node that fleet's --secret or a database of its own", database.ErrConfig, s.backend.Where)
	}
	return nil
}

// fact returns what the fleet has agreed on under this key: the value of
// whoever came first.
func (s *Store) fact(ctx context.Context, key, value string) (string, error) {
	db := s.backend.Admin
	if _, err := db.ExecContext(ctx, `INSERT INTO fleet (key, value) VALUES ($1, $2) ON CONFLICT (key) DO NOTHING`, key, value); err != nil {
		return "", err
	}
	var stored string
	err := db.QueryRowContext(ctx, `SELECT value FROM fleet WHERE key = $1`, key).Scan(&stored)
	return stored, err
}

// FleetID names this database among all: random, made once. Errors wrap
// devices.ErrDatabase.
func (s *Store) FleetID(ctx context.Context) (string, error) {
	if err := s.health.Load().err; err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	id, err := s.fact(ctx, "id", rand.Text())
	if err != nil {
		return "", s.UseError(ctx, "reading the fleet's id", err)
	}
	return id, nil
}

// AuditKeyed is the fleet's note of when it began to key its audit: that of
// whoever came first. Errors wrap devices.ErrDatabase.
func (s *Store) AuditKeyed(ctx context.Context, note string) (string, error) {
	if err := s.health.Load().err; err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	note, err := s.fact(ctx, "audit_keyed", note)
	if err != nil {
		return "", s.UseError(ctx, "reading since when the audit is keyed", err)
	}
	return note, nil
}

// watch finds out whether the database can be used, and whether it still can.
func (s *Store) watch(ctx context.Context) {
	defer close(s.watchDone)
	timer := time.NewTimer(0)
	defer timer.Stop()
	var cameUp time.Time
	for {
		select {
		case <-timer.C:
		case <-s.doubt:
			if time.Since(cameUp) < downInterval {
				timer.Reset(flapPause)
				continue
			}
		case <-ctx.Done():
			return
		}
		wasUp := s.health.Load().err == nil
		err := s.look(ctx, wasUp)
		if ctx.Err() != nil {
			return
		}
		pause := upInterval
		if err != nil {
			pause = downInterval
		}
		if s.setHealth(err) && err == nil {
			cameUp = time.Now()
			s.onReady()
		}
		timer.Reset(pause)
	}
}

// look tries the database. After an outage it may be another server, or an
// older copy: everything is checked again.
func (s *Store) look(ctx context.Context, wasUp bool) error {
	if wasUp {
		ctx, cancel := context.WithTimeout(ctx, probeTimeout)
		defer cancel()
		return s.unavailable(s.backend.Admin.PingContext(ctx))
	}
	err := s.backend.Upgrade(ctx, s.log)
	if database.FaultOf(err) == database.FaultLost && !errors.Is(err, context.DeadlineExceeded) {
		// The admin connection may have died with the others a moment ago.
		err = s.backend.Upgrade(ctx, s.log)
	}
	if err == nil {
		ctx, cancel := context.WithTimeout(ctx, probeTimeout)
		defer cancel()
		err = s.checkFingerprint(ctx)
	}
	if err == nil {
		s.kept.forget() // it may be another database, or an older copy
	}
	return s.unavailable(err)
}

// unavailable wraps an error of the watcher in ErrConfig or devices.ErrDatabase.
func (s *Store) unavailable(err error) error {
	if err == nil || errors.Is(err, database.ErrConfig) {
		return err
	}
	if class := database.FaultOf(err); class == database.FaultWrong || class == database.FaultRow {
		return s.backend.Refusal(err)
	}
	return fmt.Errorf("%w: %s: %s", devices.ErrDatabase, s.backend.Where, database.OneLine(err))
}

// healthKind is how much two healths differ, for setHealth.
func healthKind(err error) int {
	switch {
	case err == nil:
		return 0
	case errors.Is(err, errNotReached):
		return 1
	case errors.Is(err, database.ErrConfig):
		return 2
	default:
		return 3
	}
}

// setHealth records what was found and says whether that is news.
func (s *Store) setHealth(err error) bool {
	s.healthMu.Lock()
	defer s.healthMu.Unlock()
	old := s.health.Load()
	if healthKind(old.err) == healthKind(err) {
		return false
	}
	s.health.Store(&health{err: err, changed: make(chan struct{})})
	close(old.changed)
	switch {
	case err == nil:
		s.log.Info("database usable", "database", s.backend.Where)
	case !errors.Is(err, database.ErrConfig):
		s.log.Warn("database unavailable; rows are kept, retrying every second", "error", err)
	case s.opened.Load():
		s.log.Error("database refused", "error", err)
	}
	return true
}

// suspect takes note of an error that broke a connection: reads fail at once
// until the watcher, woken by it, has found the database usable.
func (s *Store) suspect(err error) {
	if s.health.Load().err == nil {
		s.setHealth(fmt.Errorf("%w: %s: %s", devices.ErrDatabase, s.backend.Where, database.OneLine(err)))
	}
	s.raiseDoubt()
}

// raiseDoubt makes the watcher look at once.
func (s *Store) raiseDoubt() {
	select {
	case s.doubt <- struct{}{}:
	default:
	}
}

// Close writes what waits, ends the goroutines and closes the database. When
// ctx ends first, what is left is lost, and the error says how much; give ctx
// a deadline, since the database may be away. Rows saved later are counted in
// Stats.Late and lost. Further calls return the same error.
func (s *Store) Close(ctx context.Context) error {
	s.closing.Do(func() {
		s.queue.close()
		select {
		case <-s.writerDone:
		case <-ctx.Done():
		}
		s.stopWriter()
		<-s.writerDone
		s.stopWatch()
		<-s.watchDone
		if lost := s.writer.lost; lost > 0 {
			s.closeErr = fmt.Errorf("%w: %d rows were not written before the stop", devices.ErrDatabase, lost)
		}
		s.closeErr = errors.Join(s.closeErr, s.writer.closeStatements(), s.backend.Close())
	})
	return s.closeErr
}
