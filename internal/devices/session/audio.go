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

// openPath creates the path of a conversation's audio.
type openPath = func(*speech.Conversation) (speech.AudioPath, error)

// OpenAudio opens a conversation and returns the server's hello, from local state only.
// open creates the path of its audio. It replaces an open conversation: devices send
// another hello without a goodbye. A conversation that ends with its connection, as over
// WebSocket, is created when something needs it, unless a voice service takes part.
func (x *Session) OpenAudio(h hello.Device, transport string, open openPath) (hello.Server, error) {
	o := speech.Opening{ID: x.id, Owned: transport != hello.TransportUDP, Hello: h,
		Identity: devices.Identity{Device: x.entry.id, ClientID: x.clientID, Transport: x.transport, Verified: x.verified, OfClient: x.ofClient, Generation: x.generation}}
	if x.remote.IsValid() && x.svc.speech.HasVoice() {
		o.Identity.Remote = x.remote.String()
	}
	if !o.Owned {
		x.mu.Lock()
		x.hellos++
		o.ID += "-" + strconv.Itoa(int(x.hellos))
		x.mu.Unlock()
	}
	reply := hello.Server{Transport: transport, SessionID: o.ID, Audio: hello.ServerAudio}
	if o.Owned && !x.svc.speech.HasVoice() {
		return reply, x.setUnused(open)
	}
	c, err := x.svc.speech.Open(x.entry, o, open)
	if err != nil {
		return hello.Server{}, err
	}
	old, ok := x.entry.setConversation(x, c)
	if !ok {
		c.End()
		return hello.Server{}, ClosedError{devices.CloseSuperseded}
	}
	if old != nil {
		old.End()
	}
	if reason := x.closeReason(); reason != "" { // a concurrent Close may have missed the conversation
		x.closeConversation(reason)
	}
	return reply, nil
}

// setUnused opens a conversation that is created when something needs it, in place of the device's current one.
func (x *Session) setUnused(open openPath) error {
	e := x.entry
	e.mu.Lock()
	if e.session.Load() != x {
		e.mu.Unlock()
		return ClosedError{devices.CloseSuperseded}
	}
	old := e.conversation.Swap(nil)
	x.mu.Lock()
	if x.closed == "" {
		x.unused = open
		x.svc.speech.Stats().Conversations.Add(1)
	}
	x.mu.Unlock()
	e.mu.Unlock()
	if old != nil {
		old.End()
	}
	return nil
}

// talk returns the device's conversation, nil if none is open, and creates it if it was not used yet.
func (e *entry) talk() *speech.Conversation {
	if c := e.conversation.Load(); c != nil {
		return c
	}
	if x := e.session.Load(); x != nil {
		x.useConversation()
	}
	return e.conversation.Load()
}

// useConversation creates the conversation of setUnused, if there is one. Close clears unused under the same lock: it comes before
// this, and nothing is created, or after it, and ends the conversation.
func (x *Session) useConversation() {
	e := x.entry
	e.mu.Lock()
	defer e.mu.Unlock()
	x.mu.Lock()
	defer x.mu.Unlock()
	open := x.unused
	if open == nil || e.session.Load() != x {
		return
	}
	x.unused = nil
	c, err := x.svc.speech.Open(e, speech.Opening{ID: x.id, Owned: true, Counted: true}, open)
	if err != nil { // its path exists as long as the connection
		x.svc.speech.Stats().Conversations.Add(-1)
		return
	}
	e.conversation.Store(c)
}

// isTalkingLocked reports whether a conversation is open on the device.
func (x *Session) isTalkingLocked() bool {
	return x.unused != nil || x.entry.conversation.Load() != nil
}

// setConversation makes c the device's conversation, unless x is no longer its session:
// then the conversation belongs to another session.
func (e *entry) setConversation(x *Session, c *speech.Conversation) (old *speech.Conversation, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.session.Load() != x {
		return nil, false
	}
	return e.conversation.Swap(c), true
}

// BeginConversation reports the open conversation to the voice service. Call it after the
// hello was answered, so that no message is sent earlier.
func (x *Session) BeginConversation() {
	if c := x.entry.conversation.Load(); c != nil {
		c.Begin()
	}
}

// CloseAudio ends the conversation; the session continues.
func (x *Session) CloseAudio() {
	if c := x.entry.talk(); c != nil {
		c.End()
	}
}

// HandleAudio handles one Opus packet of the device; it does not keep f. Frames without a
// conversation are counted and dropped.
func (x *Session) HandleAudio(f envelope.Frame) {
	if c := x.entry.talk(); c != nil && x.owns(c) {
		c.HandleAudio(f)
		return
	}
	x.svc.speech.Drop()
}

// owns reports whether the conversation ends with the session.
func (x *Session) owns(c *speech.Conversation) bool { return c.IsOwned() && c.ID() == x.id }

// sayGoodbye sends the device the end of its conversation; it must contain the id of that
// conversation (mqtt_protocol.cc:128-140).
func (x *Session) sayGoodbye(id string) {
	msg := append(jsonspan.AppendString([]byte(`{"type":"goodbye","session_id":`), id), '}')
	x.trace(false, msg)
	if err := x.conn.SendControl(msg); err != nil {
		x.svc.log.Debug("goodbye not sent", "device", x.entry.id, "error", err)
	}
}

// endStaleConversation sends a goodbye for the conversation in a message's session id if its
// node was killed: the device still has it open. It does so once for each connection, since
// messages contain the latest id also after the end.
func (x *Session) endStaleConversation(id []byte) {
	const maxID = 64 // bytes
	if x.staleEnded || len(id) == 0 || len(id) > maxID || x.transport != devices.TransportMQTT ||
		bytes.HasPrefix(id, []byte(x.id)) || x.entry.conversation.Load() != nil {
		return
	}
	dead := string(id)
	x.staleEnded = x.svc.run(func() { x.sayGoodbye(dead) })
}

// closeConversation ends or detaches the conversation when the session ends.
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
		c.Detach()
	}
}

// adopt continues the conversation of a lost connection.
func (x *Session) adopt() {
	c := x.entry.conversation.Load()
	if c == nil || c.IsOwned() || x.transport != devices.TransportMQTT {
		return
	}
	c.Reattach()
	x.svc.log.Debug("conversation goes on", "device", x.entry.id, "session", x.id, "conversation", c.ID())
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

// PublishEvent implements speech.Line.
func (e *entry) PublishEvent(kind devices.EventKind, fields []byte) {
	if x := e.session.Load(); x != nil {
		x.publish(kind, "", fields, false)
	}
}

// Firmware implements speech.Line.
func (e *entry) Firmware() string { return e.stored.Load().facts.Value().Firmware }

// IsBusy implements speech.Line.
func (e *entry) IsBusy() bool {
	x := e.session.Load()
	return x == nil || !x.isIdle()
}

// CloseIdle implements speech.Line.
func (e *entry) CloseIdle(c *speech.Conversation) {
	if x := e.session.Load(); !c.IsOwned() {
		c.Hangup()
	} else if x != nil && x.owns(c) {
		x.Close(devices.CloseIdle)
	}
}

// RemoveConversation implements speech.Line. It adds the counts to the current session.
func (e *entry) RemoveConversation(c *speech.Conversation) {
	e.conversation.CompareAndSwap(c, nil)
	if x := e.session.Load(); x != nil {
		received, dropped := c.Audio()
		x.mu.Lock()
		u := x.useLocked()
		u.audioPackets += received
		u.audioDropped += dropped
		x.mu.Unlock()
	}
}
