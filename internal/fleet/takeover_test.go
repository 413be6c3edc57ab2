package fleet_test

import (
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

// A device that reconnects in a loop is accepted a few times at once, then once a second,
// and keeps its session.
func TestReconnectsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ports := devicetest.New()
		s := ports.Service(t, fleet.Config{Reconnects: 20})
		accept := func() error {
			_, err := s.Accept(devices.Identity{Device: id, ClientID: "c", Transport: devices.TransportMQTT}, &pipe{script: devicetest.NewScript()})
			return err
		}
		let := 0
		for range 500 {
			if accept() == nil {
				let++
			}
		}
		if let != 20 {
			t.Errorf("%d of 500 connections at once were accepted", let)
		}
		if err := accept(); devices.AsError(err).Code != devices.CodeDeviceBusy {
			t.Errorf("refused with %v", err)
		}
		if v := state(t, s); v.State != devices.StateOnline {
			t.Errorf("the device is %s", v.State)
		}
		time.Sleep(5 * time.Second) // fake time
		for let = 0; accept() == nil; let++ {
		}
		if let != 5 {
			t.Errorf("%d connections after five seconds", let)
		}
		if err := accept(); err == nil {
			t.Error("a second one at once")
		}
		if n := s.Stats().Connects.Get(devices.TransportMQTT); n != 25 {
			t.Errorf("%d sessions", n)
		}
	})
}
