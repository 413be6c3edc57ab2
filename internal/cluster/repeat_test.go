package cluster

import (
	"encoding/json"
	"errors"
	"log/slog"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

// A client of NATS that recorded messages between nodes cannot replay them: a claim
// that was accepted once ends no later session, neither on the node that accepted it
// nor on one that has started since. The same holds for news.
func TestClaimsCannotBeRepeated(t *testing.T) {
	f := newFleet(t)
	messages, err := f.client.SubscribeSync("test.v1.*.far")
	if err != nil {
		t.Fatal(err)
	}
	if err := f.client.Flush(); err != nil {
		t.Fatal(err)
	}
	away := f.at(t, f.fwd) // it connects there
	name := "lamp"
	if err := f.fwd.Edit(t.Context(), devicetest.Admin, id, 0, fleet.Edit{Name: &name}); err != nil {
		t.Fatal(err)
	}
	if w, err := f.fwd.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: "another"}); err != nil || w.Code == "" {
		t.Fatal(w, err)
	}
	var recorded []*nats.Msg
	devicetest.Eventually(t, "a claim, a change and news were recorded", func() bool {
		msg, err := messages.NextMsg(time.Second)
		if err != nil {
			return false
		}
		recorded = append(recorded, msg)
		kinds := map[string]bool{}
		for _, m := range recorded {
			kinds[m.Subject] = true
		}
		return kinds["test.v1.claims.far"] && kinds["test.v1.news.far"] && kinds["test.v1.changes.far"]
	})
	away.session.Close(devices.CloseGone)
	here := f.at(t, f.holding)
	devicetest.Eventually(t, "the connection here is older than the window", func() bool { return here.age() > 2*time.Second })
	claims, news, changes := f.holder.Requests.Get(verbClaim), f.holder.Requests.Get(verbNews), f.holder.Requests.Get(verbChanges)
	for _, i := range rand.Perm(len(recorded)) { // in any order
		m := recorded[i]
		if err := f.client.PublishMsg(&nats.Msg{Subject: m.Subject, Header: m.Header, Data: m.Data}); err != nil {
			t.Fatal(err)
		}
	}
	devicetest.Eventually(t, "each has been processed", func() bool {
		return f.holder.Refused.Get(devices.CodeUnauthorized) == int64(len(recorded)) ||
			f.holder.Requests.Get(verbClaim)+f.holder.Requests.Get(verbNews)+f.holder.Requests.Get(verbChanges) >= claims+news+changes+int64(len(recorded))
	})
	// security: N8
	if f.holder.Requests.Get(verbClaim) != claims || f.holder.Requests.Get(verbNews) != news || f.holder.Requests.Get(verbChanges) != changes {
		t.Errorf("%d claims and %d news were accepted twice", f.holder.Requests.Get(verbClaim)-claims, f.holder.Requests.Get(verbNews)-news)
	}
	if !online(f.holding) {
		t.Error("a replayed claim ended the session")
	}

	// A node that has started since has no record of them, and accepts none.
	conn, err := nats.Connect(f.client.ConnectedUrl())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	late := New(Options{Conn: conn, Prefix: "test.v1", Node: "late", Mint: f.mint, IsConnected: conn.IsConnected, Log: slog.New(slog.DiscardHandler)})
	if err := errors.Join(late.Attach(f.holding), late.Peers().Follow(f.holding.Registry())); err != nil {
		t.Fatal(err)
	}
	defer late.Close()
	devicetest.Eventually(t, "the others have the nonce of the new node", func() bool { return f.far.peers.has(late.nonce) && late.peers.has(f.far.nonce) })
	for _, m := range recorded {
		if err := f.client.PublishMsg(&nats.Msg{Subject: m.Subject, Header: m.Header, Data: m.Data}); err != nil {
			t.Fatal(err)
		}
	}
	devicetest.Eventually(t, "the new node refuses each", func() bool { return late.Refused.Get(devices.CodeUnauthorized) >= int64(len(recorded)) })
	if n := late.Requests.Get(verbClaim) + late.Requests.Get(verbChanges); n != 0 || !online(f.holding) {
		t.Errorf("%d old claims and changes were accepted", n)
	}
	f.far.Claim(devices.Claim{Device: "02:00:00:00:00:77", Kind: devices.ClaimReassert, Node: "far", Epoch: 1})
	devicetest.Eventually(t, "all nodes accept a new claim", func() bool {
		return late.Requests.Get(verbClaim) == 1 && f.holder.Requests.Get(verbClaim) == claims+1
	})
}

// A claim without a stamp is refused, and so is one whose stamp is of another claim.
func TestBroadcastsWithoutAStamp(t *testing.T) {
	f := newFleet(t)
	body, err := json.Marshal(devices.Claim{Device: id, Kind: devices.ClaimReassert, Node: "old", Epoch: 1})
	if err != nil {
		t.Fatal(err)
	}
	taken := f.holder.Requests.Get(verbClaim)
	for i, header := range []nats.Header{nil, {HeaderStamp: {f.far.stamp(id, verbClaim, f.holder.nonce, "far.1", "", append(body, ' '))}}} {
		if err := f.client.PublishMsg(&nats.Msg{Subject: "test.v1.claims.old", Data: body, Header: header}); err != nil {
			t.Fatal(err)
		}
		devicetest.Eventually(t, "it is refused", func() bool { return f.holder.Refused.Get(devices.CodeUnauthorized) == int64(i+1) })
	}
	// security: N8
	if n := f.holder.Requests.Get(verbClaim); n != taken {
		t.Errorf("%d were accepted", n-taken)
	}
}
