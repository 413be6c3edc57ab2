package cluster

import (
	"testing"

	"github.com/nats-io/nats.go"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

// What one node decides holds on the other: a device known to one is known to
// both, a revocation ends the session wherever it is, and a forgotten device is
// nobody's.
func TestNewsReachEveryNode(t *testing.T) {
	f := newFleet(t)
	if _, err := f.holding.CheckIn(devices.CheckIn{Device: id, ClientID: "c", Board: "box", Firmware: "2.4.2"}); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "the other node knows the device", func() bool { return f.fwd.IsMember(id) && f.fwd.ClientOf(id) == "c" })
	c := &script{Script: devicetest.NewScript()}
	session, err := f.fwd.Accept(devices.Identity{Device: id, ClientID: "c", Transport: devices.TransportWebSocket, Verified: true}, c)
	if err != nil {
		t.Fatal(err)
	}
	c.session = session
	name := "lamp"
	if err := f.fwd.Edit(id, devices.Edit{Name: &name}); err != nil {
		t.Fatal(err)
	}
	if err := f.holding.Revoke(id); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "the session on the other node ends", func() bool { return !online(f.fwd) && !f.fwd.IsMember(id) })
	if generation, ok := f.fwd.Generation(id); ok || generation != 1 {
		t.Errorf("the other node gives generation %d, %t", generation, ok)
	}
	if _, err := f.fwd.Approve(string(id)); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "both admit it again", func() bool { _, ok := f.holding.Generation(id); return ok && f.holding.IsMember(id) })
	if err := f.holding.Forget(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "nobody knows it", func() bool { return !f.fwd.IsMember(id) && !f.holding.IsMember(id) })
	if generation, _ := f.fwd.Generation(id); generation != 2 {
		t.Errorf("its credentials live on with generation %d", generation)
	}
}

// News of strangers change nothing.
func TestForgedNews(t *testing.T) {
	f := newFleet(t)
	if _, err := f.holding.CheckIn(devices.CheckIn{Device: id, ClientID: "c"}); err != nil {
		t.Fatal(err)
	}
	revoked := []byte(readWire(t, "news-exception").Body)
	for _, signature := range []string{"", "x", f.mint.HopSignature("", verbClaim, revoked)} {
		if err := f.client.PublishMsg(&nats.Msg{Subject: "test.v1.news.evil", Data: revoked, Header: nats.Header{HeaderHop: {signature}}}); err != nil {
			t.Fatal(err)
		}
	}
	devicetest.Eventually(t, "they are refused", func() bool {
		return f.holder.Refused.Get(devices.CodeUnauthorized)+f.holder.Requests.Get(verbNews) >= 3
	})
	// security: N1
	if _, ok := f.holding.Generation(id); !ok {
		t.Error("forged news were believed")
	}
}

// A device that waits speaks one code, whichever node it asks, and any node
// takes it.
func TestCodesAreShared(t *testing.T) {
	f := newFleetWith(t, devices.Config{CallsPerDevice: 1, Handshakes: 4, Approve: true})
	first, err := f.holding.CheckIn(devices.CheckIn{Device: id, ClientID: "c"})
	if err != nil || first.Admitted || first.Code == "" {
		t.Fatalf("%+v, %v", first, err)
	}
	var code string
	devicetest.Eventually(t, "both nodes give the same code", func() bool {
		a, errA := f.holding.CheckIn(devices.CheckIn{Device: id, ClientID: "c"})
		b, errB := f.fwd.CheckIn(devices.CheckIn{Device: id, ClientID: "c"})
		code = a.Code
		return errA == nil && errB == nil && a.Code == b.Code
	})
	if _, err := f.fwd.Approve(code); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "both admit it", func() bool { return f.holding.Activated(id, "c") && f.fwd.Activated(id, "c") })
}

// What a node decides while it has no NATS, the others hear when it is back.
func TestNewsAreToldAgain(t *testing.T) {
	f := newFleet(t)
	if _, err := f.holding.CheckIn(devices.CheckIn{Device: id, ClientID: "c"}); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "the other node knows the device", func() bool { return f.fwd.IsMember(id) })
	away := true
	f.holder.opt.Up = func() bool { return !away }
	if err := f.holding.Revoke(id); err != nil {
		t.Fatal(err)
	}
	if err := f.holder.opt.Conn.Flush(); err != nil {
		t.Fatal(err)
	}
	if generation, ok := f.fwd.Generation(id); !ok || generation != 0 {
		t.Errorf("the other node knows already: generation %d, %t", generation, ok)
	}
	away = false
	f.holder.Reconnected()
	devicetest.Eventually(t, "the other node knows of the revocation", func() bool {
		generation, ok := f.fwd.Generation(id)
		return !ok && generation == 1
	})
}
