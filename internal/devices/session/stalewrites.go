package session

import (
	"time"

	"fleetd/internal/devices"
)

// staleRetryInterval is how often a session saves its row again after the database refused
// it, until the row is accepted or the session ends.
const staleRetryInterval = 5 * time.Second

// OnStaleWrite handles the stored row that is newer than an online row of this node. It
// does not block.
//
// If the stored row is of an ended session, a dead node, or this node, the session raises
// its epoch above it. If another live node holds the device according to the row, this
// session sends a claim: the other node answers if its session wins. Otherwise this row is
// retried, since the other node's row will change.
func (s *Hub) OnStaleWrite(stored devices.Presence) {
	s.run(func() {
		x := s.table.session(stored.Device)
		if x == nil || x.Epoch() > stored.Epoch || stored.Online && stored.Session == x.id {
			return
		}
		if s.IsHeldElsewhere(stored) {
			s.staleWrites.Store(x, nil)
			x.claim(devices.ClaimReassert)
			return
		}
		if x.raiseEpochAbove(stored.Epoch) && !stored.Online {
			x.announceAgain()
		}
	})
}

// retryStaleWrites saves rows again that the database refused.
func (s *Hub) retryStaleWrites() {
	for refused := range s.staleWrites.Range {
		s.staleWrites.Delete(refused) // first: it may be refused again at once
		x := refused.(*Session)
		x.mu.Lock()
		if x.closed == "" {
			s.ports.Records.SavePresence(x.presenceLocked(true))
		}
		x.mu.Unlock()
	}
}

// Reannounce handles that this node was declared lost while it was alive: it raises the
// epoch of every device that it still holds above the offline row, and publishes the
// device again. Call it after the other nodes had time to answer Reassert: devices that
// they hold are no longer held here then.
func (s *Hub) Reannounce() {
	s.Sessions(func(x *Session) {
		if x.raiseEpochAbove(x.Epoch()) {
			x.announceAgain()
		}
	})
}

// raiseEpochAbove gives the session an epoch above this one, unless it has one already, and
// writes and claims it.
func (x *Session) raiseEpochAbove(epoch devices.Epoch) bool {
	x.entry.mu.Lock()
	x.mu.Lock()
	raise := epoch >= x.epoch && x.closed == ""
	if raise {
		x.epoch = max(epoch, x.entry.lastEpoch) + 1
		x.entry.lastEpoch = x.epoch
	}
	x.entry.mu.Unlock()
	if !raise {
		x.mu.Unlock()
		return false
	}
	presence := x.presenceLocked(true)
	x.mu.Unlock()
	x.svc.ports.Records.SavePresence(presence)
	x.claim(devices.ClaimReassert)
	return true
}

// announceAgain publishes `online` with the session's new epoch: its end was published
// before.
func (x *Session) announceAgain() {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.closed == "" {
		x.publishOnlineLocked()
	}
}
