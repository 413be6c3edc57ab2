package fleet

import (
	"context"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
)

// Bounds of the time for which credentials stay valid that were rotated. A
// device learns new ones at its OTA check alone, and checks only when it boots.
const (
	DefaultGrace = 720 * time.Hour
	MinGrace     = time.Minute
	MaxGrace     = 8760 * time.Hour
)

// secretsFor are those of a device, known here or not, with the highest
// generation that it has connected with, as far as this node has met it.
func (s *Service) secretsFor(id devices.ID) devices.Secrets {
	own := s.registry.Secrets(id)
	if e := s.hub.get(id); e != nil {
		e.mu.Lock()
		own.Confirmed = e.confirmed
		e.mu.Unlock()
	}
	return own
}

// Authenticate finds the generation whose credentials were presented. proves
// tells whether they are those of one; all that are valid are tried, whichever
// fits. admitted is false for a device that was revoked.
func (s *Service) Authenticate(id devices.ID, proves func(generation int64) bool) (generation int64, proven, admitted bool) {
	own := s.secretsFor(id)
	list, n, _ := own.Valid(s.registry.Rotation(), time.Now())
	for _, g := range list[:n] {
		if proves(g) && !proven {
			generation, proven = g, true
		}
	}
	return generation, proven, !own.Revoked
}

// Accepts tells whether credentials of this generation are valid.
func (s *Service) Accepts(id devices.ID, generation int64) bool {
	own := s.secretsFor(id)
	return own.Accepts(generation, s.registry.Rotation(), time.Now())
}

// Generation is the generation of the credentials that a device is given; ok is
// false if none are valid.
func (s *Service) Generation(id devices.ID) (generation int64, ok bool) {
	own := s.registry.Secrets(id)
	return own.Current(s.registry.Rotation()), !own.Revoked
}

// OldestGeneration is the oldest that is valid, for a connection of which is not
// known what it presented: it must not end the one that it did.
func (s *Service) OldestGeneration(id devices.ID) (generation int64, ok bool) {
	own := s.secretsFor(id)
	list, n, _ := own.Valid(s.registry.Rotation(), time.Now())
	generation = list[0]
	for _, g := range list[1:n] {
		generation = min(generation, g)
	}
	return generation, !own.Revoked
}

func (s *Service) credentials(id devices.ID) devices.Credentials {
	own := s.secretsFor(id)
	list, _, until := own.Valid(s.registry.Rotation(), time.Now())
	return devices.Credentials{Generation: list[0], PreviousUntil: until}
}

func checkGrace(grace time.Duration) error {
	if grace < MinGrace || grace > MaxGrace {
		return devices.Errorf(devices.CodeBadRequest, "grace must be a duration from %v to %v, such as %v", MinGrace, MaxGrace, DefaultGrace)
	}
	return nil
}

// Rotate has the device get new credentials at its next OTA check. Those it has
// stay valid until it has connected with the new ones, or grace is over.
func (s *Service) Rotate(ctx context.Context, by access.By, id devices.ID, grace time.Duration) error {
	if err := checkGrace(grace); err != nil {
		return err
	}
	row, err := s.ports.Records.Find(ctx, id)
	if err != nil {
		return orUnknown(id, err)
	}
	until := time.Now().Add(grace)
	confirmed := max(row.Presence.Generation, s.secretsFor(id).Confirmed)
	if err := s.registry.Rotate(ctx, by.Key(), id, until, confirmed, permit(by, id)); err != nil {
		return err
	}
	s.log.Info("device's credentials rotated", "device", id, "until", until)
	return nil
}

// RotateAll is Rotate for every device, those included that come later.
func (s *Service) RotateAll(ctx context.Context, by access.By, grace time.Duration) (devices.Rotation, error) {
	if err := checkGrace(grace); err != nil {
		return devices.Rotation{}, err
	}
	next, err := s.registry.RotateAll(ctx, by.Key(), grace)
	if err != nil {
		return devices.Rotation{}, err
	}
	s.log.Info("the fleet's credentials rotated", "generation", next.Generation, "until", next.PreviousUntil)
	return next, nil
}
