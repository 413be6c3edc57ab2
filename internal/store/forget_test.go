package store

import (
	"context"
	"database/sql"
	"log/slog"
	"testing"

	"fleetd/internal/devices"
)

// What was taken from the queue and then forgotten waits no more; what could
// not be forgotten waits again, whole.
func TestForgetSettlesWhatWasTaken(t *testing.T) {
	s, err := Open(t.Context(), "sqlite", t.TempDir(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close(t.Context())
	w := &writer{store: s, tables: newTables(s.now), statements: map[statementKey]*sql.Stmt{}}
	taken := func() group {
		s.queue.mu.Lock()
		defer s.queue.mu.Unlock()
		s.queue.inFlight = 2 // as queue.take leaves it
		row := func(id devices.ID) historyRow { return historyRow{HistoryEntry: devices.HistoryEntry{Device: id}} }
		return group{devices: []deviceRow{{Device: devices.Device{ID: "x"}}}, history: []historyRow{row("x"), row("y")}}
	}
	order := func(ctx context.Context) error {
		rest := taken()
		f := &forget{ctx: ctx, id: "x", done: make(chan error, 1)}
		w.forget(t.Context(), f, &rest)
		if rest.rows() != 1 || rest.history[0].Device != "y" {
			t.Errorf("left in the group: %+v", rest)
		}
		return <-f.done
	}
	if err := order(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.queue.mu.Lock()
	if s.queue.inFlight != 1 || len(s.queue.history) != 0 {
		t.Errorf("after it was forgotten %d are on their way, %d wait", s.queue.inFlight, len(s.queue.history))
	}
	s.queue.mu.Unlock()
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if err := order(gone); err == nil {
		t.Fatal("the caller had gone, and the order was carried out")
	}
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	if _, waits := s.queue.devices.rows["x"]; !waits || s.queue.inFlight != 1 || len(s.queue.history) != 1 {
		t.Errorf("after a failure %d are on their way, %d wait, the device: %v", s.queue.inFlight, len(s.queue.history), waits)
	}
}
