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

	"fleetd/internal/clock"
	"fleetd/internal/events"
)

const (
	storageEvery   = 2 * time.Second
	restartFirst   = 5 * time.Second // between restarts of the server; doubled after each that did not help
	restartLongest = 5 * time.Minute
	storageSpare   = 1 << 20 // bytes that must be writable before a restart
)

// openEvents opens the event bus, whose streams are in NATS.
func (n *node) openEvents() error {
	var err error
	if n.events, err = events.New(events.Options{Conn: n.bus.conn, Prefix: n.cfg.NATSPrefix, Node: n.cfg.Node,
		Retention: n.cfg.EventRetention, Limit: n.cfg.EventLimit, NotificationLimit: n.cfg.NotificationLimit, Replicas: n.cfg.NATSReplicas, FirstSequence: events.SequenceOfTime, Log: n.log}); err != nil {
		return err
	}
	n.onStop(n.events.Close) // after the store, whose last rows still cause events
	if n.bus.embedded != nil {
		n.whileRunning(n.bus.embedded.watch)
	}
	return nil
}

// storageError returns why events are not stored, with advice; nil if they are.
func (n *node) storageError() error {
	if n.bus.embedded != nil {
		if err := n.bus.embedded.ready(); err != nil {
			return err
		}
	}
	return n.events.Ready()
}

// embedded is the NATS server in this process. After a failed write, as on a full disk, a
// server accepts nothing more for that stream and does not respond; without write permission
// it disables JetStream. Both last until it is restarted. JetStream cannot be restarted alone
// without a data race in the server and a second dispatcher of its API.
type embedded struct {
	options   *server.Options
	log       *slog.Logger
	server    atomic.Pointer[server.Server]
	lastError atomic.Pointer[error]
}

// start starts a server.
func (e *embedded) start() error {
	s, err := server.NewServer(e.options.Clone())
	if err != nil {
		return fmt.Errorf("embedded NATS: %w", err)
	}
	s.SetLoggerV2(newNATSLog(e.log), false, false, false)
	s.Start()
	if !s.ReadyForConnections(natsStart) {
		s.Shutdown()
		return errNATSStart
	}
	if address, ok := s.Addr().(*net.TCPAddr); ok {
		e.options.Port = address.Port // a restart keeps the port chosen by the system
	}
	e.server.Store(s)
	return nil
}

var errNATSStart = errors.New("embedded NATS did not start within 10 s")

// InProcessConn connects the node to the running server.
func (e *embedded) InProcessConn() (net.Conn, error) { return e.server.Load().InProcessConn() }

func (e *embedded) close() {
	s := e.server.Load()
	s.Shutdown()
	s.WaitForShutdown()
}

// ready returns why the server cannot write, with advice; nil if it can.
func (e *embedded) ready() error {
	if fault := e.lastError.Load(); fault != nil {
		return *fault
	}
	return nil
}

// broken returns why the server cannot write, or "". It ignores other problems, such as a
// stream whose files cannot be read, because a restart does not help there.
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

// watch restarts the server if it cannot write although its directory is writable.
func (e *embedded) watch(ctx context.Context) {
	var tried time.Time
	wait := restartFirst
	for range clock.Ticks(ctx, storageEvery) {
		reason := e.broken()
		if reason == "" {
			wait = restartFirst
			e.lastError.Store(nil)
			continue
		}
		fault := fmt.Errorf("the embedded NATS cannot write to %s (%s): free disk space there, or fix its permissions; "+
			"events and photos are then stored again without a restart of the node", e.options.StoreDir, reason)
		if e.lastError.Swap(&fault) == nil {
			e.log.Error("events and photos are not stored", "error", fault)
		}
		if time.Since(tried) < wait || writable(e.options.StoreDir) != nil {
			continue
		}
		if !tried.IsZero() {
			wait = min(2*wait, restartLongest)
		}
		tried = time.Now()
		e.close()
		if err := e.start(); err != nil {
			e.log.Error("cannot restart the embedded NATS; trying again", "error", err)
			continue
		}
		e.log.Info("restarted the embedded NATS because it could not write")
	}
}

// writable returns an error if the directory's disk is almost full or not writable.
func writable(dir string) error {
	f, err := os.CreateTemp(dir, "room-")
	if err != nil {
		return err
	}
	_, err = f.Write(make([]byte, storageSpare))
	return errors.Join(err, f.Sync(), f.Close(), os.Remove(f.Name()))
}
