package session

import (
	"context"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
)

// evictOutdated ends the device's session and conversation if its credentials are no longer
// valid. It does not wait, since a connection may block for seconds.
func (s *Hub) evictOutdated(e *entry) {
	x := e.session.Load()
	status := s.registry.Status(e.id, "")
	if x != nil && s.outdated(x) || !status.Known && s.registry.Ready() || status.Revoked {
		s.run(func() { e.evict(x) }) // not run if the node is stopping, which ends the session as well
	}
}

// outdated reports whether the session's credentials are no longer valid, another client is admitted in place of
// theirs, or its client is refused.
func (s *Hub) outdated(x *Session) bool {
	return x.verified && !s.Accepts(x.entry.id, x.generation) || x.ofClient && s.isReplaced(x.entry.id, x.clientID) || s.registry.Refused(x.entry.id).Has(x.clientID)
}

// merge combines a row of the database with the state of its entry.
func (s *Hub) merge(e *entry, row devices.Row) {
	d, p := row.Device, row.Presence
	e.mu.Lock()
	defer e.mu.Unlock()
	before := e.device()
	if before.ClientID == d.ClientID {
		d.ClientID = before.ClientID // keep only one copy of the string
	}
	if at := before.CheckedAt; !at.IsZero() && (at.After(d.CheckedAt) || d.CheckedAt.After(clock.Now())) { // reported here, and not in the database yet
		d.Facts = before.Over(d.Facts)
	}
	e.store(&d)
	e.lastEpoch = max(e.lastEpoch, p.Epoch)
	e.confirmed = max(e.confirmed, p.Generation)
	if e.isKnown() {
		return
	}
	if e.catalog == (devices.Hash{}) && !e.isWithoutMCP() {
		e.catalog, e.partial = p.Catalog, p.Partial
		if !d.CheckedAt.After(p.LastSeen) { // else its firmware may have changed since the listing
			e.listedFW = d.Firmware
		}
	}
	close(*e.row.Swap(nil))
}

// isWithoutMCP reports whether the device has reported, on its connection, that it has no
// MCP server.
func (e *entry) isWithoutMCP() bool {
	x := e.session.Load()
	return x != nil && x.isWithoutMCP()
}

// onRow continues what waited for the device's row.
func (x *Session) onRow() {
	s, e := x.svc, x.entry
	if s.outdated(x) { // the device has connected to another node with newer credentials
		e.evict(x)
		return
	}
	x.showStoredTools()
	x.reportInitialized()
	x.recordList()
}

// showStoredTools shows the device's previous tools until they are verified.
func (x *Session) showStoredTools() {
	s, e := x.svc, x.entry
	e.mu.Lock()
	hash := e.catalog
	e.mu.Unlock()
	if hash != (devices.Hash{}) && s.catalogs.Get(hash) == nil {
		ctx, cancel := context.WithTimeout(s.tasks.Context(), LookupTimeout)
		defer cancel()
		if text, err := s.ports.Catalogs.Catalog(ctx, hash); err == nil {
			if _, _, err := s.intern(text.Tools); err != nil {
				s.log.Debug("the stored tools of the device cannot be shown", "device", e.id, "error", err)
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

// AwaitRow waits until the device's row was read, at most registry.RowLimit.
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
	return &devices.Error{Code: devices.CodeUnavailable, Part: "database", Detail: "the device's labels, which a key or rule needs, cannot be read from the database now; try again"}
}

// Limits of entries without a session.
const (
	// idleLifetime is how long an entry is kept at least: takeovers and reconnects are
	// counted over several connections.
	idleLifetime = 2 * time.Minute
	// maxIdle is how many entries may exist before all idle ones are removed.
	maxIdle = 100_000
)

// expireIdle removes an entry that is no longer needed. full means that there are too many.
func (s *Hub) expireIdle(e *entry, now time.Time, full bool) {
	unused := func() bool {
		if e.session.Load() != nil || e.conversation.Load() != nil {
			e.idleSince = 0
			return false
		}
		if e.idleSince == 0 {
			e.idleSince = clock.Reading(now)
		}
		idle := time.Duration(clock.Reading(now) - e.idleSince)
		return idle >= idleLifetime && (full || !e.takeovers.Refuses(clock.Reading(now)) && e.recordBucket.Spent(now, recordRate) == 0)
	}
	e.mu.Lock()
	due := unused()
	e.mu.Unlock()
	if due {
		s.table.remove(e, unused)
	}
}
