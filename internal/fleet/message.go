package fleet

import (
	"context"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/speech"
	"fleetd/internal/envelope"
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
	if s.hub.session(m.Device) != nil {
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
	e := s.hub.get(m.Device)
	var x *Session
	if e != nil {
		x = e.session.Load()
	}
	if x == nil {
		s.answer(func() error {
			ctx, cancel := context.WithTimeout(s.ctx, lookupTimeout)
			defer cancel()
			return s.absent(ctx, m.Device)
		}, done)
		return
	}
	c := e.conversation.Load()
	id := x.id
	if c != nil {
		id = c.ID()
	}
	body := speech.WithSession(m.Body, id)
	switch {
	case kind == "goodbye" && c != nil && !c.IsOwned():
		if id := sessionOf(body); id != c.ID() { // the device itself ignores it then (mqtt_protocol.cc:128-140)
			done(devices.Errorf(devices.CodeSuperseded, "conversation %q is over; the device has another", clip(id)))
			return
		}
		s.answer(func() error { c.Hangup(); return nil }, done)
	case c != nil:
		done(c.SendMessage(kind, body))
	default:
		x.queueMessage(body, done)
	}
}

// answer runs what may block in a task of its own.
func (s *Service) answer(act func() error, done func(error)) {
	if !s.run(func() { done(act()) }) {
		done(errDraining)
	}
}

// maxMessages bounds the messages that wait for one device without a
// conversation.
const maxMessages = 64

// waiting is a message for a device without a conversation.
type waiting struct {
	body []byte
	done func(error)
}

// queueMessage writes messages one after the other, in the order in which they
// were given, on a task that ends when there are no more.
func (x *Session) queueMessage(body []byte, done func(error)) {
	x.mu.Lock()
	if len(x.messages) >= maxMessages {
		x.mu.Unlock()
		done(devices.Errorf(devices.CodeDeviceBusy, "%d messages wait for the device already", maxMessages))
		return
	}
	x.messages = append(x.messages, waiting{body, done})
	first := len(x.messages) == 1
	x.mu.Unlock()
	if first && !x.svc.run(x.writeMessages) {
		x.mu.Lock()
		left := x.messages
		x.messages = nil
		x.mu.Unlock()
		for _, m := range left {
			m.done(errDraining)
		}
	}
}

func (x *Session) writeMessages() {
	for {
		x.mu.Lock()
		m := x.messages[0]
		x.mu.Unlock()
		m.done(x.writeMessage(m.body))
		x.mu.Lock()
		x.messages = x.messages[1:]
		if len(x.messages) == 0 {
			x.messages = nil
			x.mu.Unlock()
			return
		}
		x.mu.Unlock()
	}
}

// writeMessage writes to a device that has no conversation.
func (x *Session) writeMessage(msg []byte) error {
	if err := x.sendControl(msg); err != nil {
		if reason := x.closeReason(); reason != "" {
			return closedCall(reason, false)
		}
		return &devices.Error{Code: devices.CodeConnectionLost, Detail: "the device's connection takes no more bytes: " + err.Error()}
	}
	return nil
}

func sessionOf(body []byte) string {
	m, err := envelope.Parse(body)
	if err != nil {
		return ""
	}
	return string(m.SessionID)
}

// Say queues one Opus packet for a device on this node. It never blocks; what
// cannot be queued is counted.
func (s *Service) Say(id devices.ID, opus []byte) {
	if e := s.hub.get(id); e != nil {
		if c := e.conversation.Load(); c != nil {
			_ = c.SendAudio(envelope.Frame{Opus: opus}) // counted there
			return
		}
	}
	s.speech.Drop()
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
