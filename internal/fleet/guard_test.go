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

// principalWith returns a principal with these rights.
func principalWith(t *testing.T, via access.Via, scopes, selector string, tools ...string) access.Principal {
	t.Helper()
	s, d := devicetest.Rights(t, scopes, selector)
	return access.Principal{Caller: access.NewCaller("k"+selector, "some key", s, d, tools), Via: via, From: "192.0.2.7:1"}
}

// guarded runs a test with a device that has guardedTools and the label room=lab, and
// counts its calls.
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
		labels := map[string]*string{"room": new("lab")}
		if err := s.Edit(t.Context(), devicetest.Admin, id, 0, fleet.Edit{Labels: labels}); err != nil {
			t.Fatal(err)
		}
		test(t, p, s, &asked, conn)
	})
}

func callBy(t *testing.T, s *fleet.Service, principal access.Principal, tool, args, confirmation string) (devices.ToolResult, *devices.Error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	r, err := s.CallTool(ctx, devices.ToolCall{Principal: principal, Device: id, Tool: tool, Arguments: json.RawMessage(args), Confirmation: confirmation})
	if err != nil {
		return r, devices.AsError(err)
	}
	return r, nil
}

func TestGuardRefusesAlikeOverEveryInterface(t *testing.T) {
	guarded(t, func(t *testing.T, p *devicetest.Ports, s *fleet.Service, asked *atomic.Int32, _ *pipe) {
		for _, c := range []struct {
			principal  access.Principal
			tool, args string
			code       devices.Code
			rule       string
		}{
			{access.Principal{}, "self.get_device_status", `{}`, devices.CodeForbidden, access.RuleCaller},
			{principalWith(t, access.ViaREST, "devices:read", ""), "self.get_device_status", `{}`, devices.CodeForbidden, access.RuleScope},
			{principalWith(t, access.ViaREST, "tools:call", "room=attic"), "self.get_device_status", `{}`, devices.CodeForbidden, access.RuleDevices},
			{principalWith(t, access.ViaREST, "tools:call", "room=lab", "*get_*"), "self.lamp.set", `{"on":true}`, devices.CodeToolDenied, access.RuleTools},
			{principalWith(t, access.ViaREST, "tools:call", ""), "self.reboot", `{}`, devices.CodeToolDenied, access.RuleUserOnly},
			{devicetest.Admin, "self.screen.preview_image", `{"url":"http://192.0.2.1/a.jpg"}`, devices.CodeToolDenied, access.RuleURL},
			{principalWith(t, access.ViaMCP, "tools:call:user", ""), "self.reboot", `{}`, devices.CodeConfirmation, access.RuleConfirm},
		} {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			before := len(p.Audited)
			_, direct := s.CallTool(ctx, devices.ToolCall{Principal: c.principal, Device: id, Tool: c.tool, Arguments: json.RawMessage(c.args)})
			_, raw := s.CallRPC(ctx, devices.RPCCall{Principal: c.principal, Device: id, Method: "tools/call", Params: fmt.Appendf(nil, `{"name":%q,"arguments":%s}`, c.tool, c.args)})
			_, here := s.CallTool(ctx, devices.ToolCall{Origin: devices.OriginHolder, Principal: c.principal, Device: id, Tool: c.tool, Arguments: json.RawMessage(c.args)})
			cancel()
			for way, err := range map[string]error{"call": direct, "raw": raw, "here": here} {
				// security: K3 K10
				if e := devices.AsError(err); e.Code != c.code || e.Rule != c.rule || e.Detail == "" {
					t.Errorf("%s by %s of %s: %+v", way, c.principal.Name(), c.tool, e)
				}
			}
			for _, e := range p.Audited[before:] {
				// security: K15
				if e.Kind != audit.KindCall || e.Action != c.tool || e.Device != string(id) || e.Outcome != string(c.code) || e.Rule != c.rule || e.From != c.principal.From || e.Key != c.principal.Key() || e.Digest == (audit.Hash{}) || e.Arguments != nil {
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
			t.Errorf("the device received %d calls", n)
		}
		// security: K3
		if _, err := callBy(t, s, principalWith(t, access.ViaREST, "tools:call", "room=lab", "*get_*"), "self.get_device_status", `{}`, ""); err != nil || asked.Load() != 1 {
			t.Errorf("a call that the key allows: %v", err)
		}
		// security: K15
		if e := p.Audited[len(p.Audited)-1]; e.Kind != audit.KindCall || e.Action != "self.get_device_status" || e.Outcome != "ok" || e.Digest == (audit.Hash{}) || e.Arguments != nil {
			t.Errorf("a successful call is recorded as %+v", e)
		}
	})
}

// A limited key does not learn which other devices exist.
func TestLimitedKeyLearnsNothing(t *testing.T) {
	guarded(t, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service, _ *atomic.Int32, _ *pipe) {
		principal := principalWith(t, access.ViaREST, "tools:call", "room=attic")
		var errs []string
		for _, other := range []devices.ID{id, "02:00:00:00:00:99"} {
			_, err := s.CallTool(t.Context(), devices.ToolCall{Principal: principal, Device: other, Tool: "self.get_device_status"})
			errs = append(errs, devices.AsError(err).Error())
		}
		// security: K8
		if errs[0] != errs[1] || !strings.HasPrefix(errs[0], "forbidden") {
			t.Errorf("%q", errs)
		}
	})
}

// Labels that cannot be read do not count as missing: a key that depends on them gives
// no access, whatever its selector, until they are read.
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
			principal := principalWith(t, access.ViaREST, "tools:call", selected)
			begun := time.Now()
			err := s.Permit(t.Context(), principal, access.ScopeCall, id)
			if took := time.Since(begun); took > registry.RowLimit {
				t.Errorf("%s: decided after %v", selected, took)
			}
			begun = time.Now()
			if now := s.PermitNow(principal, access.ScopeCall, id); (now == nil) != (err == nil) || time.Since(begun) > 0 {
				t.Errorf("%s: %v, and without waiting %v after %v", selected, err, now, time.Since(begun))
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, asked := s.CallRPC(ctx, devices.RPCCall{Origin: devices.OriginNode, Principal: principal, Device: id, Method: "ping"}) // as a request of another node, which permitted the caller
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
		time.Sleep(5 * time.Second) // the row is requested again
		for selected, want := range map[string]bool{"room=lab": true, "room!=lab": false, "room!=attic": true, "!room": false, "!floor": true, "": true} {
			if no := may(selected); (no == nil) != want || no != nil && no.Code != devices.CodeForbidden {
				t.Errorf("%s: %v when the labels are read", selected, no)
			}
		}
	})
}

