package storetest

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/store"
	"fleetd/internal/store/firmwarestore"
	"fleetd/migrations"
)

func testBadFacts(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	const n = 510 // more than a group
	for i := range n {
		db.Add(t, devices.Device{ID: mac(i), Facts: devices.Facts{ELF: fmt.Sprint("old ", i)}})
	}
	db.Add(t, devices.Device{ID: "first", Facts: devices.Facts{ELF: "taken"}})
	db.Exec(t, `CREATE UNIQUE INDEX poison ON devices (elf_sha256)`)
	release := holdWriter(t, s)
	bad := map[int]bool{0: true, 123: true, 124: true, n - 1: true}
	for i := range n {
		elf := fmt.Sprint("new ", i)
		if bad[i] {
			elf = "taken"
		}
		s.SaveFacts(devices.Check{Device: mac(i), Facts: devices.Facts{ELF: elf, Board: "b", CheckedAt: start}})
		s.SavePresence(devices.Presence{Device: mac(i), Epoch: 1, Online: true})
	}
	release()
	settle(t, s)
	if n := s.Stats().BadRows.Load(); n != int64(len(bad)) {
		t.Errorf("%d rows refused, want %d", n, len(bad))
	}
	for i := range n {
		if got := find(t, s, mac(i)).Device; (got.Board == "") != bad[i] {
			t.Errorf("device %d: %+v", i, got)
		}
	}
	if got := db.Count(t, `SELECT count(*) FROM presence WHERE online`); got != n {
		t.Errorf("%d presence rows, want %d", got, n)
	}
	db.checkCounts(t)
}

func testBadHistory(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	settle(t, s)
	db.Exec(t, `CREATE UNIQUE INDEX poison ON catalog_history (device, firmware)`)
	text := catalogOf(`[{"name":"a"}]`)
	release := holdWriter(t, s)
	var calls atomic.Int64
	const n = 100
	for i := range n {
		firmware := fmt.Sprint(i)
		if i >= 98 {
			firmware = "7" // taken by the eighth
		}
		s.SaveCatalog(devices.HistoryEntry{Device: "x", Epoch: devices.Epoch(i + 1), Catalog: text.Hash, Firmware: firmware}, text,
			func() { calls.Add(1) })
	}
	release()
	settle(t, s)
	if got := len(history(t, s, "x")); got != 98 || calls.Load() != 98 {
		t.Errorf("%d entries stored and %d reported, want 98", got, calls.Load())
	}
	if n := s.Stats().BadRows.Load(); n != 2 {
		t.Errorf("%d rows refused, want 2", n)
	}
	if n := s.Stats().HistoryWaiting.Load(); n != 0 {
		t.Errorf("%d entries still wait", n)
	}
}

func testBadText(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	db.Add(t, devices.Device{ID: "x"}, devices.Device{ID: "y", Facts: devices.Facts{Board: "untouched"}})
	release := holdWriter(t, s)
	s.SaveFacts(devices.Check{Device: "x", Facts: devices.Facts{Board: "a\x00b\xffc", Serial: "\xc3", CheckedAt: start}})
	s.SavePresence(devices.Presence{Device: "x", Epoch: 1, MCPError: "bad \xe4\xb8 text\x00"})
	s.SaveCatalog(devices.HistoryEntry{Device: "x", Epoch: 1, Firmware: "\x00"}, devices.CatalogText{}, nil)
	s.SaveFacts(devices.Check{Device: "bad\x00id"})
	s.SavePresence(devices.Presence{Device: "bad\xffid", Epoch: 1})
	s.SaveFacts(devices.Check{})
	release()
	settle(t, s)
	row := find(t, s, "x")
	if row.Device.Board != "a\uFFFDb\uFFFDc" || row.Device.Serial != "\uFFFD" {
		t.Errorf("device %+v", row.Device)
	}
	if row.Presence.MCPError != "bad \uFFFD text\uFFFD" {
		t.Errorf("presence %+q", row.Presence.MCPError)
	}
	if e := history(t, s, "x"); len(e) != 1 || e[0].Firmware != "\uFFFD" {
		t.Errorf("history %+v", e)
	}
	if find(t, s, "y").Device.Board != "untouched" {
		t.Error("another row was changed")
	}
	if n := s.Stats().BadRows.Load(); n != 3 {
		t.Errorf("%d rows refused, want the 3 without a usable id", n)
	}
	_, err := s.Find(t.Context(), "bad\x00id")
	mustBe(t, err, devices.ErrNotFound)
}

