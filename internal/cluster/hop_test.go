package cluster

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

// volumeCall is a call that the scripted device answers.
var volumeCall = devices.ToolCall{Device: id, Tool: "self.audio_speaker.set_volume", Arguments: json.RawMessage(`{"volume":5}`), Principal: devicetest.Admin}

func (f *testFleet) callFar(t *testing.T, timeout time.Duration) (devices.ToolResult, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	return f.fwd.CallTool(ctx, volumeCall)
}

// slow makes the device answer after a while, on a goroutine of its own.
func (f *testFleet) slow(t *testing.T, after time.Duration) {
	t.Helper()
	s := devicetest.NewScript()
	waits := make(chan struct{})
	t.Cleanup(func() { close(waits) })
	s.Call = func(string, json.RawMessage) string {
		select {
		case <-time.After(after):
		case <-waits:
		}
		return devicetest.True
	}
	f.connect(t, s)
}

// A slow call is waited for, since its holder sends acceptances.
func TestSlowCallIsAccepted(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.slow(t, lostAfter+acceptEvery)
	begun := time.Now()
	r, err := f.callFar(t, 30*time.Second)
	if err != nil || r.Node != "holder" || time.Since(begun) < lostAfter {
		t.Errorf("%+v, %v after %v", r, err, time.Since(begun))
	}
}

// A call to a node that is subscribed but does not run ends after lostAfter, not at
// the call's deadline.
func TestFrozenHolder(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	if _, err := f.client.QueueSubscribeSync("test.v1.cmd."+id.Token()+".*", queueGroup); err != nil {
		t.Fatal(err)
	}
	if err := f.client.Flush(); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	_, err := f.callFar(t, 30*time.Second)
	e := devices.AsError(err)
	if e.Code != devices.CodeUnavailable || !e.Sent || e.Outcome != devices.OutcomeUnknown || e.Part != "node" {
		t.Errorf("%+v", e)
	}
	if took := time.Since(begun); took < lostAfter || took > 2*lostAfter {
		t.Errorf("answered after %v", took)
	}
	if f.far.HopsLost.Load() != 1 {
		t.Errorf("%d lost hops are counted", f.far.HopsLost.Load())
	}
}

// Callers that wait for another node get an error at once when the connection is lost.
func TestConnectionLostDuringHop(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.slow(t, 20*time.Second)
	failed := make(chan error, 1)
	go func() {
		_, err := f.callFar(t, 15*time.Second)
		failed <- err
	}()
	devicetest.Eventually(t, "the call is on its way", func() bool { return f.holder.Requests.Get("call") == 1 })
	if err := f.far.opt.Conn.ForceReconnect(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-failed:
		if e := devices.AsError(err); e.Code != devices.CodeUnavailable || !e.Sent || e.Part != "nats" {
			t.Errorf("%+v", e)
		}
	case <-time.After(5 * time.Second):
		t.Error("the caller still waits")
	}
}

// After a stall a node runs no request that arrived during the stall, and all that
// arrive afterwards.
func TestBacklogOfAStallIsRefused(t *testing.T) {
	f := newFleet(t)
	f.connect(t, devicetest.NewScript())
	woken := make(chan struct{}, 1)
	f.holder.opt.OnResume = func() { woken <- struct{}{} }
	ask := func() (devices.Code, error) {
		body := []byte(`{"tool":"self.audio_speaker.set_volume","arguments":{"volume":5}}`)
		msg, err := f.client.RequestMsg(&nats.Msg{Subject: "test.v1.cmd." + id.Token() + ".call", Header: nats.Header{HeaderToken: {f.mint.AdminToken()}}, Data: body}, 5*time.Second)
		if err != nil {
			return "", err
		}
		if p, ok := devices.ParseProblem(msg.Data); ok {
			return p.Code, nil
		}
		return "", nil
	}
	if code, err := ask(); code != "" || err != nil {
		t.Fatalf("before the stall: %q, %v", code, err)
	}
	// A stall: as if the clock had gone on without the process.
	f.holder.stalls.ticked.Add(-int64(2 * stallLimit))
	code, err := ask()
	if err != nil || code != devices.CodeUnavailable && f.holder.Stalls.Load() != 1 { // the watch may have handled the stall already
		t.Fatalf("just after the stall: %q, %v", code, err)
	}
	select {
	case <-woken:
	case <-time.After(5 * time.Second):
		t.Fatal("OnResume was not called")
	}
	devicetest.Eventually(t, "requests are served again", func() bool {
		code, err := ask()
		return code == "" && err == nil
	})
	if f.holder.Stalls.Load() != 1 {
		t.Errorf("%d stalls are counted", f.holder.Stalls.Load())
	}
}

