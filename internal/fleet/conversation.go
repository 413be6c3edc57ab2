package fleet

import (
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/envelope"
	"fleetd/internal/hello"
	"fleetd/internal/jsonspan"
)

// orphanLife is how long a UDP conversation goes on without its control
// connection. Losing MQTT does not end it on the device (application.cc:511-543),
// which reconnects about 10 s later, at the latest after 60 s.
const orphanLife = 60 * time.Second

// Conversation is one open audio channel of a device, from hello to goodbye.
// Over UDP it belongs to the device and not to its connection: a successor on
// the same node inherits it. Its methods are safe for concurrent use.
//
// WebSocket devices have one all the time, so what only those who speak need is
// made when they do.
type Conversation struct {
	svc   *Service
	entry *entry
	owner *Session // whose end ends a WebSocket conversation; nil over UDP
	id    string
	path  AudioPath
	topic string // made with the first frame, by the goroutine that brings it
	intro *intro // for the Voice; nil without one

	uplink bucket // used by the goroutine that brings the frames

	received atomic.Uint64 // frames of the device
	dropped  atomic.Uint64 // of those and of frames for it
	other    atomic.Uint64 // messages of the device, and what was said to it

	mu     sync.Mutex
	ended  bool
	quiet  uint8  // sweeps in a row without anything new
	last   uint64 // received and other at the latest sweep
	begun  bool   // the Voice was told
	muted  bool   // the user interrupted: nothing more of this speech
	orphan *time.Timer
	down   *downlink // made with the first thing to say
}

// intro is how the device introduced itself.
type intro struct {
	who   Identity
	hello hello.Device
}

// ID is the session id that the device was told with this conversation.
func (c *Conversation) ID() string { return c.id }

// Who is the device's identity when it said hello. Only a Voice may ask.
func (c *Conversation) Who() Identity { return c.intro.who }

// Hello is what the device announced. Only a Voice may ask.
func (c *Conversation) Hello() hello.Device { return c.intro.hello }

// OpenAudio opens a conversation: the answer to the device's hello, made from
// local state alone. open makes the path of its audio. A conversation that is
// still open is replaced: devices say hello again without a goodbye.
func (x *Session) OpenAudio(h hello.Device, transport string, open func(*Conversation) (AudioPath, error)) (hello.Server, error) {
	c := &Conversation{svc: x.svc, entry: x.entry, id: x.id}
	if x.svc.ports.Voice != nil {
		c.intro = &intro{x.who, h}
		if x.remote.IsValid() {
			c.intro.who.Remote = x.remote.String()
		}
	}
	if transport == hello.TransportUDP {
		x.mu.Lock()
		x.hellos++
		c.id += "-" + strconv.Itoa(x.hellos)
		x.mu.Unlock()
	} else {
		c.owner = x
	}
	path, err := open(c)
	if err != nil {
		return hello.Server{}, err
	}
	c.path = path
	old, ok := x.entry.converse(x, c)
	if !ok {
		path.Close()
		return hello.Server{}, closedError{devices.CloseSuperseded}
	}
	x.svc.stats.Conversations.Add(1)
	if old != nil {
		old.end()
	}
	if reason := x.closeReason(); reason != "" { // its Close may have looked before
		x.closeConversation(reason)
	}
	return hello.Server{Transport: transport, SessionID: c.id, Audio: hello.ServerAudio}, nil
}

// converse makes c the device's conversation, unless x is not its session any
// more: then the conversation there belongs to another, who must keep it.
func (e *entry) converse(x *Session, c *Conversation) (old *Conversation, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.session.Load() != x {
		return nil, false
	}
	return e.conversation.Swap(c), true
}

// Abandon ends the conversation without a word: the device was never told of
// it, or cannot be told.
func (c *Conversation) Abandon() { c.end() }

// BeginConversation tells the voice service of the open conversation. Call it
// once the hello is answered, so that nothing is said before that.
func (x *Session) BeginConversation() {
	c := x.entry.conversation.Load()
	if c == nil || x.svc.ports.Voice == nil {
		return
	}
	c.mu.Lock()
	begin := !c.ended && !c.begun
	c.begun = c.begun || begin
	c.mu.Unlock()
	if begin {
		x.svc.ports.Voice.Begin(c)
	}
}

// CloseAudio ends the conversation; the session lives on.
func (x *Session) CloseAudio() {
	if c := x.entry.conversation.Load(); c != nil {
		c.end()
	}
}

// HandleAudio takes one Opus packet of the device; it is not kept. Frames
// outside a conversation are counted and dropped.
func (x *Session) HandleAudio(f envelope.Frame) {
	if c := x.entry.conversation.Load(); c != nil && c.owner == x {
		c.HandleAudio(f)
		return
	}
	x.svc.stats.AudioDrops.Add(AudioNoChannel, 1)
}

// HandleAudio takes one Opus packet of the device; it is not kept.
func (c *Conversation) HandleAudio(f envelope.Frame) {
	s := c.svc
	s.stats.AudioFrames.Add(1)
	if len(f.Opus) > MaxPacket {
		c.drop(AudioRefused)
		return
	}
	if !c.uplink.take(time.Now(), uplinkRate, uplinkBurst) {
		c.drop(AudioTooMany)
		return
	}
	seq := c.received.Add(1)
	if c.topic == "" {
		c.topic = s.ports.Audio.Topic(c.entry.id)
	}
	if !s.ports.Audio.PublishAudio(c.topic, c.id, seq, f) {
		c.drop(AudioNotPublished)
	}
	if s.ports.Voice != nil {
		s.ports.Voice.Audio(c, f)
	}
}

