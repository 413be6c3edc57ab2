package speech

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

// reconnectGrace is how long a UDP conversation continues without its control connection.
// Losing MQTT does not end it on the device (application.cc:511-543), which reconnects
// about 10 s later, at the latest after 60 s.
const reconnectGrace = 60 * time.Second

// Conversation is one open audio channel of a device, from hello to goodbye. Over UDP it
// belongs to the device and not to its connection: the next session on the same node
// continues it. Its methods are safe for concurrent use.
type Conversation struct {
	svc   *Service
	line  Line
	owned bool // ends with the connection, as over WebSocket
	id    string
	path  AudioPath
	topic string // set with the first frame, by its goroutine
	intro *intro // for the Voice; nil without one

	uplink devices.Bucket // used only by the goroutine of the frames

	received atomic.Uint64 // frames from the device
	dropped  atomic.Uint64 // of these and of frames to the device
	other    atomic.Uint64 // messages from and to the device

	mu             sync.Mutex
	ended          bool
	quiet          uint8  // consecutive sweeps without traffic
	last           uint64 // traffic at the last sweep
	begun          bool   // Voice.Begin was called
	interrupted    bool   // the user interrupted: the rest of this speech is dropped
	reconnectTimer *time.Timer
	idle           *time.Timer // of a device that would lose its wake word
	down           *downlink   // created when needed
}

// intro is what the device sent at the start.
type intro struct {
	who   devices.Identity
	hello hello.Device
}

// ID returns the session id of this conversation, as sent to the device.
func (c *Conversation) ID() string { return c.id }

// Identity returns the identity of the device at its hello. Only a Voice may call it.
func (c *Conversation) Identity() devices.Identity { return c.intro.who }

// Hello returns the device's hello. Only a Voice may call it.
func (c *Conversation) Hello() hello.Device { return c.intro.hello }

// Opening describes a new conversation.
type Opening struct {
	ID       string // the session id that the device gets
	Owned    bool   // it ends with its connection, as over WebSocket
	Counted  bool   // in AudioStats.Conversations
	Identity devices.Identity
	Hello    hello.Device
}

// Open creates a conversation on a line; open creates the path of its audio. Call Begin after
// the hello was answered.
func (s *Service) Open(line Line, o Opening, open func(*Conversation) (AudioPath, error)) (*Conversation, error) {
	c := &Conversation{svc: s, line: line, owned: o.Owned, id: o.ID}
	if s.opt.Voice != nil {
		c.intro = &intro{o.Identity, o.Hello}
	}
	path, err := open(c)
	if err != nil {
		return nil, err
	}
	c.path = path
	if !o.Counted {
		s.stats.Conversations.Add(1)
	}
	return c, nil
}

// IsOwned reports whether the conversation ends with its connection.
func (c *Conversation) IsOwned() bool { return c.owned }

// Begin reports the conversation to the voice service once.
func (c *Conversation) Begin() {
	if c.svc.opt.Voice == nil {
		return
	}
	c.mu.Lock()
	begin := !c.ended && !c.begun
	c.begun = c.begun || begin
	c.mu.Unlock()
	if begin {
		c.svc.opt.Voice.Begin(c)
	}
}

// HandleMessage applies a message of the device to the conversation.
func (c *Conversation) HandleMessage(kind string, session, msg []byte) {
	c.other.Add(1)
	switch kind {
	case "listen":
		c.onListen(msg)
	case "abort":
		c.abort()
	case "goodbye":
		if !c.owned && string(session) == c.id { // else a late goodbye of an earlier one
			c.End()
		}
	}
}

// PassToVoice passes a message of the device to the voice service.
func (c *Conversation) PassToVoice(kind string, msg []byte) {
	if c.svc.opt.Voice != nil && !c.IsOver() {
		c.svc.opt.Voice.Message(c, kind, msg)
	}
}

// HandleAudio handles one Opus packet of the device; it does not keep f.
func (c *Conversation) HandleAudio(f envelope.Frame) {
	s := c.svc
	s.stats.AudioFrames.Add(1)
	if len(f.Opus) > MaxPacket {
		c.drop(AudioRefused)
		return
	}
	if !c.uplink.Allow(time.Now(), uplinkRate, uplinkBurst) {
		c.drop(AudioTooMany)
		return
	}
	seq := c.received.Add(1)
	if c.topic == "" {
		c.topic = s.opt.Audio.Topic(c.line.Device())
	}
	if !s.opt.Audio.PublishAudio(c.topic, c.id, seq, f) {
		c.drop(AudioNotPublished)
	}
	if s.opt.Voice != nil {
		s.opt.Voice.Audio(c, f)
	}
}

