package session

import "fleetd/internal/devices"

// Lifecycle observes the devices of this node. Its methods are called without a lock and
// must not block. Those of one session are called in order, except that Gone may come
// before Ready if the session ends at that moment.
type Lifecycle interface {
	// Connected: the device is connected, and takes messages.
	Connected(id devices.ID, session string)
	// Ready: the device's tools were listed for the first time on this connection, so that it
	// can be called; or it announced that it has none, and takes messages alone.
	Ready(id devices.ID, session string)
	// Gone: a session that was published as online has ended.
	Gone(id devices.ID, session string, reason devices.CloseReason)
	// CheckedIn: a member reported its board and image, at its OTA check or in
	// `initialize`.
	CheckedIn(f devices.Check)
}

// Observe adds an observer, until the node stops.
func (s *Hub) Observe(l Lifecycle) { s.observers.Add(l) }
