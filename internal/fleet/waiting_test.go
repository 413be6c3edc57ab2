package fleet_test

import (
	"context"
	"encoding/json"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

// A call that waits for its turn is checked with the rules of that time, including its
// URL.
func TestRulesChangeWhileACallWaits(t *testing.T) {
	guarded(t, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service, asked *atomic.Int32, conn *pipe) {
		const shown = "http://192.0.2.1/"
		devicetest.AllowURLs(t, s, shown)
		conn.script.Call = func(string, json.RawMessage) string { asked.Add(1); return "" }
		var all sync.WaitGroup
		all.Go(func() { _, _ = callBy(t, s, devicetest.Admin, "self.lamp.set", `{"on":true}`, "") }) // occupies the device for 10 s
		synctest.Wait()
		wait := func(tool, args, rule string) {
			all.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				_, err := s.CallTool(ctx, devices.ToolCall{Principal: devicetest.Admin, Device: id, Tool: tool, Arguments: json.RawMessage(args)})
				// security: K11
				if e := devices.AsError(err); e.Code != devices.CodeToolDenied || e.Rule != rule {
					t.Errorf("%s: %v", tool, err)
				}
			})
		}
		wait("self.lamp.set", `{"on":false}`, "policy:dark")
		wait("self.screen.preview_image", `{"url":"`+shown+`a.jpg"}`, access.RuleURL)
		synctest.Wait()
		devicetest.SetPolicy(t, s, access.Policy{Rules: []access.Rule{{Name: "dark", Tools: []string{"self.lamp.*"}, Action: access.Deny}}})
		all.Wait()
		// security: K11
		if n := asked.Load(); n != 1 {
			t.Errorf("the device received %d calls", n)
		}
	})
}

// A device runs one call at a time.
func TestCallsTakeTurns(t *testing.T) {
	guarded(t, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service, asked *atomic.Int32, conn *pipe) {
		var running, most atomic.Int32
		conn.script.Call = func(string, json.RawMessage) string {
			most.Store(max(most.Load(), running.Add(1)))
			time.Sleep(time.Second)
			running.Add(-1)
			asked.Add(1)
			return devicetest.True
		}
		var all sync.WaitGroup
		set := func() {
			if _, err := callBy(t, s, devicetest.Admin, "self.lamp.set", `{"on":true}`, ""); err != nil {
				t.Error(err)
			}
		}
		for range 3 {
			all.Go(set)
		}
		time.Sleep(1500 * time.Millisecond) // the second call runs
		all.Go(set)
		all.Wait()
		set()
		if most.Load() != 1 || asked.Load() != 5 {
			t.Errorf("%d calls at once, %d of 5 made", most.Load(), asked.Load())
		}
	})
}
