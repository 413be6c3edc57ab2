package dispatch

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/devices/speech"
	"fleetd/internal/jsonspan"
	"fleetd/internal/mcpclient"
)

// checkedRPC checks and sends a raw request of any interface, on the node that holds the
// device.
func (s *Dispatcher) checkedRPC(ctx context.Context, x *session.Session, c *devices.RPCCall) (devices.RPCResult, error) {
	switch {
	case x.Tools().NoMCP:
		return devices.RPCResult{}, devices.Errorf(devices.CodeDeviceError, "device %s does not speak MCP", c.Device)
	case c.Method == "":
		return devices.RPCResult{}, devices.Errorf(devices.CodeBadRequest, "method is missing")
	case !speech.IsWord(c.Method):
		return devices.RPCResult{}, devices.Errorf(devices.CodeBadRequest, "method must be 1 to %d of [A-Za-z0-9_./$-]: the device would read other text as a different method", speech.MaxWord)
	case c.Method == "initialize":
		return devices.RPCResult{}, devices.Errorf(devices.CodeForbidden, "initialize is reserved for fleetd: it contains the photo address and token")
	case strings.HasPrefix(c.Method, "notifications"):
		return devices.RPCResult{}, devices.Errorf(devices.CodeBadRequest, "%q is a notification: devices do not answer notifications", c.Method)
	case c.Method == methodCall:
		return s.callByRPC(ctx, x, c)
	case len(c.Params) > 0 && jsonspan.KindOf(c.Params) != jsonspan.KindObject:
		return devices.RPCResult{}, devices.Errorf(devices.CodeBadRequest, "params must be a JSON object or absent: devices drop other params without an answer")
	}
	if err := devices.CheckText("params", c.Params); err != nil {
		return devices.RPCResult{}, err
	}
	if err := s.guardRPC(ctx, c); err != nil {
		return devices.RPCResult{}, err
	}
	return s.rpc(ctx, x, c)
}

// toolCallOf parses the params of tools/call; ok is false if they are not valid.
func toolCallOf(c *devices.RPCCall) (call devices.ToolCall, ok bool) {
	call = devices.ToolCall{ID: c.ID, Device: c.Device, Principal: c.Principal, Confirmation: c.Confirmation}
	walk := jsonspan.Object(c.Params)
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
	return call, walk.Err() == nil && call.Tool != ""
}

func (s *Dispatcher) callByRPC(ctx context.Context, x *session.Session, c *devices.RPCCall) (devices.RPCResult, error) {
	call, ok := toolCallOf(c)
	if !ok {
		return devices.RPCResult{}, devices.Errorf(devices.CodeBadRequest, `tools/call needs params {"name":"...","arguments":{...}}`)
	}
	r, err := s.call(ctx, x, &call, nil)
	c.Waited, c.Ahead = call.Waited, call.Ahead
	if err != nil {
		return devices.RPCResult{}, err
	}
	result := fmt.Appendf(nil, `{"content":%s,"isError":%t`, r.Content, r.IsError)
	if r.Outcome != "" {
		result = jsonspan.AppendString(append(result, `,"outcome":`...), r.Outcome)
	}
	return devices.RPCResult{Result: append(result, '}')}, nil
}

func (s *Dispatcher) rpc(ctx context.Context, x *session.Session, c *devices.RPCCall) (devices.RPCResult, error) {
	var err error
	if c.Waited, c.Ahead, err = s.acquire(ctx, x, c.Device, c.Principal.Key()); err != nil {
		return devices.RPCResult{}, err
	}
	defer x.Release()
	if err := s.checkKey(c.Principal); err != nil {
		return devices.RPCResult{}, err
	}
	if err := s.guardRPC(ctx, c); err != nil { // labels may have changed while the request waited
		return devices.RPCResult{}, err
	}
	result, err := x.Request(ctx, c.Method, c.Params)
	rpc := (*mcpclient.RPCError)(nil)
	if errors.As(err, &rpc) {
		raw := fmt.Appendf(nil, `{"code":%d,"message":%s}`, rpc.Code, jsonspan.AppendString(nil, rpc.Message))
		return devices.RPCResult{Error: raw}, nil
	}
	if err != nil {
		return devices.RPCResult{}, callError(x, c.Method, err)
	}
	return devices.RPCResult{Result: result}, nil
}
