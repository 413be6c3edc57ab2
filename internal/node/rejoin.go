package node

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"fleetd/internal/cluster"
	"fleetd/internal/tasks"
)

// join checks that the nodes on this NATS belong to this fleet. It is called again when NATS
// or the database becomes reachable late; a completed check is not repeated.
func (n *node) join(ctx context.Context) error {
	n.joining.Lock()
	defer n.joining.Unlock()
	if n.joined || !n.bus.up.Load() {
		return nil
	}
	if n.cfg.NATS == "embedded" && n.cfg.NATSListen == "" { // no other node can connect
		if n.joined = n.store.Ready() == nil; n.joined {
			n.openStreams()
		}
		return nil
	}
	database, err := n.store.FleetID(ctx)
	if err != nil {
		n.log.Debug("the fleet's id is not known yet", "error", err)
	}
	err = n.cluster.Join(ctx, cluster.Fleet{Node: n.cfg.Node, Database: database, Secret: n.mint.Fingerprint()})
	unanswered := errors.Is(err, cluster.ErrNoAnswer)
	if !unanswered {
		n.unanswered.Store(0)
	}
	switch {
	case errors.Is(err, cluster.ErrOtherFleet):
		return fmt.Errorf("--nats: %w", err)
	case unanswered && n.unanswered.Add(1) == joinTries: // nobody there is a node
	case unanswered && n.unanswered.Load() > 1: // which was logged
		return nil
	case unanswered:
		n.log.Warn("cannot check the other nodes on NATS; the check is repeated, and this node stops if they belong to another fleet", "error", err)
		return nil
	case err != nil:
		n.log.Warn("cannot check the other nodes on NATS", "error", err)
		return nil
	}
	if n.joined = database != "" && n.store.Ready() == nil; n.joined {
		n.openStreams()
	}
	return nil
}

// joinLate is join for a running node: it stops a node that does not belong to the fleet.
func (n *node) joinLate() {
	if err := n.join(context.Background()); err != nil {
		select {
		case n.serveErr <- err:
		default: // it stops for another reason
		}
	}
}

// shared reports whether there can be other nodes: they share a database.
func (n *node) shared() bool { return strings.HasPrefix(n.cfg.Database, "postgres") }

// wake makes rejoins handle a time in which the process did not run.
func (n *node) wake() {
	tasks.Signal(n.resumed)
}

// rejoins catches up, each time the node was disconnected from the others: they may have
// taken over devices, and changed the registry.
func (n *node) rejoins(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.bus.reconnected:
			n.log.Info("NATS connection restored")
			n.cluster.Reconnected()
			n.joinLate()
		case <-n.resumed:
		}
		if n.shared() {
			n.service.Reassert()
			n.refresh(ctx)
		}
	}
}
