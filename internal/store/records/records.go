// Package records reads devices from the database: single ones, lists, counts, and their tool lists.
// Except for resealed attestation keys it writes nothing.
//
// A list has one source of ids: the ranges of an index for one of its terms, in order of ids, or all
// devices. Windows of it are checked with all other terms that SQL can evaluate, and the rows found
// are evaluated again in memory: SQL may select too many, never too few. If several terms have an
// index, the one with the fewest entries is used; after a window without results the search
// continues at the first device in the other indexes. A page ends after listTime or maxListed
// devices, full or not. Joins are written so that no planner can turn them into a scan of a whole
// table.
package records

import (
	"sync/atomic"
	"time"

	"fleetd/internal/store/database"
)

// Records implements fleet.Records. It is safe for concurrent use; errors wrap devices.ErrDatabase.
type Records struct {
	host  database.Host
	db    *database.DB
	now   func() time.Time
	tools toolNames
	sizes sizes
	// ListedIDs counts the devices that lists examined, at most maxListed for one page.
	ListedIDs atomic.Int64
}

// New returns the Records of a host's database.
func New(host database.Host, now func() time.Time) *Records {
	return &Records{host: host, db: host.Database(), now: now}
}
