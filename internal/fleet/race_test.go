package fleet_test

import (
	"encoding/json"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devices/session"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

// Credentials that end while a connection is being accepted give no session.
func TestCredentialsAreCheckedAtAccept(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		check(t, s, "c1")
		verified := devices.Identity{Device: id, ClientID: "c1", Verified: true}
		if err := revoke(t, s, id); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Accept(verified, &pipe{}); err == nil || devices.AsError(err).Code != devices.CodeUnauthorized {
			t.Errorf("revoked: %v", err)
		}
		if err := s.Forget(t.Context(), devicetest.Admin, id); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Accept(verified, &pipe{}); err == nil || devices.AsError(err).Code != devices.CodeUnauthorized {
			t.Errorf("forgotten: %v", err)
		}
		if d, _, _, held := p.Of(id); d.ID != "" || held != 0 {
			t.Errorf("the forgotten device is back as %+v, held %d", d, held)
		}
		// The snapshot that a node uses without its database includes it.
		dir := t.TempDir()
		p.Service(t, fleet.Config{Dir: dir}).Close()
		p.SetAway(true)
		if generation, _ := p.Service(t, fleet.Config{Dir: dir}).Generation(id); generation != 2 {
			t.Errorf("after a start from the snapshot its generation is %d, want 2", generation)
		}
	})
}

// The list of another device with the same image is shown, but not recorded for this
// one.
func TestGuessedCatalogIsNotRecorded(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		twin := admission.CheckIn{Device: "02:00:00:00:00:02", ClientID: "c", Facts: devices.Facts{Firmware: "2.4.2", ELF: "e"}}
		own := admission.CheckIn{Device: id, ClientID: "c1", Facts: devices.Facts{Firmware: "2.4.2", ELF: "e"}}
		for _, c := range []admission.CheckIn{twin, own} {
			if _, err := s.CheckIn(t.Context(), c); err != nil {
				t.Fatal(err)
			}
		}
		connect(t, s, "c1", devicetest.NewScript())
		ready(t, s)
		x, err := s.Accept(devices.Identity{Device: twin.Device, ClientID: "c"}, &pipe{script: devicetest.NewScript()})
		if err != nil {
			t.Fatal(err)
		}
		x.Close(devices.CloseGone)
		if _, presence, history, _ := p.Of(twin.Device); presence.Catalog != (devices.Hash{}) || len(history) != 0 {
			t.Errorf("recorded %s, history %v", presence.Catalog, history)
		}
	})
}

// Sessions that are accepted and closed concurrently leave no state, and subscribers
// receive `online` before `offline`.
func TestAcceptRacesWithClose(t *testing.T) {
	p := devicetest.New()
	s := p.Service(t, fleet.Config{})
	var wg sync.WaitGroup
	stop := make(chan struct{})
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				s.CloseAll(devices.CloseDead)
			}
		}
	})
	var accepting sync.WaitGroup
	for range 4 {
		accepting.Go(func() {
			for range 300 {
				c := &pipe{script: devicetest.NewScript()}
				x, err := s.Accept(devices.Identity{Device: id, ClientID: "c1"}, c)
				if err != nil {
					continue // closed before it was published
				}
				x.Close(devices.CloseGone)
			}
		})
	}
	accepting.Wait()
	close(stop)
	wg.Wait()
	if _, presence, _, held := p.Of(id); held != 0 || presence.Online {
		t.Errorf("held %d times, online %v", held, presence.Online)
	}
	open := map[devices.Epoch]bool{}
	for _, e := range append(p.Seen(devices.EventOnline), p.Seen(devices.EventOffline)...) {
		open[e.Epoch] = e.Kind == devices.EventOnline
	}
	for epoch, online := range open {
		if online {
			t.Errorf("epoch %d went online and never offline", epoch)
		}
	}
	if n := s.Stats().States.Get(session.State{Transport: devices.TransportWebSocket, MCP: devices.MCPUnknown}); n != 0 {
		t.Errorf("%d sessions are counted, none exists", n)
	}
}

func TestRestartExcusesOnlyADisconnect(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		script := devicetest.NewScript()
		var p *pipe
		script.Call = func(string, json.RawMessage) string { go p.session.Close(devices.CloseRevoked); return "" }
		p = connect(t, s, "c1", script)
		ready(t, s)
		if _, err := call(t, s, "self.reboot", `{}`); err == nil || err.Code != devices.CodeConnectionLost {
			t.Errorf("revoked during a reboot: %+v", err)
		}
	})
}

// A list that changes while it is read is read once more; a device cannot cause endless
// reads.
func TestListChangedDuringAHandshake(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		const changed = `{"type":"mcp","payload":{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}}`
		script := devicetest.NewScript()
		p := connect(t, s, "c1", script)
		ready(t, s)
		for range 20 {
			if err := p.session.HandleControl([]byte(changed)); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		if n := requests(script, "tools/list"); n != 2 {
			t.Errorf("20 notices in a moment made %d readings, want 2 with the first", n)
		}
		time.Sleep(time.Minute)
		if n := requests(script, "tools/list"); n != 3 {
			t.Errorf("%d readings after another minute, want 3: the last notices may be about another change", n)
		}
		if err := p.session.HandleControl([]byte(changed)); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if n := requests(script, "tools/list"); n != 4 {
			t.Errorf("%d readings after one more notice, want 4", n)
		}
	})
}

func TestClaimsOnAMemberEndWithTheirCode(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		check(t, s, "c1")
		check(t, s, "intruder")
		if v := state(t, s); v.State != devices.StatePending {
			t.Errorf("state %s", v.State)
		}
		time.Sleep(admission.CodeLifetime + 2*time.Minute)
		synctest.Wait()
		if v := state(t, s); v.State != devices.StateOffline || !waits(v) {
			t.Errorf("after the code's life: %s %v", v.State, v.Pending)
		}
	})
}
