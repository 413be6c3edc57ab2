package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/jsonspan"
	"fleetd/internal/tasks"
)

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

// origin is where the request came into the fleet.
func (r *request) origin() devices.Origin {
	if r.node {
		return devices.OriginNode
	}
	return devices.OriginHolder
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

// inOrder serves right here what must be taken as it was sent: audio and messages
// of a conversation, and claims. None of it blocks.
func (l *Link) inOrder(msg *nats.Msg) bool {
	if strings.HasSuffix(msg.Subject, "."+verbClaim) && msg.Header.Get(HeaderStamp) != "" {
		l.claimed(msg)
		return true
	}
	audio := strings.HasSuffix(msg.Subject, ".audio")
	if !audio && !strings.HasSuffix(msg.Subject, ".send") {
		return false
	}
	defer tasks.Contain(l.opt.Log, nil)
	r, ok := l.open(msg)
	switch {
	case !ok:
	case audio:
		l.Requests.Add(r.verb, 1)
		if err := l.service.Load().PermitNow(r.by, access.ScopeAudio, r.device); err != nil {
			l.service.Load().NoteRefusal(r.by, r.verb, r.device, err)
			l.refuse(msg, devices.AsError(err))
			return true
		}
		l.service.Load().Say(r.device, msg.Data)
	default:
		l.Requests.Add(r.verb, 1)
		done := l.accept(msg, r.node)
		l.service.Load().QueueMessage(devices.Message{Device: r.device, Body: msg.Data, By: r.by, Origin: r.origin()}, func(err error) {
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

// serve answers one request; opened is called once it is known who asks.
func (l *Link) serve(msg *nats.Msg, opened func()) {
	r, ok := l.open(msg)
	if !ok {
		return
	}
	places := l.service.Load().Places()
	err := places.Enter(r.by.Key())
	opened()
	if err != nil {
		l.refuse(msg, devices.AsError(err))
		return
	}
	defer places.Leave(r.by.Key())
	id, verb, node := r.device, r.verb, r.node
	defer l.accept(msg, node)()
	var answer []byte
	switch {
	case verb == "call":
		l.Requests.Add(verb, 1)
		answer, err = l.call(r, msg)
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
	// Call is the id that another node gave it.
	Call string
	// Late: the other node wants the answer also after its caller's time is over.
	Late bool
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
	text(`"call"`, c.Call)
	text(`"tool"`, c.Tool)
	raw(`"arguments"`, c.Arguments)
	text(`"method"`, c.Method)
	raw(`"params"`, c.Params)
	text(`"confirmation"`, c.Confirmation)
	if c.Late {
		dst = append(dst, `"late":true,`...)
	}
	dst = jsonspan.AppendString(append(dst, `"timeout":`...), c.Timeout)
	return append(dst, '}')
}

func (l *Link) parse(data []byte) (command, context.Context, context.CancelFunc, error) {
	var c command
	walk := jsonspan.Object(data)
	for walk.Next() {
		value := walk.Value()
		switch string(walk.Key()) {
		case "call":
			c.Call, _ = jsonspan.String(value)
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
		case "late":
			c.Late = jsonspan.KindOf(value) == jsonspan.KindTrue
		case "timeout":
			if c.Timeout, _ = jsonspan.String(value); c.Timeout == "" {
				c.Timeout = string(value) // refused below, by its own words
			}
		}
	}
	if err := walk.Err(); err != nil {
		return c, nil, nil, &devices.Error{Code: devices.CodeBadRequest, Detail: "the request must be a JSON object: " + err.Error()}
	}
	timeout := dispatch.TimeoutFor(c.Tool)
	if c.Timeout != "" {
		given, err := time.ParseDuration(c.Timeout)
		if err != nil || given <= 0 || given > dispatch.MaxTimeout {
			return c, nil, nil, &devices.Error{Code: devices.CodeBadRequest,
				Detail: fmt.Sprintf("timeout %q must be a duration such as \"10s\", at most %v", c.Timeout, dispatch.MaxTimeout)}
		}
		timeout = given
	}
	ctx, cancel := context.WithTimeout(l.ctx, timeout)
	return c, ctx, cancel, nil
}

func (l *Link) call(from request, msg *nats.Msg) ([]byte, error) {
	c, ctx, cancel, err := l.parse(msg.Data)
	if err != nil {
		return nil, err
	}
	defer cancel()
	if c.Tool == "" {
		return nil, &devices.Error{Code: devices.CodeBadRequest, Detail: `a call needs {"tool":"...","arguments":{...}}`}
	}
	call := devices.ToolCall{ID: c.Call, Device: from.device, Tool: c.Tool, Arguments: c.Arguments, By: from.by, Confirmation: c.Confirmation}
	if call.Origin = from.origin(); call.Origin == devices.OriginHolder {
		call.ID = ""
	}
	if from.node && c.Late {
		call.Late = func(r devices.ToolResult, err error) { l.answerLate(msg, r, err) }
	}
	r, err := l.service.Load().CallTool(ctx, call)
	if err != nil {
		return nil, err
	}
	return r.AppendResult(nil), nil
}

// answerLate sends what became of a call after its hop has ended.
func (l *Link) answerLate(msg *nats.Msg, r devices.ToolResult, err error) {
	body := []byte(nil)
	if err != nil {
		body = devices.AsError(err).AppendProblem(nil)
	} else {
		body = r.AppendResult(nil)
	}
	l.respond(msg, &nats.Msg{Header: nats.Header{HeaderLate: []string{"1"}}, Data: body})
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
	r, err := l.service.Load().CallRPC(ctx, devices.RPCCall{Origin: devices.OriginNode, ID: c.Call, Device: from.device, Method: c.Method, Params: c.Params, By: from.by, Confirmation: c.Confirmation})
	if err != nil {
		return nil, err
	}
	if r.Error != nil {
		return append(append([]byte(`{"error":`), r.Error...), '}'), nil
	}
	return append(append([]byte(`{"result":`), r.Result...), '}'), nil
}
