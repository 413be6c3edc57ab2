package fleettest

// Fifteen traps into which other servers for this device fell, by their numbers
// in the project's list: here those of MCP and of sessions, in traps_wire_test.go
// those of MQTT and UDP, in traps_node_test.go those that need a whole node.

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/devicetest"
	"fleetd/internal/devicetest/client"
	"fleetd/internal/fleet"
	"fleetd/internal/mcpclient"
)

const (
	trapID  = devices.ID("02:00:00:00:aa:01")
	otherID = devices.ID("02:00:00:00:aa:02")
)

// idsOf returns the ids of a script's requests, in order.
func idsOf(t *testing.T, script *devicetest.Script, method string) (ids []int64) {
	t.Helper()
	for _, r := range script.Received() {
		if r.ID == nil || method != "" && r.Method != method {
			continue
		}
		id, err := strconv.ParseInt(string(r.ID), 10, 32)
		if err != nil {
			t.Fatalf("request id %s: %v", r.ID, err)
		}
		ids = append(ids, id)
	}
	return ids
}

// The answer to a call that was given up comes on the device's next
// connection, or while another call waits: it answers nothing.
func TestTrap01LateReplyMatchesNothing(t *testing.T) {
	t.Parallel()
	for name, next := range map[string]func(t *testing.T, b *bench, first *device, script *devicetest.Script) (*bench, *device){
		"same connection": func(_ *testing.T, b *bench, first *device, _ *devicetest.Script) (*bench, *device) { return b, first },
		"next connection": func(t *testing.T, b *bench, first *device, script *devicetest.Script) (*bench, *device) {
			first.Close()
			return b, b.device(t, trapID, script)
		},
		"next transport": func(t *testing.T, b *bench, _ *device, script *devicetest.Script) (*bench, *device) {
			s := dialSocket(t, b.websocket, string(trapID), b.token(trapID), script)
			devicetest.Eventually(t, "the socket takes over", func() bool {
				v := b.view(t, trapID)
				return v.Presence.Transport == devices.TransportWebSocket && v.CatalogState == devices.CatalogReady
			})
			return b, s
		},
		"next node": func(t *testing.T, _ *bench, _ *device, script *devicetest.Script) (*bench, *device) {
			b := open(t)
			return b, b.device(t, trapID, script)
		},
	} {
		t.Run(name, func(t *testing.T) {
			started, release := make(chan struct{}), make(chan struct{})
			answer := func(silent int32) *devicetest.Script { // so many calls, then one that waits
				script := devicetest.NewScript()
				var calls atomic.Int32
				script.Call = func(string, json.RawMessage) string {
					if calls.Add(1) <= silent {
						return ""
					}
					close(started)
					<-release
					return devicetest.True
				}
				return script
			}
			first, second := answer(1), answer(0)
			if name == "same connection" {
				second = first
			}
			b := open(t)
			d := b.device(t, trapID, first)
			if _, err := b.call(trapID, volume, `{"volume":1}`, 200*time.Millisecond); err == nil || err.Code != devices.CodeDeviceTimeout {
				t.Fatalf("the first call: %v", err)
			}
			given := idsOf(t, first, "tools/call")[0]
			before := idsOf(t, first, "")
			b, on := next(t, b, d, second)
			type outcome struct {
				r   devices.ToolResult
				err *devices.Error
			}
			done := make(chan outcome, 1)
			go func() {
				r, err := b.call(trapID, volume, `{"volume":2}`, 10*time.Second)
				done <- outcome{r, err}
			}()
			<-started
			late := fmt.Sprintf(`{"session_id":"","type":"mcp","payload":{"jsonrpc":"2.0","id":%d,"result":{"content":[{"type":"text","text":"late"}],"isError":false}}}`, given)
			if err := on.Send(late); err != nil {
				t.Fatal(err)
			}
			devicetest.Eventually(t, "the late answer is counted", func() bool {
				n := int64(0)
				b.service.Stats().Deviations.Each(func(k session.DeviationKey, count int64) {
					if k.Kind == mcpclient.DeviationLateReply || k.Kind == mcpclient.DeviationForeignReply {
						n += count
					}
				})
				return n == 1
			})
			close(release)
			if o := <-done; o.err != nil || string(o.r.Content) != `[{"type":"text","text":"true"}]` {
				t.Errorf("the second call: %s, %v", o.r.Content, o.err)
			}
			for _, script := range []*devicetest.Script{first, second} {
				// A probe that goes beside a call may overtake it on its way to the device.
				ids := idsOf(t, script, "")
				slices.Sort(ids)
				if len(slices.Compact(ids)) != len(idsOf(t, script, "")) {
					t.Errorf("ids %v: one of them twice", idsOf(t, script, ""))
				}
			}
			if second != first {
				for _, id := range idsOf(t, second, "") {
					if slices.Contains(before, id) {
						t.Errorf("id %d was used on both connections", id)
					}
				}
			}
		})
	}
}

