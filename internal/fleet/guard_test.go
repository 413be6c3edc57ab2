package fleet_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/audit"
	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/devices/registry"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

const guardedTools = `[{"name":"self.get_device_status","inputSchema":{"type":"object","properties":{}}},
{"name":"self.lamp.set","inputSchema":{"type":"object","properties":{"on":{"type":"boolean"}},"required":["on"]}},
{"name":"self.reboot","inputSchema":{"type":"object","properties":{}},"annotations":{"audience":["user"]}},
{"name":"self.screen.preview_image","inputSchema":{"type":"object","properties":{"url":{"type":"string"}},"required":["url"]}}]`

// someone is a caller with these rights.
func someone(t *testing.T, via access.Via, scopes, selector string, tools ...string) access.By {
	t.Helper()
	s, d := devicetest.Rights(t, scopes, selector)
	return access.By{Who: access.NewCaller("k"+selector, "some key", s, d, tools), Via: via, From: "192.0.2.7:1"}
}

// guarded is a device with guardedTools and the label room=lab, and what it was
// asked for.
func guarded(t *testing.T, test func(t *testing.T, p *devicetest.Ports, s *fleet.Service, asked *atomic.Int32, conn *pipe)) {
	bubble(t, fleet.Config{}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		var asked atomic.Int32
		script := devicetest.NewScript()
		script.Tools = guardedTools
		script.Call = func(string, json.RawMessage) string {
			asked.Add(1)
			return `"result":{"content":[{"type":"text","text":"true"}],"isError":false}`
		}
		conn := connect(t, s, "c1", script)
		ready(t, s)
		labels := map[string]string{"room": "lab"}
		if err := s.Edit(t.Context(), devicetest.Admin, id, 0, fleet.Edit{Labels: &labels}); err != nil {
			t.Fatal(err)
		}
		test(t, p, s, &asked, conn)
	})
}

func callBy(t *testing.T, s *fleet.Service, by access.By, tool, args, confirmation string) (devices.ToolResult, *devices.Error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	r, err := s.CallTool(ctx, devices.ToolCall{By: by, Device: id, Tool: tool, Arguments: json.RawMessage(args), Confirmation: confirmation})
	if err != nil {
		return r, devices.AsError(err)
	}
	return r, nil
}

func TestGuardRefusesTheSameOnEveryWay(t *testing.T) {
	guarded(t, func(t *testing.T, p *devicetest.Ports, s *fleet.Service, asked *atomic.Int32, _ *pipe) {
		for _, c := range []struct {
			by         access.By
			tool, args string
			code       devices.Code
			rule       string
		}{
			{access.By{}, "self.get_device_status", `{}`, devices.CodeForbidden, access.RuleCaller},
			{someone(t, access.ViaREST, "devices:read", ""), "self.get_device_status", `{}`, devices.CodeForbidden, access.RuleScope},
			{someone(t, access.ViaREST, "tools:call", "room=attic"), "self.get_device_status", `{}`, devices.CodeForbidden, access.RuleDevices},
			{someone(t, access.ViaREST, "tools:call", "room=lab", "*get_*"), "self.lamp.set", `{"on":true}`, devices.CodeToolDenied, access.RuleTools},
			{someone(t, access.ViaREST, "tools:call", ""), "self.reboot", `{}`, devices.CodeToolDenied, access.RuleUserOnly},
			{devicetest.Admin, "self.screen.preview_image", `{"url":"http://192.0.2.1/a.jpg"}`, devices.CodeToolDenied, access.RuleURL},
			{someone(t, access.ViaMCP, "tools:call:user", ""), "self.reboot", `{}`, devices.CodeConfirmation, access.RuleConfirm},
		} {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			before := len(p.Audited)
			_, direct := s.CallTool(ctx, devices.ToolCall{By: c.by, Device: id, Tool: c.tool, Arguments: json.RawMessage(c.args)})
			_, raw := s.CallRPC(ctx, devices.RPCCall{By: c.by, Device: id, Method: "tools/call", Params: fmt.Appendf(nil, `{"name":%q,"arguments":%s}`, c.tool, c.args)})
			_, here := s.CallTool(ctx, devices.ToolCall{Origin: devices.OriginHolder, By: c.by, Device: id, Tool: c.tool, Arguments: json.RawMessage(c.args)})
			cancel()
			for way, err := range map[string]error{"call": direct, "raw": raw, "here": here} {
				// security: K3 K10
				if e := devices.AsError(err); e.Code != c.code || e.Rule != c.rule || e.Detail == "" {
					t.Errorf("%s by %s of %s: %+v", way, c.by.Name(), c.tool, e)
				}
			}
			for _, e := range p.Audited[before:] {
				// security: K15
				if e.Kind != audit.KindCall || e.Action != c.tool || e.Device != string(id) || e.Outcome != string(c.code) || e.Rule != c.rule || e.From != c.by.From || e.Key != c.by.Key() || e.Digest == (audit.Hash{}) || e.Arguments != nil {
					t.Errorf("recorded: %+v", e)
				}
			}
			// security: K15
			if n := len(p.Audited) - before; n != 3 {
				t.Errorf("%d entries for three calls", n)
			}
		}
		// security: K3
		if n := asked.Load(); n != 0 {
			t.Errorf("the device was asked %d times", n)
		}
		// security: K3
		if _, err := callBy(t, s, someone(t, access.ViaREST, "tools:call", "room=lab", "*get_*"), "self.get_device_status", `{}`, ""); err != nil || asked.Load() != 1 {
			t.Errorf("what the key is for: %v", err)
		}
		// security: K15
		if e := p.Audited[len(p.Audited)-1]; e.Kind != audit.KindCall || e.Action != "self.get_device_status" || e.Outcome != "ok" || e.Digest == (audit.Hash{}) || e.Arguments != nil {
			t.Errorf("a call that was made is recorded as %+v", e)
		}
	})
}

