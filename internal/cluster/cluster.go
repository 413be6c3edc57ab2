// Package cluster carries calls between nodes, and from services to devices,
// over NATS. Interest is the directory: the node that holds a device's session
// subscribes to `<prefix>.cmd.<device>.*`, so that a request nobody serves is
// answered at once ("no responders") and means that the device is not
// connected. A call goes one hop to the holder and never two: the far side
// runs it locally or fails.
package cluster

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"golang.org/x/time/rate"

	"fleetd/internal/access"
	"fleetd/internal/counters"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/fleet"
)

// Limits of a Link.
const (
	// inboxLimit is how many requests may come while one is dispatched, over
	// all devices. NATS drops what is over it without a word to the caller, and
	// its bytes are not counted: the dispatcher moves them to its backlog before
	// it looks at the next.
	inboxLimit = 8_192
	maxOpening = 64              // requests being authenticated; more wait
	maxBody    = 64 << 10        // of a service's request
	maxHop     = maxBody + 8<<10 // of another node's, which wraps what REST allows
	queueGroup = "owner"

	attachTimeout = 2 * time.Second
	drainLook     = 10 * time.Millisecond // between two looks at what is being served
)

// Headers of requests.
const (
	HeaderToken  = "Fleetd-Token"  // a service's API token
	HeaderHop    = "Fleetd-Hop"    // another node's signature
	HeaderCaller = "Fleetd-Caller" // who asked the other node, as access.AppendBy writes it
)

// Options of a Link.
type Options struct {
	Conn   *nats.Conn // with nats.NoEcho: what a node says is for others
	Prefix string
	Mint   *credential.Mint
	Node   string
	// Alone says that there can be no other node: nothing is claimed or told.
	Alone bool
	// Open accepts requests without a token (--api-auth none).
	Open bool
	// Up tells at once whether the connection stands; nil asks the connection,
	// which may take seconds while it reconnects.
	Up func() bool
	// Stamped tells at once whether all nodes of the fleet stamp their requests,
	// so that one without a stamp is nobody's; nil: that is not known.
	Stamped func() bool
	// StampedAll is Stamped for claims and news, which nodes began to stamp later.
	StampedAll func() bool
	// Woken is called, if set, when the process has not run for a while: other
	// nodes may have taken its devices.
	Woken func()
	Log   *slog.Logger
}

// Link is the fleet.Directory and fleet.Router of a node. It is safe for concurrent use.
type Link struct {
	opt     Options
	inbox   chan *nats.Msg
	serving atomic.Int64  // requests
	opening chan struct{} // requests of which it is not known yet who asks
	service atomic.Pointer[fleet.Service]
	door    access.Door // from Attach on
	callers access.Reader

	ownClaims string // subject
	answers   *answers
	nonce     string // of this start, for stamps
	taken     taken
	sent      atomic.Uint64 // claims and news, for their stamps
	peers     peers
	naps      *naps
	drowsy    atomic.Int32 // sleeps whose backlog is not through yet
	mine      atomic.Pointer[[]byte]
	joined    atomic.Bool

	newsMu sync.Mutex
	told   []told // oldest first

	mu    sync.Mutex
	holds map[devices.ID]*hold
	ctx   context.Context
	stop  context.CancelFunc
	tasks sync.WaitGroup

	// Requests counts served requests by verb, Refused by code.
	Requests counters.Map[string]
	Refused  counters.Map[devices.Code]
	// ClaimsLost counts claims that NATS did not take, and news that could not
	// wait any longer.
	ClaimsLost atomic.Uint64
	// HopsLost counts requests to other nodes that were not even accepted.
	HopsLost atomic.Uint64
	// Naps counts how often this process did not run for longer than napLimit.
	Naps atomic.Uint64
	// Waiting is the bytes of requests that wait for the dispatcher.
	Waiting atomic.Int64
}

type hold struct {
	count int
	sub   *nats.Subscription
}

