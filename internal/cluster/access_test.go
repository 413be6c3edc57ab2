package cluster

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
	"fleetd/internal/selector"
)

// The caller travels with the call: the holder refuses the same callers for the
// same reasons, whichever node received the call.
func TestHopCarriesTheCaller(t *testing.T) {
	f := newFleet(t)
	f.connect(t, devicetest.NewScript())
	labels := map[string]*string{"room": new("lab")}
	if err := f.holding.Edit(t.Context(), devicetest.Admin, id, 0, fleet.Edit{Labels: labels}); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "the other node has the label", func() bool {
		return f.fwd.Permit(t.Context(), access.Principal{Caller: wireBy.Caller}, access.ScopeCall, id) == nil
	})
	devicetest.SetPolicy(t, f.holding, access.Policy{Rules: []access.Rule{{Name: "ask", Keys: []string{"confirmer"}, Action: access.Confirm}}})
	principal := func(name, scopes, selected string, tools ...string) access.Principal {
		s, err := access.ParseScopes(strings.Fields(scopes))
		if err != nil {
			t.Fatal(err)
		}
		d, _ := selector.Parse(selected)
		return access.Principal{Caller: access.NewCaller("k-"+name, name, s, d, tools), Via: access.ViaREST, From: "192.0.2.7:1"}
	}
	call := func(s *fleet.Service, b access.Principal, confirmation string) (devices.ToolResult, *devices.Error) {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		c := volumeCall
		c.Principal, c.Confirmation = b, confirmation
		r, err := s.CallTool(ctx, c)
		if err != nil {
			return r, devices.AsError(err)
		}
		return r, nil
	}
	for _, b := range []access.Principal{{}, principal("reader", "devices:read", ""), principal("attic", "tools:call", "room=attic"), principal("getter", "tools:call", "room=lab", "*get_*"), principal("confirmer", "tools:call", "")} {
		_, local := call(f.holding, b, "")
		_, routed := call(f.fwd, b, "")
		// security: K3
		if local == nil || routed == nil || local.Code != routed.Code || local.Rule != routed.Rule || local.Rule == "" || local.Detail != routed.Detail || (local.Confirmation == "") != (routed.Confirmation == "") {
			t.Errorf("%s: here %+v, over a hop %+v", b.Name(), local, routed)
		}
	}
	// security: K3
	if r, err := call(f.fwd, principal("setter", "tools:call", "room=lab", "*set_*"), ""); err != nil || r.Node != "holder" {
		t.Errorf("%+v %v", r, err)
	}
	_, refusal := call(f.fwd, principal("confirmer", "tools:call", ""), "")
	if _, err := call(f.fwd, principal("confirmer", "tools:call", ""), refusal.Confirmation); err != nil {
		t.Errorf("confirmed over a hop: %v", err)
	}
	if _, err := call(f.holding, principal("confirmer", "tools:call", ""), refusal.Confirmation); err == nil {
		t.Error("a confirmation was accepted twice")
	}
	// The holder has the revocation of the key, the other node does not yet.
	gone := wireKey
	gone.Tools = nil
	if _, err := f.ports.Ledger.SaveKey(t.Context(), "test", gone.ID, gone); err != nil {
		t.Fatal(err)
	}
	devicetest.Refresh(t, f.holding)
	// security: K9
	if _, err := call(f.fwd, access.Principal{Caller: access.NewCaller(gone.ID, gone.Name, gone.Scopes, selector.Selector{}, nil)}, ""); err == nil || err.Code != devices.CodeUnauthorized {
		t.Errorf("a revoked key: %v", err)
	}
}

// A service has the rights of its token.
func TestServicesHaveKeys(t *testing.T) {
	f := newFleet(t)
	f.connect(t, devicetest.NewScript())
	make := func(name, scopes string, tools ...string) string {
		s, err := access.ParseScopes(strings.Fields(scopes))
		if err != nil {
			t.Fatal(err)
		}
		_, token, err := f.holding.CreateKey(t.Context(), devicetest.Admin, fleet.NewKeyParams{Name: name, Scopes: s, Tools: tools})
		if err != nil {
			t.Fatal(err)
		}
		return token
	}
	ask := func(verb, token, body string) (code, rule string) {
		t.Helper()
		msg := &nats.Msg{Subject: "test.v1.cmd." + id.Token() + "." + verb, Data: []byte(body), Header: nats.Header{HeaderToken: []string{token}}}
		answer, err := f.client.RequestMsg(msg, 5*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		var problem struct{ Code, Rule string }
		if err := json.Unmarshal(answer.Data, &problem); err != nil {
			t.Fatalf("%s: %v", answer.Data, err)
		}
		return problem.Code, problem.Rule
	}
	const call, alert, system = `{"tool":"self.audio_speaker.set_volume","arguments":{"volume":5}}`, `{"type":"alert","status":"a","message":"b","emotion":"c"}`, `{"type":"system","command":"reboot"}`
	caller, getter, voice := make("caller", "tools:call"), make("getter", "tools:call", "*get_*"), make("voice service", "audio")
	for _, c := range []struct{ verb, token, body, code, rule string }{
		{"call", caller, call, "", ""},
		{"call", getter, call, "tool_denied", access.RuleTools},
		{"call", voice, call, "forbidden", access.RuleScope},
		{"call", "fld_nonsense", call, "unauthorized", ""},
		{"call", "", call, "unauthorized", ""},
		{"send", caller, alert, "", ""},
		{"send", caller, system, "forbidden", access.RuleScope},
		{"send", voice, alert, "forbidden", access.RuleScope},
		{"send", voice, `{"type":"llm","emotion":"happy"}`, "", ""},
		{"audio", caller, "\x08", "forbidden", access.RuleScope},
	} {
		// security: K3
		if code, rule := ask(c.verb, c.token, c.body); code != c.code || rule != c.rule {
			t.Errorf("%s %s with %.12s: %q by %q, want %q by %q", c.verb, c.body, c.token, code, rule, c.code, c.rule)
		}
	}
	devicetest.Eventually(t, "the other node has the key", func() bool { _, ok := f.fwd.Keys().Find("caller", time.Now()); return ok })
	if _, _, err := f.fwd.RevokeKey(t.Context(), devicetest.Admin, "caller"); err != nil {
		t.Fatal(err)
	}
	// security: K9
	devicetest.Eventually(t, "the key is revoked on the node that holds the device", func() bool { code, _ := ask("call", caller, call); return code == "unauthorized" })
}
