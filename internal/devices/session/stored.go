package session

import (
	"time"
	"unique"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
)

// stored is what an entry keeps of a device: its row in the database, or what was reported to this node before that was
// read. It is immutable. It has half the size of a devices.Device.
type stored struct {
	facts                unique.Handle[devices.Facts] // without serial number and time: shared with the devices that report the same
	client, name, serial string
	labels               map[string]string
	admission            devices.Admission
	prefer               devices.Transport
	checkedAt, firstSeen int64 // as clock.Micros
	revision             int64
}

// store replaces what is kept of the device. The caller holds the lock, or has just created the entry.
func (e *entry) store(d *devices.Device) {
	facts := d.Facts
	facts.Serial, facts.CheckedAt = "", time.Time{}
	e.stored.Store(&stored{facts: unique.Make(facts), client: d.ClientID, name: d.Name, serial: d.Serial, labels: d.Labels, admission: d.Admission,
		prefer: d.Prefer, checkedAt: clock.Micros(d.CheckedAt), firstSeen: clock.Micros(d.FirstSeen), revision: d.Revision})
}

// device returns what is kept of the device.
func (e *entry) device() devices.Device {
	s := e.stored.Load()
	d := devices.Device{ID: e.id, ClientID: s.client, Admission: s.admission, Name: s.name, Labels: s.labels, Prefer: s.prefer, Facts: s.facts.Value(),
		FirstSeen: clock.Instant(s.firstSeen), Revision: s.revision}
	d.Serial, d.CheckedAt = s.serial, clock.Instant(s.checkedAt)
	return d
}
