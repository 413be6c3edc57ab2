package store

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"fleetd/internal/devices"
)

// table knows how to write rows of type T: one INSERT for n rows whose text
// both databases take.
type table[T any] struct {
	name    string
	columns []string
	// conflict is the text behind the values: what happens to a row that is
	// there already.
	conflict string
	// maxRows bounds the rows of one statement below that of the backend; 0: no.
	maxRows int
	values  func(args []any, row *T) []any
	compare func(a, b T) int // by key
}

// text is the INSERT for n rows.
func (t *table[T]) text(n int) string {
	var b strings.Builder
	b.WriteString("INSERT INTO " + t.name + " (" + strings.Join(t.columns, ", ") + ") VALUES ")
	for i := range n * len(t.columns) {
		switch {
		case i == 0:
			b.WriteString("(")
		case i%len(t.columns) == 0:
			b.WriteString("), (")
		default:
			b.WriteString(", ")
		}
		b.WriteString("$" + strconv.Itoa(i+1))
	}
	b.WriteString(") ON CONFLICT " + t.conflict)
	return b.String()
}

// take is how many of the rows go into the next statement: a power of two, so
// that there are few texts to prepare.
func (t *table[T]) take(rows, most int) int {
	if t.maxRows > 0 {
		most = min(most, t.maxRows)
	}
	n := 1
	for n*2 <= min(rows, most) {
		n *= 2
	}
	return n
}

// set is `a = excluded.a, b = excluded.b`.
func set(columns ...string) string {
	var parts []string
	for _, c := range columns {
		parts = append(parts, c+" = excluded."+c)
	}
	return strings.Join(parts, ", ")
}

// setNewer is set for columns that a time belongs to: what a device says with
// its OTA check, what people decide with their last change.
// For the parts of what is decided see setDecided.
func setNewer(at string, columns ...string) string {
	return setIf("excluded."+at+" >= devices."+at, append(columns, at)...)
}

// setDecided is setNewer for a part of what is decided. A row whose edited_at is
// above the times of all parts was last written by a program that had none:
// then all parts are from that moment.
func setDecided(at string, columns ...string) string {
	const older = "devices.edited_at > devices.client_at AND devices.edited_at > devices.name_at" +
		" AND devices.edited_at > devices.labels_at AND devices.edited_at > devices.transport_at"
	stored := "(CASE WHEN " + older + " THEN devices.edited_at ELSE devices." + at + " END)"
	newer := "excluded." + at + " >= " + stored
	return setIf(newer, columns...) + ", " + at + " = CASE WHEN " + newer + " THEN excluded." + at + " ELSE " + stored + " END"
}

func setIf(condition string, columns ...string) string {
	var parts []string
	for _, c := range columns {
		parts = append(parts, fmt.Sprintf("%[1]s = CASE WHEN %[2]s THEN excluded.%[1]s ELSE devices.%[1]s END", c, condition))
	}
	return strings.Join(parts, ", ")
}

// lastTouched is the later of two times of a row; both databases know it as CASE
// alone.
func lastTouched(row string) string {
	return fmt.Sprintf("(CASE WHEN %[1]s.checked_at > %[1]s.edited_at THEN %[1]s.checked_at ELSE %[1]s.edited_at END)", row)
}

// tables are all tables that the writer writes, in the order it writes them.
type tables struct {
	devices    table[deviceRow]
	presence   table[devices.Presence]
	catalogs   table[devices.CatalogText]
	history    table[historyRow]
	exceptions table[devices.Exception]
}

