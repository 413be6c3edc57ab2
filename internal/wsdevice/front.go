// Package wsdevice is the WebSocket front end: it lets devices in at
// `GET /xiaozhi/v1/`, and turns one connection into one fleet.Session.
//
// The upgrade request carries Authorization, Device-Id, Client-Id and
// Protocol-Version (websocket_protocol.cc:97-106). Credentials are checked
// before the upgrade, from memory. The handler starts the connection's one
// goroutine, its reader, and returns, so that net/http frees what it holds for
// the request; there is no parked writer, no timer and no queue per idle
// connection. One sweeper serves all of them.
package wsdevice

import (
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

	"fleetd/internal/counters"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/envelope"
	"fleetd/internal/fleet"
	"fleetd/internal/lobby"
)

// Limits of the front end.
const (
	AcceptRate    = 10_000 // connections per second
	AcceptBurst   = 4_000
	MaxWaiting    = 4_096           // connections waiting for their turn; more get 503
	AcceptWait    = 8 * time.Second // longest wait: a device gives up after 10 s and may not come back
	HelloTimeout  = 5 * time.Second
	HelloLimit    = 16 << 10  // bytes of the first message
	MessageLimit  = 256 << 10 // bytes of any other; the firmware sends at most 65,535
	QueueLimit    = 64 << 10  // bytes waiting to be written
	WriteTimeout  = 5 * time.Second
	PingEvery     = 30 * time.Second
	MaxUnanswered = 2                // pings
	KeepAfter     = 50 * time.Second // the device's own clock runs out at 120 s (protocol.cc:100-109)
	IdleAfter     = 110 * time.Second
	MaxBad        = 100 // unusable messages on one connection
	sweepEvery    = 5 * time.Second
	sweepSteps    = 50 // in which one sweep is done, over half of that time
)

// Options of a Front.
type Options struct {
	Service *fleet.Service
	Mint    *credential.Mint
	// Open lets every device in without credentials (--device-auth none).
	Open bool
	// Failures slows down who tries tokens; nil does not.
	Failures *lobby.Failures
	// Floods ends connections that send without end; nil does not.
	Floods *lobby.Floods
	// CloseIdle closes a connection on which nothing was sent for IdleAfter, unless
	// the device talks;
	// otherwise a `noop` message after KeepAfter keeps it usable.
	CloseIdle bool
	Log       *slog.Logger
}

// Front is the WebSocket front end of one node: an http.Handler for the device
// path. Close it after its listener.
type Front struct {
	opt      Options
	upgrader websocket.Upgrader
	room     *lobby.Room
	conns    lobby.List[*conn]
	ctx      context.Context
	stop     context.CancelFunc

	// Refused counts refusals before the upgrade, by status.
	Refused counters.Map[int]
}

// New returns a running front end.
func New(opt Options) *Front {
	f := &Front{opt: opt, room: lobby.NewRoom(lobby.Limits{Rate: AcceptRate, Burst: AcceptBurst, Waiting: MaxWaiting, Patience: AcceptWait})}
	f.upgrader = websocket.Upgrader{
		ReadBufferSize:   256, // every connection holds this for ever; longer messages are read past it
		WriteBufferSize:  1024,
		WriteBufferPool:  &sync.Pool{},
		HandshakeTimeout: HelloTimeout,
	}
	f.ctx, f.stop = context.WithCancel(context.Background())
	f.conns.Go(f.sweep)
	return f
}

// Close refuses new connections and waits for every reader to end. Sessions
// are closed by the fleet.Service.
func (f *Front) Close() {
	f.conns.Close()
	f.stop()
	f.conns.Wait()
}

// ServeHTTP upgrades one device's request, or refuses it with a status and one
// sentence: 400 bad id or no WebSocket request, 401 credentials, 429 too many
// wrong ones from this address, or back too soon after a flood, 503 too many at once or stopping.
func (f *Front) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	begun := time.Now()
	who, status, err := f.identify(r)
	if err == nil {
		if who.Verified { // who waits for its turn shall not take its neighbours' share
			lobby.VouchFor(r.Context())
		}
		if wait := f.opt.Floods.Barred(string(who.Device), begun); wait > 0 {
			status, err = http.StatusTooManyRequests, errFlooded
			w.Header().Set("Retry-After", strconv.Itoa(int(wait/time.Second)+1))
		} else {
			status, err = http.StatusServiceUnavailable, f.room.Enter(r.Context())
		}
	}
	if status == http.StatusUnauthorized && r.Header.Get("Authorization") != "" && f.opt.Failures.FailedRequest(r) {
		status, err = http.StatusTooManyRequests, errors.New("too many wrong tokens from this address; try again later")
		w.Header().Set("Retry-After", "10")
	}
	if err != nil {
		f.Refused.Add(status, 1)
		f.opt.Log.Debug("device refused", "remote", r.RemoteAddr, "device", r.Header.Get("Device-Id"), "status", status, "error", err)
		if status == http.StatusUnauthorized {
			w.Header().Set("WWW-Authenticate", "Bearer")
		}
		http.Error(w, err.Error(), status)
		return
	}
	version, _ := strconv.Atoi(r.Header.Get("Protocol-Version")) // absent or odd counts as 1
	c := &conn{front: f, framing: envelope.FramingOf(version)}
	ws, err := f.upgrader.Upgrade(watcher{w, c}, r, nil)
	if err != nil {
		f.Refused.Add(http.StatusBadRequest, 1) // gorilla has answered
		return
	}
	c.ws = ws
	ws.SetPingHandler(c.ping)
	if !f.conns.Add(c) {
		_ = ws.Close()
		return
	}
	go c.run(who, begun) // owned by f.conns since Add
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
	// The firmware sends the token as `Bearer <token>`, or as it is if it has a
	// space in it (websocket_protocol.cc:97-101).
	token := r.Header.Get("Authorization")
	token = strings.TrimPrefix(token, "Bearer ")
	generation, proven, admitted := f.opt.Service.Authenticate(id, func(g int64) bool { return f.opt.Mint.IsDevice(token, string(id), who.ClientID, g) })
	if !proven || !admitted {
		return who, http.StatusUnauthorized, errors.New("credentials are not valid for this device; restart it so that it asks the OTA address again")
	}
	who.Verified, who.Generation = true, generation
	return who, 0, nil
}

// sweep pings, keeps alive or closes every connection when it is due. What it
// starts runs in goroutines of its own, so that one stuck socket delays nobody.
func (f *Front) sweep() {
	ticker := time.NewTicker(sweepEvery)
	defer ticker.Stop()
	var batch []*conn
	for {
		select {
		case <-f.ctx.Done():
			return
		case <-ticker.C:
			batch = f.conns.Append(batch[:0], func(*conn) bool { return true })
			f.sweepAll(batch)
			clear(batch)
		}
	}
}

// sweepAll does what is due on every connection, a few at a time: thousands of
// pings at once, and the answers to them, would hold up everything else for
// tens of milliseconds.
func (f *Front) sweepAll(batch []*conn) {
	for rest := sweepSteps; len(batch) > 0; rest-- {
		few := batch[:(len(batch)+rest-1)/rest]
		batch = batch[len(few):]
		now := time.Now()
		for _, c := range few {
			c.sweep(now)
		}
		if len(batch) == 0 {
			return
		}
		select {
		case <-f.ctx.Done():
			return
		case <-time.After(sweepEvery / (2 * sweepSteps)):
		}
	}
}
