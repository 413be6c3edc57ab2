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
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/jsonspan"
	"fleetd/internal/tasks"
)

func (l *Link) refuse(msg *nats.Msg, e *devices.Error) {
	l.Refused.Add(e.Code, 1)
	l.reply(msg, e.Problem().JSON())
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

// request is what the subject and the headers of a message contain.
type request struct {
	device    devices.ID
	verb      string
	principal access.Principal
	fromNode  bool // sent by another node of this fleet
}

// origin returns where the request entered the fleet.
func (r *request) origin() devices.Origin {
	if r.fromNode {
		return devices.OriginNode
	}
	return devices.OriginHolder
}

// readRequest parses and authenticates a message. If it fails, it has sent an answer.
func (l *Link) readRequest(msg *nats.Msg) (r request, ok bool) {
	switch err := l.check(msg, &r); {
	case err == nil:
		return r, true
	case errors.Is(err, errNonceRequired):
		l.respond(msg, &nats.Msg{Header: nats.Header{HeaderAgain: []string{l.nonce}}})
	default:
		l.refuse(msg, devices.AsError(err))
	}
	return r, false
}

func (l *Link) check(msg *nats.Msg, r *request) (err error) {
	token, verb, ofDevice := strings.Cut(strings.TrimPrefix(msg.Subject, l.opt.Prefix+".cmd."), ".")
	if r.verb = verb; !ofDevice {
		r.verb = token
	} else if r.device, err = devices.ParseID(token); err != nil {
		return &devices.Error{Code: devices.CodeBadRequest, Detail: err.Error()}
	}
	switch err := l.authenticate(msg, r); {
	case errors.Is(err, errNonceRequired):
		return err
	case err != nil:
		refusal := &devices.Error{Code: devices.CodeUnauthorized, Detail: "header " + HeaderToken + " must hold an API token: " + err.Error()}
		switch {
		case errors.Is(err, access.ErrResource):
			refusal = &devices.Error{Code: devices.CodeForbidden, Detail: err.Error()}
		case errors.Is(err, errReplayed):
			refusal.Detail = err.Error()
		}
		l.service.Load().NoteRefusal(access.Principal{Via: access.ViaNATS}, r.verb, r.device, refusal)
		return refusal
	}
	if len(msg.Data) > maxBody && !r.fromNode {
		return tooLarge(msg)
	}
	return nil
}

// serveInOrder handles messages whose order matters: audio and messages of a
// conversation, and claims. It does not block and reports whether msg was one.
func (l *Link) serveInOrder(msg *nats.Msg) bool {
	if strings.HasSuffix(msg.Subject, "."+verbClaim) && msg.Header.Get(HeaderStamp) != "" {
		l.onClaim(msg)
		return true
	}
	audio := strings.HasSuffix(msg.Subject, ".audio")
	if !audio && !strings.HasSuffix(msg.Subject, ".send") {
		return false
	}
	defer tasks.Contain(l.opt.Log, nil)
	r, ok := l.readRequest(msg)
	switch {
	case !ok:
	case audio:
		l.Requests.Add(r.verb, 1)
		if err := l.service.Load().PermitNow(r.principal, access.ScopeAudio, r.device); err != nil {
			l.service.Load().NoteRefusal(r.principal, r.verb, r.device, err)
			l.refuse(msg, devices.AsError(err))
			return true
		}
		l.service.Load().SendAudio(r.device, msg.Data)
	default:
		l.Requests.Add(r.verb, 1)
		acceptance := l.accept(msg, r.fromNode)
		l.service.Load().QueueMessage(devices.Message{Device: r.device, Body: msg.Data, Principal: r.principal, Origin: r.origin()}, func(err error) {
			acceptance.end()
			if err != nil {
				l.refuse(msg, devices.AsError(err))
				return
			}
			l.reply(msg, okReply)
		})
	}
	return true
}

var okReply = []byte(`{"ok":true}`)

// serve answers one request; it calls authenticated after the caller is authenticated.
func (l *Link) serve(msg *nats.Msg, authenticated func()) {
	r, ok := l.readRequest(msg)
	if !ok {
		return
	}
	places := l.service.Load().Limiter()
	err := places.Acquire(r.principal.Key())
	authenticated()
	if err != nil {
		l.refuse(msg, devices.AsError(err))
		return
	}
	defer places.Release(r.principal.Key())
	id, verb, node := r.device, r.verb, r.fromNode
	defer l.accept(msg, node).end()
	var answer []byte
	switch {
	case id == "": // only jobs is subscribed to
		l.Requests.Add(verb, 1)
		answer, err = l.createJob(r, msg)
	case verb == "call":
		l.Requests.Add(verb, 1)
		answer, err = l.call(r, msg)
	case verb == "rpc" && node: // only between nodes; services use REST
		l.Requests.Add(verb, 1)
		answer, err = l.rpc(r, msg.Data)
	case node && (verb == string(devices.QueryView) || verb == string(devices.QueryRefresh)):
		l.Requests.Add(verb, 1)
		answer, err = l.answer(id, devices.Query(verb), msg.Data)
	default:
		err = &devices.Error{Code: devices.CodeBadRequest, Detail: fmt.Sprintf("unknown command %q; use call, send or audio", verb)}
	}
	if err != nil {
		l.refuse(msg, devices.AsError(err))
		return
	}
	l.reply(msg, answer)
}

// authenticate accepts an API token, or a signature of another node of this fleet.
func (l *Link) authenticate(msg *nats.Msg, r *request) (err error) {
	stamp := msg.Header.Get(HeaderStamp)
	if stamp == "" {
		r.principal.Via = access.ViaNATS
		r.principal.Caller, err = l.auth.Authenticate(msg.Header.Get(HeaderToken), clock.Now())
		return err
	}
	caller := msg.Header.Get(HeaderCaller)
	r.fromNode = true
	if err := l.verifyStamp(msg, stamp, caller, r); err != nil {
		return err
	}
	r.principal = l.callers.Parse(caller)
	return l.auth.Keys.Valid(r.principal.Caller, clock.Now()) // the other node may not know of a revocation yet
}

// command is the body of a call or raw request.
type command struct {
	Tool      string
	Arguments json.RawMessage
	Method    string
	Params    json.RawMessage
	Timeout   string
	// Confirmation repeats the token of a call that required a confirmation.
	Confirmation string
	// Call is the call's id, given by the node that received it.
	Call string
	// Late requests the answer also after the caller's deadline.
	Late bool
}

// commandSize is about the most that a command takes beside its arguments and params, in bytes.
const commandSize = 256

// append writes what parse reads. Arguments and params stay byte for byte.
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
				c.Timeout = string(value) // not a string: the duration check refuses it
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
	call := devices.ToolCall{ID: c.Call, Device: from.device, Tool: c.Tool, Arguments: c.Arguments, Principal: from.principal, Confirmation: c.Confirmation}
	if call.Origin = from.origin(); call.Origin == devices.OriginHolder {
		call.ID = ""
	}
	if from.fromNode && c.Late {
		call.Late = func(r devices.ToolResult, err error) { l.answerLate(msg, r, err) }
	}
	r, err := l.service.Load().CallTool(ctx, call)
	if err != nil {
		return nil, err
	}
	return r.AppendResult(make([]byte, 0, resultSize+len(r.Content))), nil
}

// resultSize is about the most that a result takes beside its content, in bytes.
const resultSize = 192

// answerLate sends the outcome of a call after its hop has ended.
func (l *Link) answerLate(msg *nats.Msg, r devices.ToolResult, err error) {
	body := []byte(nil)
	if err != nil {
		body = devices.AsError(err).Problem().JSON()
	} else {
		body = r.AppendResult(nil)
	}
	l.respond(msg, &nats.Msg{Header: nats.Header{HeaderLate: []string{"1"}}, Data: body})
}

func (l *Link) answer(id devices.ID, q devices.Query, data []byte) ([]byte, error) {
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
	r, err := l.service.Load().CallRPC(ctx, devices.RPCCall{Origin: devices.OriginNode, ID: c.Call, Device: from.device, Method: c.Method, Params: c.Params, Principal: from.principal, Confirmation: c.Confirmation})
	if err != nil {
		return nil, err
	}
	if r.Error != nil {
		return append(append([]byte(`{"error":`), r.Error...), '}'), nil
	}
	return append(append([]byte(`{"result":`), r.Result...), '}'), nil
}
