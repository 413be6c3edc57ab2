package cluster

import (
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

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

// A device that moves to another node is held only there, also if the clock of the
// node that it leaves is ahead: the winner raises its epoch above the loser's.
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
	f.holding.OnClaim(devices.Claim{Device: id, Kind: devices.ClaimAnswer, Node: "gone", Epoch: first.session.Epoch() + ahead})
	before := first.session.Epoch()
	if before <= ahead {
		t.Fatal("the first session did not raise its epoch")
	}
	devicetest.Eventually(t, "the first connection is older than the window", func() bool { return first.age() > 2*time.Second })
	second := f.at(t, f.fwd)
	devicetest.Eventually(t, "one node holds the device, with the highest epoch", func() bool {
		return !online(f.holding) && online(f.fwd) && second.session.Epoch() > before
	})
	devicetest.Eventually(t, "the device receives a goodbye for its earlier conversation", func() bool {
		return strings.Contains(strings.Join(second.received(), ""), `{"type":"goodbye","session_id":"`+first.session.ID()+`-1"}`)
	})
	flush()
	ctx := t.Context()
	if r, err := f.holding.CallTool(ctx, devices.ToolCall{Principal: devicetest.Admin, Device: id, Tool: "self.audio_speaker.set_volume", Arguments: []byte(`{"volume":1}`)}); err != nil || r.Node != "far" {
		t.Errorf("%+v, %v", r, err)
	}
}

// A reminder reaches the other holder of a device, also on another NATS server,
// and no other node. A recorded reminder is refused.
func TestRemindReachesTheOtherHolder(t *testing.T) {
	t.Parallel()
	first := startNATS(t, server.ClusterOpts{Name: "c", Host: "127.0.0.1", Port: -1})
	second := startNATS(t, server.ClusterOpts{Name: "c", Host: "127.0.0.1", Port: -1}, &url.URL{Scheme: "nats", Host: first.ClusterAddr().String()})
	devicetest.Eventually(t, "the servers form a cluster", func() bool { return first.NumRoutes() > 0 && second.NumRoutes() > 0 })
	f := newFleetOn(t, fleet.Config{CallsPerDevice: 1, Handshakes: 4}, first, second)
	f.at(t, f.holding)
	devicetest.Eventually(t, "the claim of the connection has arrived", func() bool { return f.far.Requests.Get(verbClaim) == 1 })
	// The far node holds it, too, because the claims of both were lost. It receives the
	// reminders of the holder.
	if err := f.far.Hold(id); err != nil {
		t.Fatal(err)
	}
	subject := f.holder.subject(id, verbClaim)
	devicetest.Eventually(t, "both servers have both subscriptions", func() bool {
		return first.GlobalAccount().Interest(subject) == 2 && second.GlobalAccount().Interest(subject) == 2
	})
	recorder, err := f.client.SubscribeSync("test.v1.cmd.>")
	if err != nil {
		t.Fatal(err)
	}
	if err := f.client.Flush(); err != nil {
		t.Fatal(err)
	}
	const reminders = 20
	taken := f.far.Requests.Get(verbClaim)
	for range reminders {
		f.holder.Remind(devices.Claim{Device: id, Kind: devices.ClaimReassert, Node: "holder", Epoch: 1})
	}
	devicetest.Eventually(t, "the other node accepts each reminder", func() bool { return f.far.Requests.Get(verbClaim) == taken+reminders })
	var recorded *nats.Msg // the last one
	for range reminders {
		if recorded, err = recorder.NextMsg(30 * time.Second); err != nil {
			t.Fatal(err)
		}
	}
	f.far.Remind(devices.Claim{Device: id, Kind: devices.ClaimReassert, Node: "far", Epoch: 1 << 60})
	devicetest.Eventually(t, "the higher epoch stays", func() bool {
		f.holder.mu.Lock()
		defer f.holder.mu.Unlock()
		return !online(f.holding) && len(f.holder.holds) == 0
	})
	if err := f.holder.opt.Conn.Flush(); err != nil {
		t.Fatal(err)
	}
	taken = f.far.Requests.Get(verbClaim)
	refused := f.far.Refused.Get(devices.CodeUnauthorized)
	if err := f.client.PublishMsg(&nats.Msg{Subject: recorded.Subject, Header: recorded.Header, Data: recorded.Data}); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "a recorded reminder is refused", func() bool { return f.far.Refused.Get(devices.CodeUnauthorized) == refused+1 })
	// security: N8
	if n := f.far.Requests.Get(verbClaim); n != taken {
		t.Errorf("%d more were accepted", n-taken)
	}
}

// Two connections at the same moment leave one: the higher epoch.
func TestSimultaneousConnections(t *testing.T) {
	for range 20 {
		f := newFleet(t)
		var both sync.WaitGroup
		for _, service := range []*fleet.Service{f.holding, f.fwd} {
			both.Go(func() {
				// The losing session may be closed before Accept returns.
				_, _ = service.Accept(devices.Identity{Device: id, ClientID: "c", Transport: devices.TransportMQTT}, &script{Script: devicetest.NewScript()})
			})
		}
		both.Wait()
		devicetest.Eventually(t, "one node holds the device", func() bool { return online(f.holding) != online(f.fwd) })
	}
}

// After a partition both nodes hold the device; reasserted claims leave one holder.
func TestReassertHeals(t *testing.T) {
	f := newFleet(t)
	f.at(t, f.holding)
	f.at(t, f.fwd)
	devicetest.Eventually(t, "one node holds the device", func() bool { return online(f.holding) != online(f.fwd) })
	f.holding.Reassert()
	f.fwd.Reassert()
	devicetest.Eventually(t, "one node still holds it", func() bool { return online(f.holding) != online(f.fwd) })
}

// Claims of unknown senders change nothing.
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
		t.Error("a forged claim was accepted")
	}
}
