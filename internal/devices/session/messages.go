package session

import (
	"fleetd/internal/devices"
	"fleetd/internal/devices/speech"
	"fleetd/internal/envelope"
)

// maxMessages is how many messages may be queued for one device without a conversation.
const maxMessages = 64

// queuedMessage is a message for a device without a conversation.
type queuedMessage struct {
	body []byte
	done func(error)
}

// Queue writes a checked message, or queues it after the speech that it belongs to. done is
// called with the outcome, on this or another goroutine.
func (x *Session) Queue(kind string, msg []byte, done func(error)) {
	c := x.entry.talk()
	session := x.id
	if c != nil {
		session = c.ID()
	}
	body := speech.WithSession(msg, session)
	switch {
	case kind == "goodbye" && c != nil && !c.IsOwned():
		if id := sessionOf(body); id != c.ID() { // the device would ignore it (mqtt_protocol.cc:128-140)
			done(devices.Errorf(devices.CodeSuperseded, "conversation %q has ended; the device has another one", devices.Clip(id)))
			return
		}
		if !x.svc.run(func() { c.Hangup(); done(nil) }) { // it may block
			done(ErrDraining)
		}
	case c != nil:
		done(c.SendMessage(kind, body))
	default:
		x.queueMessage(body, done)
	}
}

// queueMessage writes messages in order, in a task that ends when there are no more.
func (x *Session) queueMessage(body []byte, done func(error)) {
	x.mu.Lock()
	u := x.useLocked()
	if len(u.messages) >= maxMessages {
		x.mu.Unlock()
		done(devices.Errorf(devices.CodeDeviceBusy, "%d messages are queued for the device already; try again later", maxMessages))
		return
	}
	u.messages = append(u.messages, queuedMessage{body, done})
	first := len(u.messages) == 1
	x.mu.Unlock()
	if first && !x.svc.run(x.writeMessages) {
		x.mu.Lock()
		left := u.messages
		u.messages = nil
		x.mu.Unlock()
		for _, m := range left {
			m.done(ErrDraining)
		}
	}
}

func (x *Session) writeMessages() {
	for {
		x.mu.Lock()
		u := x.use
		m := u.messages[0]
		x.mu.Unlock()
		m.done(x.writeMessage(m.body))
		x.mu.Lock()
		u.messages = u.messages[1:]
		if len(u.messages) == 0 {
			u.messages = nil
			x.mu.Unlock()
			return
		}
		x.mu.Unlock()
	}
}

// writeMessage writes to a device without a conversation.
func (x *Session) writeMessage(msg []byte) error {
	if err := x.sendControl(msg); err != nil {
		if reason := x.closeReason(); reason != "" {
			return devices.ClosedCall(reason, false)
		}
		return &devices.Error{Code: devices.CodeConnectionLost, Detail: "the message could not be written to the device: " + err.Error()}
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

// SendAudio queues one Opus packet for a device on this node. It never blocks; dropped
// packets are counted.
func (s *Hub) SendAudio(id devices.ID, opus []byte) {
	if e := s.table.get(id); e != nil {
		if c := e.talk(); c != nil {
			_ = c.SendAudio(envelope.Frame{Opus: opus}) // counted there
			return
		}
	}
	s.speech.Drop()
}
