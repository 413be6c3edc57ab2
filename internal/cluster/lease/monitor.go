package lease

import (
	"time"

	"fleetd/internal/devices"
)

// Monitor finds nodes that have stopped: those that no longer renew their
// lease, by the clock of this node. It is not safe for concurrent use.
//
// One node cleans up after a stopped node: the live one whose name sorts first.
// If the lease is still there after CleanupDelay, the next one does it. If the node
// has been started again, its new process does it, which alone knows what it holds:
// the times of the two starts are of a clock that may have been stepped in between.
type Monitor struct {
	Self         devices.Lease // this node's name and instance
	Every        time.Duration // how often each node renews its lease
	Lifetime     time.Duration // after which a lease that is not renewed counts as lost
	CleanupDelay time.Duration // the time each node has for the cleanup before the next one takes over

	observed   map[string]observation // by instance
	observedAt time.Time
}

// observation records when a lease was first observed, and when its beat last changed.
type observation struct {
	beat      int64
	first, at time.Time
}

// Observe compares the leases with the previous observation. lost are the leases
// that this node must clean up after; twice reports whether another process uses
// this node's name.
func (b *Monitor) Observe(leases []devices.Lease, now time.Time) (lost []devices.Lease, twice bool) {
	// No lease counts as lost for a time in which leases were not observed, because
	// the database was unreachable or this process did not run.
	blind := now.Sub(b.observedAt) > 2*b.Every
	b.observedAt = now
	seen := make(map[string]observation, len(leases))
	before := 0 // live nodes that clean up before this one
	for _, l := range leases {
		s, known := b.observed[l.Instance]
		moved := known && s.beat != l.Beat
		if !known {
			s.first = now
		}
		if blind || !known || moved {
			s.beat, s.at = l.Beat, now
		}
		seen[l.Instance] = s
		if l.Node == b.Self.Node {
			twice = twice || moved && l.Instance != b.Self.Instance
		} else if l.Node < b.Self.Node && now.Sub(s.at) < b.Lifetime && now.Sub(s.first) >= b.Lifetime {
			before++
		}
	}
	b.observed = seen
	alive := map[string]bool{b.Self.Node: true} // by name
	for _, l := range leases {
		alive[l.Node] = alive[l.Node] || now.Sub(seen[l.Instance].at) < b.Lifetime
	}
	for _, l := range leases {
		stopped, own := now.Sub(seen[l.Instance].at), l.Node == b.Self.Node
		if own && l.Instance != b.Self.Instance && stopped >= b.Lifetime || !alive[l.Node] && stopped >= b.Lifetime+time.Duration(before)*b.CleanupDelay {
			lost = append(lost, l)
		}
	}
	return lost, twice
}

// IsAlive reports whether a lease is not known to have expired.
func (b *Monitor) IsAlive(l devices.Lease, now time.Time) bool {
	s, known := b.observed[l.Instance]
	return !known || s.beat != l.Beat || now.Sub(s.at) < b.Lifetime
}
