package access

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
)

// An explanation contains the same decision as Decide, and exactly one step that decided; the
// shorter functions decide alike.
func TestExplainAgreesWithDecide(t *testing.T) {
	policy, err := ParsePolicy([]byte(`{"rules":[
		{"name":"lab walks","tools":["*.walk"],"devices":{"room":"lab"},"action":"allow"},
		{"name":"ask to walk","tools":["*.walk"],"action":"confirm"},
		{"name":"no mcp","via":["mcp"],"tools":["self.lamp.*"],"action":"deny"},
		{"name":"nobody reboots","tools":["self.reboot"],"keys":["test key"],"action":"deny"}],
		"reads":[{"tools":["*get_*"],"ttl":"2s"}],
		"urls":[{"tools":["self.upgrade_firmware"],"prefixes":["https://fw.example.com/"]}]}`))
	if err != nil {
		t.Fatal(err)
	}
	g, err := Compile(policy)
	if err != nil {
		t.Fatal(err)
	}
	callers := map[string]*Caller{"admin": Admin, "voice": Voice, "model": caller(t, "tools:call", ""), "person": caller(t, "tools:call:user", ""),
		"lab": caller(t, "tools:call", "room=lab", "*get_*"), "reader": caller(t, "devices:read", ""), "nobody": nil}
	for name, who := range callers {
		for _, tool := range []string{"self.lamp.on", "dog.walk", "self.reboot", "self.get_device_status", "self.upgrade_firmware"} {
			for _, via := range []Via{ViaREST, ViaMCP} {
				for _, room := range []string{"lab", "hall"} {
					for _, listed := range []bool{true, false} {
						q := Query{By: Principal{Caller: who, Via: via}, Device: "d", Labels: map[string]string{"room": room}, Tool: tool, Listed: listed}
						d := g.Decide(q)
						if d.Action != Deny && !g.MayAllow(Query{By: q.By, Tool: tool}) {
							t.Errorf("%s %s %s %s: never, but %s", name, tool, via, room, d.Action)
						}
						if d.Refusal == nil || strings.HasPrefix(d.Rule, rulePolicy) {
							if action := g.RuleAction(q); action != d.Action {
								t.Errorf("%s %s %s %s: the rules say %s, but %s", name, tool, via, room, action, d.Action)
							}
						}
						for _, arguments := range []string{"", `{"url":"https://fw.example.com/1.bin"}`, `{"url":"http://evil.example/"}`} {
							want, rule := d.Action, d.Rule
							if no := g.CheckURL(tool, json.RawMessage(arguments)); no != nil && d.Refusal == nil {
								want, rule = Deny, RuleURL
							}
							x := g.Explain(q, json.RawMessage(arguments))
							decided := 0
							for _, step := range x.Steps {
								if step.Verdict == Decided {
									decided++
									if step.Rule != rule {
										t.Errorf("%s %s: %s decided, want %s", name, tool, step.Rule, rule)
									}
								}
							}
							if x.Action != want || x.Rule != rule || decided != 1 || (want == Deny) != (x.Detail != "") {
								t.Errorf("%s %s %s %s %s: %+v, want %s by %s", name, tool, via, room, arguments, x, want, rule)
							}
						}
					}
				}
			}
		}
	}
	for _, never := range []Query{{By: Principal{Caller: Admin, Via: ViaMCP}, Tool: "self.lamp.on"}, {By: Principal{Caller: callers["model"], Via: ViaREST}, Tool: "self.reboot"},
		{By: Principal{Caller: callers["reader"], Via: ViaREST}, Tool: "dog.walk"}, {By: Principal{Caller: callers["model"], Via: ViaREST}, Tool: "dog.walk", UserOnly: true}} {
		if g.MayAllow(never) {
			t.Errorf("%+v may be called somewhere", never)
		}
	}
	x := g.Explain(Query{By: Principal{Caller: Admin, Via: ViaREST}, Device: "d", Tool: "self.get_x", Listed: true}, nil)
	if !x.Shared || x.TTL != "2s" || x.Steps[len(x.Steps)-1].Verdict != Decided {
		t.Errorf("%+v", x)
	}
}

// The policy in docs/access.md is valid.
func TestDocumentedPolicy(t *testing.T) {
	text, err := os.ReadFile("../../docs/access.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "```json\n")
	document, _, _ := strings.Cut(rest, "```")
	if p, err := ParsePolicy([]byte(document)); err != nil || len(p.Rules) != 4 || len(p.Reads) != 1 || len(p.URLs) != 1 || len(p.AuditArguments) != 2 {
		t.Errorf("%+v %v", p, err)
	}
}
