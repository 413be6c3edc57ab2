package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"fleetd/internal/store"
)

// keep reads registry changes when the database becomes usable, and while some are missing.
func (n *node) keep(ctx context.Context) {
	again := time.NewTicker(refreshEvery)
	defer again.Stop()
	refused := make(chan error, 1)
	go func() { refused <- n.store.WaitReady(ctx) }() // ends with ctx
	if n.service.Registry().Ready() && n.store.Ready() == nil {
		n.databaseUp(ctx)
	}
	for {
		select {
		case <-ctx.Done():
			return
		case err := <-refused:
			// A database of another fleet, or of a newer version, is detected only when
			// it is reachable.
			if errors.Is(err, store.ErrConfig) {
				n.serveErr <- fmt.Errorf("--database: %w", err)
			}
		case <-n.ready:
			n.refresh(ctx)
			n.databaseUp(ctx)
		case <-again.C:
			if tries := n.unanswered.Load(); tries > 0 && tries < joinTries {
				n.joinLate()
			}
			r := n.service.Registry()
			if n.store.Ready() == nil && (!r.Ready() || len(r.PendingRevocations()) > 0) {
				n.refresh(ctx)
			}
		}
	}
}

// refresh reads registry changes since the last one that this node has.
func (n *node) refresh(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, refreshLimit)
	defer cancel()
	if err := n.service.Registry().Refresh(ctx); err != nil {
		n.log.Warn("cannot read registry changes; trying again", "error", err)
	}
}

// databaseUp is called each time the database becomes usable.
func (n *node) databaseUp(ctx context.Context) {
	n.joinLate()
	if n.leases != nil {
		return // leases detect lost nodes
	}
	names, err := n.store.NodesWithoutLease(ctx)
	for _, name := range names { // of the last run, because there is no other node
		lost, loseErr := n.service.MarkNodeLost(ctx, name, n.store.OnlineOf)
		err = errors.Join(err, loseErr)
		if lost > 0 {
			n.log.Info("marked devices of the last run as offline", "devices", lost)
		}
	}
	if err != nil {
		n.log.Warn("cannot mark devices of the last run as offline; trying again when the database is reconnected", "error", err)
	}
}
