package store

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/store/database"
)

// statement writes rows of type T: on Postgres all rows with one statement that has an array for
// each column, on SQLite several statements.
type statement[T any] struct {
	name    string
	columns []column
	text    func(values string) string
	// maxRows is how many rows one statement writes; 0: the constant maxRows.
	maxRows int
	values  func(args []any, row *T) []any // string, int64 or bool, in the order of the columns
	compare func(a, b T) int               // by key
}

// maxRows is the largest number of rows of one statement of SQLite, a power of two. Its
// parameters have no names, which SQLite would have to look up.
const maxRows = 32

// take returns how many of the rows the next statement of SQLite writes.
func (t *statement[T]) take(rows int) int {
	most := maxRows
	if t.maxRows > 0 {
		most = t.maxRows
	}
	return database.PowerOfTwo(rows, most)
}

// sqlite returns the text for n rows. Columns that SQLite computes with have a type only if the
// first row has one.
func (t *statement[T]) sqlite(n int) string {
	row := "(?" + strings.Repeat(", ?", len(t.columns)-1) + ")"
	return t.text("VALUES " + row + strings.Repeat(", "+row, n-1))
}

// postgres returns the text for any number of rows.
func (t *statement[T]) postgres() string {
	var arrays []string
	for i, c := range t.columns {
		arrays = append(arrays, "CAST($"+strconv.Itoa(i+1)+" AS "+c.kind+"[])")
	}
	return t.text("SELECT * FROM unnest(" + strings.Join(arrays, ", ") + ")")
}

// arrays returns the arguments of postgres for the values of rows, one row after another.
func (t *statement[T]) arrays(values []any) []any {
	args := make([]any, len(t.columns))
	for i, c := range t.columns {
		switch c.kind {
		case "BIGINT":
			args[i] = array[int64](values, i, len(t.columns))
		case "BOOLEAN":
			args[i] = array[bool](values, i, len(t.columns))
		default:
			args[i] = array[string](values, i, len(t.columns))
		}
	}
	return args
}

func array[V any](values []any, from, step int) []V {
	out := make([]V, 0, len(values)/step)
	for i := from; i < len(values); i += step {
		out = append(out, values[i].(V))
	}
	return out
}

// column is a column that a statement writes.
type column struct {
	name, kind string
	value      string // an expression with ? for the new value; empty: the new value
}

// key is the column that identifies an updated row.
var key = column{"device", "TEXT", ""}

// insert returns the text that inserts rows; conflict is the action for existing rows.
func insert(table, conflict string, columns []column) func(values string) string {
	var names []string
	for _, c := range columns {
		names = append(names, c.name)
	}
	head := "INSERT INTO " + table + " (" + strings.Join(names, ", ") + ") "
	return func(values string) string {
		if strings.HasPrefix(values, "SELECT") {
			values += " WHERE TRUE" // else ON would belong to a join
		}
		return head + values + " ON CONFLICT " + conflict
	}
}

// update returns the text that updates rows by their device, the first of the columns. It does
// not insert rows.
func update(table string, columns []column) func(values string) string {
	var names, sets []string
	for i, c := range columns {
		names = append(names, "c"+strconv.Itoa(i))
		if i == 0 {
			continue
		}
		value := "v.c" + strconv.Itoa(i)
		if c.value != "" {
			value = strings.ReplaceAll(c.value, "?", value)
		}
		sets = append(sets, c.name+" = "+value)
	}
	return func(values string) string {
		return "WITH v (" + strings.Join(names, ", ") + ") AS (" + values + ") UPDATE " + table + " SET " + strings.Join(sets, ", ") +
			" FROM v WHERE " + table + ".device = v.c0"
	}
}

