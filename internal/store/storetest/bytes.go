package storetest

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"fleetd/internal/devices"
	"fleetd/internal/store"
)

// bigList is a tool list of about 1 MB that no other n has.
func bigList(n int) devices.CatalogText {
	return catalogOf(fmt.Sprintf(`[{"name":"tool-%d","description":"`, n) + strings.Repeat("x", 1_000_000) + `"}]`)
}

// testQueueBytes: 100 lists of 1 MB, as many members that change their tools
// send at once, take no more memory than the queue may have, and no transaction
// holds more than a group may; what was accepted is stored, the rest is counted.
func testQueueBytes(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	settle(t, s)
	release := holdWriter(t, s)
	const lists = 100
	accepted := map[int]bool{}
	for n := range lists {
		text := bigList(n)
		if s.SaveCatalog(devices.HistoryEntry{Device: mac(n), Epoch: 1, Catalog: text.Hash}, text, nil) {
			accepted[n] = true
		}
		if waiting := s.Stats().QueueBytes.Load(); waiting > store.MaxQueueBytes {
			t.Fatalf("%d bytes wait after %d lists, want at most %d", waiting, n+1, store.MaxQueueBytes)
		}
	}
	if n := len(accepted); n < 60 || n > 70 {
		t.Errorf("%d lists of 1 MB were accepted, want about %d", n, store.MaxQueueBytes/1_000_000)
	}
	if dropped := s.Stats().DroppedBytes.Load(); dropped != int64(lists-len(accepted)) {
		t.Errorf("%d drops counted, want %d", dropped, lists-len(accepted))
	}
	for n := range lists {
		s.KeepCatalog(bigList(lists + n))
	}
	if waiting := s.Stats().QueueBytes.Load(); waiting > store.MaxQueueBytes {
		t.Errorf("%d bytes wait with lists to be noted as used", waiting)
	}
	groups := s.Stats().Groups.Load()
	release()
	settle(t, s)
	if least := int64(len(accepted)) * 1_000_000 / store.GroupBytes; s.Stats().Groups.Load()-groups < least {
		t.Errorf("%d groups, want at least %d", s.Stats().Groups.Load()-groups, least)
	}
	if waiting := s.Stats().QueueBytes.Load(); waiting != 0 {
		t.Errorf("%d bytes wait in an empty queue", waiting)
	}
	for n := range lists {
		if stored := len(history(t, s, mac(n))) == 1; stored != accepted[n] {
			t.Errorf("list %d: stored is %v, accepted was %v", n, stored, accepted[n])
		}
	}
}

// testSharedList: a list that a whole fleet has waits once, however many of its
// entries do.
func testSharedList(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	settle(t, s)
	release := holdWriter(t, s)
	const fleet = 2000
	text := bigList(0)
	for n := range fleet {
		if n%100 == 0 { // a copy of it, as when it was read anew
			text.Tools = slices.Clone(text.Tools)
		}
		if !s.SaveCatalog(devices.HistoryEntry{Device: mac(n), Epoch: 1, Catalog: text.Hash}, text, nil) {
			t.Fatalf("entry %d of one list was dropped", n)
		}
	}
	if waiting := s.Stats().QueueBytes.Load(); waiting > 4_000_000 {
		t.Errorf("%d bytes wait for one list of 1 MB", waiting)
	}
	release()
	settle(t, s)
	if n := db.Count(t, `SELECT count(*) FROM catalog_history WHERE device <> 'zz-hold'`); n != fleet {
		t.Errorf("%d entries stored, want %d", n, fleet)
	}
}
