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
)

// verb is a kind of request that route handles.
type verb[R any] interface {
	// target returns the principal, the device and the origin.
	target() (principal access.Principal, id devices.ID, origin devices.Origin)
	// permit returns an error if the principal may not send this request at all; route
	// calls it before it looks up the device.
	permit(ctx context.Context, s *Dispatcher) error
	// runLocal runs the request on a session of this node.
	runLocal(ctx context.Context, s *Dispatcher, x *session.Session) (R, error)
	// forward runs the request on the node that holds the device; ErrNoHolder if none does.
	forward(ctx context.Context, s *Dispatcher) (R, error)
}

// route runs a request on this node if it holds the device, else, for requests of callers,
// on the holder: one hop, never two. A request is repeated, once, only if a takeover ended it
// before a byte was sent.
func route[R any](ctx context.Context, s *Dispatcher, v verb[R]) (r R, err error) {
	principal, id, origin := v.target()
	if origin == devices.OriginCaller {
		if err := v.permit(ctx, s); err != nil {
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
				r, err = v.runLocal(ctx, s, x)
			}
		case origin == devices.OriginCaller:
			r, err = v.forward(ctx, s)
			err = s.OrAbsent(ctx, id, err)
		default:
			if err = v.permit(ctx, s); err == nil {
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

// toolVerb is a call of a tool.
type toolVerb devices.ToolCall

func (v *toolVerb) target() (access.Principal, devices.ID, devices.Origin) {
	return v.Principal, v.Device, v.Origin
}

func (v *toolVerb) permit(ctx context.Context, s *Dispatcher) error {
	return s.Permit(ctx, v.Principal, access.ScopeCall, v.Device)
}

func (v *toolVerb) runLocal(ctx context.Context, s *Dispatcher, x *session.Session) (devices.ToolResult, error) {
	return s.call(ctx, x, (*devices.ToolCall)(v), nil)
}

func (v *toolVerb) forward(ctx context.Context, s *Dispatcher) (devices.ToolResult, error) {
	return s.ports.Router.Forward(ctx, devices.ToolCall(*v))
}

// CallTool calls a tool of a device. ctx has the deadline, including waiting. Errors are
// *Error.
func (s *Dispatcher) CallTool(ctx context.Context, c devices.ToolCall) (devices.ToolResult, error) {
	begun := time.Now()
	c.ID = s.callID(c.ID)
	r, err := route(ctx, s, (*toolVerb)(&c))
	if c.Origin != devices.OriginNode {
		s.auditCall(&c, begun, &r, err)
	}
	s.recordCall(&c, begun, &r, err)
	r.Call = c.ID
	return r, devices.WithCallID(err, c.ID)
}

// rpcVerb is a raw request.
type rpcVerb devices.RPCCall

func (v *rpcVerb) target() (access.Principal, devices.ID, devices.Origin) {
	return v.Principal, v.Device, v.Origin
}

func (v *rpcVerb) permit(ctx context.Context, s *Dispatcher) error {
	return s.Permit(ctx, v.Principal, access.ScopeCall, v.Device)
}

func (v *rpcVerb) runLocal(ctx context.Context, s *Dispatcher, x *session.Session) (devices.RPCResult, error) {
	return s.checkedRPC(ctx, x, devices.RPCCall(*v))
}

func (v *rpcVerb) forward(ctx context.Context, s *Dispatcher) (devices.RPCResult, error) {
	return s.ports.Router.ForwardRPC(ctx, devices.RPCCall(*v))
}

// CallRPC sends any MCP request except `initialize` to a device. tools/call is handled like
// CallTool, including the schema check and special tools.
func (s *Dispatcher) CallRPC(ctx context.Context, c devices.RPCCall) (devices.RPCResult, error) {
	begun := time.Now()
	c.ID = s.callID(c.ID)
	r, err := route(ctx, s, (*rpcVerb)(&c))
	if c.Origin != devices.OriginNode {
		s.auditRPC(&c, begun, &r, err)
	}
	s.recordRPC(&c, begun, &r, err)
	r.Call = c.ID
	return r, devices.WithCallID(err, c.ID)
}

// messageVerb is a message other than MCP; devices do not answer it.
type messageVerb struct {
	devices.Message
	kind string
}

// target always routes: QueueMessage handles messages from other origins.
func (v *messageVerb) target() (access.Principal, devices.ID, devices.Origin) {
	return v.Principal, v.Device, devices.OriginCaller
}

func (v *messageVerb) permit(ctx context.Context, s *Dispatcher) error {
	return s.guardMessage(ctx, v.Principal, v.Device, v.kind)
}

func (v *messageVerb) runLocal(ctx context.Context, s *Dispatcher, x *session.Session) (struct{}, error) {
	outcome := make(chan error, 1)
	x.Queue(v.kind, v.Body, func(err error) { outcome <- err })
	return struct{}{}, <-outcome
}

func (v *messageVerb) forward(ctx context.Context, s *Dispatcher) (struct{}, error) {
	return struct{}{}, s.ports.Router.ForwardMessage(ctx, v.Message)
}
