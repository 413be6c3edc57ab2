package wsdevice_test

import (
	"strings"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/wsdevice"
)

// A device that sends messages is not idle, even if nothing is sent to it; a noop resets
// its timeout, which counts what it receives.
func TestActiveDeviceIsNotIdle(t *testing.T) {
	b := open(t, func(o *wsdevice.Options) { o.CloseIdle = true })
	d := b.dial(t, id, "c1")
	defer d.Close()
	if err := d.Send(`{"type":"hello","version":1,"transport":"websocket"}`); err != nil {
		t.Fatal(err)
	}
	if text, err := d.Receive(); err != nil || !strings.Contains(text, "hello") {
		t.Fatalf("%q, %v", text, err)
	}
	talk := func(n int) {
		t.Helper()
		if err := d.SendAudio(devicetest.Packet(n)); err != nil {
			t.Fatal(err)
		}
		devicetest.Eventually(t, "the packet is received", func() bool { return len(b.Frames()) == n })
	}
	for n := 1; n <= 8; n++ { // 160 s
		talk(n)
		b.front.Age(20 * time.Second)
	}
	if text, err := d.Receive(); err != nil || text != `{"type":"noop"}` {
		t.Fatalf("%q, %v", text, err)
	}
	if v, err := b.service.Get(t.Context(), id); err != nil || v.State != devices.StateOnline {
		t.Fatalf("a device that sends audio is %s, %v", v.State, err)
	}
	b.front.Age(wsdevice.IdleAfter)
	for {
		text, err := d.Receive()
		if err != nil {
			break
		}
		if text != `{"type":"noop"}` {
			t.Errorf("the device receives %s", text)
		}
	}
	devicetest.Eventually(t, "the idle device is closed", func() bool {
		return len(b.Seen(devices.EventOffline)) == 1 && strings.Contains(string(b.Seen(devices.EventOffline)[0].Fields), string(devices.CloseIdle))
	})
}
