package session

import "fleetd/internal/devices"

// OnFacts handles what a member reported at its OTA check.
func (s *Hub) OnFacts(f devices.Check) {
	s.ports.Records.SaveFacts(f)
	s.notify(func(l Lifecycle) { l.CheckedIn(f) })
	if e := s.table.get(f.Device); e != nil {
		// They are newer than what is known, whatever the clock of the node that wrote that.
		s.table.update(e, func(d *devices.Device) { d.Facts = f.Over(d.Facts) })
	}
}
