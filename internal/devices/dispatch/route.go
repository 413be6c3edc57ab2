package dispatch

import (
	"context"
	"errors"
	"fmt"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
	"fleetd/internal/devices/session"
	"fleetd/internal/jsonspan"
)

// route runs a request on this node if it holds the device, else, for requests of callers,
// on the holder: one hop, never two. A request is repeated, once, only if a takeover ended it
// before a byte was sent. permit returns an error if the principal may not send this request at all; local runs it on a session of
// this node, and forward on the node that holds the device, with ErrNoHolder if none does.
func route[R any](ctx context.Context, s *Dispatcher, principal access.Principal, id devices.ID, origin devices.Origin,
	permit func() error, local func(x *session.Session) (R, error), forward func() (R, error)) (r R, err error) {
	if origin == devices.OriginCaller {
		if err := permit(); err != nil {
			return r, err // refused before the existence of the device is revealed
		}
		if err := s.limiter.Acquire(principal.Key()); err != nil {
			return r, err
		}
		defer s.limiter.Release(principal.Key())
	}
	for range 2 {
		x := s.hub.Session(id)
		switch {
		case x != nil:
			if err = s.busyError(ctx, id, true); err == nil {
				r, err = local(x)
			}
		case origin == devices.OriginCaller:
			r, err = forward()
			err = s.OrAbsent(ctx, id, err)
		default:
			if err = permit(); err == nil {
				err = s.AbsentError(ctx, id)
			}
		}
		if err == nil || origin != devices.OriginCaller || !isSuperseded(err) {
			break
		}
	}
	return r, err
}

// isSuperseded reports whether a takeover ended a request before a byte was sent.
func isSuperseded(err error) bool {
	var e *devices.Error
	return errors.As(err, &e) && e.Code == devices.CodeSuperseded && !e.Sent
}

// OrAbsent returns AbsentError in place of ErrNoHolder.
func (s *Dispatcher) OrAbsent(ctx context.Context, id devices.ID, err error) error {
	if errors.Is(err, devices.ErrNoHolder) {
		return s.AbsentError(ctx, id)
	}
	return err
}

// AbsentError returns the error for a device without a session here: unknown, offline, or
// held by a live node that cannot be reached. It queries the database once, and only if
// there are other nodes.
func (s *Dispatcher) AbsentError(ctx context.Context, id devices.ID) error {
	if err := s.ports.Registry.CheckReady(); err != nil {
		return err
	}
	known := s.ports.Registry.Status(id, "").Known || s.ports.Admission.IsPending(id)
	if s.cfg.Routed {
		ctx, cancel := context.WithTimeout(ctx, session.LookupTimeout)
		defer cancel()
		row, err := s.ports.Records.Find(ctx, id)
		if err == nil && s.hub.IsHeldElsewhere(row.Presence) {
			return &devices.Error{Code: devices.CodeUnavailable, Part: "node", Detail: fmt.Sprintf("node %s holds the device and cannot be reached; try again", row.Presence.Node)}
		}
		known = known || err == nil // another node has just made it a member
	}
	if !known {
		return registry.UnknownDevice(id)
	}
	if err := s.busyError(ctx, id, false); err != nil {
		return err
	}
	return devices.Errorf(devices.CodeDeviceOffline, "device %s is not connected", id)
}

// callID returns the given id, or a new one.
func (s *Dispatcher) callID(given string) string {
	if given != "" {
		return given
	}
	return s.NewCallID()
}

// NewCallID returns an id for a call, raw request or message that this node received first.
func (s *Dispatcher) NewCallID() string { return s.callIDs.Next() }

// CallTool calls a tool of a device. ctx has the deadline, including waiting. Errors are
// *Error.
func (s *Dispatcher) CallTool(ctx context.Context, c devices.ToolCall) (devices.ToolResult, error) {
	begun := time.Now()
	c.ID = s.callID(c.ID)
	r, err := route(ctx, s, c.Principal, c.Device, c.Origin,
		func() error { return s.Permit(ctx, c.Principal, access.ScopeCall, c.Device) },
		func(x *session.Session) (devices.ToolResult, error) { return s.call(ctx, x, &c, nil) },
		func() (devices.ToolResult, error) { return s.ports.Router.Forward(ctx, c) })
	if c.Origin != devices.OriginNode {
		s.auditCall(&c, begun, &r, err)
	}
	s.recordCall(&c, begun, &r, err)
	r.Call = c.ID
	return r, devices.WithCallID(err, c.ID)
}

// CallRPC sends any MCP request except `initialize` to a device. tools/call is handled like
// CallTool, including the schema check and special tools.
func (s *Dispatcher) CallRPC(ctx context.Context, c devices.RPCCall) (devices.RPCResult, error) {
	begun := time.Now()
	c.ID = s.callID(c.ID)
	r, err := route(ctx, s, c.Principal, c.Device, c.Origin,
		func() error { return s.Permit(ctx, c.Principal, access.ScopeCall, c.Device) },
		func(x *session.Session) (devices.RPCResult, error) { return s.checkedRPC(ctx, x, &c) },
		func() (devices.RPCResult, error) { return s.ports.Router.ForwardRPC(ctx, c) })
	call, result := s.callOf(&c, &r)
	if c.Origin != devices.OriginNode {
		s.auditCall(&call, begun, &result, err)
	}
	s.recordCall(&call, begun, &result, err)
	r.Call = c.ID
	return r, devices.WithCallID(err, c.ID)
}

// callOf is a raw request as audit and recorder have it: tools/call as a call of the tool, others by their method.
func (s *Dispatcher) callOf(c *devices.RPCCall, r *devices.RPCResult) (devices.ToolCall, devices.ToolResult) {
	result := devices.ToolResult{Content: r.Result, IsError: r.Error != nil}
	if s.hub.IsHere(c.Device) {
		result.Node = s.cfg.Node
	}
	call, ok := toolCallOf(c)
	if c.Method != methodCall || !ok {
		call = devices.ToolCall{ID: c.ID, Device: c.Device, Principal: c.Principal, Tool: devices.Clip(c.Method), Arguments: c.Params}
	} else if jsonspan.KindOf(jsonspan.Member(r.Result, "isError")) == jsonspan.KindTrue {
		result.IsError = true
	} else {
		result.Outcome, _ = jsonspan.String(jsonspan.Member(r.Result, "outcome"))
	}
	call.Waited, call.Ahead = c.Waited, c.Ahead
	return call, result
}
