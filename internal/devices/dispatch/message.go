package dispatch

import (
	"context"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/devices/speech"
)

// SendMessage sends one message other than MCP, which has come into the fleet here,
// to a device. It returns once the message is written, or queued after the speech it
// belongs to; devices answer none. Errors are *Error.
func (s *Dispatcher) SendMessage(ctx context.Context, m devices.Message) error {
	m.ID = s.callID(m.ID)
	kind, body, err := speech.CheckMessage(m.Body)
	m.Body = body
	if err == nil {
		_, err = route(ctx, s, &messageVerb{m, kind})
	}
	s.auditMessage(&m, kind, err)
	return devices.OfCall(err, m.ID)
}

// QueueMessage is SendMessage for a device of this node, and for callers that must
// not block: done is called with the outcome, on this goroutine or, where a
// connection has to be written to, on another. Messages of one conversation keep
// their order with its audio.
func (s *Dispatcher) QueueMessage(m devices.Message, done func(error)) {
	kind, body, err := speech.CheckMessage(m.Body)
	m.Body = body
	if m.Origin != devices.OriginNode {
		m.ID = s.callID(m.ID)
		told := done
		done = func(err error) {
			s.auditMessage(&m, kind, err)
			told(devices.OfCall(err, m.ID))
		}
	}
	if err == nil {
		err = s.guardMessage(noWait, m.By, m.Device, kind)
	}
	if err != nil {
		done(err)
		return
	}
	if x := s.hub.Session(m.Device); x != nil {
		x.Queue(kind, m.Body, done)
		return
	}
	asked := s.ports.Tasks.Run(func() {
		ctx, cancel := context.WithTimeout(s.ports.Tasks.Context(), session.LookupTimeout)
		defer cancel()
		done(s.Absent(ctx, m.Device))
	})
	if !asked {
		done(session.ErrDraining)
	}
}

// PermitSpeech tells whether a voice service of this node may send a device a
// message of this type, and records that it did; err is what is wrong with the
// message itself.
func (s *Dispatcher) PermitSpeech(by access.By, id devices.ID, kind string, err error) error {
	if err == nil {
		err = s.guardMessage(noWait, by, id, kind)
	}
	s.auditMessage(&devices.Message{Device: id, By: by}, kind, err)
	return err
}
