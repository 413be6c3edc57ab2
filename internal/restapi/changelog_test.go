package restapi

import (
	"context"
	"slices"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/registry/registrytest"
)

// changeLog reads the log of a ledger in memory.
type changeLog struct{ ledger *registrytest.Ledger }

func (l changeLog) DeviceChanges(_ context.Context, id devices.ID, before int64, limit int) (found []devices.Change, err error) {
	for _, c := range slices.Backward(l.ledger.Log(0)) {
		if c.Device == id && (before == 0 || c.Revision < before) && len(found) < limit {
			found = append(found, c)
		}
	}
	return found, nil
}

func (l changeLog) ChangesSince(_ context.Context, since time.Time, after int64, limit int) (found []devices.Change, err error) {
	for _, c := range l.ledger.Log(after) {
		if !c.At.Before(since) && len(found) < limit {
			found = append(found, c)
		}
	}
	return found, nil
}
