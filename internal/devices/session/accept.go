package session

import (
	"context"
	crand "crypto/rand"
	"encoding/base32"
	"errors"
	"net/netip"
	"strconv"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
)

// Sessions calls f for every session on this node.
func (s *Hub) Sessions(f func(*Session)) {
	s.table.each(func(e *entry) {
		if session := e.session.Load(); session != nil {
			f(session)
		}
	})
}

var (
	ErrDraining    = devices.Errorf(devices.CodeUnavailable, "this node is stopping; connect again")
	errCredentials = devices.Errorf(devices.CodeUnauthorized, "the device's credentials were revoked; the device needs new ones from an OTA check")
	errReconnects  = devices.Errorf(devices.CodeDeviceBusy, "the device reconnects too often; at most one connection per second is accepted")
	errSuperseded  = devices.Errorf(devices.CodeSuperseded, "the device connected again while this connection was being accepted")
)

// Accept makes the connection the device's session: the newest wins, the old one is
// closed. It answers from memory, without database or network. Only an unknown device
// with valid credentials, or one that the front end accepts without, waits for the
// database to make it a member, at most registry.JoinLimit. After an error the caller
// closes the connection.
func (s *Hub) Accept(who devices.Identity, conn Conn) (*Session, error) {
	s.accepting.RLock()
	defer s.accepting.RUnlock()
	if s.closed || s.draining {
		return nil, ErrDraining
	}
	now := time.Now()
	if err := s.authorize(who); err != nil {
		return nil, err
	}
	remote := who.Remote
	x := &Session{svc: s, conn: conn, id: newSessionID(), connected: now}
	if addr, err := netip.ParseAddrPort(remote); err == nil {
		x.remote = addr.Addr().Unmap()
	}
	// before the session becomes visible: Close calls Release
	if err := s.ports.Directory.Hold(who.Device); err != nil {
		s.log.Warn("cannot subscribe to commands of a device; calls through other nodes fail until NATS reconnects", "device", who.Device, "error", err)
	}
	old, err := s.install(x, who)
	if err != nil {
		s.ports.Directory.Release(who.Device)
		if errors.Is(err, errContested) {
			s.publishContested(x.entry, who.ClientID, remote, now)
		}
		return nil, err
	}
	if old != nil {
		old.Close(devices.CloseSuperseded)
	}
	if s.outdated(x) { // revoked during install, before the session was visible
		x.Close(devices.CloseRevoked)
		return nil, errCredentials
	}
	if !x.entry.isKnown() {
		s.registry.RequestRow(who.Device)
	}
	x.adopt()
	if !x.announce() {
		return nil, errSuperseded
	}
	x.claim(devices.ClaimConnect)
	s.stats.Connects.Add(who.Transport, 1)
	s.observers.Each(func(l Lifecycle) { l.Connected(who.Device, x.id) })
	s.log.Info("device connected", "device", who.Device, "session", x.id, "epoch", x.Epoch(), "transport", who.Transport, "remote", remote)
	return x, nil
}

// authorize returns an error if a connection may not become a session. Credentials of
// an earlier generation are valid until the device has connected with newer ones, possibly
// to another node: for those it queries the database, if that answers.
func (s *Hub) authorize(who devices.Identity) error {
	if err := s.registry.CheckReady(); err != nil {
		return err
	}
	if who.Verified && !s.Accepts(who.Device, who.Generation) || s.registry.Refused(who.Device).Has(who.ClientID) {
		return errCredentials
	}
	status := s.registry.Status(who.Device, who.ClientID)
	current, _ := s.Generation(who.Device)
	switch {
	case !status.Known && who.Verified && s.cfg.Approve:
		return errCredentials // forgotten or expired, and new devices need approval
	case !status.Known:
		return s.registry.Join(s.tasks.Context(), who.Device, who.ClientID, who.Transport)
	case who.Verified && who.Generation < current:
		ctx, cancel := context.WithTimeout(s.tasks.Context(), LookupTimeout)
		defer cancel()
		if row, err := s.ports.Records.Find(ctx, who.Device); err == nil {
			own := s.registry.Generations(who.Device)
			if own.Confirmed = row.Presence.Generation; !own.Accepts(who.Generation, s.registry.Rotation(), clock.Now()) {
				return errCredentials
			}
		}
	}
	return nil
}

