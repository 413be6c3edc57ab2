// Package wsdevice is the WebSocket front end: it accepts devices at
// `GET /xiaozhi/v1/`, and opens one fleet.Session per connection.
//
// The upgrade request contains Authorization, Device-Id, Client-Id and Protocol-Version
// (websocket_protocol.cc:97-106). Credentials are checked before the upgrade, from
// memory. The handler starts the connection's only goroutine, its reader, and returns, so
// that net/http frees its buffers. An idle connection has no writer goroutine, no timer
// and no queue. One sweeper serves all connections.
package wsdevice

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gorilla/websocket"

	"fleetd/internal/clock"
	"fleetd/internal/connlimit"
	"fleetd/internal/counters"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/envelope"
	"fleetd/internal/fleet"
)

// Limits of the front end.
const (
	AcceptRate    = 10_000 // connections per second
	AcceptBurst   = 4_000
	MaxWaiting    = 4_096           // connections in the admission queue; more get 503
	AcceptWait    = 8 * time.Second // longest wait: a device gives up after 10 s and may not reconnect
	HelloTimeout  = 5 * time.Second
	HelloLimit    = 16 << 10  // bytes of the first message
	MessageLimit  = 256 << 10 // bytes of any other message; the firmware sends at most 65,535
	QueueLimit    = 64 << 10  // bytes waiting to be written
	WriteTimeout  = 5 * time.Second
	PingEvery     = 30 * time.Second
	MaxUnanswered = 2                // pings
	KeepAfter     = 50 * time.Second // the device disconnects after 120 s without a message (protocol.cc:100-109)
	IdleAfter     = 110 * time.Second
	MaxBad        = 100 // unusable messages on one connection
	sweepEvery    = 5 * time.Second
	sweepSteps    = 50 // number of steps in which one sweep is done, over half of the interval
)

// Options of a Front.
type Options struct {
	Service *fleet.Service
	Mint    *credential.Mint
	// Open admits every device without credentials (--device-auth none).
	Open bool
	// Failures slows down clients that try tokens; may be nil.
	Failures *connlimit.Failures
	// Floods closes connections that send without end; may be nil.
	Floods *connlimit.Floods
	// CloseIdle closes a connection on which nothing was sent for IdleAfter, unless the
	// device sends messages. Without it, a `noop` message after KeepAfter keeps the
	// connection usable.
	CloseIdle bool
	Log       *slog.Logger
}

// Front is the WebSocket front end of one node: an http.Handler for the device
// path. Close it after its listener.
type Front struct {
	opt       Options
	upgrader  websocket.Upgrader
	admission *connlimit.AdmissionQueue
	conns     connlimit.List[*conn]
	ctx       context.Context
	stop      context.CancelFunc

	// Refused counts refusals before the upgrade, by status.
	Refused counters.Map[int]
}

// New returns a running front end.
func New(opt Options) *Front {
	f := &Front{opt: opt, admission: connlimit.NewAdmissionQueue(connlimit.QueueLimits{Rate: AcceptRate, Burst: AcceptBurst, Waiting: MaxWaiting, MaxWait: AcceptWait})}
	f.upgrader = websocket.Upgrader{
		WriteBufferSize:  1024, // of reading it takes conn.in
		WriteBufferPool:  &sync.Pool{},
		HandshakeTimeout: HelloTimeout,
	}
	f.ctx, f.stop = context.WithCancel(context.Background())
	f.conns.Go(f.sweep)
	return f
}

// Close refuses new connections and waits until every reader has ended. The
// fleet.Service closes the sessions.
func (f *Front) Close() {
	f.conns.Close()
	f.stop()
	f.conns.Wait()
}

