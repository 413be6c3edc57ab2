package mqttdevice_test

import (
	"net"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/lobby"
	"fleetd/internal/mqttdevice"
)

// Silent connections of one host fill its share and no more: others come in,
// as do devices of that very host once some of the silent are gone, and those
// that are in have no part in it.
func TestSilentConnectionsKeepNobodyOut(t *testing.T) {
	t.Parallel()
	const share = 3
	b := ground(t)
	b.front = mqttdevice.New(b.options)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	guarded := lobby.NewGate(100, share, nil).Guard(l)
	served := make(chan struct{})
	go func() {
		defer close(served)
		b.front.Serve(guarded)
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
	devicetest.Eventually(t, "they are noticed", func() bool { _, waiting := b.front.Connected(); return waiting == share })
	b.raw(t).ended(2 * time.Second)
	if guarded.Crowded.Load() != 1 {
		t.Errorf("%d connections were sent away", guarded.Crowded.Load())
	}
	other := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
	c, err := other.Dial("tcp", b.address)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	newcomer := raw{c, t}
	newcomer.say(b.connectPacket(t, nil))
	if p := newcomer.packet(); p == nil {
		t.Error("a device of another host is kept out")
	}
	devicetest.Eventually(t, "the silent are gone", func() bool { _, waiting := b.front.Connected(); return waiting == 0 })
	b.dial(t, "02:00:00:00:02:00", "c1").Close()
	for _, d := range in {
		d.Close()
	}
}
