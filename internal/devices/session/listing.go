package session

import (
	"context"
	"errors"
	"fmt"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/mcpclient"
)

// What one device may add to the database: recordBurst bytes at once, and as
// much again in a day. A list counts with its bytes if this node has not met
// it, and each entry of the history with recordCost.
const (
	recordBurst = 4 << 20
	recordRate  = float32(recordBurst) / (24 * 60 * 60) // bytes per second
	recordCost  = 16 << 10
)

// listed takes a fresh list: it becomes the session's catalog, the device's
// record, and, if it differs from before, a history entry and an event once
// that entry is committed. What is over the device's share of the database
// stays in memory until the next listing finds room.
func (x *Session) listed(list mcpclient.ToolList) error {
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
	first := !x.readied
	x.readied = true
	x.mu.Unlock()
	s.ports.Records.SavePresence(presence)
	if first {
		s.tell(func(l Lifecycle) { l.Ready(e.id, x.id) })
	}
	e.mu.Lock()
	known := e.isKnown()
	if !known { // the list is recorded once it is known what the device had before
		e.listedBy = x
	}
	e.mu.Unlock()
	if known {
		x.record()
	}
	return nil
}

// record enters the session's list into the records, if that has not been done:
// it becomes the device's record, and, if it differs from before, a history entry
// and an event once that entry is committed.
func (x *Session) record() {
	s, e := x.svc, x.entry
	x.mu.Lock()
	cat, partial, isNew, due := x.catalog, x.partial, x.unrecordedNew, x.unrecorded
	x.unrecorded = false
	x.mu.Unlock()
	if !due {
		return
	}
	x.reportInitialized() // the entry names the firmware; the row may have come since it was reported
	cost := recordCost
	if isNew {
		cost += len(cat.JSON)
	}
	device := e.device.Load()
	if !partial {
		s.catalogs.Learn(device.ELF, cat)
	}
	x.catchUp()
	before := x.listBefore(cat.Hash)
	e.mu.Lock()
	if x.isWithoutMCP() { // a hello said so meanwhile
		e.mu.Unlock()
		return
	}
	changed := e.catalog != cat.Hash || e.partial != partial || e.listedFW == notRecorded
	enter := changed || e.listedFW != device.Firmware
	over := enter && !e.recorded.Spend(time.Now(), cost, recordRate, recordBurst)
	e.catalog, e.partial, e.listedFW = cat.Hash, partial, device.Firmware
	if over {
		e.listedFW = notRecorded
	}
	e.mu.Unlock()

	switch {
	case over:
		s.stats.Unrecorded.Add(1)
		s.log.Warn("the device changes its tools too often; this list is not stored", "device", e.id, "catalog", cat.Hash)
		return
	case !enter:
		x.mu.Lock()
		x.setOwnLocked(cat.Hash, partial)
		presence := x.presenceLocked(x.closed == "")
		x.mu.Unlock()
		s.ports.Records.SavePresence(presence)
		s.ports.Catalogs.KeepCatalog(cat.Text(time.Now()))
		return
	}
	now := time.Now()
	x.mu.Lock()
	x.seq++
	epoch, seq := x.epoch, x.seq
	x.mu.Unlock()
	entry := devices.HistoryEntry{Device: e.id, Epoch: epoch, Seq: seq, Catalog: cat.Hash, Firmware: device.Firmware,
		ELF: device.ELF, Partial: partial, At: now.UTC()}
	// What waits for the commit holds on to neither list.
	hash, fields := cat.Hash, []byte(nil)
	if changed {
		fields = catalog.EventFields(before, cat, partial)
	}
	if !s.ports.Catalogs.SaveCatalog(entry, cat.Text(now), func() { x.stored(hash, partial, fields) }) {
		e.mu.Lock()
		if e.catalog == hash { // else a later listing has its own entry
			e.listedFW = notRecorded
		}
		e.mu.Unlock()
	}
}

// notRecorded stands where the firmware of the last entry does if that entry
// was not made, so that the next listing makes one. No version is like it.
const notRecorded = "\x00"

// catchUp learns what another node listed since this one did, so that a return
// to an older list is entered, too, and a list that both saw is not.
func (x *Session) catchUp() {
	e := x.entry
	e.mu.Lock()
	elsewhere := e.elsewhere
	e.mu.Unlock()
	if !elsewhere {
		return
	}
	ctx, cancel := context.WithTimeout(x.svc.tasks.Context(), LookupTimeout)
	defer cancel()
	last, err := x.svc.ports.Catalogs.History(ctx, e.id, 0, 0, 1)
	if err != nil || len(last) == 0 {
		return // what this node knows has to do
	}
	e.mu.Lock()
	e.elsewhere = false
	e.catalog, e.partial, e.listedFW = last[0].Catalog, last[0].Partial, last[0].Firmware
	e.mu.Unlock()
	x.mu.Lock()
	defer x.mu.Unlock()
	x.setOwnLocked(last[0].Catalog, last[0].Partial) // its entry is stored
}

// listBefore is the list that the device had, if it is not this one: from the
// database, where memory had no room for it.
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
		return nil // the event then says that all tools are new
	}
	return cat
}

// stored runs when the list and its history entry are in the database; fields
// are those of the event, nil if the list is the one from before. Only
// now may the device's row name the list: a node killed between the two would
// otherwise believe at its next start that the entry exists.
func (x *Session) stored(catalog devices.Hash, partial bool, fields []byte) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.setOwnLocked(catalog, partial)
	x.svc.ports.Records.SavePresence(x.presenceLocked(x.closed == ""))
	if fields != nil {
		x.publishLocked(devices.EventCatalog, "", fields, true)
	}
}

// setOwnLocked notes which list is stored as the device's, unless a hello said
// meanwhile that it has no MCP.
func (x *Session) setOwnLocked(catalog devices.Hash, partial bool) {
	if x.features != devices.FeaturesNone {
		x.own, x.ownPartial = catalog, partial
	}
}
