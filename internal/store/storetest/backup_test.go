package storetest_test

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"fleetd/internal/devices"
	"fleetd/internal/store"
	"fleetd/internal/store/database"
)

// A copy taken while rows are written is one moment: each history entry in it
// has its catalog, and everything committed before the copy began is there.
func TestCopyWhileWriting(t *testing.T) {
	dir := t.TempDir()
	s, err := store.Open(t.Context(), "sqlite", dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	committed, stop, done := make(chan int, 10_000), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			text, written := childCatalog(n), make(chan struct{})
			s.SaveCatalog(devices.HistoryEntry{Device: "x", Epoch: devices.Epoch(n + 1), Catalog: text.Hash}, text, func() { close(written) })
			<-written
			committed <- n
		}
	}()
	for round := range 5 {
		last := <-committed
		for len(committed) > 0 {
			last = <-committed
		}
		to := filepath.Join(t.TempDir(), store.FileName)
		found, err := database.CopySQLite(t.Context(), filepath.Join(dir, store.FileName), to)
		if err != nil || found.Schema != database.SchemaVersion() {
			t.Fatalf("round %d: %+v, %v", round, found, err)
		}
		copied, err := store.Open(t.Context(), "sqlite:"+to, "", slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		entries, err := copied.History(t.Context(), "x", 0, 0, 1)
		if err != nil || len(entries) != 1 || entries[0].Epoch < devices.Epoch(last+1) {
			t.Errorf("round %d: newest entry %+v, %v; %d was committed", round, entries, err, last)
		}
		for n := range int(entries[0].Epoch) {
			if _, err := copied.Catalog(t.Context(), childCatalog(n).Hash); err != nil {
				t.Errorf("round %d: %v", round, err)
			}
		}
		if err := copied.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}
	close(stop)
	<-done
	if err := s.Close(context.Background()); err != nil {
		t.Error(err)
	}
}

func TestCopyRefuses(t *testing.T) {
	dir := t.TempDir()
	to := filepath.Join(dir, "to")
	if _, err := database.CopySQLite(t.Context(), filepath.Join(dir, "none"), to); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	for name, content := range map[string]string{"text": strings.Repeat("no database ", 100), "empty": ""} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := database.CopySQLite(t.Context(), path, to); err == nil || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Stat(to); err == nil {
			t.Errorf("%s: a copy is left over", name)
		}
	}
}

func TestPlace(t *testing.T) {
	for text, want := range map[string]string{
		"sqlite":                         "sqlite:/data/fleetd.db",
		"sqlite:/x/y.db":                 "sqlite:/x/y.db",
		"postgres://me:pw@db/fleet":      "postgres://db:5432/fleet",
		"postgresql://me@db:7777/f?a=ab": "postgres://db:7777/f",
	} {
		if got, err := database.Location(text, "/data"); err != nil || got != want {
			t.Errorf("%s: %s, %v; want %s", text, got, err, want)
		}
	}
	if _, err := database.Location("postgres://me:pw@db:no/fleet", ""); err == nil || strings.Contains(err.Error(), "pw") {
		t.Errorf("a wrong URL: %v", err)
	}
	got, err := database.DumpCommand("postgres://me:pw@db/it's", "a b")
	if want := `pg_dump --format=custom --no-owner --file='a b' 'postgres://me@db/it'\''s'`; err != nil || got != want {
		t.Errorf("%s, %v; want %s", got, err, want)
	}
}
