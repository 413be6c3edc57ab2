// Package mqttdevice is the MQTT front end. The firmware keeps one MQTT connection as
// long as it runs, publishes everything to one topic, never subscribes, and accepts
// any PUBLISH (mqtt_protocol.cc:97-178). An ordinary broker can receive its messages,
// but not answer. Devices therefore connect to a listener that implements the server's
// side of MQTT 3.1 and 3.1.1 as far as they need it, or to a broker that subscribes on
// their behalf (broker.go).
//
// A session begins at CONNECT, not at a hello: MCP works at once, and a hello only
// opens audio. Credentials are checked from memory before CONNACK. Each connection has
// one goroutine, its reader, and no timer; one sweeper serves all of them.
package mqttdevice

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync/atomic"
	"time"

	"github.com/eclipse/paho.mqtt.golang/packets"

	"fleetd/internal/clock"
	"fleetd/internal/connlimit"
	"fleetd/internal/counters"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/fleet"
	"fleetd/internal/udpaudio"
)

// Limits of the front end.
const (
	AcceptRate     = 10_000 // connections per second
	AcceptBurst    = 4_000
	MaxWaiting     = 4_096           // connections in the admission queue; more get CONNACK 3
	AcceptWait     = 8 * time.Second // longest wait: the device gives up after 10 s
	MaxUnknown     = 16_384          // connections that are not admitted yet; above it the oldest without a CONNECT are closed
	ConnectTimeout = 5 * time.Second
	ConnectLimit   = 1 << 10   // bytes of CONNECT
	PacketLimit    = 256 << 10 // bytes of any other packet
	PacketTimeout  = 30 * time.Second
	QueueLimit     = 64 << 10 // bytes waiting to be written
	WriteTimeout   = 5 * time.Second
	MaxBad         = 100 // unusable messages on one connection
	MaxHellos      = 5   // of one device in a second
	sweepEvery     = time.Second
	largeCount     = 1000                   // number of connections for which one sweep takes milliseconds
	largeEvery     = 5                      // with more connections, only each fifth tick sweeps
	acceptPause    = 100 * time.Millisecond // after a failed accept, for example without a free descriptor
	acceptWarning  = 10 * time.Second       // between two log lines about it
)

// Options of a Front or Broker.
type Options struct {
	Service *fleet.Service
	Mint    *credential.Mint
	// Gateway verifies the three-part client ids of xiaozhi-mqtt-gateway; nil refuses
	// them.
	Gateway *credential.Gateway
	// Open admits every device without credentials (--device-auth none).
	Open bool
	// Failures slows down clients that try passwords at the listener; may be nil.
	Failures *connlimit.Failures
	// Floods closes connections that send without end; may be nil.
	Floods *connlimit.Floods
	UDP    *udpaudio.Table
	// Server and Port are the address to which devices send audio.
	Server string
	Port   uint16
	Log    *slog.Logger
}

// Stats counts what the front end does.
type Stats struct {
	Connacks      counters.Map[string] // by code; no_connect if none was sent
	ForeignTopics atomic.Uint64        // messages for another device's topic, dropped
	HelloDrops    atomic.Uint64        // hellos above the rate
	Unpublished   atomic.Uint64        // messages that the broker did not accept
}

// Front is the MQTT listener side of one node. Call Serve for each listener, and Close
// after closing them.
type Front struct {
	opt         Options
	voice       *voice
	admission   *connlimit.AdmissionQueue
	unknown     atomic.Int32
	silent      connlimit.SilentConns // connections without a CONNECT
	maxUnknown  int32
	stats       Stats
	connectTime counters.Histogram

	conns connlimit.List[*conn]
	ctx   context.Context
	stop  context.CancelFunc
}

// New returns a running front end.
func New(opt Options) *Front {
	f := &Front{opt: opt, maxUnknown: MaxUnknown, admission: connlimit.NewAdmissionQueue(connlimit.QueueLimits{Rate: AcceptRate, Burst: AcceptBurst, Waiting: MaxWaiting, MaxWait: AcceptWait})}
	f.voice = opt.voice(&f.stats)
	f.ctx, f.stop = context.WithCancel(context.Background())
	f.conns.Go(f.sweep)
	return f
}

