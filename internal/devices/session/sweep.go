package session

import (
	"time"

	"fleetd/internal/devices"
)

// sweepParts is in how many parts a sweep is spread over its minute.
const sweepParts = 60

// sweep is the node's one timer. Over a minute it comes to every device that this
// node has to do with, a part of them each second, so that a node with many never
// has a burst of work.
func (s *Hub) sweep() {
	ticker := time.NewTicker(time.Minute / sweepParts)
	defer ticker.Stop()
	again := time.NewTicker(outrankedEvery)
	defer again.Stop()
	for part := 0; ; {
		select {
		case <-s.tasks.Context().Done():
			return
		case <-again.C:
			s.saveOutranked()
		case now := <-ticker.C:
			part = (part + 1) % sweepParts
			full := s.table.count.Load() > maxIdle
			s.table.part(part, sweepParts, func(e *entry) { s.sweepEntry(e, now, full) })
			if part == 0 && s.catalogs.Many() {
				s.evictCatalogs()
			}
		}
	}
}

func (s *Hub) sweepEntry(e *entry, now time.Time, full bool) {
	if c := e.conversation.Load(); c != nil {
		c.Sweep()
	}
	x := e.session.Load()
	if x == nil {
		s.expireIdle(e, now, full)
		return
	}
	if s.outdated(x) { // the grace of its credentials is over
		s.run(e.evict) // the next device does not wait for a stuck connection
		return
	}
	x.remind()
	x.mu.Lock()
	due := x.mcp == devices.MCPReady && !x.grantExpires.IsZero() && x.grantExpires.Sub(now) < grantRenew
	x.mu.Unlock()
	if due {
		x.startRenewal()
	}
}

// startRenewal re-initializes a ready device in the background; a failure
// leaves the old token until the next sweep.
func (x *Session) startRenewal() {
	x.svc.run(func() {
		if err := x.initialize(x.svc.tasks.Context()); err != nil {
			x.svc.log.Debug("upload token not renewed", "device", x.who.Device, "error", err)
		}
	})
}
