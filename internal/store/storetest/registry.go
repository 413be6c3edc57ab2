package storetest

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"fleetd/internal/store"
)

// testRegistryMigration migrates what the schema before the registry contains.
func testRegistryMigration(t *testing.T, db Database) {
	db.Clear(t)
	migrateTo(t, db, 9)
	const columns = `INSERT INTO devices (device, client_id, pending_client_id, admission, name, name_folded, labels, preferred_transport, board, firmware,
 elf_sha256, chip, language, serial, activate_v2, first_seen, checked_at) VALUES `
	for _, values := range []string{
		`('a', 'c', '', 'member', 'Lamp', 'lamp', '{"k":"v","房间":"厨房","n":"a\u0000b"}', '', 'BÖX', '2.10.1', '', '', '', '', TRUE, 1, 2)`,
		`('pending', 'c', '', 'pending', '', '', '{}', '', '', 'x', '', '', '', '', FALSE, 1, 0)`,
		`('again', 'c', 'd', 'pending', '', '', '{}', '', '', 'x', '', '', '', '', FALSE, 1, 0)`,
		`('revoked', 'c', '', 'revoked', '', '', '{}', '', '', '', '', '', '', '', FALSE, 5, 0)`,
	} {
		db.Exec(t, columns+values)
	}
	db.Exec(t, `INSERT INTO presence (device, epoch, seq, online, node, session, client_id, transport, reason, connected_at, last_seen, mcp_state, mcp_error, catalog, catalog_partial, tool_count, generation)
 VALUES ('a', 5, 6, TRUE, 'n', 's', 'c', 'mqtt', '', 3, 4, 'ready', '', 'hash', FALSE, 2, 0), ('unknown', 5, 6, TRUE, 'n', 's', 'c', 'mqtt', '', 3, 4, 'ready', '', 'hash', FALSE, 2, 0)`)
	db.Exec(t, `INSERT INTO credential_exceptions (device, generation, revoked, reason, changed_at) VALUES ('again', 2, TRUE, 'revoked', 8), ('forgotten', 3, FALSE, 'forgotten', 9)`)
	l := openLedger(t, db.URL)
	for query, want := range map[string]int{
		`SELECT count(*) FROM devices`:  3,
		`SELECT count(*) FROM presence`: 3,
		`SELECT count(*) FROM devices WHERE device = 'a' AND board_folded = 'böx' AND firmware_key = '214748365021474836582147483649'`: 1,
		`SELECT count(*) FROM device_labels`: 3,
		`SELECT count(*) FROM device_labels WHERE device = 'a' AND key = '房间' AND value = '厨房'`:                             1,
		`SELECT count(*) FROM devices WHERE device IN ('again', 'revoked') AND admission = 'revoked' AND firmware_key = ''`: 2,
		`SELECT count(*) FROM presence WHERE device = 'revoked' AND reason = 'never_connected' AND last_seen = 5`:           1,
		`SELECT count(*) FROM credential_exceptions WHERE device IN ('again', 'revoked') AND revoked`:                       2,
	} {
		if got := db.Count(t, query); got != want {
			t.Errorf("%s: %d, want %d", query, got, want)
		}
	}
	checkCounts(t, db)
	if got := decide(t, l, "a", member); len(got.Changes) != 0 || got.Before.Labels["k"] != "v" {
		t.Errorf("%+v", got)
	}
}

// testOldNodes: while a node of an older version runs, the schema stays as it is;
// what is left of a dead one holds nobody up.
func testOldNodes(t *testing.T, db Database) {
	db.Clear(t)
	if !db.Postgres {
		t.Skip("LACKS: nodes share a database on Postgres alone")
	}
	migrateTo(t, db, 9)
	lease := func(node string) {
		db.Exec(t, `INSERT INTO nodes (node, instance, beat, started_at, version, api, devices, stamps) VALUES ($1, 'i', 1, 1, '', '', 0, FALSE)`, node)
	}
	lease("runs")
	lease("dead")
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
	text := refused(t, db.URL)
	close(stop)
	<-stopped
	if !strings.Contains(text, "runs") || strings.Contains(text, "dead") {
		t.Errorf("it names the wrong nodes: %s", text)
	}
	if n := db.Count(t, `SELECT count(*) FROM nodes`); n != 2 {
		t.Errorf("%d leases, want 2", n)
	}
	s, err := store.Open(t.Context(), db.URL, "", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer closeStore(t, s)
	eventually(t, "migrated", func() bool { return s.Usable() == nil })
	if n := db.Count(t, `SELECT count(*) FROM nodes`); n != 0 {
		t.Errorf("%d leases of dead nodes", n)
	}
}
