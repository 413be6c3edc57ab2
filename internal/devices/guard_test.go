package devices_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/audit"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
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
func guarded(t *testing.T, test func(t *testing.T, p *devicetest.Ports, s *devices.Service, asked *atomic.Int32, conn *pipe)) {
	bubble(t, devices.Config{}, func(t *testing.T, p *devicetest.Ports, s *devices.Service) {
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
		if err := s.Edit(id, devices.Edit{Labels: &labels}); err != nil {
			t.Fatal(err)
		}
		test(t, p, s, &asked, conn)
	})
}

func callBy(t *testing.T, s *devices.Service, by access.By, tool, args, confirmation string) (devices.ToolResult, *devices.Error) {
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
	guarded(t, func(t *testing.T, p *devicetest.Ports, s *devices.Service, asked *atomic.Int32, _ *pipe) {
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
			_, here := s.CallHere(ctx, devices.ToolCall{By: c.by, Device: id, Tool: c.tool, Arguments: json.RawMessage(c.args)})
			cancel()
			for way, err := range map[string]error{"call": direct, "raw": raw, "here": here} {
				if e := devices.AsError(err); e.Code != c.code || e.Rule != c.rule || e.Detail == "" {
					t.Errorf("%s by %s of %s: %+v", way, c.by.Name(), c.tool, e)
				}
			}
			for _, e := range p.Audited[before:] {
				if e.Kind != audit.KindCall || e.Action != c.tool || e.Device != string(id) || e.Outcome != string(c.code) || e.Rule != c.rule || e.From != c.by.From || e.Key != c.by.Key() || e.Digest == (audit.Hash{}) {
					t.Errorf("recorded: %+v", e)
				}
			}
			if n := len(p.Audited) - before; n != 3 {
				t.Errorf("%d entries for three calls", n)
			}
		}
		if n := asked.Load(); n != 0 {
			t.Errorf("the device was asked %d times", n)
		}
		if _, err := callBy(t, s, someone(t, access.ViaREST, "tools:call", "room=lab", "*get_*"), "self.get_device_status", `{}`, ""); err != nil || asked.Load() != 1 {
			t.Errorf("what the key is for: %v", err)
		}
	})
}

// A key for some devices learns nothing of which others there are.
func TestLimitedKeyLearnsNothing(t *testing.T) {
	guarded(t, func(t *testing.T, _ *devicetest.Ports, s *devices.Service, _ *atomic.Int32, _ *pipe) {
		by := someone(t, access.ViaREST, "tools:call", "room=attic")
		var said []string
		for _, other := range []devices.ID{id, "02:00:00:00:00:99"} {
			_, err := s.CallTool(t.Context(), devices.ToolCall{By: by, Device: other, Tool: "self.get_device_status"})
			said = append(said, devices.AsError(err).Error())
		}
		if said[0] != said[1] || !strings.HasPrefix(said[0], "forbidden") {
			t.Errorf("%q", said)
		}
	})
}

func TestRawMethodsAndMessagesHaveScopes(t *testing.T) {
	guarded(t, func(t *testing.T, _ *devicetest.Ports, s *devices.Service, _ *atomic.Int32, conn *pipe) {
		model, some, person := someone(t, access.ViaRaw, "tools:call", ""), someone(t, access.ViaRaw, "tools:call:user", "", "*get_*"), someone(t, access.ViaRaw, "tools:call:user", "")
		for _, c := range []struct {
			by     access.By
			method string
			ok     bool
		}{{model, "ping", true}, {model, "custom/flash", false}, {some, "custom/flash", false}, {person, "custom/flash", true}, {person, "tools/call\x00", false}, {person, "initialize\x00", false}, {person, "initialize", false}, {someone(t, access.ViaRaw, "audio", ""), "ping", false}} {
			_, err := s.CallRPC(t.Context(), devices.RPCCall{By: c.by, Device: id, Method: c.method})
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
			if (err == nil) != c.ok {
				t.Errorf("%s by %v: %v", c.body, c.by.Who.Scopes.Names(), err)
			}
		}
		synctest.Wait()
		if sent := conn.path.arrived(); len(sent) != 3 {
			t.Errorf("the device got %v", sent)
		}
	})
}

// The device ends a name where ours goes on.
func TestToolNamesAreText(t *testing.T) {
	guarded(t, func(t *testing.T, _ *devicetest.Ports, s *devices.Service, asked *atomic.Int32, _ *pipe) {
		getters := someone(t, access.ViaREST, "tools:call:user", "", "*get_*")
		for _, name := range []string{"self.reboot\x00get_", "self.reboot\x01get_", "self.get_\xff", "", strings.Repeat("get_", 100)} {
			for _, by := range []access.By{getters, devicetest.Admin} {
				if _, err := callBy(t, s, by, name, `{}`, ""); err == nil || err.Code != devices.CodeBadRequest {
					t.Errorf("%q: %v", name, err)
				}
			}
		}
		if asked.Load() != 0 {
			t.Error("the device was asked")
		}
	})
}

