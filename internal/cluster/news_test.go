package cluster

import (
	"encoding/json"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devices/registry"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

// A decision of one node applies on the other: both have a new device, a revocation
// ends the session on either node, and both remove a forgotten device.
func TestNewsReachEveryNode(t *testing.T) {
	f := newFleet(t)
	if _, err := f.holding.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: "c", Facts: devices.Facts{Board: "box", Firmware: "2.4.2"}}); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "the other node has the device", func() bool { return f.fwd.IsMember(id) && f.fwd.ClientOf(t.Context(), id) == "c" })
	c := &script{Script: devicetest.NewScript()}
	session, err := f.fwd.Accept(devices.Identity{Device: id, ClientID: "c", Transport: devices.TransportWebSocket, Verified: true}, c)
	if err != nil {
		t.Fatal(err)
	}
	c.session = session
	name := "lamp"
	if err := f.fwd.Edit(t.Context(), devicetest.Admin, id, 0, fleet.Edit{Name: &name}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.holding.Revoke(t.Context(), devicetest.Admin, id); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "the session on the other node ends", func() bool { return !online(f.fwd) && !f.fwd.IsMember(id) })
	devicetest.Eventually(t, "the other node has the new generation", func() bool {
		generation, ok := f.fwd.Generation(id) // part of the change itself; the revocation applies before
		return !ok && generation == 1
	})
	if _, err := f.fwd.Approve(t.Context(), devicetest.Admin, string(id), ""); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "both admit it again", func() bool { _, ok := f.holding.Generation(id); return ok && f.holding.IsMember(id) })
	if err := f.holding.Forget(t.Context(), devicetest.Admin, id); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "both nodes have removed it, and its credentials are invalid", func() bool {
		generation, _ := f.fwd.Generation(id) // a change of its own, after that of the admission
		return !f.fwd.IsMember(id) && !f.holding.IsMember(id) && generation == 2
	})
}

// Changes of unknown senders are refused.
func TestForgedChanges(t *testing.T) {
	f := newFleet(t)
	if _, err := f.holding.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: "c"}); err != nil {
		t.Fatal(err)
	}
	next := f.holding.Registry().Position().Revision + 1
	body, err := json.Marshal(registryMessage{Node: "evil", Changes: []devices.Change{{Revision: next, ID: "forged", Device: id, Aspect: devices.AspectAdmission, Value: []byte(`"revoked"`), Who: "evil", At: time.Now()}},
		Revocation: &registry.Revocation{ID: "forged", Device: id, Who: "evil", At: time.Now()}})
	if err != nil {
		t.Fatal(err)
	}
	sent := int64(0)
	for _, verb := range []string{verbChanges, verbRevoke} {
		for _, signature := range []string{"", "x", f.mint.HopSignature("", verbClaim, string(body))} {
			sent++
			stamp := f.holder.nonce + " evil.1 " + signature
			if err := f.client.PublishMsg(&nats.Msg{Subject: "test.v1." + verb + ".evil", Data: body, Header: nats.Header{HeaderStamp: {stamp}}}); err != nil {
				t.Fatal(err)
			}
		}
	}
	devicetest.Eventually(t, "they are refused", func() bool {
		return f.holder.Refused.Get(devices.CodeUnauthorized)+f.holder.Requests.Get(verbChanges)+f.holder.Requests.Get(verbRevoke) >= sent
	})
	// security: N1
	if _, ok := f.holding.Generation(id); !ok || !f.holding.IsMember(id) || f.holding.Registry().Position().Revision >= next {
		t.Error("forged changes were accepted")
	}
}

// A pending device gets the same code from every node, and every node accepts it.
func TestCodesAreShared(t *testing.T) {
	f := newFleetWith(t, fleet.Config{CallsPerDevice: 1, Handshakes: 4, Approve: true})
	first, err := f.holding.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: "c"})
	if err != nil || first.Admitted || first.Code == "" {
		t.Fatalf("%+v, %v", first, err)
	}
	var code string
	devicetest.Eventually(t, "both nodes give the same code", func() bool {
		a, errA := f.holding.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: "c"})
		b, errB := f.fwd.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: "c"})
		code = a.Code
		return errA == nil && errB == nil && a.Code == b.Code
	})
	if _, err := f.fwd.Approve(t.Context(), devicetest.Admin, code, ""); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "both admit it", func() bool { return f.holding.IsActivated(id, "c") && f.fwd.IsActivated(id, "c") })
}

