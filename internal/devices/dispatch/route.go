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

// verb is a kind of request, as route takes it from where it came in to its device.
type verb[R any] interface {
	// target is who asks what of which device, and where that came in.
	target() (by access.By, id devices.ID, origin devices.Origin)
	// permit tells why the caller may not ask for this at all; asked before anything
	// of the device is looked up.
	permit(ctx context.Context, s *Dispatcher) error
	// here makes the request on a session of this node.
	here(ctx context.Context, s *Dispatcher, x *session.Session) (R, error)
	// hop has the node that holds the device make it; ErrNoHolder if none does.
	hop(ctx context.Context, s *Dispatcher) (R, error)
}

// route makes a request on this node if the device is here, else, where it came into
// the fleet, on the node that holds the device: one hop, never two. A request is
// repeated only if a takeover ended it before a byte left, and only once.
func route[R any](ctx context.Context, s *Dispatcher, v verb[R]) (r R, err error) {
	by, id, origin := v.target()
	if origin == devices.OriginCaller {
		if err := v.permit(ctx, s); err != nil {
			return r, err // before it can be told which devices there are
		}
		if err := s.places.Enter(by.Key()); err != nil {
			return r, err
		}
		defer s.places.Leave(by.Key())
	}
	for range 2 {
		x := s.hub.Session(id)
		switch {
		case x != nil:
			r, err = v.here(ctx, s, x)
		case origin == devices.OriginCaller:
			r, err = v.hop(ctx, s)
			err = s.OrAbsent(ctx, id, err)
		default:
			if err = v.permit(ctx, s); err == nil {
				err = s.Absent(ctx, id)
			}
		}
		if err == nil || origin != devices.OriginCaller || !isOvertaken(err) {
			break
		}
	}
	return r, err
}

// isOvertaken tells whether a takeover ended a request before a byte left.
func isOvertaken(err error) bool {
	var e *devices.Error
	return errors.As(err, &e) && e.Code == devices.CodeSuperseded && !e.Sent
}

// OrAbsent is the error of a Router, or absent if no node holds the device.
func (s *Dispatcher) OrAbsent(ctx context.Context, id devices.ID, err error) error {
	if errors.Is(err, devices.ErrNoHolder) {
		return s.Absent(ctx, id)
	}
	return err
}

// Absent tells a device that is offline from one nobody knows, and from one that
// a living node holds which cannot be reached. It asks the database once,
// briefly, and only if there are other nodes.
func (s *Dispatcher) Absent(ctx context.Context, id devices.ID) error {
	if err := s.ports.Registry.Judge(); err != nil {
		return err
	}
	known := s.ports.Registry.Standing(id, "").Known || s.ports.Waits(id)
	if s.cfg.Routed {
		ctx, cancel := context.WithTimeout(ctx, session.LookupTimeout)
		defer cancel()
		row, err := s.ports.Records.Find(ctx, id)
		if err == nil && s.hub.Elsewhere(row.Presence) {
			return &devices.Error{Code: devices.CodeUnavailable, Part: "node", Detail: fmt.Sprintf("node %s holds the device and cannot be reached", row.Presence.Node)}
		}
		known = known || err == nil // another node has just made it a member
	}
	if !known {
		return registry.Unknown(id)
	}
	return devices.Errorf(devices.CodeDeviceOffline, "device %s is not connected", id)
}

// callID is the id that a request was given, or a new one.
func (s *Dispatcher) callID(given string) string {
	if given != "" {
		return given
	}
	return s.NewCallID()
}

// NewCallID is an id for a call, a raw request or a message that has come into the
// fleet here.
func (s *Dispatcher) NewCallID() string { return s.callIDs.Next() }

// toolVerb is a call of a tool.
type toolVerb devices.ToolCall

func (v *toolVerb) target() (access.By, devices.ID, devices.Origin) { return v.By, v.Device, v.Origin }

func (v *toolVerb) permit(ctx context.Context, s *Dispatcher) error {
	return s.Permit(ctx, v.By, access.ScopeCall, v.Device)
}

func (v *toolVerb) here(ctx context.Context, s *Dispatcher, x *session.Session) (devices.ToolResult, error) {
	return s.call(ctx, x, (*devices.ToolCall)(v))
}

func (v *toolVerb) hop(ctx context.Context, s *Dispatcher) (devices.ToolResult, error) {
	return s.ports.Router.Forward(ctx, devices.ToolCall(*v))
}

// CallTool calls a tool of a device. ctx carries the deadline, waiting included.
// Errors are *Error.
func (s *Dispatcher) CallTool(ctx context.Context, c devices.ToolCall) (devices.ToolResult, error) {
	begun := time.Now()
	c.ID = s.callID(c.ID)
	r, err := route(ctx, s, (*toolVerb)(&c))
	if c.Origin != devices.OriginNode {
		s.auditCall(&c, begun, &r, err)
	}
	r.Call = c.ID
	return r, devices.OfCall(err, c.ID)
}

// rpcVerb is a raw request.
type rpcVerb devices.RPCCall

func (v *rpcVerb) target() (access.By, devices.ID, devices.Origin) { return v.By, v.Device, v.Origin }

func (v *rpcVerb) permit(ctx context.Context, s *Dispatcher) error {
	return s.Permit(ctx, v.By, access.ScopeCall, v.Device)
}

func (v *rpcVerb) here(ctx context.Context, s *Dispatcher, x *session.Session) (devices.RPCResult, error) {
	return s.checkedRPC(ctx, x, devices.RPCCall(*v))
}

func (v *rpcVerb) hop(ctx context.Context, s *Dispatcher) (devices.RPCResult, error) {
	return s.ports.Router.ForwardRPC(ctx, devices.RPCCall(*v))
}

// CallRPC sends any MCP request but `initialize` to a device. tools/call takes
// the path of CallTool, its schema check and special tools included.
func (s *Dispatcher) CallRPC(ctx context.Context, c devices.RPCCall) (devices.RPCResult, error) {
	begun := time.Now()
	c.ID = s.callID(c.ID)
	r, err := route(ctx, s, (*rpcVerb)(&c))
	if c.Origin != devices.OriginNode {
		s.auditRPC(&c, begun, &r, err)
	}
	r.Call = c.ID
	return r, devices.OfCall(err, c.ID)
}

// messageVerb is a message other than MCP, which devices do not answer.
type messageVerb struct {
	devices.Message
	kind string
}

// target has messages routed that come into the fleet here; QueueMessage has the others.
func (v *messageVerb) target() (access.By, devices.ID, devices.Origin) {
	return v.By, v.Device, devices.OriginCaller
}

func (v *messageVerb) permit(ctx context.Context, s *Dispatcher) error {
	return s.guardMessage(ctx, v.By, v.Device, v.kind)
}

func (v *messageVerb) here(ctx context.Context, s *Dispatcher, x *session.Session) (struct{}, error) {
	outcome := make(chan error, 1)
	x.Queue(v.kind, v.Body, func(err error) { outcome <- err })
	return struct{}{}, <-outcome
}

func (v *messageVerb) hop(ctx context.Context, s *Dispatcher) (struct{}, error) {
	return struct{}{}, s.ports.Router.ForwardMessage(ctx, v.Message)
}
