package mqttdevice_test

import (
	"net"
	"testing"
	"time"

	"fleetd/internal/connlimit"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/devicetest/client"
	"fleetd/internal/mqttdevice"
)

// Silent connections of one host use up only its own share. Other hosts can connect, and
// so can devices of that host when some silent connections have ended. Authenticated
// connections do not count.
func TestSilentConnectionsOfOneHost(t *testing.T) {
	t.Parallel()
	const share = 3
	b := newBench(t)
	b.front = mqttdevice.New(b.options)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	limited := connlimit.NewLimiter(100, share, nil).Limit(l)
	served := make(chan struct{})
	go func() {
		defer close(served)
		b.front.Serve(limited)
	}()
	b.address = l.Addr().String()
	t.Cleanup(func() {
		_ = l.Close()
		<-served
		b.service.Close()
		b.front.Close()
	})
	var in []devicetest.Device
	for n := range 2 * share {
		in = append(in, b.dial(t, devices.ID("02:00:00:00:01:0"+string(rune('0'+n))), "c1"))
	}
	for range share {
		b.raw(t)
	}
	devicetest.Eventually(t, "they are counted", func() bool { _, waiting := b.front.Connected(); return waiting == share })
	b.raw(t).Ended(2 * time.Second)
	if limited.OverShare.Load() != 1 {
		t.Errorf("%d connections were refused", limited.OverShare.Load())
	}
	next := client.DialRawFrom(t, b.address, net.IPv4(127, 0, 0, 2))
	next.Send(b.connectPacket(t, nil))
	if p := next.Packet(); p == nil {
		t.Error("a device of another host is refused")
	}
	devicetest.Eventually(t, "the silent connections are closed", func() bool { _, waiting := b.front.Connected(); return waiting == 0 })
	b.dial(t, "02:00:00:00:02:00", "c1").Close()
	for _, d := range in {
		d.Close()
	}
}