// A key for some devices learns nothing of which others there are.
func TestLimitedKeyLearnsNothing(t *testing.T) {
	guarded(t, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service, _ *atomic.Int32, _ *pipe) {
		by := someone(t, access.ViaREST, "tools:call", "room=attic")
		var said []string
		for _, other := range []devices.ID{id, "02:00:00:00:00:99"} {
			_, err := s.CallTool(t.Context(), devices.ToolCall{By: by, Device: other, Tool: "self.get_device_status"})
			said = append(said, devices.AsError(err).Error())
		}
		// security: K8
		if said[0] != said[1] || !strings.HasPrefix(said[0], "forbidden") {
			t.Errorf("%q", said)
		}
	})
}

// Labels that cannot be read are not those of a device without labels: a key that
// depends on them opens nothing, whatever its terms say, until they are read.
func TestUnknownLabelsOpenNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ports, dir := devicetest.New(), t.TempDir()
		ports.Put(devices.Member{ID: id, ClientID: "client-1", Labels: map[string]string{"room": "lab"}})
		ports.Service(t, fleet.Config{Dir: dir}).Close()
		ports.SetAway(true)
		s := ports.Service(t, fleet.Config{Dir: dir})
		conn := &pipe{script: devicetest.NewScript()}
		var err error
		if conn.session, err = s.Accept(devices.Identity{Device: id, ClientID: "client-1", Transport: devices.TransportWebSocket}, conn); err != nil {
			t.Fatal(err)
		}
		may := func(selected string) *devices.Error {
			by := someone(t, access.ViaREST, "tools:call", selected)
			begun := time.Now()
			err := s.Permit(t.Context(), by, access.ScopeCall, id)
			if took := time.Since(begun); took > registry.RowLimit {
				t.Errorf("%s: judged after %v", selected, took)
			}
			begun = time.Now()
			if now := s.PermitNow(by, access.ScopeCall, id); (now == nil) != (err == nil) || time.Since(begun) > 0 {
				t.Errorf("%s: %v, and without waiting %v after %v", selected, err, now, time.Since(begun))
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, asked := s.CallRPC(ctx, devices.RPCCall{Origin: devices.OriginNode, By: by, Device: id, Method: "ping"}) // as for another node, which let the caller in
			if err == nil {
				return nil
			}
			refusal := devices.AsError(err)
			if devices.AsError(asked).Code != refusal.Code {
				t.Errorf("%s: %v, and a request ends with %v", selected, err, asked)
			}
			return refusal
		}
		for selected, want := range map[string]bool{"room=lab": false, "room!=lab": false, "room!=attic": false, "!room": false, "!floor": false, "device=" + string(id): true, "": true} {
			// security: K3
			if no := may(selected); (no == nil) != want || no != nil && (no.Code != devices.CodeUnavailable || no.Part != "database") {
				t.Errorf("%s: %v before the labels are read", selected, no)
			}
		}
		ports.SetAway(false)
		time.Sleep(5 * time.Second) // the row is asked for again
		for selected, want := range map[string]bool{"room=lab": true, "room!=lab": false, "room!=attic": true, "!room": false, "!floor": true, "": true} {
			if no := may(selected); (no == nil) != want || no != nil && no.Code != devices.CodeForbidden {
				t.Errorf("%s: %v when the labels are read", selected, no)
			}
		}
	})
}

