package store

import "fleetd/internal/devices"

// OnStaleWrite sets a function that is called with each stored presence that is newer than a
// row with the device online, which was ignored. It runs on the writer's goroutine and must
// not block.
func OnStaleWrite(stored func(devices.Presence)) Option {
	return func(s *Store) { s.onOutranked = stored }
}