// The answer is there before the request has been written, and it is not lost.
// A caller that waits when the connection ends gets an error with the reason.
func TestTrap02WaiterBeforeWrite(t *testing.T) {
	t.Parallel()
	s := devicetest.New().Service(t, fleet.Config{})
	p := pipeTo(t, s, trapID, devicetest.NewScript())
	p.session.StartMCP(devices.FeaturesMCP)
	for range 20 {
		if r, err := call(s, trapID, volume, `{"volume":1}`, 5*time.Second); err != nil || r.IsError {
			t.Fatalf("%+v, %v", r, err)
		}
	}
	for reason, code := range map[devices.CloseReason]devices.Code{devices.CloseGone: devices.CodeConnectionLost, devices.CloseDead: devices.CodeConnectionLost,
		devices.CloseSuperseded: devices.CodeSuperseded, devices.CloseRevoked: devices.CodeConnectionLost} {
		script := devicetest.NewScript()
		started := make(chan struct{})
		script.Call = func(string, json.RawMessage) string { close(started); return "" }
		p := pipeTo(t, s, trapID, script)
		p.session.StartMCP(devices.FeaturesMCP)
		done := make(chan *devices.Error, 1)
		begun := time.Now()
		go func() {
			_, err := call(s, trapID, volume, `{"volume":1}`, 10*time.Second)
			done <- err
		}()
		<-started
		p.session.Close(reason)
		if err := <-done; err == nil || err.Code != code || !err.Sent || err.Outcome != devices.OutcomeUnknown || time.Since(begun) > 5*time.Second {
			t.Errorf("%s: %+v after %v, want %s", reason, err, time.Since(begun), code)
		}
	}
}

// A list without end is cut, flagged, and usable.
func TestTrap03CursorGuard(t *testing.T) {
	t.Parallel()
	tool := func(n int, pad int) string {
		return fmt.Sprintf(`{"name":"self.t%d","description":"%s","inputSchema":{"type":"object","properties":{}}}`, n, strings.Repeat("x", pad))
	}
	for name, c := range map[string]struct {
		page  func(n int) (tools, next string)
		pages int // at most
	}{
		"each page has a new cursor": {func(n int) (string, string) { return tool(n, 1), fmt.Sprint("c", n+1) }, mcpclient.MaxPages},
		"the last page leads back":   {func(n int) (string, string) { return tool(n, 1), fmt.Sprint("c", (n+1)%3) }, 4},
		"a cursor leads to itself":   {func(n int) (string, string) { return tool(n, 1), "c1" }, 3},
		"pages without tools":        {func(n int) (string, string) { return "", fmt.Sprint("c", n+1) }, mcpclient.MaxPages},
		"megabytes":                  {func(n int) (string, string) { return tool(n, 60_000), fmt.Sprint("c", n+1) }, mcpclient.MaxListBytes/60_000 + 2},
		"a cursor of kilobytes":      {func(n int) (string, string) { return tool(n, 1), strings.Repeat("c", 4000) + fmt.Sprint(n) }, 2},
	} {
		t.Run(name, func(t *testing.T) {
			script := devicetest.NewScript()
			script.Other = func(r devicetest.Request) string {
				if r.Method != "tools/list" {
					return ""
				}
				var p struct{ Cursor string }
				_ = json.Unmarshal(r.Params, &p)
				n, _ := strconv.Atoi(strings.TrimLeft(p.Cursor, "c"))
				tools, next := c.page(n)
				return fmt.Sprintf(`"result":{"tools":[%s],"nextCursor":"%s"}`, tools, next)
			}
			b := open(t)
			b.device(t, trapID, script)
			if v := b.view(t, trapID); !v.Presence.Partial || v.Presence.MCP != devices.MCPReady {
				t.Errorf("partial %t, MCP %s", v.Presence.Partial, v.Presence.MCP)
			}
			if n := len(idsOf(t, script, "tools/list")); n > c.pages {
				t.Errorf("%d pages were read, %d are enough", n, c.pages)
			}
			list, err := b.service.Tools(t.Context(), trapID, true)
			if err != nil || !list.Partial || len(list.Tools) == 0 && name != "pages without tools" {
				t.Errorf("%d tools, partial %t, %v", len(list.Tools), list.Partial, err)
			}
			if _, err := b.call(trapID, "self.t0", `{}`, 5*time.Second); err != nil {
				t.Errorf("a listed tool: %v", err)
			}
			if _, err := b.call(trapID, "self.behind_the_cut", `{}`, 5*time.Second); err != nil {
				t.Errorf("a tool after the cut, which the device may have: %v", err)
			}
		})
	}
}

