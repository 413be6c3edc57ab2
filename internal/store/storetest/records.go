package storetest

import (
	"context"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/selector"
	"fleetd/internal/store"
)

func testRoundTrip(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	device, presence := fullDevice(mac(1)), fullPresence(mac(1), 1<<60, 9)
	made := device
	made.Board, made.Firmware, made.ELF, made.Chip, made.Language, made.Serial, made.ActivateV2, made.CheckedAt = "", "", "", "", "", "", false, time.Time{}
	db.Add(t, made, devices.Device{ID: "bare"})
	s.SaveFacts(factsOf(device))
	s.SavePresence(presence)
	settle(t, s)
	if got, want := find(t, s, mac(1)), (devices.Row{Device: device, Presence: presence}); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	bare := devices.Row{Device: devices.Device{ID: "bare", Admission: devices.AdmissionMember}, Presence: devices.Presence{Device: "bare", Reason: "never_connected", MCP: "unknown"}}
	if got := find(t, s, "bare"); !reflect.DeepEqual(got, bare) {
		t.Errorf("got  %+v\nwant %+v", got, bare)
	}
	presence.Seq, presence.Online, presence.Reason, presence.LastSeen = 10, false, "gone", start.Add(time.Hour)
	s.SavePresence(presence)
	settle(t, s)
	presence.OfflineSince = presence.LastSeen
	if got := find(t, s, mac(1)).Presence; got != presence {
		t.Errorf("got  %+v\nwant %+v", got, presence)
	}
}

func testNotFound(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	_, err := s.Find(t.Context(), "nobody")
	mustBe(t, err, devices.ErrNotFound)
	_, err = s.Catalog(t.Context(), devices.Hash{1})
	mustBe(t, err, devices.ErrNotFound)
	if entries := history(t, s, "nobody"); len(entries) != 0 {
		t.Errorf("history of nobody: %v", entries)
	}
}

// An older check replaces nothing, in the queue and in the table, and one without
// a serial number keeps it.
func testFacts(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	newer := factsOf(fullDevice("x"))
	older := devices.Check{Facts: devices.Facts{Board: "old", Firmware: "old", ELF: "old", Chip: "old", Language: "old", Serial: "old", CheckedAt: newer.CheckedAt.Add(-time.Minute)}}
	same := older
	same.CheckedAt = newer.CheckedAt
	latest := newer
	latest.Firmware, latest.Serial, latest.CheckedAt = "2.10.0", "", newer.CheckedAt.Add(time.Minute)
	for _, way := range []string{"table", "queue"} {
		id := devices.ID(way)
		db.Add(t, devices.Device{ID: id, Name: "lamp"})
		newer.Device, older.Device, same.Device, latest.Device = id, id, id, id
		release := func() {}
		if way == "queue" {
			release = holdWriter(t, s)
		}
		for _, f := range []devices.Check{newer, older, same} {
			if way == "queue" && f == same {
				continue // the queue takes the last of two at the same time
			}
			s.SaveFacts(f)
			if way == "table" {
				settle(t, s)
			}
		}
		release()
		settle(t, s)
		if got := find(t, s, id).Device; factsOf(got) != newer || got.Name != "lamp" {
			t.Errorf("%s: %+v", way, got)
		}
		s.SaveFacts(latest)
		settle(t, s)
		if got := find(t, s, id).Device; got.Firmware != "2.10.0" || got.Serial != newer.Serial || got.Board != newer.Board {
			t.Errorf("%s, later: %+v", way, got)
		}
	}
	key := func(version string) string { key, _ := selector.VersionKey(version); return key }
	if n := db.Count(t, `SELECT count(*) FROM devices WHERE firmware_key = $1 AND board_folded = 'bread-compact-wifi'`, key("2.10.0")); n != 2 {
		t.Errorf("%d devices have the key of their firmware", n)
	}
	db.checkCounts(t)
}

