package fleet_test

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

// observer records its notifications.
type observer struct {
	mu     sync.Mutex
	events []string
}

func (o *observer) note(format string, args ...any) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.events = append(o.events, fmt.Sprintf(format, args...))
}

func (o *observer) take() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	events := o.events
	o.events = nil
	return events
}

func (o *observer) Connected(id devices.ID, session string) {
	o.note("connected %s %t", id, session != "")
}
func (o *observer) Ready(id devices.ID, session string) { o.note("ready %s %t", id, session != "") }
func (o *observer) Gone(id devices.ID, _ string, reason devices.CloseReason) {
	o.note("gone %s %s", id, reason)
}
func (o *observer) CheckedIn(f devices.Check) {
	o.note("checked in %s %s %s", f.Device, f.Firmware, f.ELF)
}

// Observers are notified of a device's check-in, of its connection, of its tools once for each connection,
// and of its end; not of a connection that was refused.
func TestLifecycle(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		p.Put(devices.Member{ID: id, ClientID: "c1"})
		var first, second observer
		s.Observe(&first)
		s.Observe(&second)
		if _, err := s.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: "c1", Facts: devices.Facts{Board: "b", Firmware: "2.0.9", ELF: "e1"}}); err != nil {
			t.Fatal(err)
		}
		script := devicetest.NewScript()
		script.Firmware = "2.0.9"
		conn := connect(t, s, "c1", script)
		ready(t, s)
		if _, err := s.Refresh(t.Context(), id, false); err != nil { // lists its tools again
			t.Fatal(err)
		}
		conn.session.Close(devices.CloseGone)
		synctest.Wait()
		want := []string{fmt.Sprintf("checked in %s 2.0.9 e1", id), fmt.Sprintf("connected %s true", id), fmt.Sprintf("ready %s true", id), fmt.Sprintf("gone %s gone", id)}
		for _, o := range []*observer{&first, &second} {
			if got := o.take(); !slices.Equal(got, want) {
				t.Errorf("notified %q, want %q", got, want)
			}
		}
		if _, err := s.Accept(devices.Identity{Device: id, ClientID: "c1", Verified: true, Generation: 7}, idle{}); err == nil {
			t.Fatal("credentials of an unknown generation were accepted")
		}
		if got := first.take(); got != nil {
			t.Errorf("notified %q of a connection that was refused", got)
		}
	})
}

// A device without tools takes messages: observers are notified of it, too, once.
func TestLifecycleWithoutMCP(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		p.Put(devices.Member{ID: id, ClientID: "c1"})
		var o observer
		s.Observe(&o)
		session, err := s.Accept(devices.Identity{Device: id, ClientID: "c1", Verified: true}, idle{})
		if err != nil {
			t.Fatal(err)
		}
		session.StartMCP(devices.FeaturesNone)
		session.StartMCP(devices.FeaturesNone)
		if got, want := o.take(), []string{fmt.Sprintf("connected %s true", id), fmt.Sprintf("ready %s true", id)}; !slices.Equal(got, want) {
			t.Errorf("notified %q, want %q", got, want)
		}
	})
}
