package mqttdevice_test

import (
	"net"
	"strings"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/mqttdevice"
)

// A device that reads nothing is closed with the reason slow, and other devices are not
// affected.
func TestSlowReader(t *testing.T) {
	t.Parallel()
	b := open(t)
	r := b.up(t)
	r.Packet() // the handshake's request: nobody else writes from now on
	send := func(text string) error {
		return b.service.SendMessage(t.Context(), devices.Message{Principal: devicetest.Admin, Device: id, Body: []byte(text)})
	}
	// The task that wrote the request may not have noted yet that the queue is empty: it would go on with what is queued meanwhile, and
	// the queue would fill at once. Once a message was written by its sender, all others are.
	for range 50 {
		if err := send(`{"type":"custom","payload":{}}`); err != nil {
			t.Fatal(err)
		}
		r.Packet()
	}
	if err := r.Conn.(*net.TCPConn).SetReadBuffer(4096); err != nil {
		t.Fatal(err)
	}
	text := `{"type":"custom","payload":{"x":"` + strings.Repeat("x", 30_000) + `"}}`
	stop := make(chan struct{})
	stopped := make(chan struct{})
	go func() { // one after the other
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
			}
			if send(text) != nil {
				return
			}
		}
	}()
	begun := time.Now()
	devicetest.Eventually(t, "it ends", func() bool { return b.service.Stats().Closed.Get(devices.CloseSlow) == 1 })
	close(stop)
	<-stopped
	if took := time.Since(begun); took < mqttdevice.WriteTimeout {
		t.Errorf("closed after %v", took)
	}
	if n := b.service.Stats().Closed.Get(devices.CloseGone); n != 0 {
		t.Errorf("%d connections count as gone", n)
	}
}