// testLateCheck: a device checks in at one node and connects to another, which may write first what `initialize` says: that has neither the
// ELF nor the hardware, which the check adds then, unless the device runs another version meanwhile.
func testLateCheck(t *testing.T, db Database) {
	now := time.Now().UTC().Truncate(time.Microsecond)
	s := openStore(t, db.URL)
	db.add(t, "x", "other")
	save := func(f devices.Check) {
		t.Helper()
		s.SaveFacts(f)
		settle(t, s)
	}
	for _, id := range []devices.ID{"x", "other"} {
		save(devices.Check{Device: id, Facts: devices.Facts{Board: "b", Firmware: "2.0", CheckedAt: now}})
	}
	check := devices.Check{Device: "x", Facts: devices.Facts{Board: "b", Firmware: "2.0", ELF: "e", Chip: "esp32s3", CheckedAt: now.Add(-time.Second)}, Details: `{"flash_size":1}`}
	save(check)
	if got := find(t, s, "x").Device; got.ELF != "e" || got.Chip != "esp32s3" || !got.CheckedAt.Equal(now) {
		t.Errorf("%+v", got.Facts)
	}
	if n := db.Count(t, `SELECT count(*) FROM device_images WHERE device = 'x' AND elf_sha256 = 'e' AND details <> ''`); n != 1 {
		t.Errorf("%d images", n)
	}
	check.Device, check.Firmware = "other", "1.0"
	save(check)
	if got := find(t, s, "other").Device; got.ELF != "" || got.Firmware != "2.0" {
		t.Errorf("an older version: %+v", got.Facts)
	}
}

// A node whose clock is wrong neither loses what devices report to it, nor keeps other nodes from replacing it.
func testFactsOfWrongClocks(t *testing.T, db Database) {
	now := time.Now().UTC().Truncate(time.Microsecond)
	s := openStore(t, db.URL)
	save := func(s *store.Store, f devices.Check) {
		s.SaveFacts(f)
		settle(t, s)
	}
	for _, off := range []time.Duration{10 * time.Minute, -10 * time.Minute} {
		id := devices.ID("off" + off.String())
		db.Add(t, devices.Device{ID: id})
		save(s, devices.Check{Device: id, Facts: devices.Facts{Firmware: "1.0", CheckedAt: now.Add(10 * time.Minute)}}) // by a version that stored its own clock
		save(s, devices.Check{Device: id, Facts: devices.Facts{Firmware: "2.0", CheckedAt: now}})
		if got := find(t, s, id).Device; got.Firmware != "2.0" {
			t.Errorf("%v: after a check in the future the device has %s", off, got.Firmware)
		}
		if !db.Postgres {
			continue // one node has one clock
		}
		other := openStore(t, db.URL, store.Clock(func() time.Time { return time.Now().Add(off) }))
		save(other, devices.Check{Device: id, Facts: devices.Facts{Firmware: "3.0", CheckedAt: time.Now().Add(off)}})
		got := find(t, s, id).Device
		if got.Firmware != "3.0" || time.Until(got.CheckedAt).Abs() > time.Minute {
			t.Errorf("%v: the later check of a node with another clock gives %s, checked %v", off, got.Firmware, got.CheckedAt)
		}
		save(s, devices.Check{Device: id, Facts: devices.Facts{Firmware: "4.0", CheckedAt: time.Now()}})
		if got := find(t, s, id).Device; got.Firmware != "4.0" {
			t.Errorf("%v: the check after it gives %s", off, got.Firmware)
		}
		save(other, devices.Check{Device: id, Facts: devices.Facts{Firmware: "3.1", CheckedAt: time.Now().Add(off - 2*time.Minute)}}) // it was queued since then
		if got := find(t, s, id).Device; got.Firmware != "4.0" {
			t.Errorf("%v: a check that arrived before it gives %s", off, got.Firmware)
		}
	}
	db.checkCounts(t)
}

