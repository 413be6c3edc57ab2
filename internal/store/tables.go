package store

import (
	"cmp"
	"context"
	"database/sql"
	"slices"
	"strings"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/store/database"
)

// statement writes rows of type T.
type statement[T any] struct {
	database.Rows
	values  func(row *T) []any // in the order of the columns
	compare func(a, b T) int   // by key
}

// write writes rows in key order, and returns how many were changed.
func (t *statement[T]) write(ctx context.Context, tx *sql.Tx, db *database.DB, rows []T) (changed int64, err error) {
	slices.SortFunc(rows, t.compare)
	values := make([][]any, len(rows))
	for i := range rows {
		values[i] = t.values(&rows[i])
	}
	return t.Write(ctx, tx, db, values)
}

// Columns of updates. An indexed column is not written unless it changed: SQLite rewrites the
// indexes of every column in the statement, and Postgres updates a row in place only if no
// indexed column changes.
var (
	factsColumns = slices.Concat(database.Text("device", "elf_sha256", "chip", "language", "serial"), database.Boolean("activate_v2"), database.Bigint("checked_at"))
	imageColumns = slices.Concat(factsColumns, database.Text("board", "board_folded", "firmware", "firmware_key", "image_hash"), database.Bigint("image_checks"))

	sessionColumns = slices.Concat(database.Text("device"), database.Bigint("epoch", "seq"), database.Text("session", "client_id"), database.Bigint("connected_at"),
		database.Text("mcp_state", "mcp_error"), database.Boolean("catalog_partial"), database.Bigint("tool_count"),
		[]database.Column{{Name: "generation", Type: "bigint", Value: "CASE WHEN ? > presence.generation THEN ? ELSE presence.generation END"}})
	stateColumns = slices.Concat(sessionColumns, database.Boolean("online"), database.Text("node", "transport", "reason", "catalog"), database.Bigint("last_seen", "offline_since"))
	seenColumns  = append(database.Text("device"), database.Bigint("last_seen")...)

	catalogColumns = append(database.Text("sha256", "tools", "encoding"), database.Bigint("tool_count", "bytes", "first_seen", "used_at")...)
	historyColumns = slices.Concat(database.Text("device"), database.Bigint("epoch", "seq"), database.Text("catalog", "firmware", "elf_sha256"),
		database.Boolean("partial"), database.Bigint("at"))
)

// statements are the writer's statements, in the order of execution.
type statements struct {
	facts    statement[factRow] // of a device whose board, firmware and image are stored already
	image    statement[factRow]
	images   statement[imageRow]    // of checks that say something new of the image or the hardware
	session  statement[presenceRow] // of a device that stays online at the same node with the same tools
	presence statement[presenceRow]
	seen     statement[presenceRow] // last_seen alone
	catalogs statement[devices.CatalogText]
	history  statement[historyRow]
}

// presenceRow is a row of presence as written.
type presenceRow struct {
	devices.Presence
	catalog                string
	lastSeen, offlineSince int64
}

// newStatements returns the statements; now is the time of use of a new list.
func newStatements(now func() time.Time) *statements {
	facts := func(f *factRow) []any {
		return []any{string(f.Device), f.ELF, f.Chip, f.Language, f.Serial, f.ActivateV2, clock.Micros(f.CheckedAt)}
	}
	session := func(p *presenceRow) []any {
		return []any{string(p.Device), int64(p.Epoch), p.Seq, p.Session, p.ClientID, clock.Micros(p.ConnectedAt),
			string(p.MCP), p.MCPError, p.Partial, int64(p.Tools), p.Generation}
	}
	byDevice := func(a, b presenceRow) int { return cmp.Compare(a.Device, b.Device) }
	factsByDevice := func(a, b factRow) int { return cmp.Compare(a.Device, b.Device) }
	return &statements{images: newImageStatement(),
		facts: statement[factRow]{Rows: database.Rows{Table: "devices", Columns: factsColumns, Keys: 1}, values: facts, compare: factsByDevice},
		image: statement[factRow]{
			Rows: database.Rows{Table: "devices", Columns: imageColumns, Keys: 1},
			values: func(f *factRow) []any {
				return append(facts(f), f.Board, strings.ToLower(f.Board), f.Firmware, versionKey(f.Firmware), f.imageHash, f.imageChecks)
			},
			compare: factsByDevice,
		},
		session: statement[presenceRow]{
			Rows: database.Rows{Table: "presence", Columns: sessionColumns, Keys: 1}, values: session, compare: byDevice,
		},
		presence: statement[presenceRow]{
			Rows: database.Rows{Table: "presence", Columns: stateColumns, Keys: 1},
			values: func(p *presenceRow) []any {
				return append(session(p), p.Online, p.Node, string(p.Transport), p.Reason, p.catalog, p.lastSeen, p.offlineSince)
			},
			compare: byDevice,
		},
		seen: statement[presenceRow]{
			Rows:    database.Rows{Table: "presence", Columns: seenColumns, Keys: 1},
			values:  func(p *presenceRow) []any { return []any{string(p.Device), p.lastSeen} },
			compare: byDevice,
		},
		catalogs: statement[devices.CatalogText]{
			Rows: database.Rows{Table: "catalogs", Columns: catalogColumns, Conflict: "(sha256) DO NOTHING", Limit: 8}, // lists may be long
			values: func(c *devices.CatalogText) []any {
				text, encoding := database.EncodeTools(c.Tools)
				return []any{c.Hash.String(), text, encoding, int64(c.Count), int64(len(c.Tools)), clock.Micros(c.FirstSeen), clock.Micros(now())}
			},
			compare: func(a, b devices.CatalogText) int { return slices.Compare(a.Hash[:], b.Hash[:]) },
		},
		history: statement[historyRow]{
			Rows: database.Rows{Table: "catalog_history", Columns: historyColumns, Conflict: "(device, epoch, seq) DO NOTHING"},
			values: func(r *historyRow) []any {
				return []any{string(r.Device), int64(r.Epoch), r.Seq, r.Catalog.String(), database.Clean(r.Firmware),
					database.Clean(r.ELF), r.Partial, clock.Micros(r.At)}
			},
			compare: func(a, b historyRow) int {
				return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.Epoch, b.Epoch), cmp.Compare(a.Seq, b.Seq))
			},
		},
	}
}
