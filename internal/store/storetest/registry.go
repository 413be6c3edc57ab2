package storetest

import (
	"strings"
	"testing"
	"time"

	"fleetd/internal/store"
	"fleetd/internal/store/database"
)

// testOldNodes: while a node of an older version runs, the schema stays as it is;
// what is left of a dead one holds nobody up.
func testOldNodes(t *testing.T, db Database) {
	db.Clear(t)
	if !db.Postgres {
		t.Skip("LACKS: nodes share a database on Postgres alone")
	}
	closeStore(t, openStore(t, db.URL))
	next := database.SchemaVersion() + 1 // the lowest of a migration that is to come
	lease := func(node string, schema int64) {
		db.Exec(t, `INSERT INTO nodes (node, instance, beat, started_at, version, api, devices, schema) VALUES ($1, 'i', 1, 1, '', '', 0, $2)`, node, schema)
	}
	admin, err := database.Open(db.URL, "")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := admin.Close(); err != nil {
			t.Error(err)
		}
	}()
	lease("new", next)
	lease("runs", next-1)
	lease("dead", next-1)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			case <-time.After(100 * time.Millisecond):
				if _, err := db.Raw.Exec(`UPDATE nodes SET beat = beat + 1 WHERE node = 'runs'`); err != nil {
					t.Error(err)
				}
			}
		}
	}()
	err = admin.CheckOldNodes(t.Context(), next)
	close(stop)
	<-stopped
	mustBe(t, err, store.ErrConfig)
	if text := err.Error(); !strings.Contains(text, "runs") || strings.Contains(text, "dead") || strings.Contains(text, "new,") {
		t.Errorf("it names the wrong nodes: %s", text)
	}
	if n := db.Count(t, `SELECT count(*) FROM nodes`); n != 3 {
		t.Errorf("%d leases, want 3", n)
	}
	if err := admin.CheckOldNodes(t.Context(), next); err != nil {
		t.Error(err)
	}
	if n := db.Count(t, `SELECT count(*) FROM nodes WHERE node = 'new'`) + 10*db.Count(t, `SELECT count(*) FROM nodes`); n != 11 {
		t.Errorf("%d: leases of dead nodes are left, or that of a new one is not", n)
	}
}
