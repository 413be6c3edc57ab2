package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"fleetd/internal/tasks"

	"github.com/nats-io/nats.go"
)

// Fleet identifies a fleet: all its nodes have the same values. Neither is secret.
type Fleet struct {
	Node     string `json:"node"`     // name of the sender
	Database string `json:"database"` // id that the database contains; empty while it is unreachable
	Secret   string `json:"secret"`   // fingerprint of the secret
}

// ErrOtherFleet is wrapped by the error of Join if the running nodes belong to
// another fleet.
var ErrOtherFleet = errors.New("another fleet uses this NATS and prefix")

// ErrNoAnswer is the error of Join if nodes run that did not answer in time. This
// node answers others from then on; which fleet theirs is has to be checked again.
var ErrNoAnswer = errors.New("the running nodes did not answer in time which fleet they belong to")

// joinTimeout limits the request at startup; running nodes answer in milliseconds.
const joinTimeout = time.Second

func (l *Link) fleetSubject() string { return l.opt.Prefix + ".fleet" }

// Join checks with the running nodes that this one belongs to their fleet, and then
// answers nodes that join later. Two fleets with one prefix would receive each
// other's events and write into each other's streams. The error wraps ErrOtherFleet,
// or is ErrNoAnswer, unless the request itself failed.
func (l *Link) Join(ctx context.Context, own Fleet) error {
	question, err := json.Marshal(own)
	if err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, joinTimeout)
	defer cancel()
	answer, err := l.opt.Conn.RequestWithContext(limited, l.fleetSubject(), question)
	var unchecked error
	switch {
	case errors.Is(err, nats.ErrNoResponders): // first node
	case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil:
		unchecked = ErrNoAnswer
	case err != nil:
		return fmt.Errorf("request the fleet of the other nodes: %w", err)
	default:
		var theirs Fleet
		if err := json.Unmarshal(answer.Data, &theirs); err != nil {
			return fmt.Errorf("%w: unexpected answer %.80q", ErrOtherFleet, answer.Data)
		}
		if err := own.mismatch(theirs); err != nil {
			return err
		}
	}
	l.fleet.Store(&question)
	if l.joined.Swap(true) {
		return unchecked
	}
	if _, err := l.opt.Conn.Subscribe(l.fleetSubject(), l.answerJoin); err != nil {
		return fmt.Errorf("answer new nodes: %w", err)
	}
	if err := l.opt.Conn.FlushTimeout(joinTimeout); err != nil { // the next node to join must reach this one
		l.opt.Log.Warn("NATS did not confirm a subscription", "error", err)
	}
	return unchecked
}

// answerJoin sends the identity of this fleet to a node that joins.
func (l *Link) answerJoin(msg *nats.Msg) {
	defer tasks.Contain(l.opt.Log, nil)
	l.reply(msg, *l.fleet.Load())
}

// mismatch returns an error if two nodes belong to different fleets. An
// unreachable database counts as equal.
func (f Fleet) mismatch(from Fleet) error {
	switch {
	case f.Secret != from.Secret:
		return fmt.Errorf("%w: node %s has another secret; give this node that fleet's --secret, or a --nats-prefix of its own", ErrOtherFleet, from.Node)
	case f.Database != from.Database && f.Database != "" && from.Database != "":
		return fmt.Errorf("%w: node %s has another database; give this node that fleet's --database, or a --nats-prefix of its own", ErrOtherFleet, from.Node)
	}
	return nil
}
