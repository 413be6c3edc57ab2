package devices

// Member returns the device's part of the registry, without the generation of its
// credentials.
func (d *Device) Member() Member {
	return Member{ID: d.ID, Admission: d.Admission, ClientID: d.ClientID, Name: d.Name, Labels: d.Labels, Prefer: d.Prefer,
		Serial: d.Serial, FirstSeen: d.FirstSeen, Revision: d.Revision}
}

// Fold applies a change of the device, unless its revision is not newer. It copies the
// labels, so that concurrent readers keep the old ones.
func (d *Device) Fold(c Change) {
	if c.Revision <= d.Revision {
		return
	}
	m := d.Member()
	if err := m.Fold(c); err != nil {
		return // a change of a newer fleetd, which the registry logs
	}
	d.Admission, d.ClientID, d.Name, d.Labels, d.Prefer, d.Serial, d.Revision = m.Admission, m.ClientID, m.Name, m.Labels, m.Prefer, m.Serial, m.Revision
	if !m.FirstSeen.IsZero() {
		d.FirstSeen = m.FirstSeen
	}
}
