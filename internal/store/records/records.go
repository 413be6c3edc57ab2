// Package records reads what the database has of devices: single ones, lists, counts,
// and their tool lists. It writes nothing.
//
// A list chooses one source of ids: the ranges of an index that one of its terms
// names, in order of ids, or all devices. Windows of it are looked at by all other
// terms that SQL can evaluate, and the rows found are evaluated again in memory:
// SQL may select too much, never too little. Where several terms name an index,
// the one with the fewest entries is taken; a window that finds nothing goes on at
// the first device that the others' indexes have. A page ends after listTime or
// maxListed devices, full or not. Joins are written so that no planner can turn
// them into a scan of a whole table.
package records

import (
	"sync/atomic"
	"time"

	"fleetd/internal/store/database"
)

// Records implements fleet.Records. All methods may be called from any goroutine;
// errors wrap devices.ErrDatabase.
type Records struct {
	host  database.Host
	db    *database.DB
	now   func() time.Time
	tools toolNames
	sizes sizes
	// ListedIDs are the devices that lists looked at, at most maxListed for one page.
	ListedIDs atomic.Int64
}

// New reads the database of a host.
func New(host database.Host, now func() time.Time) *Records {
	return &Records{host: host, db: host.Database(), now: now}
}
