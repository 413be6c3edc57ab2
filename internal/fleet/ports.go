package fleet

import (
	"context"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/selector"
)

// Records reads and writes devices and their presence. Reads go to the database and
// wrap ErrDatabase when it is unreachable. Writes are queued, coalesced per device and
// committed in groups; they never block or fail.
type Records interface {
	session.Records
	// Rows returns the rows of those devices that are known, in any order.
	Rows(ctx context.Context, ids []devices.ID) ([]devices.Row, error)
	// List returns one page.
	List(ctx context.Context, q devices.ListQuery) (devices.Page, error)
	// Counts returns the counts of all devices, CountsOf of the selected ones.
	Counts(ctx context.Context) (devices.Counts, error)
	CountsOf(ctx context.Context, q devices.ListQuery) (devices.Counts, error)
	// CatalogsOf returns the latest tool lists of the selected devices, with the
	// number of devices that have each.
	CatalogsOf(ctx context.Context, sel selector.Selector) ([]devices.CatalogCount, error)
}

// Changes reads the log of changes. Errors wrap devices.ErrDatabase.
type Changes interface {
	// DeviceChanges returns the changes of a device with revisions below before,
	// newest first; 0 starts with the newest.
	DeviceChanges(ctx context.Context, id devices.ID, before int64, limit int) ([]devices.Change, error)
	// ChangesSince returns the changes of devices and of the fleet with revisions above
	// after, made at since or later, in order of revision, starting with the oldest that
	// is kept.
	ChangesSince(ctx context.Context, since time.Time, after int64, limit int) ([]devices.Change, error)
}