// Silent says that the channel is open and none of the device's packets
// arrived: the most common trouble in the field is a UDP port that a firewall
// or container does not pass on. tried packets named the channel all the same.
func (c *Conversation) Silent(tried uint64) {
	x := c.entry.session.Load()
	if x == nil || c.isEnded() {
		return
	}
	c.svc.stats.SilentChannels.Add(1)
	c.svc.log.Warn("no audio arrives: check that the UDP port is open from the device to this node (--udp-listen, --public-udp)",
		"device", c.entry.id, "session", c.id, "packets", tried)
	fields := jsonspan.AppendString([]byte(`"conversation":`), c.id)
	x.publish(devices.EventSilent, "", strconv.AppendUint(append(fields, `,"packets":`...), tried, 10), false)
}

// Hangup ends the conversation politely and leaves the session alone. Over
// MQTT the device is told goodbye; over WebSocket, where the connection is the
// conversation, it is told that the speech is over.
func (c *Conversation) Hangup() {
	if c.isEnded() {
		return
	}
	if c.owner != nil {
		c.stopSpeech()
		return
	}
	if x := c.entry.session.Load(); x != nil {
		x.sayGoodbye(c.id)
	}
	c.end()
}

// sayGoodbye tells the device that its conversation is over; it must name the
// id of that conversation (mqtt_protocol.cc:128-140).
func (x *Session) sayGoodbye(id string) {
	msg := append(jsonspan.AppendString([]byte(`{"type":"goodbye","session_id":`), id), '}')
	if err := x.conn.SendControl(msg); err != nil {
		x.svc.log.Debug("goodbye not sent", "device", x.who.Device, "error", err)
	}
}

// closeConversation is what the end of a session means for the conversation.
func (x *Session) closeConversation(reason devices.CloseReason) {
	c := x.entry.conversation.Load()
	switch {
	case c == nil:
	case c.owner != nil:
		if c.owner == x {
			c.end()
		}
	case reason == devices.CloseDraining || reason == devices.CloseRevoked:
		x.sayGoodbye(c.id)
		c.end()
	default:
		c.mu.Lock()
		if !c.ended && c.orphan == nil && x.entry.session.Load() == nil {
			c.orphan = time.AfterFunc(orphanLife, c.abandon)
		}
		c.mu.Unlock()
	}
}

// quietSweeps ends a UDP conversation in which nothing happened for two to
// three minutes. The device counts it as over after 120 s without a word from us
// and tells nobody (protocol.cc:100-109); neither does one that lost its power.
const quietSweeps = 3

// sweep ends a conversation that the device has left without a goodbye.
func (c *Conversation) sweep() {
	if c.owner != nil {
		return // its connection tells
	}
	now := c.passed()
	c.mu.Lock()
	if c.quiet++; now != c.last {
		c.last, c.quiet = now, 0
	}
	over := c.quiet >= quietSweeps
	c.mu.Unlock()
	if over {
		c.svc.log.Info("conversation ended in silence", "device", c.entry.id, "conversation", c.id)
		c.end()
	}
}

// abandon ends a conversation whose control connection did not come back.
func (c *Conversation) abandon() {
	if c.entry.session.Load() == nil {
		c.end()
	}
}

// adopt makes the conversation that a lost connection left behind the
// session's own.
func (x *Session) adopt() {
	c := x.entry.conversation.Load()
	if c == nil || c.owner != nil || x.who.Transport != devices.TransportMQTT {
		return
	}
	c.mu.Lock()
	if c.orphan != nil {
		c.orphan.Stop()
		c.orphan = nil
	}
	c.mu.Unlock()
	x.svc.log.Debug("conversation goes on", "device", x.who.Device, "session", x.id, "conversation", c.id)
}

// passed counts what went either way.
func (c *Conversation) passed() uint64 { return c.received.Load() + c.other.Load() }

func (c *Conversation) isEnded() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ended
}

// end closes the audio path, once.
func (c *Conversation) end() {
	c.mu.Lock()
	if c.ended {
		c.mu.Unlock()
		return
	}
	c.ended = true
	if c.orphan != nil {
		c.orphan.Stop()
	}
	if c.down != nil {
		c.down.clear()
	}
	c.mu.Unlock()
	c.entry.conversation.CompareAndSwap(c, nil)
	c.path.Close()
	c.svc.stats.Conversations.Add(-1)
	if x := c.entry.session.Load(); x != nil {
		x.mu.Lock()
		x.audioPackets += c.received.Load()
		x.audioDropped += c.dropped.Load()
		x.mu.Unlock()
	}
	if c.svc.ports.Voice != nil {
		c.svc.ports.Voice.End(c)
	}
}

func (c *Conversation) drop(reason AudioDrop) {
	c.dropped.Add(1)
	c.svc.stats.AudioDrops.Add(reason, 1)
}

// Bounds of what a device says: the queue to NATS is everybody's. Stock devices
// send 17 packets a second, of some 100 bytes each.
const (
	MaxPacket   = 1500 // bytes
	uplinkRate  = 1000 // packets per second and conversation
	uplinkBurst = 2000
)

// AudioDrop says why a frame went no further. The list is closed.
type AudioDrop string

// Reasons of dropped frames.
const (
	AudioNoChannel    AudioDrop = "no_channel"    // no conversation is open
	AudioNotPublished AudioDrop = "not_published" // NATS is away or its queue full
	AudioTooMany      AudioDrop = "too_many"      // the device sends more than any that speaks
	AudioFull         AudioDrop = "full"          // 30 s wait already
	AudioAborted      AudioDrop = "aborted"       // the user interrupted this speech
	AudioRefused      AudioDrop = "refused"       // empty, or longer than the device can decode
	AudioUnsent       AudioDrop = "unsent"        // the path took it not: no address yet, or broken
)
