// Package cluster carries requests between nodes, and from services to devices,
// over NATS. NATS subscriptions are the directory: the node that holds a device's
// session subscribes to `<prefix>.cmd.<device>.*`. Without a subscription the server
// replies "no responders" at once, which means that the device is not connected. A
// call takes one hop to the holder and never two: the holder runs it or fails.
package cluster

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
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

// QueueLimits of a Link.
const (
	// inboxLimit is how many requests over all devices may arrive while one is
	// dispatched. NATS drops more without an error to the caller, and does not count
	// their bytes: the dispatcher moves them to its backlog before the next request.
	inboxLimit        = 8_192
	maxAuthenticating = 64              // requests being authenticated; more wait
	maxBody           = 64 << 10        // of a service's request, in bytes
	maxHop            = maxBody + 8<<10 // of another node's request, which wraps the arguments that REST allows
	queueGroup        = "owner"

	attachTimeout = 2 * time.Second
	drainPoll     = 10 * time.Millisecond // between two checks for requests in progress
)

// Headers of requests.
const (
	HeaderToken  = "Fleetd-Token"  // API token of a service
	HeaderCaller = "Fleetd-Caller" // the original caller, as written by access.AppendBy
)

// Options of a Link.
type Options struct {
	Conn   *nats.Conn // with nats.NoEcho: nodes do not process their own messages
	Prefix string
	Mint   *credential.Mint
	Node   string
	// SingleNode disables claims and news: there can be no other node.
	SingleNode bool
	// Open accepts requests without a token (--api-auth none).
	Open bool
	// IsConnected reports whether NATS is connected, without blocking as the method of Conn may
	// while it reconnects.
	IsConnected func() bool
	// OnResume is called, if set, after the process did not run for a while: other
	// nodes may have taken over its devices.
	OnResume func()
	Log      *slog.Logger
}

// Link is the fleet.Directory and fleet.Router of a node. It is safe for concurrent use.
type Link struct {
	opt            Options
	inbox          chan *nats.Msg
	serving        atomic.Int64  // requests in progress
	authenticating chan struct{} // requests whose caller is being authenticated
	service        atomic.Pointer[fleet.Service]
	auth           access.Authenticator // set by Attach
	callers        access.Reader

	answers *answers
	nonce   string // of this process, for stamps
	replays replayFilter
	sent    atomic.Uint64 // claims and news, numbers of their stamps
	peers   peers
	stalls  *stallDetector
	stalled atomic.Int32 // stalls whose backlog is not refused completely yet
	fleet   atomic.Pointer[[]byte]
	joined  atomic.Bool

	gathers sync.Map // kind of a question of other nodes to its gatherAnswer
	jobs    atomic.Pointer[Jobs]

	mu    sync.Mutex
	holds map[devices.ID]*hold
	ctx   context.Context
	stop  context.CancelFunc
	tasks sync.WaitGroup

	// Requests counts served requests by verb, Refused by code.
	Requests counters.Map[string]
	Refused  counters.Map[devices.Code]
	// ClaimsLost counts claims and news that NATS did not accept.
	ClaimsLost atomic.Uint64
	// HopsLost counts requests to other nodes that were not accepted in time.
	HopsLost atomic.Uint64
	// Stalls counts how often this process did not run for longer than stallLimit.
	Stalls atomic.Uint64
	// Waiting is the size of the requests in the dispatcher's backlog, in bytes.
	Waiting atomic.Int64
}

type hold struct {
	count int
	sub   *nats.Subscription
}

// New returns a Link. It serves requests after Attach.
func New(opt Options) *Link {
	l := &Link{opt: opt, inbox: make(chan *nats.Msg, inboxLimit), authenticating: make(chan struct{}, maxAuthenticating), holds: map[devices.ID]*hold{},
		answers: newAnswers(), nonce: rand.Text(), peers: peers{limit: rate.NewLimiter(announceRate, announceBurst)}, stalls: newStallDetector(stallLimit)}
	l.ctx, l.stop = context.WithCancel(context.Background())
	return l
}

