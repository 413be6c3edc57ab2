package speech

import (
	"time"

	"fleetd/internal/jsonspan"
	"fleetd/internal/opus"
	"fleetd/internal/selector"
)

// IdleAfterStop is how long the connection of a device stays that loses its wake
// word in it: from push-to-talk, or the last that was said since. idleLook is how
// often that is looked at.
const (
	IdleAfterStop = 8 * time.Second
	idleLook      = time.Second
)

// isFrom tells whether a firmware is known to be of that version or newer.
func isFrom(firmware, version string) bool {
	order, ok := selector.CompareVersions(firmware, version)
	return ok && order >= 0
}

// losesWakeWord tells whether an idle device takes no wake word while its channel
// is open, as after push-to-talk (application.cc:799 of v2.2.6).
func losesWakeWord(firmware string) bool {
	return isFrom(firmware, "2.2.2") && !isFrom(firmware, "2.4.0")
}

// listens ends the connection of a device in which its wake word would be lost. Over
// UDP the channel itself ends when nothing is said.
func (c *Conversation) listens(msg []byte) {
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
	timer = time.AfterFunc(idleLook, func() {
		if quiet += idleLook; c.Traffic() != before {
			quiet = 0
		}
		over := quiet >= IdleAfterStop && c.line.Leave(c)
		c.mu.Lock()
		defer c.mu.Unlock()
		if !over && !c.ended && c.idle == timer {
			c.idleLocked(quiet)
		}
	})
	c.idle = timer
}

// padded is a packet as the device takes it: firmware to v2.3.0 drops what has fewer
// than 8 bytes over UDP (mqtt_protocol.cc:228 of v1.9.4).
func (c *Conversation) padded(packet []byte) []byte {
	const least = 8
	if c.owned || len(packet) >= least || isFrom(c.line.Firmware(), "2.4.0") {
		return packet
	}
	return opus.Pad(packet, least)
}
