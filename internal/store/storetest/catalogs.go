package storetest

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/store"
)

func testHistory(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	text := catalogOf(`[{"name":"a"}]`)
	release := holdWriter(t, s)
	const n = 3000
	for i := range n {
		// Two entries per epoch, in an order in which the database did not want them.
		e := devices.HistoryEntry{Device: "x", Epoch: devices.Epoch(n - i/2), Seq: int64(i % 2), Catalog: text.Hash,
			Firmware: fmt.Sprint(i), ELF: "elf", Partial: i%3 == 0, At: start}
		s.SaveCatalog(e, text, nil)
	}
	if waiting := s.Stats().HistoryWaiting.Load(); waiting != n {
		t.Errorf("%d entries wait, want %d", waiting, n)
	}
	release()
	settle(t, s)
	all := history(t, s, "x")
	if len(all) != n {
		t.Fatalf("%d entries stored, want %d", len(all), n)
	}
	for i, e := range all {
		k := i ^ 1 // newest first: within an epoch the higher seq comes first
		want := devices.HistoryEntry{Device: "x", Epoch: devices.Epoch(n - k/2), Seq: int64(k % 2), Catalog: text.Hash,
			Firmware: fmt.Sprint(k), ELF: "elf", Partial: k%3 == 0, At: start}
		if !reflect.DeepEqual(e, want) {
			t.Fatalf("entry %d: got %+v, want %+v", i, e, want)
		}
	}
	// Saving one again, as a retry would, changes nothing.
	again := all[0]
	again.Firmware = "changed"
	s.SaveCatalog(again, devices.CatalogText{}, nil)
	settle(t, s)
	if got := history(t, s, "x"); len(got) != n || got[0].Firmware != all[0].Firmware {
		t.Errorf("a repeated entry changed the history: %d entries, first %+v", len(got), got[0])
	}
}

// A new firmware comes to all nodes at once: each writes lists that the others write,
// too, next to lists that are there already, and none waits for a node that waits
// for it.
func testNewListsTogether(t *testing.T, db Database) {
	if !db.Postgres {
		return // a file belongs to one process, which has one writer
	}
	const nodes, rounds, lists = 8, 40, 40
	stores := make([]*store.Store, nodes)
	for i := range stores {
		stores[i] = openStore(t, db.URL)
	}
	var all sync.WaitGroup
	for which, s := range stores {
		all.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(which)))
			for round := range rounds {
				for _, i := range random.Perm(lists)[:lists/2] {
					text := catalogOf(fmt.Sprintf(`[{"name":"tool %d"}]`, round*lists/4+i))
					e := devices.HistoryEntry{Device: mac(which), Epoch: devices.Epoch(round + 1), Seq: int64(i), Catalog: text.Hash, At: start}
					s.SaveCatalog(e, text, nil)
				}
				settle(t, s)
			}
		})
	}
	all.Wait()
	for _, s := range stores {
		if retries, bad := s.Stats().Retries.Load(), s.Stats().BadRows.Load(); retries != 0 || bad != 0 {
			t.Errorf("%d retries, %d bad rows: the nodes got in each other's way", retries, bad)
		}
	}
	if n := db.Count(t, `SELECT count(*) FROM catalogs`); n != (rounds-1)*lists/4+lists {
		t.Errorf("%d lists are stored", n)
	}
}

func testCatalogBytes(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	lists := []string{
		`[]`,
		"[ {\"name\" :\t\"b\",\r\n \"a\":1e0 , \"a\":2} ]", // spaces, order and doubles survive
		`[{"name":"说话","description":"\u4e2d\/\"\\"}]`,
		"[{\"description\":\"cut off: \xe4\xb8\"}]",      // half a character
		"[{\"description\":\"\xc4\xe3\xba\xc3 (GBK)\"}]", // another encoding
		"[{\"description\":\"a\x00b\"}]",
		"[\"" + strings.Repeat("long ", 40_000) + "\"]",
	}
	for i, tools := range lists {
		text := catalogOf(tools)
		s.SaveCatalog(devices.HistoryEntry{Device: mac(i), Epoch: 1, Catalog: text.Hash}, text, nil)
	}
	settle(t, s)
	for _, tools := range lists {
		want := catalogOf(tools)
		got, err := s.Catalog(t.Context(), want.Hash)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got.Tools, want.Tools) || got.Hash != want.Hash || got.Count != want.Count || !got.FirstSeen.Equal(want.FirstSeen) {
			t.Errorf("got %.80q, want %.80q", got.Tools, tools)
		}
		if n := db.Count(t, `SELECT bytes FROM catalogs WHERE sha256 = $1`, want.Hash.String()); n != len(tools) {
			t.Errorf("%d bytes recorded, want %d", n, len(tools))
		}
	}
	if n := db.Count(t, `SELECT count(*) FROM catalogs WHERE encoding = 'text'`); n != 4 {
		t.Errorf("%d catalogs are readable text, want 4", n)
	}
}

func testKnownCatalog(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	text := catalogOf(`[{"name":"a"}]`)
	save := func(seq int64, text devices.CatalogText) {
		s.SaveCatalog(devices.HistoryEntry{Device: "x", Epoch: 1, Seq: seq, Catalog: text.Hash}, text, nil)
		settle(t, s)
	}
	save(1, text)
	save(2, text)
	save(3, devices.CatalogText{Hash: text.Hash}) // known: the text may be left out
	if w, h := s.Stats().CatalogWrites.Load(), s.Stats().CatalogHits.Load(); w != 1 || h != 2 {
		t.Errorf("%d writes and %d hits, want 1 and 2", w, h)
	}
	closeStore(t, s)
	s = openStore(t, db.URL)
	save(4, text)
	if w, h := s.Stats().CatalogWrites.Load(), s.Stats().CatalogHits.Load(); w != 0 || h != 1 {
		t.Errorf("after a restart %d writes and %d hits, want 0 and 1", w, h)
	}
	if n := len(history(t, s, "x")); n != 4 {
		t.Errorf("%d entries, want 4", n)
	}
}

func testCommitted(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	const n = 60
	var calls, missing atomic.Int64
	for i := range n {
		text := catalogOf(fmt.Sprintf(`[{"name":"tool-%d"}]`, i%20))
		e := devices.HistoryEntry{Device: mac(i), Epoch: 3, Seq: 1, Catalog: text.Hash}
		s.SaveCatalog(e, text, func() {
			calls.Add(1)
			var rows int
			err := db.Raw.QueryRow(`SELECT count(*) FROM catalog_history h JOIN catalogs c ON c.sha256 = h.catalog
 WHERE h.device = $1 AND h.catalog = $2`, string(e.Device), e.Catalog.String()).Scan(&rows)
			if err != nil || rows != 1 {
				missing.Add(1)
			}
		})
	}
	devicetest.Eventually(t, "all callbacks", func() bool { return calls.Load() >= n })
	settle(t, s)
	if calls.Load() != n || missing.Load() != 0 {
		t.Errorf("%d calls, want %d; %d before their rows were visible", calls.Load(), n, missing.Load())
	}
}
