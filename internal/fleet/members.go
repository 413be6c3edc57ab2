package fleet

import (
	"context"
	"encoding/json"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
)

// observer is the Service as the registry tells it of changes. Its methods are
// called with the registry's lock held: what takes time they leave to tasks.
type observer Service

// Changed takes a change that has come into force.
func (o *observer) Changed(c devices.Change) {
	s := (*Service)(o)
	if c.Device == "" {
		s.changedFleet(c)
		return
	}
	if c.Aspect == devices.AspectAdmission || c.Aspect == devices.AspectImport || c.Aspect == devices.AspectClient {
		s.pending.dropAdmitted(c.Device, s.registry)
	}
	e := s.hub.get(c.Device)
	if e == nil {
		return
	}
	if e.isKnown() {
		e.update(func(d *devices.Device) { d.Fold(c) })
	}
	s.evictOutdated(e)
}

// Replaced looks at everything again: any of it may differ.
func (o *observer) Replaced(snapshot registry.Snapshot) {
	s := (*Service)(o)
	now := time.Now()
	for _, k := range snapshot.Keys {
		s.learnKey(k)
	}
	for _, k := range s.doors.keys.Keys() {
		if _, still := findKey(snapshot.Keys, k.ID); !still {
			k.Revoked = now // of a history that was lost
			s.learnKey(k)
		}
	}
	s.replacePolicy(snapshot.Policy)
	s.hub.each(func(e *entry) {
		s.evictOutdated(e)
		if e.isKnown() {
			s.registry.Request(e.id)
		}
	})
	for _, p := range s.registry.Revocations() {
		o.Revoked(p)
	}
}

func findKey(keys []access.Key, id string) (access.Key, bool) {
	for _, k := range keys {
		if k.ID == id {
			return k, true
		}
	}
	return access.Key{}, false
}

// Revoked takes a revocation that is in force and not in the log yet.
func (o *observer) Revoked(p registry.Revocation) {
	s := (*Service)(o)
	if p.Key != "" {
		if k, ok := s.doors.keys.Find(p.Key, time.Now()); ok && k.Revoked.IsZero() {
			k.Revoked = p.At
			s.learnKey(k)
		}
		return
	}
	if e := s.hub.get(p.Device); e != nil {
		s.evictOutdated(e)
	}
}

func (s *Service) changedFleet(c devices.Change) {
	switch c.Aspect {
	case devices.AspectKey:
		var k access.Key
		if json.Unmarshal(c.Value, &k) == nil { // else the registry has logged it
			s.learnKey(k)
			for _, p := range s.registry.Revocations() {
				if p.Key == k.ID { // its end was heard of before
					(*observer)(s).Revoked(p)
				}
			}
		}
	case devices.AspectPolicy:
		var p access.Policy
		if json.Unmarshal(c.Value, &p) == nil {
			s.learnPolicy(p)
		}
	case devices.AspectRotation: // what it ends, it ends after its grace: see sweep
	}
}

// evictOutdated ends what the device has here if its credentials are not valid any
// more, without waiting: a connection may be stuck for seconds.
func (s *Service) evictOutdated(e *entry) {
	x := e.session.Load()
	is := s.registry.Standing(e.id, "")
	if x != nil && s.outdated(x) || !is.Known && s.registry.Ready() || is.Revoked {
		s.run(e.evict) // not while the node stops, which ends the session as well
	}
}

// outdated tells whether the session came in with credentials that are not valid
// any more.
func (s *Service) outdated(x *Session) bool {
	return x.who.Verified && !s.Accepts(x.who.Device, x.who.Generation)
}

// Row takes the row of a device that was asked for.
func (o *observer) Row(row devices.Row) {
	s := (*Service)(o)
	e := s.hub.get(row.Device.ID)
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

// merge takes over what the database holds of a device that this node has to do
// with.
func (s *Service) merge(e *entry, row devices.Row) {
	d, p := row.Device, row.Presence
	d.Board, d.Firmware, d.ELF = s.strings.get(d.Board), s.strings.get(d.Firmware), s.strings.get(d.ELF)
	e.mu.Lock()
	defer e.mu.Unlock()
	before := e.device.Load()
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
	close(e.row)
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
		ctx, cancel := context.WithTimeout(s.ctx, lookupTimeout)
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

// awaitRow waits until what the database holds of the session's device is known,
// at most registry.RowLimit.
func (x *Session) awaitRow(ctx context.Context) error {
	if x.entry.isKnown() {
		return nil
	}
	timer := time.NewTimer(registry.RowLimit)
	defer timer.Stop()
	select {
	case <-x.entry.row:
		return nil
	case <-ctx.Done():
	case <-timer.C:
	}
	return &devices.Error{Code: devices.CodeUnavailable, Part: "database", Detail: "the device's labels, which a key or rule asks for, cannot be read from the database now; try again"}
}

// labelsOf are the labels of a device, wherever it is: from memory, else from the
// database, for which it waits at most registry.RowLimit.
// known is false for a device that is not known.
func (s *Service) labelsOf(ctx context.Context, id devices.ID) (labels map[string]string, known bool, err error) {
	if e := s.hub.get(id); e != nil && e.isKnown() {
		return e.device.Load().Labels, true, nil
	}
	m, err := s.registry.Decided(ctx, id)
	if err != nil && devices.AsError(err).Code == devices.CodeDeviceUnknown {
		return nil, false, nil
	}
	return m.Labels, err == nil, err
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
func (s *Service) expireIdle(e *entry, now time.Time, full bool) {
	unused := func() bool {
		if e.session.Load() != nil || e.conversation.Load() != nil {
			e.idleSince = 0
			return false
		}
		if e.idleSince == 0 {
			e.idleSince = now.UnixNano()
		}
		idle := now.Sub(time.Unix(0, e.idleSince))
		return idle >= idleLife && (full || !e.takeovers.refuses(now.UnixNano()) && e.recorded.Level(now, recordRate) == 0)
	}
	e.mu.Lock()
	due := unused()
	e.mu.Unlock()
	if due {
		s.hub.remove(e, unused)
	}
}
