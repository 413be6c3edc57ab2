package devices

import (
	"context"
	"crypto/rand"
	"encoding/base32"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/hello"
	"fleetd/internal/jsonspan"
)

// Config is what the core needs to know of the node.
type Config struct {
	Node           string
	Version        string // of fleetd, told to devices in `initialize`
	CallsPerDevice int    // calls in flight on one device, 1 to 16
	Approve        bool   // unknown devices wait for approval
	Handshakes     int    // MCP handshakes in progress at once
}

// Ports are the core's ways out. All are required.
type Ports struct {
	Records   Records
	Catalogs  Catalogs
	Keeper    Keeper
	Publisher Publisher
	Directory Directory
	Vision    Vision
	Log       *slog.Logger
}

// Service is the core. Its methods are safe for concurrent use.
type Service struct {
	cfg   Config
	ports Ports
	log   *slog.Logger

	hub      *hub
	catalogs *catalogs
	pending  *pendings
	strings  interner
	stats    Stats

	handshakes chan struct{}
	loaded     atomic.Bool
	unsaved    sync.Map // ID of rows that wait for the members to be known
	ctx        context.Context
	stop       context.CancelFunc
	tasks      sync.WaitGroup
	drainMu    sync.RWMutex // no task starts once draining is set
	draining   bool
}

// New returns a running core; Close ends it.
func New(cfg Config, ports Ports) *Service {
	s := &Service{cfg: cfg, ports: ports, log: ports.Log, hub: newHub(), catalogs: newCatalogs(), pending: newPendings(),
		handshakes: make(chan struct{}, max(cfg.Handshakes, 1))}
	s.ctx, s.stop = context.WithCancel(context.Background())
	s.run(s.sweep)
	return s
}

// Stats returns the counters.
func (s *Service) Stats() *Stats { return &s.stats }

// run starts a task that Close waits for; false if the service is closing.
func (s *Service) run(task func()) bool {
	s.drainMu.RLock()
	defer s.drainMu.RUnlock()
	if s.draining {
		return false
	}
	s.tasks.Go(task)
	return true
}

// Close ends every session as draining and waits for the core's own
// goroutines. Sessions accepted afterwards are refused.
func (s *Service) Close() {
	s.drainMu.Lock()
	s.draining = true
	s.drainMu.Unlock()
	s.CloseAll(CloseDraining)
	s.stop()
	s.tasks.Wait()
}

// CloseAll ends every session of this node.
func (s *Service) CloseAll(reason CloseReason) {
	s.hub.each(func(e *entry) {
		if session := e.session.Load(); session != nil {
			session.Close(reason)
		}
	})
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
}

var errDraining = fail(CodeUnavailable, "this node is stopping; connect again")

// Accept makes the connection the device's session: the newest wins, the old
// one is closed. Unknown devices become members here only if the front end
// lets them in without credentials. It answers from memory: no database, no
// network. An error means that the connection must be closed.
func (s *Service) Accept(who Identity, conn Conn) (*Session, error) {
	s.drainMu.RLock()
	defer s.drainMu.RUnlock()
	if s.draining {
		return nil, errDraining
	}
	now := time.Now()
	e, created := s.hub.ensure(who.Device, func() *Device {
		return &Device{ID: who.Device, ClientID: who.ClientID, Admission: AdmissionMember, FirstSeen: now.UTC()}
	})
	if created {
		s.saveDevice(e.device.Load())
	}
	remote := who.Remote
	who.Remote, who.Device = "", e.id // a session keeps no second copy of what its entry has
	if known := e.device.Load().ClientID; known == who.ClientID {
		who.ClientID = known
	}
	session := &Session{svc: s, entry: e, conn: conn, who: who, id: newSessionID(), connected: now}
	session.init()

	e.mu.Lock()
	old := e.session.Load()
	if old != nil && old.who.ClientID != who.ClientID && e.takeovers.contested(now) {
		e.mu.Unlock()
		s.publishContested(e, who, now)
		return nil, fail(CodeForbidden, "device id %s is cloned: another client holds it", who.Device)
	}
	session.epoch = max(Epoch(now.UnixMicro()), e.lastEpoch+1)
	e.lastEpoch = session.epoch
	session.startCatalog(e, s.catalogs)
	e.session.Store(session)
	e.mu.Unlock()

	if old != nil {
		old.Close(CloseSuperseded)
	}
	s.stats.Connects.Add(1)
	s.stats.States.Add(MCPUnknown, 1)
	if err := s.ports.Directory.Hold(who.Device); err != nil {
		s.log.Warn("device cannot be announced to other nodes", "device", who.Device, "error", err)
	}
	session.mu.Lock()
	presence := session.presenceLocked(true)
	session.mu.Unlock()
	s.ports.Records.SavePresence(presence)
	fields := []byte(`"transport":`)
	fields = jsonspan.AppendString(fields, string(who.Transport))
	fields = append(fields, `,"client_id":`...)
	session.publish(EventOnline, "", jsonspan.AppendString(fields, who.ClientID), true)
	s.log.Info("device connected", "device", who.Device, "session", session.id, "epoch", session.epoch, "transport", who.Transport, "remote", remote)
	return session, nil
}