// ServeHTTP upgrades the request of a device, or refuses it with a status and an error
// text: 400 invalid id or not a WebSocket request, 401 invalid credentials, 429 too many
// wrong ones from this address or blocked for flooding, 503 too many connections or
// stopping.
func (f *Front) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	begun := time.Now()
	who, status, err := f.identify(r)
	if err == nil {
		if who.Verified { // while it waits for admission it must not use the share of its address
			connlimit.MarkRequestAuthenticated(r.Context())
		}
		if wait := f.opt.Floods.Blocked(string(who.Device), begun); wait > 0 {
			status, err = http.StatusTooManyRequests, errBlocked
			w.Header().Set("Retry-After", strconv.Itoa(int(wait/time.Second)+1))
		} else {
			status, err = http.StatusServiceUnavailable, f.admission.Enter(r.Context())
		}
	}
	if status == http.StatusUnauthorized && r.Header.Get("Authorization") != "" && f.opt.Failures.FailedRequest(r) {
		status, err = http.StatusTooManyRequests, errors.New("too many wrong tokens from this address; try again later")
		w.Header().Set("Retry-After", "10")
	}
	if err != nil {
		f.Refused.Add(status, 1)
		f.opt.Service.NoteStep(devices.Step{Kind: devices.StepRefused, Device: who.Device, Cause: f.refusalCause(r, who, status, err), Proven: who.Verified, Remote: fleet.RemoteOf(r.RemoteAddr), Transport: devices.TransportWebSocket})
		f.opt.Log.Debug("device refused", "remote", r.RemoteAddr, "device", r.Header.Get("Device-Id"), "status", status, "error", err)
		if status == http.StatusUnauthorized {
			w.Header().Set("WWW-Authenticate", "Bearer")
		}
		http.Error(w, err.Error(), status)
		return
	}
	version, _ := strconv.Atoi(r.Header.Get("Protocol-Version")) // absent or invalid counts as 1
	c := &conn{front: f, framing: envelope.FramingOf(version), in: bufio.NewReaderSize(nil, readSize)}
	ws, err := f.upgrader.Upgrade(keepingWriter{w, c}, r, nil)
	if err != nil {
		f.Refused.Add(http.StatusBadRequest, 1) // gorilla has responded
		return
	}
	c.ws = ws
	c.in.Reset((*input)(c))
	ws.SetPingHandler(c.ping)
	if !f.conns.Add(c) {
		_ = ws.Close()
		return
	}
	go c.run(who, begun) // f.conns waits for it
}

// refusalCause returns the cause of a refusal with this status.
func (f *Front) refusalCause(r *http.Request, who devices.Identity, status int, err error) devices.StepCause {
	switch {
	case errors.Is(err, errBlocked):
		return devices.StepCause(devices.CloseFlooding)
	case status == http.StatusUnauthorized:
		return f.opt.Service.LoginCause(who.Device, f.proves(r, who))
	case status == http.StatusTooManyRequests:
		return devices.CauseRateLimited
	case status == http.StatusServiceUnavailable:
		return devices.StepCause(devices.CloseCrowded)
	}
	return devices.CauseBadRequest
}

// proves returns whether the request's token is that of a generation. The firmware sends
// it as `Bearer <token>`, or unchanged if it contains a space
// (websocket_protocol.cc:97-101).
func (f *Front) proves(r *http.Request, who devices.Identity) func(generation int64) bool {
	token := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
	return func(g int64) bool { return f.opt.Mint.IsDevice(token, string(who.Device), who.ClientID, g) }
}

// identify checks the request's headers.
func (f *Front) identify(r *http.Request) (devices.Identity, int, error) {
	id, err := devices.ParseID(r.Header.Get("Device-Id"))
	if err != nil {
		return devices.Identity{}, http.StatusBadRequest, fmt.Errorf("header Device-Id: %w", err)
	}
	who := devices.Identity{Device: id, ClientID: r.Header.Get("Client-Id"), Transport: devices.TransportWebSocket, Remote: r.RemoteAddr}
	if len(who.ClientID) > 128 {
		return who, http.StatusBadRequest, errors.New("header Client-Id is longer than 128 bytes")
	}
	if f.opt.Open {
		return who, 0, nil
	}
	generation, proven, admitted := f.opt.Service.Authenticate(id, who.ClientID, f.proves(r, who))
	if !proven || !admitted {
		return who, http.StatusUnauthorized, errors.New("invalid credentials; restart the device so that it requests new ones from the OTA URL")
	}
	who.Verified, who.OfClient, who.Generation = true, true, generation
	return who, 0, nil
}

// sweep pings, keeps alive or closes connections when it is due. Blocking operations run
// in goroutines of their own, so that one blocked socket delays no other.
func (f *Front) sweep() {
	var batch []*conn
	for range clock.Ticks(f.ctx, sweepEvery) {
		batch = f.conns.Append(batch[:0], func(*conn) bool { return true })
		f.sweepAll(batch)
		clear(batch)
	}
}

// sweepAll sweeps the connections in small steps: thousands of pings at once, and their
// pongs, would delay other work by tens of milliseconds.
func (f *Front) sweepAll(batch []*conn) {
	for rest := sweepSteps; len(batch) > 0; rest-- {
		step := batch[:(len(batch)+rest-1)/rest]
		batch = batch[len(step):]
		now := time.Now()
		for _, c := range step {
			c.sweep(now)
		}
		if len(batch) == 0 {
			return
		}
		if !clock.Sleep(f.ctx, sweepEvery/(2*sweepSteps)) {
			return
		}
	}
}