func TestRawMethodsAndMessagesHaveScopes(t *testing.T) {
	guarded(t, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service, _ *atomic.Int32, conn *pipe) {
		model, some, person := principalWith(t, access.ViaRaw, "tools:call", ""), principalWith(t, access.ViaRaw, "tools:call:user", "", "*get_*"), principalWith(t, access.ViaRaw, "tools:call:user", "")
		for _, c := range []struct {
			principal access.Principal
			method    string
			ok        bool
		}{{model, "ping", true}, {model, "custom/flash", false}, {some, "custom/flash", false}, {person, "custom/flash", true}, {person, "tools/call\x00", false}, {person, "initialize\x00", false}, {person, "initialize", false}, {principalWith(t, access.ViaRaw, "audio", ""), "ping", false}} {
			_, err := s.CallRPC(t.Context(), devices.RPCCall{Principal: c.principal, Device: id, Method: c.method})
			// security: K3 K4 K5
			if refused := errors.Is(err, &devices.Error{Code: devices.CodeForbidden}) || errors.Is(err, &devices.Error{Code: devices.CodeBadRequest}); refused == c.ok {
				t.Errorf("%s by %v: %v", c.method, c.principal.Caller.Scopes.Names(), err)
			}
		}
		voice := access.Principal{Caller: access.Voice, Via: access.ViaVoice}
		for _, c := range []struct {
			principal access.Principal
			body      string
			ok        bool
		}{
			{model, `{"type":"alert","status":"a","message":"b","emotion":"c"}`, true},
			{model, `{"type":"system","command":"reboot"}`, false},
			{model, `{"type":"llm","emotion":"happy"}`, false},
			{voice, `{"type":"llm","emotion":"happy"}`, true},
			{voice, `{"type":"system","command":"reboot"}`, false},
			{person, `{"type":"system","command":"reboot"}`, true},
			{person, `{"type":"system","TYPE":"alert","command":"reboot"}`, false}, // whatever the device's reader makes of it
			{model, `{"type":"system\u0000","command":"reboot"}`, false},           // the device's reader stops at the NUL
			{voice, `{"type":"mcp\u0000","payload":{}}`, false},
			{person, `{"type":"","x":1}`, false},
			{person, `{"type":"sys tem"}`, false},
			{model, `{"type":"iot","commands":[]}`, false}, // tool calls before MCP
			{some, `{"type":"alert","status":"a","message":"b","emotion":"c"}`, false},
		} {
			err := s.SendMessage(t.Context(), devices.Message{Principal: c.principal, Device: id, Body: json.RawMessage(c.body)})
			// security: K3 K4 K5
			if (err == nil) != c.ok {
				t.Errorf("%s by %v: %v", c.body, c.principal.Caller.Scopes.Names(), err)
			}
		}
		synctest.Wait()
		// security: K4
		if sent := conn.path.arrived(); len(sent) != 3 {
			t.Errorf("the device got %v", sent)
		}
	})
}

