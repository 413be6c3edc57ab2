package mqttdevice_test

import (
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/mqttdevice"
	"fleetd/simulator/firmware"
)

// A rotated device is admitted with its old password until it uses the new one, at the
// listener and at an external broker.
func TestRotatedPassword(t *testing.T) {
	b := open(t)
	source, err := mqttdevice.NewBroker(b.options, fakeBroker(t, 0, 0), clientID(), time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(source.Close)
	b.become(t, id, "c1")
	if err := b.service.Rotate(t.Context(), devicetest.Admin, id, time.Hour); err != nil {
		t.Fatal(err)
	}
	of := func(generation int64) firmware.Login {
		l := b.login(id, "c1")
		l.Password = b.mint.DeviceToken(string(id), "c1", generation)
		return l
	}
	allowed := func(generation int64, want bool) {
		t.Helper()
		l := of(generation)
		if err := source.Authenticate(l.ClientID, l.Username, l.Password); (err == nil) != want {
			t.Errorf("generation %d behind a broker: %v", generation, err)
		}
		d, err := connect("tcp://"+b.address, l, id, false)
		if (err == nil) != want {
			t.Errorf("generation %d: %v", generation, err)
		}
		if err == nil {
			d.Close()
			devicetest.Eventually(t, "the session ended", func() bool {
				v, err := b.service.Get(t.Context(), id)
				return err == nil && v.State != devices.StateOnline
			})
		}
	}
	allowed(0, true)
	allowed(2, false)
	allowed(0, true)
	allowed(1, true)
	allowed(0, false)
	allowed(1, true)
}