// A node that never read the operator's rules cannot tell what they forbid.
func TestNoCallsWithoutRules(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := devicetest.New()
		p.Away = true
		s := devices.New(devices.Config{Node: "n", CallsPerDevice: 1, Handshakes: 1}, devices.Ports{Records: p, Catalogs: p, Keeper: p, Rotations: p, Warden: p,
			Publisher: p, Directory: p, Router: p, Vision: p, Audio: p, Log: slog.New(slog.DiscardHandler)})
		defer s.Close()
		connect(t, s, "c1", devicetest.NewScript())
		ready(t, s)
		if _, err := call(t, s, "self.audio_speaker.set_volume", `{"volume":1}`); err == nil || err.Code != devices.CodeUnavailable {
			t.Errorf("before the rules are known: %v", err)
		}
		s.RestoreDoors(devices.Doors{}) // notes of an earlier version
		if _, err := call(t, s, "self.audio_speaker.set_volume", `{"volume":1}`); err == nil {
			t.Error("notes without rules count as rules")
		}
		s.RestoreDoors(devices.Doors{Known: true})
		if _, err := call(t, s, "self.audio_speaker.set_volume", `{"volume":1}`); err != nil {
			t.Errorf("with notes that there are none: %v", err)
		}
	})
}

// What waits for its turn is judged again when that comes.
func TestKeyEndsWhileItsCallWaits(t *testing.T) {
	guarded(t, func(t *testing.T, _ *devicetest.Ports, s *devices.Service, asked *atomic.Int32, conn *pipe) {
		scopes, _ := access.ParseScopes([]string{"tools:call"})
		k, _, err := s.CreateKey(t.Context(), devicetest.Admin, devices.KeyWish{Name: "short", Scopes: scopes})
		if err != nil {
			t.Fatal(err)
		}
		who, _ := s.Registry().Caller(k.ID)
		conn.script.Call = func(tool string, _ json.RawMessage) string { asked.Add(1); return "" }
		var both sync.WaitGroup
		both.Go(func() { _, _ = callBy(t, s, devicetest.Admin, "self.lamp.set", `{"on":true}`, "") }) // holds the device for 10 s
		synctest.Wait()
		both.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			_, err := s.CallTool(ctx, devices.ToolCall{By: access.By{Who: who, Via: access.ViaREST}, Device: id, Tool: "self.lamp.set", Arguments: json.RawMessage(`{"on":false}`)})
			if devices.AsError(err).Code != devices.CodeUnauthorized {
				t.Errorf("its turn came: %v", err)
			}
		})
		synctest.Wait()
		if _, err := s.RevokeKey(t.Context(), devicetest.Admin, "short"); err != nil {
			t.Fatal(err)
		}
		both.Wait()
		if asked.Load() != 1 {
			t.Errorf("the device was asked %d times", asked.Load())
		}
	})
}

func TestConfirmation(t *testing.T) {
	guarded(t, func(t *testing.T, _ *devicetest.Ports, s *devices.Service, asked *atomic.Int32, conn *pipe) {
		devicetest.SetPolicy(t, s, access.Policy{Rules: []access.Rule{{Name: "ask", Tools: []string{"self.lamp.*"}, Action: access.Confirm}}})
		by, other := someone(t, access.ViaREST, "tools:call", "room=lab"), someone(t, access.ViaREST, "tools:call", "")
		const on, off = `{"on":true}`, `{"on":false}`
		refusal := func(by access.By, args, confirmation string) string {
			t.Helper()
			before := asked.Load()
			_, err := callBy(t, s, by, "self.lamp.set", args, confirmation)
			if err == nil || err.Code != devices.CodeConfirmation || err.Confirmation == "" || err.Rule != "policy:ask" || asked.Load() != before {
				t.Fatalf("%+v", err)
			}
			return err.Confirmation
		}
		token := refusal(by, on, "")
		refusal(other, on, token)
		refusal(by, off, token)
		refusal(by, on, token+"x")
		if _, err := callBy(t, s, by, "self.lamp.set", on, token); err != nil || asked.Load() != 1 {
			t.Fatalf("confirmed: %v", err)
		}
		refusal(by, on, token) // it was good once
		token = refusal(by, on, "")
		before := asked.Load()
		no := devices.Declined(token)
		if _, err := callBy(t, s, other, "self.lamp.set", on, no); err == nil || err.Code != devices.CodeConfirmation {
			t.Errorf("another says no: %v", err)
		}
		if _, err := callBy(t, s, by, "self.lamp.set", on, token); err != nil || asked.Load() != before+1 {
			t.Errorf("what another declined: %v", err)
		}
		token = refusal(by, on, "")
		if _, err := callBy(t, s, by, "self.lamp.set", on, devices.Declined(token)); err == nil || err.Code != devices.CodeConfirmation || err.Confirmation != "" || err.Rule != access.RuleDeclined {
			t.Errorf("declined: %+v", err)
		}
		refusal(by, on, token) // a no is a no
		devicetest.SetPolicy(t, s, access.Policy{})
		if _, err := callBy(t, s, by, "self.lamp.set", on, devices.Declined("x")); err == nil || asked.Load() != before+1 {
			t.Errorf("declined where nobody needs to ask any more: %v", err)
		}
		devicetest.SetPolicy(t, s, access.Policy{Rules: []access.Rule{{Name: "ask", Tools: []string{"self.lamp.*"}, Action: access.Confirm}}})
		token = refusal(by, on, "")
		time.Sleep(devices.ConfirmationLife + time.Second)
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
		refusal(by, on, token) // another connection is another moment
		// Denied or not there: nothing to confirm.
		if _, err := callBy(t, s, by, "self.lamp.unknown", on, ""); err == nil || err.Code == devices.CodeInternal {
			t.Errorf("%v", err)
		}
	})
}

