package devices

// Member is what is decided of the device, without the generation of its
// credentials.
func (d *Device) Member() Member {
	return Member{ID: d.ID, Admission: d.Admission, ClientID: d.ClientID, Name: d.Name, Labels: d.Labels, Prefer: d.Prefer,
		Serial: d.Serial, FirstSeen: d.FirstSeen, Revision: d.Revision}
}

// Fold applies one change of the device, unless it is part of the state already.
// The labels of before stay as they are for those that read them.
func (d *Device) Fold(c Change) {
	if c.Revision <= d.Revision {
		return
	}
	m := d.Member()
	if err := m.Fold(c); err != nil {
		return // of a newer fleetd; the log of the registry says so
	}
	d.Admission, d.ClientID, d.Name, d.Labels, d.Prefer, d.Serial, d.Revision = m.Admission, m.ClientID, m.Name, m.Labels, m.Prefer, m.Serial, m.Revision
	if !m.FirstSeen.IsZero() {
		d.FirstSeen = m.FirstSeen
	}
}