func (o Options) voice(stats *Stats) *voice {
	return &voice{udp: o.UDP, server: o.Server, port: o.Port, stats: stats, service: o.Service, log: o.Log}
}

// Stats returns the counters.
func (f *Front) Stats() *Stats { return &f.stats }

// Serve accepts connections until l is closed. It may be called for several listeners.
func (f *Front) Serve(l net.Listener) {
	var warned time.Time
	for {
		c, err := l.Accept()
		switch {
		case err == nil:
			f.accept(c)
		case errors.Is(err, net.ErrClosed):
			return
		default: // no free descriptor, or the peer has already disconnected
			f.count("not_accepted")
			if now := time.Now(); now.Sub(warned) > acceptWarning {
				warned = now
				f.opt.Log.Warn("cannot accept MQTT connections; if the open-file limit is reached, raise it with ulimit -n or LimitNOFILE", "error", err)
			}
			if !clock.Sleep(f.ctx, acceptPause) {
				return
			}
		}
	}
}

func (f *Front) accept(peer net.Conn) {
	c := &conn{front: f, net: peer}
	if f.unknown.Add(1) > f.maxUnknown && !f.silent.CloseOldest() || !f.conns.Add(c) {
		f.unknown.Add(-1)
		_ = peer.Close() // closed without a response
		f.count("no_connect")
		return
	}
	// Added here: if its goroutine added it, a burst of connections would find few to close, not those of the address with the most.
	silent := new(connlimit.SilentEntry)
	f.silent.Add(peer, silent)
	go c.run(silent) // f.conns waits for it
}

func (f *Front) count(code string) { f.stats.Connacks.Add(code, 1) }

// Close refuses new connections and waits until every reader has ended. The
// fleet.Service closes sessions; Close closes connections without one.
func (f *Front) Close() {
	f.conns.Close()
	for _, c := range f.conns.Append(nil, func(c *conn) bool { return c.session.Load() == nil }) {
		_ = c.net.Close() // its reader then ends
	}
	f.stop()
	f.conns.Wait()
}

// sweep ends writes that take too long, and connections that were silent for one and a
// half keepalives (section 3.1.2.10). Only bytes from the device count; bytes sent to it
// do not show that it is connected.
func (f *Front) sweep() {
	var silent []*conn
	ticks := 0
	for now := range clock.Ticks(f.ctx, sweepEvery) {
		if ticks++; ticks%largeEvery != 0 && f.conns.Len() > largeCount {
			continue
		}
		silent = f.conns.Append(silent[:0], func(c *conn) bool {
			if begun := c.writing.Load(); begun != 0 && clock.Reading(now)-begun > int64(WriteTimeout) {
				_ = c.net.SetWriteDeadline(now) // an error shows in the write
			}
			return c.session.Load() != nil && c.keep > 0 && clock.Reading(now)-c.lastReceived.Load() > int64(c.keep)
		})
		for _, c := range silent {
			f.conns.Go(func() { c.session.Load().Close(devices.CloseDead) })
		}
		clear(silent)
	}
}

// Connected returns the number of connections, and how many of them are not admitted
// yet.
func (f *Front) Connected() (all, waiting int) {
	return f.conns.Len(), int(f.unknown.Load())
}

// levels are the supported protocol names and levels: MQTT 3.1 and 3.1.1.
var levels = map[string]byte{"MQIsdp": 3, "MQTT": 4}

// parseConnect reads CONNECT. It checks the name and level first, since CONNECT of MQTT 5
// has another layout after them.
func parseConnect(h header, body []byte) (*packets.ConnectPacket, error) {
	name, level, err := protocolOf(body)
	if err != nil {
		return nil, err
	}
	if !isSupported(name, level) {
		return &packets.ConnectPacket{ProtocolName: name, ProtocolVersion: level}, nil
	}
	p, err := decode(h, body)
	if err != nil {
		return nil, err
	}
	return p.(*packets.ConnectPacket), nil
}

func isSupported(name string, level byte) bool {
	want, known := levels[name]
	return known && want == level
}

func protocolOf(body []byte) (name string, level byte, err error) {
	if len(body) < 2 || len(body) < 3+int(body[1]) || body[0] != 0 {
		return "", 0, errors.New("CONNECT has no protocol name and level")
	}
	n := int(body[1])
	return string(body[2 : 2+n]), body[2+n], nil
}
