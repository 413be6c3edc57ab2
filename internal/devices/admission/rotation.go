package admission

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

func checkGrace(grace time.Duration) error {
	if grace < MinGrace || grace > MaxGrace {
		return devices.Errorf(devices.CodeBadRequest, "grace must be a duration from %v to %v, such as %v", MinGrace, MaxGrace, DefaultGrace)
	}
	return nil
}

// Rotate has the device get new credentials at its next OTA check. Those it has
// stay valid until it has connected with the new ones, or grace is over.
func (a *Admission) Rotate(ctx context.Context, by access.By, id devices.ID, grace time.Duration) error {
	if err := checkGrace(grace); err != nil {
		return err
	}
	row, err := a.ports.Records.Find(ctx, id)
	if err != nil {
		return OrUnknown(id, err)
	}
	until := time.Now().Add(grace)
	confirmed := max(row.Presence.Generation, a.hub.SecretsFor(id).Confirmed)
	if err := a.registry.Rotate(ctx, by.Key(), id, until, confirmed, Permit(by, id)); err != nil {
		return err
	}
	a.log.Info("device's credentials rotated", "device", id, "until", until)
	return nil
}

// RotateSecret replaces the secret from which all credentials derive: devices get new
// ones as after RotateAll, and the admin token ends at once. seal makes the secret of a
// number, sealed.
func (a *Admission) RotateSecret(ctx context.Context, by access.By, grace time.Duration, seal func(number int64) string) (devices.Rotation, error) {
	if err := checkGrace(grace); err != nil {
		return devices.Rotation{}, err
	}
	next, err := a.registry.RotateFleet(ctx, by.Key(), func(old devices.Rotation, highest int64) (devices.Rotation, error) {
		now := time.Now()
		next, err := old.Raised(highest, now, now.Add(grace))
		if err != nil {
			return old, err
		}
		return next.WithSecret(now, seal)
	})
	if err != nil {
		return devices.Rotation{}, err
	}
	a.log.Warn("the fleet's secret rotated", "number", next.Secret(), "generation", next.Generation, "until", next.PreviousUntil)
	return next, nil
}

// RotateAdmin ends the admin token on all nodes and begins another.
func (a *Admission) RotateAdmin(ctx context.Context, by access.By) (devices.Rotation, error) {
	next, err := a.registry.RotateFleet(ctx, by.Key(), func(old devices.Rotation, _ int64) (devices.Rotation, error) {
		old.Admin++
		return old, nil
	})
	if err != nil {
		return devices.Rotation{}, err
	}
	a.log.Warn("the admin token rotated", "number", next.Admin)
	return next, nil
}

// RotateAll is Rotate for every device, those included that come later.
func (a *Admission) RotateAll(ctx context.Context, by access.By, grace time.Duration) (devices.Rotation, error) {
	if err := checkGrace(grace); err != nil {
		return devices.Rotation{}, err
	}
	next, err := a.registry.RotateFleet(ctx, by.Key(), func(old devices.Rotation, highest int64) (devices.Rotation, error) {
		now := time.Now()
		return old.Raised(highest, now, now.Add(grace))
	})
	if err != nil {
		return devices.Rotation{}, err
	}
	a.log.Info("the fleet's credentials rotated", "generation", next.Generation, "until", next.PreviousUntil)
	return next, nil
}