// ReportNoAudio reports that the channel is open but no packet of the device was accepted:
// often a UDP port that a firewall or container does not forward. tried is the number of
// packets with the channel's id.
func (c *Conversation) ReportNoAudio(tried uint64) {
	if !c.line.Connected() || c.IsOver() {
		return
	}
	c.svc.stats.SilentChannels.Add(1)
	c.svc.opt.Log.Warn("no audio arrives: check that the UDP port is open from the device to this node (--udp-listen, --public-udp)",
		"device", c.line.Device(), "session", c.id, "packets", tried)
	fields := jsonspan.AppendString([]byte(`"conversation":`), c.id)
	c.line.PublishEvent(devices.EventSilent, strconv.AppendUint(append(fields, `,"packets":`...), tried, 10))
}

// Hangup ends the conversation and leaves the session open. Over MQTT the device gets a
// goodbye; over WebSocket, where the connection is the conversation, it gets the end of the
// speech.
func (c *Conversation) Hangup() {
	if c.IsOver() {
		return
	}
	if c.owned {
		c.stopSpeech()
		return
	}
	c.line.Goodbye(c.id)
	c.End()
}

// Detach keeps a conversation for reconnectGrace after its connection was lost.
func (c *Conversation) Detach() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.ended && c.reconnectTimer == nil && !c.line.Connected() {
		c.reconnectTimer = time.AfterFunc(reconnectGrace, c.expire)
	}
}

// Reattach undoes Detach: the device has connected again.
func (c *Conversation) Reattach() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reconnectTimer != nil {
		c.reconnectTimer.Stop()
		c.reconnectTimer = nil
	}
}

// quietSweeps ends a UDP conversation without traffic for two to three minutes. The device
// considers it ended after 120 s without a message from the server and sends nothing
// (protocol.cc:100-109); nor does a device without power.
const quietSweeps = 3

// Sweep ends a conversation that the device has left without a goodbye. Call it once a
// minute.
func (c *Conversation) Sweep() {
	if c.owned {
		return // it ends with its connection
	}
	now := c.Traffic()
	c.mu.Lock()
	if c.quiet++; now != c.last {
		c.last, c.quiet = now, 0
	}
	over := c.quiet >= quietSweeps
	c.mu.Unlock()
	if over {
		c.svc.opt.Log.Info("conversation ended: no traffic", "device", c.line.Device(), "conversation", c.id)
		c.End()
	}
}

// expire ends a conversation whose control connection did not come back.
func (c *Conversation) expire() {
	if !c.line.Connected() {
		c.End()
	}
}

// Traffic counts frames and messages in both directions.
func (c *Conversation) Traffic() uint64 { return c.received.Load() + c.other.Load() }

// IsOver reports whether the conversation has ended.
func (c *Conversation) IsOver() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ended
}

// End ends the conversation without a message to the device, and closes the audio path. It
// may be called repeatedly.
func (c *Conversation) End() {
	c.mu.Lock()
	if c.ended {
		c.mu.Unlock()
		return
	}
	c.ended = true
	if c.reconnectTimer != nil {
		c.reconnectTimer.Stop()
	}
	if c.idle != nil {
		c.idle.Stop()
	}
	if c.down != nil {
		c.down.clear()
	}
	c.mu.Unlock()
	c.line.RemoveConversation(c)
	c.path.Close()
	c.svc.stats.Conversations.Add(-1)
	if c.svc.opt.Voice != nil {
		c.svc.opt.Voice.End(c)
	}
}

// Audio returns the number of frames of the device, and of dropped frames in both
// directions.
func (c *Conversation) Audio() (received, dropped uint64) { return c.received.Load(), c.dropped.Load() }

func (c *Conversation) drop(reason AudioDrop) {
	c.dropped.Add(1)
	c.svc.stats.AudioDrops.Add(reason, 1)
}

// Limits of the device's audio: all devices share the queue to NATS. Stock devices send 17
// packets a second, of about 100 bytes each.
const (
	MaxPacket   = 1500 // bytes
	uplinkRate  = 1000 // packets per second and conversation
	uplinkBurst = 2000
)

// AudioDrop is why a frame was dropped. The list is complete.
type AudioDrop string

// Reasons of dropped frames.
const (
	AudioNoChannel    AudioDrop = "no_channel"    // no conversation is open
	AudioNotPublished AudioDrop = "not_published" // NATS is unreachable or its queue is full
	AudioTooMany      AudioDrop = "too_many"      // over the device's rate limit
	AudioFull         AudioDrop = "full"          // 30 s are queued already
	AudioAborted      AudioDrop = "aborted"       // the user interrupted this speech
	AudioRefused      AudioDrop = "refused"       // empty, or longer than the device can decode
	AudioUnsent       AudioDrop = "unsent"        // rejected by the audio path: no UDP address yet, or write failed
)