// Rows are made and deleted elsewhere: what comes late for a device that was
// forgotten changes nothing.
func testForgotten(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	db.add(t, "stays")
	for _, id := range []devices.ID{"gone", "stays"} {
		s.SaveFacts(factsOf(fullDevice(id)))
		s.SavePresence(fullPresence(id, 1, 1))
	}
	settle(t, s)
	for _, table := range []string{"devices", "presence"} {
		if n := db.Count(t, `SELECT count(*) FROM `+table); n != 1 {
			t.Errorf("%d rows in %s", n, table)
		}
	}
	if got := find(t, s, "stays"); got.Presence.Seq != 1 || got.Device.Board == "" {
		t.Errorf("%+v", got)
	}
	if n := s.Stats().UnknownDevices.Load(); n != 1 {
		t.Errorf("%d rows of unknown devices", n)
	}
	db.checkCounts(t)
}

// last_seen of a device that is offline is that of its last check, too; it went
// offline before that.
func testSeen(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	db.add(t, "never", "offline", "online", "together")
	at := func(minute int) time.Time { return start.Add(time.Duration(minute) * time.Minute) }
	presence := func(id devices.ID, seq int64, online bool, seen time.Time) {
		s.SavePresence(devices.Presence{Device: id, Epoch: 1, Seq: seq, Online: online, LastSeen: seen})
	}
	check := func(id devices.ID, seen, offline time.Time) {
		t.Helper()
		if p := find(t, s, id).Presence; !p.LastSeen.Equal(seen) || !p.OfflineSince.Equal(offline) {
			t.Errorf("%s: seen %v, offline since %v; want %v, %v", id, p.LastSeen, p.OfflineSince, seen, offline)
		}
	}
	presence("offline", 1, false, at(1))
	presence("online", 1, true, at(1))
	settle(t, s)
	release := holdWriter(t, s)
	for _, id := range []devices.ID{"never", "offline", "online", "together"} {
		s.SaveFacts(devices.Check{Device: id, Facts: devices.Facts{CheckedAt: at(5)}})
	}
	presence("together", 1, false, at(2))
	presence("online", 2, true, at(9))
	release()
	settle(t, s)
	check("never", at(5), time.Time{})
	check("offline", at(5), at(1))
	check("online", at(1), time.Time{}) // that of its first row: now is not written
	check("together", at(5), at(2))
	presence("online", 3, false, at(9))
	presence("offline", 2, true, at(9))
	settle(t, s)
	check("online", at(9), at(9))
	check("offline", at(9), time.Time{})
}

// testCountsKept writes at random and compares the counts with the tables.
func testCountsKept(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	random := rand.New(rand.NewPCG(1, 2))
	const n = 40
	for i := range n {
		db.Add(t, devices.Device{ID: mac(i), Admission: []devices.Admission{devices.AdmissionMember, devices.AdmissionRevoked}[i%2], Facts: devices.Facts{Board: fmt.Sprint("b", i%3)}})
	}
	pick := func(names ...string) string { return names[random.IntN(len(names))] }
	for range 12 {
		for range 60 {
			id := mac(random.IntN(n + 2)) // two are not there
			if random.IntN(2) == 0 {
				s.SaveFacts(devices.Check{Device: id, Facts: devices.Facts{Board: pick("a", "b", "", "c"), Firmware: pick("1", "2.0", "x"), CheckedAt: start.Add(time.Duration(random.IntN(1000)) * time.Second)}})
				continue
			}
			p := devices.Presence{Device: id, Epoch: devices.Epoch(1 + random.IntN(9)), Seq: int64(random.IntN(9)), Online: random.IntN(2) == 0,
				Node: pick("n", "m"), Transport: devices.Transport(pick("mqtt", "websocket")), MCP: devices.MCPState(pick("ready", "failed"))}
			if random.IntN(3) > 0 {
				p.Catalog = sha256.Sum256([]byte(pick("x", "y")))
			}
			if !p.Online {
				p.Reason = pick("drain", "lost")
			}
			s.SavePresence(p)
		}
		settle(t, s)
		db.checkCounts(t)
	}
}

