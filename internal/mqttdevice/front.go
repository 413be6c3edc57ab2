// Package mqttdevice is the MQTT front end. The firmware keeps one MQTT
// connection for as long as it runs, publishes everything to one topic, never
// subscribes, and takes any PUBLISH that arrives (mqtt_protocol.cc:97-178): an
// ordinary broker can hear it and not answer. So devices end here, at a
// listener that speaks the server's half of MQTT 3.1 and 3.1.1 as far as they
// need it; or at a broker that subscribes on their behalf (broker.go).
//
// A session begins at CONNECT, not at a hello: MCP works at once, and a hello
// opens audio alone. Credentials are checked from memory before CONNACK. Each
// connection has one goroutine, its reader, and no timer: one sweeper serves
// all of them.
package mqttdevice

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync/atomic"
	"time"

	"github.com/eclipse/paho.mqtt.golang/packets"

	"fleetd/internal/counters"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/fleet"
	"fleetd/internal/lobby"
	"fleetd/internal/udpaudio"
)

// Limits of the front end.
const (
	AcceptRate     = 10_000 // connections per second
	AcceptBurst    = 4_000
	MaxWaiting     = 4_096           // connections waiting for their turn; more get CONNACK 3
	AcceptWait     = 8 * time.Second // longest wait: the device gives up after 10 s
	MaxUnknown     = 16_384          // connections not let in yet; those without a CONNECT give way to more
	ConnectTimeout = 5 * time.Second
	ConnectLimit   = 1 << 10   // bytes of CONNECT
	PacketLimit    = 256 << 10 // bytes of any other packet
	PacketTimeout  = 30 * time.Second
	QueueLimit     = 64 << 10 // bytes waiting to be written
	WriteTimeout   = 5 * time.Second
	MaxBad         = 100 // unusable messages on one connection
	MaxHellos      = 5   // of one device in a second
	sweepEvery     = time.Second
	large          = 1000                   // connections, of which a look at all takes milliseconds
	largeEvery     = 5                      // sweeps; so many only then
	acceptPause    = 100 * time.Millisecond // after a failed accept, such as one without a free descriptor
	acceptWarning  = 10 * time.Second       // between two warnings of that
)

// Options of a Front or Broker.
type Options struct {
	Service *fleet.Service
	Mint    *credential.Mint
	// Gateway verifies the three-part client ids of xiaozhi-mqtt-gateway; nil
	// refuses them.
	Gateway *credential.Gateway
	// Open lets every device in without credentials (--device-auth none).
	Open bool
	// Failures slows down who tries passwords at the listener; nil does not.
	Failures *lobby.Failures
	// Floods ends connections that send without end; nil does not.
	Floods *lobby.Floods
	UDP    *udpaudio.Table
	// Server and Port are what devices are told to send audio to.
	Server string
	Port   uint16
	Log    *slog.Logger
}

// Stats counts what the front end does.
type Stats struct {
	Connacks      counters.Map[string] // by code; no_connect where none was sent
	ForeignTopics atomic.Uint64        // messages for another device's topic, dropped
	HelloDrops    atomic.Uint64        // hellos that came too fast
	Unpublished   atomic.Uint64        // messages that the broker did not take
}

// Front is the listener's side of one node. Serve it, and Close it after the
// listeners.
type Front struct {
	opt         Options
	voice       *voice
	room        *lobby.Room
	unknown     atomic.Int32
	silent      lobby.Silent // of them: those whose CONNECT has not come
	maxUnknown  int32
	stats       Stats
	connectTime counters.Histogram

	conns lobby.List[*conn]
	ctx   context.Context
	stop  context.CancelFunc
}