// The device ends a name at a NUL.
func TestToolNamesAreText(t *testing.T) {
	guarded(t, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service, asked *atomic.Int32, _ *pipe) {
		getters := principalWith(t, access.ViaREST, "tools:call:user", "", "*get_*")
		for _, name := range []string{"self.reboot\x00get_", "self.reboot\x01get_", "self.get_\xff", "", strings.Repeat("get_", 100)} {
			for _, principal := range []access.Principal{getters, devicetest.Admin} {
				// security: K4
				if _, err := callBy(t, s, principal, name, `{}`, ""); err == nil || err.Code != devices.CodeBadRequest {
					t.Errorf("%q: %v", name, err)
				}
			}
		}
		// security: K4
		if asked.Load() != 0 {
			t.Error("the device received a call")
		}
	})
}

// A call that waited for its turn is checked again.
func TestKeyEndsWhileItsCallWaits(t *testing.T) {
	guarded(t, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service, asked *atomic.Int32, conn *pipe) {
		scopes, _ := access.ParseScopes([]string{"tools:call"})
		k, _, err := s.CreateKey(t.Context(), devicetest.Admin, fleet.NewKeyParams{Name: "short", Scopes: scopes})
		if err != nil {
			t.Fatal(err)
		}
		who, _ := s.Keys().Caller(k.ID)
		conn.script.Call = func(tool string, _ json.RawMessage) string { asked.Add(1); return "" }
		var both sync.WaitGroup
		both.Go(func() { _, _ = callBy(t, s, devicetest.Admin, "self.lamp.set", `{"on":true}`, "") }) // occupies the device for 10 s
		synctest.Wait()
		both.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			_, err := s.CallTool(ctx, devices.ToolCall{Principal: access.Principal{Caller: who, Via: access.ViaREST}, Device: id, Tool: "self.lamp.set", Arguments: json.RawMessage(`{"on":false}`)})
			// security: K11
			if devices.AsError(err).Code != devices.CodeUnauthorized {
				t.Errorf("the call had its turn: %v", err)
			}
		})
		synctest.Wait()
		if _, _, err := s.RevokeKey(t.Context(), devicetest.Admin, "short"); err != nil {
			t.Fatal(err)
		}
		both.Wait()
		// security: K11
		if asked.Load() != 1 {
			t.Errorf("the device received %d calls", asked.Load())
		}
	})
}

