package devices

import (
	"cmp"
	"context"
	crand "crypto/rand"
	"encoding/base32"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/jsonspan"
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
	// Excepted is called, if set, after each change of exceptional credentials,
	// keys or rules, so that the node can note it at once; it must not block.
	Excepted func()
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
	Keeper    Keeper
	Rotations Rotations
	Publisher Publisher
	Directory Directory
	Router    Router
	Vision    Vision
	Audio     AudioBus
	Warden    Warden
	Voice     Voice   // may be nil
	Audit     Auditor // may be nil
	Log       *slog.Logger
}

// Service is the core. Its methods are safe for concurrent use.
type Service struct {
	cfg   Config
	ports Ports
	log   *slog.Logger

	hub       *hub
	catalogs  *catalogs
	pending   *pendings
	strings   interner
	stats     Stats
	outranked outranked
	doors     *doors
	rotation  atomic.Pointer[Rotation] // of the whole fleet; nil: none

	handshakes chan struct{}
	loaded     atomic.Bool
	unsaved    sync.Map // ID of rows that wait for the members to be known
	ctx        context.Context
	stop       context.CancelFunc
	tasks      sync.WaitGroup
	drainMu    sync.RWMutex // no task starts once draining is set
	draining   bool
	leaving    bool // accepts nobody, serves who is here
}

// New returns a running core; Close ends it.
func New(cfg Config, ports Ports) *Service {
	s := &Service{cfg: cfg, ports: ports, log: ports.Log, hub: newHub(), catalogs: newCatalogs(cmp.Or(cfg.CatalogMemory, DefaultCatalogMemory)), pending: newPendings(), doors: newDoors(),
		handshakes: make(chan struct{}, max(cfg.Handshakes, 1))}
	s.ctx, s.stop = context.WithCancel(context.Background())
	s.run(s.sweep)
	return s
}

// Stats returns the counters.
func (s *Service) Stats() *Stats { return &s.stats }

// run starts a task that Close waits for; false if the service is closing.
func (s *Service) run(task func()) bool {
	// Callers may hold a session's lock, so this never waits: the lock is only
	// taken from us by Close.
	if !s.drainMu.TryRLock() {
		return false
	}
	defer s.drainMu.RUnlock()
	if s.draining {
		return false
	}
	s.tasks.Go(func() {
		defer Contain(s.log, nil)
		task()
	})
	return true
}

// Contain ends a panic of the goroutine that defers it, logs it, and calls
// after if there is one: a fault that one device's bytes set off must not end
// the sessions of all others.
func Contain(log *slog.Logger, after func()) {
	if fault := recover(); fault != nil {
		log.Error("a fault of fleetd's, please report it", "panic", fault, "stack", string(debug.Stack()))
		if after != nil {
			after()
		}
	}
}

// Sessions calls f for every session of this node.
func (s *Service) Sessions(f func(*Session)) {
	s.hub.each(func(e *entry) {
		if session := e.session.Load(); session != nil {
			f(session)
		}
	})
}

// Identity is who a front end found at the other end of a connection.
type Identity struct {
	Device    ID
	ClientID  string
	Transport Transport
	Remote    string // address, for logs
	// Verified says that credentials of Generation were presented. They are
	// held against the device once more when it is accepted, since they may
	// have been revoked while the connection was being opened.
	Verified   bool
	Generation int64
}

var (
	errDraining  = fail(CodeUnavailable, "this node is stopping; connect again")
	errOutdated  = fail(CodeUnauthorized, "the credentials were revoked while the device connected")
	errTooOften  = fail(CodeDeviceBusy, "the device connects again and again; it may once a second")
	errOvertaken = fail(CodeSuperseded, "the device connected again while this connection was accepted")
)

