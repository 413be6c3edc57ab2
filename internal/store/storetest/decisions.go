package storetest

import (
	"reflect"
	"testing"
	"time"

	"fleetd/internal/devices"
)

// Of what two nodes decided of a device, the later decision holds, whichever is
// written last, in the queue and in the table.
func testDecisions(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	late, early := fullDevice("x"), fullDevice("x")
	late.Name, late.Admission, late.EditedAt, late.Decided = "lamp", devices.AdmissionMember, start.Add(time.Hour), devices.Decided{}
	early.Name, early.Admission, early.EditedAt, early.Decided = "", devices.AdmissionPending, start.Add(time.Minute), devices.Decided{}
	early.Firmware, early.CheckedAt = "9.9", late.CheckedAt.Add(time.Minute) // it checked in later
	check := func(way string) {
		t.Helper()
		settle(t, s)
		if d := find(t, s, "x").Device; d.Name != "lamp" || d.Admission != devices.AdmissionMember || d.Firmware != "9.9" || !d.EditedAt.Equal(late.EditedAt) {
			t.Errorf("%s: %+v", way, d)
		}
	}
	s.SaveDevice(late)
	settle(t, s)
	s.SaveDevice(early)
	check("in the table")
	if err := s.Forget(t.Context(), "x"); err != nil {
		t.Fatal(err)
	}
	release := holdWriter(t, s)
	s.SaveDevice(late)
	s.SaveDevice(early)
	release()
	check("in the queue")
}

// Of what two nodes decided of different parts of a device, both hold,
// whichever is written last, in the queue and in the table; who waits is not
// among it.
func testDecidedParts(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	base := fullDevice("x")
	name, labels, check := base, base, base
	name.Name, name.EditedAt = "lamp", start.Add(2*time.Hour)
	name.Decided = base.DecidedAt()
	name.Decided.Name = name.EditedAt.UnixMicro()
	labels.Labels, labels.EditedAt = map[string]string{"room": "lab"}, start.Add(time.Hour+time.Minute)
	labels.Decided = base.DecidedAt()
	labels.Decided.Labels = labels.EditedAt.UnixMicro()
	check.PendingID, check.CheckedAt = "stranger", start.Add(3*time.Hour)
	states := []devices.Device{name, labels, check}
	for _, order := range [][]int{{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}} {
		for _, way := range []string{"in the table", "in the queue"} {
			release := func() {}
			if way == "in the queue" {
				release = holdWriter(t, s)
			}
			for _, i := range order {
				s.SaveDevice(states[i])
				if way == "in the table" {
					settle(t, s)
				}
			}
			release()
			settle(t, s)
			d := find(t, s, "x").Device
			if d.Name != "lamp" || d.Labels["room"] != "lab" || d.ClientID != base.ClientID || d.PendingID != "stranger" || !d.EditedAt.Equal(name.EditedAt) ||
				d.Decided != (devices.Decided{Client: base.DecidedAt().Client, Name: name.Decided.Name, Labels: labels.Decided.Labels, Prefer: base.DecidedAt().Prefer}) {
				t.Errorf("%s, order %v: %+v", way, order, d)
			}
			if err := s.Forget(t.Context(), "x"); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// What a program decided that knows no times of parts holds against a check at
// a node that missed it.
func testOlderProgram(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	d := fullDevice("x")
	s.SaveDevice(d)
	settle(t, s)
	db.Exec(t, "UPDATE devices SET name = 'new', name_folded = 'new', admission = 'revoked', edited_at = $1 WHERE device = 'x'", start.Add(2*time.Hour).UnixMicro())
	d.CheckedAt = start.Add(3 * time.Hour)
	s.SaveDevice(d)
	settle(t, s)
	if got := find(t, s, "x").Device; got.Name != "new" || got.Admission != devices.AdmissionRevoked || !got.CheckedAt.Equal(d.CheckedAt) {
		t.Errorf("%+v", got)
	}
	d.Name, d.EditedAt = "newer", start.Add(4*time.Hour)
	d.Decided.Name = d.EditedAt.UnixMicro()
	s.SaveDevice(d)
	settle(t, s)
	if got := find(t, s, "x").Device; got.Name != "newer" || got.Admission != devices.AdmissionRevoked {
		t.Errorf("after a decision by this program: %+v", got)
	}
	d.CheckedAt = start.Add(5 * time.Hour)
	s.SaveDevice(d)
	settle(t, s)
	if got := find(t, s, "x").Device; got.Admission != devices.AdmissionRevoked {
		t.Errorf("after one more check: %+v", got)
	}
}

func testDeviceMerge(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	newer := fullDevice("x")
	older := newer
	older.CheckedAt, older.FirstSeen = newer.CheckedAt.Add(-time.Minute), newer.FirstSeen.Add(-time.Hour)
	older.Board, older.Firmware, older.ELF, older.Chip = "old", "old", "old", "old"
	older.Language, older.Serial, older.ActivateV2 = "old", "old", false
	older.Name, older.Labels, older.Prefer = "renamed", map[string]string{"a": "b"}, devices.TransportMQTT
	older.ClientID, older.PendingID, older.Admission = "approved", "", devices.AdmissionRevoked

	// What was decided comes from the last write, what was reported and who waits
	// from the newest check, and first_seen is the lowest.
	want := newer
	want.Name, want.Labels, want.Prefer = older.Name, older.Labels, older.Prefer
	want.ClientID, want.Admission = older.ClientID, older.Admission
	want.FirstSeen = older.FirstSeen

	for _, way := range []string{"table", "queue"} {
		id := devices.ID(way)
		newer.ID, older.ID, want.ID = id, id, id
		release := func() {}
		if way == "queue" {
			release = holdWriter(t, s)
		}
		s.SaveDevice(newer)
		if way == "table" {
			settle(t, s)
		}
		s.SaveDevice(older)
		release()
		settle(t, s)
		if got := find(t, s, id).Device; !reflect.DeepEqual(got, want) {
			t.Errorf("%s: got  %+v\nwant %+v", way, got, want)
		}
		again := newer
		again.FirstSeen = time.Time{}
		s.SaveDevice(again)
		settle(t, s)
		again.FirstSeen = older.FirstSeen
		if got := find(t, s, id).Device; !reflect.DeepEqual(got, again) {
			t.Errorf("%s, saved again: got  %+v\nwant %+v", way, got, again)
		}
	}
}
