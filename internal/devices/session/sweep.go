package session

import (
	"time"

	"fleetd/internal/devices"
)

// sweepParts is the number of parts of a sweep, one each second.
const sweepParts = 60

// sweep visits every device of this node once a minute, a part of them each second, so that
// there are no bursts of work. It is the node's only timer for devices.
func (s *Hub) sweep() {
	ticker := time.NewTicker(time.Minute / sweepParts)
	defer ticker.Stop()
	again := time.NewTicker(staleRetryInterval)
	defer again.Stop()
	for part := 0; ; {
		select {
		case <-s.tasks.Context().Done():
			return
		case <-again.C:
			s.retryStaleWrites()
		case now := <-ticker.C:
			part = (part + 1) % sweepParts
			full := s.table.count.Load() > maxIdle
			s.table.part(part, sweepParts, func(e *entry) { s.sweepEntry(e, now, full) })
			if part == 0 && s.catalogs.IsOverfull() {
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
	if s.outdated(x) { // the grace period of its credentials is over
		s.run(func() { e.evict(x) }) // so that other devices do not wait for a stuck connection
		return
	}
	x.remind()
	x.mu.Lock()
	due := x.mcp == devices.MCPReady && x.grantEndsLocked(now, grantRenew)
	x.mu.Unlock()
	if due {
		x.startRenewal()
	}
}

// grantEndsLocked reports whether the upload token expires within d.
func (x *Session) grantEndsLocked(now time.Time, d time.Duration) bool {
	return x.grantExpires != 0 && time.Unix(x.grantExpires, 0).Sub(now) < d
}

// startRenewal re-initializes a ready device in a task; after a failure the old token stays
// until the next sweep.
func (x *Session) startRenewal() {
	x.svc.run(func() {
		if err := x.initialize(x.svc.tasks.Context()); err != nil {
			x.svc.log.Debug("upload token not renewed", "device", x.entry.id, "error", err)
		}
	})
}
