package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/store"
)

// RunNetwork runs the tests of a database over a network: it is unreachable at the start or later, does
// not answer, or refuses.
func RunNetwork(t *testing.T, makeDatabase Maker) {
	for _, test := range []struct {
		name string
		run  func(t *testing.T, db Database)
	}{
		{"away at the start", testDegradedOpen},
		{"outages in the middle", testOutage},
		{"connections killed by the server", testKilled},
		{"only the writer cannot connect", testWriterAlone},
		{"a cut cable holds no reader", testStalled},
		{"a wrong fingerprint met late keeps rows away", testLateFingerprint},
		{"refused late", testRefusedLate},
		{"close during an outage reports the lost rows", testCloseAway},
		{"settings that cannot work", testRefusedSettings},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, makeDatabase(t)) })
	}
}

// notReady waits until the store has detected that the database is unreachable.
func notReady(t *testing.T, s *store.Store) {
	t.Helper()
	devicetest.Eventually(t, "outage noticed", func() bool { return s.Ready() != nil })
	mustBe(t, s.Ready(), devices.ErrDatabase)
}

func waitReady(t testing.TB, s *store.Store) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := s.WaitReady(ctx); err != nil {
		t.Fatal(err)
	}
}

func testDegradedOpen(t *testing.T, db Database) {
	closeStore(t, openStore(t, db.URL))
	for i := range 600 {
		db.add(t, mac(i))
	}
	proxy := NewProxy(t, db.Address(t))
	var ready atomic.Int64
	s := openAway(t, db.Via(t, proxy.Address()), store.OnReady(func() { ready.Add(1) }))
	mustBe(t, s.Ready(), devices.ErrDatabase)
	begin := time.Now()
	_, err := s.Find(t.Context(), "x")
	mustBe(t, err, devices.ErrDatabase)
	_, err = s.List(t.Context(), devices.ListQuery{})
	mustBe(t, err, devices.ErrDatabase)
	_, err = s.Rows(t.Context(), []devices.ID{"x"})
	mustBe(t, err, devices.ErrDatabase)
	_, err = s.Counts(t.Context())
	mustBe(t, err, devices.ErrDatabase)
	mustBe(t, s.Fingerprint(t.Context(), "fleet-1"), devices.ErrDatabase)
	if took := time.Since(begin); took > time.Second {
		t.Errorf("the refusals took %s", took)
	}
	soon, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	mustBe(t, s.WaitReady(soon), devices.ErrDatabase)

	var committed atomic.Int64
	text := catalogOf(`[{"name":"a"}]`)
	for i := range 600 {
		s.SaveFacts(factsOf(fullDevice(mac(i))))
		s.SavePresence(fullPresence(mac(i), 1, 1))
		s.SaveCatalog(devices.HistoryEntry{Device: mac(i), Epoch: 1, Catalog: text.Hash}, text, func() { committed.Add(1) })
	}
	proxy.Start()
	waitReady(t, s)
	devicetest.Eventually(t, "rows written", func() bool { return committed.Load() == 600 })
	settle(t, s)
	if n := db.Count(t, `SELECT count(*) FROM devices d JOIN presence p ON p.device = d.device WHERE d.board <> '' AND p.online`); n != 600 {
		t.Errorf("%d devices with presence, want 600", n)
	}
	db.checkCounts(t)
	if n := db.Count(t, `SELECT count(*) FROM fleet WHERE value = 'fleet-1'`); n != 1 {
		t.Error("the fingerprint given while the database was away is not stored")
	}
	if err := s.Ready(); err != nil || ready.Load() != 1 {
		t.Errorf("ready %v, OnReady called %d times", err, ready.Load())
	}
}

func testOutage(t *testing.T, db Database) {
	proxy := NewProxy(t, db.Address(t))
	proxy.Start()
	s := openStore(t, db.Via(t, proxy.Address()))
	for i := range 50 {
		db.add(t, mac(i))
	}
	var mu sync.Mutex
	calls := map[int]int{}
	n := 0
	save := func(count int) {
		for range count {
			i := n
			n++
			text := catalogOf(fmt.Sprintf(`[{"name":"tool-%d"}]`, i%30))
			s.SaveFacts(devices.Check{Device: mac(i % 50), Facts: devices.Facts{Board: fmt.Sprint(i), CheckedAt: start.Add(time.Duration(i) * time.Second)}})
			s.SavePresence(devices.Presence{Device: mac(i % 50), Epoch: 1, Seq: int64(i)})
			s.SaveCatalog(devices.HistoryEntry{Device: mac(i % 50), Epoch: 1, Seq: int64(i), Catalog: text.Hash}, text, func() {
				mu.Lock()
				calls[i]++
				mu.Unlock()
			})
		}
	}
	for range 2 {
		save(1500)
		devicetest.Eventually(t, "a group in this round", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(calls) > n-1500
		})
		proxy.Stop() // most likely in the middle of a transaction
		save(500)
		notReady(t, s)
		if waiting := s.Stats().DevicesWaiting.Load(); waiting > 100 {
			t.Errorf("%d device rows wait or are on their way for 50 devices", waiting)
		}
		proxy.Start()
		waitReady(t, s)
	}
	settle(t, s)
	devicetest.Eventually(t, "all are reported", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(calls) == n
	})
	mu.Lock()
	for i := range n {
		if calls[i] != 1 {
			t.Errorf("entry %d was reported %d times", i, calls[i])
		}
	}
	mu.Unlock()
	if stored := db.Count(t, `SELECT count(*) FROM catalog_history h JOIN catalogs c ON c.sha256 = h.catalog`); stored != n {
		t.Errorf("%d entries stored, want %d", stored, n)
	}
	if seq := find(t, s, mac((n-1)%50)).Presence.Seq; seq != int64(n-1) {
		t.Errorf("newest presence is %d, want %d", seq, n-1)
	}
	db.checkCounts(t)
	if bad, dropped := s.Stats().BadRows.Load(), s.Stats().DroppedHistory.Load(); bad != 0 || dropped != 0 {
		t.Errorf("%d bad and %d dropped rows", bad, dropped)
	}
}

