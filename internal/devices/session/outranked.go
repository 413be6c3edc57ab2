package session

import (
	"sync"
	"time"

	"fleetd/internal/devices"
)

// outrankedEvery is how often a session whose row the database refused saves
// it again, until the row is taken or the session gives way.
const outrankedEvery = 5 * time.Second

// outranked are the sessions whose last row changed nothing in the database.
type outranked struct {
	mu       sync.Mutex
	sessions map[*Session]struct{}
}

func (o *outranked) add(x *Session) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.sessions == nil {
		o.sessions = map[*Session]struct{}{}
	}
	o.sessions[x] = struct{}{}
}

func (o *outranked) take() map[*Session]struct{} {
	o.mu.Lock()
	defer o.mu.Unlock()
	taken := o.sessions
	o.sessions = nil
	return taken
}

// Outranked says what the database holds in front of a row of this node that
// says the device is online. It does not block.
//
// A row of the past, of a dead node, or of this node itself is risen above. A
// row of another living node that says it holds the device is held against the
// session: the other hears our claim, and answers if its own stands. What it
// does not answer is tried again, for its own row will change.
func (s *Hub) Outranked(stored devices.Presence) {
	s.run(func() {
		x := s.table.session(stored.Device)
		if x == nil || x.Epoch() > stored.Epoch || stored.Online && stored.Session == x.id {
			return
		}
		if s.Elsewhere(stored) {
			s.outranked.add(x)
			x.claim(devices.ClaimReassert)
			return
		}
		if x.riseAbove(stored.Epoch) && !stored.Online {
			x.announceAgain()
		}
	})
}

// saveOutranked tries the rows again that the database refused.
func (s *Hub) saveOutranked() {
	for x := range s.outranked.take() {
		x.mu.Lock()
		if x.closed == "" {
			s.ports.Records.SavePresence(x.presenceLocked(true))
		}
		x.mu.Unlock()
	}
}

// Reappear makes good that this node was declared lost while it lived: every
// device it still holds is put above the row that says it is offline, and
// announced again. Call it when the other nodes had time to answer Reassert:
// what they hold by then is not ours any more.
func (s *Hub) Reappear() {
	s.Sessions(func(x *Session) {
		if x.riseAbove(x.Epoch()) {
			x.announceAgain()
		}
	})
}

// riseAbove gives the session an epoch above this one, if it is not there
// already, and says so to the database and the other nodes.
func (x *Session) riseAbove(epoch devices.Epoch) bool {
	x.entry.mu.Lock()
	x.mu.Lock()
	behind := epoch >= x.epoch && x.closed == ""
	if behind {
		x.epoch = max(epoch, x.entry.lastEpoch) + 1
		x.entry.lastEpoch = x.epoch
	}
	x.entry.mu.Unlock()
	if !behind {
		x.mu.Unlock()
		return false
	}
	presence := x.presenceLocked(true)
	x.mu.Unlock()
	x.svc.ports.Records.SavePresence(presence)
	x.claim(devices.ClaimReassert)
	return true
}

// announceAgain publishes `online` under the session's new epoch: somebody had
// published its end.
func (x *Session) announceAgain() {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.closed == "" {
		x.publishOnlineLocked()
	}
}
