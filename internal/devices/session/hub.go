package session

import (
	"cmp"
	"log/slog"
	"sync"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/devices/registry"
	"fleetd/internal/devices/speech"
	"fleetd/internal/tasks"
)

// Config configures a Hub.
type Config struct {
	Node           string
	Version        string // of fleetd, sent to devices in `initialize`
	CallsPerDevice int    // calls in flight on one device, 1 to 16
	Approve        bool   // unknown devices need approval
	Handshakes     int    // tool lists that are read concurrently
	CatalogMemory  int64  // bytes of tool lists in memory; 0: DefaultCatalogMemory
	Reconnects     int    // burst of connections of one device, then one per second; 0: no limit
	// IsNodeAlive reports whether another node has a lease; devices that it holds are
	// not marked offline. Nil if there can be no other node.
	IsNodeAlive func(node string) bool
}

// DefaultCatalogMemory holds about 5,000 different lists of usual length, in bytes. The garbage collector lets the heap grow by as much again.
const DefaultCatalogMemory = 128 << 20

// Ports are the interfaces and parts that a Hub uses.
type Ports struct {
	Records   Records
	Catalogs  Catalogs
	Publisher Publisher
	Directory Directory
	Vision    Vision
	Registry  *registry.Registry
	Speech    *speech.Service
	Recorder  devices.Recorder // may be nil
	Tracer    devices.Tracer   // may be nil
	Log       *slog.Logger
}

// Hub holds the devices that are connected to this node. Its methods are safe for
// concurrent use.
type Hub struct {
	cfg   Config
	ports Ports
	log   *slog.Logger

	table       *table
	registry    *registry.Registry
	speech      *speech.Service
	catalogs    *catalog.Cache
	stats       Stats
	staleWrites sync.Map // of *Session: those whose last row was older than the stored one
	observers   devices.Observers[Lifecycle]

	handshakes chan struct{}
	tasks      *tasks.Group
	accepting  sync.RWMutex // held for reading by Accept; protects closed and draining
	closed     bool
	draining   bool // accepts no connections, serves existing ones
}

// New returns a Hub that runs its tasks in a group.
func New(group *tasks.Group, cfg Config, ports Ports) *Hub {
	s := &Hub{cfg: cfg, ports: ports, log: ports.Log, table: newTable(), registry: ports.Registry, speech: ports.Speech,
		catalogs: catalog.NewCache(cmp.Or(cfg.CatalogMemory, DefaultCatalogMemory)), handshakes: make(chan struct{}, max(cfg.Handshakes, 1)), tasks: group}
	s.run(s.sweep)
	return s
}

// Stats returns the counters.
func (s *Hub) Stats() *Stats { return &s.stats }

// run starts a task; it reports false if the node is closing.
func (s *Hub) run(task func()) bool { return s.tasks.Run(task) }

// Session returns the session of a device on this node; nil if it has none.
func (s *Hub) Session(id devices.ID) *Session { return s.table.session(id) }

// IsHere reports whether the device has a session on this node.
func (s *Hub) IsHere(id devices.ID) bool { return s.table.session(id) != nil }

// Device returns a device without its connection; ok is false if this node has less than
// the database.
func (s *Hub) Device(id devices.ID) (device devices.Device, ok bool) {
	if e := s.table.get(id); e != nil && e.isKnown() {
		return e.device(), true
	}
	return devices.Device{}, false
}

// OnChange handles a change of a device that is now in force.
func (s *Hub) OnChange(c devices.Change) {
	e := s.table.get(c.Device)
	if e == nil {
		return
	}
	if e.isKnown() {
		s.table.update(e, func(d *devices.Device) { d.Fold(c) })
	}
	s.evictOutdated(e)
}

// OnReplace checks all devices: any of them may have changed.
func (s *Hub) OnReplace() {
	s.table.each(func(e *entry) {
		s.evictOutdated(e)
		if e.isKnown() {
			s.registry.RequestRow(e.id)
		}
	})
}

// OnRevocation ends the device's session here if its credentials are no longer valid.
func (s *Hub) OnRevocation(id devices.ID) {
	if e := s.table.get(id); e != nil {
		s.evictOutdated(e)
	}
}

// OnRow handles the row of a device that was requested from the registry.
func (s *Hub) OnRow(row devices.Row) {
	e := s.table.get(row.Device.ID)
	if e == nil || row.Device.Admission == "" { // its row is not written yet, or the device is forgotten
		return
	}
	s.merge(e, row)
	x := e.session.Load()
	if x != nil {
		s.run(x.onRow)
	}
	e.mu.Lock()
	listed := e.unrecorded
	e.unrecorded = nil
	e.mu.Unlock()
	if listed != nil && listed != x { // the device disconnected before its row arrived
		s.run(listed.recordList)
	}
}

// HasTakeovers reports whether clients take the device over from each other.
func (s *Hub) HasTakeovers(id devices.ID, now time.Time) bool {
	e := s.table.get(id)
	return e != nil && e.hasTakeovers(now)
}

// TakeoverIDs returns the devices that clients take over from each other.
func (s *Hub) TakeoverIDs(now time.Time) (ids []devices.ID) {
	s.table.each(func(e *entry) {
		if e.hasTakeovers(now) {
			ids = append(ids, e.id)
		}
	})
	return ids
}

// Close ends every session with CloseDraining. Later connections and tasks are refused.
func (s *Hub) Close() {
	s.accepting.Lock()
	s.closed = true
	s.accepting.Unlock()
	s.tasks.Close()
	s.CloseAll(devices.CloseDraining)
}

// Entries returns the number of devices with a session here, or with one a short while
// ago.
func (s *Hub) Entries() int { return int(s.table.count.Load()) }
