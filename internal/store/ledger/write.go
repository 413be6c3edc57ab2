package ledger

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"strings"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/store/database"
)

var (
	presenceRows = database.Rows{Table: "presence", Conflict: "(device) DO NOTHING", Columns: slices.Concat(
		database.Text("device"), database.Bigint("epoch", "seq"), database.Boolean("online"), database.Text("node", "session", "client_id", "transport", "reason"),
		database.Bigint("connected_at", "last_seen"), database.Text("mcp_state", "mcp_error", "catalog"), database.Boolean("catalog_partial"),
		database.Bigint("tool_count", "generation", "offline_since"))}
	exceptionRows = database.Rows{Table: "credential_exceptions", Columns: slices.Concat(
		database.Text("device"), database.Bigint("generation"), database.Boolean("revoked"), database.Text("reason"), database.Bigint("changed_at", "previous", "previous_until"),
		database.Text("refused")),
		Conflict: `(device) DO UPDATE SET generation = excluded.generation, revoked = excluded.revoked, reason = excluded.reason,
 changed_at = excluded.changed_at, previous = excluded.previous, previous_until = excluded.previous_until, refused = excluded.refused`}
	deviceRows = database.Rows{Table: "devices", Conflict: "(device) DO NOTHING", Columns: slices.Concat(
		database.Text("device", "admission", "client_id", "name", "name_folded", "labels", "preferred_transport", "joined"), database.Bigint("revision"),
		database.Text("board", "board_folded", "firmware", "firmware_key", "elf_sha256", "chip", "language", "serial"), database.Boolean("activate_v2"),
		database.Bigint("first_seen", "checked_at"))}
	changeRows = database.Rows{Table: "changes", Columns: slices.Concat(
		database.Bigint("revision"), database.Text("id", "device", "aspect", "value", "who"), database.Bigint("at"))}
	deviceUpdates = database.Rows{Table: "devices", Columns: updateColumns, Keys: 1}
	// updateColumns are the columns of a known device that decisions change.
	updateColumns = slices.Concat(
		database.Text("device", "admission", "client_id", "name", "name_folded", "labels", "preferred_transport", "joined"), database.Bigint("revision"),
		database.Text("serial"), database.Bigint("first_seen"))
)

// neverConnected is the offline reason of a device that never connected.
const neverConnected = "never_connected"

const mcpUnknown = "unknown"

// write writes the states and changes, and returns the revision before them.
func (t *transaction) write(ctx context.Context, ids []string, states map[devices.ID]*state, changes []devices.Change) (base int64, err error) {
	var presence, exceptions, inserts, updates [][]any
	var gone, cleared []string // devices to delete, and devices whose exceptions to delete
	// absent are devices that are unknown before and after their decision. They have no row to
	// lock: inserting and deleting a row of presence ensures that no other node has created
	// one meanwhile.
	var absent []string
	var labels, oldLabels []database.Label
	deltas := database.Deltas{}
	any := false
	for _, id := range ids {
		s := states[devices.ID(id)]
		if !s.changed && !s.joined {
			continue
		}
		any = true
		m, was := &s.now, s.before.Known()
		seen := clock.Micros(m.FirstSeen)
		name := strings.ToLower(m.Name)
		if was && s.left {
			gone = append(gone, id)
		}
		switch {
		case m.Known() && (!was || s.left):
			presence = append(presence, newPresence(id, seen))
			inserts = append(inserts, []interface{}{id, string(m.Admission), m.ClientID, m.Name, name, encodeLabels(m.Labels), string(m.Prefer), string(m.JoinTransport), m.Revision,
				"", "", "", "", "", "", "", m.Serial, false, seen, int64(0)})
			deltas.Presence(database.PresenceCounted{Reason: neverConnected, MCP: mcpUnknown}, 1)
			deltas.Facts("", "", 1)
		case !m.Known() && !was && t.db.Postgres():
			absent = append(absent, id)
			presence = append(presence, newPresence(id, seen))
		case m.Known():
			updates = append(updates, []interface{}{id, string(m.Admission), m.ClientID, m.Name, name, encodeLabels(m.Labels), string(m.Prefer), string(m.JoinTransport), m.Revision,
				m.Serial, seen})
		}
		deltas.Add(database.CountState, database.StateRevoked, count(m.Admission == devices.AdmissionRevoked)-count(s.before.Admission == devices.AdmissionRevoked))
		oldLabels, labels = differ(id, s.before.Labels, m.Labels, oldLabels, labels)
		x, excepted := m.Exception()
		old, _ := s.before.Exception()
		switch {
		case !s.changed || x == old && s.exception == excepted:
		case excepted || s.exception && m.Known():
			exceptions = append(exceptions, []interface{}{id, x.Generation, x.Revoked, x.Reason, clock.Micros(s.at), x.Previous, clock.Micros(x.PreviousUntil), string(x.Refused)})
		case s.exception:
			cleared = append(cleared, id)
		}
	}
	if !any {
		return 0, database.Rule(nil)
	}
	if err := t.remove(ctx, gone, states, deltas); err != nil {
		return 0, err
	}
	if n, err := presenceRows.Write(ctx, t.tx, t.db, presence); err != nil {
		return 0, err
	} else if n < int64(len(presence)) {
		return 0, database.ErrConcurrent // another node has created one of these devices
	}
	if err := t.execAmong(ctx, absent, `DELETE FROM presence WHERE %s`); err != nil {
		return 0, err
	}
	if err := t.deleteLabels(ctx, oldLabels); err != nil {
		return 0, err
	}
	if err := t.db.InsertLabels(ctx, t.tx, labels); err != nil {
		return 0, err
	}
	if _, err := exceptionRows.Write(ctx, t.tx, t.db, exceptions); err != nil {
		return 0, err
	}
	if err := t.execAmong(ctx, cleared, `DELETE FROM credential_exceptions WHERE %s`); err != nil {
		return 0, err
	}
	if err := deltas.Write(ctx, t.tx, t.db); err != nil {
		return 0, err
	}
	return t.finish(ctx, inserts, updates, changes)
}

