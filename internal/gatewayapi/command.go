package gatewayapi

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"

	"fleetd/internal/access"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
)

const (
	methodCall         = "tools/call"
	prefixNotification = "notifications" // the firmware drops whatever begins so (mcp_server.cc:350-433)
)

// command is the body of a command. It points into the bytes it was parsed
// from.
type command struct {
	usable bool // it is of type mcp and has a payload
	method string
	params []byte // as given; nil if absent or null, which devices drop silently
}

// parseCommand reads `{"type":"mcp","payload":{"method":...,"params":...}}`.
// Of duplicate keys the last counts, as in JavaScript; unknown members, including
// `id` and `jsonrpc`, are ignored.
func parseCommand(body []byte) (c command, err error) {
	var kind string
	var payload []byte
	err = members(body, func(key string, value []byte) {
		switch key {
		case "type":
			kind, _ = jsonspan.String(value)
		case "payload":
			payload = value
		}
	})
	if err != nil || kind != "mcp" || jsonspan.KindOf(payload) != jsonspan.KindObject {
		return command{}, err
	}
	c.usable = true
	walk := jsonspan.CheckedObject(payload)
	for walk.Next() {
		switch string(walk.Key()) {
		case "method":
			c.method, _ = jsonspan.String(walk.Value())
		case "params":
			if c.params = walk.Value(); jsonspan.KindOf(c.params) == jsonspan.KindNull {
				c.params = nil
			}
		}
	}
	return c, walk.Err()
}

// command sends one MCP request to a device and answers with its result.
func (s *Server) command(x *exchange) {
	body, ok := x.read(x.failCommand)
	if !ok {
		return
	}
	c, err := parseCommand(body)
	if err != nil {
		x.failCommand(http.StatusBadRequest, devices.CodeBadRequest, badBody(err))
		return
	}
	id, ok := deviceOf(x.r.PathValue("clientId"))
	if !ok {
		x.fail(&devices.Error{Code: devices.CodeDeviceUnknown}, c)
		return
	}
	x.device, x.method = id, c.method
	ctx, cancel := context.WithTimeout(x.r.Context(), s.opt.Timeout)
	defer cancel()
	if !c.usable {
		x.fail(s.refusal(ctx, x.by, id), c)
		return
	}
	result, err := s.opt.Service.CallRPC(ctx, devices.RPCCall{Device: id, Method: c.method, Params: c.params, Principal: x.by, Confirmation: x.r.Header.Get(HeaderConfirmation)})
	if err != nil {
		x.fail(devices.AsError(err), c)
		return
	}
	if text, failed := failure(c.method, result); failed {
		x.fail(&devices.Error{Code: devices.CodeDeviceError, Detail: text}, c)
		return
	}
	x.succeed(CodeOK, result.Result)
}

// deviceOf finds the device by the MAC address in a client id.
func deviceOf(clientID string) (devices.ID, bool) {
	mac, _, ok := credential.ParseGatewayID(clientID)
	if !ok {
		return "", false
	}
	id, err := devices.ParseID(mac)
	return id, err == nil
}

// refusal returns the response to an invalid command. The gateway looks for the device
// first, so an invalid command to an unknown device gets the response to a valid one.
func (s *Server) refusal(ctx context.Context, by access.Principal, id devices.ID) *devices.Error {
	if err := s.opt.Service.Permit(ctx, by, access.ScopeCall, id); err != nil {
		s.opt.Service.NoteRefusal(by, "commands", id, err)
		return devices.AsError(err)
	}
	v, err := s.opt.Service.Get(ctx, id)
	switch {
	case err != nil:
		return devices.AsError(err)
	case !v.Presence.Online:
		return &devices.Error{Code: devices.CodeDeviceOffline}
	}
	return &devices.Error{Code: devices.CodeBadRequest, Detail: textBadCommand}
}

// failure finds the device's own error in an answer. The core hands a tool's
// failure out as MCP wants it, as a result with isError and the text in its one
// item; on the wire it was an error object (firmware never sends isError,
// mcp_server.h:272-311), and the gateway answered it as one.
func failure(method string, r devices.RPCResult) (text string, failed bool) {
	if len(r.Error) > 0 {
		return member(r.Error, "message"), true
	}
	if method != methodCall {
		return "", false
	}
	var isError bool
	var content []byte
	walk := jsonspan.Object(r.Result)
	for walk.Next() {
		switch string(walk.Key()) {
		case "isError":
			isError = jsonspan.KindOf(walk.Value()) == jsonspan.KindTrue
		case "content":
			content = walk.Value()
		}
	}
	if !isError {
		return "", false
	}
	items := jsonspan.Array(content)
	if !items.Next() || jsonspan.KindOf(items.Value()) != jsonspan.KindObject || member(items.Value(), "type") != "text" {
		return "", false
	}
	text = member(items.Value(), "text")
	return text, !items.Next()
}

// member is the text of a string member, empty if there is none.
func member(object []byte, name string) (text string) {
	walk := jsonspan.Object(object)
	for walk.Next() {
		if string(walk.Key()) == name {
			text, _ = jsonspan.String(walk.Value())
		}
	}
	return text
}

func (x *exchange) succeed(code devices.Code, data json.RawMessage) {
	x.status, x.code = http.StatusOK, code
	x.body = append(append([]byte(`{"success":true,"data":`), data...), '}')
}

// failCommand answers a command that failed.
func (x *exchange) failCommand(status int, code devices.Code, text string) {
	x.status, x.code = status, code
	x.body = append(appendString([]byte(`{"success":false,"error":`), text), '}')
}

// fail converts an error of the core to a response. All are 500, as with the gateway,
// unless the caller requests strict statuses.
func (x *exchange) fail(e *devices.Error, c command) {
	if e.Code == devices.CodeBadRequest && strings.HasPrefix(c.method, prefixNotification) {
		// The device is there, and would have dropped it without an answer:
		// with the gateway these requests always timed out.
		x.succeed(CodeIgnored, json.RawMessage("{}"))
		return
	}
	status := http.StatusInternalServerError
	if x.strict {
		status, _ = e.Code.Status()
	}
	text := e.Detail
	switch {
	case e.Code == devices.CodeDeviceUnknown, e.Code == devices.CodeDeviceOffline,
		e.Code == devices.CodeUnavailable && e.Part == "database": // used only when no node has the device
		text = textNotConnected
	case e.Code == devices.CodeDeviceTimeout:
		text = textTimeout
	case e.Code == devices.CodeConnectionLost, e.Code == devices.CodeSuperseded:
		text = textClosed
	case e.Code == devices.CodeToolUnknown:
		text = "Unknown tool: " + member(c.params, "name") // the device's words (mcp_server.cc:508-560)
	case e.Code == devices.CodeInternal:
		text, x.internal = "internal error; see the log of the node for "+x.operation, e
	}
	if e.Confirmation != "" {
		x.w.Header().Set(HeaderConfirmation, e.Confirmation)
	}
	x.failCommand(status, e.Code, text)
}
