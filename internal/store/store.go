package store

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/store/database"
	"fleetd/internal/store/records"
	"fleetd/internal/tasks"
)

const (
	// openPatience is how long Open waits for a database before it returns a degraded store.
	openPatience = 5 * time.Second
	// probeTimeout limits one check of the database.
	probeTimeout = 2 * time.Second
	// downInterval and upInterval are the pauses between checks.
	downInterval = time.Second
	upInterval   = 5 * time.Second
	// flapPause is the pause before the next check of a database that was usable for less than
	// downInterval.
	flapPause = 250 * time.Millisecond
)

// ErrConfig is database.ErrConfig.
var ErrConfig = database.ErrConfig

// FileName is the SQLite file in the data directory.
const FileName = database.FileName

// Store keeps records in one database. It is safe for concurrent use.
type Store struct {
	*records.Records

	backend      *database.DB
	log          *slog.Logger
	onReady      func()
	onOutranked  func(devices.Presence)
	onImage      func(devices.ImageChange)
	stats        Stats
	queue        *queue
	writer       *writer
	kept         kept
	transactions database.Transactions // of keys for attestation
	now          func() time.Time

	health      atomic.Pointer[health]
	healthMu    sync.Mutex    // serializes changes of health
	doubt       chan struct{} // capacity 1: check the database now
	fingerprint atomic.Pointer[string]
	opened      atomic.Bool // Open has returned: refusals must be logged

	stopWriter, stopWatch context.CancelFunc
	writerDone, watchDone chan struct{}
	closing               sync.Once
	closeErr              error
}

// health is the state of the database; changed is closed when it is replaced.
type health struct {
	err     error // nil: usable
	changed chan struct{}
}

var errNotReached = errors.New("not connected yet")

// Option is an option of Open.
type Option func(*Store)

// OnReady sets a function that is called each time the database becomes usable: at Open, and
// after every outage. f runs on the goroutine that monitors the database, may use the store,
// and must not block for long.
func OnReady(f func()) Option { return func(s *Store) { s.onReady = f } }

// Clock sets the clock that Prune uses in place of time.Now.
func Clock(now func() time.Time) Option { return func(s *Store) { s.now = now } }

// Open opens `sqlite` (the file FileName in dir), `sqlite:PATH` or `postgres://...` and migrates
// its schema. An error that wraps ErrConfig is one sentence for the operator. A database that
// cannot be reached within 5 s is not an error: the store is degraded, and a background
// goroutine connects, migrates and starts the writer when it can. ctx limits only Open. log must
// not be nil.
func Open(ctx context.Context, url, dir string, log *slog.Logger, options ...Option) (*Store, error) {
	backend, err := database.Open(url, dir)
	if err != nil {
		return nil, err
	}
	s := &Store{
		backend: backend, log: log, onReady: func() {}, onOutranked: func(devices.Presence) {}, onImage: func(devices.ImageChange) {}, now: clock.Now, doubt: make(chan struct{}, 1),
		writerDone: make(chan struct{}), watchDone: make(chan struct{}),
	}
	for _, option := range options {
		option(s)
	}
	s.Records = records.New(s, s.now)
	s.transactions = database.Transactions{Host: s, Pool: backend.Write, Limit: database.ReadTimeout}
	s.health.Store(&health{err: fmt.Errorf("%w: %w", devices.ErrDatabase, errNotReached), changed: make(chan struct{})})
	s.queue = newQueue(&s.stats)
	s.writer = &writer{store: s, texts: newStatements(s.now)}

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

// firstLook waits for the outcome of the first check of the database.
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

// Ready returns nil while the database is usable and the writer makes progress, else an error
// that wraps devices.ErrDatabase or ErrConfig. It does no I/O.
func (s *Store) Ready() error {
	if err := s.health.Load().err; err != nil {
		return err
	}
	if stuck := s.writer.stuck.Load(); stuck != nil {
		return *stuck
	}
	return nil
}

// WaitReady waits until the database is usable. The error wraps ErrConfig if only the operator
// can make it usable, and devices.ErrDatabase if ctx has ended.
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

// Log implements database.Host.
func (s *Store) Log() *slog.Logger { return s.log }

// Database returns the opened database, which the store closes.
func (s *Store) Database() *database.DB { return s.backend }

// Usable returns nil while the database is usable. It does no I/O.
func (s *Store) Usable() error { return s.health.Load().err }

// BeginRead implements database.Host.
func (s *Store) BeginRead(ctx context.Context) (context.Context, context.CancelFunc, error) {
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
		return fmt.Errorf("%s: %w", doing, ctx.Err()) // the caller left; the database may be usable
	case ctx.Err() != nil:
		tasks.Signal(s.doubt) // too slow for this caller; that alone does not make it unusable
		return fmt.Errorf("%w: %s: %w", devices.ErrDatabase, doing, ctx.Err())
	case database.FaultOf(err) == database.FaultLost:
		s.suspect(err)
	}
	return fmt.Errorf("%w: %s: %w", devices.ErrDatabase, doing, err)
}

