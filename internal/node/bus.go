package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"golang.org/x/time/rate"

	"fleetd/internal/access"
	"fleetd/internal/config"
	"fleetd/internal/counters"
	"fleetd/internal/credential"
	"fleetd/internal/datadir"
	"fleetd/internal/tasks"
	"fleetd/internal/timescale"
)

// bus is the node's NATS: a server in this process, or a connection to an external one.
type bus struct {
	embedded *embedded   // nil if external
	logins   *natsLogins // nil unless the embedded server requires a login
	conn     *nats.Conn
	url      string // for other programs; empty if it is in process only
	lost     atomic.Uint64
	// up is set while the connection is open. The library's own status needs a lock that
	// it holds for up to 3 s at a time while it tries to reconnect.
	up          atomic.Bool
	reconnected chan struct{} // capacity 1: the connection was restored
}

// onConnect records that the connection is open, and signals back if it was restored. The
// library calls its callbacks in sequence, so this must not block.
func (b *bus) onConnect() {
	if b.up.Swap(true) {
		return
	}
	tasks.Signal(b.reconnected)
}

const natsStart = 10 * time.Second

// maxStore is the disk space that the embedded server may reserve: practically unlimited.
const maxStore = 1 << 50

// syncEvery limits the events and photos that a power cut can lose. Syncing each one would
// lose most events when a fleet reconnects, with thousands of events per second.
const syncEvery = 10 * time.Second

// Limits of each connection to the embedded server.
const (
	natsSubscriptions = 5_000
	natsPending       = 16 << 20 // bytes queued for a connection; above it the connection is closed
	natsOfKey         = 16       // connections of one API key
)

// pingEvery is how often both ends of a NATS connection ping each other. Two missing
// responses end the connection, so a failed machine is detected within three intervals.
// Tests on a busy machine need intervals in which a process runs at all.
var pingEvery = max(timescale.Of(2*time.Second), 200*time.Millisecond)

// flushTime limits a write to NATS, since a blocked write delays all others.
const flushTime = 2 * time.Second

// openBus starts the embedded server, or connects to an external one. A wrong URL or login
// is an error; an unreachable server is not, because the connection keeps trying.
func openBus(cfg *config.Config, dir *datadir.Dir, mint *credential.Mint, log *slog.Logger) (*bus, error) {
	b := &bus{reconnected: make(chan struct{}, 1)}
	options := []nats.Option{
		nats.Name("fleetd " + cfg.Node),
		nats.NoEcho(), // messages of a node are for others
		nats.MaxReconnects(-1),
		nats.ReconnectWait(500 * time.Millisecond),
		nats.IgnoreAuthErrorAbort(), // a login that fails for a while must not end the connection permanently
		nats.ReconnectBufSize(-1),   // return errors instead of buffering 8 MB
		nats.PingInterval(pingEvery),
		nats.MaxPingsOutstanding(2),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			b.lost.Add(1)
			log.Warn("NATS", "error", err)
		}),
		nats.FlusherTimeout(flushTime),
		nats.ConnectHandler(func(*nats.Conn) { b.onConnect() }),
		nats.ReconnectHandler(func(*nats.Conn) { b.onConnect() }),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			b.up.Store(false)
			if err != nil { // not closed by this node
				log.Warn("NATS connection lost", "error", err)
			}
		}),
	}
	if cfg.NATS != "embedded" {
		return b, b.dial(cfg.NATS, options)
	}
	if err := b.embed(cfg, dir, mint, log); err != nil {
		return nil, err
	}
	conn, err := nats.Connect("", append(options, nats.InProcessServer(b.embedded), nats.TokenHandler(mint.AdminToken))...)
	if err != nil {
		b.embedded.close()
		return nil, fmt.Errorf("embedded NATS: %w", err)
	}
	b.conn = conn
	b.up.Store(true)
	return b, nil
}

func (b *bus) dial(urls string, options []nats.Option) error {
	conn, err := nats.Connect(urls, append(options, nats.Timeout(3*time.Second))...)
	switch {
	case err == nil:
		b.conn = conn
		b.up.Store(true)
		return nil
	case errors.Is(err, nats.ErrAuthorization), errors.Is(err, nats.ErrAuthExpired), errors.Is(err, nats.ErrAuthRevoked):
		return fmt.Errorf("--nats: the server refuses the login: %w", err)
	}
	if b.conn, err = nats.Connect(urls, append(options, nats.Timeout(3*time.Second), nats.RetryOnFailedConnect(true))...); err != nil {
		return fmt.Errorf("--nats: %w", err)
	}
	return nil
}

