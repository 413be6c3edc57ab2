package session

import (
	"context"
	crand "crypto/rand"
	"encoding/base32"
	"errors"
	"net/netip"
	"strconv"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
	"fleetd/internal/timescale"
)

// Sessions calls f for every session of this node.
func (s *Hub) Sessions(f func(*Session)) {
	s.table.each(func(e *entry) {
		if session := e.session.Load(); session != nil {
			f(session)
		}
	})
}

var (
	ErrDraining  = devices.Errorf(devices.CodeUnavailable, "this node is stopping; connect again")
	errOutdated  = devices.Errorf(devices.CodeUnauthorized, "the credentials were revoked while the device connected")
	errTooOften  = devices.Errorf(devices.CodeDeviceBusy, "the device connects again and again; it may once a second")
	errOvertaken = devices.Errorf(devices.CodeSuperseded, "the device connected again while this connection was accepted")
)

// Accept makes the connection the device's session: the newest wins, the old
// one is closed. It answers from memory: no database, no network. Only an unknown
// device that presents valid credentials, or that the front end lets in without,
// waits for the database to make it a member, at most registry.JoinLimit. An error
// means that the connection must be closed.
func (s *Hub) Accept(who devices.Identity, conn Conn) (*Session, error) {
	s.accepting.RLock()
	defer s.accepting.RUnlock()
	if s.closed || s.leaving {
		return nil, ErrDraining
	}
	now := time.Now()
	if err := s.belongs(who); err != nil {
		return nil, err
	}
	remote := who.Remote
	x := &Session{svc: s, conn: conn, id: newSessionID(), connected: now}
	if addr, err := netip.ParseAddrPort(remote); err == nil {
		x.remote = addr.Addr().Unmap()
	}
	// Held before the session can be seen: whoever ends it releases.
	if err := s.ports.Directory.Hold(who.Device); err != nil {
		s.log.Warn("device cannot be announced to other nodes", "device", who.Device, "error", err)
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
	if s.outdated(x) { // revoked while it was installed, before anybody could see it
		x.Close(devices.CloseRevoked)
		return nil, errOutdated
	}
	if !x.entry.isKnown() {
		s.registry.Request(who.Device)
	}
	x.adopt()
	if !x.announce() {
		return nil, errOvertaken
	}
	x.claim(devices.ClaimConnect)
	s.stats.Connects.Add(who.Transport, 1)
	s.log.Info("device connected", "device", who.Device, "session", x.id, "epoch", x.Epoch(), "transport", who.Transport, "remote", remote)
	return x, nil
}

// belongs tells whether a connection may become a session. Credentials of an
// earlier generation are valid until the device has connected with newer ones,
// which may have been to another node: for those the database is asked, if it
// answers.
func (s *Hub) belongs(who devices.Identity) error {
	if err := s.registry.Judge(); err != nil {
		return err
	}
	if who.Verified && !s.Accepts(who.Device, who.Generation) {
		return errOutdated
	}
	is := s.registry.Standing(who.Device, who.ClientID)
	current, _ := s.Generation(who.Device)
	switch {
	case !is.Known && who.Verified && s.cfg.Approve:
		return errOutdated // forgotten, or expired, under a rule that lets in what somebody approves
	case !is.Known:
		return s.registry.Join(s.tasks.Context(), who.Device, who.ClientID, who.Transport)
	case who.Verified && who.Generation < current:
		ctx, cancel := context.WithTimeout(s.tasks.Context(), LookupTimeout)
		defer cancel()
		if row, err := s.ports.Records.Find(ctx, who.Device); err == nil {
			own := s.registry.Secrets(who.Device)
			if own.Confirmed = row.Presence.Generation; !own.Accepts(who.Generation, s.registry.Rotation(), time.Now()) {
				return errOutdated
			}
		}
	}
	return nil
}

var errContested = devices.Errorf(devices.CodeForbidden, "the device id is cloned: another client holds it")

// install puts the session in the hub and returns the one it replaces.
func (s *Hub) install(x *Session, who devices.Identity) (old *Session, err error) {
	for {
		e, _ := s.table.ensure(who.Device, who.ClientID)
		e.mu.Lock()
		if !e.removed {
			defer e.mu.Unlock()
			return s.installLocked(e, x, who)
		}
		e.mu.Unlock() // nobody needed it a moment ago
	}
}

func (s *Hub) installLocked(e *entry, x *Session, who devices.Identity) (old *Session, err error) {
	who.Remote, who.Device = "", e.id // a session keeps no second copy of what its entry has
	if known := e.device.Load().ClientID; known == who.ClientID {
		who.ClientID = known
	}
	x.entry, x.who = e, who
	x.init()
	if !e.reconnects.Take(x.connected, 1, s.cfg.Reconnects) {
		return nil, errTooOften
	}
	old = e.session.Load()
	if old != nil && old.who.ClientID != x.who.ClientID && e.takeovers.Contested(x.connected) {
		return nil, errContested
	}
	x.epoch = max(devices.Epoch(timescale.Now().UnixMicro()), e.lastEpoch+1)
	e.lastEpoch = x.epoch
	x.startCatalog(e, s.catalogs)
	if x.who.Verified {
		e.confirmed = max(e.confirmed, x.who.Generation)
	}
	e.idleSince = 0
	e.session.Store(x)
	return old, nil
}

// announce makes the session known outside, unless it was closed meanwhile.
// Holding the lock keeps `online` in front of the `offline` of whoever closes.
func (x *Session) announce() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.closed != "" {
		return false
	}
	x.announced = true
	x.svc.stats.States.Add(State{x.who.Transport, x.mcp}, 1)
	x.svc.ports.Records.SavePresence(x.presenceLocked(true))
	x.publishOnlineLocked()
	return true
}

func (x *Session) publishOnlineLocked() {
	fields := jsonspan.AppendString([]byte(`"transport":`), string(x.who.Transport))
	x.publishLocked(devices.EventOnline, "", jsonspan.AppendString(append(fields, `,"client_id":`...), x.who.ClientID), true)
}

func (s *Hub) publishContested(e *entry, clientID, remote string, now time.Time) {
	s.log.Warn("device id is contested", "device", e.id, "client", clientID, "remote", remote)
	s.stats.Contested.Add(devices.DisputeFight, 1)
	fields := jsonspan.AppendString([]byte(`"client_id":`), clientID)
	fields = jsonspan.AppendString(append(fields, `,"reason":`...), string(devices.DisputeFight))
	s.ports.Publisher.Publish(devices.Event{Kind: devices.EventContested, Device: e.id, Time: now, Fields: fields,
		MsgID: e.id.Token() + "-contested-" + strconv.FormatInt(now.Unix()/int64(devices.FightPause/time.Second), 10)})
}

// newSessionID returns 16 characters of [a-z2-7]: the device echoes the id
// without escaping it.
func newSessionID() string {
	var b [10]byte
	crand.Read(b[:]) // never fails (crypto/rand)
	return sessionEncoding.EncodeToString(b[:])
}

var sessionEncoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// reasonNodeLost is the offline reason of a device whose node died.
const reasonNodeLost devices.CloseReason = "node_lost"

func offlineID(id devices.ID, epoch devices.Epoch) string {
	return id.Token() + "-" + strconv.FormatInt(int64(epoch), 10) + "-offline"
}