// No tools, unknown tools and no MCP are three things, and none of them is the
// old list.
func TestTrap04EmptyIsNotUnknown(t *testing.T) {
	t.Parallel()
	b := open(t)
	empty, silent, noMCP := devicetest.NewScript(), devicetest.NewScript(), devicetest.NewScript()
	empty.Tools = "[]"
	silent.Other = func(r devicetest.Request) string {
		if r.Method == "tools/call" {
			return ""
		}
		return "silent"
	}
	noMCP.Other = func(devicetest.Request) string { return "silent" }
	b.device(t, trapID, empty)
	b.login(t, otherID).dial(t, silent)
	const noMCPID = devices.ID("02:00:00:00:aa:03")
	d := b.login(t, noMCPID).dial(t, noMCP)
	if err := d.Send(strings.Replace(client.HelloMQTT, `"mcp":true`, `"aec":true`, 1)); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "the device without MCP is shown without MCP", func() bool { return b.view(t, noMCPID).Presence.MCP == devices.MCPNone })
	for id, want := range map[devices.ID]struct {
		state devices.CatalogState
		code  devices.Code // of a call
	}{trapID: {devices.CatalogReady, devices.CodeToolUnknown}, otherID: {devices.CatalogUnknown, ""}, noMCPID: {devices.CatalogNone, devices.CodeToolUnknown}} {
		list, err := b.service.Tools(t.Context(), id, true)
		if err != nil || list.State != want.state || len(list.Tools) != 0 || list.Partial {
			t.Errorf("%s: %s with %d tools, %v; want %s", id, list.State, len(list.Tools), err, want.state)
		}
		code := devices.Code("")
		if _, err := b.call(id, volume, `{"volume":1}`, 5*time.Second); err != nil {
			code = err.Code
		}
		if code != want.code {
			t.Errorf("a call of %s: %q, want %q", id, code, want.code)
		}
	}
	if _, n, history, _ := b.Of(trapID); n.Tools != 0 || n.Catalog == (devices.Hash{}) || len(history) != 1 {
		t.Errorf("the empty list is recorded as %+v, history %v", n, history)
	}
	if _, n, history, _ := b.Of(otherID); n.Catalog != (devices.Hash{}) || len(history) != 0 {
		t.Errorf("the unknown list is recorded as %+v, history %v", n, history)
	}
}