func testClose(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	text := catalogOf(`[{"name":"a"}]`)
	const n = 1200 // more than two groups
	var list []devices.Device
	for i := range n {
		list = append(list, devices.Device{ID: mac(i)})
	}
	db.Add(t, list...)
	for i := range n {
		s.SaveFacts(devices.Check{Device: mac(i), Facts: devices.Facts{Board: "b", CheckedAt: start}})
		s.SavePresence(devices.Presence{Device: mac(i), Epoch: 1})
		s.SaveCatalog(devices.HistoryEntry{Device: mac(i), Epoch: 1, Catalog: text.Hash}, text, nil)
	}
	closeStore(t, s)
	for table, want := range map[string]int{"devices WHERE board = 'b'": n, "presence WHERE epoch = 1": n, "catalog_history": n, "catalogs": 1} {
		if got := db.Count(t, `SELECT count(*) FROM `+table); got != want {
			t.Errorf("%s: %d rows, want %d", table, got, want)
		}
	}
	s.SaveFacts(devices.Check{Device: "late"})
	if late := s.Stats().Late.Load(); late != 1 {
		t.Errorf("%d late rows counted, want 1", late)
	}
}

func testFingerprint(t *testing.T, db Database) {
	s, other := openStore(t, db.URL), openStore(t, db.URL)
	for _, each := range []*store.Store{s, other, s} {
		if err := each.Fingerprint(t.Context(), "fleet-1"); err != nil {
			t.Fatal(err)
		}
	}
	err := other.Fingerprint(t.Context(), "fleet-2")
	mustBe(t, err, store.ErrConfig)
	if !strings.Contains(err.Error(), "another secret") {
		t.Errorf("the sentence does not say what is wrong: %v", err)
	}
}

// refused is the sentence with which a store is not opened.
func refused(t *testing.T, url string) string {
	t.Helper()
	s, err := store.Open(t.Context(), url, t.TempDir(), slog.New(slog.DiscardHandler))
	if err == nil {
		closeStore(t, s)
		t.Fatal("it was opened")
	}
	mustBe(t, err, store.ErrConfig)
	if strings.Contains(err.Error(), "\n") {
		t.Errorf("not one line: %q", err)
	}
	return err.Error()
}

func testNewerSchema(t *testing.T, db Database) {
	closeStore(t, openStore(t, db.URL))
	db.Exec(t, `INSERT INTO goose_db_version (version_id, is_applied) VALUES (9001, TRUE)`)
	if n := db.Count(t, `SELECT count(*) FROM fleet WHERE key = 'lowest_schema' AND value = $1`, strconv.Itoa(migrations.Lowest)); n != 1 {
		t.Error("migrations.Lowest is not what the migrations say")
	}
	closeStore(t, openStore(t, db.URL)) // older programs may use it, and a migration that they may not use raises the lowest version
	db.Exec(t, `UPDATE fleet SET value = '9001' WHERE key = 'lowest_schema'`)
	if text := refused(t, db.URL); !strings.Contains(text, "9001") {
		t.Errorf("the sentence does not name the version: %s", text)
	}
}

func testForeignSchema(t *testing.T, db Database) {
	db.Clear(t)
	db.Exec(t, `CREATE TABLE devices (something TEXT)`)
	if text := refused(t, db.URL); !strings.Contains(text, "devices") {
		t.Errorf("the sentence does not name the table: %s", text)
	}
}

// schema23 has what the migrations before the first one of this sequence made.
//
//go:embed testdata/schema23/*.sql
var schema23 embed.FS