// Attach starts to serve requests for the service's devices, and to process claims
// of other nodes. Call it once.
func (l *Link) Attach(s *fleet.Service) error {
	l.auth = access.Authenticator{Keys: s.Keys(), IsAdmin: l.opt.Mint.IsAdmin, Open: l.opt.Open}
	l.service.Store(s)
	l.stalls.tick() // the time before had no work and is not a stall
	l.tasks.Go(l.dispatch)
	l.tasks.Go(l.watch)
	// Each subscription handles its messages in order, on its own goroutine.
	if l.opt.SingleNode {
		return nil
	}
	_, claims := l.opt.Conn.Subscribe(l.nodeSubject(verbClaims, "*"), l.onClaim)
	_, news := l.opt.Conn.Subscribe(l.nodeSubject(verbNews, "*"), l.onNews)
	_, gathers := l.opt.Conn.Subscribe(l.nodeSubject(verbGather, "*"), l.onGather)
	_, answers := l.opt.Conn.Subscribe(l.answers.prefix+"*", l.answers.deliver)
	if err := errors.Join(claims, news, gathers, answers); err != nil {
		return fmt.Errorf("subscribe to other nodes: %w", err)
	}
	// Changes that are committed after a later read of the database arrive here. A
	// server that is unreachable now gets the subscriptions when it is back.
	if l.opt.Conn.IsConnected() {
		if err := l.opt.Conn.FlushTimeout(attachTimeout); err != nil {
			l.opt.Log.Warn("NATS did not confirm the subscriptions", "error", err)
		}
		l.announceNonce()
	}
	return nil
}

// Drain waits until no request is in progress, or ctx ends.
func (l *Link) Drain(ctx context.Context) {
	for l.serving.Load() > 0 && ctx.Err() == nil {
		time.Sleep(drainPoll)
	}
}

// Close stops serving and waits for requests in progress.
func (l *Link) Close() {
	l.stop()
	l.tasks.Wait()
}

func (l *Link) subject(id devices.ID, verb string) string {
	return l.opt.Prefix + ".cmd." + id.Token() + "." + verb
}

// Hold subscribes to the device's commands. All subscriptions share one channel,
// so they need no goroutine each. While NATS is unreachable it only records the
// device, for Reconnected.
func (l *Link) Hold(id devices.ID) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.holds[id]
	if h == nil {
		h = &hold{}
		l.holds[id] = h
	}
	h.count++
	return l.reconcile(id, h)
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
	_ = l.reconcile(id, h) // unsubscribing fails only with the connection
}

// reconcile subscribes or unsubscribes according to the count, if NATS is
// connected. The caller holds l.mu.
func (l *Link) reconcile(id devices.ID, h *hold) error {
	switch {
	case h.count > 0 && h.sub == nil && l.opt.IsConnected():
		sub, err := l.opt.Conn.ChanQueueSubscribe(l.subject(id, "*"), queueGroup, l.inbox)
		if err != nil {
			return fmt.Errorf("subscribe to commands of %s: %w", id, err)
		}
		h.sub = sub
	case h.count <= 0 && h.sub != nil && l.opt.IsConnected():
		if err := h.sub.Unsubscribe(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
			l.opt.Log.Debug("unsubscribe", "device", id, "error", err)
		}
		delete(l.holds, id)
	case h.count <= 0 && h.sub == nil:
		delete(l.holds, id)
	}
	return nil
}

// Reconnected makes up for subscriptions and news that were not sent while NATS
// was unreachable.
func (l *Link) Reconnected() {
	l.announceNonce()
	l.service.Load().RepeatNews()
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, h := range l.holds {
		if err := l.reconcile(id, h); err != nil {
			l.opt.Log.Warn("cannot subscribe to commands of a device; calls through other nodes fail until NATS reconnects", "device", id, "error", err)
		}
	}
}