func TestRawMethodsAndMessagesHaveScopes(t *testing.T) {
	guarded(t, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service, _ *atomic.Int32, conn *pipe) {
		model, some, person := someone(t, access.ViaRaw, "tools:call", ""), someone(t, access.ViaRaw, "tools:call:user", "", "*get_*"), someone(t, access.ViaRaw, "tools:call:user", "")
		for _, c := range []struct {
			by     access.By
			method string
			ok     bool
		}{{model, "ping", true}, {model, "custom/flash", false}, {some, "custom/flash", false}, {person, "custom/flash", true}, {person, "tools/call\x00", false}, {person, "initialize\x00", false}, {person, "initialize", false}, {someone(t, access.ViaRaw, "audio", ""), "ping", false}} {
			_, err := s.CallRPC(t.Context(), devices.RPCCall{By: c.by, Device: id, Method: c.method})
			// security: K3 K4 K5
			if refused := errors.Is(err, &devices.Error{Code: devices.CodeForbidden}) || errors.Is(err, &devices.Error{Code: devices.CodeBadRequest}); refused == c.ok {
				t.Errorf("%s by %v: %v", c.method, c.by.Who.Scopes.Names(), err)
			}
		}
		voice := access.By{Who: access.Voice, Via: access.ViaVoice}
		for _, c := range []struct {
			by   access.By
			body string
			ok   bool
		}{
			{model, `{"type":"alert","status":"a","message":"b","emotion":"c"}`, true},
			{model, `{"type":"system","command":"reboot"}`, false},
			{model, `{"type":"llm","emotion":"happy"}`, false},
			{voice, `{"type":"llm","emotion":"happy"}`, true},
			{voice, `{"type":"system","command":"reboot"}`, false},
			{person, `{"type":"system","command":"reboot"}`, true},
			{person, `{"type":"system","TYPE":"alert","command":"reboot"}`, false}, // whatever the device makes of it
			{model, `{"type":"system\u0000","command":"reboot"}`, false},           // the device's reader stops there
			{voice, `{"type":"mcp\u0000","payload":{}}`, false},
			{person, `{"type":"","x":1}`, false},
			{model, `{"type":"iot","commands":[]}`, false}, // tools by another name, before MCP
			{some, `{"type":"alert","status":"a","message":"b","emotion":"c"}`, false},
		} {
			err := s.SendMessage(t.Context(), devices.Message{By: c.by, Device: id, Body: json.RawMessage(c.body)})
			// security: K3 K4 K5
			if (err == nil) != c.ok {
				t.Errorf("%s by %v: %v", c.body, c.by.Who.Scopes.Names(), err)
			}
		}
		synctest.Wait()
		// security: K4
		if sent := conn.path.arrived(); len(sent) != 3 {
			t.Errorf("the device got %v", sent)
		}
	})
}

// The device ends a name where ours goes on.
func TestToolNamesAreText(t *testing.T) {
	guarded(t, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service, asked *atomic.Int32, _ *pipe) {
		getters := someone(t, access.ViaREST, "tools:call:user", "", "*get_*")
		for _, name := range []string{"self.reboot\x00get_", "self.reboot\x01get_", "self.get_\xff", "", strings.Repeat("get_", 100)} {
			for _, by := range []access.By{getters, devicetest.Admin} {
				// security: K4
				if _, err := callBy(t, s, by, name, `{}`, ""); err == nil || err.Code != devices.CodeBadRequest {
					t.Errorf("%q: %v", name, err)
				}
			}
		}
		// security: K4
		if asked.Load() != 0 {
			t.Error("the device was asked")
		}
	})
}

