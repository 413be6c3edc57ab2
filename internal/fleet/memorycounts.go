package fleet

import (
	"context"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/selector"
)

// CountsInMemory returns the numbers of pending and contested devices, which no row
// contains, of those that the selector matches and the caller may see.
func (s *Service) CountsInMemory(ctx context.Context, principal access.Principal, sel selector.Selector) (pending, contested int64, err error) {
	states := selector.In(selector.FieldState, string(devices.StatePending), string(devices.StateContested))
	l := s.lister(ctx, devices.ListQuery{Select: selector.And(selector.And(principal.Caller.Devices, sel), states), Members: principal.Caller.NeedsLabels()})
	waiting := l.pendingDevices()
	rows, err := l.rowsWithMemoryState()
	if err != nil {
		return 0, 0, err
	}
	for _, row := range rows {
		l.add(listItem{View: s.view(row)})
	}
	for _, v := range waiting {
		l.add(v)
	}
	for _, v := range l.views {
		if v.State == devices.StateContested {
			contested++
		}
		if v.State == devices.StatePending || len(v.Pending) > 0 {
			pending++
		}
	}
	return pending, contested, nil
}
