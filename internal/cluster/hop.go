package cluster

import (
	"context"
	"fmt"
	"maps"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/jsonspan"
	"fleetd/internal/tasks"
	"fleetd/internal/timescale"
)

// A hop is a request to the node that holds a device. The holder sends an acceptance
// or the answer at least every acceptEvery; the requesting node gives up lostAfter
// the last of them. A call to a node that was frozen, killed or disconnected without
// the server noticing thus ends long before its deadline.
var (
	acceptEvery = timescale.Of(time.Second)
	lostAfter   = timescale.Of(3 * time.Second)
)

// outcomeGrace is how long after its deadline a call waits for the holder to report
// the outcome: whether anything was sent to the device.
const outcomeGrace = 150 * time.Millisecond

// acceptedReply is what a holder sends before an answer that takes longer.
var acceptedReply = []byte(`{"accepted":true}`)

// maxShort is the largest size of an acceptance, or of the answer to a message, in
// bytes; larger answers are not searched for those.
const maxShort = 512

// hasTrue reports whether a short object has this member with the value true.
func hasTrue(data []byte, name string) bool {
	return len(data) <= maxShort && jsonspan.KindOf(jsonspan.Member(data, name)) == jsonspan.KindTrue
}

// answers are the hops in progress of this node, on one subscription.
type answers struct {
	prefix string // subject of the subscription without its last token

	mu      sync.Mutex
	last    uint64
	waiting map[string]chan *nats.Msg // by reply subject
	late    map[string]lateAnswer     // of hops that have ended, by reply subject
}

// lateAnswer handles an answer that arrives after its hop has ended.
type lateAnswer struct {
	take func(*nats.Msg)
	end  time.Time
}

const (
	// HeaderLate marks an answer that arrives after its hop has ended.
	HeaderLate = "Fleetd-Hop-Late"
	// lateLifetime is how long a late answer is expected, for at most maxLate hops.
	lateLifetime = 10 * time.Minute
	maxLate      = 4096
)

func newAnswers() *answers {
	return &answers{prefix: nats.NewInbox() + ".", waiting: map[string]chan *nats.Msg{}, late: map[string]lateAnswer{}}
}

// open returns the reply subject of a new hop, and the channel for its acceptances
// and its answer, or nil when the connection is lost.
func (a *answers) open() (subject string, arrive chan *nats.Msg) {
	arrive = make(chan *nats.Msg, 8)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.last++
	subject = a.prefix + strconv.FormatUint(a.last, 36)
	a.waiting[subject] = arrive
	return subject, arrive
}

// close ends a hop. late, if not nil, handles an answer that arrives later.
func (a *answers) close(subject string, late func(*nats.Msg)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.waiting, subject)
	if late == nil {
		return
	}
	now := time.Now()
	if len(a.late) >= maxLate {
		maps.DeleteFunc(a.late, func(_ string, l lateAnswer) bool { return now.After(l.end) })
	}
	if len(a.late) < maxLate {
		a.late[subject] = lateAnswer{late, now.Add(lateLifetime)}
	}
}

// deliver passes on an answer. It drops what exceeds the buffer of a hop.
func (a *answers) deliver(msg *nats.Msg) {
	if late := a.route(msg); late != nil {
		late(msg)
	}
}

func (a *answers) route(msg *nats.Msg) (late func(*nats.Msg)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if arrive := a.waiting[msg.Subject]; arrive != nil {
		select {
		case arrive <- msg:
		default:
		}
		return nil
	}
	l, ok := a.late[msg.Subject]
	if !ok || msg.Header.Get(HeaderLate) == "" {
		return nil
	}
	delete(a.late, msg.Subject)
	if time.Now().After(l.end) {
		return nil
	}
	return l.take
}

// connectionLost ends all hops in progress.
func (a *answers) connectionLost() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, arrive := range a.waiting {
		select {
		case arrive <- nil:
		default: // there is an answer to read
		}
	}
}

// hop sends a request of the caller to the node that holds the device. late, if not
// nil, handles an answer that arrives after the deadline.
func (l *Link) hop(ctx context.Context, id devices.ID, verb, caller string, body []byte, late func(*nats.Msg)) (answered []byte, err error) {
	if l.opt.SingleNode {
		return nil, devices.ErrNoHolder
	}
	if !l.opt.IsConnected() {
		return nil, errNATSDown(false)
	}
	subject, arrive := l.answers.open()
	defer func() {
		if late != nil && !isUnknown(answered, err) {
			late = nil
		}
		l.answers.close(subject, late)
	}()
	msg := &nats.Msg{Subject: l.subject(id, verb), Reply: subject, Data: body, Header: nats.Header{
		HeaderStamp: []string{l.stamp(id, verb, noNonce, subject, caller, body)}, HeaderCaller: []string{caller}}}
	if err := l.opt.Conn.PublishMsg(msg); err != nil {
		return nil, errNATSDown(false)
	}
	resends := 0
	lost := time.NewTimer(lostAfter)
	defer lost.Stop()
	ended := ctx.Done()
	for {
		select {
		case answer := <-arrive:
			switch {
			case answer == nil:
				return nil, errNATSDown(true)
			case len(answer.Data) == 0 && answer.Header.Get("Status") == "503": // the server's "no responders"
				return nil, devices.ErrNoHolder
			case answer.Header.Get(HeaderAgain) != "":
				if resends++; resends > maxResends {
					continue
				}
				msg.Header[HeaderStamp] = []string{l.stamp(id, verb, answer.Header.Get(HeaderAgain), subject, caller, body)}
				if err := l.opt.Conn.PublishMsg(msg); err != nil {
					return nil, errNATSDown(false)
				}
			case hasTrue(answer.Data, "accepted"):
				if ended != nil {
					lost.Reset(lostAfter)
				}
			default:
				return answer.Data, nil
			}
		case <-lost.C:
			if ended == nil {
				return nil, &devices.Error{Code: devices.CodeDeviceTimeout, Sent: true, Outcome: devices.OutcomeUnknown, Detail: "the node that holds the device did not answer in time, so the outcome is unknown"}
			}
			l.HopsLost.Add(1)
			return nil, &devices.Error{Code: devices.CodeUnavailable, Part: "node", Sent: true, Outcome: devices.OutcomeUnknown,
				Detail: fmt.Sprintf("the node that holds the device did not answer within %v, so the outcome is unknown", lostAfter)}
		case <-ended:
			ended = nil
			lost.Reset(outcomeGrace)
		}
	}
}