// What waits for its turn is judged again when that comes.
func TestKeyEndsWhileItsCallWaits(t *testing.T) {
	guarded(t, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service, asked *atomic.Int32, conn *pipe) {
		scopes, _ := access.ParseScopes([]string{"tools:call"})
		k, _, err := s.CreateKey(t.Context(), devicetest.Admin, fleet.KeyWish{Name: "short", Scopes: scopes})
		if err != nil {
			t.Fatal(err)
		}
		who, _ := s.Keys().Caller(k.ID)
		conn.script.Call = func(tool string, _ json.RawMessage) string { asked.Add(1); return "" }
		var both sync.WaitGroup
		both.Go(func() { _, _ = callBy(t, s, devicetest.Admin, "self.lamp.set", `{"on":true}`, "") }) // holds the device for 10 s
		synctest.Wait()
		both.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			_, err := s.CallTool(ctx, devices.ToolCall{By: access.By{Who: who, Via: access.ViaREST}, Device: id, Tool: "self.lamp.set", Arguments: json.RawMessage(`{"on":false}`)})
			// security: K11
			if devices.AsError(err).Code != devices.CodeUnauthorized {
				t.Errorf("its turn came: %v", err)
			}
		})
		synctest.Wait()
		if _, _, err := s.RevokeKey(t.Context(), devicetest.Admin, "short"); err != nil {
			t.Fatal(err)
		}
		both.Wait()
		// security: K11
		if asked.Load() != 1 {
			t.Errorf("the device was asked %d times", asked.Load())
		}
	})
}

func TestConfirmation(t *testing.T) {
	guarded(t, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service, asked *atomic.Int32, conn *pipe) {
		devicetest.SetPolicy(t, s, access.Policy{Rules: []access.Rule{{Name: "ask", Tools: []string{"self.lamp.*", "self.screen.*"}, Action: access.Confirm}},
			URLs: []access.URLRule{{Tools: []string{"*"}, Prefixes: []string{"http://192.0.2.1"}}}})
		by, other := someone(t, access.ViaREST, "tools:call", "room=lab"), someone(t, access.ViaREST, "tools:call", "")
		const on, off = `{"on":true}`, `{"on":false}`
		refusalOf := func(by access.By, tool, args, confirmation string) string {
			t.Helper()
			before := asked.Load()
			_, err := callBy(t, s, by, tool, args, confirmation)
			if err == nil || err.Code != devices.CodeConfirmation || err.Confirmation == "" || err.Rule != "policy:ask" || asked.Load() != before {
				t.Fatalf("%+v", err)
			}
			return err.Confirmation
		}
		refusal := func(by access.By, args, confirmation string) string {
			t.Helper()
			return refusalOf(by, "self.lamp.set", args, confirmation)
		}
		token := refusal(by, on, "")
		// security: K12
		refusal(other, on, token)
		// security: K12
		refusal(by, off, token)
		// security: K12
		refusal(by, on, token+"x")
		person := someone(t, access.ViaREST, "tools:call:user", "device="+string(id)) // for tools for people
		const both = `{"on":true,"url":"http://192.0.2.1/a.jpg"}`                     // what either tool takes
		// security: K12
		refusalOf(person, "self.lamp.set", both, refusalOf(person, "self.screen.preview_image", both, ""))
		if _, err := callBy(t, s, by, "self.lamp.set", on, token); err != nil || asked.Load() != 1 {
			t.Fatalf("confirmed: %v", err)
		}
		// security: K12
		refusal(by, on, token) // it was good once
		token = refusal(by, on, "")
		before := asked.Load()
		no := dispatch.Declined(token)
		if _, err := callBy(t, s, other, "self.lamp.set", on, no); err == nil || err.Code != devices.CodeConfirmation {
			t.Errorf("another says no: %v", err)
		}
		if _, err := callBy(t, s, by, "self.lamp.set", on, token); err != nil || asked.Load() != before+1 {
			t.Errorf("what another declined: %v", err)
		}
		token = refusal(by, on, "")
		if _, err := callBy(t, s, by, "self.lamp.set", on, dispatch.Declined(token)); err == nil || err.Code != devices.CodeConfirmation || err.Confirmation != "" || err.Rule != access.RuleDeclined {
			t.Errorf("declined: %+v", err)
		}
		refusal(by, on, token) // a no is a no
		devicetest.SetPolicy(t, s, access.Policy{})
		if _, err := callBy(t, s, by, "self.lamp.set", on, dispatch.Declined("x")); err == nil || asked.Load() != before+1 {
			t.Errorf("declined where nobody needs to ask any more: %v", err)
		}
		devicetest.SetPolicy(t, s, access.Policy{Rules: []access.Rule{{Name: "ask", Tools: []string{"self.lamp.*"}, Action: access.Confirm}}})
		token = refusal(by, on, "")
		time.Sleep(dispatch.ConfirmationLife + time.Second)
		// security: K12
		refusal(by, on, token)
		token = refusal(by, on, "")
		for range 100 { // somebody else's wishes take nobody's place
			refusal(other, on, "")
		}
		if _, err := callBy(t, s, by, "self.lamp.set", on, token); err != nil {
			t.Errorf("beside another's wishes: %v", err)
		}
		token = refusal(by, on, "")
		for range 4 { // one's own do
			refusal(by, off, "")
		}
		refusal(by, on, token)
		token = refusal(by, on, "")
		connect(t, s, "c1", conn.script)
		ready(t, s)
		// security: K12
		refusal(by, on, token) // another connection is another moment
		// Denied or not there: nothing to confirm.
		if _, err := callBy(t, s, by, "self.lamp.unknown", on, ""); err == nil || err.Code == devices.CodeInternal {
			t.Errorf("%v", err)
		}
	})
}

