package session

import (
	"reflect"
	"testing"
	"time"

	"fleetd/internal/devices"
)

// An entry keeps all of a device, and shares with other devices what they report alike.
func TestStored(t *testing.T) {
	h := newTable()
	facts := devices.Facts{Board: "box", Firmware: "2.4", ELF: "e1", Chip: "esp32", Language: "de", ActivateV2: true}
	var all [2]*entry
	for i, id := range []devices.ID{"02:00:00:00:00:01", "02:00:00:00:00:02"} {
		d := devices.Device{ID: id, ClientID: "c" + string(id), Admission: devices.AdmissionRevoked, Name: "n", Labels: map[string]string{"room": "lab"},
			Prefer: devices.TransportMQTT, Facts: facts, FirstSeen: time.UnixMicro(17).UTC(), Revision: 9}
		d.Serial, d.CheckedAt = "s"+string(id), time.UnixMicro(18).UTC()
		all[i], _ = h.ensure(id, "c1")
		if got := all[i].device(); got.ClientID != "c1" || got.Admission != devices.AdmissionMember || !got.CheckedAt.IsZero() || !got.FirstSeen.IsZero() {
			t.Errorf("before its row: %+v", got)
		}
		all[i].store(&d)
		if got := all[i].device(); !reflect.DeepEqual(got, d) {
			t.Errorf("%+v, want %+v", got, d)
		}
	}
	if all[0].stored.Load().facts != all[1].stored.Load().facts {
		t.Error("two devices that report the same have a copy each")
	}
}
