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

// Fleet is what all nodes of one fleet have in common. Neither part is secret.
type Fleet struct {
	Node     string `json:"node"`     // who says so
	Database string `json:"database"` // the database's own id; empty while it is away
	Secret   string `json:"secret"`   // fingerprint
}

// ErrOtherFleet is wrapped by the error of Join if the nodes that are there
// belong to another fleet.
var ErrOtherFleet = errors.New("another fleet uses this NATS and prefix")

// joinTimeout bounds the question at the start; nodes that are there answer in
// milliseconds.
const joinTimeout = time.Second

func (l *Link) fleet() string { return l.opt.Prefix + ".fleet" }

// Join asks the nodes that are there whether this one belongs to them, and
// answers those that come later. Two fleets on one prefix would hear each
// other's devices and write into each other's streams. The error wraps
// ErrOtherFleet, or says that NATS could not be asked.
func (l *Link) Join(ctx context.Context, mine Fleet) error {
	question, err := json.Marshal(mine)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, joinTimeout)
	defer cancel()
	answer, err := l.opt.Conn.RequestWithContext(ctx, l.fleet(), question)
	switch {
	case errors.Is(err, nats.ErrNoResponders): // the first node
	case errors.Is(err, context.DeadlineExceeded): // those that are there do not run
	case err != nil:
		return fmt.Errorf("ask the other nodes: %w", err)
	default:
		var theirs Fleet
		if err := json.Unmarshal(answer.Data, &theirs); err != nil {
			return fmt.Errorf("%w, and answers %.80q", ErrOtherFleet, answer.Data)
		}
		if err := mine.differs(theirs); err != nil {
			return err
		}
	}
	l.mine.Store(&question)
	if l.joined.Swap(true) {
		return nil
	}
	if _, err := l.opt.Conn.Subscribe(l.fleet(), l.introduce); err != nil {
		return fmt.Errorf("answer new nodes: %w", err)
	}
	if err := l.opt.Conn.FlushTimeout(joinTimeout); err != nil { // the next that asks must find us
		l.opt.Log.Warn("NATS did not confirm a subscription", "error", err)
	}
	return nil
}

// introduce tells another node that wants to join which fleet this is.
func (l *Link) introduce(msg *nats.Msg) {
	defer tasks.Contain(l.opt.Log, nil)
	l.reply(msg, *l.mine.Load())
}

// differs returns in one sentence what keeps two nodes apart; a database that
// is away is not known to differ.
func (f Fleet) differs(from Fleet) error {
	switch {
	case f.Secret != from.Secret:
		return fmt.Errorf("%w: node %s has another secret; give this node that fleet's --secret, or a --nats-prefix of its own", ErrOtherFleet, from.Node)
	case f.Database != from.Database && f.Database != "" && from.Database != "":
		return fmt.Errorf("%w: node %s has another database; give this node that fleet's --database, or a --nats-prefix of its own", ErrOtherFleet, from.Node)
	}
	return nil
}