// A device that does not answer is asked again, less and less often, and is
// called unresponsive meanwhile.
func TestTrap05InitializeIsRetried(t *testing.T) {
	t.Parallel()
	for name, features := range map[string]devices.Features{"MCP announced": devices.FeaturesMCP, "nothing announced": devices.FeaturesUnknown} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ports := devicetest.New()
				s := ports.Service(t, fleet.Config{})
				script := devicetest.NewScript()
				var mu sync.Mutex
				silent := true
				var asked []time.Time
				script.Other = func(r devicetest.Request) string {
					mu.Lock()
					defer mu.Unlock()
					if !silent {
						return ""
					}
					if r.Method == "initialize" {
						asked = append(asked, time.Now())
					}
					return "silent"
				}
				pipeTo(t, s, trapID, script).session.StartMCP(features)
				state := func() (devices.MCPState, devices.CatalogState) {
					v, err := s.Get(t.Context(), trapID)
					if err != nil {
						t.Fatal(err)
					}
					return v.Presence.MCP, v.CatalogState
				}
				time.Sleep(mcpclient.StepTimeout + time.Second) // of the bubble's clock
				synctest.Wait()
				if mcp, catalog := state(); mcp != devices.MCPUnresponsive || catalog == devices.CatalogNone || catalog == devices.CatalogReady {
					t.Errorf("MCP %s, catalog %s", mcp, catalog)
				}
				time.Sleep(3 * time.Hour)
				synctest.Wait()
				mu.Lock()
				for i := 2; i < len(asked); i++ {
					if before, now := asked[i-1].Sub(asked[i-2]), asked[i].Sub(asked[i-1]); now < before {
						t.Errorf("attempts %d and %d are %v apart, those before %v", i-1, i, now, before)
					}
				}
				if len(asked) < 4 || len(asked) > 50 {
					t.Errorf("%d attempts in three hours", len(asked))
				}
				silent = false
				mu.Unlock()
				time.Sleep(time.Hour + time.Minute)
				synctest.Wait()
				if mcp, catalog := state(); mcp != devices.MCPReady || catalog != devices.CatalogReady {
					t.Errorf("it answers now: MCP %s, catalog %s", mcp, catalog)
				}
				s.Close()
			})
		})
	}
}

// What an old connection does at its end, however late, is not done to its
// successor.
func TestTrap10OldCleanupIsConditional(t *testing.T) {
	t.Parallel()
	b := open(t)
	s := b.service
	old := &pipe{script: devicetest.NewScript(), ended: make(chan devices.CloseReason, 1), block: make(chan struct{})}
	unblock := sync.OnceFunc(func() { close(old.block) })
	t.Cleanup(unblock) // before the service waits for it
	var err error
	if old.session, err = s.Accept(devices.Identity{Device: trapID, ClientID: "c", Transport: devices.TransportMQTT}, old); err != nil {
		t.Fatal(err)
	}
	accepted := make(chan struct{})
	current := &pipe{script: devicetest.NewScript(), ended: make(chan devices.CloseReason, 1)}
	go func() { // waits for the old connection's Close, as nothing else may
		defer close(accepted)
		var err error
		if current.session, err = s.Accept(devices.Identity{Device: trapID, ClientID: "c", Transport: devices.TransportMQTT}, current); err != nil {
			t.Error(err)
		}
	}()
	devicetest.Eventually(t, "the new session is there", func() bool { return b.view(t, trapID).Presence.Epoch > old.session.Epoch() })
	unblock()
	<-accepted
	current.session.StartMCP(devices.FeaturesMCP)
	old.session.Close(devices.CloseGone) // its reader notices
	old.session.CloseAudio()
	if err := old.session.HandleControl([]byte(`{"type":"listen","state":"start"}`)); err == nil {
		t.Error("the old connection is still listened to")
	}
	b.ready(t, trapID)
	if _, err := b.call(trapID, volume, `{"volume":1}`, 5*time.Second); err != nil {
		t.Errorf("a call: %v", err)
	}
	if reason := <-old.ended; reason != devices.CloseSuperseded || len(current.ended) > 0 {
		t.Errorf("the old connection ended as %s, the new one %d times", reason, len(current.ended))
	}
	if _, n, _, held := b.Of(trapID); !n.Online || held != 1 || n.Epoch != current.session.Epoch() {
		t.Errorf("presence %+v, held %d", n, held)
	}
	// And on real wires: MQTT replaced by WebSocket, whose TCP ends later.
	d := b.device(t, otherID, devicetest.NewScript())
	dialSocket(t, b.websocket, string(otherID), b.token(otherID), devicetest.NewScript())
	<-d.Gone()
	d.Close()
	devicetest.Eventually(t, "the socket is the device", func() bool {
		v := b.view(t, otherID)
		return v.State == devices.StateOnline && v.Presence.Transport == devices.TransportWebSocket && v.CatalogState == devices.CatalogReady
	})
	if _, n, _, held := b.Of(otherID); !n.Online || held != 1 {
		t.Errorf("presence %+v, held %d", n, held)
	}
}

