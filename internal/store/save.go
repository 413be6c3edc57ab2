package store

import (
	"fleetd/internal/devices"
	"fleetd/internal/store/database"
)

// SaveFacts queues what a device reported at an OTA check. Facts of an unknown device are
// ignored.
func (s *Store) SaveFacts(f devices.Check) {
	if s.acceptable(f.Device, "devices") {
		s.queue.putFacts(f)
	}
}

// SavePresence queues the row; it is written only if (Epoch, Seq) is above the stored pair and
// the device is known.
func (s *Store) SavePresence(p devices.Presence) {
	if s.acceptable(p.Device, "presence") {
		s.queue.putPresence(p)
	}
}

// SaveCatalog queues a history entry with the text of its catalog; committed may be nil, and is
// not called for an entry that the database refused.
func (s *Store) SaveCatalog(e devices.HistoryEntry, text devices.CatalogText, committed func()) (queued bool) {
	return s.acceptable(e.Device, "catalog_history") && s.queue.putHistory(historyRow{HistoryEntry: e, text: text, committed: committed})
}

// KeepCatalog marks a list as used, and writes it again if it was deleted meanwhile, about once
// per keepEvery however often it is called.
func (s *Store) KeepCatalog(text devices.CatalogText) {
	if text.Tools != nil && !s.kept.isFresh(text.Hash, s.now()) {
		s.queue.putList(text)
	}
}

// acceptable reports whether both databases accept an id unchanged. ParseID creates only these
// ids: another one is an internal error (bug), and must not affect other rows.
func (s *Store) acceptable(id devices.ID, table string) bool {
	if id != "" && database.IsText(string(id)) {
		return true
	}
	s.stats.BadRows.Add(1)
	s.log.Error("internal error (bug): a row has an invalid device id; it is dropped", "table", table, "device", id)
	return false
}
