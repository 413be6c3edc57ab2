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

// A device that reads nothing is ended as slow, which is not the normal end,
// and others do not notice.
func TestSlowReader(t *testing.T) {
	t.Parallel()
	b := open(t)
	r := b.up(t)
	if err := r.Conn.(*net.TCPConn).SetReadBuffer(4096); err != nil {
		t.Fatal(err)
	}
	text := `{"type":"custom","payload":{"x":"` + strings.Repeat("x", 30_000) + `"}}`
	stop := make(chan struct{})
	stopped := make(chan struct{})
	go func() { // one after the other: what waits never fills the queue
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
			}
			if b.service.SendMessage(t.Context(), devices.Message{By: devicetest.Admin, Device: id, Body: []byte(text)}) != nil {
				return
			}
		}
	}()
	begun := time.Now()
	devicetest.Eventually(t, "it ends", func() bool { return b.service.Stats().Closed.Get(devices.CloseSlow) == 1 })
	close(stop)
	<-stopped
	if took := time.Since(begun); took < mqttdevice.WriteTimeout {
		t.Errorf("given up after %v", took)
	}
	if n := b.service.Stats().Closed.Get(devices.CloseGone); n != 0 {
		t.Errorf("%d connections count as gone", n)
	}
}
