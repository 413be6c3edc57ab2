package session

import "fleetd/internal/devices"

// Lifecycle observes the devices of this node. Its methods are called with no lock
// held and must not block. Those of one session come in order, but that Gone may come
// before Ready where it ends at that moment.
type Lifecycle interface {
	// Ready: the device's tools were read on this connection for the first time; calls
	// reach it.
	Ready(id devices.ID, session string)
	// Gone: a session that was online has ended.
	Gone(id devices.ID, session string, reason devices.CloseReason)
	// CheckedIn: a member said what it is and which image it runs, at its OTA check or
	// in `initialize`.
	CheckedIn(f devices.Facts)
}

// Observe has another observer told from now on, until the node ends.
func (s *Hub) Observe(l Lifecycle) {
	s.observing.Lock()
	defer s.observing.Unlock()
	next := []Lifecycle{l}
	if old := s.observers.Load(); old != nil {
		next = append(next, *old...)
	}
	s.observers.Store(&next)
}

// tell calls f for each observer.
func (s *Hub) tell(f func(Lifecycle)) {
	if all := s.observers.Load(); all != nil {
		for _, l := range *all {
			f(l)
		}
	}
}
