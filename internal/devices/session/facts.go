package session

import "fleetd/internal/devices"

// OnFacts handles what a member reported at its OTA check.
func (s *Hub) OnFacts(f devices.Check) {
	s.ports.Records.SaveFacts(f)
	s.observers.Each(func(l Lifecycle) { l.CheckedIn(f) })
	// A device connects within moments of its check, and its row may be read before they are written. They are newer than what
	// is known, whatever the clock of the node that wrote that.
	e, _ := s.table.ensure(f.Device, "")
	s.table.update(e, func(d *devices.Device) { d.Facts = f.Over(d.Facts) })
}
