package node

import (
	"context"
	"time"

	"fleetd/internal/credential"
	"fleetd/internal/devices"
)

// rotated takes the fleet's secrets. fresh says that other nodes may not know them
// yet. The admin token's file follows, and what is sealed: see followRotation.
func (n *node) rotated(r devices.Rotation, fresh bool) {
	next := credential.Rotation{Admin: r.Admin, PreviousUntil: r.PreviousUntil}
	for _, s := range r.Secrets {
		next.Secrets = append(next.Secrets, credential.SealedSecret{Number: s.Number, Since: s.Since, Sealed: s.Sealed})
	}
	var learned time.Time
	if fresh {
		learned = time.Now()
	}
	if err := n.mint.Adopt(next, learned); err != nil {
		n.log.Error("the fleet's secret was rotated, and this node cannot follow: it refuses credentials that others accept", "error", err)
		return
	}
	select {
	case n.rotations <- struct{}{}:
	default: // one wake-up is enough
	}
}

// followRotation keeps the admin token's file and what is sealed in the database up
// to the newest secret, until ctx ends.
func (n *node) followRotation(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.rotations:
		}
		if err := n.writeToken(); err != nil {
			n.log.Error("the admin token was rotated, and its file could not be written; start this node again once it can be", "error", err)
		}
		n.reseal(ctx)
	}
}

// writeToken keeps the admin token in its file.
func (n *node) writeToken() error { return n.dir.write(fileToken, []byte(n.mint.AdminToken()+"\n")) }

// reseal seals chip keys under the newest secret. What is left, the next node to
// prune takes up.
func (n *node) reseal(ctx context.Context) {
	if n.mint.Number() == 0 || n.store.Ready() != nil {
		return
	}
	switch changed, err := n.attest.Reseal(ctx); {
	case ctx.Err() != nil:
	case err != nil:
		n.log.Warn("chip keys are not all sealed under the new secret yet; it is tried again within the hour", "error", err)
	case changed > 0:
		n.log.Info("chip keys sealed under the new secret", "keys", changed)
	}
}
