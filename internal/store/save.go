package store

import (
	"fleetd/internal/devices"
	"fleetd/internal/store/database"
)

// SaveFacts queues what a device reported at an OTA check. That of a device
// which is not there, any more or yet, changes nothing.
func (s *Store) SaveFacts(f devices.Facts) {
	if s.acceptable(f.Device, "devices") {
		s.queue.putFacts(f)
	}
}

// SavePresence queues the row; it is written only if (Epoch, Seq) is above the
// stored pair, and the device is there.
func (s *Store) SavePresence(p devices.Presence) {
	if s.acceptable(p.Device, "presence") {
		s.queue.putPresence(p)
	}
}

// SaveCatalog queues a history entry with the text of its catalog; committed
// may be nil. Beyond the port's promise, committed is not called for an entry
// that the database refused either.
func (s *Store) SaveCatalog(e devices.HistoryEntry, text devices.CatalogText, committed func()) (queued bool) {
	return s.acceptable(e.Device, "catalog_history") && s.queue.putHistory(historyRow{HistoryEntry: e, text: text, committed: committed})
}

// KeepCatalog has a list noted as used, and written again if it was deleted
// meanwhile, about once in keepEvery however often it is called.
func (s *Store) KeepCatalog(text devices.CatalogText) {
	if text.Tools != nil && !s.kept.isFresh(text.Hash, s.now()) {
		s.queue.putList(text)
	}
}

// acceptable refuses an id that one of the databases would refuse or change.
// ParseID makes no such ids: it is an internal error (bug), and must not stop others.
func (s *Store) acceptable(id devices.ID, table string) bool {
	if id != "" && database.IsText(string(id)) {
		return true
	}
	s.stats.BadRows.Add(1)
	s.log.Error("a row has no usable device id; it is dropped", "table", table, "device", id)
	return false
}
