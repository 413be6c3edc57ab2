package session

import (
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
)

// Generations returns the generations of a device, known here or not. Confirmed is the
// highest generation that it has connected with, as recorded on this node.
func (s *Hub) Generations(id devices.ID) devices.Generations {
	own := s.registry.Generations(id)
	if e := s.table.get(id); e != nil {
		e.mu.Lock()
		own.Confirmed = e.confirmed
		e.mu.Unlock()
	}
	return own
}

// Authenticate finds the generation of the presented credentials. proves reports whether
// they are those of a generation; all valid ones are tried, so the time does not depend on
// which one matches. admitted is false for a revoked device, and for a client beside the admitted one.
func (s *Hub) Authenticate(id devices.ID, clientID string, proves func(generation int64) bool) (generation int64, proven, admitted bool) {
	own := s.Generations(id)
	list, n, _ := own.Valid(s.registry.Rotation(), clock.Now())
	for _, g := range list[:n] {
		if proves(g) && !proven {
			generation, proven = g, true
		}
	}
	return generation, proven, !own.Revoked && !s.isReplaced(id, clientID)
}

// isReplaced reports whether another client is admitted. The admission of a device's first client begins no generation, so
// that credentials that were given out without a Client-Id are of the current one.
func (s *Hub) isReplaced(id devices.ID, clientID string) bool {
	return s.registry.Status(id, clientID).Client == registry.ClientOther
}

// Accepts reports whether credentials of this generation are valid.
func (s *Hub) Accepts(id devices.ID, generation int64) bool {
	own := s.Generations(id)
	return own.Accepts(generation, s.registry.Rotation(), clock.Now())
}

// Generation returns the generation of the credentials that a device gets; ok is false if
// none are valid.
func (s *Hub) Generation(id devices.ID) (generation int64, ok bool) {
	own := s.registry.Generations(id)
	return own.Current(s.registry.Rotation()), !own.Revoked
}

// OldestGeneration returns the oldest valid generation, for a connection whose
// credentials are unknown: it must not end the credentials it came with.
func (s *Hub) OldestGeneration(id devices.ID) (generation int64, ok bool) {
	own := s.Generations(id)
	list, n, _ := own.Valid(s.registry.Rotation(), clock.Now())
	generation = list[0]
	for _, g := range list[1:n] {
		generation = min(generation, g)
	}
	return generation, !own.Revoked
}

// Credentials returns which credentials of a device are valid.
func (s *Hub) Credentials(id devices.ID) devices.Credentials {
	own := s.Generations(id)
	list, _, until := own.Valid(s.registry.Rotation(), clock.Now())
	return devices.Credentials{Generation: list[0], PreviousUntil: until}
}