func testPresenceFence(t *testing.T, db Database) {
	type pair struct {
		epoch devices.Epoch
		seq   int64
	}
	s := openStore(t, db.URL)
	db.add(t, "table", "queued")
	steps := []struct{ save, want pair }{
		{pair{5, 3}, pair{5, 3}},
		{pair{5, 2}, pair{5, 3}}, // older seq
		{pair{4, 9}, pair{5, 3}}, // older epoch, higher seq
		{pair{5, 3}, pair{5, 3}}, // the same pair
		{pair{5, 4}, pair{5, 4}},
		{pair{6, 0}, pair{6, 0}}, // newer epoch, lower seq
	}
	for i, step := range steps {
		for _, way := range []string{"table", "queue"} {
			id := devices.ID(way)
			p := fullPresence(id, step.save.epoch, step.save.seq)
			p.Node = fmt.Sprintf("step-%d", i)
			if way == "table" {
				s.SavePresence(p)
				settle(t, s)
				got := find(t, s, id).Presence
				if (pair{got.Epoch, got.Seq}) != step.want {
					t.Errorf("step %d: stored %d/%d, want %v", i, got.Epoch, got.Seq, step.want)
				}
				if applied := got.Node == p.Node; applied != (step.save == step.want && i != 3) {
					t.Errorf("step %d: applied %v: %+v", i, applied, got)
				}
			}
		}
	}
	if n := s.Stats().StalePresence.Load(); n != 3 {
		t.Errorf("%d stale rows counted, want 3", n)
	}

	release := holdWriter(t, s)
	for _, step := range steps {
		s.SavePresence(fullPresence("queued", step.save.epoch, step.save.seq))
	}
	s.SavePresence(fullPresence("queued", 5, 100))
	release()
	settle(t, s)
	if got := find(t, s, "queued").Presence; got.Epoch != 6 || got.Seq != 0 {
		t.Errorf("queued: stored %d/%d, want 6/0", got.Epoch, got.Seq)
	}
}

// A session with an ignored online row is notified of the newer stored row; one with an ignored
// offline row is not.
func testStaleWrite(t *testing.T, db Database) {
	var mu sync.Mutex
	var reported []string
	s := openStore(t, db.URL, store.OnStaleWrite(func(p devices.Presence) {
		mu.Lock()
		defer mu.Unlock()
		reported = append(reported, fmt.Sprintf("%s %d/%d %t %s", p.Device, p.Epoch, p.Seq, p.Online, p.Node))
	}))
	db.add(t, "a", "b", "c", "d", "e")
	save := func(id devices.ID, epoch devices.Epoch, seq int64, online bool, node string) {
		p := fullPresence(id, epoch, seq)
		p.Online, p.Node, p.Session = online, node, node
		s.SavePresence(p)
	}
	save("a", 9, 1, true, "other")
	save("b", 9, 1, true, "other")
	save("c", 5, 2, false, "other") // somebody declared this node lost
	save("d", 5, 1, true, "me")
	settle(t, s)
	save("a", 5, 1, true, "me")
	save("b", 5, 2, false, "me") // ended in favor of another
	save("c", 5, 2, true, "me")
	save("d", 5, 1, true, "me") // again, as after a lost answer
	save("e", 5, 1, true, "me")
	settle(t, s)
	devicetest.Eventually(t, "the newer rows are reported", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(reported) >= 2
	})
	mu.Lock()
	defer mu.Unlock()
	slices.Sort(reported)
	if got, want := strings.Join(reported, ", "), "a 9/1 true other, c 5/2 false other"; got != want {
		t.Errorf("reported %s, want %s", got, want)
	}
}

// A node renews its lease while its rows wait for another node's.
func testLeaseBesideRows(t *testing.T, db Database) {
	if !db.Postgres {
		return // one node alone: it has no lease
	}
	s := openStore(t, db.URL)
	db.add(t, mac(1))
	s.SavePresence(fullPresence(mac(1), 1, 1))
	settle(t, s)
	other, err := db.Raw.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Rollback() }()
	if _, err := other.ExecContext(t.Context(), `SELECT 1 FROM presence FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	s.SavePresence(fullPresence(mac(1), 2, 1))
	devicetest.Eventually(t, "the row waits", func() bool {
		return db.Count(t, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`) == 1
	})
	ctx, cancel := context.WithTimeout(t.Context(), patience/4)
	defer cancel()
	lease := devices.Lease{Node: "n", Instance: "one", Started: start}
	for lease.Beat = range int64(3) {
		if leases, _, err := s.Beat(ctx, lease); err != nil || len(leases) != 1 || leases[0].Beat != lease.Beat {
			t.Fatalf("beat %d: %v, %v", lease.Beat, leases, err)
		}
	}
	if waiting := s.Stats().PresenceWaiting.Load(); waiting != 1 {
		t.Errorf("%d rows wait", waiting)
	}
}

