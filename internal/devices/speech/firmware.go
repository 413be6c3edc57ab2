package speech

import (
	"time"

	"fleetd/internal/jsonspan"
	"fleetd/internal/opus"
	"fleetd/internal/selector"
)

// How long the channel of a device that loses its wake word stays open after push-to-talk, without anything that
// belongs to an answer: a message or packet in either direction, an answer that is played, a call.
const (
	// IdleAfterStop is the time in which an answer must show itself: nothing tells how long a chat server thinks.
	IdleAfterStop = 8 * time.Second
	// IdleAfterAnswer is the time after `tts stop`, the end of the answer, over UDP. It is one interval of the check:
	// a voice service that answers in several speeches begins the next one at once. Over WebSocket the device cannot
	// be reached after the end of its connection, so that IdleAfterStop holds there, too.
	IdleAfterAnswer = idlePoll
	idlePoll        = time.Second
)

// isFrom reports whether a firmware is known to be this version or newer.
func isFrom(firmware, version string) bool {
	order, ok := selector.CompareVersions(firmware, version)
	return ok && order >= 0
}

// losesWakeWord reports whether an idle device does not react to its wake word while its
// channel is open, as after push-to-talk (application.cc:799 of v2.2.6).
func losesWakeWord(firmware string) bool {
	return isFrom(firmware, "2.2.2") && !isFrom(firmware, "2.4.0")
}

// onListen schedules the end of the channel of a device that would lose its wake word in it: of the connection over
// WebSocket, of the conversation over UDP.
func (c *Conversation) onListen(msg []byte) {
	state, _ := jsonspan.StringBytes(jsonspan.Member(msg, "state"))
	idle := string(state) == "stop" && losesWakeWord(c.line.Firmware())
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.idle != nil {
		c.idle.Stop()
		c.idle = nil
	}
	if idle && !c.ended {
		c.downLocked().answered = false
		c.idleLocked(0)
	}
}

// idleLocked ends the channel when nothing of an answer was seen for long enough. quiet is for how long that is so.
func (c *Conversation) idleLocked(quiet time.Duration) {
	before := c.activityLocked()
	var timer *time.Timer
	timer = time.AfterFunc(idlePoll, func() {
		busy := c.line.IsBusy()
		c.mu.Lock()
		wait := IdleAfterStop
		if c.down.answered && !c.owned {
			wait = IdleAfterAnswer
		}
		if quiet += idlePoll; busy || c.activityLocked() != before || c.down.isPlaying(time.Now()) {
			quiet = 0
		}
		c.mu.Unlock()
		over := quiet >= wait
		if over {
			c.line.CloseIdle(c)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if !over && !c.ended && c.idle == timer {
			c.idleLocked(quiet)
		}
	})
	c.idle = timer
}

// activityLocked counts frames and messages in both directions.
func (c *Conversation) activityLocked() uint64 { return c.Traffic() + c.down.messages }

// padded returns a packet that the device accepts: over UDP, firmware up to v2.3.0 drops
// packets of less than 8 bytes (mqtt_protocol.cc:228 of v1.9.4).
func (c *Conversation) padded(packet []byte) []byte {
	const least = 8
	if c.owned || len(packet) >= least || isFrom(c.line.Firmware(), "2.4.0") {
		return packet
	}
	return opus.Pad(packet, least)
}
