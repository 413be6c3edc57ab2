package session

import (
	"cmp"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/devices/registry"
	"fleetd/internal/devices/speech"
	"fleetd/internal/tasks"
)

// Config is what sessions need to know of the node.
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
}

// DefaultCatalogMemory holds about 10,000 different lists of common length.
const DefaultCatalogMemory = 256 << 20

// Ports are the ways out of a Hub, and the parts below it.
type Ports struct {
	Records   Records
	Catalogs  Catalogs
	Publisher Publisher
	Directory Directory
	Vision    Vision
	Registry  *registry.Registry
	Speech    *speech.Service
	Log       *slog.Logger
}

// Hub has the devices that are connected to this node. Its methods are safe for
// concurrent use.
type Hub struct {
	cfg   Config
	ports Ports
	log   *slog.Logger

	table     *table
	registry  *registry.Registry
	speech    *speech.Service
	catalogs  *catalog.Cache
	strings   interner
	stats     Stats
	outranked outranked
	observing sync.Mutex // of changes of observers
	observers atomic.Pointer[[]Lifecycle]

	handshakes chan struct{}
	tasks      *tasks.Group
	accepting  sync.RWMutex // held for reading by Accept; closed and leaving change under it
	closed     bool
	leaving    bool // accepts nobody, serves who is here
}

// New returns a Hub whose tasks are part of a group.
func New(group *tasks.Group, cfg Config, ports Ports) *Hub {
	s := &Hub{cfg: cfg, ports: ports, log: ports.Log, table: newTable(), registry: ports.Registry, speech: ports.Speech,
		catalogs: catalog.NewCache(cmp.Or(cfg.CatalogMemory, DefaultCatalogMemory)), handshakes: make(chan struct{}, max(cfg.Handshakes, 1)), tasks: group}
	s.run(s.sweep)
	return s
}

// Stats returns the counters.
func (s *Hub) Stats() *Stats { return &s.stats }

// run starts a task; false if the node is closing.
func (s *Hub) run(task func()) bool { return s.tasks.Run(task) }

// Session is the session that a device has on this node; nil: it has none.
func (s *Hub) Session(id devices.ID) *Session { return s.table.session(id) }

// Device is what this node knows of a device itself; ok is false if that is less
// than the database has.
func (s *Hub) Device(id devices.ID) (device devices.Device, ok bool) {
	if e := s.table.get(id); e != nil && e.isKnown() {
		return *e.device.Load(), true
	}
	return devices.Device{}, false
}

// Changed takes a change of a device that has come into force.
func (s *Hub) Changed(c devices.Change) {
	e := s.table.get(c.Device)
	if e == nil {
		return
	}
	if e.isKnown() {
		e.update(func(d *devices.Device) { d.Fold(c) })
	}
	s.evictOutdated(e)
}

// Replaced looks at all devices again: any of them may differ.
func (s *Hub) Replaced() {
	s.table.each(func(e *entry) {
		s.evictOutdated(e)
		if e.isKnown() {
			s.registry.Request(e.id)
		}
	})
}

// Revoked ends what a device has here if its credentials are not valid any more.
func (s *Hub) Revoked(id devices.ID) {
	if e := s.table.get(id); e != nil {
		s.evictOutdated(e)
	}
}

// Row takes the row of a device that was requested of the registry.
func (s *Hub) Row(row devices.Row) {
	e := s.table.get(row.Device.ID)
	if e == nil || row.Device.Admission == "" { // its row is not written yet, or it is forgotten
		return
	}
	s.merge(e, row)
	x := e.session.Load()
	if x != nil {
		s.run(x.rowRead)
	}
	e.mu.Lock()
	listed := e.listedBy
	e.listedBy = nil
	e.mu.Unlock()
	if listed != nil && listed != x { // the device left before its row came
		s.run(listed.record)
	}
}

// Fought tells whether clients take the device from each other.
func (s *Hub) Fought(id devices.ID, now time.Time) bool {
	e := s.table.get(id)
	return e != nil && e.fought(now)
}

// FoughtIDs are the devices that clients take from each other.
func (s *Hub) FoughtIDs(now time.Time) (ids []devices.ID) {
	s.table.each(func(e *entry) {
		if e.fought(now) {
			ids = append(ids, e.id)
		}
	})
	return ids
}

// Close ends every session as draining; connections and tasks that come later are
// refused.
func (s *Hub) Close() {
	s.accepting.Lock()
	s.closed = true
	s.accepting.Unlock()
	s.tasks.Close()
	s.CloseAll(devices.CloseDraining)
}

// Held is how many devices this node has to do with: those with a session, and for
// a while those that had one.
func (s *Hub) Held() int { return int(s.table.count.Load()) }
