package fleet

import (
	"context"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/selector"
)

// Records reads and writes devices and their presence. Reads go to the
// database and wrap ErrDatabase when it is away; writes are queued, coalesced
// per device and committed in groups, and never block or fail.
type Records interface {
	session.Records
	// Rows returns those of the devices that are known, in any order.
	Rows(ctx context.Context, ids []devices.ID) ([]devices.Row, error)
	// List returns one page.
	List(ctx context.Context, q devices.ListQuery) (devices.Page, error)
	// Counts returns the numbers of all devices, CountsOf of those selected.
	Counts(ctx context.Context) (devices.Counts, error)
	CountsOf(ctx context.Context, q devices.ListQuery) (devices.Counts, error)
	// CatalogsOf returns the tool lists that the selected devices had last, with how
	// many have each.
	CatalogsOf(ctx context.Context, sel selector.Selector) ([]devices.CatalogCount, error)
}

// Changes reads the log of decisions. Errors wrap devices.ErrDatabase.
type Changes interface {
	// DeviceChanges returns the changes of a device with revisions below one, newest
	// first, or the newest of all if that is 0.
	DeviceChanges(ctx context.Context, id devices.ID, before int64, limit int) ([]devices.Change, error)
	// ChangesSince returns the changes of devices and of the fleet with revisions
	// above one, made at a time or later, in order of revision. It begins with the
	// oldest that is kept.
	ChangesSince(ctx context.Context, since time.Time, after int64, limit int) ([]devices.Change, error)
}
