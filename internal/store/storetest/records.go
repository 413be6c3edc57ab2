package storetest

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/store"
)

func testRoundTrip(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	device, presence := fullDevice(mac(1)), fullPresence(mac(1), 1<<60, 9)
	bare := devices.Device{ID: "bare"}
	s.SaveDevice(device)
	s.SavePresence(presence)
	s.SaveDevice(bare)
	settle(t, s)
	if got, want := find(t, s, mac(1)), (devices.Row{Device: device, Presence: presence}); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	bare.Decided = devices.Decided{Client: 1, Name: 1, Labels: 1, Prefer: 1} // never
	if got, want := find(t, s, "bare"), (devices.Row{Device: bare}); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func testNotFound(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	s.SavePresence(fullPresence("only-presence", 1, 1))
	settle(t, s)
	for _, id := range []devices.ID{"nobody", "only-presence"} {
		_, err := s.Find(t.Context(), id)
		mustBe(t, err, devices.ErrNotFound)
	}
	_, err := s.Catalog(t.Context(), devices.Hash{1})
	mustBe(t, err, devices.ErrNotFound)
	if entries := history(t, s, "nobody"); len(entries) != 0 {
		t.Errorf("history of nobody: %v", entries)
	}
}

func testPresenceFence(t *testing.T, db Database) {
	type pair struct {
		epoch devices.Epoch
		seq   int64
	}
	s := openStore(t, db.URL)
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
				s.SaveDevice(devices.Device{ID: id})
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
	s.SaveDevice(devices.Device{ID: "queued"})
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

// Who says that a device is online and is not believed hears of the row that
// stands in front; who says that it is gone does not care.
func testOutranked(t *testing.T, db Database) {
	var mu sync.Mutex
	var heard []string
	s := openStore(t, db.URL, store.OnOutranked(func(p devices.Presence) {
		mu.Lock()
		defer mu.Unlock()
		heard = append(heard, fmt.Sprintf("%s %d/%d %t %s", p.Device, p.Epoch, p.Seq, p.Online, p.Node))
	}, func(id devices.ID) { t.Errorf("unsure of %s", id) }))
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
	save("b", 5, 2, false, "me") // gave way
	save("c", 5, 2, true, "me")
	save("d", 5, 1, true, "me") // again, as after a lost answer
	save("e", 5, 1, true, "me")
	settle(t, s)
	eventually(t, "the refusals are told", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(heard) >= 2
	})
	mu.Lock()
	defer mu.Unlock()
	slices.Sort(heard)
	if got, want := strings.Join(heard, ", "), "a 9/1 true other, c 5/2 false other"; got != want {
		t.Errorf("told %s, want %s", got, want)
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
	stood := mine
	mine.Beat = 2
	expect(mine, 2, false)
	twin := devices.Lease{Node: "n", Instance: "two", Beat: 7, Started: start}
	if beats, begun := beat(twin); len(beats) != 2 || !begun { // a start has a lease of its own
		t.Errorf("another start of the node: %v, %t", beats, begun)
	}
	if err := s.EndLease(t.Context(), twin); err != nil {
		t.Fatal(err)
	}
	if err := s.DropNode(t.Context(), stood); err != nil {
		t.Fatal(err)
	}
	expect(mine, 2, false) // it went on since it was seen
	if err := s.DropNode(t.Context(), mine); err != nil {
		t.Fatal(err)
	}
	mine.Beat = 3
	expect(mine, 3, true)

	// What a node left online, page by page, and what a later start of it holds.
	for n := range 5 {
		p := fullPresence(mac(n), 5, 1)
		p.Online, p.Node, p.ConnectedAt = true, "gone", start.Add(time.Duration(n)*time.Minute)
		s.SaveDevice(devices.Device{ID: p.Device})
		s.SavePresence(p)
	}
	settle(t, s)
	page := func(before time.Time, after devices.ID, limit int) (ids []devices.ID) {
		t.Helper()
		rows, err := s.OnlineOf(t.Context(), "gone", before, after, limit)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range rows {
			ids = append(ids, p.Device)
		}
		return ids
	}
	if got, want := page(time.Time{}, mac(1), 2), []devices.ID{mac(2), mac(3)}; !slices.Equal(got, want) {
		t.Errorf("a page is %v, want %v", got, want)
	}
	if got, want := page(start.Add(2*time.Minute), "", 9), []devices.ID{mac(0), mac(1)}; !slices.Equal(got, want) {
		t.Errorf("before the next start %v were connected, want %v", got, want)
	}
	if orphans, err := s.Orphans(t.Context()); err != nil || !slices.Equal(orphans, []string{"gone"}) {
		t.Errorf("nodes without a lease: %v, %v", orphans, err)
	}
}

func testCoalescing(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	release := holdWriter(t, s)
	before := s.Stats().DeviceRows.Load() + s.Stats().PresenceRows.Load()
	for n := range 1000 {
		d := fullDevice("busy")
		d.Labels = map[string]string{"n": fmt.Sprint(n)}
		s.SaveDevice(d)
		clear(d.Labels) // the store has read them
		s.SavePresence(fullPresence("busy", 1, int64(n+1)))
	}
	if waiting := s.Stats().DevicesWaiting.Load() + s.Stats().PresenceWaiting.Load(); waiting != 2 {
		t.Errorf("%d rows wait, want 2", waiting)
	}
	release()
	eventually(t, "rows written", func() bool {
		return s.Stats().DeviceRows.Load()+s.Stats().PresenceRows.Load() > before
	})
	if row := find(t, s, "busy"); row.Presence.Seq != 1000 || row.Device.Labels["n"] != "999" {
		t.Errorf("not the newest: %+v", row)
	}
	if n := s.Stats().DeviceRows.Load() + s.Stats().PresenceRows.Load() - before; n != 2 {
		t.Errorf("%d rows written, want 2", n)
	}
}

func testPaging(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	ids := []devices.ID{"a-b", "a_b", "ab", "a0", "a", "b", "a-", "a_", mac(1), mac(2), mac(3), "robot-10", "robot-9", "robot1"}
	for _, id := range ids {
		s.SaveDevice(devices.Device{ID: id})
	}
	settle(t, s)
	slices.Sort(ids)
	for _, limit := range []int{1, 3, len(ids), 1000, 0} {
		var got []devices.ID
		q := devices.Query{Limit: limit}
		for {
			page, err := s.List(t.Context(), q)
			if err != nil {
				t.Fatal(err)
			}
			if limit > 0 && len(page) > limit {
				t.Fatalf("a page of %d, limit %d", len(page), limit)
			}
			if len(page) == 0 {
				break
			}
			for _, row := range page {
				got = append(got, row.Device.ID)
			}
			q.After = got[len(got)-1]
		}
		if !slices.Equal(got, ids) {
			t.Errorf("limit %d: got %q, want %q", limit, got, ids)
		}
	}
}

// list is the ids that a query selects.
func list(t *testing.T, s devices.Records, q devices.Query) string {
	t.Helper()
	rows, err := s.List(t.Context(), q)
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, row := range rows {
		ids = append(ids, string(row.Device.ID))
	}
	return strings.Join(ids, " ")
}

func testFilters(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	save := func(id devices.ID, admission devices.Admission, pending, name, board, firmware string, online bool, transport devices.Transport) {
		s.SaveDevice(devices.Device{ID: id, Admission: admission, PendingID: pending, Name: name, Board: board, Firmware: firmware})
		if transport != "" {
			s.SavePresence(devices.Presence{Device: id, Epoch: 1, Online: online, Transport: transport})
		}
	}
	save("a", devices.AdmissionMember, "", "Küche", "Bread-Compact", "2.4.2", true, devices.TransportMQTT)
	save("b", devices.AdmissionMember, "other", "100%_sure", "box", "2.4.2", true, devices.TransportWebSocket)
	save("c", devices.AdmissionMember, "", "ÖLRAUM", "box", "2.4.1", false, devices.TransportMQTT)
	save("d", devices.AdmissionPending, "", "", "box", "2.4.1", false, "")
	save("e", devices.AdmissionRevoked, "", "客厅", "bread", "1.9", false, "")
	settle(t, s)
	for _, test := range []struct {
		q    devices.Query
		want string
	}{
		{devices.Query{}, "a b c d e"},
		{devices.Query{State: "online"}, "a b"},
		{devices.Query{State: "offline"}, "c e"},
		{devices.Query{State: "pending"}, "b d"},
		{devices.Query{Transport: "mqtt"}, "a c"},
		{devices.Query{Board: "box"}, "b c d"},
		{devices.Query{Firmware: "2.4.2", Board: "box"}, "b"},
		{devices.Query{Text: "küche"}, "a"},
		{devices.Query{Text: "ölraum"}, "c"},
		{devices.Query{Text: "ÖLR"}, "c"},
		{devices.Query{Text: "bread"}, "a e"},
		{devices.Query{Text: "%"}, "b"},
		{devices.Query{Text: "_"}, "b"},
		{devices.Query{Text: "厅"}, "e"},
		{devices.Query{Text: "x\x00"}, ""},
		{devices.Query{Text: "a", After: "a"}, "c e"},
		{devices.Query{State: "online", Transport: "mqtt", Text: "K"}, "a"},
	} {
		if got := list(t, s, test.q); got != test.want {
			t.Errorf("%+v: got %q, want %q", test.q, got, test.want)
		}
	}
	if _, err := s.List(t.Context(), devices.Query{State: "asleep"}); err == nil {
		t.Error("an unknown state was accepted")
	}
}

func testLabelFilters(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	for id, labels := range map[devices.ID]map[string]string{
		"a": {"room": "kitchen", "floor": "1"},
		"b": {"room": "Kitchen"},
		"c": {"room": "kitchen2", "note": `room":"kitchen`},
		"d": {`x"room`: "kitchen"},
		"e": {"%": "_", "owner": "a&b <c>"},
		"f": {"a,": ":", "x": "y"},
		"g": {"back\\": "slash\\", "room": ""},
		"h": {"nul": "a\x00b", "房间": "厨房"},
		"i": nil,
	} {
		s.SaveDevice(devices.Device{ID: id, Labels: labels})
	}
	settle(t, s)
	for _, test := range []struct{ label, want string }{
		{"room", "a b c g"},
		{"room=kitchen", "a"},
		{"room=Kitchen", "b"},
		{"ROOM", ""},
		{"room=", "g"},
		{`x"room=kitchen`, "d"},
		{"%=_", "e"},
		{"%", "e"},
		{"_", ""},
		{"owner=a&b <c>", "e"},
		{":=,", ""},
		{"a,=:", "f"},
		{`back\=slash\`, "g"},
		{"nul=a\x00b", "h"},
		{"房间=厨房", "h"},
		{"floor=1=1", ""},
	} {
		if got := list(t, s, devices.Query{Label: test.label}); got != test.want {
			t.Errorf("%q: got %q, want %q", test.label, got, test.want)
		}
	}
	for _, test := range []struct {
		selector access.Selector
		want     string
	}{
		{access.Selector{"room": "kitchen"}, "a"},
		{access.Selector{"room": "kitchen", "floor": "1"}, "a"},
		{access.Selector{"room": "kitchen", "floor": "2"}, ""},
		{access.Selector{"device": "c"}, "c"},
		{access.Selector{"device": "c", "room": "kitchen2"}, "c"},
		{access.Selector{"device": "c", "room": "kitchen"}, ""},
		{access.Selector{"room": ""}, "g"},
		{access.Selector{"nul": "a\x00b"}, "h"},
		{nil, "a b c d e f g h i"},
	} {
		if got := list(t, s, devices.Query{Selector: test.selector}); got != test.want {
			t.Errorf("%v: got %q, want %q", test.selector, got, test.want)
		}
	}
	// Rows that the text matches and the labels do not must not end a page early.
	for n := range 30 {
		s.SaveDevice(devices.Device{ID: mac(n), Labels: map[string]string{fmt.Sprintf(`%d"trap`, n): "v"}})
	}
	s.SaveDevice(devices.Device{ID: "z", Labels: map[string]string{"trap": "v"}})
	settle(t, s)
	if got := list(t, s, devices.Query{Label: "trap=v", Limit: 2}); got != "z" {
		t.Errorf("behind traps: got %q, want z", got)
	}
}

func testLoadDevices(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	const n = 2300 // more than two pages
	for i := range n {
		s.SaveDevice(devices.Device{ID: mac(i), Name: fmt.Sprint(i)})
		s.SavePresence(devices.Presence{Device: mac(i), Epoch: 7, Seq: int64(i)})
	}
	settle(t, s)
	i := 0
	if err := s.LoadDevices(t.Context(), func(row devices.Row) error {
		if row.Device.ID != mac(i) || row.Presence.Seq != int64(i) {
			return fmt.Errorf("row %d is %+v", i, row)
		}
		i++
		return nil
	}); err != nil || i != n {
		t.Errorf("%d rows, error %v", i, err)
	}
	enough := fmt.Errorf("enough")
	mustBe(t, s.LoadDevices(t.Context(), func(devices.Row) error { return enough }), enough)
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
