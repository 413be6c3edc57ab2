package storetest

import (
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/pressly/goose/v3"

	"fleetd/internal/devices"
	"fleetd/internal/store"
	"fleetd/internal/store/ledger"
	"fleetd/migrations"
)

// ScaleEnvironment names how many devices BenchmarkLists and the measurements make that have the build
// tag scale.
const ScaleEnvironment = "FLEETD_TEST_SCALE"

func scaleDevices(t *testing.T) int {
	t.Helper()
	n, err := strconv.Atoi(os.Getenv(ScaleEnvironment))
	if err != nil {
		t.Fatal(ScaleEnvironment + " must say how many devices")
	}
	return n
}

// migrateTo applies the files up to a version.
func migrateTo(t testing.TB, db Database, version int) {
	t.Helper()
	files := fstest.MapFS{}
	names, err := fs.Glob(migrations.FS, "*.sql")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if n, _ := strconv.Atoi(strings.SplitN(name, "_", 2)[0]); n <= version {
			text, err := migrations.FS.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			files[name] = &fstest.MapFile{Data: text}
		}
	}
	dialect := goose.DialectSQLite3
	if db.Postgres {
		dialect = goose.DialectPostgres
		db.Exec(t, `CREATE COLLATION IF NOT EXISTS "binary" (provider = libc, locale = 'C')`)
	}
	provider, err := goose.NewProvider(dialect, db.Raw, files, goose.WithLogger(goose.NopLogger()))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := provider.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// fillOld fills the schema before the registry with n devices, of which every
// tenth has connected.
func fillOld(t testing.TB, db Database, n int) {
	t.Helper()
	series := fmt.Sprintf(`generate_series(1, %d) AS s (i)`, n)
	id := `substr(md5(i::text), 1, 12) || i`
	if !db.Postgres {
		series = fmt.Sprintf(`(WITH RECURSIVE s (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM s WHERE i < %d) SELECT i FROM s) AS s`, n)
		id = `printf('%012x', (i * 2654435761) % 281474976710656) || i`
	}
	db.Exec(t, `INSERT INTO devices (device, client_id, pending_client_id, admission, name, name_folded, labels, preferred_transport, board, firmware,
 elf_sha256, chip, language, serial, activate_v2, first_seen, checked_at, edited_at)
 SELECT `+id+`, 'client-' || i, '', 'member', 'Lamp ' || i, 'lamp ' || i, '{"floor":"' || (i % 7) || '","room":"' || (i % 100) || '","site":"' || (i % 5) || '"}', '',
 'board-' || (i % 20), '2.' || (i % 30) || '.1', '', 'esp32s3', 'en', '', TRUE, i, i, i FROM `+series)
	db.Exec(t, `INSERT INTO presence (device, epoch, seq, online, node, session, client_id, transport, reason, connected_at, last_seen, mcp_state, mcp_error,
 catalog, catalog_partial, tool_count, generation)
 SELECT device, 5, 6, FALSE, 'n', 's', 'c', 'mqtt', 'closed', 3, 4, 'ready', '', '', FALSE, 2, 0 FROM devices WHERE checked_at % 10 = 0`)
}

// RunScale prints the figures of a fleet of many devices: migration, import
// beside decisions of others, snapshot.
func RunScale(t *testing.T, makeDatabase Maker) {
	n := scaleDevices(t)
	db := makeDatabase(t)
	migrateTo(t, db, 9)
	began := time.Now()
	fillOld(t, db, n)
	t.Logf("old schema filled in %s", time.Since(began))

	began = time.Now()
	s, err := store.Open(t.Context(), db.URL, "", slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeStore(t, s) })
	if err := s.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Logf("migrated %d devices in %s", n, time.Since(began))
	if got := db.Count(t, `SELECT count(*) FROM device_labels`); got != 3*n {
		t.Errorf("%d labels, want %d", got, 3*n)
	}
	if got := db.Count(t, `SELECT count(*) FROM devices WHERE firmware_key = ''`); got != 0 {
		t.Errorf("%d devices without a key of their firmware", got)
	}
	checkCounts(t, db)

	l := ledger.New(s, slog.New(slog.DiscardHandler))
	t.Cleanup(l.Close)
	for range 2 {
		began = time.Now()
		members := 0
		if _, err := l.Snapshot(t.Context(), func(devices.Member) { members++ }); err != nil {
			t.Fatal(err)
		}
		t.Logf("snapshot of %d members in %s", members, time.Since(began))
	}
	for _, busy := range []bool{false, true} {
		importScale(t, l, 20_000, busy)
	}
}

