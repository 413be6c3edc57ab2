package speech

import (
	"time"

	"fleetd/internal/jsonspan"
	"fleetd/internal/opus"
	"fleetd/internal/selector"
)

// IdleAfterStop is how long the connection of a device that loses its wake word stays open
// after push-to-talk or the last traffic since. idlePoll is the interval of the check.
const (
	IdleAfterStop = 8 * time.Second
	idlePoll      = time.Second
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

// onListen schedules the end of the connection of a device that would lose its wake word.
// Over UDP the channel itself ends without traffic.
func (c *Conversation) onListen(msg []byte) {
	state, _ := jsonspan.StringBytes(jsonspan.Member(msg, "state"))
	idle := c.owned && string(state) == "stop" && losesWakeWord(c.line.Firmware())
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.idle != nil {
		c.idle.Stop()
		c.idle = nil
	}
	if idle && !c.ended {
		c.idleLocked(0)
	}
}

func (c *Conversation) idleLocked(quiet time.Duration) {
	before := c.Traffic()
	var timer *time.Timer
	timer = time.AfterFunc(idlePoll, func() {
		if quiet += idlePoll; c.Traffic() != before {
			quiet = 0
		}
		over := quiet >= IdleAfterStop && c.line.CloseIdle(c)
		c.mu.Lock()
		defer c.mu.Unlock()
		if !over && !c.ended && c.idle == timer {
			c.idleLocked(quiet)
		}
	})
	c.idle = timer
}

// padded returns a packet that the device accepts: over UDP, firmware up to v2.3.0 drops
// packets of less than 8 bytes (mqtt_protocol.cc:228 of v1.9.4).
func (c *Conversation) padded(packet []byte) []byte {
	const least = 8
	if c.owned || len(packet) >= least || isFrom(c.line.Firmware(), "2.4.0") {
		return packet
	}
	return opus.Pad(packet, least)
}
