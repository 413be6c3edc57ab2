package storetest

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/store"
)

const day = 24 * time.Hour

// movedClock is a time that tests move.
type movedClock struct{ passed atomic.Int64 }

func (c *movedClock) now() time.Time          { return start.Add(time.Duration(c.passed.Load())) }
func (c *movedClock) advance(d time.Duration) { c.passed.Add(int64(d)) }

func prune(t *testing.T, s *store.Store, r store.Retention) store.Pruned {
	t.Helper()
	p, err := s.Prune(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func testRetention(t *testing.T, db Database) {
	var c movedClock
	s := openStore(t, db.URL, store.Clock(c.now))
	list := func(n int) devices.CatalogText { return catalogOf(fmt.Sprintf(`[{"name":"tool-%d"}]`, n)) }
	enter := func(id devices.ID, epoch, n int) {
		s.SaveCatalog(devices.HistoryEntry{Device: id, Epoch: devices.Epoch(epoch), Catalog: list(n).Hash, At: c.now()}, list(n), nil)
	}
	for _, id := range []devices.ID{"few", "many", "old", "gone"} {
		if id != "gone" {
			db.add(t, id)
		}
	}
	enter("old", 1, 1) // old alone had list 1, and 2 after it
	enter("gone", 1, 3)
	enter("few", 1, 4)
	for i := range 1300 { // more than one statement deletes
		enter("many", i+1, 5)
	}
	enter("old", 2, 2)
	s.KeepCatalog(list(6)) // nobody will ever name it
	s.SavePresence(devices.Presence{Device: "few", Epoch: 1, Catalog: list(7).Hash})
	s.KeepCatalog(list(7))
	settle(t, s)
	if n := db.Count(t, `SELECT count(*) FROM catalogs`); n != 7 {
		t.Fatalf("%d lists, want 7", n)
	}
	r := store.Retention{History: 30 * day, PerDevice: 100, Catalogs: 2 * day}

	if p := prune(t, s, r); p != (store.Pruned{History: 1200}) {
		t.Errorf("on the first day: %+v", p)
	}
	if all := history(t, s, "many"); len(all) != 100 || all[0].Epoch != 1300 || all[99].Epoch != 1201 {
		t.Errorf("%d entries of many are left", len(all))
	}
	c.advance(3 * day) // a day and more after gone's last entry; list 3 goes with it, and 6
	if p := prune(t, s, r); p != (store.Pruned{History: 1, Catalogs: 2}) {
		t.Errorf("on day 3: %+v", p)
	}
	c.advance(30 * day)
	if p := prune(t, s, r); p != (store.Pruned{History: 100, Catalogs: 1}) { // 99 of many, 1 of old; list 1
		t.Errorf("on day 33: %+v", p)
	}
	for _, id := range []devices.ID{"few", "many", "old"} {
		all := history(t, s, id)
		if len(all) != 1 {
			t.Fatalf("%d entries of %s are left, want the newest", len(all), id)
		}
		if _, err := s.Catalog(t.Context(), all[0].Catalog); err != nil {
			t.Errorf("%s: %v", id, err)
		}
	}
	if _, err := s.Catalog(t.Context(), list(7).Hash); err != nil {
		t.Errorf("a list that a presence row names: %v", err)
	}
	if got := s.Stats(); got.PrunedHistory.Load() != 1301 || got.PrunedCatalogs.Load() != 3 {
		t.Errorf("counted %d entries and %d lists", got.PrunedHistory.Load(), got.PrunedCatalogs.Load())
	}

	// A list that was deleted is written again, though this store has written
	// it before; with an entry, and without.
	enter("few", 2, 1)
	s.KeepCatalog(list(6))
	settle(t, s)
	for _, n := range []int{1, 6} {
		if got, err := s.Catalog(t.Context(), list(n).Hash); err != nil || string(got.Tools) != string(list(n).Tools) {
			t.Errorf("list %d is not there again: %v", n, err)
		}
	}
}

// One run examines the history of so many devices, and the next one goes on after them.
func testPruneSlices(t *testing.T, db Database) {
	var c movedClock
	s := openStore(t, db.URL, store.Clock(c.now))
	db.Exec(t, `INSERT INTO catalog_history (device, epoch, seq, catalog, firmware, elf_sha256, partial, at)
 WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i <= $1) SELECT 'm' || CAST(1000000 + i AS TEXT), 1, 1, '', '', '', FALSE, CAST($2 AS BIGINT) FROM n
 UNION ALL SELECT 'a', 1, 1, '', '', '', FALSE, 0 UNION ALL SELECT 'z', 1, 1, '', '', '', FALSE, 0`, store.PruneDevices, start.UnixMicro())
	r := store.Retention{History: day, PerDevice: 1}
	for run, want := range []int{1, 1, 0} { // a, then z
		if p := prune(t, s, r); p.History != want {
			t.Errorf("run %d deletes %d entries, want %d", run, p.History, want)
		}
		c.advance(store.PruneEvery + time.Second)
	}
}

func testPruneTurn(t *testing.T, db Database) {
	var c movedClock
	a, b := openStore(t, db.URL, store.Clock(c.now)), openStore(t, db.URL, store.Clock(c.now))
	db.add(t, "x")
	turn := 0
	try := func(s *store.Store) int { // entries deleted, of two
		turn += 2
		for i := range 2 {
			s.SaveCatalog(devices.HistoryEntry{Device: "x", Epoch: devices.Epoch(turn + i)}, devices.CatalogText{}, nil)
		}
		settle(t, s)
		return prune(t, s, store.Retention{History: day, PerDevice: 1}).History
	}
	if n := try(a); n != 1 {
		t.Errorf("the first deletes %d", n)
	}
	if n := try(b); n != 0 {
		t.Errorf("another node directly afterwards deletes %d", n)
	}
	c.advance(store.PruneEvery + time.Second)
	if n := try(b); n == 0 {
		t.Error("an hour later nothing is deleted")
	}
	c.advance(-100 * day) // the turn was taken by a clock that was wrong
	if n := try(a); n == 0 {
		t.Error("a time in the future holds everybody off")
	}
}

// Two nodes write entries of lists that come, go out of use and come back,
// while both prune. Whatever an entry names is there at every moment, and
// nobody deadlocks. The clock never runs by more than a day during one
// transaction, which is what MinCatalogAge is for.
func testPruneRace(t *testing.T, db Database) {
	var c movedClock
	stores := []*store.Store{openStore(t, db.URL, store.Clock(c.now)), openStore(t, db.URL, store.Clock(c.now))}
	const devicesOfEach, entries, lists, inUse = 4, 300, 48, 16
	var epoch atomic.Int64
	writing := make(chan struct{})
	var writers, pruners sync.WaitGroup
	for which, s := range stores {
		for i := range devicesOfEach {
			id := devices.ID(fmt.Sprintf("d-%d-%d", which, i))
			db.add(t, id)
			writers.Go(func() {
				for n := range entries {
					// A part of the lists is in use, more than there are devices to name
					// them; it moves on, and comes round.
					text := catalogOf(fmt.Sprintf(`[{"name":"tool-%d"}]`, (n/25*inUse/2+rand.IntN(inUse))%lists))
					written := make(chan struct{})
					s.SaveCatalog(devices.HistoryEntry{Device: id, Epoch: devices.Epoch(epoch.Add(1)), Catalog: text.Hash, At: c.now()}, text, func() { close(written) })
					<-written
					if c.advance(time.Minute); which+i == 0 && n%25 == 0 {
						c.advance(day / 2)
					}
				}
			})
		}
		pruners.Go(func() {
			for {
				select {
				case <-writing:
					return
				case <-time.After(time.Millisecond):
				}
				if _, err := s.Prune(t.Context(), store.Retention{History: day, PerDevice: 1, Catalogs: store.MinCatalogAge}); err != nil {
					t.Errorf("prune: %v", err)
					return
				}
			}
		})
	}
	const dangling = `SELECT count(*) FROM catalog_history h WHERE NOT EXISTS (SELECT 1 FROM catalogs c WHERE c.sha256 = h.catalog)`
	pruners.Go(func() {
		for {
			select {
			case <-writing:
				return
			case <-time.After(5 * time.Millisecond):
			}
			if n := db.Count(t, dangling); n != 0 {
				t.Errorf("%d entries name a list that is not there", n)
				return
			}
		}
	})
	writers.Wait()
	close(writing)
	pruners.Wait()
	if n := db.Count(t, dangling); n != 0 {
		t.Errorf("at the end %d entries name a list that is not there", n)
	}
	var deleted, rewritten int64
	for _, s := range stores {
		settle(t, s)
		st := s.Stats()
		deleted, rewritten = deleted+st.PrunedCatalogs.Load(), rewritten+st.CatalogWrites.Load()
		if st.Retries.Load() != 0 || st.BadRows.Load() != 0 {
			t.Errorf("%d retries, %d bad rows", st.Retries.Load(), st.BadRows.Load())
		}
	}
	if deleted < lists || rewritten < deleted {
		t.Errorf("%d lists were deleted and %d written: nothing was tested", deleted, rewritten)
	}
}
