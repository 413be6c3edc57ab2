package cluster

import (
	"time"

	"fleetd/internal/devices"
)

// Beats tells which nodes have stopped: those whose lease stands still, by a clock
// of this node's own. It is not safe for concurrent use.
//
// One node clears away after another: the first by name of those that live. The
// next one does it a turn later, if the lease is still there by then.
type Beats struct {
	Own   devices.Lease // this node's: its name and its instance
	Every time.Duration // how often each node renews its lease
	Life  time.Duration // of a lease that stands still
	Turn  time.Duration // for the clearing node, before the next one does it

	seen   map[string]sight // by instance
	looked time.Time
}

// sight is when a lease was first seen, and when this beat of it was.
type sight struct {
	beat      int64
	first, at time.Time
}

// Look takes the leases as they are now. lost are those that this node has to clear
// away after; twice says that another node has this one's name.
func (b *Beats) Look(leases []devices.Lease, now time.Time) (lost []devices.Lease, twice bool) {
	// Nobody is lost for what could not be seen: the database was away, or this
	// node did not run.
	blind := now.Sub(b.looked) > 2*b.Every
	b.looked = now
	seen := make(map[string]sight, len(leases))
	before := 0 // living nodes whose turn is before this one's
	for _, l := range leases {
		s, known := b.seen[l.Instance]
		moved := known && s.beat != l.Beat
		if !known {
			s.first = now
		}
		if blind || !known || moved {
			s.beat, s.at = l.Beat, now
		}
		seen[l.Instance] = s
		if l.Node == b.Own.Node {
			twice = twice || moved && l.Instance != b.Own.Instance
		} else if l.Node < b.Own.Node && now.Sub(s.at) < b.Life && now.Sub(s.first) >= b.Life {
			before++
		}
	}
	b.seen = seen
	for _, l := range leases {
		if l.Instance != b.Own.Instance && now.Sub(seen[l.Instance].at) >= b.Life+time.Duration(before)*b.Turn {
			lost = append(lost, l)
		}
	}
	return lost, twice
}

// Lives tells whether a lease, as it is now, is not known to stand still.
func (b *Beats) Lives(l devices.Lease, now time.Time) bool {
	s, known := b.seen[l.Instance]
	return !known || s.beat != l.Beat || now.Sub(s.at) < b.Life
}
