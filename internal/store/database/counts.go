package database

import (
	"cmp"
	"context"
	"database/sql"
	"maps"
	"slices"
)

// countSlots is the number of rows of a count on Postgres, so that nodes rarely wait for each
// other's row.
const countSlots = 16

// Dimensions of fleet_counts.
const (
	CountState     = "state" // online, offline; revoked in addition to one of these
	CountReason    = "offline_reason"
	CountTransport = "transport" // of online devices
	CountNode      = "node"      // of online devices
	CountBoard     = "board"
	CountFirmware  = "firmware"
	CountMCP       = "mcp_state"
	CountCatalog   = "catalog"
)

// Values of CountState.
const (
	StateOnline  = "online"
	StateOffline = "offline"
	StateRevoked = "revoked"
)

// Count identifies a number of fleet_counts.
type Count struct{ Dimension, Value string }

// Deltas are the changes of counts in a transaction.
type Deltas map[Count]int64

// Add adds n to one count.
func (d Deltas) Add(dimension, value string, n int64) { d[Count{dimension, value}] += n }

// PresenceCounted are the counted values of a row of presence.
type PresenceCounted struct {
	Online                                bool
	Reason, Transport, Node, MCP, Catalog string
}

// Presence adds n devices with this presence: 1 for the new row, -1 for the old one.
func (d Deltas) Presence(p PresenceCounted, n int64) {
	if p.Online {
		d.Add(CountState, StateOnline, n)
		d.Add(CountTransport, p.Transport, n)
		d.Add(CountNode, p.Node, n)
	} else {
		d.Add(CountState, StateOffline, n)
		d.Add(CountReason, p.Reason, n)
	}
	d.Add(CountMCP, p.MCP, n)
	if p.Catalog != "" {
		d.Add(CountCatalog, p.Catalog, n)
	}
}

// Facts adds n devices with this board and firmware.
func (d Deltas) Facts(board, firmware string, n int64) {
	d.Add(CountBoard, board, n)
	d.Add(CountFirmware, firmware, n)
}

// Write writes the deltas in the order of their keys, without those that are 0. A transaction
// writes them after all rows of devices, and before changes and the revision.
func (d Deltas) Write(ctx context.Context, tx *sql.Tx, db *DB) error {
	keys := slices.DeleteFunc(slices.Collect(maps.Keys(d)), func(c Count) bool { return d[c] == 0 })
	slices.SortFunc(keys, func(a, b Count) int {
		return cmp.Or(cmp.Compare(a.Dimension, b.Dimension), cmp.Compare(a.Value, b.Value))
	})
	rows := make([][]any, len(keys))
	for i, c := range keys {
		rows[i] = []any{c.Dimension, c.Value, db.Slot, d[c]}
	}
	_, err := countRows.Write(ctx, tx, db, rows)
	return err
}

var countRows = Rows{Table: "fleet_counts", Columns: append(Text("dimension", "value"), Bigint("slot", "n")...),
	Conflict: "(dimension, value, slot) DO UPDATE SET n = fleet_counts.n + excluded.n"}