// newPresence returns the row of a device that never connected.
func newPresence(id string, seen int64) []any {
	return []any{id, int64(0), int64(0), false, "", "", "", "", neverConnected, int64(0), seen, mcpUnknown, "", "", false, int64(0), int64(0), int64(0)}
}

func count(is bool) int64 {
	if is {
		return 1
	}
	return 0
}

// differ appends the rows of labels to delete and to insert.
func differ(id string, before, after map[string]string, goes, comes []database.Label) (_, _ []database.Label) {
	for key, value := range before {
		if now, has := after[key]; !has || now != value {
			goes = append(goes, database.Label{Key: key, Value: value, Device: id})
		}
	}
	for key, value := range after {
		if old, had := before[key]; !had || old != value {
			comes = append(comes, database.Label{Key: key, Value: value, Device: id})
		}
	}
	return goes, comes
}

// remove deletes the rows of devices that have left the fleet, even if they joined again, except labels and credentials.
func (t *transaction) remove(ctx context.Context, gone []string, states map[devices.ID]*state, deltas database.Deltas) error {
	if len(gone) == 0 {
		return nil
	}
	err := t.among(ctx, gone, `SELECT device, epoch, online, reason, transport, node, mcp_state, catalog FROM presence WHERE %s ORDER BY device`+t.db.Lock("FOR UPDATE"),
		func(scan func(...any) error) error {
			var p database.PresenceCounted
			var id devices.ID
			var epoch int64
			err := scan(&id, &epoch, &p.Online, &p.Reason, &p.Transport, &p.Node, &p.MCP, &p.Catalog)
			deltas.Presence(p, -1)
			if err == nil && epoch > 0 && states[id].expires {
				return database.ErrConcurrent // it has connected meanwhile
			}
			return err
		})
	if err != nil {
		return err
	}
	err = t.among(ctx, gone, `SELECT board, firmware FROM devices WHERE %s`, func(scan func(...any) error) error {
		var board, firmware string
		err := scan(&board, &firmware)
		deltas.Facts(board, firmware, -1)
		return err
	})
	for _, table := range []string{"devices", "presence", "catalog_history", "device_images", "firmware_devices"} {
		if err == nil {
			err = t.execAmong(ctx, gone, `DELETE FROM `+table+` WHERE %s`)
		}
	}
	return err
}

func (t *transaction) deleteLabels(ctx context.Context, labels []database.Label) error {
	if len(labels) == 0 {
		return nil
	}
	slices.SortFunc(labels, func(a, b database.Label) int {
		return cmp.Or(cmp.Compare(a.Key, b.Key), cmp.Compare(a.Value, b.Value), cmp.Compare(a.Device, b.Device))
	})
	if t.db.Postgres() {
		columns := database.Text("key", "value", "device")
		rows := make([][]any, len(labels))
		for i, l := range labels {
			rows[i] = []any{l.Key, l.Value, l.Device}
		}
		_, err := t.tx.ExecContext(ctx, `DELETE FROM device_labels WHERE (key, value, device) IN (SELECT * FROM `+database.Unnest(columns, 0)+`)`, database.Arrays(columns, rows)...)
		return err
	}
	for _, l := range labels {
		if _, err := t.tx.ExecContext(ctx, `DELETE FROM device_labels WHERE key = ? AND value = ? AND device = ?`, l.Key, l.Value, l.Device); err != nil {
			return err
		}
	}
	return nil
}

