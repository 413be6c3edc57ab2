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
	line  Line
	owned bool // by the connection, as over WebSocket
	id    string
	path  AudioPath
	topic string // made with the first frame, by the goroutine that brings it
	intro *intro // for the Voice; nil without one

	uplink devices.Bucket // used by the goroutine that brings the frames

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
	idle   *time.Timer // of a device that would lose its wake word
	down   *downlink   // made with the first thing to say
}

// intro is how the device introduced itself.
type intro struct {
	who   devices.Identity
	hello hello.Device
}

// ID is the session id that the device was told with this conversation.
func (c *Conversation) ID() string { return c.id }

// Who is the device's identity when it said hello. Only a Voice may ask.
func (c *Conversation) Who() devices.Identity { return c.intro.who }

// Hello is what the device announced. Only a Voice may ask.
func (c *Conversation) Hello() hello.Device { return c.intro.hello }

// Opening is a conversation that a device's hello begins.
type Opening struct {
	ID    string // the session id that the device gets
	Owned bool   // it ends with its connection, as over WebSocket
	Who   devices.Identity
	Hello hello.Device
}

// Open makes a conversation on a line; open makes the path of its audio. Begin
// follows once the hello is answered.
func (s *Service) Open(line Line, o Opening, open func(*Conversation) (AudioPath, error)) (*Conversation, error) {
	c := &Conversation{svc: s, line: line, owned: o.Owned, id: o.ID}
	if s.voice != nil {
		c.intro = &intro{o.Who, o.Hello}
	}
	path, err := open(c)
	if err != nil {
		return nil, err
	}
	c.path = path
	s.stats.Conversations.Add(1)
	return c, nil
}

// IsOwned tells whether the conversation ends with its connection.
func (c *Conversation) IsOwned() bool { return c.owned }

// Begin reports the conversation to the voice service, once.
func (c *Conversation) Begin() {
	if c.svc.voice == nil {
		return
	}
	c.mu.Lock()
	begin := !c.ended && !c.begun
	c.begun = c.begun || begin
	c.mu.Unlock()
	if begin {
		c.svc.voice.Begin(c)
	}
}

// Interpret does what a message of the device means for the conversation.
func (c *Conversation) Interpret(kind string, session, msg []byte) {
	c.other.Add(1)
	switch kind {
	case "listen":
		c.listens(msg)
	case "abort":
		c.abort()
	case "goodbye":
		if !c.owned && string(session) == c.id { // else of an earlier one, late
			c.End()
		}
	}
}

// Pass hands a message of the device to the voice service.
func (c *Conversation) Pass(kind string, msg []byte) {
	if c.svc.voice != nil && !c.IsOver() {
		c.svc.voice.Message(c, kind, msg)
	}
}

// HandleAudio takes one Opus packet of the device; it is not kept.
func (c *Conversation) HandleAudio(f envelope.Frame) {
	s := c.svc
	s.stats.AudioFrames.Add(1)
	if len(f.Opus) > MaxPacket {
		c.drop(AudioRefused)
		return
	}
	if !c.uplink.Take(time.Now(), uplinkRate, uplinkBurst) {
		c.drop(AudioTooMany)
		return
	}
	seq := c.received.Add(1)
	if c.topic == "" {
		c.topic = s.audio.Topic(c.line.Device())
	}
	if !s.audio.PublishAudio(c.topic, c.id, seq, f) {
		c.drop(AudioNotPublished)
	}
	if s.voice != nil {
		s.voice.Audio(c, f)
	}
}

// Silent says that the channel is open and none of the device's packets
// arrived: the most common trouble in the field is a UDP port that a firewall
// or container does not pass on. tried packets named the channel all the same.
func (c *Conversation) Silent(tried uint64) {
	if !c.line.Connected() || c.IsOver() {
		return
	}
	c.svc.stats.SilentChannels.Add(1)
	c.svc.log.Warn("no audio arrives: check that the UDP port is open from the device to this node (--udp-listen, --public-udp)",
		"device", c.line.Device(), "session", c.id, "packets", tried)
	fields := jsonspan.AppendString([]byte(`"conversation":`), c.id)
	c.line.Report(devices.EventSilent, strconv.AppendUint(append(fields, `,"packets":`...), tried, 10))
}

// Hangup ends the conversation politely and leaves the session alone. Over
// MQTT the device is told goodbye; over WebSocket, where the connection is the
// conversation, it is told that the speech is over.
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

// Orphan lets a conversation go on for orphanLife whose connection was lost.
func (c *Conversation) Orphan() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.ended && c.orphan == nil && !c.line.Connected() {
		c.orphan = time.AfterFunc(orphanLife, c.abandon)
	}
}

// Adopt takes back what Orphan did: the device has connected again.
func (c *Conversation) Adopt() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.orphan != nil {
		c.orphan.Stop()
		c.orphan = nil
	}
}

// quietSweeps ends a UDP conversation in which nothing happened for two to
// three minutes. The device counts it as over after 120 s without a word from us
// and tells nobody (protocol.cc:100-109); neither does one that lost its power.
const quietSweeps = 3

// Sweep ends a conversation that the device has left without a goodbye. Call it
// once a minute.
func (c *Conversation) Sweep() {
	if c.owned {
		return // its connection tells
	}
	now := c.Traffic()
	c.mu.Lock()
	if c.quiet++; now != c.last {
		c.last, c.quiet = now, 0
	}
	over := c.quiet >= quietSweeps
	c.mu.Unlock()
	if over {
		c.svc.log.Info("conversation ended in silence", "device", c.line.Device(), "conversation", c.id)
		c.End()
	}
}

// abandon ends a conversation whose control connection did not come back.
func (c *Conversation) abandon() {
	if !c.line.Connected() {
		c.End()
	}
}

// Traffic counts what went either way.
func (c *Conversation) Traffic() uint64 { return c.received.Load() + c.other.Load() }

// IsOver tells whether the conversation has ended.
func (c *Conversation) IsOver() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ended
}

// End ends the conversation without a message to the device, and closes the audio
// path. It may be called any number of times.
func (c *Conversation) End() {
	c.mu.Lock()
	if c.ended {
		c.mu.Unlock()
		return
	}
	c.ended = true
	if c.orphan != nil {
		c.orphan.Stop()
	}
	if c.idle != nil {
		c.idle.Stop()
	}
	if c.down != nil {
		c.down.clear()
	}
	c.mu.Unlock()
	c.line.Ended(c)
	c.path.Close()
	c.svc.stats.Conversations.Add(-1)
	if c.svc.voice != nil {
		c.svc.voice.End(c)
	}
}

// Audio counts the frames of the device, and the frames either way that were
// dropped.
func (c *Conversation) Audio() (received, dropped uint64) { return c.received.Load(), c.dropped.Load() }

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
