package storetest

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/selector"
	"fleetd/internal/store/database"
)

// Add creates devices like the ledger: their rows, a presence without a connection, their labels, and
// the counts. It also stores what they reported at a check.
func (d Database) Add(t testing.TB, list ...devices.Device) {
	t.Helper()
	tx, err := d.Raw.Begin()
	if err != nil {
		t.Fatal(err)
	}
	exec := func(text string, args ...any) {
		t.Helper()
		if _, err := tx.Exec(text, args...); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
	}
	counts := database.Deltas{}
	for i := range list {
		x := &list[i]
		if x.Admission == "" {
			x.Admission = devices.AdmissionMember
		}
		labels := "{}"
		if len(x.Labels) > 0 {
			text, err := json.Marshal(x.Labels)
			if err != nil {
				t.Fatal(err)
			}
			labels = string(text)
		}
		key, _ := selector.VersionKey(x.Firmware)
		exec(`INSERT INTO devices (device, admission, client_id, name, name_folded, labels, preferred_transport, joined, revision, board, board_folded,
 firmware, firmware_key, elf_sha256, chip, language, serial, activate_v2, first_seen, checked_at)
 VALUES ($1, $2, $3, $4, $5, $6, $7, '', $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19)`,
			string(x.ID), string(x.Admission), x.ClientID, x.Name, strings.ToLower(x.Name), labels, string(x.Prefer), x.Revision, x.Board, strings.ToLower(x.Board),
			x.Firmware, key, x.ELF, x.Chip, x.Language, x.Serial, x.ActivateV2, clock.Micros(x.FirstSeen), clock.Micros(x.CheckedAt))
		for _, key := range slices.Sorted(maps.Keys(x.Labels)) {
			exec(`INSERT INTO device_labels (key, value, device) VALUES ($1, $2, $3)`, key, x.Labels[key], string(x.ID))
		}
		exec(`INSERT INTO presence (device, epoch, seq, online, node, session, client_id, transport, reason, connected_at, last_seen, mcp_state, mcp_error,
 catalog, catalog_partial, tool_count, generation) VALUES ($1, 0, 0, FALSE, '', '', '', '', 'never_connected', 0, $2, 'unknown', '', '', FALSE, 0, 0)`,
			string(x.ID), max(clock.Micros(x.FirstSeen), clock.Micros(x.CheckedAt)))
		counts.Facts(x.Board, x.Firmware, 1)
		counts.Presence(database.PresenceCounted{Reason: "never_connected", MCP: "unknown"}, 1)
		if x.Admission != devices.AdmissionMember {
			counts.Add(database.CountState, database.StateRevoked, 1)
		}
	}
	for c, n := range counts {
		exec(`INSERT INTO fleet_counts (dimension, value, slot, n) VALUES ($1, $2, 99, $3) ON CONFLICT (dimension, value, slot) DO UPDATE SET n = fleet_counts.n + excluded.n`,
			c.Dimension, c.Value, n)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
}

// add is Add of devices of which only the id matters.
func (d Database) add(t testing.TB, ids ...devices.ID) {
	t.Helper()
	var list []devices.Device
	for _, id := range ids {
		list = append(list, devices.Device{ID: id})
	}
	d.Add(t, list...)
}

// Remove deletes a device as the ledger does, its counts left out.
func (d Database) Remove(t testing.TB, id devices.ID) {
	t.Helper()
	for _, table := range []string{"devices", "presence", "device_labels", "catalog_history"} {
		d.Exec(t, `DELETE FROM `+table+` WHERE device = $1`, string(id))
	}
}

// countsOf are the counts that the tables say, in the form of fleet_counts.
const countsOf = `SELECT 'board' AS dimension, board AS value, count(*) AS n FROM devices GROUP BY board
 UNION ALL SELECT 'firmware', firmware, count(*) FROM devices GROUP BY firmware
 UNION ALL SELECT 'state', 'revoked', count(*) FROM devices WHERE admission <> 'member' HAVING count(*) > 0
 UNION ALL SELECT 'state', CASE WHEN online THEN 'online' ELSE 'offline' END, count(*) FROM presence GROUP BY online
 UNION ALL SELECT 'offline_reason', reason, count(*) FROM presence WHERE NOT online GROUP BY reason
 UNION ALL SELECT 'transport', transport, count(*) FROM presence WHERE online GROUP BY transport
 UNION ALL SELECT 'node', node, count(*) FROM presence WHERE online GROUP BY node
 UNION ALL SELECT 'mcp_state', mcp_state, count(*) FROM presence GROUP BY mcp_state
 UNION ALL SELECT 'catalog', catalog, count(*) FROM presence WHERE catalog <> '' GROUP BY catalog`

// checkCounts compares the counts that are kept with those of the tables.
func (d Database) checkCounts(t testing.TB) {
	t.Helper()
	read := func(text string) map[string]int64 {
		t.Helper()
		rows, err := d.Raw.Query(text)
		if err != nil {
			t.Fatal(err)
		}
		defer rows.Close()
		out := map[string]int64{}
		for rows.Next() {
			var dimension, value string
			var n int64
			if err := rows.Scan(&dimension, &value, &n); err != nil {
				t.Fatal(err)
			}
			if n != 0 {
				out[dimension+" "+value] = n
			}
		}
		return out
	}
	kept, counted := read(`SELECT dimension, value, CAST(sum(n) AS BIGINT) FROM fleet_counts GROUP BY dimension, value`), read(countsOf)
	if !maps.Equal(kept, counted) {
		t.Errorf("counts kept:\n%v\ncounted:\n%v", kept, counted)
	}
}

// Fleet is a made-up fleet for measurements: n devices, a share of them online, of
// 8 boards, 20 firmwares, 8 nodes and 3 labels each: `site` with a hundred values,
// `room` with 1,000, `rare` with 500 devices each. They are filled in by SQL alone, without the
// ledger; indexes are maintained row by row, as they are in a fleet that grows.
type Fleet struct {
	Devices int
	Online  int // percent
}

// ID is the id of the n-th device.
func (Fleet) ID(n int) devices.ID {
	return devices.ID(fmt.Sprintf("06:%02x:%02x:%02x:%02x:%02x", n>>4&15, n&255, n>>8&255, n>>16&255, n*37&255))
}

// Fill makes the fleet in a database that a store has opened before.
func (f Fleet) Fill(t testing.TB, d Database) {
	t.Helper()
	series, hex, rnd := "WITH RECURSIVE s (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM s WHERE i < $1 - 1)", "lower(printf('06:%02x:%02x:%02x:%02x:%02x', i >> 4 & 15, i & 255, i >> 8 & 255, i >> 16 & 255, i * 37 & 255))", "(i * 7919 % 100003)"
	if d.Postgres {
		series = "WITH s (i) AS (SELECT generate_series(0, CAST($1 AS BIGINT) - 1))"
		pair := func(expression string) string { return "lpad(to_hex(" + expression + "), 2, '0')" }
		hex = "'06:' || " + strings.Join([]string{pair("i >> 4 & 15"), pair("i & 255"), pair("i >> 8 & 255"), pair("i >> 16 & 255"), pair("i * 37 & 255")}, " || ':' || ")
	}
	online := fmt.Sprintf("(%s %% 100 < %d)", rnd, f.Online)
	minor := "CAST(" + rnd + " % 20 AS TEXT)"
	site, room, rare := "'site-' || CAST("+rnd+" % 97 AS TEXT)", "'room-' || CAST("+rnd+" % 997 AS TEXT)", "'rare-' || CAST(i / 500 AS TEXT)"
	one := int64(1_700_000_000_000_000)
	if !d.Postgres {
		d.Raw.SetMaxOpenConns(1)
		defer d.Raw.SetMaxOpenConns(0)
		d.Exec(t, `PRAGMA cache_size = -1000000`) // indexes grow at random places
		defer d.Exec(t, `PRAGMA cache_size = -2000`)
	}
	d.Exec(t, series+` INSERT INTO devices (device, admission, client_id, name, name_folded, labels, preferred_transport, joined, revision, board, board_folded,
 firmware, firmware_key, elf_sha256, chip, language, serial, activate_v2, first_seen, checked_at)
 SELECT `+hex+`, 'member', 'a2b6f7c4-0000-4000-8000-000000000000', 'Speaker ' || CAST(i AS TEXT), 'speaker ' || CAST(i AS TEXT),
 '{"rare":"' || `+rare+` || '","room":"' || `+room+` || '","site":"' || `+site+` || '"}', '', '', i + 1,
 'board-' || CAST(`+rnd+` % 8 AS TEXT), 'board-' || CAST(`+rnd+` % 8 AS TEXT), '2.' || `+minor+` || '.0',
 '2147483650' || CAST(2147483648 + `+rnd+` % 20 AS TEXT) || '2147483648', 'e1f0', 'esp32s3', 'en-US', '', FALSE, $2, $2 FROM s`, f.Devices, one)
	d.Exec(t, series+` INSERT INTO presence (device, epoch, seq, online, node, session, client_id, transport, reason, connected_at, last_seen, offline_since,
 mcp_state, mcp_error, catalog, catalog_partial, tool_count, generation)
 SELECT `+hex+`, $2, 1, `+online+`, 'node-' || CAST(`+rnd+` % 8 AS TEXT), 'session', 'client', CASE WHEN `+rnd+` % 3 = 0 THEN 'mqtt' ELSE 'websocket' END,
 CASE WHEN `+online+` THEN '' ELSE 'reason-' || CAST(`+rnd+` % 7 AS TEXT) END, $2, $2 + i, CASE WHEN `+online+` THEN 0 ELSE $2 + i END,
 'ready', '', '', FALSE, 12, 0 FROM s`, f.Devices, one)
	for _, label := range []struct{ key, value string }{{"site", site}, {"room", room}, {"rare", rare}} {
		d.Exec(t, series+` INSERT INTO device_labels (key, value, device) SELECT '`+label.key+`', `+label.value+`, `+hex+` FROM s`, f.Devices)
	}
	d.Exec(t, `DELETE FROM fleet_counts`)
	d.Exec(t, `INSERT INTO fleet_counts (dimension, value, slot, n) SELECT dimension, value, 0, n FROM (`+countsOf+`) c`)
	d.analyze(t)
}

// analyze does what autovacuum does within minutes.
func (d Database) analyze(t testing.TB) {
	t.Helper()
	if d.Postgres {
		d.Exec(t, `VACUUM ANALYZE`)
	}
}