// Ten who ask for the same cost the device one call.
func TestReadersAreShared(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		var asked atomic.Int32
		var fails, dumb atomic.Bool
		script := devicetest.NewScript()
		script.Tools = guardedTools
		script.Call = func(string, json.RawMessage) string {
			if dumb.Swap(false) {
				return ""
			}
			time.Sleep(time.Second)
			if asked.Add(1); fails.Load() {
				return `"error":{"message":"no sensor"}`
			}
			return fmt.Sprintf(`"result":{"content":[{"type":"text","text":"%d"}],"isError":false}`, asked.Load())
		}
		connect(t, s, "c1", script)
		ready(t, s)
		together := func(n int, tool, args string) (answers map[string]int) {
			answers = map[string]int{}
			var mu sync.Mutex
			var all sync.WaitGroup
			for range n {
				all.Go(func() {
					r, err := callBy(t, s, devicetest.Admin, tool, args, "")
					mu.Lock()
					defer mu.Unlock()
					answers[fmt.Sprintf("%s %v", r.Content, err)]++
				})
			}
			all.Wait()
			return answers
		}
		if got := together(10, "self.get_device_status", `{}`); len(got) != 1 || asked.Load() != 1 || s.Stats().SharedCalls.Load() != 9 {
			t.Errorf("%v, the device was asked %d times", got, asked.Load())
		}
		together(2, "self.get_device_status", `{}`)
		if asked.Load() != 2 {
			t.Errorf("without a time to live the device was asked %d times", asked.Load())
		}
		together(3, "self.lamp.set", `{"on":true}`)
		if asked.Load() != 5 {
			t.Errorf("a tool that acts was shared: %d", asked.Load())
		}
		devicetest.SetPolicy(t, s, access.Policy{Reads: []access.Read{{Tools: []string{"self.get_*"}, TTL: "5s"}}})
		together(2, "self.get_device_status", `{}`)
		together(2, "self.get_device_status", `{}`)
		if asked.Load() != 6 {
			t.Errorf("with a time to live: %d", asked.Load())
		}
		together(1, "self.lamp.set", `{"on":true}`)
		if got := together(2, "self.get_device_status", `{}`); asked.Load() != 8 || len(got) != 1 {
			t.Errorf("after a call that acts: %v, asked %d times", got, asked.Load())
		}
		time.Sleep(6 * time.Second)
		fails.Store(true)
		together(2, "self.get_device_status", `{}`)
		together(1, "self.get_device_status", `{}`)
		if asked.Load() != 10 {
			t.Errorf("a failure was kept: %d", asked.Load())
		}
		// Who gives up takes nobody along.
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		fails.Store(false)
		dumb.Store(true)
		var patient sync.WaitGroup
		patient.Go(func() {
			if _, err := s.CallTool(ctx, devices.ToolCall{By: devicetest.Admin, Device: id, Tool: "self.get_device_status", Arguments: json.RawMessage(`{}`)}); err == nil {
				t.Error("the impatient one got an answer")
			}
		})
		synctest.Wait()
		patient.Go(func() {
			if _, err := callBy(t, s, devicetest.Admin, "self.get_device_status", `{}`, ""); err != nil {
				t.Errorf("the patient one: %v", err)
			}
		})
		patient.Wait()
	})
}
