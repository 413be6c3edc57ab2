package dispatch

import (
	"context"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/devices/speech"
)

// Reservation is a call slot of one session of this node, held for one task of a job: what
// is sent with it goes to that session, or nowhere. Its methods are for one goroutine.
type Reservation struct {
	s *Dispatcher
	x *session.Session
}

// Reserve takes a call slot of a device of this node without waiting; Release gives it back.
// tools is whether it is for a call, which needs the device's tools, and not for a message.
// The error is ErrNoHolder if the device has no session here, CodeDeviceBusy if its slots
// are in use or tools that are needed are being read, or that of a session that ends.
func (s *Dispatcher) Reserve(id devices.ID, tools bool) (*Reservation, error) {
	x := s.hub.Session(id)
	if x == nil {
		return nil, devices.ErrNoHolder
	}
	if tools && !x.IsSettled() {
		return nil, devices.Errorf(devices.CodeDeviceBusy, "the tools of device %s are being read", id)
	}
	if err := x.TryAcquire(); err != nil {
		return nil, err
	}
	return &Reservation{s, x}, nil
}

// IsBusy reports whether a device of this node takes no further call at the moment, or, with idle, whether a
// conversation is open on it.
func (s *Dispatcher) IsBusy(id devices.ID, idle bool) bool {
	x := s.hub.Session(id)
	return x != nil && (x.IsFull() || !x.IsSettled() || idle && x.IsTalking())
}

// Release gives the slot back. Call it once.
func (r *Reservation) Release() { r.x.Release() }

// IsTalking reports whether a conversation is open on the device.
func (r *Reservation) IsTalking() bool { return r.x.IsTalking() }

// IsCurrent reports whether the session is still the device's.
func (r *Reservation) IsCurrent() bool { return r.s.hub.Session(r.x.Device()) == r.x }

// check returns an error if the session was replaced, or the caller's key has ended.
func (r *Reservation) check(principal access.Principal) error {
	if !r.IsCurrent() {
		return devices.ClosedCall(devices.CloseSuperseded, false)
	}
	return r.s.checkKey(principal)
}

// held is the slot that a call of a job holds, and what permits it. nil is a call without one.
type held struct {
	r      *Reservation
	before func() error
}

// check is what a call with a slot must pass before it is judged.
func (h *held) check(c *devices.ToolCall) error {
	if h == nil {
		return nil
	}
	return h.r.check(c.Principal)
}

// permit is what it must pass last, before bytes leave.
func (h *held) permit(c *devices.ToolCall) error {
	if err := h.check(c); h == nil || err != nil {
		return err
	}
	return h.before()
}

// Call makes a call as CallTool does, with the slot that is held. permit is called last
// before the call is sent; its error is returned. In errors, Sent is whether bytes of this
// call may have left.
func (r *Reservation) Call(ctx context.Context, c devices.ToolCall, permit func() error) (devices.ToolResult, error) {
	s, begun := r.s, time.Now()
	c.ID = s.callID(c.ID)
	result, err := s.call(ctx, r.x, &c, &held{r, permit})
	result.Call = c.ID
	s.auditCall(&c, begun, &result, err)
	s.recordCall(&c, begun, &result, err)
	return result, devices.WithCallID(err, c.ID)
}

// Message writes a message as SendMessage does, on the session that is held. permit is as
// for Call.
func (r *Reservation) Message(ctx context.Context, m devices.Message, permit func() error) error {
	m.ID = r.s.callID(m.ID)
	kind, body, err := speech.CheckMessage(m.Body)
	m.Body = body
	if err == nil {
		err = r.s.guardMessage(ctx, m.Principal, m.Device, kind)
	}
	if err == nil {
		err = r.check(m.Principal)
	}
	if err == nil {
		err = permit()
	}
	if err == nil {
		written := make(chan error, 1)
		r.x.Queue(kind, m.Body, func(err error) { written <- err })
		err = <-written
	}
	r.s.noteMessage(&m, kind, err)
	return devices.WithCallID(err, m.ID)
}