// Stats returns the counters, which may be read at any time.
func (s *Store) Stats() *Stats { return &s.stats }

// Fingerprint binds the database to one fleet: the fp of the first caller is stored, and another
// one is refused with an error that wraps ErrConfig. While the database is unreachable it
// returns an error that wraps devices.ErrDatabase; the check is then made before the database is
// used again, and Ready and WaitReady return the refusal.
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

// fact returns the stored value of this key; if there is none, it stores value.
func (s *Store) fact(ctx context.Context, key, value string) (string, error) {
	db := s.backend.Admin
	if _, err := db.ExecContext(ctx, `INSERT INTO fleet (key, value) VALUES ($1, $2) ON CONFLICT (key) DO NOTHING`, key, value); err != nil {
		return "", err
	}
	var stored string
	err := db.QueryRowContext(ctx, `SELECT value FROM fleet WHERE key = $1`, key).Scan(&stored)
	return stored, err
}

// FleetID returns the random id of this database, created once. Errors wrap devices.ErrDatabase.
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

// watch checks periodically whether the database is usable.
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

// look checks the database. After an outage it may be another server, or an older copy:
// everything is checked again.
func (s *Store) look(ctx context.Context, wasUp bool) error {
	if wasUp {
		ctx, cancel := context.WithTimeout(ctx, probeTimeout)
		defer cancel()
		return s.unavailable(s.backend.Check(ctx))
	}
	err := s.backend.Upgrade(ctx, s.log)
	if database.FaultOf(err) == database.FaultLost && !errors.Is(err, context.DeadlineExceeded) {
		// The administrative connection may have broken together with the others.
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

// unavailable wraps an error of the check in ErrConfig or devices.ErrDatabase.
func (s *Store) unavailable(err error) error {
	if err == nil || errors.Is(err, database.ErrConfig) {
		return err
	}
	if class := database.FaultOf(err); class == database.FaultWrong || class == database.FaultRow {
		return s.backend.Refusal(err)
	}
	return fmt.Errorf("%w: %s: %s", devices.ErrDatabase, s.backend.Where, database.OneLine(err))
}

// healthKind returns the kind of a health, for setHealth.
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

// setHealth records the result of a check and reports whether the kind changed.
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
		s.log.Info("database is usable", "database", s.backend.Where)
	case !errors.Is(err, database.ErrConfig):
		s.log.Warn("database is unreachable; rows are queued, and the connection is retried every second", "error", err)
	case s.opened.Load():
		s.log.Error("database cannot be used", "error", err)
	}
	return true
}

// suspect records an error that broke a connection: reads fail at once until the next check has
// found the database usable.
func (s *Store) suspect(err error) {
	if s.health.Load().err == nil {
		s.setHealth(fmt.Errorf("%w: %s: %s", devices.ErrDatabase, s.backend.Where, database.OneLine(err)))
	}
	tasks.Signal(s.doubt)
}

// Close writes the queued rows, stops the goroutines and closes the database. If ctx ends first,
// the rest is lost, and the error contains the number of rows; give ctx a deadline, since the
// database may be unreachable. Rows saved later are counted in Stats.Late and lost. Further
// calls return the same error.
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
			s.closeErr = fmt.Errorf("%w: %d rows could not be written before the node stopped", devices.ErrDatabase, lost)
		}
		s.closeErr = errors.Join(s.closeErr, s.backend.Close())
	})
	return s.closeErr
}
