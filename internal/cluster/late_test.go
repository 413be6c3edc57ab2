package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

// An answer that arrives after its caller's deadline reaches the caller, on the node
// that holds the device as well as one hop away; so does the end of the connection.
// It arrives once, even if the answer is repeated.
func TestLateAnswers(t *testing.T) {
	f := newFleet(t)
	s := devicetest.NewScript()
	s.Tools = `[` + devicetest.Volume + `,{"name":"slow"}]`
	s.Call = func(string, json.RawMessage) string { return "" }
	c := f.dial(t, s)
	for name, node := range map[string]*fleet.Service{"here": f.holding, "one hop away": f.fwd} {
		type outcome struct {
			devices.ToolResult
			err error
		}
		late := make(chan outcome, 2)
		call := func() string {
			t.Helper()
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			_, err := node.CallTool(ctx, devices.ToolCall{Device: id, Tool: "slow", Principal: devicetest.Admin, ID: "call-" + name,
				Late: func(r devices.ToolResult, err error) { late <- outcome{r, err} }})
			if e := devices.AsError(err); code(err) != devices.CodeDeviceTimeout || e.Outcome != devices.OutcomeUnknown {
				t.Fatalf("%s: %v", name, err)
			}
			id := ""
			for _, r := range s.Received() {
				if r.Method == "tools/call" {
					id = string(r.ID)
				}
			}
			return id
		}
		answer := func(id, rest string) {
			t.Helper()
			_ = c.session.HandleControl(fmt.Appendf(nil, `{"session_id":"","type":"mcp","payload":{"jsonrpc":"2.0","id":%s,%s}}`, id, rest)) // a second one is refused
		}
		wait := func() outcome {
			t.Helper()
			select {
			case o := <-late:
				return o
			case <-time.After(10 * time.Second):
				t.Fatalf("%s: nothing arrived", name)
				return outcome{}
			}
		}
		first := call()
		answer(first, `"result":{"content":[{"type":"text","text":"done"}]}`)
		answer(first, `"result":{"content":[]}`)
		if o := wait(); o.err != nil || string(o.Content) != `[{"type":"text","text":"done"}]` {
			t.Errorf("%s: %s, %v", name, o.Content, o.err)
		}
		answer(call(), `"error":{"message":"Unknown tool: slow"}`)
		if o := wait(); code(o.err) != devices.CodeToolUnknown {
			t.Errorf("%s: %v", name, o.err)
		}
		call()
		c.session.Close(devices.CloseGone)
		if o := wait(); code(o.err) != devices.CodeConnectionLost {
			t.Errorf("%s: %v", name, o.err)
		}
		if len(late) > 0 {
			t.Errorf("%s: it arrived twice", name)
		}
		c = f.dial(t, s)
	}
}