// isUnknown reports whether the outcome of a hop is unknown.
func isUnknown(answer []byte, err error) bool {
	if err != nil {
		return devices.AsError(err).Outcome == devices.OutcomeUnknown
	}
	e, ok := devices.ParseProblem(answer)
	return ok && e.Outcome == devices.OutcomeUnknown
}

// accept sends acceptances of a hop until end is called. Services do not get
// acceptances.
func (l *Link) accept(msg *nats.Msg, node bool) *acceptance {
	a := &acceptance{}
	if !node {
		return a
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.timer = time.AfterFunc(acceptEvery, func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		if !a.done {
			l.reply(msg, acceptedReply)
			a.timer.Reset(acceptEvery)
		}
	})
	return a
}

// acceptance repeats itself until end is called.
type acceptance struct {
	mu    sync.Mutex
	timer *time.Timer // nil: there are none
	done  bool
}

func (a *acceptance) end() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.done = true
	if a.timer != nil {
		a.timer.Stop()
	}
}

func errNATSDown(sent bool) error {
	e := &devices.Error{Code: devices.CodeUnavailable, Part: "nats", Sent: sent, Detail: "NATS is unreachable, so devices on other nodes cannot be reached; check --nats"}
	if sent {
		e.Outcome = devices.OutcomeUnknown
	}
	return e
}

// Forward sends a call to the node that holds the device.
func (l *Link) Forward(ctx context.Context, c devices.ToolCall) (devices.ToolResult, error) {
	var late func(*nats.Msg)
	if c.Late != nil {
		take := c.Late
		late = func(msg *nats.Msg) {
			defer tasks.Contain(l.opt.Log, nil)
			take(resultOf(msg.Data))
		}
	}
	data, err := l.request(ctx, c.Device, "call", c.Principal, command{Call: c.ID, Tool: c.Tool, Arguments: c.Arguments, Confirmation: c.Confirmation, Late: late != nil}, late)
	if err != nil {
		return devices.ToolResult{}, err
	}
	return resultOf(data)
}

// resultOf reads the answer to a call.
func resultOf(data []byte) (devices.ToolResult, error) {
	if r, ok := devices.ParseResult(data); ok {
		return r, nil
	}
	return devices.ToolResult{}, remoteError(data)
}

// ForwardRPC sends a raw MCP request to the node that holds the device.
func (l *Link) ForwardRPC(ctx context.Context, c devices.RPCCall) (devices.RPCResult, error) {
	data, err := l.request(ctx, c.Device, "rpc", c.Principal, command{Call: c.ID, Method: c.Method, Params: c.Params, Confirmation: c.Confirmation}, nil)
	if err != nil {
		return devices.RPCResult{}, err
	}
	walk := jsonspan.Object(data)
	for walk.Next() {
		switch string(walk.Key()) {
		case "result":
			return devices.RPCResult{Result: walk.Value()}, nil
		case "error":
			return devices.RPCResult{Error: walk.Value()}, nil
		}
	}
	return devices.RPCResult{}, remoteError(data)
}

// ForwardMessage sends a message to the node that holds the device.
func (l *Link) ForwardMessage(ctx context.Context, m devices.Message) error {
	data, err := l.hop(ctx, m.Device, "send", string(access.AppendPrincipal(nil, m.Principal)), m.Body, nil)
	if err != nil {
		return err
	}
	if hasTrue(data, "ok") {
		return nil
	}
	return remoteError(data)
}

// Query requests information about a device from the node that holds it.
func (l *Link) Query(ctx context.Context, id devices.ID, q devices.Query) ([]byte, error) {
	data, err := l.request(ctx, id, string(q), access.Principal{Caller: access.Fleet}, command{}, nil)
	if err != nil {
		return nil, err
	}
	if e, ok := devices.ParseProblem(data); ok {
		return nil, e
	}
	return data, nil
}

func remoteError(data []byte) error {
	if e, ok := devices.ParseProblem(data); ok {
		return e
	}
	return &devices.Error{Code: devices.CodeInternal, Detail: fmt.Sprintf("another node answered %.80q", data), Sent: true, Outcome: devices.OutcomeUnknown}
}

// request makes one hop with the remaining time of ctx.
func (l *Link) request(ctx context.Context, id devices.ID, verb string, principal access.Principal, c command, late func(*nats.Msg)) ([]byte, error) {
	timeout := dispatch.DefaultTimeout
	if deadline, ok := ctx.Deadline(); ok {
		timeout = time.Until(deadline)
	}
	c.Timeout = max(timeout, time.Millisecond).String()
	// A buffer that does not leave this function is on the stack, and the body is allocated once.
	caller := string(access.AppendPrincipal(make([]byte, 0, 512), principal))
	return l.hop(ctx, id, verb, caller, c.append(make([]byte, 0, commandSize+len(c.Arguments)+len(c.Params))), late)
}
