package fleet

import (
	"context"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/devices/speech"
)

// SendMessage sends one message other than MCP to a device, wherever it is
// connected. It returns once the message is written, or queued behind the
// speech it belongs to; devices answer none. Errors are *Error.
func (s *Service) SendMessage(ctx context.Context, m devices.Message) error {
	m.ID = s.callID(m.ID)
	kind, err := speech.MessageKind(m.Body)
	if err == nil {
		err = s.routeMessage(ctx, m, kind)
	}
	s.auditMessage(&m, kind, err)
	return devices.OfCall(err, m.ID)
}

func (s *Service) routeMessage(ctx context.Context, m devices.Message, kind string) error {
	if err := s.guardMessage(ctx, m.By, m.Device, kind); err != nil {
		return err
	}
	if s.Session(m.Device) != nil {
		return s.SendMessageLocal(m)
	}
	return s.orAbsent(ctx, m.Device, s.ports.Router.ForwardMessage(ctx, m))
}

// SendMessageLocal is SendMessage for a device on this node; it never routes.
func (s *Service) SendMessageLocal(m devices.Message) error {
	outcome := make(chan error, 1)
	s.QueueMessage(m, func(err error) { outcome <- err })
	return <-outcome
}

// QueueMessageHere is QueueMessage for who found the node by the device's own
// subject, which nobody else keeps a record of.
func (s *Service) QueueMessageHere(m devices.Message, done func(error)) {
	m.ID = s.callID(m.ID)
	kind, _ := speech.MessageKind(m.Body)
	s.QueueMessage(m, func(err error) {
		s.auditMessage(&m, kind, err)
		done(devices.OfCall(err, m.ID))
	})
}

// QueueMessage is SendMessageLocal for those who must not block: done is
// called with the outcome, on this goroutine or, where a connection has to be
// written to, on another. Messages of one conversation keep their order with
// its audio.
func (s *Service) QueueMessage(m devices.Message, done func(error)) {
	kind, err := speech.MessageKind(m.Body)
	if err == nil {
		err = s.guardMessage(noWait, m.By, m.Device, kind)
	}
	if err != nil {
		done(err)
		return
	}
	if !s.Queue(m.Device, kind, m.Body, done) {
		asked := s.tasks.Run(func() {
			ctx, cancel := context.WithTimeout(s.ctx, session.LookupTimeout)
			defer cancel()
			done(s.absent(ctx, m.Device))
		})
		if !asked {
			done(session.ErrDraining)
		}
	}
}

// permitSpeech tells whether a voice service of this node may send a device a
// message of this type, and records that it did.
func (s *Service) permitSpeech(by access.By, id devices.ID, kind string, err error) error {
	if err == nil {
		err = s.guardMessage(noWait, by, id, kind)
	}
	s.auditMessage(&devices.Message{Device: id, By: by}, kind, err)
	return err
}
