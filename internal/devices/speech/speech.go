// Package speech carries conversations between a device and the services that take part in
// them, from hello to goodbye: audio frames up, and audio down at the speed of playback.
//
// Lock order: Conversation.mu comes last; it is not held while a Line, an AudioPath or a
// Voice is called.
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

// Service is shared by the conversations of a node.
type Service struct {
	opt   Options
	stats AudioStats
}

// Options configure a Service; Voice may be nil.
type Options struct {
	Audio AudioBus
	Voice Voice
	Guard Guard
	Tasks *tasks.Group
	Log   *slog.Logger
}

// New returns a Service.
func New(o Options) *Service { return &Service{opt: o} }

// Stats returns the counters.
func (s *Service) Stats() *AudioStats { return &s.stats }

// HasVoice reports whether a voice service takes part in the conversations of this node.
func (s *Service) HasVoice() bool { return s.opt.Voice != nil }

// Drop counts a frame without an open conversation.
func (s *Service) Drop() { s.stats.AudioDrops.Add(AudioNoChannel, 1) }

// AudioStats counts audio. It is safe for concurrent use.
type AudioStats struct {
	AudioFrames atomic.Uint64 // received from devices
	AudioSent   atomic.Uint64 // sent to devices
	// MessageDrops counts messages of a conversation without a connection.
	MessageDrops   atomic.Uint64
	SilentChannels atomic.Uint64 // opened, but no packet arrived
	Conversations  atomic.Int64  // open now
	AudioDrops     counters.Map[AudioDrop]
}

// Line is the device of a conversation, on its current connection. Its methods are safe for
// concurrent use.
type Line interface {
	// Device returns the id.
	Device() devices.ID
	// Connected reports whether it has a connection.
	Connected() bool
	// SendControl writes a message; without a connection it returns devices.ErrNoHolder.
	SendControl(msg []byte) error
	// Goodbye sends the device the end of the conversation with this id.
	Goodbye(id string)
	// Report publishes an event of the device's session, if it has one.
	PublishEvent(kind devices.EventKind, fields []byte)
	// Firmware returns the version of its firmware, if known.
	Firmware() string
	// IsBusy reports whether a call is running on the device, or it has no connection.
	IsBusy() bool
	// CloseIdle ends a conversation in which nothing happens: its connection, if the conversation ends
	// with that, else the conversation by a goodbye.
	CloseIdle(c *Conversation)
	// RemoveConversation removes the conversation from the device.
	RemoveConversation(c *Conversation)
}

// Guard judges what voice services send.
type Guard interface {
	// PermitSpeech returns an error if a voice service may not send a device a message of
	// this type, and records the message; err is the error of the message itself.
	PermitSpeech(principal access.Principal, id devices.ID, kind string, err error) error
}

// AudioBus publishes the audio of devices. Its methods never block and keep no part of a
// frame.
type AudioBus interface {
	// Topic returns the topic of one device's frames, for PublishAudio.
	Topic(id devices.ID) string
	// PublishAudio publishes one frame. It reports false if it was dropped. seq counts the
	// frames of the conversation with this session id, from 1.
	PublishAudio(topic, session string, seq uint64, f envelope.Frame) bool
}

// Voice takes part in conversations inside this process, such as a bridge to a voice server.
// Its methods must not block. Each conversation has at most one Begin and exactly one End.
// The device does not wait for Begin, so Audio, Message and even End may be called slightly
// earlier.
type Voice interface {
	// Begin is called after the device's hello was answered.
	Begin(c *Conversation)
	// Message handles a message of the device other than hello and MCP.
	Message(c *Conversation, kind string, msg []byte)
	// Audio handles one frame of the device, which is valid only during the call.
	Audio(c *Conversation, f envelope.Frame)
	// End is called when the conversation has ended, for whatever reason.
	End(c *Conversation)
}

// AudioPath sends frames to one device: over its WebSocket, or a UDP channel.
type AudioPath interface {
	// SendAudio writes one Opus packet within a limited time and does not keep it. An error
	// means that this packet is lost; the path may still work.
	SendAudio(f envelope.Frame) error
	// Close closes the path; no frame of the device arrives from it afterwards. It may be
	// called repeatedly.
	Close()
}