// The firmware's and others' ways of writing JSON-RPC end as what was meant.
func TestTrap13Dialects(t *testing.T) {
	t.Parallel()
	b := open(t)
	for name, c := range map[string]struct {
		replies []string // ID stands for the id of the call
		text    string
		failed  bool
	}{
		"unescaped quotes":    {[]string{`{"jsonrpc":"2.0","id":ID,"error":{"message":"no "film" left"}}`}, `no \"film\" left`, true},
		"unescaped newline":   {[]string{"{\"jsonrpc\":\"2.0\",\"id\":ID,\"error\":{\"message\":\"no\nfilm\"}}"}, `no\nfilm`, true},
		"unescaped backslash": {[]string{`{"jsonrpc":"2.0","id":ID,"error":{"message":"C:\dir"}}`}, `C:\dir`, true},
		"no code":             {[]string{`{"jsonrpc":"2.0","id":ID,"error":{"message":"Failed to capture photo"}}`}, "Failed to capture photo", true},
		"id as a string":      {[]string{`{"jsonrpc":"2.0","id":"ID","result":RESULT}`}, "true", false},
		"id as a fraction":    {[]string{`{"jsonrpc":"2.0","id":ID.0,"result":RESULT}`}, "true", false},
		"no version":          {[]string{`{"id":ID,"result":RESULT}`}, "true", false},
		"payload is null":     {[]string{`null`, `{"jsonrpc":"2.0","id":ID,"result":RESULT}`}, "true", false},
		"payload is text":     {[]string{`"{\"jsonrpc\":\"2.0\"}"`, `{"jsonrpc":"2.0","id":ID,"result":RESULT}`}, "true", false},
		"payload is a list":   {[]string{`[{"id":ID}]`, `{"jsonrpc":"2.0","id":ID,"result":RESULT}`}, "true", false},
		"ids that are none": {[]string{`{"id":null,"result":{}}`, `{"id":{},"result":{}}`, `{"id":1e300,"result":{}}`, `{"id":-1,"result":{}}`,
			`{"jsonrpc":"2.0","id":ID,"result":RESULT}`}, "true", false},
	} {
		t.Run(name, func(t *testing.T) {
			script := devicetest.NewScript()
			asked := make(chan struct{})
			script.Call = func(string, json.RawMessage) string { close(asked); return "" }
			d := b.device(t, trapID, script)
			sent := make(chan error, 1)
			go func() {
				<-asked
				var errs error
				for _, reply := range c.replies {
					reply = strings.ReplaceAll(reply, "ID", fmt.Sprint(idsOf(t, script, "tools/call")[0]))
					reply = strings.ReplaceAll(reply, "RESULT", `{"content":[{"type":"text","text":"true"}],"isError":false}`)
					errs = errors.Join(errs, d.Send(`{"session_id":"","type":"mcp","payload":`+reply+`}`))
				}
				sent <- errs
			}()
			r, err := b.call(trapID, volume, `{"volume":1}`, 5*time.Second)
			if err := <-sent; err != nil {
				t.Fatal(err)
			}
			var content []struct{ Text string }
			if err != nil || r.IsError != c.failed || json.Unmarshal(r.Content, &content) != nil || len(content) != 1 {
				t.Fatalf("%s, failed %t, %v", r.Content, r.IsError, err)
			}
			if want := strings.NewReplacer(`\"`, `"`, `\n`, "\n").Replace(c.text); content[0].Text != want {
				t.Errorf("text %q, want %q", content[0].Text, want)
			}
			d.Close()
			devicetest.Eventually(t, "the device is gone", func() bool { return b.view(t, trapID).State == devices.StateOffline })
		})
	}
}