// New returns a Link; Serve makes it answer.
func New(opt Options) *Link {
	l := &Link{opt: opt, inbox: make(chan *nats.Msg, inboxLimit), opening: make(chan struct{}, maxOpening), holds: map[devices.ID]*hold{},
		answers: newAnswers(), nonce: rand.Text(), peers: peers{limit: rate.NewLimiter(announceRate, announceBurst)}, naps: newNaps(napLimit)}
	l.ownClaims = l.claims(opt.Node)
	if l.opt.Up == nil && opt.Conn != nil {
		l.opt.Up = opt.Conn.IsConnected
	}
	if l.opt.Stamped == nil {
		l.opt.Stamped = func() bool { return false }
	}
	if l.opt.StampedAll == nil {
		l.opt.StampedAll = func() bool { return false }
	}
	l.ctx, l.stop = context.WithCancel(context.Background())
	return l
}

// Attach starts serving requests with the service's devices, and hearing the
// claims of other nodes. Call it once.
func (l *Link) Attach(s *fleet.Service) error {
	l.door = access.Door{Keys: s.Keys(), IsAdmin: l.opt.Mint.IsAdmin, Open: l.opt.Open}
	l.service.Store(s)
	l.naps.tick() // until now it had nothing to do, which is not the same as being stopped
	l.tasks.Go(l.dispatch)
	l.tasks.Go(l.watch)
	// One after the other, on a goroutine of the subscription's own.
	if l.opt.Alone {
		return nil
	}
	_, claims := l.opt.Conn.Subscribe(l.claims("*"), l.claimed)
	_, news := l.opt.Conn.Subscribe(l.news("*"), l.learn)
	_, answers := l.opt.Conn.Subscribe(l.answers.prefix+"*", l.answers.take)
	if err := errors.Join(claims, news, answers); err != nil {
		return fmt.Errorf("subscribe to other nodes: %w", err)
	}
	// What is read from the database after this is complemented by what is
	// heard from now on. A server that is away is subscribed to when it is back.
	if l.opt.Conn.IsConnected() {
		if err := l.opt.Conn.FlushTimeout(attachTimeout); err != nil {
			l.opt.Log.Warn("NATS did not confirm the subscriptions", "error", err)
		}
		l.announceNonce()
	}
	return nil
}

// Drain waits until no request is being served, or ctx ends.
func (l *Link) Drain(ctx context.Context) {
	for l.serving.Load() > 0 && ctx.Err() == nil {
		time.Sleep(drainLook)
	}
}

// Close stops serving.
func (l *Link) Close() {
	l.stop()
	l.tasks.Wait()
}

func (l *Link) subject(id devices.ID, verb string) string {
	return l.opt.Prefix + ".cmd." + id.Token() + "." + verb
}

// Hold subscribes to the device's commands. All subscriptions share one
// channel, which costs a fraction of a goroutine each. While NATS is away it is
// only noted, for Reconnected.
func (l *Link) Hold(id devices.ID) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.holds[id]
	if h == nil {
		h = &hold{}
		l.holds[id] = h
	}
	h.count++
	return l.settle(id, h)
}

// Release ends the subscription with the last Hold.
func (l *Link) Release(id devices.ID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.holds[id]
	if h == nil {
		return
	}
	h.count--
	_ = l.settle(id, h) // ending one fails at most with the connection
}

// settle makes the subscription what the count says, if NATS is there. The
// caller holds l.mu.
func (l *Link) settle(id devices.ID, h *hold) error {
	switch {
	case h.count > 0 && h.sub == nil && l.opt.Up():
		sub, err := l.opt.Conn.ChanQueueSubscribe(l.subject(id, "*"), queueGroup, l.inbox)
		if err != nil {
			return fmt.Errorf("subscribe to commands of %s: %w", id, err)
		}
		h.sub = sub
	case h.count <= 0 && h.sub != nil && l.opt.Up():
		if err := h.sub.Unsubscribe(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
			l.opt.Log.Debug("unsubscribe", "device", id, "error", err)
		}
		delete(l.holds, id)
	case h.count <= 0 && h.sub == nil:
		delete(l.holds, id)
	}
	return nil
}

// Reconnected makes good what could not be subscribed to, unsubscribed from, or
// told, while NATS was away.
func (l *Link) Reconnected() {
	l.announceNonce()
	l.tellAgain(math.MaxInt64) // the connection may have been dead for long
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, h := range l.holds {
		if err := l.settle(id, h); err != nil {
			l.opt.Log.Warn("device cannot be announced to other nodes", "device", id, "error", err)
		}
	}
}
