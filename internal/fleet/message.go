package fleet

import (
	"context"
	"strings"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/envelope"
	"fleetd/internal/jsonspan"
)

// MaxMessage bounds a message for a device, in bytes. Firmware to v2.1.0 keeps
// such a message twice in some 100 KB of free memory.
const MaxMessage = 32 << 10

// SendMessage sends one message other than MCP to a device, wherever it is
// connected. It returns once the message is written, or queued behind the
// speech it belongs to; devices answer none. Errors are *Error.
func (s *Service) SendMessage(ctx context.Context, m devices.Message) error {
	m.ID = s.callID(m.ID)
	kind, err := messageKind(m.Body)
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
	kind, _ := messageKind(m.Body)
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
	kind, err := messageKind(m.Body)
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
	body := withSession(m.Body, x, c)
	switch {
	case kind == "goodbye" && c != nil && c.owner == nil:
		if id := sessionOf(body); id != c.id { // the device itself ignores it then (mqtt_protocol.cc:128-140)
			done(devices.Errorf(devices.CodeSuperseded, "conversation %q is over; the device has another", clip(id)))
			return
		}
		s.answer(func() error { c.Hangup(); return nil }, done)
	case c != nil:
		done(c.send(kind, body))
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

// messageKind checks what may be sent and returns its type.
func messageKind(body []byte) (string, error) {
	if len(body) > MaxMessage {
		return "", devices.Errorf(devices.CodeTooLarge, "the message has %d bytes, at most %d are allowed", len(body), MaxMessage)
	}
	m, err := envelope.Parse(body)
	if err != nil {
		return "", devices.Errorf(devices.CodeBadRequest, `the message must be a JSON object with a string "type": %v`, err)
	}
	// The device finds members without regard to case (cJSON), and would take
	// the first for what it is called here.
	for walk := jsonspan.Object(body); walk.Next(); {
		key, _, cut := strings.Cut(string(walk.Key()), "\x00") // where its reader stops
		if (cut || key != "type") && strings.EqualFold(key, "type") {
			return "", devices.Errorf(devices.CodeBadRequest, "the message has a member %q: the device reads it as its type; write it in lower case or leave it out", key)
		}
	}
	if !isWord(string(m.Type)) {
		return "", devices.Errorf(devices.CodeBadRequest, "the message's type must be 1 to %d of [A-Za-z0-9_.-]: the device reads others as another type than stands there", maxWord)
	}
	switch kind := string(m.Type); kind {
	case envelope.TypeMCP:
		return "", devices.Errorf(devices.CodeForbidden, "mcp belongs to fleetd: call tools by the call and mcp routes")
	case "hello":
		return "", devices.Errorf(devices.CodeForbidden, "hello belongs to fleetd: a second one spoils the device's next connection")
	case "tts":
		// Firmware to v2.3.0 crashes on a tts message without state.
		if !hasString(body, "state") {
			return "", devices.Errorf(devices.CodeBadRequest, `a tts message needs a string "state", such as start, sentence_start or stop`)
		}
		return kind, nil
	case "alert":
		for _, name := range []string{"status", "message", "emotion"} {
			if !hasString(body, name) {
				return "", devices.Errorf(devices.CodeBadRequest, `an alert needs the strings "status", "message" and "emotion"; %q is missing`, name)
			}
		}
		return kind, nil
	default:
		return kind, nil
	}
}

// maxWord bounds the type of a message and the method of a raw request.
const maxWord = 64

// isWord tells whether text means the same to the device as to us. Its reader
// ends a string at the first NUL (cJSON, std::string from a char pointer), so
// that what is compared here as a whole would be another word there.
func isWord(text string) bool {
	for _, c := range []byte(text) {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '_', c == '.', c == '-', c == '/', c == '$':
		default:
			return false
		}
	}
	return text != "" && len(text) <= maxWord
}

func hasString(object []byte, name string) bool {
	return jsonspan.KindOf(jsonspan.Member(object, name)) == jsonspan.KindString
}

func sessionOf(body []byte) string {
	m, err := envelope.Parse(body)
	if err != nil {
		return ""
	}
	return string(m.SessionID)
}

// withSession adds the session id that devices expect where the sender, who
// need not know it, left it out.
func withSession(body []byte, x *Session, c *Conversation) []byte {
	if jsonspan.Member(body, "session_id") != nil {
		return body
	}
	id := x.id
	if c != nil {
		id = c.id
	}
	return jsonspan.WithString(body, "session_id", id)
}

// Say queues one Opus packet for a device on this node. It never blocks; what
// cannot be queued is counted.
func (s *Service) Say(id devices.ID, opus []byte) {
	e := s.hub.get(id)
	if e == nil {
		s.stats.AudioDrops.Add(AudioNoChannel, 1)
		return
	}
	c := e.conversation.Load()
	if c == nil {
		s.stats.AudioDrops.Add(AudioNoChannel, 1)
		return
	}
	_ = c.SendAudio(envelope.Frame{Opus: opus}) // counted there
}

// Send queues one message of a voice service for the device, as
// Service.QueueMessage does.
func (c *Conversation) Send(by access.By, body []byte) error {
	kind, err := messageKind(body)
	if err == nil {
		err = c.svc.guardMessage(noWait, by, c.entry.id, kind)
	}
	c.svc.auditMessage(&devices.Message{Device: c.entry.id, By: by}, kind, err)
	if err != nil {
		return err
	}
	x := c.entry.session.Load()
	if x == nil {
		return devices.Errorf(devices.CodeDeviceOffline, "device %s is reconnecting", c.entry.id)
	}
	return c.send(kind, withSession(body, x, c))
}
