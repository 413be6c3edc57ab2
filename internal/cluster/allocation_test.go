//go:build !race

// The race detector allocates, so this budget is held without it.

package cluster

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

// TestHopAllocations holds a hop to its budget: what both nodes allocate for a routed
// call, less the call itself at its holder and what the NATS client and the server
// in this process take for a bare request with its answer.
func TestHopAllocations(t *testing.T) {
	f := newFleet(t)
	f.connect(t, devicetest.NewScript())
	callThrough := func(node *fleet.Service) func() {
		return func() {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			if _, err := node.CallTool(ctx, devices.ToolCall{Principal: devicetest.Admin, Device: id, Tool: "self.audio_speaker.set_volume",
				Arguments: json.RawMessage(`{"volume":50}`)}); err != nil {
				t.Error(err)
			}
		}
	}
	if _, err := f.holder.opt.Conn.Subscribe("echo", func(msg *nats.Msg) { _ = msg.Respond(msg.Data) }); err != nil {
		t.Fatal(err)
	}
	answered := make(chan *nats.Msg, 1)
	if _, err := f.far.opt.Conn.ChanSubscribe("answer", answered); err != nil {
		t.Fatal(err)
	}
	if err := f.holder.opt.Conn.Flush(); err != nil {
		t.Fatal(err)
	}
	request := &nats.Msg{Subject: "echo", Reply: "answer", Data: []byte(`{"tool":"self.audio_speaker.set_volume","arguments":{"volume":50}}`), Header: nats.Header{HeaderStamp: {"stamp"}, HeaderCaller: {"caller"}}}
	routed, local := testing.AllocsPerRun(500, callThrough(f.fwd)), testing.AllocsPerRun(500, callThrough(f.holding))
	bare := testing.AllocsPerRun(500, func() {
		if err := f.far.opt.Conn.PublishMsg(request); err != nil {
			t.Error(err)
		}
		<-answered
	})
	t.Logf("%.0f allocations: %.0f of the call at its holder, %.0f of NATS", routed, local, bare)
	if ours := routed - local - bare; ours > 48 {
		t.Errorf("%.0f allocations are the hop's, want at most 48", ours)
	}
}