// The other nodes read decisions that a node made without NATS from the database;
// pending devices are sent to them when NATS is back.
func TestNewsAreResent(t *testing.T) {
	f := newFleetWith(t, fleet.Config{CallsPerDevice: 1, Handshakes: 4, Approve: true})
	f.ports.Put(devices.Member{ID: id, ClientID: "c"})
	for _, s := range []*fleet.Service{f.holding, f.fwd} {
		devicetest.Refresh(t, s)
	}
	away := true
	f.holder.opt.IsConnected = func() bool { return !away }
	if _, err := f.holding.Revoke(t.Context(), devicetest.Admin, id); err != nil {
		t.Fatal(err)
	}
	const other = devices.ID("02:00:00:00:00:77")
	if w, err := f.holding.CheckIn(t.Context(), admission.CheckIn{Device: other, ClientID: "c"}); err != nil || w.Code == "" {
		t.Fatal(w, err)
	}
	if err := f.holder.opt.Conn.Flush(); err != nil {
		t.Fatal(err)
	}
	if generation, ok := f.fwd.Generation(id); !ok || generation != 0 || f.fwd.IsKnown(other) {
		t.Errorf("the other node has it already: generation %d, %t", generation, ok)
	}
	devicetest.Refresh(t, f.fwd)
	if generation, ok := f.fwd.Generation(id); ok || generation != 1 {
		t.Errorf("the other node has read generation %d, %t", generation, ok)
	}
	away = false
	f.holder.Reconnected()
	devicetest.Eventually(t, "the other node has the pending device", func() bool { return f.fwd.IsKnown(other) })
	sent, err := f.client.SubscribeSync("test.v1.news.far")
	if err != nil {
		t.Fatal(err)
	}
	if err := f.client.Flush(); err != nil {
		t.Fatal(err)
	}
	f.far.Reconnected()
	if _, err := sent.NextMsg(5 * time.Second); err != nil {
		t.Errorf("no nonce was sent: %v", err)
	}
	if msg, err := sent.NextMsg(300 * time.Millisecond); err == nil {
		t.Errorf("news of another node were repeated: %s", msg.Data)
	}
}

// Without the database a revocation applies on every node that confirms it, and so
// does the end of a key.
func TestRevocationWithoutTheDatabase(t *testing.T) {
	f := newFleet(t)
	if _, err := f.holding.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: "c"}); err != nil {
		t.Fatal(err)
	}
	devicetest.Refresh(t, f.fwd)
	c := &script{Script: devicetest.NewScript()}
	session, err := f.fwd.Accept(devices.Identity{Device: id, ClientID: "c", Transport: devices.TransportWebSocket, Verified: true}, c)
	if err != nil {
		t.Fatal(err)
	}
	c.session = session
	f.ports.SetAway(true)
	r, err := f.holding.Revoke(t.Context(), devicetest.Admin, id)
	if err != nil || r.Recorded || !slices.Equal(r.Nodes, []string{"holder", "far"}) {
		t.Fatalf("%+v, %v", r, err)
	}
	devicetest.Eventually(t, "the session on the other node ends", func() bool { return !online(f.fwd) && !f.fwd.IsMember(id) })
	if _, err := f.fwd.Accept(devices.Identity{Device: id, ClientID: "c", Transport: devices.TransportWebSocket, Verified: true}, c); devices.AsError(err).Code != devices.CodeUnauthorized {
		t.Errorf("it connects again: %v", err)
	}
	f.ports.SetAway(false)
	for _, s := range []*fleet.Service{f.holding, f.fwd} {
		devicetest.Refresh(t, s)
	}
	devicetest.Eventually(t, "it is written, once", func() bool {
		m, _ := f.ports.Ledger.Member(id)
		return m.Admission == devices.AdmissionRevoked && m.Generation == 1 && len(f.holding.Registry().PendingRevocations())+len(f.fwd.Registry().PendingRevocations()) == 0
	})
}
