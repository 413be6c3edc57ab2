package node

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"fleetd/internal/cluster"
)

// join makes sure that the nodes on this NATS are of this fleet. It is asked
// again when NATS or the database comes up late; what was known then is not
// asked twice.
func (n *node) join(ctx context.Context) error {
	n.joining.Lock()
	defer n.joining.Unlock()
	private := n.cfg.NATS == "embedded" && n.cfg.NATSListen == "" // nobody else is there
	if private || n.joined || !n.bus.up.Load() {
		return nil
	}
	database, err := n.store.FleetID(ctx)
	if err != nil {
		n.log.Debug("the fleet's id is not known yet", "error", err)
	}
	err = n.cluster.Join(ctx, cluster.Fleet{Node: n.cfg.Node, Database: database, Secret: n.mint.Fingerprint()})
	switch {
	case errors.Is(err, cluster.ErrOtherFleet):
		return fmt.Errorf("--nats: %w", err)
	case err != nil:
		n.log.Warn("the other nodes could not be asked", "error", err)
		return nil
	}
	n.joined = database != ""
	return nil
}

// joinLate is join once the node runs: it ends a node that does not belong here.
func (n *node) joinLate() {
	if err := n.join(context.Background()); err != nil {
		select {
		case n.serveErr <- err:
		default: // it ends for other reasons
		}
	}
}

// shared tells whether there can be other nodes: they share a database.
func (n *node) shared() bool { return strings.HasPrefix(n.cfg.Database, "postgres") }

// wake has rejoins look after what happened while the process did not run.
func (n *node) wake() {
	select {
	case n.woken <- struct{}{}:
	default: // one wake-up is enough
	}
}

// rejoins makes good, each time the node was cut off from the others, what it
// missed: they may have taken devices over, and decided about some.
func (n *node) rejoins(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.bus.back:
			n.log.Info("NATS connection is back")
			n.cluster.Reconnected()
			n.joinLate()
		case <-n.woken:
		}
		if n.shared() {
			n.service.Reassert()
			n.refresh(ctx)
		}
	}
}
