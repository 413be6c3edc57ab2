package upstream

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/jsonspan"
	"fleetd/internal/tasks"
)

// protocolVersion is the MCP version of the firmware (mcp_server.cc:349-381).
const protocolVersion = "2024-11-05"

// Error codes of JSON-RPC.
const (
	rpcInvalidParams = -32602
	rpcInternal      = -32603
	rpcServer        = -32000
)

// request is one MCP request of the chat server.
type request struct {
	id     []byte // raw, a number or string
	method string
	params []byte // raw; nil if absent
}

var errNoRequest = errors.New("the payload of an mcp message must be a JSON-RPC request")

// parseRequest parses a payload. A notification has no id.
func parseRequest(payload []byte) (r request, err error) {
	if payload == nil {
		return r, errNoRequest
	}
	named := false
	walk := jsonspan.Object(payload)
	for walk.Next() {
		value := walk.Value()
		switch string(walk.Key()) {
		case "id":
			if r.id == nil && jsonspan.KindOf(value) != jsonspan.KindNull {
				r.id = value
			}
		case "method":
			if !named {
				r.method, named = jsonspan.String(value)
			}
		case "params":
			if r.params == nil && jsonspan.KindOf(value) != jsonspan.KindNull {
				r.params = value
			}
		}
	}
	kind := jsonspan.KindOf(r.id)
	switch {
	case walk.Err() != nil:
		return r, fmt.Errorf("%w: %w", errNoRequest, walk.Err())
	case r.method == "" || len(r.id) > MaxIDLength || r.id != nil && kind != jsonspan.KindNumber && kind != jsonspan.KindString:
		return r, errNoRequest
	}
	return r, nil
}

// mcp answers the chat server on behalf of the device. Slow requests run on other
// goroutines, so that they do not delay audio.
func (l *link) mcp(payload, msg []byte) {
	r, err := parseRequest(payload)
	switch {
	case err != nil:
		l.countBad(BadMCP, msg, err)
	case r.id == nil || strings.HasPrefix(r.method, "notifications/"):
		// The device has received the same from fleetd.
	case r.method == "ping":
		l.result(r.id, json.RawMessage("{}"), nil)
	default:
		l.serve(request{bytes.Clone(r.id), r.method, bytes.Clone(r.params)})
	}
}

// serve answers one request in a goroutine that ends with the connection.
func (l *link) serve(r request) {
	if l.calls.Add(1) > MaxRequests {
		l.calls.Add(-1)
		l.result(r.id, nil, &devices.Error{Code: devices.CodeRateLimited, Detail: fmt.Sprintf("%d requests are already in progress", MaxRequests)})
		return
	}
	started := l.t.b.tasks.Run(func() {
		defer l.calls.Add(-1)
		defer tasks.Contain(l.t.b.opt.Log, func() {
			l.result(r.id, nil, &devices.Error{Code: devices.CodeInternal, Detail: "internal error (bug)"})
		})
		result, err := l.perform(r)
		if l.ctx.Err() != nil {
			l.t.b.Dropped.Add(DropLate, 1)
			return
		}
		l.result(r.id, result, err)
	})
	if !started {
		l.calls.Add(-1)
	}
}

// result queues the response to a request.
func (l *link) result(id, result []byte, err error) {
	out := append([]byte(`{"jsonrpc":"2.0","id":`), id...)
	outcome := "ok"
	var raw rawError
	switch {
	case err == nil:
		out = append(append(out, `,"result":`...), result...)
	case errors.As(err, &raw):
		outcome = string(devices.CodeDeviceError)
		out = append(append(out, `,"error":`...), raw...)
	default:
		e := devices.AsError(err)
		outcome = string(e.Code)
		out = append(out, `,"error":{"code":`...)
		out = strconv.AppendInt(out, jsonRPCCode(e.Code), 10)
		out = jsonspan.AppendString(append(out, `,"message":`...), errorText(e))
		out = append(out, '}')
	}
	l.t.b.Requests.Add(outcome, 1)
	l.t.answer(l, append(out, '}'))
}

// rawError is the error object of a device's response.
type rawError json.RawMessage

func (e rawError) Error() string { return string(e) }

func jsonRPCCode(code devices.Code) int64 {
	switch code {
	case devices.CodeBadRequest, devices.CodeInvalidArguments, devices.CodeToolUnknown:
		return rpcInvalidParams
	case devices.CodeInternal:
		return rpcInternal
	}
	return rpcServer
}

// errorText returns the error text for a language model; the code is for programs.
func errorText(e *devices.Error) string {
	text := e.Detail
	for _, fault := range e.Faults {
		if !strings.Contains(text, fault.Detail) {
			text += "; " + fault.Pointer + ": " + fault.Detail
		}
	}
	return text
}

// principal is the principal of a chat server's language model.
var principal = access.Principal{Caller: access.Voice, Via: access.ViaVoice}

var errNotAttached = &devices.Error{Code: devices.CodeUnavailable, Detail: "this node is starting; try again"}