var errContested = devices.Errorf(devices.CodeForbidden, "the device id is contested: another client is connected with it")

// install puts the session into the hub and returns the session it replaces.
func (s *Hub) install(x *Session, who devices.Identity) (old *Session, err error) {
	for {
		e, _ := s.table.ensure(who.Device, who.ClientID)
		e.mu.Lock()
		if !e.removed {
			defer e.mu.Unlock()
			return s.installLocked(e, x, who)
		}
		e.mu.Unlock() // the entry was removed a moment ago
	}
}

func (s *Hub) installLocked(e *entry, x *Session, who devices.Identity) (old *Session, err error) {
	x.entry, x.clientID, x.transport, x.verified, x.ofClient, x.generation = e, who.ClientID, who.Transport, who.Verified, who.OfClient, who.Generation
	if known := e.stored.Load().client; known == who.ClientID {
		x.clientID = known // no second copy
	}
	x.init()
	if !e.reconnectBucket.Allow(x.connected, 1, s.cfg.Reconnects) {
		return nil, errReconnects
	}
	old = e.session.Load()
	if old != nil && old.clientID != x.clientID {
		if e.takeovers == nil {
			e.takeovers = &devices.Takeovers{}
		}
		if e.takeovers.Record(x.connected) {
			return nil, errContested
		}
	}
	x.epoch = max(devices.Epoch(clock.Now().UnixMicro()), e.lastEpoch+1)
	e.lastEpoch = x.epoch
	x.startCatalog(e, s.catalogs)
	if x.verified {
		e.confirmed = max(e.confirmed, x.generation)
	}
	e.idleSince = 0
	e.session.Store(x)
	return old, nil
}

// announce publishes the session, unless it was closed meanwhile. The lock keeps
// `online` before the `offline` of a concurrent Close.
func (x *Session) announce() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.closed != "" {
		return false
	}
	x.announced = true
	x.svc.stats.States.Add(State{x.transport, x.mcp}, 1)
	x.svc.ports.Records.SavePresence(x.presenceLocked(true))
	x.publishOnlineLocked()
	return true
}

func (x *Session) publishOnlineLocked() {
	fields := jsonspan.AppendString([]byte(`"transport":`), string(x.transport))
	x.publishLocked(devices.EventOnline, "", jsonspan.AppendString(append(fields, `,"client":`...), x.svc.registry.Client(x.clientID)), true)
}

func (s *Hub) publishContested(e *entry, clientID, remote string, now time.Time) {
	client := s.registry.Client(clientID)
	s.log.Warn("device id is contested", "device", e.id, "client", client, "remote", remote)
	s.stats.Contested.Add(devices.DisputeTakeovers, 1)
	fields := jsonspan.AppendString([]byte(`"client":`), client)
	fields = jsonspan.AppendString(append(fields, `,"reason":`...), string(devices.DisputeTakeovers))
	s.ports.Publisher.Publish(devices.Event{Kind: devices.EventContested, Device: e.id, Time: now, Fields: fields,
		MsgID: e.id.Token() + "-contested-" + strconv.FormatInt(now.Unix()/int64(devices.ContestedPause/time.Second), 10)})
}

// newSessionID returns 16 characters of [a-z2-7]: the device echoes the id without
// escaping it.
func newSessionID() string {
	var b [10]byte
	crand.Read(b[:]) // never fails (crypto/rand)
	return sessionEncoding.EncodeToString(b[:])
}

var sessionEncoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

func offlineID(id devices.ID, epoch devices.Epoch) string {
	return id.Token() + "-" + strconv.FormatInt(int64(epoch), 10) + "-offline"
}
