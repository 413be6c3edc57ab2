package node

import (
	"context"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/credential"
	"fleetd/internal/datadir"
	"fleetd/internal/devices"
	"fleetd/internal/tasks"
)

// rotated applies the fleet's secrets. fresh is set if other nodes may not have them yet.
// followRotation then updates the admin token's file and the sealed data.
func (n *node) rotated(r devices.Rotation, fresh bool) {
	next := credential.Rotation{Admin: r.Admin, PreviousUntil: r.PreviousUntil}
	for _, s := range r.Secrets {
		next.Secrets = append(next.Secrets, credential.SealedSecret{Number: s.Number, Since: s.Since, Sealed: s.Sealed})
	}
	var learned time.Time
	if fresh {
		learned = clock.Now()
	}
	if err := n.mint.Adopt(next, learned); err != nil {
		n.log.Error("the fleet's secret was rotated, but this node cannot use the new one and refuses credentials that other nodes accept", "error", err)
		return
	}
	tasks.Signal(n.rotations)
}

// followRotation updates the admin token's file and the sealed data in the database to the
// newest secret, until ctx ends.
func (n *node) followRotation(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.rotations:
		}
		if err := n.writeToken(); err != nil {
			n.log.Error("the admin token was rotated, but its file cannot be written; fix that and restart this node", "error", err)
		}
		n.reseal(ctx)
	}
}

// writeToken writes the admin token to its file.
func (n *node) writeToken() error {
	return n.dir.Write(datadir.FileToken, []byte(n.mint.AdminToken()+"\n"))
}

// reseal seals chip keys and secrets of webhooks with the newest secret. The next node that prunes continues with
// those that are left.
func (n *node) reseal(ctx context.Context) {
	if n.mint.Number() == 0 || n.store.Ready() != nil {
		return
	}
	switch changed, err := n.attest.Reseal(ctx); {
	case ctx.Err() != nil:
	case err != nil:
		n.log.Warn("not all chip keys are sealed with the new secret; trying again within the hour", "error", err)
	case changed > 0:
		n.log.Info("chip keys are sealed with the new secret", "keys", changed)
	}
	switch changed, err := n.webhooks.Reseal(ctx); {
	case ctx.Err() != nil:
	case err != nil:
		n.log.Warn("not all secrets of webhooks are sealed with the new secret; trying again within the hour", "error", err)
	case changed > 0:
		n.log.Info("secrets of webhooks are sealed with the new secret", "webhooks", changed)
	}
}