func testLease(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	mine := devices.Lease{Node: "n", Instance: "one", Beat: 1, Started: start, API: "http://one"}
	beat := func(l devices.Lease) (beats []int64, begun bool) {
		t.Helper()
		leases, begun, err := s.Beat(t.Context(), l)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range leases {
			beats = append(beats, l.Beat)
		}
		return beats, begun
	}
	expect := func(l devices.Lease, wantBeat int64, wantBegun bool) {
		t.Helper()
		if beats, begun := beat(l); len(beats) != 1 || beats[0] != wantBeat || begun != wantBegun {
			t.Errorf("beat %d: stored %v, begun %t; want %d, %t", l.Beat, beats, begun, wantBeat, wantBegun)
		}
	}
	expect(mine, 1, true)
	stopped := mine
	mine.Beat = 2
	expect(mine, 2, false)
	twin := devices.Lease{Node: "n", Instance: "two", Beat: 7, Started: start}
	if beats, begun := beat(twin); len(beats) != 2 || !begun { // a start has a lease of its own
		t.Errorf("another start of the node: %v, %t", beats, begun)
	}
	if err := s.EndLease(t.Context(), twin); err != nil {
		t.Fatal(err)
	}
	if err := s.DropNode(t.Context(), stopped); err != nil {
		t.Fatal(err)
	}
	expect(mine, 2, false) // it went on since it was seen
	if err := s.DropNode(t.Context(), mine); err != nil {
		t.Fatal(err)
	}
	mine.Beat = 3
	expect(mine, 3, true)

	// What a node left online, page by page.
	for n := range 5 {
		p := fullPresence(mac(n), 5, 1)
		p.Online, p.Node = true, "gone"
		db.add(t, p.Device)
		s.SavePresence(p)
	}
	settle(t, s)
	page := func(after devices.ID, limit int) (ids []devices.ID) {
		t.Helper()
		rows, err := s.OnlineOf(t.Context(), "gone", after, limit)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range rows {
			ids = append(ids, p.Device)
		}
		return ids
	}
	if got, want := page(mac(1), 2), []devices.ID{mac(2), mac(3)}; !slices.Equal(got, want) {
		t.Errorf("a page is %v, want %v", got, want)
	}
	if nodes, err := s.NodesWithoutLease(t.Context()); err != nil || !slices.Equal(nodes, []string{"gone"}) {
		t.Errorf("nodes without a lease: %v, %v", nodes, err)
	}
}

func testCoalescing(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	db.add(t, "busy")
	release := holdWriter(t, s)
	before := s.Stats().DeviceRows.Load() + s.Stats().PresenceRows.Load()
	for n := range 1000 {
		s.SaveFacts(devices.Check{Device: "busy", Facts: devices.Facts{Board: fmt.Sprint(n), CheckedAt: start.Add(time.Duration(n) * time.Second)}})
		s.SavePresence(fullPresence("busy", 1, int64(n+1)))
	}
	if waiting := s.Stats().DevicesWaiting.Load() + s.Stats().PresenceWaiting.Load(); waiting != 2 {
		t.Errorf("%d rows wait, want 2", waiting)
	}
	release()
	settle(t, s)
	if row := find(t, s, "busy"); row.Presence.Seq != 1000 || row.Device.Board != "999" {
		t.Errorf("not the newest: %+v", row)
	}
	if n := s.Stats().DeviceRows.Load() + s.Stats().PresenceRows.Load() - before; n != 2 {
		t.Errorf("%d rows written, want 2", n)
	}
}

func testCancelled(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := s.Find(ctx, "x")
	mustBe(t, err, context.Canceled)
	if err := s.Ready(); err != nil {
		t.Errorf("not ready because a caller left: %v", err)
	}
}
