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
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/access"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
)

// Limits of a Link.
const (
	// inboxLimit is how many requests may come while one is dispatched, over
	// all devices. NATS drops what is over it without a word to the caller, and
	// its bytes are not counted: the dispatcher moves them to its backlog before
	// it looks at the next.
	inboxLimit = 8_192
	MaxServing = 4_096           // requests being served; more are refused as unavailable
	maxBody    = 64 << 10        // of a service's request
	maxHop     = maxBody + 8<<10 // of another node's, which wraps what REST allows
	queueGroup = "owner"

	attachTimeout = 2 * time.Second
)

// Headers of requests.
const (
	HeaderToken  = "Fleetd-Token"  // a service's API token
	HeaderHop    = "Fleetd-Hop"    // another node's signature
	HeaderCaller = "Fleetd-Caller" // who asked the other node, as access.AppendBy writes it
)

// Options of a Link.
type Options struct {
	Conn   *nats.Conn
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
	// Woken is called, if set, when the process has not run for a while: other
	// nodes may have taken its devices.
	Woken func()
	Log   *slog.Logger
}

// Link is the devices.Directory and devices.Router of a node. It is safe for concurrent use.
type Link struct {
	opt     Options
	inbox   chan *nats.Msg
	serving chan struct{}
	service atomic.Pointer[devices.Service]
	door    access.Door // from Attach on
	callers access.Reader

	ownClaims string // subject
	answers   *answers
	nonce     string // of this start, for stamps
	taken     taken
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
	Requests devices.CounterMap[string]
	Refused  devices.CounterMap[devices.Code]
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
	l := &Link{opt: opt, inbox: make(chan *nats.Msg, inboxLimit), serving: make(chan struct{}, MaxServing), holds: map[devices.ID]*hold{},
		answers: newAnswers(), nonce: rand.Text(), naps: newNaps(napLimit)}
	l.ownClaims = l.claims(opt.Node)
	if l.opt.Up == nil && opt.Conn != nil {
		l.opt.Up = opt.Conn.IsConnected
	}
	if l.opt.Stamped == nil {
		l.opt.Stamped = func() bool { return false }
	}
	l.ctx, l.stop = context.WithCancel(context.Background())
	return l
}

// Attach starts serving requests with the service's devices, and hearing the
// claims of other nodes. Call it once.
func (l *Link) Attach(s *devices.Service) error {
	l.door = access.Door{Keys: s.Registry(), IsAdmin: l.opt.Mint.IsAdmin, Open: l.opt.Open}
	l.service.Store(s)
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
	}
	return nil
}

