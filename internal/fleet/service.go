package fleet

import (
	"log/slog"

	"fleetd/internal/audit"
	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/devices/registry"
	"fleetd/internal/devices/session"
	"fleetd/internal/devices/speech"
	"fleetd/internal/tasks"
)

// Config configures the core.
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
	// Offer is the transport that the OTA reply offers unless an operator chose one.
	Offer devices.Transport
	// Dir is the directory of the registry's snapshot; empty: none is kept.
	Dir string
	// Fleet is the fingerprint of the secret; RosterKey keys the hashes of the roster.
	Fleet     string
	RosterKey [16]byte
	Members   int // at most; 0: registry.MaxMembers
	// OnRotation is registry.Options.OnRotation. May be nil.
	OnRotation func(r devices.Rotation, fresh bool)
	// OnRestored is registry.Options.OnRestored. May be nil.
	OnRestored func(lineage string)
	// PolicyFixed means that the policy comes from a file, by UsePolicy, and cannot be
	// changed otherwise.
	PolicyFixed bool
}

// Ports are the interfaces that the core uses. All are required unless they say otherwise.
type Ports struct {
	Records   Records
	Catalogs  session.Catalogs
	Ledger    registry.Ledger
	Publisher session.Publisher
	Directory session.Directory
	Router    dispatch.Router
	Vision    session.Vision
	Audio     speech.AudioBus
	Peers     registry.Peers // may be nil: there are no other nodes
	Voice     speech.Voice   // may be nil
	Audit     audit.Auditor
	Changes   Changes          // may be nil: the log of changes cannot be read
	Codes     Codes            // may be nil: there is no console
	Grants    Grants           // may be nil: there is no OAuth
	Recorder  devices.Recorder // may be nil
	Tracer    devices.Tracer   // may be nil
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
	registry   *registry.Registry
	stats      Stats
	counts     countCache
	onDecision devices.Observers[func(devices.ID)]
	tasks      *tasks.Group
}

// New returns a running core; Close stops it.
func New(cfg Config, ports Ports) *Service {
	if cfg.OnRotation == nil {
		cfg.OnRotation = func(devices.Rotation, bool) {}
	}
	if ports.Recorder != nil {
		ports.Publisher = recordingPublisher{ports.Publisher, ports.Recorder}
	}
	s := &Service{cfg: cfg, ports: ports, log: ports.Log, tasks: tasks.New(ports.Log)}
	s.registry = registry.New(registry.Options{Ledger: ports.Ledger, Records: ports.Records, Peers: ports.Peers, Observer: (*observer)(s),
		Node: cfg.Node, Dir: cfg.Dir, Fleet: cfg.Fleet, Key: cfg.RosterKey, Limit: cfg.Members, OnRotation: cfg.OnRotation, OnRestored: cfg.OnRestored, Log: ports.Log})
	conversations := speech.New(speech.Options{Audio: ports.Audio, Voice: ports.Voice, Guard: s, Tasks: s.tasks, Log: ports.Log})
	s.Hub = session.New(s.tasks, session.Config{Node: cfg.Node, Version: cfg.Version, CallsPerDevice: cfg.CallsPerDevice, Approve: cfg.Approve,
		Handshakes: cfg.Handshakes, CatalogMemory: cfg.CatalogMemory, Reconnects: cfg.Reconnects, IsNodeAlive: cfg.IsNodeAlive},
		session.Ports{Records: ports.Records, Catalogs: ports.Catalogs, Publisher: ports.Publisher, Directory: ports.Directory, Vision: ports.Vision,
			Registry: s.registry, Speech: conversations, Recorder: ports.Recorder, Tracer: ports.Tracer, Log: ports.Log})
	s.Admission = admission.New(admission.Config{Approve: cfg.Approve, Offer: cfg.Offer}, admission.Ports{Records: ports.Records, Registry: s.registry,
		Hub: s.Hub, Directory: ports.Directory, Publisher: ports.Publisher, Audit: s, Log: ports.Log})
	s.Dispatcher = dispatch.New(dispatch.Config{Node: cfg.Node, Routed: cfg.IsNodeAlive != nil}, dispatch.Ports{Records: ports.Records, Registry: s.registry, Hub: s.Hub,
		Admission: s, Router: ports.Router, Vision: ports.Vision, Audit: ports.Audit, Recorder: ports.Recorder, Tasks: s.tasks, Log: ports.Log})
	s.stats = Stats{conversations.Stats(), s.Hub.Stats(), s.Dispatcher.Stats()}
	return s
}

// Registry returns the registry of the fleet's devices. Call its Start after this node
// receives the messages of other nodes.
func (s *Service) Registry() *registry.Registry { return s.registry }

// Client returns the hash that stands for a Client-Id wherever clients are shown; empty for
// an empty one.
func (s *Service) Client(clientID string) string { return s.registry.Client(clientID) }

// Stats returns the counters.
func (s *Service) Stats() *Stats { return &s.stats }

// Close ends every session with CloseDraining and waits for the core's goroutines. Later
// sessions are refused.
func (s *Service) Close() {
	s.Hub.Close()
	s.tasks.Wait()
	s.registry.Close()
}