func (s *Service) publishContested(e *entry, who Identity, now time.Time) {
	s.log.Warn("device id is contested", "device", e.id, "client", who.ClientID, "remote", who.Remote)
	fields := []byte(`"client_id":`)
	s.ports.Publisher.Publish(Event{Kind: EventContested, Device: e.id, Time: now, Fields: jsonspan.AppendString(fields, who.ClientID),
		MsgID: e.id.Token() + "-contested-" + strconv.FormatInt(now.Unix()/int64(fightPause/time.Second), 10)})
}

// newSessionID returns 16 characters of [a-z2-7]: the device echoes the id
// without escaping it.
func newSessionID() string {
	var b [10]byte
	rand.Read(b[:]) // never fails (crypto/rand)
	return sessionEncoding.EncodeToString(b[:])
}

var sessionEncoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// OpenAudio opens a conversation: the answer to the device's hello. It is
// made from local state alone.
func (x *Session) OpenAudio(h hello.Device, transport string) hello.Server {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.audioOpen = true
	return hello.Server{Transport: transport, SessionID: x.id, Audio: hello.ServerAudio}
}

// CloseAudio ends the conversation; the session lives on.
func (x *Session) CloseAudio() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.audioOpen = false
}

// interner keeps one copy of strings that whole fleets share (boards,
// firmware versions, image hashes).
type interner struct{ m sync.Map }

func (i *interner) get(text string) string {
	if v, ok := i.m.Load(text); ok {
		return v.(string)
	}
	v, _ := i.m.LoadOrStore(text, text)
	return v.(string)
}

// Load brings everything known from the database into memory: call it once
// the database answers. Devices that the last run left online and that are not
// connected here are marked offline as node_lost. It may run while devices
// connect; what they said meanwhile wins.
func (s *Service) Load(ctx context.Context) error {
	exceptions, err := s.ports.Keeper.LoadExceptions(ctx)
	if err != nil {
		return fmt.Errorf("load exceptions: %w", err)
	}
	wanted := map[Hash]string{}
	err = s.ports.Keeper.LoadDevices(ctx, func(row Row) error {
		s.restore(row)
		if p := row.Presence; p.Catalog != (Hash{}) && !p.Partial {
			wanted[p.Catalog] = row.Device.ELF
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("load devices: %w", err)
	}
	for _, x := range exceptions {
		s.applyException(x)
	}
	for h, elf := range wanted {
		if err := s.loadCatalog(ctx, h, elf); err != nil {
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
	e.mu.Lock()
	defer e.mu.Unlock()
	// A node that started from its own notes knows better than the database,
	// which was away; one that started with nothing knows only what the device
	// said of itself since.
	if !created && !s.loaded.Load() {
		if heard := e.device.Load(); heard.Firmware != "" {
			d.Board, d.Firmware, d.ELF = heard.Board, heard.Firmware, heard.ELF
		}
		e.device.Store(&d)
	}
	p := row.Presence
	e.lastEpoch = max(e.lastEpoch, p.Epoch)
	if e.catalog == (Hash{}) {
		e.catalog, e.partial, e.listedFW = p.Catalog, p.Partial, d.Firmware
	}
	if p.Online && e.session.Load() == nil {
		p.Online, p.Reason, p.Seq = false, string(reasonNodeLost), p.Seq+1
		s.ports.Records.SavePresence(p)
		s.ports.Publisher.Publish(Event{Kind: EventOffline, Device: d.ID, Session: p.Session, Epoch: p.Epoch, Seq: p.Seq, Time: time.Now(),
			MsgID: offlineID(d.ID, p.Epoch), Fields: []byte(`"reason":"` + string(reasonNodeLost) + `"`)})
	}
}

// reasonNodeLost is the offline reason of a device whose node died.
const reasonNodeLost CloseReason = "node_lost"

func offlineID(id ID, epoch Epoch) string {
	return id.Token() + "-" + strconv.FormatInt(int64(epoch), 10) + "-offline"
}

func (s *Service) loadCatalog(ctx context.Context, h Hash, elf string) error {
	text, err := s.ports.Catalogs.Catalog(ctx, h)
	if err != nil {
		return err
	}
	cat, _, err := s.catalogs.intern(text.Tools)
	if err == nil {
		s.catalogs.learn(elf, cat)
	}
	return err
}

// Known returns what Restore takes: the node's notes for a start without a
// database.
func (s *Service) Known() (rows []Row, exceptions []Exception) {
	s.hub.each(func(e *entry) {
		e.mu.Lock()
		defer e.mu.Unlock()
		d := e.device.Load()
		rows = append(rows, Row{Device: *d, Presence: Presence{Device: e.id, Epoch: e.lastEpoch, Catalog: e.catalog, Partial: e.partial}})
		if e.generation > 0 || e.revoked {
			exceptions = append(exceptions, Exception{Device: e.id, Generation: e.generation, Revoked: e.revoked, ChangedAt: time.Now().UTC()})
		}
	})
	return rows, exceptions
}