func TestConfirmation(t *testing.T) {
	guarded(t, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service, asked *atomic.Int32, conn *pipe) {
		devicetest.SetPolicy(t, s, access.Policy{Rules: []access.Rule{{Name: "confirm", Tools: []string{"self.lamp.*", "self.screen.*"}, Action: access.Confirm}},
			URLs: []access.URLRule{{Tools: []string{"*"}, Prefixes: []string{"http://192.0.2.1"}}}})
		principal, other := principalWith(t, access.ViaREST, "tools:call", "room=lab"), principalWith(t, access.ViaREST, "tools:call", "")
		const on, off = `{"on":true}`, `{"on":false}`
		refusalOf := func(principal access.Principal, tool, args, confirmation string) string {
			t.Helper()
			before := asked.Load()
			_, err := callBy(t, s, principal, tool, args, confirmation)
			if err == nil || err.Code != devices.CodeConfirmation || err.Confirmation == "" || err.Rule != "policy:confirm" || asked.Load() != before {
				t.Fatalf("%+v", err)
			}
			return err.Confirmation
		}
		refusal := func(principal access.Principal, args, confirmation string) string {
			t.Helper()
			return refusalOf(principal, "self.lamp.set", args, confirmation)
		}
		token := refusal(principal, on, "")
		// security: K12
		refusal(other, on, token)
		// security: K12
		refusal(principal, off, token)
		// security: K12
		refusal(principal, on, token+"x")
		person := principalWith(t, access.ViaREST, "tools:call:user", "device="+string(id)) // may call user-only tools
		const both = `{"on":true,"url":"http://192.0.2.1/a.jpg"}`                           // valid for both tools
		// security: K12
		refusalOf(person, "self.lamp.set", both, refusalOf(person, "self.screen.preview_image", both, ""))
		if _, err := callBy(t, s, principal, "self.lamp.set", on, token); err != nil || asked.Load() != 1 {
			t.Fatalf("confirmed: %v", err)
		}
		// security: K12
		refusal(principal, on, token) // it is valid once
		token = refusal(principal, on, "")
		before := asked.Load()
		no := dispatch.Declined(token)
		if _, err := callBy(t, s, other, "self.lamp.set", on, no); err == nil || err.Code != devices.CodeConfirmation {
			t.Errorf("another caller declines: %v", err)
		}
		if _, err := callBy(t, s, principal, "self.lamp.set", on, token); err != nil || asked.Load() != before+1 {
			t.Errorf("after another caller declined: %v", err)
		}
		token = refusal(principal, on, "")
		if _, err := callBy(t, s, principal, "self.lamp.set", on, dispatch.Declined(token)); err == nil || err.Code != devices.CodeConfirmation || err.Confirmation != "" || err.Rule != access.RuleDeclined {
			t.Errorf("declined: %+v", err)
		}
		refusal(principal, on, token) // a declined confirmation stays declined
		devicetest.SetPolicy(t, s, access.Policy{})
		if _, err := callBy(t, s, principal, "self.lamp.set", on, dispatch.Declined("x")); err == nil || asked.Load() != before+1 {
			t.Errorf("declined a call that needs no confirmation any more: %v", err)
		}
		devicetest.SetPolicy(t, s, access.Policy{Rules: []access.Rule{{Name: "confirm", Tools: []string{"self.lamp.*"}, Action: access.Confirm}}})
		token = refusal(principal, on, "")
		time.Sleep(dispatch.ConfirmationLifetime + time.Second)
		// security: K12
		refusal(principal, on, token)
		token = refusal(principal, on, "")
		for range 100 { // another caller's calls do not use up this caller's places
			refusal(other, on, "")
		}
		if _, err := callBy(t, s, principal, "self.lamp.set", on, token); err != nil {
			t.Errorf("beside another caller's calls: %v", err)
		}
		token = refusal(principal, on, "")
		for range 4 { // the caller's own calls do
			refusal(principal, off, "")
		}
		refusal(principal, on, token)
		token = refusal(principal, on, "")
		connect(t, s, "c1", conn.script)
		ready(t, s)
		// security: K12
		refusal(principal, on, token) // a new connection needs a new confirmation
		// A denied or unknown tool needs no confirmation.
		if _, err := callBy(t, s, principal, "self.lamp.unknown", on, ""); err == nil || err.Code == devices.CodeInternal {
			t.Errorf("%v", err)
		}
	})
}

// Ten concurrent reads cause one call to the device.
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
			t.Errorf("%v, the device received %d calls", got, asked.Load())
		}
		together(2, "self.get_device_status", `{}`)
		if asked.Load() != 2 {
			t.Errorf("without a time to live the device received %d calls", asked.Load())
		}
		together(3, "self.lamp.set", `{"on":true}`)
		if asked.Load() != 5 {
			t.Errorf("a call that is not a read was shared: %d", asked.Load())
		}
		devicetest.SetPolicy(t, s, access.Policy{Reads: []access.Read{{Tools: []string{"self.get_*"}, TTL: "5s"}}})
		together(2, "self.get_device_status", `{}`)
		together(2, "self.get_device_status", `{}`)
		if asked.Load() != 6 {
			t.Errorf("with a time to live: %d", asked.Load())
		}
		together(1, "self.lamp.set", `{"on":true}`)
		if got := together(2, "self.get_device_status", `{}`); asked.Load() != 8 || len(got) != 1 {
			t.Errorf("after a call that is not a read: %v, %d calls", got, asked.Load())
		}
		time.Sleep(6 * time.Second)
		fails.Store(true)
		together(2, "self.get_device_status", `{}`)
		together(1, "self.get_device_status", `{}`)
		if asked.Load() != 10 {
			t.Errorf("a failure was reused: %d", asked.Load())
		}
		// A caller that gives up does not end the call for others.
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		fails.Store(false)
		dumb.Store(true)
		var patient sync.WaitGroup
		patient.Go(func() {
			if _, err := s.CallTool(ctx, devices.ToolCall{Principal: devicetest.Admin, Device: id, Tool: "self.get_device_status", Arguments: json.RawMessage(`{}`)}); err == nil {
				t.Error("the caller that gave up got an answer")
			}
		})
		synctest.Wait()
		patient.Go(func() {
			if _, err := callBy(t, s, devicetest.Admin, "self.get_device_status", `{}`, ""); err != nil {
				t.Errorf("the other caller: %v", err)
			}
		})
		patient.Wait()
	})
}
