package store

import "fleetd/internal/devices"

// OnOutranked has stored called with each presence that stands against a row which
// reports a device as online: that row changed nothing. It runs on the writer's
// goroutine and must not block.
func OnOutranked(stored func(devices.Presence)) Option {
	return func(s *Store) { s.onOutranked = stored }
}
