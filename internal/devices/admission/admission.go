// Package admission lets devices in: OTA checks, spoken codes and their approval,
// proofs of hardware, revocation and the rotation of credentials. What is decided it
// has the registry write; who waits lives in its memory.
//
// Lock order: pendings.mu and disputes.mu are taken alone, and never held during I/O.
package admission

import (
	"context"
	"log/slog"
	"time"

	"fleetd/internal/audit"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
	"fleetd/internal/devices/session"
)

// Config is what admission needs to know of the node.
type Config struct {
	Approve bool // unknown devices wait for approval
	// Offer is the transport that the OTA reply offers where nobody chose another.
	Offer devices.Transport
}

// Ports are the ways out, and the parts below.
type Ports struct {
	Records   Finder
	Registry  *registry.Registry
	Hub       *session.Hub
	Directory session.Directory
	Publisher session.Publisher
	Record    func(audit.Entry) // what somebody did
	Log       *slog.Logger
}

// Finder reads one device, or fails with ErrNotFound.
type Finder interface {
	Find(ctx context.Context, id devices.ID) (devices.Row, error)
}

// Admission lets devices in. Its methods are safe for concurrent use.
type Admission struct {
	cfg      Config
	ports    Ports
	registry *registry.Registry
	hub      *session.Hub
	log      *slog.Logger
	pending  *pendings
	disputes disputes
}

// New returns an Admission.
func New(cfg Config, ports Ports) *Admission {
	return &Admission{cfg: cfg, ports: ports, registry: ports.Registry, hub: ports.Hub, log: ports.Log, pending: newPendings()}
}

// Changed takes a change of a device that has come into force.
func (a *Admission) Changed(c devices.Change) {
	if c.Aspect == devices.AspectAdmission || c.Aspect == devices.AspectImport || c.Aspect == devices.AspectClient {
		a.pending.dropAdmitted(c.Device, a.registry)
	}
}

// Waits tells whether a client of the device waits for approval.
func (a *Admission) Waits(id devices.ID) bool { return a.pending.waits(id, time.Now()) }

// Waiting is the client that asked last under an id, of those that wait; ok is
// false if none does.
func (a *Admission) Waiting(id devices.ID) (v devices.View, ok bool) {
	p := a.pending.clients(id)
	if len(p) == 0 {
		return devices.View{}, false
	}
	return a.pendingView(id, p[len(p)-1]), true
}

// AllWaiting are the devices under whose id a client waits.
func (a *Admission) AllWaiting(now time.Time) map[devices.ID]devices.View {
	all := a.pending.all(now)
	out := make(map[devices.ID]devices.View, len(all))
	for id, p := range all {
		out[id] = a.pendingView(id, p)
	}
	return out
}

// pendingView is a device that waits and never was a member.
func (a *Admission) pendingView(id devices.ID, p pending) devices.View {
	d := devices.Device{ID: id, Board: p.facts.Board, Firmware: p.facts.Firmware, ELF: p.facts.ELF, Chip: p.facts.Chip,
		Language: p.facts.Language, Serial: p.facts.Serial, ActivateV2: p.facts.ActivateV2, FirstSeen: p.facts.CheckedAt, CheckedAt: p.facts.CheckedAt}
	return devices.View{Device: d, Presence: devices.Presence{Device: id, LastSeen: p.facts.CheckedAt}, State: devices.StatePending,
		CatalogState: devices.CatalogUnknown, Pending: p.clientID}
}

// Learn takes another node's news: of what lives in memory alone. Nothing is
// written.
func (a *Admission) Learn(n devices.News) {
	if c := n.Spoken; c != nil {
		a.pending.learn(c, time.Now()) // its life is counted by our own clock
	}
	if n.Disputed != nil {
		a.dispute(n.Disputed.Device, time.Now())
	}
}