func changeValues(c *devices.Change, revision int64) []any {
	return []any{revision, c.ID, string(c.Device), string(c.Aspect), string(c.Value), c.Who, clock.Micros(c.At)}
}

// finish allocates the revisions of the changes and writes all rows that contain one: the changes, and the new or
// changed devices, whose revisions were pending. It returns the previous revision.
func (t *transaction) finish(ctx context.Context, inserts, updates [][]any, changes []devices.Change) (base int64, err error) {
	if t.db.Postgres() {
		return t.finishPostgres(ctx, inserts, updates, changes)
	}
	if err := t.tx.QueryRowContext(ctx, `SELECT n FROM fleet_revision`).Scan(&base); err != nil {
		return 0, err
	}
	for _, row := range slices.Concat(inserts, updates) {
		row[8] = settle(row[8].(int64), base)
	}
	if _, err := deviceRows.Write(ctx, t.tx, t.db, inserts); err != nil {
		return 0, err
	}
	if _, err := deviceUpdates.Write(ctx, t.tx, t.db, updates); err != nil {
		return 0, err
	}
	rows := make([][]any, len(changes))
	for i := range changes {
		rows[i] = changeValues(&changes[i], settle(changes[i].Revision, base))
	}
	if _, err := changeRows.Write(ctx, t.tx, t.db, rows); err != nil || len(rows) == 0 {
		return base, err
	}
	_, err = t.tx.ExecContext(ctx, `UPDATE fleet_revision SET n = n + $1`, int64(len(changes)))
	return base, err
}

// finishPostgres does what finish does in one statement, so that the row of the revision is locked only during this
// statement and the commit.
func (t *transaction) finishPostgres(ctx context.Context, inserts, updates [][]any, changes []devices.Change) (base int64, err error) {
	if len(changes) == 0 { // only the column joined is written
		_, err := t.tx.ExecContext(ctx, `UPDATE devices d SET joined = u.joined FROM `+database.Unnest(updateColumns, 0)+` AS u (`+database.Names("", updateColumns)+`) WHERE d.device = u.device`,
			database.Arrays(updateColumns, updates)...)
		return 0, err
	}
	args := []any{int64(len(changes))}
	text := `WITH r AS (UPDATE fleet_revision SET n = n + $1 WHERE one = 1 RETURNING n - $1 AS base)`
	add := func(columns []database.Column, rows [][]any) string {
		from := database.Unnest(columns, len(args))
		args = append(args, database.Arrays(columns, rows)...)
		return from
	}
	rows := make([][]any, len(changes))
	for i := range changes {
		rows[i] = changeValues(&changes[i], changes[i].Revision-pending)
	}
	text += `, c AS (INSERT INTO changes (` + database.Names("", changeRows.Columns) + `) SELECT r.base + u.revision, u.id, u.device, u.aspect, u.value, u.who, u.at FROM r, ` +
		add(changeRows.Columns, rows) + ` AS u (` + database.Names("", changeRows.Columns) + `))`
	inserted := int64(len(inserts))
	const revision = `CASE WHEN u.revision >= 4611686018427387904 THEN u.revision - 4611686018427387904 + r.base ELSE u.revision END`
	if len(inserts) > 0 {
		columns := database.Names("", deviceRows.Columns)
		text += `, i AS (INSERT INTO devices (` + columns + `) SELECT ` + strings.Replace(columns, "revision", revision, 1) + ` FROM r, ` +
			add(deviceRows.Columns, inserts) + ` AS u (` + columns + `) ON CONFLICT (device) DO NOTHING RETURNING 1)`
	}
	if len(updates) > 0 {
		text += `, d AS (UPDATE devices d SET admission = u.admission, client_id = u.client_id, name = u.name, name_folded = u.name_folded, labels = u.labels,
 preferred_transport = u.preferred_transport, joined = u.joined, revision = ` + revision + `, serial = u.serial, first_seen = u.first_seen
 FROM r, ` + add(updateColumns, updates) + ` AS u (` + database.Names("", updateColumns) + `) WHERE d.device = u.device)`
	}
	text += ` SELECT base`
	if inserted > 0 {
		text += `, (SELECT count(*) FROM i)`
	} else {
		text += `, 0`
	}
	var n int64
	if err := t.tx.QueryRowContext(ctx, text+` FROM r`, args...).Scan(&base, &n); err != nil {
		return 0, err
	}
	if n < inserted {
		return 0, database.ErrConcurrent
	}
	return base, nil
}

// encodeLabels returns labels in the form in which they are stored: keys sorted, no spaces.
func encodeLabels(labels map[string]string) string {
	if len(labels) == 0 {
		return "{}"
	}
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(labels) // strings can always be encoded
	return strings.TrimSuffix(b.String(), "\n")
}
