package fleet

import (
	"cmp"
	"context"
	crand "crypto/rand"
	"encoding/base32"
	"errors"
	"log/slog"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/devices/registry"
	"fleetd/internal/devices/speech"
	"fleetd/internal/jsonspan"
	"fleetd/internal/tasks"
	"fleetd/internal/timescale"
)

// Config is what the core needs to know of the node.
type Config struct {
	Node           string
	Version        string // of fleetd, told to devices in `initialize`
	CallsPerDevice int    // calls in flight on one device, 1 to 16
	Approve        bool   // unknown devices wait for approval
	Handshakes     int    // tool lists being read at once
	CatalogMemory  int64  // bytes of tool lists in memory; 0: DefaultCatalogMemory
	Reconnects     int    // connections of one device at once, then one a second; 0: no limit
	// Alive tells whether another node holds a lease; what it has online is then
	// left alone. Nil if there can be no other node.
	Alive func(node string) bool
	// Offer is the transport that the OTA reply offers where nobody chose another.
	Offer devices.Transport
	// Dir is where the registry's snapshot is kept; empty: nowhere.
	Dir string
	// Fleet is the fingerprint of the secret, RosterKey what keys the roster's hashes.
	Fleet     string
	RosterKey [16]byte
	Members   int // at most; 0: registry.MaxMembers
	// PolicyFixed says that the policy comes from a file, by UsePolicy, and from
	// nowhere else.
	PolicyFixed bool
}

// DefaultCatalogMemory holds about 10,000 different lists of common length.
const DefaultCatalogMemory = 256 << 20

// Ports are the core's ways out. All but Voice and Audit are required.
type Ports struct {
	Records   Records
	Catalogs  Catalogs
	Ledger    registry.Ledger
	Publisher Publisher
	Directory Directory
	Router    Router
	Vision    Vision
	Audio     speech.AudioBus
	Peers     registry.Peers // may be nil: there is no other node
	Voice     speech.Voice   // may be nil
	Audit     Auditor        // may be nil
	Changes   Changes        // may be nil: the log of decisions cannot be read
	Log       *slog.Logger
}

// Service is the core. Its methods are safe for concurrent use.
type Service struct {
	cfg   Config
	ports Ports
	log   *slog.Logger

	hub       *hub
	callIDs   *devices.CallIDs
	catalogs  *catalog.Cache
	pending   *pendings
	strings   interner
	stats     Stats
	outranked outranked
	doors     *doors
	disputes  disputes
	counted   counted
	registry  *registry.Registry

	speech     *speech.Service
	handshakes chan struct{}
	ctx        context.Context
	stop       context.CancelFunc
	tasks      tasks.Group
	accepting  sync.RWMutex // held for reading by Accept; closed and leaving change under it
	closed     bool
	leaving    bool // accepts nobody, serves who is here
}

// New returns a running core; Close ends it.
func New(cfg Config, ports Ports) *Service {
	s := &Service{cfg: cfg, ports: ports, log: ports.Log, hub: newHub(), catalogs: catalog.NewCache(cmp.Or(cfg.CatalogMemory, DefaultCatalogMemory)), pending: newPendings(), doors: newDoors(),
		handshakes: make(chan struct{}, max(cfg.Handshakes, 1)), callIDs: devices.NewCallIDs(cfg.Node, time.Now())}
	s.ctx, s.stop = context.WithCancel(context.Background())
	s.registry = registry.New(registry.Options{Ledger: ports.Ledger, Records: ports.Records, Peers: ports.Peers, Observer: (*observer)(s),
		Node: cfg.Node, Dir: cfg.Dir, Fleet: cfg.Fleet, Key: cfg.RosterKey, Limit: cfg.Members, Log: ports.Log})
	s.tasks.Log = ports.Log
	s.speech = speech.New(speech.Options{Audio: ports.Audio, Voice: ports.Voice, Tasks: &s.tasks, Log: ports.Log, Permit: s.permitSpeech})
	s.stats.Stats = s.speech.Stats()
	s.run(s.sweep)
	return s
}

// Registry knows who the devices of the fleet are. Its Start has to be called once
// this node hears what others tell.
func (s *Service) Registry() *registry.Registry { return s.registry }

// Stats returns the counters.
func (s *Service) Stats() *Stats { return &s.stats }

// run starts a task that Close waits for; false if the service is closing.
func (s *Service) run(task func()) bool { return s.tasks.Run(task) }

