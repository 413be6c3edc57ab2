// Package speech carries what is said between a device and whoever listens and
// answers: conversations from hello to goodbye, frames of audio up, and down at the
// speed at which the device plays them.
//
// Lock order: Conversation.mu comes last; it is never held while a Line, an
// AudioPath or a Voice is called.
package speech

import (
	"log/slog"
	"sync/atomic"

	"fleetd/internal/access"
	"fleetd/internal/counters"
	"fleetd/internal/devices"
	"fleetd/internal/envelope"
	"fleetd/internal/tasks"
)

// Service has what the conversations of a node share.
type Service struct {
	audio AudioBus
	voice Voice // may be nil
	stats *AudioStats
	tasks *tasks.Group
	log   *slog.Logger
	// permit tells whether a voice service may send a device a message of this type,
	// and records that it did; err is what is wrong with the message itself.
	permit func(by access.By, id devices.ID, kind string, err error) error
}

// Options are what New needs; Voice may be nil.
type Options struct {
	Audio  AudioBus
	Voice  Voice
	Tasks  *tasks.Group
	Log    *slog.Logger
	Permit func(by access.By, id devices.ID, kind string, err error) error
}

// New returns a Service.
func New(o Options) *Service {
	return &Service{audio: o.Audio, voice: o.Voice, stats: &AudioStats{}, tasks: o.Tasks, log: o.Log, permit: o.Permit}
}

// Stats returns the counters.
func (s *Service) Stats() *AudioStats { return s.stats }

// HasVoice tells whether a voice service takes part in the conversations of this node.
func (s *Service) HasVoice() bool { return s.voice != nil }

// Drop counts a frame for which no conversation is open.
func (s *Service) Drop() { s.stats.AudioDrops.Add(AudioNoChannel, 1) }

// AudioStats counts audio. It is safe for concurrent use.
type AudioStats struct {
	AudioFrames atomic.Uint64 // received from devices
	AudioSent   atomic.Uint64 // sent to devices
	// MessageDrops counts messages of a conversation that found no connection.
	MessageDrops   atomic.Uint64
	SilentChannels atomic.Uint64 // opened, and nothing came
	Conversations  atomic.Int64  // open now
	AudioDrops     counters.Map[AudioDrop]
}

// Line is the device of a conversation, on whatever connection it has at the time.
// Its methods may be called from any goroutine.
type Line interface {
	// Device is its id.
	Device() devices.ID
	// Connected tells whether it has a connection.
	Connected() bool
	// SendControl writes a message; devices.ErrNoHolder without a connection.
	SendControl(msg []byte) error
	// Goodbye tells the device that its conversation with this id is over.
	Goodbye(id string)
	// Report publishes an event of the device's session, if it has one.
	Report(kind devices.EventKind, fields []byte)
	// Firmware is the version of its firmware, as far as that is known.
	Firmware() string
	// Leave closes the connection of a conversation that ends with it, unless a call
	// runs: then it returns false.
	Leave(c *Conversation) bool
	// Ended removes the conversation from the device.
	Ended(c *Conversation)
}

// AudioBus takes what devices say to whoever listens. Its methods never block
// and keep nothing of a frame.
type AudioBus interface {
	// Topic names where the frames of one device go, for PublishAudio.
	Topic(id devices.ID) string
	// PublishAudio passes one frame on; false if it had to be dropped. seq
	// counts the frames of the conversation with this session id, from 1.
	PublishAudio(topic, session string, seq uint64, f envelope.Frame) bool
}

// Voice takes part in conversations inside this process, such as a bridge to a
// voice server. Its methods must not block. Each conversation has at most one
// Begin and exactly one End. The device does not wait for Begin: by a hair,
// Audio, Message and even End may come before it.
type Voice interface {
	// Begin is called once the device's hello was answered.
	Begin(c *Conversation)
	// Message is a message of the device other than hello and MCP.
	Message(c *Conversation, kind string, msg []byte)
	// Audio is one frame of the device, valid during the call only.
	Audio(c *Conversation, f envelope.Frame)
	// End says that the conversation is over, whoever ended it.
	End(c *Conversation)
}

// AudioPath carries frames to one device: its WebSocket, or a UDP channel.
type AudioPath interface {
	// SendAudio writes one Opus packet within a bounded time and keeps nothing
	// of it. An error means that this packet is lost; the path may live on.
	SendAudio(f envelope.Frame) error
	// Close gives the path up; no frame of the device comes from it afterwards.
	// It may be called any number of times.
	Close()
}
