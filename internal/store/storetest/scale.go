package storetest

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/store"
	"fleetd/internal/store/ledger"
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

// RunScale prints the figures of a fleet of many devices: snapshot, and import beside decisions of others.
func RunScale(t *testing.T, makeDatabase Maker) {
	db := makeDatabase(t)
	s, err := store.Open(t.Context(), db.URL, "", slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeStore(t, s) })
	if err := s.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	l := ledger.New(s, slog.New(slog.DiscardHandler))
	t.Cleanup(l.Close)
	importScale(t, l, scaleDevices(t), false)
	checkCounts(t, db)
	for range 2 {
		began := time.Now()
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
