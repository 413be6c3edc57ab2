package photos_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"

	"fleetd/internal/devices"
	"fleetd/internal/store"
	"fleetd/internal/store/photos"
	"fleetd/internal/store/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestSQLite(t *testing.T)   { run(t, storetest.SQLite(t)) }
func TestPostgres(t *testing.T) { run(t, storetest.Postgres(t)) }

func run(t *testing.T, db storetest.Database) {
	s, err := store.Open(t.Context(), db.URL, "", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if err := s.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	x := photos.New(s)
	var all []devices.Photo
	for i := range 1200 {
		device := devices.ID("aa")
		if i%3 == 0 {
			device = "bb"
		}
		all = append(all, devices.Photo{ID: fmt.Sprintf("id%04d", i), Device: device, Question: "why\x00\xff?", Bytes: int64(i), SHA256: "0", Kind: "camera",
			TakenAt: time.UnixMicro(int64(i + 1)).UTC()})
	}
	for range 2 { // those that are there stay
		if err := x.Add(t.Context(), all...); err != nil {
			t.Fatal(err)
		}
	}
	ids := func(device devices.ID, before, from string, limit int) (ids []string) {
		t.Helper()
		page, err := x.Page(t.Context(), device, before, from, limit)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range page {
			ids = append(ids, p.ID)
		}
		return ids
	}
	for _, tc := range []struct {
		device       devices.ID
		before, from string
		limit        int
		want         []string
	}{
		{"", "", "", 2, []string{"id1199", "id1198"}},
		{"bb", "", "", 2, []string{"id1197", "id1194"}},
		{"bb", "id1197", "", 1, []string{"id1194"}},
		{"", "id0002", "", 9, []string{"id0001", "id0000"}},
		{"", "id0002", "id0001", 9, []string{"id0001"}},
		{"cc", "", "", 9, nil},
	} {
		if got := ids(tc.device, tc.before, tc.from, tc.limit); !slices.Equal(got, tc.want) {
			t.Errorf("%+v: %v", tc, got)
		}
	}
	if page, err := x.Page(t.Context(), "", "", "", 1); err != nil || page[0].TakenAt != all[1199].TakenAt || page[0].Bytes != 1199 || page[0].Question != "why\uFFFD\uFFFD?" {
		t.Errorf("%+v, %v", page, err)
	}
	if n, err := x.Expire(t.Context(), "id1000"); n != 1000 || err != nil {
		t.Errorf("%d expired, %v", n, err)
	}
	var rest []string
	for _, p := range all {
		rest = append(rest, p.ID)
	}
	if err := x.Remove(t.Context(), rest[1:]...); err != nil {
		t.Fatal(err)
	}
	if got := ids("", "", "", 1000); len(got) != 0 {
		t.Errorf("%d are left", len(got))
	}
}
