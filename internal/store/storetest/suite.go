package storetest

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/store"
)

// patience is how long a test waits for what must come.
const patience = 20 * time.Second

// start is the time that tests count from.
var start = time.Date(2026, 3, 1, 12, 0, 0, 123456000, time.UTC)

// Run runs the whole suite; every test gets a database of its own. The caller's
// TestMain should verify that no goroutine is left.
func Run(t *testing.T, makeDatabase Maker) {
	for _, test := range []struct {
		name string
		run  func(t *testing.T, db Database)
	}{
		{"every field comes back", testRoundTrip},
		{"what is not there is ErrNotFound", testNotFound},
		{"a stale epoch changes nothing", testPresenceFence},
		{"a refused row learns what refused it", testStaleWrite},
		{"a lease begins once", testLease},
		{"a lease waits for no row", testLeaseBesideRows},
		{"an older OTA check replaces nothing", testFacts},
		{"an OTA check of a node with a wrong clock", testFactsOfWrongClocks},
		{"an OTA check that is written after initialize", testLateCheck},
		{"a device that is not there is not made", testForgotten},
		{"counts follow every write", testCountsKept},
		{"who was seen when", testSeen},
		{"rows of a device are coalesced", testCoalescing},
		{"history is never coalesced", testHistory},
		{"pages come in byte order", testPaging},
		{"filters", testFilters},
		{"rows by their ids", testRows},
		{"a serial number proves one device", testAttestation},
		{"nodes bind serial numbers at once", testAttestationRace},
		{"a bad row poisons nobody", testBadFacts},
		{"a bad history entry poisons nobody", testBadHistory},
		{"text that Postgres refuses", testBadText},
		{"catalogs keep every byte", testCatalogBytes},
		{"a known catalog is written once", testKnownCatalog},
		{"committed means visible", testCommitted},
		{"long lists wait within bounds", testQueueBytes},
		{"one list waits once", testSharedList},
		{"close writes what waits", testClose},
		{"fingerprint", testFingerprint},
		{"the database has a name", testFleetID},
		{"a newer schema is refused", testNewerSchema},
		{"a foreign schema is refused", testForeignSchema},
		{"a database of the first version is taken over", testTakenOver},
		{"an older schema is refused", testOlderSchema},
		{"three nodes open at once", testOpenAtOnce},
		{"two nodes write the same devices", testTwoNodes},
		{"nodes write the same new lists", testNewListsTogether},
		{"a caller that leaves is not an outage", testCancelled},
		{"retention", testRetention},
		{"pruned in slices", testPruneSlices},
		{"one node prunes at a time", testPruneTurn},
		{"a list in use is never pruned", testPruneRace},
		{"the audit comes back as it was written", testAudit},
		{"the audit is pruned by age", testAuditPrune},
		{"images of devices", testImages},
		{"images of checks that wait together", testLateImages},
		{"firmware images", testFirmware},
		{"firmware images of several nodes", testFirmwareRoom},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, makeDatabase(t)) })
	}
}

// RunLists runs what lists and counts of tens of thousands of devices need.
func RunLists(t *testing.T, makeDatabase Maker) {
	for _, test := range []struct {
		name string
		run  func(t *testing.T, db Database)
	}{
		{"selectors in SQL and in memory", testSelectors},
		{"a page reads a bounded number of devices", testBounds},
		{"counts of the fleet and of a part of it", testCounts},
		{"all devices one by one", testEach},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, makeDatabase(t)) })
	}
}

// openStore opens a store that is closed with the test, and waits until it is
// ready: on a busy machine the schema takes longer than Open does.
func openStore(t testing.TB, url string, options ...store.Option) *store.Store {
	t.Helper()
	s := openAway(t, url, options...)
	waitReady(t, s)
	return s
}

// openAway opens a store whose database may be away.
func openAway(t testing.TB, url string, options ...store.Option) *store.Store {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s, err := store.Open(ctx, url, "", slog.New(slog.DiscardHandler), options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeStore(t, s) })
	return s
}

