package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"fleetd/internal/events"
)

const (
	storageEvery = 2 * time.Second
	storageFirst = 5 * time.Second // between restarts of JetStream, and twice as long after each that did not help
	storageLast  = 5 * time.Minute
	storageSpare = 1 << 20 // bytes that must be writable before one
)

// openEvents makes the bus of events, whose streams lie in NATS.
func (n *node) openEvents() error {
	var err error
	if n.events, err = events.New(events.Options{Conn: n.bus.conn, Prefix: n.cfg.NATSPrefix, Node: n.cfg.Node,
		Retention: n.cfg.EventRetention, Limit: n.cfg.EventLimit, Replicas: n.cfg.NATSReplicas, Log: n.log}); err != nil {
		return err
	}
	n.onStop(n.events.Close) // after the store, whose last rows still make events
	if n.bus.storage != nil {
		n.whileRunning(func(ctx context.Context) { n.bus.storage.run(ctx, n.events.Restarted) })
	}
	return nil
}

// kept returns why events are not kept, and what to do.
func (n *node) kept() error {
	if n.bus.storage != nil {
		if err := n.bus.storage.ready(); err != nil {
			return err
		}
	}
	return n.events.Ready()
}

// storage looks after the files of the embedded NATS. After a write that
// failed, as on a full disk, the server takes nothing more for that stream and
// answers nobody, until JetStream is restarted; after a lack of permission it
// disables JetStream altogether.
type storage struct {
	server  *server.Server
	options *server.Options // as the server was started with
	log     *slog.Logger
	fault   atomic.Pointer[error]
}

// ready returns what keeps the server from writing, and what to do.
func (s *storage) ready() error {
	if fault := s.fault.Load(); fault != nil {
		return *fault
	}
	return nil
}

// run restarts JetStream whenever it cannot write though its directory can be
// written to. It calls restarted after that.
func (s *storage) run(ctx context.Context, restarted func()) {
	ticker := time.NewTicker(storageEvery)
	defer ticker.Stop()
	var tried time.Time
	suspect, wait := false, storageFirst
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		health := s.server.Healthz(nil)
		if health.StatusCode != http.StatusServiceUnavailable {
			suspect, wait = false, storageFirst
			s.fault.Store(nil)
			continue
		}
		if !suspect { // a stream that is being made has files, and is not there yet
			suspect = true
			continue
		}
		fault := fmt.Errorf("the embedded NATS cannot write to %s (%s): free disk space there, or fix its permissions; "+
			"events and photos are kept again without a restart of the node", s.options.StoreDir, health.Error)
		if s.fault.Swap(&fault) == nil {
			s.log.Error("events and photos are not kept", "error", fault)
		}
		if time.Since(tried) < wait || writable(s.options.StoreDir) != nil {
			continue
		}
		if !tried.IsZero() {
			wait = min(2*wait, storageLast)
		}
		tried = time.Now()
		if err := s.restart(); err != nil {
			s.log.Warn("JetStream is not restarted yet", "error", err)
			continue
		}
		s.log.Info("JetStream restarted after it could not write")
		restarted()
	}
}

// restart reads the streams from their files again.
func (s *storage) restart() error {
	if err := s.server.ShutdownJetStream(); err != nil {
		return err
	}
	o := s.options
	err := s.server.EnableJetStream(&server.JetStreamConfig{StoreDir: o.StoreDir, MaxMemory: o.JetStreamMaxMemory, MaxStore: o.JetStreamMaxStore,
		SyncInterval: o.SyncInterval, SyncAlways: o.SyncAlways, Strict: !o.NoJetStreamStrict, CompressOK: true})
	if err != nil {
		return errors.Join(err, s.server.ShutdownJetStream())
	}
	return nil
}

// writable tells whether a directory's disk has room for more than a moment.
func writable(dir string) error {
	f, err := os.CreateTemp(dir, "room-")
	if err != nil {
		return err
	}
	_, err = f.Write(make([]byte, storageSpare))
	return errors.Join(err, f.Sync(), f.Close(), os.Remove(f.Name()))
}
