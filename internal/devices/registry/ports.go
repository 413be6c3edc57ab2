package registry

import (
	"context"

	"fleetd/internal/access"
	"fleetd/internal/devices"
)

// Ledger keeps the log of decisions and the state folded from it, in one
// database that all nodes share. Errors wrap devices.ErrDatabase where that could
// not be used; whether something was committed is then not known.
type Ledger interface {
	// Decide makes decisions, each of one device, in one transaction with those of
	// other callers, and returns an outcome for each, in order. It returns when
	// they are committed.
	Decide(ctx context.Context, list []devices.Decision) ([]devices.Outcome, error)
	// SaveKey writes a new API key, or the end of one; the end of one that has
	// ended changes nothing. id is that of the change.
	SaveKey(ctx context.Context, who, id string, k access.Key) ([]devices.Change, error)
	// SavePolicy stores a version beside the older ones, or fails with
	// devices.ErrConflict if there is one.
	SavePolicy(ctx context.Context, who string, p access.Policy) ([]devices.Change, error)
	// Rotate replaces the rotation of the fleet by what decide makes of it.
	// highest is the highest generation of any device.
	Rotate(ctx context.Context, who string, decide func(old devices.Rotation, highest int64) (devices.Rotation, error)) ([]devices.Change, error)

	// Late has changes handed over that were committed and that no caller of the
	// methods above receives: it left first, or the rest of its list failed. It is
	// called once, before them; take must not wait.
	Late(take func([]devices.Change))

	// Head is the position of the last change.
	Head(ctx context.Context) (devices.Position, error)
	// Changes returns at most limit changes from a revision on, that one included,
	// in order. It fails with devices.ErrPruned if that is not kept any more.
	Changes(ctx context.Context, from int64, limit int) ([]devices.Change, error)
	// Snapshot calls member for every device, with those of its fields that the
	// roster needs, and returns the rest, all as of one position.
	Snapshot(ctx context.Context, member func(m devices.Member)) (Snapshot, error)
}

// Snapshot is what every node knows of the fleet beside its roster.
type Snapshot struct {
	devices.Position
	Rotation   devices.Rotation
	Exceptions []devices.Exception
	Keys       []access.Key
	Policy     access.Policy
}

// Records reads what the database holds of devices. Errors wrap
// devices.ErrDatabase.
type Records interface {
	// Rows returns the rows of devices that are known, in any order.
	Rows(ctx context.Context, ids []devices.ID) ([]devices.Row, error)
}

// Peers are the other nodes of the fleet.
type Peers interface {
	// Tell sends changes that were committed here. It never blocks, and what it
	// sends may be lost.
	Tell(list []devices.Change)
	// Revoke sends a revocation that the database did not take, and returns the
	// names of the nodes that have written it down, as many as answer in time.
	Revoke(ctx context.Context, p Revocation) (nodes []string)
	// Ask asks every node what it knows beyond a position, until ctx ends or all
	// that are known to live have answered.
	Ask(ctx context.Context, at devices.Position) []PeerAnswer
}

// PeerAnswer is what another node knows: the changes after the position that it
// was asked about, unless it has too many of them, and the revocations that are
// not written yet.
type PeerAnswer struct {
	Node        string           `json:"node"`
	At          devices.Position `json:"at"`
	Changes     []devices.Change `json:"changes,omitempty"`
	Whole       bool             `json:"whole"` // Changes are all of them
	Revocations []Revocation     `json:"revocations,omitempty"`
}