func closeStore(t testing.TB, s *store.Store) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := s.Close(ctx); err != nil {
		t.Errorf("closing the store: %v", err)
	}
}

var markers atomic.Int64

// settle returns once everything saved before is in the database. A slow
// database may take long for all of it, but not for one group.
func settle(t testing.TB, s *store.Store) {
	t.Helper()
	st := s.Stats()
	empty := func() bool {
		return st.DevicesWaiting.Load()+st.PresenceWaiting.Load()+st.HistoryWaiting.Load() == 0 && st.QueueBytes.Load() == 0
	}
	for !empty() {
		groups := st.Groups.Load()
		devicetest.Eventually(t, "queues empty, or a group written", func() bool { return empty() || st.Groups.Load() > groups })
	}
}

// holdWriter stops the writer until release is called: the callback of a
// commit runs on its goroutine.
func holdWriter(t testing.TB, s *store.Store) (release func()) {
	t.Helper()
	held, open := make(chan struct{}), make(chan struct{})
	s.SaveCatalog(devices.HistoryEntry{Device: "zz-hold", Epoch: devices.Epoch(markers.Add(1))}, devices.CatalogText{}, func() {
		close(held)
		<-open
	})
	select {
	case <-held:
	case <-time.After(patience):
		t.Fatal("the writer does not commit")
	}
	return func() { close(open) }
}

// find is Find of a device that must be there.
func find(t testing.TB, s *store.Store, id devices.ID) devices.Row {
	t.Helper()
	row, err := s.Find(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return row
}

// history is all of a device's history.
func history(t testing.TB, s *store.Store, id devices.ID) (all []devices.HistoryEntry) {
	t.Helper()
	var epoch devices.Epoch
	var seq int64
	for {
		page, err := s.History(t.Context(), id, epoch, seq, 700)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, page...)
		if len(page) < 700 {
			return all
		}
		epoch, seq = page[len(page)-1].Epoch, page[len(page)-1].Seq
	}
}

// mac is the n-th device.
func mac(n int) devices.ID {
	return devices.ID(fmt.Sprintf("02:00:00:%02x:%02x:%02x", n>>16&255, n>>8&255, n&255))
}

// fullDevice is a device with every field set.
func fullDevice(id devices.ID) devices.Device {
	return devices.Device{
		ID: id, ClientID: "client-" + string(id), Admission: devices.AdmissionMember, Revision: 7,
		Name: "Küche " + string(id), Labels: map[string]string{"room": "kitchen", "floor": "1"},
		Prefer: devices.TransportWebSocket, FirstSeen: start,
		Facts: devices.Facts{Board: "bread-compact-wifi", Firmware: "2.4.2", ELF: "e1f", Chip: "esp32s3",
			Language: "zh-CN", Serial: "serial", ActivateV2: true, CheckedAt: start.Add(time.Hour)},
	}
}

// factsOf returns the facts of a device's row.
func factsOf(d devices.Device) devices.Check {
	return devices.Check{Device: d.ID, Facts: d.Facts}
}

// fullPresence is a presence with every field set.
func fullPresence(id devices.ID, epoch devices.Epoch, seq int64) devices.Presence {
	return devices.Presence{
		Device: id, Epoch: epoch, Seq: seq, Online: true, Node: "node-1", Session: "session", ClientID: "client",
		Transport: devices.TransportMQTT, Reason: "gone", ConnectedAt: start, LastSeen: start.Add(time.Minute),
		MCP: devices.MCPReady, MCPError: "none", Catalog: sha256.Sum256([]byte("x")), Partial: true, Tools: 17,
	}
}

// catalogOf is a tool list as the service would save it.
func catalogOf(tools string) devices.CatalogText {
	return devices.CatalogText{Hash: sha256.Sum256([]byte(tools)), Tools: json.RawMessage(tools), Count: 2, FirstSeen: start}
}

func mustBe(t testing.TB, err, target error) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Fatalf("got error %v, want %v", err, target)
	}
}
