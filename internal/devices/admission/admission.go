// Package admission decides which devices may join: OTA checks, activation codes and their
// approval, proofs of hardware, revocation and the rotation of credentials. The registry
// stores its decisions; pending clients are only in memory.
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

// Config configures an Admission.
type Config struct {
	Approve bool // unknown devices need approval
	// Offer is the transport that the OTA reply offers unless an operator chose one.
	Offer devices.Transport
}

// Ports are the interfaces and parts that an Admission uses.
type Ports struct {
	Records   Finder
	Registry  *registry.Registry
	Hub       *session.Hub
	Directory session.Directory
	Publisher session.Publisher
	Audit     audit.Auditor
	Log       *slog.Logger
}

// Finder reads one device, or returns ErrNotFound.
type Finder interface {
	Find(ctx context.Context, id devices.ID) (devices.Row, error)
}

// Admission admits devices. Its methods are safe for concurrent use.
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

// OnChange handles a change of a device that is now in force.
func (a *Admission) OnChange(c devices.Change) {
	switch c.Aspect {
	case devices.AspectAdmission, devices.AspectImport, devices.AspectClient:
		a.pending.dropAdmitted(c.Device, a.registry)
	case devices.AspectRefused:
		a.pending.dropRefused(c.Device, a.registry.Refused(c.Device))
	}
}

// IsPending reports whether a client of the device is pending approval.
func (a *Admission) IsPending(id devices.ID) bool { return a.pending.has(id, time.Now()) }

// Pending returns the device as its pending clients report it; ok is false if there are none.
func (a *Admission) Pending(id devices.ID) (v devices.View, ok bool) {
	p := a.pending.clients(id)
	if len(p) == 0 {
		return devices.View{}, false
	}
	return pendingView(id, p), true
}

// AllPending returns the devices with a pending client.
func (a *Admission) AllPending(now time.Time) map[devices.ID]devices.View {
	all := a.pending.all(now)
	out := make(map[devices.ID]devices.View, len(all))
	for id, p := range all {
		out[id] = pendingView(id, p)
	}
	return out
}

// pendingView returns the view of a pending device that was never a member: the facts are
// those of the client that checked in last.
func pendingView(id devices.ID, all []pending) devices.View {
	f := all[len(all)-1].facts
	d := devices.Device{ID: id, FirstSeen: f.CheckedAt, Facts: f}
	v := devices.View{Device: d, Presence: devices.Presence{Device: id, LastSeen: f.CheckedAt}, State: devices.StatePending, CatalogState: devices.CatalogUnknown}
	for _, p := range all {
		v.Pending = append(v.Pending, *p.news(id))
	}
	return v
}

// RepeatNews sends the other nodes again which clients got a code from this one: they may have missed it.
func (a *Admission) RepeatNews() {
	for id, waiting := range a.pending.all(time.Now()) {
		for i := range waiting {
			if !waiting[i].remote {
				a.ports.Directory.PublishNews(devices.News{Pending: waiting[i].news(id)})
			}
		}
	}
}

// OnNews handles another node's news. It only changes memory.
func (a *Admission) OnNews(n devices.News) {
	if c := n.Pending; c != nil && !a.registry.Refused(c.Device).Has(c.ClientID) {
		a.pending.addRemote(c, time.Now()) // the lifetime is measured by the clock of this node
	}
	if n.Dispute != nil {
		a.addDispute(n.Dispute.Device, time.Now())
	}
}
