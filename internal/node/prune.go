package node

import (
	"context"
	"math/rand/v2"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/store"
)

// Every node tries to prune at random times, a little more often than necessary; the store
// lets only one of them do it.
const (
	firstPrune = 10 * time.Minute // not during a start
	pruneLimit = 30 * time.Minute
)

// prune deletes history and tool lists beyond their retention, and tidies the bytes of images, until ctx ends.
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
		n.firmware.Tidy(ctx)
		timer.Reset(store.PruneEvery/2 + rand.N(store.PruneEvery/2))
	}
}

func (n *node) pruneOnce(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, pruneLimit)
	defer cancel()
	begun := time.Now()
	n.pruneRegistry(limited)
	n.reseal(limited)
	p, err := n.store.Prune(limited, store.Retention{History: n.cfg.HistoryRetention, PerDevice: n.cfg.HistoryPerDevice, Catalogs: n.cfg.CatalogRetention, Audit: n.cfg.AuditRetention})
	switch {
	case ctx.Err() != nil:
	case err != nil:
		n.log.Warn("cannot delete old history; trying again within the hour", "error", err)
	case p.History+p.Catalogs+p.Audit > 0:
		n.log.Info("old history deleted", "entries", p.History, "catalogs", p.Catalogs, "audit_blocks", p.Audit, "took", time.Since(begun).Round(time.Millisecond))
	}
}

// expirePage is how many devices that enrolled by themselves and never connected are removed
// at a time.
const expirePage = 200

// pruneRegistry removes devices that enrolled by themselves and never connected, and changes
// beyond the retention of the change log.
func (n *node) pruneRegistry(ctx context.Context) {
	if n.store.Ready() != nil {
		return
	}
	if _, err := n.ledger.ClearJoined(ctx); err != nil {
		n.log.Warn("cannot record which devices have connected; trying again within the hour", "error", err)
		return
	}
	for {
		ids, err := n.ledger.Expired(ctx, clock.Now(), expirePage)
		expired := 0
		if err == nil && len(ids) > 0 {
			expired, err = n.service.Registry().Expire(ctx, ids)
		}
		if err != nil {
			n.log.Warn("cannot remove devices that never connected; trying again within the hour", "error", err)
			return
		}
		if expired > 0 {
			n.log.Info("removed devices that enrolled by themselves and never connected", "devices", expired)
		}
		if len(ids) < expirePage {
			break
		}
	}
	switch deleted, err := n.ledger.Prune(ctx, clock.Now()); {
	case err != nil:
		n.log.Warn("cannot delete old changes; trying again within the hour", "error", err)
	case deleted > 0:
		n.log.Info("old changes deleted", "changes", deleted)
	}
}
