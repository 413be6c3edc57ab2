package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/devices/session"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

// More calls of one key to silent devices than a node serves at once leave slots for
// every other caller, service or node. The key itself is refused beyond its share,
// over a hop as over NATS.
func TestOneKeyLeavesSlots(t *testing.T) {
	f := newFleet(t)
	f.connect(t, devicetest.NewScript())
	silent := devicetest.NewScript()
	silent.Tools = `[{"name":"silent"}]`
	silent.Call = func(string, json.RawMessage) string { return "" }
	const count, each = 250, 17
	ids := make([]devices.ID, count)
	for n := range ids {
		ids[n] = devices.ID(fmt.Sprintf("02:00:00:00:01:%02x", n))
		c := &script{Script: silent}
		session, err := f.holding.Accept(devices.Identity{Device: ids[n], ClientID: "c", Transport: devices.TransportWebSocket}, c)
		if err != nil {
			t.Fatal(err)
		}
		c.session = session
		session.StartMCP(devices.FeaturesMCP)
	}
	devicetest.Eventually(t, "all tools are ready", func() bool {
		for _, id := range ids {
			if v, err := f.holding.Get(t.Context(), id); err != nil || v.CatalogState != devices.CatalogReady {
				return false
			}
		}
		return true
	})
	if err := f.holder.opt.Conn.Flush(); err != nil {
		t.Fatal(err)
	}
	scopes, err := access.ParseScopes([]string{"tools:call"})
	if err != nil {
		t.Fatal(err)
	}
	flooder, token, err := f.holding.CreateKey(t.Context(), devicetest.Admin, fleet.NewKeyParams{Name: "flooder", Scopes: scopes})
	if err != nil {
		t.Fatal(err)
	}
	_, other, err := f.holding.CreateKey(t.Context(), devicetest.Admin, fleet.NewKeyParams{Name: "other", Scopes: scopes})
	if err != nil {
		t.Fatal(err)
	}
	replies := nats.NewInbox()
	answers := make(chan *nats.Msg, count*each)
	sub, err := f.client.ChanSubscribe(replies, answers)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	for n := range count * each {
		if err := f.client.PublishMsg(&nats.Msg{Subject: f.holder.subject(ids[n%count], "call"), Reply: replies,
			Data: []byte(`{"tool":"silent","timeout":"120s"}`), Header: nats.Header{HeaderToken: []string{token}}}); err != nil {
			t.Fatal(err)
		}
	}
	devicetest.Eventually(t, "each is in progress or was refused", func() bool {
		return f.holding.Limiter().InUse()+len(answers) == count*each && f.holder.Waiting.Load() == 0
	})
	// security: K16
	if taken := f.holding.Limiter().InUse(); taken > dispatch.MaxServing/2 || taken < dispatch.MaxServing/2-1 {
		t.Errorf("one key has %d of %d slots", taken, dispatch.MaxServing)
	}
	if n := f.holding.Limiter().OverShare.Load(); n != uint64(len(answers)) || n == 0 {
		t.Errorf("%d refusals counted, %d answered", n, len(answers))
	}
	if refusal := <-answers; !strings.Contains(string(refusal.Data), `"rate_limited"`) {
		t.Errorf("refused with %s", refusal.Data)
	}

	answer, err := f.client.RequestMsg(&nats.Msg{Subject: f.holder.subject(id, "call"),
		Data: []byte(`{"tool":"self.audio_speaker.set_volume","arguments":{"volume":5}}`), Header: nats.Header{HeaderToken: []string{other}}}, 5*time.Second)
	if err != nil || !strings.Contains(string(answer.Data), `"content"`) {
		t.Errorf("another key over NATS: %v, %v", answer, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	call := volumeCall
	call.Principal = devicetest.Admin
	if _, err := f.fwd.CallTool(ctx, call); err != nil {
		t.Errorf("another caller's hop: %v", err)
	}
	call.Principal = access.Principal{Caller: access.NewCaller(flooder.ID, flooder.Name, flooder.Scopes, flooder.Devices, nil), Via: access.ViaREST}
	if _, err := f.fwd.CallTool(ctx, call); code(err) != devices.CodeRateLimited {
		t.Errorf("the same key's hop: %v", err)
	}
	f.holding.Sessions(func(x *session.Session) { x.Close(devices.CloseGone) }) // ends all calls
	devicetest.Eventually(t, "all slots are free", func() bool { return f.holding.Limiter().InUse() == 0 })
}
