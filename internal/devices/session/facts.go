package session

import "fleetd/internal/devices"

// OnFacts handles what a member reported at its OTA check.
func (s *Hub) OnFacts(f devices.Facts) {
	s.ports.Records.SaveFacts(f)
	s.notify(func(l Lifecycle) { l.CheckedIn(f) })
	if e := s.table.get(f.Device); e != nil {
		e.update(func(d *devices.Device) { s.applyFacts(d, f) })
	}
}

// applyFacts applies what has just arrived: it is newer than what is known, whatever the clock of the node that
// wrote that.
func (s *Hub) applyFacts(d *devices.Device, f devices.Facts) {
	f = f.Over(d.Facts())
	d.Board, d.Firmware, d.ELF = s.strings.get(f.Board), s.strings.get(f.Firmware), s.strings.get(f.ELF)
	d.Chip, d.Language = s.strings.get(f.Chip), s.strings.get(f.Language)
	d.Serial, d.ActivateV2, d.CheckedAt = f.Serial, f.ActivateV2, f.CheckedAt
}
