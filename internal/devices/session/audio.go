package session

import (
	"bytes"
	"strconv"

	"fleetd/internal/devices"
	"fleetd/internal/devices/speech"
	"fleetd/internal/envelope"
	"fleetd/internal/hello"
	"fleetd/internal/jsonspan"
)

// OpenAudio opens a conversation: the answer to the device's hello, made from
// local state alone. open makes the path of its audio. A conversation that is
// still open is replaced: devices say hello again without a goodbye.
func (x *Session) OpenAudio(h hello.Device, transport string, open func(*speech.Conversation) (speech.AudioPath, error)) (hello.Server, error) {
	o := speech.Opening{ID: x.id, Owned: transport != hello.TransportUDP, Who: x.who, Hello: h}
	if x.remote.IsValid() && x.svc.speech.HasVoice() {
		o.Who.Remote = x.remote.String()
	}
	if !o.Owned {
		x.mu.Lock()
		x.hellos++
		o.ID += "-" + strconv.Itoa(x.hellos)
		x.mu.Unlock()
	}
	c, err := x.svc.speech.Open(x.entry, o, open)
	if err != nil {
		return hello.Server{}, err
	}
	old, ok := x.entry.converse(x, c)
	if !ok {
		c.End()
		return hello.Server{}, ClosedError{devices.CloseSuperseded}
	}
	if old != nil {
		old.End()
	}
	if reason := x.closeReason(); reason != "" { // its Close may have looked before
		x.closeConversation(reason)
	}
	return hello.Server{Transport: transport, SessionID: c.ID(), Audio: hello.ServerAudio}, nil
}

// converse makes c the device's conversation, unless x is not its session any
// more: then the conversation there belongs to another, who must keep it.
func (e *entry) converse(x *Session, c *speech.Conversation) (old *speech.Conversation, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.session.Load() != x {
		return nil, false
	}
	return e.conversation.Swap(c), true
}

// BeginConversation reports the open conversation to the voice service. Call it
// once the hello is answered, so that nothing is said before that.
func (x *Session) BeginConversation() {
	if c := x.entry.conversation.Load(); c != nil {
		c.Begin()
	}
}

// CloseAudio ends the conversation; the session lives on.
func (x *Session) CloseAudio() {
	if c := x.entry.conversation.Load(); c != nil {
		c.End()
	}
}

// HandleAudio takes one Opus packet of the device; it is not kept. Frames
// outside a conversation are counted and dropped.
func (x *Session) HandleAudio(f envelope.Frame) {
	if c := x.entry.conversation.Load(); c != nil && x.owns(c) {
		c.HandleAudio(f)
		return
	}
	x.svc.speech.Drop()
}

// owns tells whether the conversation ends with the session.
func (x *Session) owns(c *speech.Conversation) bool { return c.IsOwned() && c.ID() == x.id }

// sayGoodbye tells the device that its conversation is over; it must name the
// id of that conversation (mqtt_protocol.cc:128-140).
func (x *Session) sayGoodbye(id string) {
	msg := append(jsonspan.AppendString([]byte(`{"type":"goodbye","session_id":`), id), '}')
	if err := x.conn.SendControl(msg); err != nil {
		x.svc.log.Debug("goodbye not sent", "device", x.who.Device, "error", err)
	}
}

// dismiss says goodbye to the conversation that a message names if its node was killed: the device is
// still in it. Once for a connection, since messages name the latest one also when it is over.
func (x *Session) dismiss(id []byte) {
	const maxID = 64 // bytes
	if x.dismissed || len(id) == 0 || len(id) > maxID || x.who.Transport != devices.TransportMQTT ||
		bytes.HasPrefix(id, []byte(x.id)) || x.entry.conversation.Load() != nil {
		return
	}
	dead := string(id)
	x.dismissed = x.svc.run(func() { x.sayGoodbye(dead) })
}

// closeConversation is what the end of a session means for the conversation.
func (x *Session) closeConversation(reason devices.CloseReason) {
	c := x.entry.conversation.Load()
	switch {
	case c == nil:
	case c.IsOwned():
		if x.owns(c) {
			c.End()
		}
	case reason == devices.CloseDraining || reason == devices.CloseRevoked:
		x.sayGoodbye(c.ID())
		c.End()
	default:
		c.Orphan()
	}
}

// adopt makes the conversation of a lost connection the session's own.
func (x *Session) adopt() {
	c := x.entry.conversation.Load()
	if c == nil || c.IsOwned() || x.who.Transport != devices.TransportMQTT {
		return
	}
	c.Adopt()
	x.svc.log.Debug("conversation goes on", "device", x.who.Device, "session", x.id, "conversation", c.ID())
}

// Device implements speech.Line.
func (e *entry) Device() devices.ID { return e.id }

// Connected implements speech.Line.
func (e *entry) Connected() bool { return e.session.Load() != nil }

// SendControl implements speech.Line.
func (e *entry) SendControl(msg []byte) error {
	x := e.session.Load()
	if x == nil {
		return devices.ErrNoHolder
	}
	return x.sendControl(msg)
}

// Goodbye implements speech.Line.
func (e *entry) Goodbye(id string) {
	if x := e.session.Load(); x != nil {
		x.sayGoodbye(id)
	}
}

// Report implements speech.Line.
func (e *entry) Report(kind devices.EventKind, fields []byte) {
	if x := e.session.Load(); x != nil {
		x.publish(kind, "", fields, false)
	}
}

// Firmware implements speech.Line.
func (e *entry) Firmware() string { return e.device.Load().Firmware }

// Leave implements speech.Line.
func (e *entry) Leave(c *speech.Conversation) bool {
	if x := e.session.Load(); x != nil && x.owns(c) {
		if !x.isIdle() {
			return false
		}
		x.Close(devices.CloseIdle)
	}
	return true
}

// Ended implements speech.Line. What passed counts for the session of the moment.
func (e *entry) Ended(c *speech.Conversation) {
	e.conversation.CompareAndSwap(c, nil)
	if x := e.session.Load(); x != nil {
		received, dropped := c.Audio()
		x.mu.Lock()
		x.audioPackets += received
		x.audioDropped += dropped
		x.mu.Unlock()
	}
}
