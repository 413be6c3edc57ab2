package fleet

import (
	"context"
	"time"

	"fleetd/internal/audit"
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

// Router carries what is meant for a device one hop to the node that holds it.
// Every method fails with ErrNoHolder at once if no node does.
type Router interface {
	// Forward carries a tool call.
	Forward(ctx context.Context, c devices.ToolCall) (devices.ToolResult, error)
	// ForwardRPC carries a raw MCP request.
	ForwardRPC(ctx context.Context, c devices.RPCCall) (devices.RPCResult, error)
	// ForwardMessage carries a message other than MCP.
	ForwardMessage(ctx context.Context, m devices.Message) error
	// Ask asks the holder, and returns what Service.Answer made there.
	Ask(ctx context.Context, id devices.ID, q devices.Question) ([]byte, error)
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

// Auditor takes the record of who did what. Record never blocks and never
// fails; what cannot be kept leaves a gap that shows.
type Auditor interface {
	Record(e audit.Entry)
}
