package session

import "fleetd/internal/devices"

// OnFacts handles what a member reported at its OTA check.
func (s *Hub) OnFacts(f devices.Check) {
	s.ports.Records.SaveFacts(f)
	s.notify(func(l Lifecycle) { l.CheckedIn(f) })
	if e := s.table.get(f.Device); e != nil {
		e.update(func(d *devices.Device) { s.applyFacts(d, f) })
	}
}

// applyFacts applies what has just arrived: it is newer than what is known, whatever the clock of the node that
// wrote that.
func (s *Hub) applyFacts(d *devices.Device, f devices.Check) {
	d.Facts = s.shared(f.Over(d.Facts))
}

// shared returns facts whose texts are those of other devices with the same ones, except for the serial number, which is the
// device's own.
func (s *Hub) shared(f devices.Facts) devices.Facts {
	serial := f.Serial
	f.Serial = ""
	f = f.Map(s.strings.get)
	f.Serial = serial
	return f
}