// makeSchema23 makes such a database.
func makeSchema23(t *testing.T, db Database) {
	t.Helper()
	db.Clear(t)
	name := "sqlite"
	if db.Postgres {
		name = "postgres"
	}
	text, err := schema23.ReadFile("testdata/schema23/" + name + ".sql")
	if err != nil {
		t.Fatal(err)
	}
	db.Exec(t, string(text))
}

// columnsAndIndexes are the columns of all tables, in their order, and the indexes.
func (d Database) columnsAndIndexes(t *testing.T) (list []string) {
	t.Helper()
	query := `SELECT m.name || ' ' || c.cid || ' ' || c.name || ' ' || c.type || ' ' || c."notnull" || ' ' || coalesce(c.dflt_value, '') || ' ' || c.pk || ' ' || c.hidden
 FROM sqlite_master m JOIN pragma_table_xinfo(m.name) c WHERE m.type = 'table'
 UNION ALL SELECT coalesce(sql, name) FROM sqlite_master WHERE type = 'index' ORDER BY 1`
	if d.Postgres {
		query = `SELECT concat_ws(' ', table_name, ordinal_position, column_name, data_type, is_nullable, column_default, collation_name, generation_expression)
 FROM information_schema.columns WHERE table_schema = 'public'
 UNION ALL SELECT indexdef FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1`
	}
	rows, err := d.Raw.Query(query)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		var line string
		if err := rows.Scan(&line); err != nil {
			t.Fatal(err)
		}
		list = append(list, line)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return list
}

// testOlderSchema: a database of an older version is refused with the commit that migrates it, and stays as it is.
func testOlderSchema(t *testing.T, db Database) {
	makeSchema23(t, db)
	db.Exec(t, `DELETE FROM goose_db_version WHERE version_id = $1`, migrations.First)
	if text := refused(t, db.URL); !strings.Contains(text, "22") || !strings.Contains(text, "commit a749a4a") {
		t.Errorf("the sentence does not say what to do: %s", text)
	}
	if n := db.Count(t, `SELECT max(version_id) FROM goose_db_version`); n != migrations.First-1 {
		t.Errorf("its version is %d now", n)
	}
}

// testTakenOver uses a database of the version at which this sequence of migrations began: it has the same columns and indexes as a
// new one, and its rows are read.
func testTakenOver(t *testing.T, db Database) {
	other := db // which Clear empties
	if !db.Postgres {
		other = SQLite(t)
	}
	closeStore(t, openStore(t, other.URL))
	fresh := other.columnsAndIndexes(t)
	makeSchema23(t, db)
	text := catalogOf(`[{"name":"a"}]`)
	db.Add(t, devices.Device{ID: "x", ClientID: "client", Name: "Name", Labels: map[string]string{"k": "v"}, FirstSeen: time.UnixMicro(1),
		Facts: devices.Facts{Board: "board", Firmware: "2.4", ELF: "elf", Chip: "chip", ActivateV2: true, CheckedAt: time.UnixMicro(2)}})
	db.Exec(t, `INSERT INTO catalogs VALUES ($1, $2, 'text', 1, 14, 1, 1)`, text.Hash.String(), string(text.Tools))
	db.Exec(t, `INSERT INTO catalog_history VALUES ('x', 5, 6, $1, '2.4', 'elf', FALSE, 7)`, text.Hash.String())
	db.Exec(t, `INSERT INTO fleet VALUES ('secret_fingerprint', 'fp')`)

	s := openStore(t, db.URL)
	if got := db.columnsAndIndexes(t); !slices.Equal(got, fresh) {
		t.Errorf("the schema is not that of a new database: %q, want %q", got, fresh)
	}
	row := find(t, s, "x")
	if row.Device.Labels["k"] != "v" || !row.Device.ActivateV2 || row.Presence.Reason != "never_connected" {
		t.Errorf("row %+v", row)
	}
	if got, err := s.Catalog(t.Context(), text.Hash); err != nil || string(got.Tools) != string(text.Tools) {
		t.Errorf("catalog %q, error %v", got.Tools, err)
	}
	if e := history(t, s, "x"); len(e) != 1 || e[0].At.UnixMicro() != 7 {
		t.Errorf("history %+v", e)
	}
	db.checkCounts(t)
	if err := s.Fingerprint(t.Context(), "fp"); err != nil {
		t.Error(err)
	}
	if got, err := firmwarestore.New(s).History(t.Context(), "x"); err != nil || len(got) != 1 || got[0].ELF != "elf" || got[0].Version != "2.4" || got[0].At.UnixMicro() != 2 {
		t.Errorf("images %+v, error %v", got, err)
	}
	s.SaveFacts(factsOf(fullDevice("x")))
	settle(t, s)
	if got := find(t, s, "x").Device; got.Board != "bread-compact-wifi" || got.FirstSeen.UnixMicro() != 1 {
		t.Errorf("saved over it: %+v", got)
	}
}

