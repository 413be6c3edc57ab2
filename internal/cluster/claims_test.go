package cluster

import (
	"strings"
	"sync"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/devices/speech"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
	"fleetd/internal/hello"
)

// at connects the device to one of the two nodes, over UDP.
func (f *testFleet) at(t *testing.T, service *fleet.Service) *script {
	t.Helper()
	c := &script{Script: devicetest.NewScript()}
	session, err := service.Accept(devices.Identity{Device: id, ClientID: "c", Transport: devices.TransportMQTT}, c)
	if err != nil {
		t.Fatal(err)
	}
	c.session = session
	if _, err := session.OpenAudio(hello.Device{}, hello.TransportUDP, func(*speech.Conversation) (speech.AudioPath, error) { return voice{c}, nil }); err != nil {
		t.Fatal(err)
	}
	session.StartMCP(devices.FeaturesMCP)
	return c
}

func online(service *fleet.Service) bool {
	held := false
	service.Sessions(func(*session.Session) { held = true })
	return held
}

// A device that moves to another node is held there alone, also if the node
// that it leaves has a clock ahead: the winner rises above the loser.
func TestTakeoverBetweenNodes(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	first := f.at(t, f.holding)
	flush := func() {
		for _, l := range []*Link{f.holder, f.far} {
			if err := l.opt.Conn.Flush(); err != nil {
				t.Fatal(err)
			}
		}
	}
	flush()
	const ahead = devices.Epoch(5 * time.Second / time.Microsecond)
	f.holding.Claimed(devices.Claim{Device: id, Kind: devices.ClaimAnswer, Node: "gone", Epoch: first.session.Epoch() + ahead})
	before := first.session.Epoch()
	if before <= ahead {
		t.Fatal("the first session did not rise")
	}
	devicetest.Eventually(t, "the first connection is no newcomer", func() bool { return first.age() > 2*time.Second })
	second := f.at(t, f.fwd)
	devicetest.Eventually(t, "the device is held by one node, above all before", func() bool {
		return !online(f.holding) && online(f.fwd) && second.session.Epoch() > before
	})
	devicetest.Eventually(t, "the device is told goodbye of what it left behind", func() bool {
		return strings.Contains(strings.Join(second.received(), ""), `{"type":"goodbye","session_id":"`+first.session.ID()+`-1"}`)
	})
	flush()
	ctx := t.Context()
	if r, err := f.holding.CallTool(ctx, devices.ToolCall{By: devicetest.Admin, Device: id, Tool: "self.audio_speaker.set_volume", Arguments: []byte(`{"volume":1}`)}); err != nil || r.Node != "far" {
		t.Errorf("%+v, %v", r, err)
	}
}

// Two connections at the same moment leave one: the higher epoch.
func TestSimultaneousConnections(t *testing.T) {
	for range 20 {
		f := newFleet(t)
		var both sync.WaitGroup
		for _, service := range []*fleet.Service{f.holding, f.fwd} {
			both.Go(func() {
				// The loser may hear of it before it is even told that it is in.
				_, _ = service.Accept(devices.Identity{Device: id, ClientID: "c", Transport: devices.TransportMQTT}, &script{Script: devicetest.NewScript()})
			})
		}
		both.Wait()
		devicetest.Eventually(t, "one node holds the device", func() bool { return online(f.holding) != online(f.fwd) })
	}
}

// After a partition both nodes hold the device; what they say when it has
// healed leaves one.
func TestReassertHeals(t *testing.T) {
	f := newFleet(t)
	f.at(t, f.holding)
	f.at(t, f.fwd)
	devicetest.Eventually(t, "one node holds the device", func() bool { return online(f.holding) != online(f.fwd) })
	f.holding.Reassert()
	f.fwd.Reassert()
	devicetest.Eventually(t, "one node still holds it", func() bool { return online(f.holding) != online(f.fwd) })
}

// Claims of strangers change nothing.
func TestForgedClaim(t *testing.T) {
	f := newFleet(t)
	c := f.at(t, f.holding)
	forged := `{"kind":"connect","device":"` + string(id) + `","node":"evil","epoch":9999999999999999}`
	if err := f.client.Publish("test.v1.claims.evil", []byte(forged)); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "it is refused", func() bool { return f.holder.Refused.Get(devices.CodeUnauthorized) == 1 })
	// security: N1
	if !online(f.holding) || c.session.Epoch() > 9999999999999999 {
		t.Error("a forged claim was believed")
	}
}
