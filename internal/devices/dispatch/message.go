package dispatch

import (
	"context"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/devices/speech"
)

// SendMessage sends a message other than MCP, which this node received first, to a device. It
// returns once the message is written, or queued after the speech it belongs to; devices
// do not answer. Errors are *Error.
func (s *Dispatcher) SendMessage(ctx context.Context, m devices.Message) error {
	m.ID = s.callID(m.ID)
	kind, body, err := speech.CheckMessage(m.Body)
	m.Body = body
	if err == nil {
		_, err = route(ctx, s, m.Principal, m.Device, devices.OriginCaller, // QueueMessage has those of other origins
			func() error { return s.guardMessage(ctx, m.Principal, m.Device, kind) },
			func(x *session.Session) (struct{}, error) {
				outcome := make(chan error, 1)
				x.Queue(kind, m.Body, func(err error) { outcome <- err })
				return struct{}{}, <-outcome
			},
			func() (struct{}, error) { return struct{}{}, s.ports.Router.ForwardMessage(ctx, m) })
	}
	s.noteMessage(&m, kind, err)
	return devices.WithCallID(err, m.ID)
}

// QueueMessage is SendMessage for a device of this node, for callers that must not block. done
// is called with the outcome, on this goroutine or, if a connection has to be written to,
// on another. Messages of one conversation keep their order with its audio.
func (s *Dispatcher) QueueMessage(m devices.Message, done func(error)) {
	kind, body, err := speech.CheckMessage(m.Body)
	m.Body = body
	if m.Origin != devices.OriginNode {
		m.ID = s.callID(m.ID)
		reply := done
		done = func(err error) {
			s.noteMessage(&m, kind, err)
			reply(devices.WithCallID(err, m.ID))
		}
	}
	if err == nil {
		err = s.guardMessage(noWait, m.Principal, m.Device, kind)
	}
	if err != nil {
		done(err)
		return
	}
	if x := s.hub.Session(m.Device); x != nil {
		x.Queue(kind, m.Body, done)
		return
	}
	started := s.ports.Tasks.Run(func() {
		ctx, cancel := context.WithTimeout(s.ports.Tasks.Context(), session.LookupTimeout)
		defer cancel()
		done(s.AbsentError(ctx, m.Device))
	})
	if !started {
		done(session.ErrDraining)
	}
}

// PermitSpeech returns an error if a voice service of this node may not send a device a
// message of this type, and records the message; err is the error of the message itself.
func (s *Dispatcher) PermitSpeech(principal access.Principal, id devices.ID, kind string, err error) error {
	if err == nil {
		err = s.guardMessage(noWait, principal, id, kind)
	}
	s.noteMessage(&devices.Message{Device: id, Principal: principal}, kind, err)
	return err
}

// PermitMessage returns an error if a message is not valid, or the principal may send messages
// of its type to no device.
func (s *Dispatcher) PermitMessage(ctx context.Context, principal access.Principal, body []byte) error {
	kind, _, err := speech.CheckMessage(body)
	if err != nil {
		return err
	}
	return s.guardMessage(ctx, principal, "", kind)
}
