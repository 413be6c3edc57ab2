package fleet

import (
	"log/slog"
	"sync/atomic"

	"fleetd/internal/access"
	"fleetd/internal/audit"
	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/devices/registry"
	"fleetd/internal/devices/session"
	"fleetd/internal/devices/speech"
	"fleetd/internal/tasks"
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
	// OnRotation is registry.Options.OnRotation. May be nil.
	OnRotation func(r devices.Rotation, fresh bool)
	// PolicyFixed says that the policy comes from a file, by UsePolicy, and from
	// nowhere else.
	PolicyFixed bool
}

// Ports are the core's ways out. All but Voice and Audit are required.
type Ports struct {
	Records   Records
	Catalogs  session.Catalogs
	Ledger    registry.Ledger
	Publisher session.Publisher
	Directory session.Directory
	Router    dispatch.Router
	Vision    session.Vision
	Audio     speech.AudioBus
	Peers     registry.Peers   // may be nil: there is no other node
	Voice     speech.Voice     // may be nil
	Audit     dispatch.Auditor // may be nil
	Changes   Changes          // may be nil: the log of decisions cannot be read
	Log       *slog.Logger
}

// Service is the core. Its methods are safe for concurrent use.
type Service struct {
	cfg   Config
	ports Ports
	log   *slog.Logger

	*session.Hub
	*admission.Admission
	*dispatch.Dispatcher
	registry *registry.Registry
	stats    Stats
	counted  counted
	decided  atomic.Pointer[func(devices.ID)]
	tasks    *tasks.Group
}

// New returns a running core; Close ends it.
func New(cfg Config, ports Ports) *Service {
	if cfg.OnRotation == nil {
		cfg.OnRotation = func(devices.Rotation, bool) {}
	}
	s := &Service{cfg: cfg, ports: ports, log: ports.Log, tasks: tasks.New(ports.Log)}
	s.registry = registry.New(registry.Options{Ledger: ports.Ledger, Records: ports.Records, Peers: ports.Peers, Observer: (*observer)(s),
		Node: cfg.Node, Dir: cfg.Dir, Fleet: cfg.Fleet, Key: cfg.RosterKey, Limit: cfg.Members, OnRotation: cfg.OnRotation, Log: ports.Log})
	talk := speech.New(speech.Options{Audio: ports.Audio, Voice: ports.Voice, Tasks: s.tasks, Log: ports.Log,
		Permit: func(by access.By, id devices.ID, kind string, err error) error {
			return s.PermitSpeech(by, id, kind, err)
		}})
	s.Hub = session.New(s.tasks, session.Config{Node: cfg.Node, Version: cfg.Version, CallsPerDevice: cfg.CallsPerDevice, Approve: cfg.Approve,
		Handshakes: cfg.Handshakes, CatalogMemory: cfg.CatalogMemory, Reconnects: cfg.Reconnects, Alive: cfg.Alive},
		session.Ports{Records: ports.Records, Catalogs: ports.Catalogs, Publisher: ports.Publisher, Directory: ports.Directory, Vision: ports.Vision,
			Registry: s.registry, Speech: talk, Log: ports.Log})
	s.Admission = admission.New(admission.Config{Approve: cfg.Approve, Offer: cfg.Offer}, admission.Ports{Records: ports.Records, Registry: s.registry,
		Hub: s.Hub, Directory: ports.Directory, Publisher: ports.Publisher, Record: func(e audit.Entry) { s.Record(e) }, Log: ports.Log})
	s.Dispatcher = dispatch.New(dispatch.Config{Node: cfg.Node, Routed: cfg.Alive != nil}, dispatch.Ports{Records: ports.Records, Registry: s.registry, Hub: s.Hub,
		Waits: s.Waits, Router: ports.Router, Vision: ports.Vision, Audit: ports.Audit, Tasks: s.tasks, Log: ports.Log})
	s.stats = Stats{talk.Stats(), s.Hub.Stats(), s.Dispatcher.Stats()}
	return s
}

// Registry knows who the devices of the fleet are. Its Start has to be called once
// this node hears what others tell.
func (s *Service) Registry() *registry.Registry { return s.registry }

// Stats returns the counters.
func (s *Service) Stats() *Stats { return &s.stats }

// Close ends every session as draining and waits for the core's own
// goroutines. Sessions accepted afterwards are refused.
func (s *Service) Close() {
	s.Hub.Close()
	s.tasks.Wait()
	s.registry.Close()
}
