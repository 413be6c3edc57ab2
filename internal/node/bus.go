package node

import (
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

	"fleetd/internal/access"
	"fleetd/internal/config"
	"fleetd/internal/credential"
	"fleetd/internal/timescale"
)

// bus is the node's NATS: a server in this process or a connection elsewhere.
type bus struct {
	embedded *embedded   // nil if external
	logins   *natsLogins // nil unless the embedded server asks for a login
	conn     *nats.Conn
	url      string // for other programs; empty if in process only
	lost     atomic.Uint64
	// up says that the connection stands. The library's own answer waits for a
	// lock that it holds while it tries to reconnect, 3 s at a time.
	up   atomic.Bool
	back chan struct{} // capacity 1: the connection stands again
}

// connected takes note that the connection stands. Its first time is not news.
// The library runs its callbacks one after the other, so no more is done here.
func (b *bus) connected() {
	if b.up.Swap(true) {
		return
	}
	select {
	case b.back <- struct{}{}:
	default: // one wake-up is enough
	}
}

const natsStart = 10 * time.Second

// maxStore is what the embedded server may reserve on disk: no bound of its own.
const maxStore = 1 << 50

// syncEvery is what a power cut may cost of events and photos. Syncing each would
// cost a fleet that returns most of its events: they come by thousands a second.
const syncEvery = 10 * time.Second

// pingEvery is how often both ends of a NATS connection ask each other for a
// sign of life. Two that are missing end it: a vanished machine is noticed
// within three of them.
var pingEvery = timescale.Of(2 * time.Second)

// openBus starts the embedded server, or connects. A wrong URL or login is an
// error; a server that is merely away is not: the connection keeps trying.
func openBus(cfg *config.Config, dir *dataDir, mint *credential.Mint, log *slog.Logger) (*bus, error) {
	b := &bus{back: make(chan struct{}, 1)}
	options := []nats.Option{
		nats.Name("fleetd " + cfg.Node),
		nats.NoEcho(), // what a node says is for others
		nats.MaxReconnects(-1),
		nats.ReconnectWait(500 * time.Millisecond),
		nats.IgnoreAuthErrorAbort(), // a login that fails for a while must not end the connection for good
		nats.ReconnectBufSize(-1),   // fail visibly instead of buffering 8 MB
		nats.PingInterval(pingEvery),
		nats.MaxPingsOutstanding(2),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			b.lost.Add(1)
			log.Warn("NATS", "error", err)
		}),
		nats.FlusherTimeout(pingEvery), // a write that is stuck holds everybody else up
		nats.ConnectHandler(func(*nats.Conn) { b.connected() }),
		nats.ReconnectHandler(func(*nats.Conn) { b.connected() }),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			b.up.Store(false)
			if err != nil { // not our own Close
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

// embed starts the server. Other programs attach only if --nats-listen is
// given: freely on loopback, elsewhere as natsLogins decides.
func (b *bus) embed(cfg *config.Config, dir *dataDir, mint *credential.Mint, log *slog.Logger) error {
	opts := &server.Options{
		ServerName: "fleetd-" + cfg.Node,
		DontListen: cfg.NATSListen == "",
		JetStream:  true,
		StoreDir:   dir.file(dirNATS),
		// The streams have limits of their own. They reserve them, those of an
		// earlier start included: with less the server would not read its own files
		// once a limit is lowered.
		JetStreamMaxStore: maxStore,
		NoSigs:            true,
		SyncInterval:      syncEvery,
		// Every device that comes or goes would otherwise make the server search
		// its cache of subjects for what the device's wildcard changes.
		NoSublistCache: true,
		// Other nodes may attach: one that is frozen is noticed within 6 s.
		PingInterval: pingEvery,
		MaxPingsOut:  2,
	}
	if cfg.NATSListen != "" {
		host, portText, err := net.SplitHostPort(cfg.NATSListen)
		if err != nil {
			return fmt.Errorf("--nats-listen: %w", err)
		}
		opts.Host = host
		if opts.Port, err = strconv.Atoi(portText); err != nil {
			return fmt.Errorf("--nats-listen: port %q is no number", portText)
		}
		if opts.Port == 0 {
			opts.Port = server.RANDOM_PORT
		}
		if ip, err := netip.ParseAddr(host); err != nil || !ip.IsLoopback() {
			b.logins = &natsLogins{mint: mint, prefix: cfg.NATSPrefix, in: map[uint64]*access.Caller{}}
			opts.CustomClientAuthentication = b.logins
		}
	}
	b.embedded = &embedded{options: opts, log: log}
	if err := b.embedded.start(); err != nil {
		if cfg.NATSListen != "" && errors.Is(err, errNATSStart) {
			return fmt.Errorf("--nats-listen: %s cannot be opened; is the port taken?", cfg.NATSListen)
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

// natsLog passes the embedded server's warnings on; its notices are about
// itself and only shown when debugging.
type natsLog struct{ log *slog.Logger }

func (l natsLog) Noticef(format string, v ...any) { l.log.Debug("nats: " + fmt.Sprintf(format, v...)) }
func (l natsLog) Warnf(format string, v ...any) {
	text := fmt.Sprintf(format, v...)
	if strings.Contains(text, "Plaintext passwords") || strings.Contains(text, "not protected by TLS") {
		return // about the token, which protects a port the operator opened
	}
	l.log.Warn("nats: " + text)
}
func (l natsLog) Fatalf(format string, v ...any) { l.log.Error("nats: " + fmt.Sprintf(format, v...)) }
func (l natsLog) Errorf(format string, v ...any) { l.log.Error("nats: " + fmt.Sprintf(format, v...)) }
func (l natsLog) Debugf(string, ...any)          {}
func (l natsLog) Tracef(string, ...any)          {}
