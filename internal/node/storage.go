package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"fleetd/internal/events"
)

const (
	storageEvery = 2 * time.Second
	storageFirst = 5 * time.Second // between restarts of the server, and twice as long after each that did not help
	storageLast  = 5 * time.Minute
	storageSpare = 1 << 20 // bytes that must be writable before one
)

// openEvents makes the bus of events, whose streams are in NATS.
func (n *node) openEvents() error {
	var err error
	if n.events, err = events.New(events.Options{Conn: n.bus.conn, Prefix: n.cfg.NATSPrefix, Node: n.cfg.Node,
		Retention: n.cfg.EventRetention, Limit: n.cfg.EventLimit, NotificationLimit: n.cfg.NotificationLimit, Replicas: n.cfg.NATSReplicas, Log: n.log}); err != nil {
		return err
	}
	n.onStop(n.events.Close) // after the store, whose last rows still make events
	if n.bus.embedded != nil {
		n.whileRunning(n.bus.embedded.watch)
	}
	return nil
}

// kept returns why events are not kept, and what to do.
func (n *node) kept() error {
	if n.bus.embedded != nil {
		if err := n.bus.embedded.ready(); err != nil {
			return err
		}
	}
	return n.events.Ready()
}

// embedded is the NATS server in this process. After a write that failed, as
// on a full disk, a server takes nothing more for that stream and answers
// nobody; without permission to write it disables JetStream. Both last until
// it is restarted: JetStream alone cannot be, without a data race in the server
// and a second dispatcher of its API.
type embedded struct {
	options *server.Options
	log     *slog.Logger
	server  atomic.Pointer[server.Server]
	fault   atomic.Pointer[error]
}

// start starts a server.
func (e *embedded) start() error {
	s, err := server.NewServer(e.options.Clone())
	if err != nil {
		return fmt.Errorf("embedded NATS: %w", err)
	}
	s.SetLoggerV2(natsLog{e.log}, false, false, false)
	s.Start()
	if !s.ReadyForConnections(natsStart) {
		s.Shutdown()
		return errNATSStart
	}
	if address, ok := s.Addr().(*net.TCPAddr); ok {
		e.options.Port = address.Port // a restart keeps a port that the system chose
	}
	e.server.Store(s)
	return nil
}

var errNATSStart = errors.New("embedded NATS did not start within 10 s")

// InProcessConn connects the node to the server that runs now.
func (e *embedded) InProcessConn() (net.Conn, error) { return e.server.Load().InProcessConn() }

func (e *embedded) close() {
	s := e.server.Load()
	s.Shutdown()
	s.WaitForShutdown()
}

// ready returns what keeps the server from writing, and what to do.
func (e *embedded) ready() error {
	if fault := e.fault.Load(); fault != nil {
		return *fault
	}
	return nil
}

// broken is why the server writes no more. Other complaints are left out, such
// as a stream whose files cannot be read: a restart does not help there.
func (e *embedded) broken() string {
	s := e.server.Load()
	if !s.JetStreamEnabled() {
		return "JetStream is disabled"
	}
	for _, problem := range s.Healthz(&server.HealthzOptions{Details: true}).Errors {
		if strings.Contains(problem.Error, "write error") {
			return problem.Error
		}
	}
	return ""
}

// watch restarts the server whenever it cannot write though its directory can
// be written to.
func (e *embedded) watch(ctx context.Context) {
	ticker := time.NewTicker(storageEvery)
	defer ticker.Stop()
	var tried time.Time
	wait := storageFirst
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		reason := e.broken()
		if reason == "" {
			wait = storageFirst
			e.fault.Store(nil)
			continue
		}
		fault := fmt.Errorf("the embedded NATS cannot write to %s (%s): free disk space there, or fix its permissions; "+
			"events and photos are kept again without a restart of the node", e.options.StoreDir, reason)
		if e.fault.Swap(&fault) == nil {
			e.log.Error("events and photos are not kept", "error", fault)
		}
		if time.Since(tried) < wait || writable(e.options.StoreDir) != nil {
			continue
		}
		if !tried.IsZero() {
			wait = min(2*wait, storageLast)
		}
		tried = time.Now()
		e.close()
		if err := e.start(); err != nil {
			e.log.Error("embedded NATS is not restarted yet", "error", err)
			continue
		}
		e.log.Info("embedded NATS restarted, because it could not write")
	}
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