// perform performs a request and returns its result.
func (l *link) perform(r request) (json.RawMessage, error) {
	attached := l.t.b.svc.Load()
	if attached == nil {
		return nil, errNotAttached
	}
	svc, id := *attached, l.t.c.Identity().Device
	switch r.method {
	case "initialize": // its vision URL is ignored: fleetd receives the photos
		return l.initialize(svc, id)
	case "tools/list":
		return l.listTools(svc, id, r.params)
	case "tools/call":
		call, err := toolCall(id, r.params)
		if err != nil {
			return nil, err
		}
		ctx, cancel := context.WithTimeout(l.ctx, dispatch.TimeoutFor(call.Tool))
		defer cancel()
		result, err := svc.CallTool(ctx, call)
		if err != nil {
			return nil, err
		}
		return fmt.Appendf(nil, `{"content":%s,"isError":%t}`, result.Content, result.IsError), nil
	}
	ctx, cancel := context.WithTimeout(l.ctx, dispatch.DefaultTimeout)
	defer cancel()
	result, err := svc.CallRPC(ctx, devices.RPCCall{Device: id, Method: r.method, Params: r.params, Principal: principal})
	if err == nil && result.Error != nil {
		err = rawError(result.Error)
	}
	return result.Result, err
}

func (l *link) initialize(svc Service, id devices.ID) (json.RawMessage, error) {
	v, err := svc.Get(l.ctx, id)
	if err != nil {
		return nil, err
	}
	name := v.Device.Board
	if name == "" { // the device has not contacted the OTA URL since it became known
		name = string(id)
	}
	out := jsonspan.AppendString([]byte(`{"protocolVersion":"`+protocolVersion+`","capabilities":{"tools":{}},"serverInfo":{"name":`), name)
	out = jsonspan.AppendString(append(out, `,"version":`...), v.Device.Firmware)
	return append(out, "}}"...), nil
}

// toolCall parses the params of tools/call.
func toolCall(id devices.ID, params []byte) (devices.ToolCall, error) {
	call := devices.ToolCall{Device: id, Principal: principal}
	walk := jsonspan.Object(params)
	for walk.Next() {
		switch string(walk.Key()) {
		case "name":
			call.Tool, _ = jsonspan.String(walk.Value())
		case "arguments":
			if jsonspan.KindOf(walk.Value()) != jsonspan.KindNull {
				call.Arguments = walk.Value()
			}
		}
	}
	if walk.Err() != nil || call.Tool == "" {
		return call, &devices.Error{Code: devices.CodeBadRequest, Detail: `tools/call needs params {"name":"...","arguments":{...}}`}
	}
	return call, nil
}

// listTools returns one page of the device's tools. Paging works as in the firmware, the
// only one that chat servers support: the cursor is the name of the next tool.
func (l *link) listTools(svc Service, id devices.ID, params []byte) (json.RawMessage, error) {
	cursor, user := "", false
	walk := jsonspan.Object(params)
	for walk.Next() {
		switch string(walk.Key()) {
		case "cursor":
			cursor, _ = jsonspan.String(walk.Value())
		case "withUserTools":
			user = jsonspan.KindOf(walk.Value()) == jsonspan.KindTrue
		}
	}
	list, err := l.knownTools(svc, id, user)
	if err != nil {
		return nil, err
	}
	out, found := page(list.Tools, cursor)
	if !found && !user {
		// Some chat servers send withUserTools for the first page only, and the cursor may name
		// a user tool.
		if list, err = svc.Tools(l.ctx, id, true); err != nil {
			return nil, err
		}
		out, found = page(list.Tools, cursor)
	}
	if !found {
		return nil, &devices.Error{Code: devices.CodeBadRequest, Detail: fmt.Sprintf("unknown cursor %.80q; list the tools again without a cursor", cursor)}
	}
	return out, nil
}

// Pauses between two checks for tools that are not known yet.
const (
	pollFirst   = 25 * time.Millisecond
	pollLongest = 400 * time.Millisecond
)

// knownTools waits until the tools are known: a chat server requests them once, and would
// take an empty list as complete.
func (l *link) knownTools(svc Service, id devices.ID, user bool) (devices.ToolList, error) {
	deadline := time.Now().Add(CatalogWait)
	for pause := pollFirst; ; pause = min(2*pause, pollLongest) {
		list, err := svc.Tools(l.ctx, id, user)
		if err != nil || list.State != devices.CatalogUnknown && list.State != devices.CatalogError {
			return list, err
		}
		if time.Now().After(deadline) {
			return list, &devices.Error{Code: devices.CodeDeviceError, Detail: "the device has not sent its tools yet; try again"}
		}
		if !clock.Sleep(l.ctx, pause) {
			return list, l.ctx.Err()
		}
	}
}

// page returns the result of tools/list from the tool named by cursor, or from the first if
// cursor is empty. It returns false if no tool has that name. Of several tools with one
// name it lists only the first, which is the one that the device runs. A tool larger than
// a page has a page of its own.
func page(tools []json.RawMessage, cursor string) (json.RawMessage, bool) {
	dst := []byte(`{"tools":[`)
	count, found := 0, cursor == ""
	seen := make(map[string]bool, len(tools))
	for _, tool := range tools {
		name := nameOf(tool)
		if seen[name] {
			continue
		}
		seen[name] = true
		if found = found || name == cursor; !found {
			continue
		}
		if count > 0 && len(dst)+len(tool)+len(name)+len(`,],"nextCursor":""}`) > PageBytes {
			dst = jsonspan.AppendString(append(dst, `],"nextCursor":`...), name)
			return append(dst, '}'), true
		}
		if count++; count > 1 {
			dst = append(dst, ',')
		}
		dst = append(dst, tool...)
	}
	return append(dst, "]}"...), found
}

func nameOf(tool []byte) string {
	name, _ := jsonspan.String(jsonspan.Member(tool, "name"))
	return name
}
