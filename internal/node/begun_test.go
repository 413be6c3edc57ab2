package node

import (
	"context"
	"os"
	"testing"
	"testing/synctest"

	"fleetd/internal/datadir"
	"fleetd/internal/store"
	"fleetd/internal/store/jobstore"
)

// The note of begun tasks is read back by the next start; one that is torn, or not there, says nothing.
func TestNoteOfBegunTasks(t *testing.T) {
	db, err := store.Open(t.Context(), "sqlite", t.TempDir(), quiet)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close(context.Background()) })
	n := &node{dir: &datadir.Dir{Path: t.TempDir()}, log: quiet}
	if h := n.readBegun(); h != (jobstore.History{}) {
		t.Errorf("without a note: %+v", h)
	}
	want := jobstore.History{Lineage: "some", Begun: 41}
	side := &jobsSide{node: n, store: jobstore.New(db, quiet, jobstore.Known(want))}
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		go side.noteBegun(ctx)
		synctest.Wait()
		stop() // it writes a last time
		synctest.Wait()
	})
	// security: K43
	if h := n.readBegun(); h != want {
		t.Errorf("%+v, want %+v", h, want)
	}
	if err := os.WriteFile(n.dir.File(datadir.FileBegun), []byte("some"), 0o600); err != nil {
		t.Fatal(err)
	}
	if h := n.readBegun(); h != (jobstore.History{}) {
		t.Errorf("of a torn note: %+v", h)
	}
}

func TestRestoredIsTakenOnce(t *testing.T) {
	var r restored
	if _, ok := r.take(); ok {
		t.Error("nothing was restored")
	}
	r.set("move-abc")
	if planned, ok := r.take(); !ok || !planned {
		t.Error("a planned move")
	}
	if _, ok := r.take(); ok {
		t.Error("it is taken twice")
	}
}