// Columns of updates. An indexed column is not written unless it changed: SQLite rewrites the
// indexes of every column in the statement, and Postgres updates a row in place only if no
// indexed column changes.
var (
	factsColumns = []column{key, {"elf_sha256", "TEXT", ""}, {"chip", "TEXT", ""}, {"language", "TEXT", ""},
		{"serial", "TEXT", ""}, {"activate_v2", "BOOLEAN", ""}, {"checked_at", "BIGINT", ""}}
	imageColumns = slices.Concat(factsColumns, []column{{"board", "TEXT", ""}, {"board_folded", "TEXT", ""}, {"firmware", "TEXT", ""}, {"firmware_key", "TEXT", ""}})

	sessionColumns = []column{key, {"epoch", "BIGINT", ""}, {"seq", "BIGINT", ""}, {"session", "TEXT", ""}, {"client_id", "TEXT", ""},
		{"connected_at", "BIGINT", ""}, {"mcp_state", "TEXT", ""}, {"mcp_error", "TEXT", ""}, {"catalog_partial", "BOOLEAN", ""},
		{"tool_count", "BIGINT", ""}, {"generation", "BIGINT", "CASE WHEN ? > presence.generation THEN ? ELSE presence.generation END"}}
	stateColumns = slices.Concat(sessionColumns, []column{{"online", "BOOLEAN", ""}, {"node", "TEXT", ""}, {"transport", "TEXT", ""}, {"reason", "TEXT", ""},
		{"catalog", "TEXT", ""}, {"last_seen", "BIGINT", ""}, {"offline_since", "BIGINT", ""}})
	seenColumns = []column{key, {"last_seen", "BIGINT", ""}}

	catalogColumns = []column{{"sha256", "TEXT", ""}, {"tools", "TEXT", ""}, {"encoding", "TEXT", ""}, {"tool_count", "BIGINT", ""}, {"bytes", "BIGINT", ""},
		{"first_seen", "BIGINT", ""}, {"used_at", "BIGINT", ""}}
	historyColumns = []column{key, {"epoch", "BIGINT", ""}, {"seq", "BIGINT", ""}, {"catalog", "TEXT", ""}, {"firmware", "TEXT", ""}, {"elf_sha256", "TEXT", ""},
		{"partial", "BOOLEAN", ""}, {"at", "BIGINT", ""}}
)

// statements are the writer's statements, in the order of execution.
type statements struct {
	facts    statement[devices.Check] // of a device whose board and firmware are stored already
	image    statement[devices.Check]
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
	facts := func(args []any, f *devices.Check) []any {
		return append(args, string(f.Device), f.ELF, f.Chip, f.Language, f.Serial, f.ActivateV2, database.Micros(f.CheckedAt))
	}
	session := func(args []any, p *presenceRow) []any {
		return append(args, string(p.Device), int64(p.Epoch), p.Seq, p.Session, p.ClientID, database.Micros(p.ConnectedAt),
			string(p.MCP), p.MCPError, p.Partial, int64(p.Tools), p.Generation)
	}
	byDevice := func(a, b presenceRow) int { return cmp.Compare(a.Device, b.Device) }
	return &statements{
		facts: statement[devices.Check]{
			name: "devices, facts", columns: factsColumns, text: update("devices", factsColumns), values: facts,
			compare: func(a, b devices.Check) int { return cmp.Compare(a.Device, b.Device) },
		},
		image: statement[devices.Check]{
			name: "devices, image", columns: imageColumns, text: update("devices", imageColumns),
			values: func(args []any, f *devices.Check) []any {
				return append(facts(args, f), f.Board, strings.ToLower(f.Board), f.Firmware, versionKey(f.Firmware))
			},
			compare: func(a, b devices.Check) int { return cmp.Compare(a.Device, b.Device) },
		},
		session: statement[presenceRow]{
			name: "presence, session", columns: sessionColumns, text: update("presence", sessionColumns), values: session, compare: byDevice,
		},
		presence: statement[presenceRow]{
			name: "presence", columns: stateColumns, text: update("presence", stateColumns),
			values: func(args []any, p *presenceRow) []any {
				return append(session(args, p), p.Online, p.Node, string(p.Transport), p.Reason, p.catalog, p.lastSeen, p.offlineSince)
			},
			compare: byDevice,
		},
		seen: statement[presenceRow]{
			name: "presence, seen", columns: seenColumns, text: update("presence", seenColumns),
			values:  func(args []any, p *presenceRow) []any { return append(args, string(p.Device), p.lastSeen) },
			compare: byDevice,
		},
		catalogs: statement[devices.CatalogText]{
			name: "catalogs", columns: catalogColumns, text: insert("catalogs", "(sha256) DO NOTHING", catalogColumns),
			maxRows: 8, // lists may be long
			values: func(args []any, c *devices.CatalogText) []any {
				text, encoding := database.EncodeTools(c.Tools)
				return append(args, c.Hash.String(), text, encoding, int64(c.Count), int64(len(c.Tools)), database.Micros(c.FirstSeen), database.Micros(now()))
			},
			compare: func(a, b devices.CatalogText) int { return slices.Compare(a.Hash[:], b.Hash[:]) },
		},
		history: statement[historyRow]{
			name: "catalog_history", columns: historyColumns, text: insert("catalog_history", "(device, epoch, seq) DO NOTHING", historyColumns),
			values: func(args []any, r *historyRow) []any {
				return append(args, string(r.Device), int64(r.Epoch), r.Seq, r.Catalog.String(), database.Clean(r.Firmware),
					database.Clean(r.ELF), r.Partial, database.Micros(r.At))
			},
			compare: func(a, b historyRow) int {
				return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.Epoch, b.Epoch), cmp.Compare(a.Seq, b.Seq))
			},
		},
	}
}