// Accept makes the connection the device's session: the newest wins, the old
// one is closed. Unknown devices become members here only if the front end
// lets them in without credentials. It answers from memory: no database, no
// network. An error means that the connection must be closed.
func (s *Service) Accept(who Identity, conn Conn) (*Session, error) {
	s.drainMu.RLock()
	defer s.drainMu.RUnlock()
	if s.draining || s.leaving {
		return nil, errDraining
	}
	if who.Verified && !s.Accepts(who.Device, who.Generation) {
		return nil, errOutdated
	}
	now := time.Now()
	e, created := s.hub.ensure(who.Device, func() *Device {
		return &Device{ID: who.Device, ClientID: who.ClientID, Admission: AdmissionMember, FirstSeen: now.UTC()}
	})
	if created {
		s.saveDevice(e.device.Load())
		s.ports.Directory.Tell(News{Device: e.device.Load()})
	}
	remote := who.Remote
	who.Remote, who.Device = "", e.id // a session keeps no second copy of what its entry has
	if known := e.device.Load().ClientID; known == who.ClientID {
		who.ClientID = known
	}
	x := &Session{svc: s, entry: e, conn: conn, who: who, id: newSessionID(), connected: now}
	if addr, err := netip.ParseAddrPort(remote); err == nil {
		x.remote = addr.Addr().Unmap()
	}
	x.init()
	// Held before the session can be seen: whoever ends it releases.
	if err := s.ports.Directory.Hold(who.Device); err != nil {
		s.log.Warn("device cannot be announced to other nodes", "device", who.Device, "error", err)
	}
	old, err := s.install(e, x)
	if err != nil {
		s.ports.Directory.Release(who.Device)
		if errors.Is(err, errContested) {
			s.publishContested(e, who.ClientID, remote, now)
		}
		return nil, err
	}
	if old != nil {
		old.Close(CloseSuperseded)
	}
	x.adopt()
	if !x.announce() {
		return nil, errOvertaken
	}
	x.claim(ClaimConnect)
	s.stats.Connects.Add(who.Transport, 1)
	s.log.Info("device connected", "device", who.Device, "session", x.id, "epoch", x.Epoch(), "transport", who.Transport, "remote", remote)
	return x, nil
}

var errContested = fail(CodeForbidden, "the device id is cloned: another client holds it")

// install puts the session in the hub and returns the one it replaces.
func (s *Service) install(e *entry, x *Session) (old *Session, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.forgotten || e.outdatedLocked(x) {
		return nil, errOutdated
	}
	if !e.reconnects.take(x.connected, 1, s.cfg.Reconnects) {
		return nil, errTooOften
	}
	old = e.session.Load()
	if old != nil && old.who.ClientID != x.who.ClientID && e.takeovers.contested(x.connected) {
		return nil, errContested
	}
	x.epoch = max(Epoch(wallClock().UnixMicro()), e.lastEpoch+1)
	e.lastEpoch = x.epoch
	x.startCatalog(e, s.catalogs)
	if x.who.Verified {
		e.confirmed = max(e.confirmed, x.who.Generation)
	}
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
	x.publishLocked(EventOnline, "", jsonspan.AppendString(append(fields, `,"client_id":`...), x.who.ClientID), true)
}

