package registry

import (
	"context"

	"fleetd/internal/access"
	"fleetd/internal/devices"
)

// Ledger stores the log of changes and the state that results from them, in one database
// for all nodes. Errors wrap devices.ErrDatabase if the database failed; then it is
// unknown whether the write was committed.
type Ledger interface {
	// Decide makes decisions, each about one device, in one transaction with those of
	// other callers. It returns after the commit, with an outcome for each, in order.
	Decide(ctx context.Context, list []devices.Decision) ([]devices.Outcome, error)
	// SaveKey writes a new or revoked API key; revoking a revoked key changes nothing.
	// id is that of the change.
	SaveKey(ctx context.Context, who, id string, k access.Key) ([]devices.Change, error)
	// SavePolicy stores a new version, or returns devices.ErrConflict if it exists
	// already.
	SavePolicy(ctx context.Context, who string, p access.Policy) ([]devices.Change, error)
	// Rotate replaces the fleet's rotation by the result of decide. highest is the
	// highest generation of any device.
	Rotate(ctx context.Context, who string, decide func(old devices.Rotation, highest int64) (devices.Rotation, error)) ([]devices.Change, error)

	// OnLateChanges sets a function that receives committed changes without a caller: it
	// left before the commit, or the rest of its list failed. Call it once, before the
	// methods above; take must not block.
	OnLateChanges(take func([]devices.Change))

	// Head returns the position of the last change.
	Head(ctx context.Context) (devices.Position, error)
	// Changes returns at most limit changes in order, starting with revision from. It
	// returns devices.ErrPruned if that revision was deleted.
	Changes(ctx context.Context, from int64, limit int) ([]devices.Change, error)
	// Snapshot calls member for every device, with the fields that the roster needs, and
	// returns the rest, all as of one position.
	Snapshot(ctx context.Context, member func(m devices.Member)) (Snapshot, error)
}

// Snapshot is the state of the fleet apart from the roster.
type Snapshot struct {
	devices.Position
	Rotation   devices.Rotation
	Exceptions []devices.Exception
	Keys       []access.Key
	Policy     access.Policy
	ClientKey  devices.ClientKey
}

// Records reads devices from the database. Errors wrap devices.ErrDatabase.
type Records interface {
	// Rows returns the rows of known devices, in any order.
	Rows(ctx context.Context, ids []devices.ID) ([]devices.Row, error)
}

// Peers are the other nodes of the fleet.
type Peers interface {
	// Publish sends changes that this node committed. It never blocks; messages may be
	// lost.
	Publish(list []devices.Change)
	// Revoke sends a revocation that the database did not accept. It returns the names
	// of the nodes that have written it to disk and answered in time.
	Revoke(ctx context.Context, p Revocation) (nodes []string)
	// Query requests the changes after a position from every node, until ctx ends or
	// all live nodes have answered.
	Query(ctx context.Context, at devices.Position) []PeerAnswer
}

// PeerAnswer is another node's answer to a Query: the changes after the position, unless
// there are too many, and the revocations that are not in the database yet.
type PeerAnswer struct {
	Node        string           `json:"node"`
	At          devices.Position `json:"at"`
	Changes     []devices.Change `json:"changes,omitempty"`
	Complete    bool             `json:"whole"` // Changes is complete
	Revocations []Revocation     `json:"revocations,omitempty"`
}
