package devices_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

// decidedRow is a member as the database has it.
func decidedRow(name, client string, at time.Time) devices.Device {
	return devices.Device{ID: id, ClientID: client, Admission: devices.AdmissionMember, Name: name, Labels: map[string]string{"room": name}, CheckedAt: at, EditedAt: at}
}

func view(t *testing.T, s *devices.Service) devices.Device {
	t.Helper()
	v, err := s.Get(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return v.Device
}

// A node that started from its own notes, while the fleet decided something
// else, takes that over when it can read it. A check, which anybody can make,
// brings nothing old back, neither here nor on other nodes.
func TestOldNotesGiveWay(t *testing.T) {
	start := time.Now().Add(-time.Hour).UTC().Truncate(time.Microsecond)
	old, current := decidedRow("old", "c-old", start), decidedRow("new", "c-new", start.Add(time.Minute))
	for _, client := range []string{"c-old", "c-new", "c-stranger"} {
		for _, when := range []string{"before it reads", "after it reads"} {
			t.Run(client+" "+when, func(t *testing.T) {
				p := devicetest.New()
				b := p.Service(t, devices.Config{Node: "b"})
				b.Restore([]devices.Row{{Device: old}}, nil)
				p.SaveDevice(current)
				read := func() {
					if err := b.Load(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				if when == "after it reads" {
					read()
				}
				if _, err := b.CheckIn(devices.CheckIn{Device: id, ClientID: client}); err != nil {
					t.Fatal(err)
				}
				rows, _ := b.Known()
				other := devicetest.New()
				other.SaveDevice(current)
				a := other.Service(t, devices.Config{Node: "a"})
				a.Learn(devices.News{Device: &rows[0].Device})
				if d := view(t, a); d.Name != "new" || d.ClientID != "c-new" || d.Labels["room"] != "new" {
					t.Errorf("another node takes over %+v", d)
				}
				read()
				if d := view(t, b); d.Name != "new" || d.ClientID != "c-new" || d.Labels["room"] != "new" {
					t.Errorf("the node has %+v", d)
				}
			})
		}
	}
}

// Two nodes edit different parts of a device at the same time: both edits hold,
// in whichever order each learns of the other's.
func TestEditsOfDifferentParts(t *testing.T) {
	name, labels, prefer := "lamp", map[string]string{"room": "lab"}, devices.TransportWebSocket
	edits := []devices.Edit{{Name: &name}, {Labels: &labels}, {Prefer: &prefer}}
	for i := range edits {
		for j := range edits {
			if i == j {
				continue
			}
			start := time.Now().Add(-time.Hour).UTC().Truncate(time.Microsecond)
			var nodes [2]*devices.Service
			var ports [2]*devicetest.Ports
			for n := range nodes {
				ports[n] = devicetest.New()
				ports[n].SaveDevice(decidedRow("old", "c", start))
				nodes[n] = ports[n].Service(t, devices.Config{})
			}
			if err := errors.Join(nodes[0].Edit(id, edits[i]), nodes[1].Edit(id, edits[j])); err != nil {
				t.Fatal(err)
			}
			first, second := view(t, nodes[0]), view(t, nodes[1])
			nodes[0].Learn(devices.News{Device: &second})
			nodes[1].Learn(devices.News{Device: &first})
			for n, s := range nodes {
				d := view(t, s)
				for _, edit := range []devices.Edit{edits[i], edits[j]} {
					if edit.Name != nil && d.Name != name || edit.Labels != nil && d.Labels["room"] != "lab" || edit.Prefer != nil && d.Prefer != prefer {
						t.Errorf("node %d, edits %d and %d: %+v", n, i, j, d)
					}
				}
			}
		}
	}
}

// A client that somebody else's check names does not touch what is decided, and
// an approval ends its wait everywhere.
func TestWaitingClientIsNoDecision(t *testing.T) {
	start := time.Now().Add(-time.Hour).UTC().Truncate(time.Microsecond)
	ports := devicetest.New()
	ports.SaveDevice(decidedRow("lamp", "c", start))
	s := ports.Service(t, devices.Config{})
	if _, err := s.CheckIn(devices.CheckIn{Device: id, ClientID: "other"}); err != nil {
		t.Fatal(err)
	}
	d := view(t, s)
	if d.PendingID != "other" || !d.EditedAt.Equal(start) || d.Decided != (devices.Decided{}) {
		t.Fatalf("after a check: %+v", d)
	}
	if _, err := s.Approve(string(id)); err != nil {
		t.Fatal(err)
	}
	approved := view(t, s)
	approved.KeepNewer(&d)
	d2 := d
	d2.KeepNewer(&approved)
	for _, got := range []devices.Device{approved, d2} {
		if got.PendingID != "" || got.ClientID != "other" {
			t.Errorf("merged: client %q, %q waits", got.ClientID, got.PendingID)
		}
	}
}

// The search of tools and the start of a node take the locks of shards and of
// devices in one order.
func TestSearchBesideAStart(t *testing.T) {
	ports := devicetest.New()
	s := ports.Service(t, devices.Config{Node: "b", Alive: func(string) bool { time.Sleep(time.Millisecond); return false }})
	var rows []devices.Row
	for i := range 200 {
		d := devices.Device{ID: devices.ID(fmt.Sprintf("02:00:00:00:01:%02x", i)), Admission: devices.AdmissionMember}
		ports.SaveDevice(d)
		ports.SavePresence(devices.Presence{Device: d.ID, Epoch: 1, Seq: 1, Online: true, Node: "gone"})
		rows = append(rows, devices.Row{Device: d})
	}
	s.Restore(rows, nil)
	stop := make(chan struct{})
	var beside sync.WaitGroup
	for range 2 {
		beside.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					s.SearchTools(devicetest.Admin, "volume", 10, 3)
				}
			}
		})
	}
	for writer := range 4 {
		beside.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default: // a writer of the shards is all that is wanted
					_, _ = s.CheckIn(devices.CheckIn{Device: devices.ID(fmt.Sprintf("02:00:00:%02x:%02x:%02x", 2+writer, i>>8&255, i&255)), ClientID: "c"})
				}
			}
		})
	}
	done := make(chan error, 1)
	go func() { done <- s.Load(t.Context()) }()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		panic("the start hangs") // with every stack: nothing could be stopped
	}
	close(stop)
	beside.Wait()
}

