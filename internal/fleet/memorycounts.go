package fleet

import (
	"context"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/selector"
)

// CountsInMemory are the numbers of devices in the states that no row has, of those
// that the selector selects and the caller may see.
func (s *Service) CountsInMemory(ctx context.Context, by access.By, sel selector.Selector) (pending, contested int64, err error) {
	states := selector.In(selector.FieldState, string(devices.StatePending), string(devices.StateContested))
	l := s.lister(ctx, devices.ListQuery{Select: selector.And(selector.And(by.Who.Devices, sel), states), Members: by.Who.NeedsLabels()})
	waiting := l.waiting()
	rows, err := l.inMemory()
	if err != nil {
		return 0, 0, err
	}
	for _, row := range rows {
		l.add(placed{View: s.view(row)})
	}
	for _, v := range waiting {
		l.add(v)
	}
	for _, v := range l.views {
		if v.State == devices.StateContested {
			contested++
		} else {
			pending++
		}
	}
	return pending, contested, nil
}