// Ten who ask for the same cost the device one call.
func TestReadersAreShared(t *testing.T) {
	bubble(t, devices.Config{}, func(t *testing.T, _ *devicetest.Ports, s *devices.Service) {
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

func TestKeysWhileTheDatabaseIsAway(t *testing.T) {
	bubble(t, devices.Config{}, func(t *testing.T, p *devicetest.Ports, s *devices.Service) {
		scopes, _ := access.ParseScopes([]string{"tools:call"})
		wish := devices.KeyWish{Name: "kitchen agent", Scopes: scopes}
		if _, _, err := s.CreateKey(t.Context(), someone(t, access.ViaREST, "devices:write", ""), wish); devices.AsError(err).Code != devices.CodeForbidden {
			t.Errorf("made by who may not: %v", err)
		}
		k, token, err := s.CreateKey(t.Context(), devicetest.Admin, wish)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := s.CreateKey(t.Context(), devicetest.Admin, wish); devices.AsError(err).Code != devices.CodeBadRequest {
			t.Errorf("a second of that name: %v", err)
		}
		p.Away = true
		if _, _, err := s.CreateKey(t.Context(), devicetest.Admin, devices.KeyWish{Name: "x", Scopes: scopes}); !errors.Is(err, devices.ErrDatabase) {
			t.Errorf("made while the database is away: %v", err)
		}
		if who, err := s.Registry().Authenticate(token, time.Now()); err != nil || who.Key != k.ID {
			t.Errorf("%v %v", who, err)
		}
		if _, err := s.RevokeKey(t.Context(), devicetest.Admin, "kitchen agent"); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Registry().Authenticate(token, time.Now()); !errors.Is(err, access.ErrRevoked) {
			t.Errorf("revoked: %v", err)
		}
		notes := s.Doors()
		p.Away = false
		// The node is started again before it could write the end.
		again := p.Service(t, devices.Config{Node: "again"})
		if _, err := again.Registry().Authenticate(token, time.Now()); err != nil {
			t.Fatalf("the test proves nothing: %v", err)
		}
		again.RestoreDoors(notes)
		if err := again.Reload(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := again.Registry().Authenticate(token, time.Now()); !errors.Is(err, access.ErrRevoked) || p.Keys[k.ID].Revoked.IsZero() {
			t.Errorf("after the restart: %v, stored %+v", err, p.Keys[k.ID])
		}
		again.Close()
		for _, e := range p.Audited {
			if strings.Contains(fmt.Sprint(e), token) {
				t.Errorf("the record holds a token: %+v", e)
			}
		}
	})
}

func TestPolicyVersions(t *testing.T) {
	bubble(t, devices.Config{}, func(t *testing.T, p *devicetest.Ports, s *devices.Service) {
		deny := access.Policy{Rules: []access.Rule{{Name: "all", Action: access.Deny}}}
		if _, err := s.SetPolicy(t.Context(), someone(t, access.ViaREST, "devices:write", ""), deny, 0); devices.AsError(err).Code != devices.CodeForbidden {
			t.Errorf("by who may not: %v", err)
		}
		first, err := s.SetPolicy(t.Context(), devicetest.Admin, deny, 0)
		if err != nil || first.Version != 1 || p.Policy.Version != 1 {
			t.Fatal(first, err)
		}
		if _, err := s.SetPolicy(t.Context(), devicetest.Admin, access.Policy{}, 0); devices.AsError(err).Code != devices.CodeBadRequest {
			t.Errorf("over a version not seen: %v", err)
		}
		s.Learn(devices.News{Policy: &access.Policy{Version: 3}})
		s.Learn(devices.News{Policy: &access.Policy{Version: 2, Rules: deny.Rules}})
		if got := s.Guard().Policy(); got.Version != 3 || len(got.Rules) != 0 {
			t.Errorf("an older version came into force: %+v", got)
		}
		s.Learn(devices.News{Policy: &access.Policy{Version: 4, Rules: []access.Rule{{Action: "later"}}}})
		if got := s.Guard().Policy(); got.Version != 3 {
			t.Errorf("a version of a later program came into force: %+v", got)
		}
	})
}