// A program from before the parts had times raises EditedAt alone: then all
// parts are from that moment, in its rows and against its notes.
func TestOlderProgramDecides(t *testing.T) {
	start := time.Now().Add(-time.Hour).UTC().Truncate(time.Microsecond)
	at := start.UnixMicro()
	parts := devices.Decided{Client: at, Name: at, Labels: at, Prefer: at}
	for name, mine := range map[string]devices.Decided{"notes of that program": {}, "notes of this one": parts} {
		own, row := decidedRow("old", "c-old", start), decidedRow("new", "c-new", start.Add(time.Minute))
		own.Decided, row.Decided = mine, parts
		own.KeepNewer(&row)
		if own.Name != "new" || own.ClientID != "c-new" || own.Labels["room"] != "new" || own.DecidedAt().Name != row.EditedAt.UnixMicro() {
			t.Errorf("%s: %+v", name, own)
		}
	}
}

// An approved client does not go on waiting where a clock is ahead.
func TestApprovalWithSkew(t *testing.T) {
	waiting := decidedRow("lamp", "c", time.Now().Add(-time.Hour).UTC().Truncate(time.Microsecond))
	waiting.PendingID, waiting.CheckedAt = "other", time.Now().Add(5*time.Second).UTC().Truncate(time.Microsecond)
	ports := devicetest.New()
	ports.SaveDevice(waiting)
	s := ports.Service(t, devices.Config{})
	if _, err := s.Approve(string(id)); err != nil {
		t.Fatal(err)
	}
	approved := view(t, s)
	waiting.KeepNewer(&approved)
	if waiting.ClientID != "other" || waiting.PendingID != "" {
		t.Errorf("client %q, %q waits", waiting.ClientID, waiting.PendingID)
	}
}

// An approval holds against the revocation before it, though the node that
// revoked has a clock that is ahead, and in whichever order they arrive.
func TestApprovalAfterARevocationAhead(t *testing.T) {
	ports := devicetest.New()
	ports.SaveDevice(decidedRow("lamp", "c", time.Now().Add(-time.Hour).UTC().Truncate(time.Microsecond)))
	s := ports.Service(t, devices.Config{})
	ahead := time.Now().Add(5 * time.Second).UTC().Truncate(time.Microsecond)
	revoked := devices.Exception{Device: id, Generation: 1, Revoked: true, Reason: "revoked", ChangedAt: ahead}
	d := view(t, s)
	d.Admission, d.EditedAt = devices.AdmissionRevoked, ahead
	s.Learn(devices.News{Exception: &revoked})
	s.Learn(devices.News{Device: &d})
	if _, err := s.Approve(string(id)); err != nil {
		t.Fatal(err)
	}
	approved := ports.Exceptions[len(ports.Exceptions)-1]
	if approved.Revoked || approved.Generation != 1 || !approved.ChangedAt.After(ahead) {
		t.Errorf("the approval is %+v", approved)
	}
	s.Learn(devices.News{Exception: &revoked}) // once more, late
	if generation, ok := s.Generation(id); !ok || generation != 1 {
		t.Errorf("generation %d, %t", generation, ok)
	}
}
