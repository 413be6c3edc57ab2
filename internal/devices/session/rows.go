package session

import (
	"context"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
)

// evictOutdated ends what the device has here if its credentials are not valid any
// more, without waiting: a connection may be stuck for seconds.
func (s *Hub) evictOutdated(e *entry) {
	x := e.session.Load()
	is := s.registry.Standing(e.id, "")
	if x != nil && s.outdated(x) || !is.Known && s.registry.Ready() || is.Revoked {
		s.run(e.evict) // not while the node stops, which ends the session as well
	}
}

// outdated tells whether the session came in with credentials that are not valid
// any more.
func (s *Hub) outdated(x *Session) bool {
	return x.who.Verified && !s.Accepts(x.who.Device, x.who.Generation)
}

// merge takes over what the database holds of a device that this node has to do
// with.
func (s *Hub) merge(e *entry, row devices.Row) {
	d, p := row.Device, row.Presence
	d.Board, d.Firmware, d.ELF = s.strings.get(d.Board), s.strings.get(d.Firmware), s.strings.get(d.ELF)
	d.Chip, d.Language = s.strings.get(d.Chip), s.strings.get(d.Language)
	d.ID = e.id
	e.mu.Lock()
	defer e.mu.Unlock()
	before := e.device.Load()
	if before.ClientID == d.ClientID {
		d.ClientID = before.ClientID // one copy, as far as another can be spared
	}
	if before.CheckedAt.After(d.CheckedAt) { // reported here, and on its way into the database
		d.Board, d.Firmware, d.ELF, d.Chip = before.Board, before.Firmware, before.ELF, before.Chip
		d.Language, d.Serial, d.ActivateV2, d.CheckedAt = before.Language, before.Serial, before.ActivateV2, before.CheckedAt
	}
	e.device.Store(&d)
	e.lastEpoch = max(e.lastEpoch, p.Epoch)
	e.confirmed = max(e.confirmed, p.Generation)
	if e.isKnown() {
		return
	}
	if e.catalog == (devices.Hash{}) && !e.isWithoutMCP() {
		e.catalog, e.partial = p.Catalog, p.Partial
		if !d.CheckedAt.After(p.LastSeen) { // else its firmware may have changed since it was listed
			e.listedFW = d.Firmware
		}
	}
	close(*e.row.Swap(nil))
}

// isWithoutMCP tells whether the device has said, on its connection, that it has no
// tools.
func (e *entry) isWithoutMCP() bool {
	x := e.session.Load()
	return x != nil && x.isWithoutMCP()
}

// rowRead does for a session what had to wait for the device's row.
func (x *Session) rowRead() {
	s, e := x.svc, x.entry
	if s.outdated(x) { // the device has connected elsewhere with newer credentials since
		e.evict()
		return
	}
	x.showKnown()
	x.reportInitialized()
	x.record()
}

// showKnown shows the tools that the device had before, until they are verified.
func (x *Session) showKnown() {
	s, e := x.svc, x.entry
	e.mu.Lock()
	hash := e.catalog
	e.mu.Unlock()
	if hash != (devices.Hash{}) && s.catalogs.Get(hash) == nil {
		ctx, cancel := context.WithTimeout(s.tasks.Context(), LookupTimeout)
		defer cancel()
		if text, err := s.ports.Catalogs.Catalog(ctx, hash); err == nil {
			if _, _, err := s.intern(text.Tools); err != nil {
				s.log.Debug("the tools that the device had are not shown", "device", e.id, "error", err)
			}
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.catalog == nil && x.catalogState == devices.CatalogUnknown || x.catalogState == devices.CatalogError {
		x.startCatalog(e, s.catalogs)
	}
}

// AwaitRow waits until what the database holds of the session's device is known,
// at most registry.RowLimit.
func (x *Session) AwaitRow(ctx context.Context) error {
	row := x.entry.row.Load()
	if row == nil {
		return nil
	}
	timer := time.NewTimer(registry.RowLimit)
	defer timer.Stop()
	select {
	case <-*row:
		return nil
	case <-ctx.Done():
	case <-timer.C:
	}
	return &devices.Error{Code: devices.CodeUnavailable, Part: "database", Detail: "the device's labels, which a key or rule asks for, cannot be read from the database now; try again"}
}

// Bounds of what is kept of devices that have no session here any more.
const (
	// idleLife is how long an entry is kept at least: whether the device fights for
	// its id, and how often it comes, has to be known over its connections.
	idleLife = 2 * time.Minute
	// maxIdle bounds them; above it those idle for longest go first.
	maxIdle = 100_000
)

// expireIdle removes an entry that nobody needs any more. full says that there are
// too many of them.
func (s *Hub) expireIdle(e *entry, now time.Time, full bool) {
	unused := func() bool {
		if e.session.Load() != nil || e.conversation.Load() != nil {
			e.idleSince = 0
			return false
		}
		if e.idleSince == 0 {
			e.idleSince = now.UnixNano()
		}
		idle := now.Sub(time.Unix(0, e.idleSince))
		return idle >= idleLife && (full || !e.takeovers.Refuses(now.UnixNano()) && e.recorded.Level(now, recordRate) == 0)
	}
	e.mu.Lock()
	due := unused()
	e.mu.Unlock()
	if due {
		s.table.remove(e, unused)
	}
}
