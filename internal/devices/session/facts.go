package session

import "fleetd/internal/devices"

// Reported takes what a member said at its OTA check.
func (s *Hub) Reported(f devices.Facts) {
	s.ports.Records.SaveFacts(f)
	s.tell(func(l Lifecycle) { l.CheckedIn(f) })
	if e := s.table.get(f.Device); e != nil {
		e.update(func(d *devices.Device) { s.describe(d, f) })
	}
}

func (s *Hub) describe(d *devices.Device, f devices.Facts) {
	if f.CheckedAt.Before(d.CheckedAt) {
		return
	}
	d.Board, d.Firmware, d.ELF = s.strings.get(f.Board), s.strings.get(f.Firmware), s.strings.get(f.ELF)
	d.Chip, d.Language = s.strings.get(f.Chip), s.strings.get(f.Language)
	d.ActivateV2, d.CheckedAt = f.ActivateV2, f.CheckedAt
	if f.Serial != "" {
		d.Serial = f.Serial
	}
}