// newTables describes the tables; now is the time at which a new list counts as
// used.
func newTables(now func() time.Time) *tables {
	return &tables{
		devices: table[deviceRow]{
			name: "devices",
			columns: []string{"device", "client_id", "pending_client_id", "admission", "name", "name_folded", "labels",
				"preferred_transport", "board", "firmware", "elf_sha256", "chip", "language", "serial", "activate_v2",
				"first_seen", "checked_at", "edited_at", "client_at", "name_at", "labels_at", "transport_at"},
			conflict: "(device) DO UPDATE SET " +
				setDecided("client_at", "client_id", "admission") + ", " + setDecided("name_at", "name", "name_folded") + ", " +
				setDecided("labels_at", "labels") + ", " + setDecided("transport_at", "preferred_transport") + ", " +
				setIf(lastTouched("excluded")+" >= "+lastTouched("devices"), "pending_client_id") + ", " + setNewer("edited_at") + ", " +
				setNewer("checked_at", "board", "firmware", "elf_sha256", "chip", "language", "serial", "activate_v2") +
				", first_seen = CASE WHEN devices.first_seen = 0 OR (excluded.first_seen > 0 AND excluded.first_seen < devices.first_seen)" +
				" THEN excluded.first_seen ELSE devices.first_seen END",
			values: func(args []any, r *deviceRow) []any {
				name, decided := clean(r.Name), r.DecidedAt()
				return append(args, string(r.ID), clean(r.ClientID), clean(r.PendingID), clean(string(r.Admission)), name,
					strings.ToLower(name), r.labels, clean(string(r.Prefer)), clean(r.Board), clean(r.Firmware), clean(r.ELF),
					clean(r.Chip), clean(r.Language), clean(r.Serial), r.ActivateV2, micros(r.FirstSeen), micros(r.CheckedAt), micros(r.EditedAt),
					decided.Client, decided.Name, decided.Labels, decided.Prefer)
			},
			compare: func(a, b deviceRow) int { return cmp.Compare(a.ID, b.ID) },
		},
		presence: table[devices.Presence]{
			name: "presence",
			columns: []string{"device", "epoch", "seq", "online", "node", "session", "client_id", "transport", "reason",
				"connected_at", "last_seen", "mcp_state", "mcp_error", "catalog", "catalog_partial", "tool_count", "generation"},
			conflict: "(device) DO UPDATE SET " + set("epoch", "seq", "online", "node", "session", "client_id", "transport", "reason",
				"connected_at", "last_seen", "mcp_state", "mcp_error", "catalog", "catalog_partial", "tool_count", "generation") +
				" WHERE presence.epoch < excluded.epoch OR (presence.epoch = excluded.epoch AND presence.seq < excluded.seq)",
			values: func(args []any, p *devices.Presence) []any {
				return append(args, string(p.Device), int64(p.Epoch), p.Seq, p.Online, clean(p.Node), clean(p.Session),
					clean(p.ClientID), clean(string(p.Transport)), clean(p.Reason), micros(p.ConnectedAt), micros(p.LastSeen),
					clean(string(p.MCP)), clean(p.MCPError), p.Catalog.String(), p.Partial, int64(p.Tools), p.Generation)
			},
			compare: func(a, b devices.Presence) int { return cmp.Compare(a.Device, b.Device) },
		},
		catalogs: table[devices.CatalogText]{
			name:     "catalogs",
			columns:  []string{"sha256", "tools", "encoding", "tool_count", "bytes", "first_seen", "used_at"},
			conflict: "(sha256) DO NOTHING",
			maxRows:  8, // lists may be long
			values: func(args []any, c *devices.CatalogText) []any {
				text, encoding := encodeTools(c.Tools)
				return append(args, c.Hash.String(), text, encoding, int64(c.Count), int64(len(c.Tools)), micros(c.FirstSeen), micros(now()))
			},
			compare: func(a, b devices.CatalogText) int { return slices.Compare(a.Hash[:], b.Hash[:]) },
		},
		history: table[historyRow]{
			name:     "catalog_history",
			columns:  []string{"device", "epoch", "seq", "catalog", "firmware", "elf_sha256", "partial", "at"},
			conflict: "(device, epoch, seq) DO NOTHING",
			values: func(args []any, r *historyRow) []any {
				return append(args, string(r.Device), int64(r.Epoch), r.Seq, r.Catalog.String(), clean(r.Firmware),
					clean(r.ELF), r.Partial, micros(r.At))
			},
			compare: func(a, b historyRow) int {
				return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.Epoch, b.Epoch), cmp.Compare(a.Seq, b.Seq))
			},
		},
		exceptions: table[devices.Exception]{
			name:    "credential_exceptions",
			columns: []string{"device", "generation", "revoked", "reason", "changed_at", "previous", "previous_until"},
			conflict: "(device) DO UPDATE SET " + set("generation", "revoked", "reason", "changed_at", "previous", "previous_until") +
				" WHERE credential_exceptions.generation < excluded.generation OR" +
				" (credential_exceptions.generation = excluded.generation AND credential_exceptions.changed_at < excluded.changed_at)",
			values: func(args []any, e *devices.Exception) []any {
				return append(args, string(e.Device), e.Generation, e.Revoked, clean(e.Reason), micros(e.ChangedAt), e.Previous, micros(e.PreviousUntil))
			},
			compare: func(a, b devices.Exception) int { return cmp.Compare(a.Device, b.Device) },
		},
	}
}

// decodeLabels reads labels as stored; what an operator broke by hand is none.
func decodeLabels(text string) map[string]string {
	if text == "" || text == "{}" {
		return nil
	}
	var labels map[string]string
	if json.Unmarshal([]byte(text), &labels) != nil {
		return nil
	}
	return labels
}
