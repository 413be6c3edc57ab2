package node

import (
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
	"fleetd/internal/store"
	"fleetd/internal/store/ledger"
	"fleetd/internal/store/storetest"
)

// The settings reach the database.
func TestPruneBySettings(t *testing.T) {
	dir := t.TempDir()
	s, err := store.Open(t.Context(), "sqlite", dir, quiet)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close(t.Context()) })
	const id devices.ID = "aa:bb:cc:dd:ee:ff"
	storetest.AddMember(t, s, devices.Device{ID: id})
	for n := range 5 { // four days ago to now
		s.SaveCatalog(devices.HistoryEntry{Device: id, Epoch: devices.Epoch(n + 1), At: time.Now().Add(time.Duration(n-4) * 24 * time.Hour)}, devices.CatalogText{}, nil)
	}
	devicetest.Eventually(t, "the history is saved", func() bool { return s.Stats().HistoryRows.Load() >= 5 })
	n := &node{cfg: load(t, map[string]string{"history-retention": "84h", "history-per-device": "3"}), store: s, mint: testMint(t), log: quiet}
	n.ledger = ledger.New(s, quiet)
	t.Cleanup(n.ledger.Close)
	n.service = devicetest.New().Service(t, fleet.Config{})
	n.pruneOnce(t.Context())
	if entries, err := s.History(t.Context(), id, 0, 0, 10); err != nil || len(entries) != 3 || s.Stats().PrunedHistory.Load() != 2 {
		t.Errorf("%d entries are left: %v", len(entries), err)
	}
}
