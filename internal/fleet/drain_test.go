package fleet_test

import (
	"encoding/json"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/devicetest"
	"fleetd/internal/envelope"
	"fleetd/internal/fleet"
)

// A draining node accepts no connections and closes its sessions one by one.
func TestDrainSpreadsTheDevices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := devicetest.New().Service(t, fleet.Config{})
		const count = 40
		accept := func(n int) error {
			_, err := s.Accept(devices.Identity{Device: devices.ID(fmt.Sprintf("02:00:00:00:01:%02x", n)), ClientID: "c", Transport: devices.TransportMQTT}, &pipe{script: devicetest.NewScript()})
			return err
		}
		for n := range count {
			if err := accept(n); err != nil {
				t.Fatal(err)
			}
		}
		held := func() (n int) { s.Sessions(func(*session.Session) { n++ }); return n }
		done := make(chan struct{})
		go func() { defer close(done); s.Drain(t.Context(), 20*time.Second) }()
		time.Sleep(10*time.Second - time.Millisecond)
		if n := held(); n < count/2-1 || n > count/2+1 {
			t.Errorf("%d of %d devices are left in the middle of the window", n, count)
		}
		if err := accept(99); devices.AsError(err).Code != devices.CodeUnavailable {
			t.Errorf("a device that connects now: %v", err)
		}
		<-done
		if n := held(); n != 0 {
			t.Errorf("%d devices are left", n)
		}
	})
}

// A drained device first answers its calls, and gets no new ones.
func TestDrainFinishesCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := devicetest.New().Service(t, fleet.Config{})
		p := overMQTT(t, s)
		p.script.Call = func(string, json.RawMessage) string {
			time.Sleep(3 * time.Second)
			return devicetest.True
		}
		call := func() error {
			_, err := s.CallTool(t.Context(), devices.ToolCall{Principal: devicetest.Admin, Device: id, Tool: "self.reboot_later", Arguments: json.RawMessage("{}")})
			return err
		}
		answered := make(chan error, 1)
		go func() { answered <- call() }()
		synctest.Wait()
		left := make(chan struct{})
		go func() { defer close(left); s.Drain(t.Context(), time.Second) }()
		time.Sleep(time.Second)
		if e := devices.AsError(call()); e.Code != devices.CodeUnavailable || e.Sent || e.Part != "node" {
			t.Errorf("a call on a device that is drained: %+v", e)
		}
		if p.reason() != "" {
			t.Errorf("closed as %s with a call in flight", p.reason())
		}
		if err := <-answered; err != nil {
			t.Errorf("the call in flight: %v", err)
		}
		<-left
		if p.reason() != devices.CloseDraining {
			t.Errorf("closed as %q", p.reason())
		}
	})
}

// A device with an active conversation stays until a pause, or the end of the window.
func TestDrainWaitsForAPause(t *testing.T) {
	for _, c := range []struct {
		talks, stays time.Duration
	}{{0, 2 * time.Second}, {5 * time.Second, 7 * time.Second}, {time.Minute, 20 * time.Second}} {
		t.Run(fmt.Sprint(c.talks), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := devicetest.New().Service(t, fleet.Config{})
				p := overMQTT(t, s)
				conversation, _ := p.hello(t)
				begun := time.Now()
				left := make(chan struct{})
				go func() { defer close(left); s.Drain(t.Context(), 20*time.Second) }()
				for time.Since(begun) < c.talks && p.reason() == "" {
					conversation.HandleAudio(envelope.Frame{Opus: []byte{0xb8, 1, 2}})
					time.Sleep(60 * time.Millisecond)
				}
				<-left
				if stayed := time.Since(begun); stayed < c.stays-time.Second || stayed > c.stays+time.Second {
					t.Errorf("it stayed for %v, want %v", stayed, c.stays)
				}
			})
		})
	}
}