// New returns a running front end.
func New(opt Options) *Front {
	f := &Front{opt: opt, maxUnknown: MaxUnknown, room: lobby.NewRoom(lobby.Limits{Rate: AcceptRate, Burst: AcceptBurst, Waiting: MaxWaiting, Patience: AcceptWait})}
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

// ConnectTime is the time from accept to CONNACK.
func (f *Front) ConnectTime() *counters.Histogram { return &f.connectTime }

// Serve accepts connections until l is closed. Any number of listeners may be
// served.
func (f *Front) Serve(l net.Listener) {
	var warned time.Time
	for {
		c, err := l.Accept()
		switch {
		case err == nil:
			f.accept(c)
		case errors.Is(err, net.ErrClosed):
			return
		default: // out of descriptors, or the peer was gone already
			f.count("not_accepted")
			if said := time.Now(); said.Sub(warned) > acceptWarning {
				warned = said
				f.opt.Log.Warn("MQTT connections cannot be accepted; if files are short, raise the limit with ulimit -n or LimitNOFILE", "error", err)
			}
			select {
			case <-f.ctx.Done():
				return
			case <-time.After(acceptPause):
			}
		}
	}
}

func (f *Front) accept(peer net.Conn) {
	c := &conn{front: f, net: peer}
	if f.unknown.Add(1) > f.maxUnknown && !f.silent.GiveWay() || !f.conns.Add(c) {
		f.unknown.Add(-1)
		_ = peer.Close() // nobody was told anything yet
		f.count("no_connect")
		return
	}
	go c.run() // owned by f.conns since Add
}

func (f *Front) count(code string) { f.stats.Connacks.Add(code, 1) }

// Close refuses new connections and waits for every reader to end. Sessions
// are closed by the fleet.Service; connections without one end here.
func (f *Front) Close() {
	f.conns.Close()
	for _, c := range f.conns.Append(nil, func(c *conn) bool { return c.session.Load() == nil }) {
		_ = c.net.Close() // its reader ends
	}
	f.stop()
	f.conns.Wait()
}

// sweep ends writes that take too long, and connections that were silent for one and a
// half keepalives (section 3.1.2.10). Only what the device sends counts: what is sent to it
// says nothing about its life.
func (f *Front) sweep() {
	ticker := time.NewTicker(sweepEvery)
	defer ticker.Stop()
	var silent []*conn
	ticks := 0
	for {
		select {
		case <-f.ctx.Done():
			return
		case now := <-ticker.C:
			if ticks++; ticks%largeEvery != 0 && f.conns.Len() > large {
				continue
			}
			silent = f.conns.Append(silent[:0], func(c *conn) bool {
				if begun := c.writing.Load(); begun != 0 && now.UnixNano()-begun > int64(WriteTimeout) {
					_ = c.net.SetWriteDeadline(now) // an error shows at the write
				}
				return c.session.Load() != nil && c.keep > 0 && now.UnixNano()-c.heard.Load() > int64(c.keep)
			})
			for _, c := range silent {
				f.conns.Go(func() { c.session.Load().Close(devices.CloseDead) })
			}
			clear(silent)
		}
	}
}

// Connected is the number of connections, and how many of them are not let in
// yet.
func (f *Front) Connected() (all, waiting int) {
	return f.conns.Len(), int(f.unknown.Load())
}

// levels are the protocol names and levels that are spoken: MQTT 3.1 and 3.1.1.
var levels = map[string]byte{"MQIsdp": 3, "MQTT": 4}

// parseConnect reads CONNECT. Its name and level are looked at first: CONNECT
// of MQTT 5 has another layout after them.
func parseConnect(h header, body []byte) (*packets.ConnectPacket, error) {
	name, level, err := protocolOf(body)
	if err != nil {
		return nil, err
	}
	if !isSpoken(name, level) {
		return &packets.ConnectPacket{ProtocolName: name, ProtocolVersion: level}, nil
	}
	p, err := decode(h, body)
	if err != nil {
		return nil, err
	}
	return p.(*packets.ConnectPacket), nil
}

func isSpoken(name string, level byte) bool {
	want, known := levels[name]
	return known && want == level
}

func protocolOf(body []byte) (name string, level byte, err error) {
	if len(body) < 2 || len(body) < 3+int(body[1]) || body[0] != 0 {
		return "", 0, errors.New("CONNECT without a protocol name and level")
	}
	n := int(body[1])
	return string(body[2 : 2+n]), body[2+n], nil
}