func (s *Service) publishContested(e *entry, clientID, remote string, now time.Time) {
	s.log.Warn("device id is contested", "device", e.id, "client", clientID, "remote", remote)
	s.stats.Contested.Add(DisputeFight, 1)
	fields := jsonspan.AppendString([]byte(`"client_id":`), clientID)
	fields = jsonspan.AppendString(append(fields, `,"reason":`...), string(DisputeFight))
	s.ports.Publisher.Publish(Event{Kind: EventContested, Device: e.id, Time: now, Fields: fields,
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

// Load brings everything known from the database into memory: call it once
// the database answers. Devices that the last run left online and that are not
// connected here are marked offline as node_lost. It may run while devices
// connect; what they said meanwhile wins.
func (s *Service) Load(ctx context.Context) error {
	if err := s.loadDoors(ctx); err != nil {
		return err
	}
	exceptions, err := s.ports.Keeper.LoadExceptions(ctx)
	if err != nil {
		return fmt.Errorf("load exceptions: %w", err)
	}
	if err := s.loadRotation(ctx); err != nil {
		return err
	}
	images := map[Hash][]string{} // firmware images known to have a list
	err = s.ports.Keeper.LoadDevices(ctx, func(row Row) error {
		s.restore(row)
		if p := row.Presence; p.Catalog != (Hash{}) {
			elfs := images[p.Catalog]
			if elf := row.Device.ELF; !p.Partial && !slices.Contains(elfs, elf) {
				elfs = append(elfs, elf)
			}
			images[p.Catalog] = elfs
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("load devices: %w", err)
	}
	for _, x := range exceptions {
		s.applyException(x)
	}
	for h, elfs := range images {
		err := s.loadCatalog(ctx, h, elfs)
		if errors.Is(err, errNoRoom) {
			s.log.Warn("not all tool lists are held in memory; those of absent devices are read when needed", "error", err)
			break
		}
		if err != nil {
			s.log.Warn("stored catalog is not usable", "catalog", h, "error", err)
		}
	}
	s.loaded.Store(true)
	s.unsaved.Range(func(id, _ any) bool {
		s.unsaved.Delete(id)
		if e := s.hub.get(id.(ID)); e != nil {
			s.ports.Records.SaveDevice(*e.device.Load())
		}
		return true
	})
	return nil
}

// saveDevice queues the device's row. Before the members are known that would
// overwrite what the database holds of it (its name, its labels, its
// Client-Id), so the row then waits until both are merged.
func (s *Service) saveDevice(d *Device) {
	if s.loaded.Load() {
		s.ports.Records.SaveDevice(*d)
		return
	}
	s.unsaved.Store(d.ID, nil)
	if s.loaded.Load() { // Load may have looked for unsaved rows just before
		s.ports.Records.SaveDevice(*d)
	}
}

// writtenLimit bounds how long an answer waits for the database.
const writtenLimit = 2 * time.Second

// awaitWritten waits until what an operator decided about a device is in the
// database: once it is answered, it survives the node. While the database is
// away it is written later.
func (s *Service) awaitWritten(id ID) {
	ctx, cancel := context.WithTimeout(context.Background(), writtenLimit)
	defer cancel()
	if err := s.ports.Keeper.Written(ctx, id); err != nil {
		s.log.Debug("a decision is not written yet", "device", id, "error", err)
	}
}

// Restore is Load from the node's own notes, for a start without a database.
func (s *Service) Restore(rows []Row, exceptions []Exception) {
	for _, row := range rows {
		row.Presence.Online = false
		s.restore(row)
	}
	for _, x := range exceptions {
		s.applyException(x)
	}
	s.loaded.Store(true)
}

// Loaded tells whether the node knows who its members are.
func (s *Service) Loaded() bool { return s.loaded.Load() }

func (s *Service) restore(row Row) {
	d := row.Device
	d.Board, d.Firmware, d.ELF = s.strings.get(d.Board), s.strings.get(d.Firmware), s.strings.get(d.ELF)
	e, created := s.hub.ensure(d.ID, func() *Device { return &d })
	p := row.Presence
	// Asking may take a look into the database, so it is done without the lock.
	lost := p.Online && (s.cfg.Alive == nil || p.Node == s.cfg.Node || !s.cfg.Alive(p.Node))
	defer func() {
		if lost { // it takes the lock of a shard, which comes before that of an entry
			s.lose(p)
		}
	}()
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case created:
	case s.loaded.Load():
		// A node that started from its own notes may have decided something since;
		// what the fleet decided meanwhile is in the database.
		e.updateLocked(func(mine *Device) { mine.KeepNewer(&d) })
	default:
		// One that started with nothing has only what the device reported since.
		if heard := e.device.Load(); heard.Firmware != "" {
			d.Board, d.Firmware, d.ELF = heard.Board, heard.Firmware, heard.ELF
		}
		e.device.Store(&d)
	}
	e.lastEpoch = max(e.lastEpoch, p.Epoch)
	e.confirmed = max(e.confirmed, p.Generation)
	if e.catalog == (Hash{}) {
		e.catalog, e.partial = p.Catalog, p.Partial
		if !d.CheckedAt.After(p.LastSeen) { // else its firmware may have changed since it was listed
			e.listedFW = d.Firmware
		}
	}
}

// reasonNodeLost is the offline reason of a device whose node died.
const reasonNodeLost CloseReason = "node_lost"

func offlineID(id ID, epoch Epoch) string {
	return id.Token() + "-" + strconv.FormatInt(int64(epoch), 10) + "-offline"
}

func (s *Service) loadCatalog(ctx context.Context, h Hash, elfs []string) error {
	text, err := s.ports.Catalogs.Catalog(ctx, h)
	if err != nil {
		return err
	}
	cat, _, err := s.catalogs.intern(text.Tools)
	if err != nil {
		return err
	}
	for _, elf := range elfs {
		s.catalogs.learn(elf, cat)
	}
	return nil
}

// Known returns what Restore takes: the node's notes for a start without a
// database.
func (s *Service) Known() (rows []Row, exceptions []Exception) {
	s.hub.each(func(e *entry) {
		e.mu.Lock()
		defer e.mu.Unlock()
		d := e.device.Load()
		rows = append(rows, Row{Device: *d, Presence: Presence{Device: e.id, Epoch: e.lastEpoch, Catalog: e.catalog, Partial: e.partial, Generation: e.confirmed}})
		if e.generation > 0 || e.revoked {
			exceptions = append(exceptions, e.exception(e.id, ""))
		}
	})
	s.hub.orphans.Range(func(_, x any) bool {
		exceptions = append(exceptions, x.(Exception))
		return true
	})
	return rows, exceptions
}
