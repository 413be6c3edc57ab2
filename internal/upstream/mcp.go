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
	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/jsonspan"
	"fleetd/internal/tasks"
)

// protocolVersion is the MCP version that firmware answers with
// (mcp_server.cc:349-381).
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

// parseRequest reads a payload. A notification has no id.
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

// mcp answers the chat server in the device's place. What may take time runs
// aside, so that it holds up no audio.
func (l *link) mcp(payload, msg []byte) {
	r, err := parseRequest(payload)
	switch {
	case err != nil:
		l.bad(BadMCP, msg, err)
	case r.id == nil || strings.HasPrefix(r.method, "notifications/"):
		// `notifications/initialized` and the like: the device has had ours.
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
		l.result(r.id, nil, &devices.Error{Code: devices.CodeDeviceBusy, Detail: fmt.Sprintf("%d requests are in progress already", MaxRequests)})
		return
	}
	started := l.t.b.start(func() {
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

// result queues the answer to a request.
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
		out = strconv.AppendInt(out, rpcCode(e.Code), 10)
		out = jsonspan.AppendString(append(out, `,"message":`...), sentence(e))
		out = append(out, '}')
	}
	l.t.b.Requests.Add(outcome, 1)
	l.t.answer(l, append(out, '}'))
}

// rawError is the error object a device answered with.
type rawError json.RawMessage

func (e rawError) Error() string { return string(e) }

func rpcCode(code devices.Code) int64 {
	switch code {
	case devices.CodeBadRequest, devices.CodeInvalidArguments, devices.CodeToolUnknown:
		return rpcInvalidParams
	case devices.CodeInternal:
		return rpcInternal
	}
	return rpcServer
}

// sentence is what a language model gets to read: the code is for programs.
func sentence(e *devices.Error) string {
	text := e.Detail
	for _, fault := range e.Faults {
		if !strings.Contains(text, fault.Detail) {
			text += "; " + fault.Pointer + ": " + fault.Detail
		}
	}
	return text
}

// by is who a chat server's language model acts as.
var by = access.By{Who: access.Voice, Via: access.ViaVoice}

var errNotAttached = &devices.Error{Code: devices.CodeUnavailable, Detail: "this node is starting; try again"}

// perform does what the request asks for and returns its result.
func (l *link) perform(r request) (json.RawMessage, error) {
	attached := l.t.b.svc.Load()
	if attached == nil {
		return nil, errNotAttached
	}
	svc, id := *attached, l.t.c.Who().Device
	switch r.method {
	case "initialize": // its vision address is not the device's: photos are fleetd's
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
	result, err := svc.CallRPC(ctx, devices.RPCCall{Device: id, Method: r.method, Params: r.params, By: by})
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
	if name == "" { // it has not asked the OTA address since it became known
		name = string(id)
	}
	out := jsonspan.AppendString([]byte(`{"protocolVersion":"`+protocolVersion+`","capabilities":{"tools":{}},"serverInfo":{"name":`), name)
	out = jsonspan.AppendString(append(out, `,"version":`...), v.Device.Firmware)
	return append(out, "}}"...), nil
}

// toolCall reads the params of tools/call.
func toolCall(id devices.ID, params []byte) (devices.ToolCall, error) {
	call := devices.ToolCall{Device: id, By: by}
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

// listTools answers with one page of the device's tools. Paging is the
// firmware's, since chat servers have met no other: the cursor is the name of
// the next tool.
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
		// Some ask with withUserTools for the first page only, and the name it
		// ended with is one of the user's.
		if list, err = svc.Tools(l.ctx, id, true); err != nil {
			return nil, err
		}
		out, found = page(list.Tools, cursor)
	}
	if !found {
		return nil, &devices.Error{Code: devices.CodeBadRequest, Detail: fmt.Sprintf("no tool is named by the cursor %.80q; list again from the beginning", cursor)}
	}
	return out, nil
}

// Pauses between two looks for tools that are not known yet.
const (
	lookFirst = 25 * time.Millisecond
	lookLast  = 400 * time.Millisecond
)

// knownTools waits for tools that are not known yet: a chat server asks once,
// and would take an empty list for the whole truth.
func (l *link) knownTools(svc Service, id devices.ID, user bool) (devices.ToolList, error) {
	deadline := time.Now().Add(CatalogWait)
	for pause := lookFirst; ; pause = min(2*pause, lookLast) {
		list, err := svc.Tools(l.ctx, id, user)
		if err != nil || list.State != devices.CatalogUnknown && list.State != devices.CatalogError {
			return list, err
		}
		if time.Now().After(deadline) {
			return list, &devices.Error{Code: devices.CodeDeviceError, Detail: "the device has not told its tools yet; try again"}
		}
		timer := time.NewTimer(pause)
		select {
		case <-l.ctx.Done():
			timer.Stop()
			return list, l.ctx.Err()
		case <-timer.C:
		}
	}
}

// page is the result of tools/list from the tool named by cursor on, from the
// first if it is empty; false if there is no such tool. Of tools of one
// name only the first is listed, which is the one that the device runs; a tool
// larger than a page has one of its own.
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
