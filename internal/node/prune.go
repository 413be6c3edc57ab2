package node

import (
	"context"
	"math/rand/v2"
	"time"

	"fleetd/internal/store"
)

// Every node offers to prune at times of its own, a little more often than
// needed; the store lets one of them do it.
const (
	firstPrune = 10 * time.Minute // a start has other things to do
	pruneLimit = 30 * time.Minute
)

// prune deletes history and tool lists beyond their retention until ctx ends.
func (n *node) prune(ctx context.Context) {
	timer := time.NewTimer(firstPrune + rand.N(firstPrune))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		n.pruneOnce(ctx)
		timer.Reset(store.PruneEvery/2 + rand.N(store.PruneEvery/2))
	}
}

func (n *node) pruneOnce(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, pruneLimit)
	defer cancel()
	begun := time.Now()
	p, err := n.store.Prune(limited, store.Retention{History: n.cfg.HistoryRetention, PerDevice: n.cfg.HistoryPerDevice, Catalogs: n.cfg.CatalogRetention, Audit: n.cfg.AuditRetention})
	switch {
	case ctx.Err() != nil:
	case err != nil:
		n.log.Warn("old history could not be deleted; it is tried again within the hour", "error", err)
	case p.History+p.Catalogs+p.Audit > 0:
		n.log.Info("old history deleted", "entries", p.History, "catalogs", p.Catalogs, "audit_blocks", p.Audit, "took", time.Since(begun).Round(time.Millisecond))
	}
}