// Sessions calls f for every session of this node.
func (s *Service) Sessions(f func(*Session)) {
	s.hub.each(func(e *entry) {
		if session := e.session.Load(); session != nil {
			f(session)
		}
	})
}

var (
	errDraining  = devices.Errorf(devices.CodeUnavailable, "this node is stopping; connect again")
	errOutdated  = devices.Errorf(devices.CodeUnauthorized, "the credentials were revoked while the device connected")
	errTooOften  = devices.Errorf(devices.CodeDeviceBusy, "the device connects again and again; it may once a second")
	errOvertaken = devices.Errorf(devices.CodeSuperseded, "the device connected again while this connection was accepted")
)

// Accept makes the connection the device's session: the newest wins, the old
// one is closed. It answers from memory: no database, no network. Only an unknown
// device that presents valid credentials, or that the front end lets in without,
// waits for the database to make it a member, at most registry.JoinLimit. An error
// means that the connection must be closed.
func (s *Service) Accept(who devices.Identity, conn Conn) (*Session, error) {
	s.accepting.RLock()
	defer s.accepting.RUnlock()
	if s.closed || s.leaving {
		return nil, errDraining
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
func (s *Service) belongs(who devices.Identity) error {
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
		return s.registry.Join(s.ctx, who.Device, who.ClientID, who.Transport)
	case who.Verified && who.Generation < current:
		ctx, cancel := context.WithTimeout(s.ctx, lookupTimeout)
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
func (s *Service) install(x *Session, who devices.Identity) (old *Session, err error) {
	for {
		e, _ := s.hub.ensure(who.Device, who.ClientID)
		e.mu.Lock()
		if !e.removed {
			defer e.mu.Unlock()
			return s.installLocked(e, x, who)
		}
		e.mu.Unlock() // nobody needed it a moment ago
	}
}

func (s *Service) installLocked(e *entry, x *Session, who devices.Identity) (old *Session, err error) {
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
	if old != nil && old.who.ClientID != x.who.ClientID && e.takeovers.contested(x.connected) {
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
	x.svc.stats.States.Add(SessionState{x.who.Transport, x.mcp}, 1)
	x.svc.ports.Records.SavePresence(x.presenceLocked(true))
	x.publishOnlineLocked()
	return true
}

func (x *Session) publishOnlineLocked() {
	fields := jsonspan.AppendString([]byte(`"transport":`), string(x.who.Transport))
	x.publishLocked(devices.EventOnline, "", jsonspan.AppendString(append(fields, `,"client_id":`...), x.who.ClientID), true)
}

func (s *Service) publishContested(e *entry, clientID, remote string, now time.Time) {
	s.log.Warn("device id is contested", "device", e.id, "client", clientID, "remote", remote)
	s.stats.Contested.Add(devices.DisputeFight, 1)
	fields := jsonspan.AppendString([]byte(`"client_id":`), clientID)
	fields = jsonspan.AppendString(append(fields, `,"reason":`...), string(devices.DisputeFight))
	s.ports.Publisher.Publish(devices.Event{Kind: devices.EventContested, Device: e.id, Time: now, Fields: fields,
		MsgID: e.id.Token() + "-contested-" + strconv.FormatInt(now.Unix()/int64(fightPause/time.Second), 10)})
}

// newSessionID returns 16 characters of [a-z2-7]: the device echoes the id
// without escaping it.
func newSessionID() string {
	var b [10]byte
	crand.Read(b[:]) // never fails (crypto/rand)
	return sessionEncoding.EncodeToString(b[:])
}

var sessionEncoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// maxInterned bounds what devices can make an interner keep.
const maxInterned = 10_000

// interner keeps one copy of strings that whole fleets share (boards,
// firmware versions, image hashes).
type interner struct {
	m sync.Map
	n atomic.Int32
}

func (i *interner) get(text string) string {
	if v, ok := i.m.Load(text); ok {
		return v.(string)
	}
	if i.n.Load() >= maxInterned {
		return text
	}
	v, loaded := i.m.LoadOrStore(text, text)
	if !loaded {
		i.n.Add(1)
	}
	return v.(string)
}

// reasonNodeLost is the offline reason of a device whose node died.
const reasonNodeLost devices.CloseReason = "node_lost"

func offlineID(id devices.ID, epoch devices.Epoch) string {
	return id.Token() + "-" + strconv.FormatInt(int64(epoch), 10) + "-offline"
}
