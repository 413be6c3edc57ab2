package admission

import (
	"context"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
)

// Limits of the grace period in which rotated credentials stay valid. A device gets new ones
// only at its OTA check, when it boots.
const (
	DefaultGrace = 720 * time.Hour
	MinGrace     = time.Minute
	MaxGrace     = 8760 * time.Hour
)

func checkGrace(grace time.Duration) error {
	if grace < MinGrace || grace > MaxGrace {
		return devices.Errorf(devices.CodeBadRequest, "grace must be from %v to %v, for example %v", MinGrace, MaxGrace, DefaultGrace)
	}
	return nil
}

// Rotate gives the device new credentials at its next OTA check. The current ones stay valid
// until it has connected with the new ones, or the grace period ends.
func (a *Admission) Rotate(ctx context.Context, principal access.Principal, id devices.ID, grace time.Duration) error {
	if err := checkGrace(grace); err != nil {
		return err
	}
	row, err := a.ports.Records.Find(ctx, id)
	if err != nil {
		return OrUnknown(id, err)
	}
	until := clock.Now().Add(grace)
	confirmed := max(row.Presence.Generation, a.hub.Generations(id).Confirmed)
	if err := a.registry.Rotate(ctx, principal.Key(), id, until, confirmed, Permit(principal, id)); err != nil {
		return err
	}
	a.log.Info("device's credentials rotated", "device", id, "until", until)
	return nil
}

// RotateAll is Rotate for every device, including devices that join later. If seal is not nil, it also replaces the secret from
// which all credentials derive, and the admin token ends at once; seal returns the sealed secret with a number.
func (a *Admission) RotateAll(ctx context.Context, principal access.Principal, grace time.Duration, seal func(number int64) string) (devices.Rotation, error) {
	if err := checkGrace(grace); err != nil {
		return devices.Rotation{}, err
	}
	next, err := a.registry.RotateFleet(ctx, principal.Key(), func(old devices.Rotation, highest int64) (devices.Rotation, error) {
		now := clock.Now()
		next, err := old.NextGeneration(highest, now, now.Add(grace))
		if err != nil || seal == nil {
			return next, err
		}
		return next.AddSecret(now, seal)
	})
	switch {
	case err != nil:
		return devices.Rotation{}, err
	case seal == nil:
		a.log.Info("the fleet's credentials rotated", "generation", next.Generation, "until", next.PreviousUntil)
	default:
		a.log.Warn("the fleet's secret rotated", "number", next.Secret(), "generation", next.Generation, "until", next.PreviousUntil)
	}
	return next, nil
}

// RotateAdmin replaces the admin token on all nodes.
func (a *Admission) RotateAdmin(ctx context.Context, principal access.Principal) (devices.Rotation, error) {
	next, err := a.registry.RotateFleet(ctx, principal.Key(), func(old devices.Rotation, _ int64) (devices.Rotation, error) {
		old.Admin++
		return old, nil
	})
	if err != nil {
		return devices.Rotation{}, err
	}
	a.log.Warn("the admin token rotated", "number", next.Admin)
	return next, nil
}