// RunImport prints how fast an empty database takes many new devices in the order
// of their ids, as package bulk gives them, beside decisions of others.
func RunImport(t *testing.T, makeDatabase Maker) {
	n := scaleDevices(t)
	db := makeDatabase(t)
	s, err := store.Open(t.Context(), db.URL, "", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeStore(t, s) })
	if err := s.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	l := ledger.New(s, slog.New(slog.DiscardHandler))
	t.Cleanup(l.Close)
	importDevices(t, l, randomMACs(n), true)
	checkCounts(t, db)
}

// importScale imports devices with random ids, with a few callers beside it if
// busy.
func importScale(t *testing.T, l *ledger.Ledger, n int, busy bool) {
	importDevices(t, l, randomMACs(n), busy)
}

// randomMACs are random ids in order.
func randomMACs(n int) []devices.ID {
	ids := make([]devices.ID, n)
	for i := range ids {
		r := rand.Uint64()
		ids[i] = devices.ID(fmt.Sprintf("%02x:%02x:%02x:%02x:%02x:%02x", byte(r), byte(r>>8), byte(r>>16), byte(r>>24), byte(r>>32), byte(r>>40)))
	}
	slices.Sort(ids)
	return ids
}

// importDevices imports devices in the order of ids, with a few callers beside it
// if busy.
func importDevices(t *testing.T, l *ledger.Ledger, ids []devices.ID, busy bool) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var others sync.WaitGroup
	var mu sync.Mutex
	var times []time.Duration
	if busy {
		for i := range 4 {
			others.Go(func() {
				for k := 0; ctx.Err() == nil; k++ {
					began := time.Now()
					decide(t, l, mac(i), func(m *devices.Member) { member(m); m.Name = fmt.Sprint(k) })
					mu.Lock()
					times = append(times, time.Since(began))
					mu.Unlock()
					time.Sleep(20 * time.Millisecond) // a caller that does other work between
				}
			})
		}
	}
	cpu := processTime(t)
	began, last := time.Now(), time.Now()
	for done := 0; done < len(ids); done += 1000 {
		var list []devices.Decision
		for _, id := range ids[done:min(done+1000, len(ids))] {
			r := rand.Uint64()
			d := decision(id, func(m *devices.Member) {
				member(m)
				m.Name = "Imported " + fmt.Sprint(r%100_000)
				m.Labels = map[string]string{"room": fmt.Sprint(r % 100), "floor": fmt.Sprint(r % 7), "site": fmt.Sprint(r % 5)}
			})
			d.Import = true
			list = append(list, d)
		}
		if _, err := l.Decide(t.Context(), list); err != nil {
			t.Fatal(err)
		}
		if k := done + len(list); k%100_000 == 0 {
			t.Logf("%d rows; the last 100,000 at %.0f rows/s", k, 100_000/time.Since(last).Seconds())
			last = time.Now()
		}
	}
	took := time.Since(began)
	cpu = processTime(t) - cpu
	cancel()
	others.Wait()
	slices.Sort(times)
	line := fmt.Sprintf("imported %d rows at %.0f rows/s; %.0f us of processor time each", len(ids), float64(len(ids))/took.Seconds(), float64(cpu.Microseconds())/float64(len(ids)))
	if k := len(times); k > 0 {
		line += fmt.Sprintf("; %d single decisions beside it: p50 %s, p99 %s, max %s", k, times[k/2], times[k*99/100], times[k-1])
	}
	t.Log(line)
}

// processTime is the processor time that the process has used.
func processTime(t *testing.T) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
