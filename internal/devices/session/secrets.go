package session

import (
	"time"

	"fleetd/internal/devices"
)

// SecretsFor are those of a device, known here or not, with the highest
// generation that it has connected with, as far as this node has met it.
func (s *Hub) SecretsFor(id devices.ID) devices.Secrets {
	own := s.registry.Secrets(id)
	if e := s.table.get(id); e != nil {
		e.mu.Lock()
		own.Confirmed = e.confirmed
		e.mu.Unlock()
	}
	return own
}

// Authenticate finds the generation whose credentials were presented. proves
// tells whether they are those of one; all that are valid are tried, whichever
// fits. admitted is false for a device that was revoked.
func (s *Hub) Authenticate(id devices.ID, proves func(generation int64) bool) (generation int64, proven, admitted bool) {
	own := s.SecretsFor(id)
	list, n, _ := own.Valid(s.registry.Rotation(), time.Now())
	for _, g := range list[:n] {
		if proves(g) && !proven {
			generation, proven = g, true
		}
	}
	return generation, proven, !own.Revoked
}

// Accepts tells whether credentials of this generation are valid.
func (s *Hub) Accepts(id devices.ID, generation int64) bool {
	own := s.SecretsFor(id)
	return own.Accepts(generation, s.registry.Rotation(), time.Now())
}

// Generation is the generation of the credentials that a device is given; ok is
// false if none are valid.
func (s *Hub) Generation(id devices.ID) (generation int64, ok bool) {
	own := s.registry.Secrets(id)
	return own.Current(s.registry.Rotation()), !own.Revoked
}

// OldestGeneration is the oldest that is valid, for a connection of which is not
// known what it presented: it must not end the one that it did.
func (s *Hub) OldestGeneration(id devices.ID) (generation int64, ok bool) {
	own := s.SecretsFor(id)
	list, n, _ := own.Valid(s.registry.Rotation(), time.Now())
	generation = list[0]
	for _, g := range list[1:n] {
		generation = min(generation, g)
	}
	return generation, !own.Revoked
}

// Credentials tells which credentials of a device are valid.
func (s *Hub) Credentials(id devices.ID) devices.Credentials {
	own := s.SecretsFor(id)
	list, _, until := own.Valid(s.registry.Rotation(), time.Now())
	return devices.Credentials{Generation: list[0], PreviousUntil: until}
}
