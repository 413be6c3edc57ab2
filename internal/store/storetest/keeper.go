package storetest

import (
	"context"
	"reflect"
	"strconv"
	"testing"
	"time"

	"fleetd/internal/devices"
)

// Written waits for what was saved before, whether the writer has taken it or
// not, and for nothing else.
func testWritten(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	written := func(id devices.ID, limit time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		return s.Written(ctx, id)
	}
	mustBe(t, written("never saved", patience), nil)
	for i := range 20 {
		s.SaveDevice(fullDevice("a"))
		s.SaveException(devices.Exception{Device: "a", Generation: int64(i + 1)})
		mustBe(t, written("a", patience), nil)
		if n := db.Count(t, `SELECT count(*) FROM credential_exceptions WHERE generation = `+strconv.Itoa(i+1)); n != 1 {
			t.Fatalf("%d exceptions of generation %d", n, i+1)
		}
	}
	release := holdWriter(t, s)
	s.SaveDevice(fullDevice("b"))
	mustBe(t, written("b", 50*time.Millisecond), context.DeadlineExceeded)
	release()
	mustBe(t, written("b", patience), nil)
	if n := db.Count(t, `SELECT count(*) FROM devices WHERE device = 'b'`); n != 1 {
		t.Error("the row is not there")
	}
}

func testForget(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	text := catalogOf(`[{"name":"a"}]`)
	entry := func(id devices.ID, seq int64) devices.HistoryEntry {
		return devices.HistoryEntry{Device: id, Epoch: 1, Seq: seq, Catalog: text.Hash}
	}
	for _, id := range []devices.ID{"gone", "stays"} {
		s.SaveDevice(fullDevice(id))
		s.SavePresence(fullPresence(id, 1, 1))
		s.SaveCatalog(entry(id, 1), text, nil)
	}
	settle(t, s)

	release := holdWriter(t, s)
	for _, id := range []devices.ID{"gone", "stays"} {
		s.SaveDevice(fullDevice(id))
		s.SavePresence(fullPresence(id, 1, 2))
		s.SaveCatalog(entry(id, 2), text, func() {
			if id == "gone" {
				t.Error("committed was called for an entry that was forgotten")
			}
		})
	}
	s.SaveException(devices.Exception{Device: "gone", Generation: 1})
	forgotten := make(chan error, 1)
	go func() { forgotten <- s.Forget(t.Context(), "gone") }()
	release()
	if err := <-forgotten; err != nil {
		t.Fatal(err)
	}
	settle(t, s)
	_, err := s.Find(t.Context(), "gone")
	mustBe(t, err, devices.ErrNotFound)
	for _, table := range []string{"devices", "presence", "catalog_history"} {
		if n := db.Count(t, `SELECT count(*) FROM `+table+` WHERE device = 'gone'`); n != 0 {
			t.Errorf("%d rows of the device are left in %s", n, table)
		}
	}
	if got := find(t, s, "stays"); got.Presence.Seq != 2 || len(history(t, s, "stays")) != 2 {
		t.Errorf("the other device lost something: %+v", got)
	}
	if _, err := s.Catalog(t.Context(), text.Hash); err != nil {
		t.Errorf("the catalog is gone too: %v", err)
	}
	if exceptions, err := s.LoadExceptions(t.Context()); err != nil || len(exceptions) != 1 {
		t.Errorf("exceptions %v, error %v", exceptions, err)
	}
	// It may come back.
	s.SaveDevice(fullDevice("gone"))
	settle(t, s)
	find(t, s, "gone")
}

func testForgetFails(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	s.SaveDevice(fullDevice("x"))
	settle(t, s)
	release := holdWriter(t, s)
	s.SavePresence(fullPresence("x", 1, 2))
	s.SaveCatalog(devices.HistoryEntry{Device: "x", Epoch: 1, Seq: 1}, devices.CatalogText{}, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	mustBe(t, s.Forget(ctx, "x"), devices.ErrDatabase)
	s.SavePresence(fullPresence("x", 1, 1))
	release()
	settle(t, s)
	if got := find(t, s, "x"); got.Presence.Seq != 2 || len(history(t, s, "x")) != 1 {
		t.Errorf("lost by a forget that failed: %+v", got)
	}
}

func testExceptions(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	at := func(generation int64, minute int, reason string) devices.Exception {
		return devices.Exception{Device: "x", Generation: generation, Revoked: generation%2 == 1, Reason: reason,
			ChangedAt: start.Add(time.Duration(minute) * time.Minute)}
	}
	steps := []struct{ save, want devices.Exception }{
		{at(1, 5, "a"), at(1, 5, "a")},
		{at(1, 4, "b"), at(1, 5, "a")}, // same generation, earlier
		{at(1, 6, "c"), at(1, 6, "c")},
		{at(3, 1, "d"), at(3, 1, "d")}, // higher generation, earlier
		{at(2, 9, "e"), at(3, 1, "d")}, // lower generation, later
	}
	for i, step := range steps {
		s.SaveException(step.save)
		settle(t, s)
		got, err := s.LoadExceptions(t.Context())
		if err != nil || !reflect.DeepEqual(got, []devices.Exception{step.want}) {
			t.Fatalf("step %d: got %+v, want %+v, error %v", i, got, step.want, err)
		}
	}
	// All in one group: a statement cannot write a row twice.
	release := holdWriter(t, s)
	for _, step := range steps {
		step.save.Device = "y"
		s.SaveException(step.save)
	}
	s.SaveException(devices.Exception{Device: "a", Generation: 1})
	release()
	settle(t, s)
	got, err := s.LoadExceptions(t.Context())
	if err != nil || len(got) != 3 || got[0].Device != "a" || got[2].Generation != 3 || got[2].Reason != "d" {
		t.Errorf("got %+v, error %v", got, err)
	}
	if bad := s.Stats().BadRows.Load(); bad != 0 {
		t.Errorf("%d rows were refused", bad)
	}
}