// Drain waits until no request is being served, or ctx ends.
func (l *Link) Drain(ctx context.Context) {
	for range cap(l.serving) {
		select {
		case l.serving <- struct{}{}:
		case <-ctx.Done():
			return
		}
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
	l.tellAgain()
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, h := range l.holds {
		if err := l.settle(id, h); err != nil {
			l.opt.Log.Warn("device cannot be announced to other nodes", "device", id, "error", err)
		}
	}
}

func (l *Link) refuse(msg *nats.Msg, e *devices.Error) {
	l.Refused.Add(e.Code, 1)
	l.reply(msg, e.AppendProblem(nil))
}

func (l *Link) reply(msg *nats.Msg, body []byte) { l.respond(msg, &nats.Msg{Data: body}) }

func (l *Link) respond(msg, answer *nats.Msg) {
	if msg.Reply == "" {
		return
	}
	if err := msg.RespondMsg(answer); err != nil {
		l.opt.Log.Debug("answer not sent", "subject", msg.Subject, "error", err)
	}
}

// request is what a message's subject and headers say.
type request struct {
	device devices.ID
	verb   string
	by     access.By
	node   bool // another node of this fleet asks
}

// open tells who asks for what. If that is not in order, it has been answered.
func (l *Link) open(msg *nats.Msg) (r request, ok bool) {
	switch err := l.check(msg, &r); {
	case err == nil:
		return r, true
	case errors.Is(err, errAgain):
		l.respond(msg, &nats.Msg{Header: nats.Header{HeaderAgain: []string{l.nonce}}})
	default:
		l.refuse(msg, devices.AsError(err))
	}
	return r, false
}

func (l *Link) check(msg *nats.Msg, r *request) (err error) {
	token, verb, _ := strings.Cut(strings.TrimPrefix(msg.Subject, l.opt.Prefix+".cmd."), ".")
	r.verb = verb
	if r.device, err = devices.ParseID(token); err != nil {
		return &devices.Error{Code: devices.CodeBadRequest, Detail: err.Error()}
	}
	switch err := l.authenticate(msg, r); {
	case errors.Is(err, errAgain):
		return err
	case err != nil:
		refusal := &devices.Error{Code: devices.CodeUnauthorized, Detail: "header " + HeaderToken + " must hold an API token: " + err.Error()}
		if errors.Is(err, errRepeated) {
			refusal.Detail = err.Error()
		}
		l.service.Load().NoteRefusal(access.By{Via: access.ViaNATS}, r.verb, r.device, refusal)
		return refusal
	}
	if len(msg.Data) > maxBody && !r.node {
		return tooLarge(msg)
	}
	return nil
}

// inOrder serves what belongs to a conversation, right here: audio and
// messages must reach the device as they were sent. Neither blocks.
func (l *Link) inOrder(msg *nats.Msg) bool {
	audio := strings.HasSuffix(msg.Subject, ".audio")
	if !audio && !strings.HasSuffix(msg.Subject, ".send") {
		return false
	}
	defer devices.Contain(l.opt.Log, nil)
	r, ok := l.open(msg)
	switch {
	case !ok:
	case audio:
		l.Requests.Add(r.verb, 1)
		if err := l.service.Load().Permit(r.by, access.ScopeAudio, r.device); err != nil {
			l.service.Load().NoteRefusal(r.by, r.verb, r.device, err)
			l.refuse(msg, devices.AsError(err))
			return true
		}
		l.service.Load().Say(r.device, msg.Data)
	default:
		l.Requests.Add(r.verb, 1)
		done := l.accept(msg, r.node)
		queue := l.service.Load().QueueMessageHere
		if r.node {
			queue = l.service.Load().QueueMessage
		}
		queue(devices.Message{Device: r.device, Body: msg.Data, By: r.by}, func(err error) {
			done()
			if err != nil {
				l.refuse(msg, devices.AsError(err))
				return
			}
			l.reply(msg, sent)
		})
	}
	return true
}

var sent = []byte(`{"ok":true}`)

func (l *Link) serve(msg *nats.Msg) {
	r, ok := l.open(msg)
	if !ok {
		return
	}
	id, verb, node := r.device, r.verb, r.node
	defer l.accept(msg, node)()
	var answer []byte
	var err error
	switch {
	case verb == "call":
		l.Requests.Add(verb, 1)
		answer, err = l.call(r, msg.Data)
	case verb == "rpc" && node: // between nodes alone; services have REST for it
		l.Requests.Add(verb, 1)
		answer, err = l.rpc(r, msg.Data)
	case node && (verb == string(devices.AskView) || verb == string(devices.AskRefresh)):
		l.Requests.Add(verb, 1)
		answer, err = l.answer(id, devices.Question(verb), msg.Data)
	default:
		err = &devices.Error{Code: devices.CodeBadRequest, Detail: fmt.Sprintf("no command %q; there are call, send and audio", verb)}
	}
	if err != nil {
		l.refuse(msg, devices.AsError(err))
		return
	}
	l.reply(msg, answer)
}

// authenticate accepts an API token, or another node of this fleet.
func (l *Link) authenticate(msg *nats.Msg, r *request) (err error) {
	signature, stamp := msg.Header.Get(HeaderHop), msg.Header.Get(HeaderStamp)
	if signature == "" && stamp == "" {
		r.by.Via = access.ViaNATS
		r.by.Who, err = l.door.Admit(msg.Header.Get(HeaderToken), time.Now())
		return err
	}
	caller := msg.Header.Get(HeaderCaller)
	r.node = true
	switch {
	case stamp != "":
		if err := l.takeStamp(msg, stamp, caller, r); err != nil {
			return err
		}
	case l.opt.Stamped(), !l.opt.Mint.IsHop(signature, string(r.device), r.verb, append([]byte(caller+"\n"), msg.Data...)):
		return access.ErrToken
	}
	r.by = l.callers.Parse(caller)
	return l.door.Keys.Valid(r.by.Who, time.Now()) // the other node may not have heard yet
}

// command is the body of a call or raw request.
type command struct {
	Tool      string
	Arguments json.RawMessage
	Method    string
	Params    json.RawMessage
	Timeout   string
	// Confirmation is that of a call that was refused for want of one.
	Confirmation string
}

// append writes what parse reads. What the caller sent stays as it is.
func (c command) append(dst []byte) []byte {
	dst = append(dst, '{')
	text := func(name, value string) {
		if value != "" {
			dst = jsonspan.AppendString(append(append(dst, name...), ':'), value)
			dst = append(dst, ',')
		}
	}
	raw := func(name string, value json.RawMessage) {
		if len(value) > 0 {
			dst = append(append(append(append(dst, name...), ':'), value...), ',')
		}
	}
	text(`"tool"`, c.Tool)
	raw(`"arguments"`, c.Arguments)
	text(`"method"`, c.Method)
	raw(`"params"`, c.Params)
	text(`"confirmation"`, c.Confirmation)
	dst = jsonspan.AppendString(append(dst, `"timeout":`...), c.Timeout)
	return append(dst, '}')
}

func (l *Link) parse(data []byte) (command, context.Context, context.CancelFunc, error) {
	var c command
	walk := jsonspan.Object(data)
	for walk.Next() {
		value := walk.Value()
		switch string(walk.Key()) {
		case "tool":
			c.Tool, _ = jsonspan.String(value)
		case "arguments":
			if jsonspan.KindOf(value) != jsonspan.KindNull {
				c.Arguments = value
			}
		case "method":
			c.Method, _ = jsonspan.String(value)
		case "params":
			c.Params = value
		case "confirmation":
			c.Confirmation, _ = jsonspan.String(value)
		case "timeout":
			if c.Timeout, _ = jsonspan.String(value); c.Timeout == "" {
				c.Timeout = string(value) // refused below, by its own words
			}
		}
	}
	if err := walk.Err(); err != nil {
		return c, nil, nil, &devices.Error{Code: devices.CodeBadRequest, Detail: "the request must be a JSON object: " + err.Error()}
	}
	timeout := devices.TimeoutFor(c.Tool)
	if c.Timeout != "" {
		given, err := time.ParseDuration(c.Timeout)
		if err != nil || given <= 0 || given > devices.MaxTimeout {
			return c, nil, nil, &devices.Error{Code: devices.CodeBadRequest,
				Detail: fmt.Sprintf("timeout %q must be a duration such as \"10s\", at most %v", c.Timeout, devices.MaxTimeout)}
		}
		timeout = given
	}
	ctx, cancel := context.WithTimeout(l.ctx, timeout)
	return c, ctx, cancel, nil
}

func (l *Link) call(from request, data []byte) ([]byte, error) {
	c, ctx, cancel, err := l.parse(data)
	if err != nil {
		return nil, err
	}
	defer cancel()
	if c.Tool == "" {
		return nil, &devices.Error{Code: devices.CodeBadRequest, Detail: `a call needs {"tool":"...","arguments":{...}}`}
	}
	run := l.service.Load().CallHere
	if from.node {
		run = l.service.Load().CallLocal
	}
	r, err := run(ctx, devices.ToolCall{Device: from.device, Tool: c.Tool, Arguments: c.Arguments, By: from.by, Confirmation: c.Confirmation})
	if err != nil {
		return nil, err
	}
	return r.AppendResult(nil), nil
}

func (l *Link) answer(id devices.ID, q devices.Question, data []byte) ([]byte, error) {
	_, ctx, cancel, err := l.parse(data)
	if err != nil {
		return nil, err
	}
	defer cancel()
	return l.service.Load().Answer(ctx, id, q)
}

func (l *Link) rpc(from request, data []byte) ([]byte, error) {
	c, ctx, cancel, err := l.parse(data)
	if err != nil {
		return nil, err
	}
	defer cancel()
	r, err := l.service.Load().CallRPCLocal(ctx, devices.RPCCall{Device: from.device, Method: c.Method, Params: c.Params, By: from.by, Confirmation: c.Confirmation})
	if err != nil {
		return nil, err
	}
	if r.Error != nil {
		return append(append([]byte(`{"error":`), r.Error...), '}'), nil
	}
	return append(append([]byte(`{"result":`), r.Result...), '}'), nil
}