func testKilled(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	facts := func(n int) devices.Check {
		return devices.Check{Device: mac(n), Facts: devices.Facts{Board: "b", CheckedAt: start}}
	}
	for i := range 6 {
		db.add(t, mac(i))
	}
	for i := range 5 {
		s.SaveFacts(facts(i))
		settle(t, s)
		db.Exec(t, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'fleetd' AND datname = current_database()`)
	}
	s.SaveFacts(facts(5))
	devicetest.Eventually(t, "a row after the last kill", func() bool {
		row, err := s.Find(t.Context(), mac(5))
		if err != nil {
			mustBe(t, err, devices.ErrDatabase)
		}
		return row.Device.Board == "b"
	})
	waitReady(t, s)
	if n := db.Count(t, `SELECT count(*) FROM devices WHERE board = 'b'`); n != 6 {
		t.Errorf("%d devices, want 6", n)
	}
}

// testWriterAlone: the watcher's connection works, the writer's does not. It
// must not ask again and again without a pause.
func testWriterAlone(t *testing.T, db Database) {
	proxy := NewProxy(t, db.Address(t))
	proxy.Start()
	s := openStore(t, db.Via(t, proxy.Address()))
	db.add(t, "x", "y")
	s.SaveFacts(devices.Check{Device: "y", Facts: devices.Facts{Board: "b", CheckedAt: start}})
	settle(t, s)
	proxy.Refuse()
	if n := db.Count(t, `SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
 WHERE application_name = 'fleetd' AND datname = current_database() AND query ILIKE 'commit%'`); n != 1 {
		t.Fatalf("%d connections look like the writer's, want 1", n)
	}
	s.SaveFacts(devices.Check{Device: "x", Facts: devices.Facts{Board: "b", CheckedAt: start}})
	begin := time.Now()
	devicetest.Eventually(t, "six attempts", func() bool { return s.Stats().Retries.Load() >= 6 })
	if took := time.Since(begin); took < 200*time.Millisecond {
		t.Errorf("six attempts within %s", took)
	}
	mustBe(t, s.Ready(), devices.ErrDatabase)
	proxy.Start()
	devicetest.Eventually(t, "the row written", func() bool { return s.Stats().DeviceRows.Load() > 1 && s.Ready() == nil })
	if got := find(t, s, "x").Device; got.Board != "b" {
		t.Errorf("%+v", got)
	}
}

func testStalled(t *testing.T, db Database) {
	proxy := NewProxy(t, db.Address(t))
	proxy.Start()
	s := openStore(t, db.Via(t, proxy.Address()))
	settle(t, s)
	proxy.Stall()
	begin := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 250*time.Millisecond)
	defer cancel()
	_, err := s.Find(ctx, "x")
	mustBe(t, err, devices.ErrDatabase)
	mustBe(t, err, context.DeadlineExceeded)
	if took := time.Since(begin); took > 2*time.Second {
		t.Errorf("a read with 250 ms took %s", took)
	}
	notReady(t, s) // the check was requested, and failed
	proxy.Stop()
	proxy.Start()
	waitReady(t, s)
	_, err = s.Find(t.Context(), "x")
	mustBe(t, err, devices.ErrNotFound)
}

// schemaOnly makes the schema and ties it to a fleet.
func schemaOnly(t *testing.T, db Database, fingerprint string) {
	t.Helper()
	s := openStore(t, db.URL)
	if err := s.Fingerprint(t.Context(), fingerprint); err != nil {
		t.Fatal(err)
	}
	closeStore(t, s)
}

func testLateFingerprint(t *testing.T, db Database) {
	schemaOnly(t, db, "fleet-1")
	proxy := NewProxy(t, db.Address(t))
	s := openStoreLossy(t, db.Via(t, proxy.Address()))
	mustBe(t, s.Fingerprint(t.Context(), "fleet-2"), devices.ErrDatabase)
	db.add(t, "x")
	s.SaveFacts(devices.Check{Device: "x", Facts: devices.Facts{Board: "intruder", CheckedAt: start}})
	proxy.Start()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	mustBe(t, s.WaitReady(ctx), store.ErrConfig)
	mustBe(t, s.Ready(), store.ErrConfig)
	_, err := s.Find(t.Context(), "x")
	mustBe(t, err, store.ErrConfig)
	if n := db.Count(t, `SELECT count(*) FROM devices WHERE board <> ''`); n != 0 {
		t.Error("a row was written to another fleet's database")
	}
	expectLost(t, s, 1)
}

// expectLost closes a store that cannot write.
func expectLost(t *testing.T, s *store.Store, rows int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	err := s.Close(ctx)
	mustBe(t, err, devices.ErrDatabase)
	if !strings.Contains(err.Error(), fmt.Sprint(rows, " rows")) {
		t.Errorf("%v does not say that %d rows are lost", err, rows)
	}
}

func testRefusedLate(t *testing.T, db Database) {
	schemaOnly(t, db, "fleet-1")
	db.Exec(t, `UPDATE fleet SET value = '9001' WHERE key = 'lowest_schema'`)
	proxy := NewProxy(t, db.Address(t))
	var log syncBuffer
	s, err := store.Open(t.Context(), db.Via(t, proxy.Address()), "", slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	defer closeStore(t, s)
	proxy.Start()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	mustBe(t, s.WaitReady(ctx), store.ErrConfig)
	devicetest.Eventually(t, "the refusal is logged", func() bool { return strings.Contains(log.String(), "level=ERROR msg=\"database cannot be used\"") })
	// Once the operator has fixed it, it is used without a restart.
	db.Exec(t, `UPDATE fleet SET value = '1' WHERE key = 'lowest_schema'`)
	devicetest.Eventually(t, "database usable", func() bool { return s.Ready() == nil })
	// A newer node migrates it under this one, which may go on, and then once more.
	db.Exec(t, `INSERT INTO goose_db_version (version_id, is_applied) VALUES (9001, TRUE)`)
	proxy.Stop()
	devicetest.Eventually(t, "the outage is noticed", func() bool { return s.Ready() != nil })
	proxy.Start()
	devicetest.Eventually(t, "usable after an outage", func() bool { return s.Ready() == nil })
	db.Exec(t, `UPDATE fleet SET value = '9001' WHERE key = 'lowest_schema'`)
	devicetest.Eventually(t, "refused while it runs", func() bool { return errors.Is(s.Ready(), store.ErrConfig) })
	db.Exec(t, `DELETE FROM goose_db_version WHERE version_id = 9001`)
}

func testCloseAway(t *testing.T, db Database) {
	proxy := NewProxy(t, db.Address(t))
	s := openStoreLossy(t, db.Via(t, proxy.Address()))
	for i := range 7 {
		s.SaveFacts(devices.Check{Device: mac(i)})
		s.SavePresence(devices.Presence{Device: mac(i), Epoch: 1})
	}
	begin := time.Now()
	expectLost(t, s, 14)
	if took := time.Since(begin); took > 3*time.Second {
		t.Errorf("close took %s", took)
	}
}

// openStoreLossy opens a store that the test itself closes.
func openStoreLossy(t *testing.T, url string) *store.Store {
	t.Helper()
	s, err := store.Open(t.Context(), url, "", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func testRefusedSettings(t *testing.T, db Database) {
	change := func(f func(*url.URL)) string {
		u, err := url.Parse(db.URL)
		if err != nil {
			t.Fatal(err)
		}
		f(u)
		return u.String()
	}
	// A server that speaks something else.
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	defer running.Wait()
	defer func() { _ = listener.Close() }()
	running.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"))
			_ = conn.Close()
		}
	})
	for name, test := range map[string]struct{ url, words string }{
		"database": {change(func(u *url.URL) { u.Path = "/fleetd_test_nowhere" }), "fleetd_test_nowhere"},
		"user":     {change(func(u *url.URL) { u.User = url.UserPassword("fleetd_test_nobody", "hunter2") }), "fleetd_test_nobody"},
		"url":      {"postgres://user:hunter2@host:port/x", ""},
		"tls":      {change(func(u *url.URL) { u.RawQuery = "sslmode=verify-full&sslrootcert=/nonexistent" }), "sslrootcert"},
		"scheme":   {"mysql://user:hunter2@host/x", "postgres://"},
		"empty":    {"sqlite:", "path"},
		"memory":   {"sqlite::memory:", "path"},
		"dir":      {"sqlite:/nonexistent/fleetd/x.db", "/nonexistent/fleetd/x.db"},
		"protocol": {"postgres://user:hunter2@" + listener.Addr().String() + "/x?sslmode=require", ""},
	} {
		text := refused(t, test.url)
		if !strings.Contains(text, test.words) {
			t.Errorf("%s: the sentence does not name %q: %s", name, test.words, text)
		}
		if strings.Contains(text, "hunter2") {
			t.Errorf("%s: the sentence shows the password: %s", name, text)
		}
		t.Logf("%s: %s", name, text)
	}
}

// syncBuffer is a log that may be read while it is written.
type syncBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return string(slices.Clone(b.buf.Bytes()))
}
