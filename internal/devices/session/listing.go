package session

import (
	"context"
	"errors"
	"fmt"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/mcpclient"
)

// Limits of what one device may add to the database: recordBurst bytes at once, and as
// much again per day. A list counts with its bytes if it is new to this node, and each
// history entry with recordCost.
const (
	recordBurst = 4 << 20
	recordRate  = float32(recordBurst) / (24 * 60 * 60) // bytes per second
	recordCost  = 16 << 10
)

// onList handles a new list: it becomes the session's catalog, the device's list in the
// database, and, if it differs from the previous one, a history entry and an event after
// the commit of that entry. A list beyond the device's limit stays in memory until a later
// listing is within it.
func (x *Session) onList(list mcpclient.ToolList) error {
	s, e := x.svc, x.entry
	cat, isNew, err := s.intern(list.JSON)
	if errors.Is(err, catalog.ErrNoRoom) {
		return err
	}
	if err != nil {
		return fmt.Errorf("%w: %w", mcpclient.ErrMalformed, err)
	}
	if isNew {
		s.stats.CatalogNew.Add(1)
	} else {
		s.stats.CatalogHits.Add(1)
	}
	x.mu.Lock()
	x.catalog, x.catalogState, x.partial = cat, devices.CatalogReady, list.Partial
	x.attempts = 0
	x.unrecorded, x.unrecordedNew = true, isNew
	x.setMCPLocked(devices.MCPReady, devices.Clip(list.Reason))
	presence := x.presenceLocked(x.closed == "")
	x.handshakeEndedLocked()
	first := !x.toolsRead
	x.toolsRead = true
	firmware := x.reported.Value().Firmware // the list is read after it was reported
	x.mu.Unlock()
	s.ports.Records.SavePresence(presence)
	if first {
		x.record(devices.Step{Kind: devices.StepConnected, Text: firmware, Took: time.Since(x.connected), Generation: x.generation})
		s.observers.Each(func(l Lifecycle) { l.Ready(e.id, x.id) })
	}
	e.mu.Lock()
	known := e.isKnown()
	if !known { // the list is recorded once the device's previous list is known
		e.unrecorded = x
	}
	e.mu.Unlock()
	if known {
		x.recordList()
	}
	return nil
}

// recordList records the session's list, unless that was done already: as the device's list
// in the database, and, if it differs from the previous one, as a history entry and an
// event after the commit of that entry.
func (x *Session) recordList() {
	s, e := x.svc, x.entry
	x.mu.Lock()
	cat, partial, isNew, due := x.catalog, x.partial, x.unrecordedNew, x.unrecorded
	x.unrecorded = false
	x.mu.Unlock()
	if !due {
		return
	}
	x.reportInitialized() // the entry contains the firmware; the row may have arrived since it was reported
	cost := recordCost
	if isNew {
		cost += len(cat.JSON)
	}
	device := e.stored.Load().facts.Value()
	if !partial {
		s.catalogs.SetForELF(device.ELF, cat)
	}
	x.loadLastListing()
	before := x.listBefore(cat.Hash)
	e.mu.Lock()
	if x.isWithoutMCP() { // a hello reported so meanwhile
		e.mu.Unlock()
		return
	}
	changed := e.catalog != cat.Hash || e.partial != partial || e.listedFW == notRecorded
	enter := changed || e.listedFW != device.Firmware
	over := enter && !e.recordBucket.AllowN(time.Now(), cost, recordRate, recordBurst)
	e.catalog, e.partial, e.listedFW = cat.Hash, partial, device.Firmware
	if over {
		e.listedFW = notRecorded
	}
	e.mu.Unlock()

	switch {
	case over:
		s.stats.Unrecorded.Add(1)
		s.log.Warn("the device changes its tools too often; this list is not recorded", "device", e.id, "catalog", cat.Hash)
		return
	case !enter:
		x.mu.Lock()
		x.setStoredLocked(cat.Hash, partial)
		presence := x.presenceLocked(x.closed == "")
		x.mu.Unlock()
		s.ports.Records.SavePresence(presence)
		s.ports.Catalogs.KeepCatalog(cat.Text(clock.Now()))
		return
	}
	now := time.Now()
	x.mu.Lock()
	x.seq++
	epoch, seq := x.epoch, x.seq
	x.mu.Unlock()
	entry := devices.HistoryEntry{Device: e.id, Epoch: epoch, Seq: seq, Catalog: cat.Hash, Firmware: device.Firmware,
		ELF: device.ELF, Partial: partial, At: now.UTC()}
	// The function that waits for the commit keeps neither list in memory.
	hash, fields := cat.Hash, []byte(nil)
	if changed {
		fields = catalog.EventFields(before, cat, partial)
	}
	if !s.ports.Catalogs.SaveCatalog(entry, cat.Text(now), func() { x.onListStored(hash, partial, fields) }) {
		e.mu.Lock()
		if e.catalog == hash { // else a later listing has its own entry
			e.listedFW = notRecorded
		}
		e.mu.Unlock()
	}
}

// notRecorded takes the place of the last entry's firmware if that entry was not made, so
// that the next listing makes one. It equals no version.
const notRecorded = "\x00"

// loadLastListing loads what another node listed since this one did, so that a return to
// an older list gets an entry, and a list that both nodes read does not.
func (x *Session) loadLastListing() {
	e := x.entry
	e.mu.Lock()
	elsewhere := e.heldElsewhere
	e.mu.Unlock()
	if !elsewhere {
		return
	}
	ctx, cancel := context.WithTimeout(x.svc.tasks.Context(), LookupTimeout)
	defer cancel()
	last, err := x.svc.ports.Catalogs.History(ctx, e.id, 0, 0, 1)
	if err != nil || len(last) == 0 {
		return // the state of this node is used
	}
	e.mu.Lock()
	e.heldElsewhere = false
	e.catalog, e.partial, e.listedFW = last[0].Catalog, last[0].Partial, last[0].Firmware
	e.mu.Unlock()
	x.mu.Lock()
	defer x.mu.Unlock()
	x.setStoredLocked(last[0].Catalog, last[0].Partial) // its entry is stored
}

// listBefore returns the device's previous list, if it differs; from the database if it is
// not in memory.
func (x *Session) listBefore(now devices.Hash) *catalog.Catalog {
	x.entry.mu.Lock()
	before := x.entry.catalog
	x.entry.mu.Unlock()
	if before == now || before == (devices.Hash{}) {
		return x.svc.catalogs.Get(before)
	}
	ctx, cancel := context.WithTimeout(x.svc.tasks.Context(), LookupTimeout)
	defer cancel()
	cat, err := x.svc.Catalog(ctx, before)
	if err != nil {
		return nil // the event then lists all tools as new
	}
	return cat
}

// onListStored runs after the list and its history entry were committed; fields are those
// of the event, nil if the list did not change. Only now may the device's row contain the
// list: otherwise a node killed between the two writes would assume that the entry exists.
func (x *Session) onListStored(catalog devices.Hash, partial bool, fields []byte) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.setStoredLocked(catalog, partial)
	x.svc.ports.Records.SavePresence(x.presenceLocked(x.closed == ""))
	if fields != nil {
		x.publishLocked(devices.EventCatalog, "", fields, true)
	}
}

// setStoredLocked records which list is stored as the device's, unless a hello reported
// meanwhile that it has no MCP server.
func (x *Session) setStoredLocked(catalog devices.Hash, partial bool) {
	if x.features != devices.FeaturesNone {
		x.storedList, x.storedPartial = catalog, partial
	}
}