// embed starts the server. Other programs can connect only with --nats-listen: without a
// login on loopback, otherwise with a login that natsLogins checks.
func (b *bus) embed(cfg *config.Config, dir *datadir.Dir, mint *credential.Mint, log *slog.Logger) error {
	opts := &server.Options{
		ServerName: "fleetd-" + cfg.Node,
		DontListen: cfg.NATSListen == "",
		JetStream:  true,
		StoreDir:   dir.File(datadir.DirNATS),
		// The streams have limits of their own, and reserve them, including those of an
		// earlier start. With a smaller value the server would not read its own files after a
		// limit was lowered.
		JetStreamMaxStore: maxStore,
		NoSigs:            true,
		SyncInterval:      syncEvery,
		// Otherwise the server would search its cache of subjects for the device's wildcard
		// whenever a device connects or disconnects.
		NoSublistCache: true,
		// Other nodes may connect: one that does not run is detected within 6 s.
		PingInterval: pingEvery,
		MaxPingsOut:  2,
		// Limits for programs that connect: by default each may have any number of
		// subscriptions, and 64 MiB of unread messages.
		MaxConn:    natsFiles(openFiles()),
		MaxSubs:    natsSubscriptions,
		MaxPending: natsPending,
	}
	b.embedded = &embedded{options: opts, log: log}
	if cfg.NATSListen != "" {
		host, portText, err := net.SplitHostPort(cfg.NATSListen)
		if err != nil {
			return fmt.Errorf("--nats-listen: %w", err)
		}
		opts.Host = host
		if opts.Port, err = strconv.Atoi(portText); err != nil {
			return fmt.Errorf("--nats-listen: port %q is not a number", portText)
		}
		opts.Port = cmp.Or(opts.Port, server.RANDOM_PORT)
		if ip, err := netip.ParseAddr(host); err != nil || !ip.IsLoopback() {
			b.logins = &natsLogins{mint: mint, prefix: cfg.NATSPrefix, callers: map[uint64]*access.Caller{}, server: &b.embedded.server}
			opts.CustomClientAuthentication = b.logins
		}
	}
	if err := b.embedded.start(); err != nil {
		if cfg.NATSListen != "" && errors.Is(err, errNATSStart) {
			return fmt.Errorf("--nats-listen: cannot listen on %s; check that the port is free", cfg.NATSListen)
		}
		return err
	}
	if cfg.NATSListen != "" {
		b.url = b.embedded.server.Load().ClientURL()
	}
	return nil
}

func (b *bus) close() {
	if b.conn != nil {
		b.conn.Close()
	}
	if b.embedded != nil {
		b.embedded.close()
	}
}

// natsLogBurst is the burst of log lines of the embedded server, after which one a second is
// logged. Its clients cause them, by failed logins and forbidden subjects.
const natsLogBurst = 20

// natsLog writes the embedded server's warnings to the log; its notices are only logged at
// level debug.
type natsLog struct {
	log     *slog.Logger
	rate    *rate.Limiter
	dropped *atomic.Int64 // lines dropped since the last one that was written
}

func newNATSLog(log *slog.Logger) natsLog {
	return natsLog{log, rate.NewLimiter(rate.Every(time.Second), natsLogBurst), &atomic.Int64{}}
}

// write writes a line, unless there were too many.
func (l natsLog) write(level slog.Level, text string) {
	if !l.rate.Allow() {
		l.dropped.Add(1)
		return
	}
	var more []any
	if n := l.dropped.Swap(0); n > 0 {
		more = []any{"lines_left_out", n}
	}
	l.log.Log(context.Background(), level, "nats: "+text, more...)
}

func (l natsLog) Noticef(format string, v ...any) { l.log.Debug("nats: " + fmt.Sprintf(format, v...)) }
func (l natsLog) Warnf(format string, v ...any) {
	text := fmt.Sprintf(format, v...)
	if strings.Contains(text, "Plaintext passwords") || strings.Contains(text, "not protected by TLS") {
		return // about the token of a port that the operator opened
	}
	l.write(slog.LevelWarn, text)
}
func (l natsLog) Fatalf(format string, v ...any) { l.log.Error("nats: " + fmt.Sprintf(format, v...)) }
func (l natsLog) Errorf(format string, v ...any) { l.write(slog.LevelError, fmt.Sprintf(format, v...)) }
func (l natsLog) Debugf(string, ...any)          {}
func (l natsLog) Tracef(string, ...any)          {}

func (b *bus) metrics(r *counters.Registry) {
	counters.Value(r.Counter("nats_errors_total", "Asynchronous errors of the NATS connection, such as messages lost to a full queue."), b.lost.Load)
	counters.Bool(r.Gauge("nats_connected", "Whether NATS is connected."), b.up.Load)
}
