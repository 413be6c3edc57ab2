package node

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"fleetd/internal/cluster"
)

// How a node keeps up with what the others decide. News reaches it at once;
// what it missed it reads, as soon as the database lets it, and once in a while
// in case it does not know that it missed something.
const (
	reloadEvery = 10 * time.Minute
	reloadRetry = 2 * time.Second
	reloadLimit = time.Minute // for one reading
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
// missed: they may have taken devices over, admitted some and revoked others.
func (n *node) rejoins(ctx context.Context) {
	regular := time.NewTicker(reloadEvery + rand.N(reloadEvery/2))
	defer regular.Stop()
	var again <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.bus.back:
			n.log.Info("NATS connection is back")
			n.cluster.Reconnected()
			n.joinLate()
			if n.shared() {
				n.service.Reassert()
			}
		case <-n.woken:
			if n.shared() {
				n.service.Reassert()
			}
		case <-regular.C:
		case <-again:
		}
		again = nil
		if err := n.reload(ctx); err != nil {
			n.log.Warn("what other nodes decided could not be read; it is tried again", "error", err)
			again = time.After(reloadRetry)
		}
	}
}

func (n *node) reload(ctx context.Context) error {
	if !n.shared() || !n.service.Loaded() {
		return nil // there is nobody else, or everything will be read anyway
	}
	ctx, cancel := context.WithTimeout(ctx, reloadLimit)
	defer cancel()
	return n.service.Reload(ctx)
}