// While NATS is unreachable devices connect and disconnect as usual, without a call
// on the connection, which may block; their subscriptions follow afterwards.
func TestHoldWhileAway(t *testing.T) {
	f := newFleet(t)
	away := false
	f.holder.opt.IsConnected = func() bool { return !away }
	subscribed := func() bool {
		_, err := f.client.Request("test.v1.cmd."+id.Token()+".call", []byte("{}"), time.Second)
		return err == nil
	}
	settled := func() {
		t.Helper()
		f.holder.Reconnected()
		if err := f.holder.opt.Conn.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	away = true
	if err := f.holder.Hold(id); err != nil || subscribed() {
		t.Errorf("held while NATS was unreachable: %v", err)
	}
	f.holder.Claim(devices.Claim{Device: id, Kind: devices.ClaimConnect})
	if n := f.holder.ClaimsLost.Load(); n != 1 {
		t.Errorf("%d claims count as lost", n)
	}
	away = false
	if settled(); !subscribed() {
		t.Error("no node serves a device that connected while NATS was unreachable")
	}
	away = true
	f.holder.Release(id)
	away = false
	if settled(); subscribed() {
		t.Error("a device that disconnected while NATS was unreachable is still served")
	}
	if len(f.holder.holds) != 0 {
		t.Errorf("%d holds are left", len(f.holder.holds))
	}
}

// A call also ends early if its holder dies after it accepted the call.
func TestHolderDiesAfterAcceptance(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	_, err := f.client.QueueSubscribe("test.v1.cmd."+id.Token()+".*", queueGroup, func(msg *nats.Msg) {
		_ = msg.Respond([]byte(`{"accepted":true,"added_later":1}`))
	})
	if err == nil {
		err = f.client.Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	_, err = f.callFar(t, 30*time.Second)
	if e := devices.AsError(err); e.Code != devices.CodeUnavailable || time.Since(begun) > 2*lostAfter {
		t.Errorf("%+v after %v", e, time.Since(begun))
	}
}

// A call that times out in the holder's queue is reported as unsent from another node, too.
func TestTimeoutIsReportedAlike(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	s := devicetest.NewScript()
	s.Call = func(string, json.RawMessage) string { return "" } // never answers
	f.connect(t, s)
	call := func(service *fleet.Service, timeout time.Duration) *devices.Error {
		ctx, cancel := context.WithTimeout(t.Context(), timeout)
		defer cancel()
		_, err := service.CallTool(ctx, volumeCall)
		return devices.AsError(err)
	}
	first := make(chan *devices.Error, 1)
	go func() { first <- call(f.holding, time.Second) }()
	devicetest.Eventually(t, "the device is busy", func() bool { return f.holding.Stats().InFlight.Load() == 1 })
	local, routed := call(f.holding, 100*time.Millisecond), call(f.fwd, 100*time.Millisecond)
	if local.Sent || routed.Sent || local.Code != routed.Code || local.Outcome != routed.Outcome {
		t.Errorf("reported here %+v, from the other node %+v", local, routed)
	}
	<-first
}

// A hop carries everything that REST accepts, byte for byte.
func TestBigHop(t *testing.T) {
	f := newFleet(t)
	s := devicetest.NewScript()
	s.Tools = `[{"name":"echo"}]`
	got := make(chan int, 2)
	s.Call = func(_ string, arguments json.RawMessage) string {
		got <- len(arguments)
		return devicetest.True
	}
	f.connect(t, s)
	for _, text := range []string{strings.Repeat("<>&", 4_000), strings.Repeat("x", maxBody-100)} {
		arguments := json.RawMessage(`{"text":"` + text + `"}`)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		_, err := f.fwd.CallTool(ctx, devices.ToolCall{Principal: devicetest.Admin, Device: id, Tool: "echo", Arguments: arguments})
		cancel()
		if err != nil {
			t.Fatalf("%d bytes: %v", len(arguments), err)
		}
		if n := <-got; n != len(arguments) {
			t.Errorf("%d bytes arrived of %d", n, len(arguments))
		}
	}
}