func testOpenAtOnce(t *testing.T, db Database) {
	db.Clear(t)
	errs := make(chan error)
	const nodes = 3
	for i := range nodes {
		go func() {
			s, err := store.Open(t.Context(), db.URL, "", slog.New(slog.DiscardHandler))
			if err == nil {
				s.SaveCatalog(devices.HistoryEntry{Device: mac(i), Epoch: 1}, devices.CatalogText{}, nil)
				err = errors.Join(s.WaitReady(t.Context()), s.Close(t.Context()))
			}
			errs <- err
		}()
	}
	for range nodes {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if n := db.Count(t, `SELECT count(*) FROM catalog_history`); n != nodes {
		t.Errorf("%d entries, want %d", n, nodes)
	}
}

func testTwoNodes(t *testing.T, db Database) {
	stores := []*store.Store{openStore(t, db.URL), openStore(t, db.URL)}
	const n, rounds = 300, 6
	for i := range n {
		db.add(t, mac(i))
	}
	done := make(chan struct{})
	for which, s := range stores {
		go func() {
			defer func() { done <- struct{}{} }()
			for round := range rounds {
				for i := range n {
					if which == 1 {
						i = n - 1 - i // the other way round, to deadlock if it can
					}
					s.SaveFacts(devices.Check{Device: mac(i), Facts: devices.Facts{Board: fmt.Sprint(which), CheckedAt: start.Add(time.Duration(2*round+which) * time.Second)}})
					s.SavePresence(devices.Presence{Device: mac(i), Epoch: devices.Epoch(2*round + which + 1), Node: fmt.Sprint(which), Online: round%2 == 1})
				}
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				_, err := s.Find(ctx, mac(0)) // lets groups pass between rounds
				cancel()
				if err != nil && !errors.Is(err, devices.ErrNotFound) {
					t.Error(err)
				}
			}
		}()
	}
	for range stores {
		<-done
	}
	for _, s := range stores {
		settle(t, s)
		if retries, bad := s.Stats().Retries.Load(), s.Stats().BadRows.Load(); retries != 0 || bad != 0 {
			t.Errorf("%d retries, %d bad rows: two nodes got in each other's way", retries, bad)
		}
	}
	if wrong := db.Count(t, `SELECT count(*) FROM presence WHERE epoch <> $1 OR node <> '1'`, 2*rounds); wrong != 0 {
		t.Errorf("%d devices do not have the highest epoch", wrong)
	}
	if wrong := db.Count(t, `SELECT count(*) FROM devices WHERE board <> '1'`); wrong != 0 {
		t.Errorf("%d devices do not have the latest facts", wrong)
	}
	db.checkCounts(t)
}

// The database's own name is the same for all who use it.
func testFleetID(t *testing.T, db Database) {
	db.Clear(t)
	s, other := openStore(t, db.URL), openStore(t, db.URL)
	first, err := s.FleetID(t.Context())
	if err != nil || len(first) < 20 {
		t.Fatalf("%q, %v", first, err)
	}
	if second, err := other.FleetID(t.Context()); err != nil || second != first {
		t.Errorf("%q, %v; want %q", second, err, first)
	}
}
