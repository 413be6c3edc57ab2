package access

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"fleetd/internal/selector"
)

var now = time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)

func key(t *testing.T, scopes string, devices string, tools ...string) (Key, string) {
	t.Helper()
	s, err := ParseScopes(strings.Fields(scopes))
	if err != nil {
		t.Fatal(err)
	}
	d, err := selector.Parse(devices)
	if err != nil {
		t.Fatal(err)
	}
	k, token, err := NewKey("test key", s, d, tools, now, now.Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	return k, token
}

func caller(t *testing.T, scopes, devices string, tools ...string) *Caller {
	k, _ := key(t, scopes, devices, tools...)
	return NewCaller(k.ID, k.Name, k.Scopes, k.Devices, k.Tools)
}

func TestAuthenticate(t *testing.T) {
	r := NewRegistry()
	k, token := key(t, "devices:read", "")
	other, _ := key(t, "admin", "")
	for _, k := range []Key{k, other} {
		if changed, err := r.Put(k, now); err != nil || !changed {
			t.Fatal(changed, err)
		}
	}
	who, err := r.Authenticate(token, now)
	if err != nil || who.Key != k.ID || !who.Scopes.Has(ScopeRead) || who.Scopes.Has(ScopeCall) {
		t.Fatalf("%+v %v", who, err)
	}
	if again, _ := r.Authenticate(token, now); again != who {
		t.Error("the same key has two callers")
	}
	for name, bad := range map[string]string{
		"empty": "", "short": token[:len(token)-1], "long": token + "a", "other secret": token[:len(token)-1] + "7", "other id": strings.Replace(token, k.ID, other.ID, 1),
		"no prefix": "xxx_" + token[4:], "unknown id": strings.Replace(token, k.ID, "aaaaaaaa", 1), "the hash": k.Hash,
	} {
		if bad == token {
			bad = token[:len(token)-1] + "6"
		}
		// security: K2
		if _, err := r.Authenticate(bad, now); err != ErrToken { // the very same for all of them
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := r.Authenticate(token, now.Add(time.Hour)); !errors.Is(err, ErrExpired) {
		t.Errorf("expired: %v", err)
	}
	k.Revoked = now
	if changed, err := r.Put(k, now); err != nil || !changed {
		t.Fatal(changed, err)
	}
	if _, err := r.Authenticate(token, now); !errors.Is(err, ErrRevoked) || !strings.Contains(err.Error(), k.ID) {
		t.Errorf("revoked: %v", err)
	}
	k.Revoked = time.Time{}
	// security: K9
	if changed, err := r.Put(k, now); err != nil || changed {
		t.Errorf("an older state made a revoked key valid again: %v %v", changed, err)
	}
	if err := r.Valid(who, now); !errors.Is(err, ErrRevoked) {
		t.Errorf("a caller with the revoked key is valid: %v", err)
	}
}

// A token is a public prefix and 160 random bits, and the stored key contains only its SHA-256.
func TestTokenIsStoredAsItsHash(t *testing.T) {
	k, token := key(t, "devices:read", "")
	secret, ok := strings.CutPrefix(token, "fld_"+k.ID+"_")
	// security: K1
	if bits, err := tokenEncoding.DecodeString(secret); !ok || err != nil || len(bits) != 160/8 {
		t.Errorf("the secret has %d bytes, %v", len(bits), err)
	}
	if _, other := key(t, "devices:read", ""); strings.HasSuffix(other, secret) {
		t.Error("two tokens have the same secret")
	}
	// security: K1
	if sum := sha256.Sum256([]byte(token)); k.Hash != hex.EncodeToString(sum[:]) {
		t.Errorf("the hash is %s", k.Hash)
	}
	stored, err := json.Marshal(k)
	if err != nil {
		t.Fatal(err)
	}
	// security: K1
	if strings.Contains(string(stored), secret) {
		t.Errorf("stored with its secret: %s", stored)
	}
}

func TestRegistryIsBounded(t *testing.T) {
	r := NewRegistry()
	k, _ := key(t, "devices:read", "")
	for i := range maxKeys {
		k.ID = string(tokenEncoding.EncodeToString([]byte{byte(i >> 16), byte(i >> 8), byte(i), 0, 1}))
		if _, err := r.Put(k, now); err != nil {
			t.Fatal(err)
		}
	}
	k.ID = "aaaaaaaz"
	if _, err := r.Put(k, now); err == nil {
		t.Fatal("a key beyond the limit was added")
	}
	if _, err := r.Put(k, now.Add(time.Hour)); err != nil || len(r.Keys()) != maxKeys { // the others have expired
		t.Fatal(err, len(r.Keys()))
	}
	if _, there := r.Caller(k.ID); !there {
		t.Error("the new key was not added")
	}
}

// A name that was used twice refers to the valid key.
func TestFindPrefersTheValidKey(t *testing.T) {
	for range 20 { // whichever comes first in the map
		r := NewRegistry()
		valid, _ := key(t, "devices:read", "")
		for range 4 {
			ended, _ := key(t, "devices:read", "")
			ended.Revoked = now
			if _, err := r.Put(ended, now); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := r.Put(valid, now); err != nil {
			t.Fatal(err)
		}
		if k, ok := r.Find(valid.Name, now); !ok || k.ID != valid.ID {
			t.Fatalf("%s is %s, which was revoked", valid.Name, k.ID)
		}
	}
}

// Keys are added, authenticated and listed concurrently.
func TestRegistryConcurrently(t *testing.T) {
	r := NewRegistry()
	var all sync.WaitGroup
	for range 4 {
		k, token := key(t, "devices:read", "")
		all.Go(func() {
			for i := range 50 {
				if i == 25 {
					k.Revoked = now
				}
				if _, err := r.Put(k, now); err != nil {
					t.Error(err)
				}
				if _, err := r.Authenticate(token, now); (err != nil) != (i >= 25) {
					t.Errorf("%d: %v", i, err)
				}
				r.Keys()
			}
		})
	}
	all.Wait()
}

// If no token is required, a key still authenticates its caller, and any other token is ignored.
func TestDoorWithoutTokens(t *testing.T) {
	r := NewRegistry()
	k, token := key(t, "devices:read", "")
	if _, err := r.Put(k, now); err != nil {
		t.Fatal(err)
	}
	d := Authenticator{Keys: r, IsAdmin: func(token string) bool { return token == "admin" }, Open: true}
	for given, want := range map[string]string{"": KeyOpen, "left over": KeyOpen, "admin": KeyAdmin, token: k.ID} {
		if who, err := d.Authenticate(given, now); err != nil || who.Key != want {
			t.Errorf("%.10q is %+v, %v", given, who, err)
		}
	}
	d.Open = false
	for _, given := range []string{"", "left over"} {
		if who, err := d.Authenticate(given, now); !errors.Is(err, ErrToken) {
			t.Errorf("%q is %+v, %v", given, who, err)
		}
	}
}

// Scopes of a newer node grant nothing here.
func TestUnknownScopes(t *testing.T) {
	scopes := AllScopes()
	if err := json.Unmarshal([]byte(`["devices:read","a later one"]`), &scopes); err != nil || len(scopes.Names()) != 1 {
		t.Errorf("%q, %v", scopes.Names(), err)
	}
}

func TestNewKeyRefuses(t *testing.T) {
	var all selector.Selector
	admin, _ := ParseScopes([]string{"admin"})
	read, _ := ParseScopes([]string{"devices:read"})
	for name, try := range map[string]func() error{
		"no scope":      func() error { _, _, err := NewKey("k", 0, all, nil, now, now.Add(1)); return err },
		"no name":       func() error { _, _, err := NewKey("", read, all, nil, now, now.Add(1)); return err },
		"name in rules": func() error { _, _, err := NewKey("admin", read, all, nil, now, now.Add(1)); return err },
		"line break":    func() error { _, _, err := NewKey("a\nb", read, all, nil, now, now.Add(1)); return err },
		"expired":       func() error { _, _, err := NewKey("k", read, all, nil, now, now); return err },
		"limited admin": func() error {
			_, _, err := NewKey("k", admin, selector.FromMap(map[string]string{"a": "b"}), nil, now, now.Add(1))
			return err
		},
		"empty glob":    func() error { _, _, err := NewKey("k", read, all, []string{""}, now, now.Add(1)); return err },
		"unknown scope": func() error { _, err := ParseScopes([]string{"devices:rea"}); return err },
		"a field": func() error {
			board, _ := selector.Parse("board=x")
			_, _, err := NewKey("k", read, board, nil, now, now.Add(1))
			return err
		},
		"no label": func() error {
			_, _, err := NewKey("k", read, selector.FromMap(map[string]string{"a b": "x"}), nil, now, now.Add(1))
			return err
		},
		"name like an id": func() error { _, _, err := NewKey("abcdefgh", read, all, nil, now, now.Add(1)); return err },
		"long glob": func() error {
			_, _, err := NewKey("k", read, all, []string{strings.Repeat("a", maxGlob+1)}, now, now.Add(1))
			return err
		},
		"many globs": func() error {
			_, _, err := NewKey("k", read, all, slices.Repeat([]string{"a"}, maxGlobs+1), now, now.Add(1))
			return err
		},
	} {
		if try() == nil {
			t.Errorf("%s passes", name)
		}
	}
}

// A key with a selector on labels needs known labels.
func TestPermitUnknown(t *testing.T) {
	for devices, want := range map[string][2]bool{ // with no labels, with unknown labels
		"": {true, true}, "device=d": {true, true}, "device!=d": {false, false}, "room=lab": {false, false},
		"room!=lab": {true, false}, "!room": {true, false}, "room not in (a,b),device=d": {true, false},
	} {
		by := Principal{Caller: caller(t, "devices:read", devices)}
		if got := [2]bool{by.Permit(ScopeRead, "d", nil) == nil, by.PermitUnknown(ScopeRead, "d") == nil}; got != want {
			t.Errorf("%q: %v, want %v", devices, got, want)
		}
		if no := by.PermitUnknown(ScopeRead, ""); no != nil {
			t.Errorf("%q: no device: %v", devices, no)
		}
		if no := by.PermitUnknown(ScopeCall, "d"); no == nil || no.Rule != RuleScope {
			t.Errorf("%q: %v", devices, no)
		}
	}
	if no := (Principal{}).PermitUnknown(ScopeRead, "d"); no == nil || no.Rule != RuleCaller {
		t.Errorf("no caller: %v", no)
	}
}

// A key with a selector on a field that devices report gives no access.
func TestFieldsOpenNothing(t *testing.T) {
	for _, devices := range []string{"board!=x", "!seen", "state=online", "room=lab,tool!=a", "name=*"} {
		s, err := selector.Parse(devices)
		if err != nil {
			t.Fatal(err)
		}
		by := Principal{Caller: NewCaller("k", "k", AllScopes(), s, nil)}
		// security: K3
		if no := by.Permit(ScopeRead, "d", map[string]string{"room": "lab"}); no == nil || no.Rule != RuleDevices {
			t.Errorf("%q opens a device: %v", devices, no)
		}
	}
}

// Webhooks ask for every event whether its device is one of theirs, and mostly it is not: no text is written for that.
func TestRefusalAllocs(t *testing.T) {
	s, err := selector.Parse("room=attic,env in (a,b)")
	if err != nil {
		t.Fatal(err)
	}
	by, labels := Principal{Caller: NewCaller("k", "k", AllScopes(), s, nil)}, map[string]string{"room": "lab"}
	var no *Refusal
	if n := testing.AllocsPerRun(100, func() { no = by.Permit(ScopeRead, "d", labels) }); n > 1 {
		t.Errorf("%v allocations", n)
	}
	if want := `the key "k" covers only devices with ` + s.String(); no == nil || no.Detail != want {
		t.Errorf("refused with %v, want %q", no, want)
	}
}

// Documents from before selectors were text are parsed with their old meaning, and written
// unchanged.
func TestStoredDocuments(t *testing.T) {
	const storedKey = `{"id":"abcdefgh","name":"lab agent","hash":"ab","scopes":["devices:read"],"devices":{"board":"green","room":"a*, b"},"tools":["*get_*"],"created":"2026-11-22T12:00:00Z"}`
	var k Key
	if err := json.Unmarshal([]byte(storedKey), &k); err != nil {
		t.Fatal(err)
	}
	by := Principal{Caller: NewCaller(k.ID, k.Name, k.Scopes, k.Devices, k.Tools)}
	for room, want := range map[string]bool{"a*, b": true, "a, b": false, "ab, b": false} {
		if got := by.Permit(ScopeRead, "d", map[string]string{"board": "green", "room": room}) == nil; got != want {
			t.Errorf("room %q: %v", room, got)
		}
	}
	if by.Permit(ScopeRead, "d", map[string]string{"room": "a*, b"}) == nil {
		t.Error("board must be read as a label, which the device does not have")
	}
	if again, err := json.Marshal(k); err != nil || string(again) != strings.Replace(storedKey, `"devices:read"`, `"devices:read","photos:read"`, 1) {
		t.Errorf("%s, %v", again, err)
	}
	const storedPolicy = `{"version":7,"rules":[{"name":"quiet","tools":["self.*"],"devices":{"device":"02:00:00:00:00:01","living room":"x"},"action":"deny"},{"name":"rest","action":"confirm"}],` +
		`"reads":[{"tools":["a"],"devices":{"room":"lab"}}],"changed":"2026-11-22T12:00:00Z","by":"ops (abcdefgh)"}`
	p, err := ParsePolicy([]byte(storedPolicy))
	if err != nil {
		t.Fatal(err)
	}
	if again, err := json.Marshal(p); err != nil || string(again) != storedPolicy {
		t.Errorf("%s, %v", again, err)
	}
	const grant = `{"via":"rest","from":"","who":{"key":"abcdefgh","name":"n","scopes":["devices:read"],"devices":{"room":"lab"}}}`
	var r Reader
	if who := r.Parse(grant).Caller; who == nil || who.Devices.String() != "room=lab" || !who.Limited() {
		t.Errorf("%+v", who)
	}
}

func TestPolicySelectors(t *testing.T) {
	for text, want := range map[string]string{
		`{"rules":[{"name":"a","action":"deny"},{"name":"b","action":"deny","devices":"room in lab"}]}`: `rule 2 ("b"): devices: selector "room in lab", column 9: expected "("`,
		`{"rules":[{"name":"a","action":"deny","devices":"room=lab,board=x"}]}`:                         `rule 1 ("a"): devices: only device and labels may be used in API keys and policy: board is reported by the device itself`,
		`{"reads":[{"tools":["a"],"devices":"!"}]}`:                                                     `reads 1: devices: selector "!", column 2`,
		`{"reads":[{"tools":["a"],"devices":"seen>1h"}]}`:                                               `reads 1: devices: only device and labels`,
		`{"rules":[{"name":"a","action":"deny","devices":["room"]}]}`:                                   `rule 1 ("a"): devices: a selector is text`,
		`{"rules":[{"name":"a","action":"deny","device":"d"}]}`:                                         `unknown field`,
	} {
		if _, err := ParsePolicy([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
	p, err := ParsePolicy([]byte(`{"rules":[{"name":"a","action":"deny","devices":"room!=lab,floor in (1,2)"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	g, err := Compile(p)
	if err != nil {
		t.Fatal(err)
	}
	for room, want := range map[string]Action{"lab": Allow, "hall": Deny} {
		if got := g.RuleAction(Query{By: Principal{Caller: Admin}, Device: "d", Labels: map[string]string{"room": room, "floor": "2"}}); got != want {
			t.Errorf("%s: %s", room, got)
		}
	}
	if !g.MayAllow(Query{By: Principal{Caller: Admin}, Tool: "x"}) {
		t.Error("the rule counts as one without labels")
	}
}

func TestDecide(t *testing.T) {
	policy, err := ParsePolicy([]byte(`{"version":3,"rules":[
		{"name":"no night light","tools":["self.lamp.*"],"devices":{"room":"bedroom"},"action":"deny"},
		{"name":"ask for motion","tools":["*.walk"],"action":"confirm"},
		{"name":"robots may","tools":["self.reboot"],"keys":["test key"],"via":["mcp"],"devices":{"kind":"robot"},"action":"allow"},
		{"name":"chat server","keys":["voice"],"tools":["self.camera.*"],"action":"deny"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	g, err := Compile(policy)
	if err != nil {
		t.Fatal(err)
	}
	model, person := caller(t, "tools:call", ""), caller(t, "tools:call:user", "")
	lab := caller(t, "tools:call devices:read", "room=lab", "*get_*")
	voice := NewCaller(KeyVoice, "voice", AllScopes(), selector.Selector{}, nil)
	bedroom, robot, labroom := map[string]string{"room": "bedroom"}, map[string]string{"kind": "robot"}, map[string]string{"room": "lab"}
	for _, c := range []struct {
		name   string
		q      Query
		action Action
		rule   string
	}{
		{"nobody", Query{Tool: "x", Listed: true}, Deny, RuleCaller},
		{"no scope", Query{By: Principal{Caller: caller(t, "devices:read", "")}, Tool: "x", Listed: true}, Deny, RuleScope},
		{"plain", Query{By: Principal{Caller: model}, Tool: "x", Listed: true}, Allow, RuleDefault},
		{"user tool by mark", Query{By: Principal{Caller: model}, Tool: "x", Listed: true, UserOnly: true}, Deny, RuleUserOnly},
		{"user tool by name", Query{By: Principal{Caller: model}, Tool: "self.reboot", Listed: true}, Deny, RuleUserOnly},
		{"not listed", Query{By: Principal{Caller: model}, Tool: "x"}, Deny, RuleUnlisted},
		{"not listed, person", Query{By: Principal{Caller: person}, Tool: "x"}, Allow, RuleDefault},
		{"other room", Query{By: Principal{Caller: lab}, Tool: "self.get_x", Labels: bedroom, Device: "d", Listed: true}, Deny, RuleDevices},
		{"no labels", Query{By: Principal{Caller: lab}, Tool: "self.get_x", Device: "d", Listed: true}, Deny, RuleDevices},
		{"its room", Query{By: Principal{Caller: lab}, Tool: "self.get_x", Labels: labroom, Device: "d", Listed: true}, Allow, RuleDefault},
		{"other tool", Query{By: Principal{Caller: lab}, Tool: "self.set_x", Labels: labroom, Device: "d", Listed: true}, Deny, RuleTools},
		{"rule by label", Query{By: Principal{Caller: Admin}, Tool: "self.lamp.turn_on", Labels: bedroom, Device: "d", Listed: true}, Deny, "policy:no night light"},
		{"rule, other label", Query{By: Principal{Caller: Admin}, Tool: "self.lamp.turn_on", Labels: labroom, Device: "d", Listed: true}, Allow, RuleDefault},
		{"confirm", Query{By: Principal{Caller: Admin}, Tool: "self.dog.walk", Listed: true}, Confirm, "policy:ask for motion"},
		{"reboot by a model's host", Query{By: Principal{Caller: person, Via: ViaMCP}, Tool: "self.reboot", Listed: true}, Confirm, RuleConfirm},
		{"reboot by a person", Query{By: Principal{Caller: person, Via: ViaREST}, Tool: "self.reboot", Listed: true}, Allow, RuleDefault},
		{"first rule wins", Query{By: Principal{Caller: person, Via: ViaMCP}, Labels: robot, Device: "d", Tool: "self.reboot", Listed: true}, Allow, "policy:robots may"},
		{"a rule widens no key", Query{By: Principal{Caller: model, Via: ViaMCP}, Labels: robot, Device: "d", Tool: "self.reboot", Listed: true}, Deny, RuleUserOnly},
		{"keys by their fixed names", Query{By: Principal{Caller: voice}, Tool: "self.camera.take_photo", Listed: true}, Deny, "policy:chat server"},
	} {
		d := g.Decide(c.q)
		// security: K7 K10
		if d.Action != c.action || d.Rule != c.rule || (d.Refusal != nil) != (c.action == Deny) || d.Refusal != nil && (d.Refusal.Detail == "" || d.Refusal.Rule != d.Rule) {
			t.Errorf("%s: %+v %+v", c.name, d, d.Refusal)
		}
	}
}

func TestPolicyRefuses(t *testing.T) {
	for name, text := range map[string]string{
		"not JSON": `{`, "unknown member": `{"rule":[]}`, "two documents": `{}{}`, "no name": `{"rules":[{"action":"deny"}]}`,
		"no action": `{"rules":[{"name":"a"}]}`, "other action": `{"rules":[{"name":"a","action":"ask"}]}`, "via": `{"rules":[{"name":"a","action":"deny","via":["http"]}]}`,
		"twice": `{"rules":[{"name":"a","action":"deny"},{"name":"a","action":"allow"}]}`, "empty glob": `{"rules":[{"name":"a","action":"deny","tools":[""]}]}`,
		"ttl": `{"reads":[{"tools":["a"],"ttl":"1h"}]}`, "negative ttl": `{"reads":[{"tools":["a"],"ttl":"-1s"}]}`,
		"prefix with a query": `{"urls":[{"tools":["*"],"prefixes":["http://a/?x"]}]}`, "long prefix": `{"urls":[{"tools":["*"],"prefixes":["http://a/` + strings.Repeat("x", maxURL) + `"]}]}`, "reads without tools": `{"reads":[{"ttl":"1s"}]}`, "ftp": `{"urls":[{"tools":["*"],"prefixes":["ftp://a/"]}]}`,
		"user": `{"urls":[{"tools":["*"],"prefixes":["http://a@b/"]}]}`, "large": `{"by":"` + strings.Repeat("x", MaxPolicyBytes) + `"}`,
	} {
		// security: K14
		if _, err := ParsePolicy([]byte(text)); err == nil {
			t.Errorf("%s passes", name)
		}
	}
	if _, err := ParsePolicy([]byte(`{}`)); err != nil {
		t.Error(err)
	}
	rules := make([]Rule, MaxRules+1)
	for i := range rules {
		rules[i] = Rule{Name: fmt.Sprint("rule ", i), Action: Deny}
	}
	if _, err := Compile(Policy{Rules: rules[:MaxRules]}); err != nil {
		t.Error(err)
	}
	if _, err := Compile(Policy{Rules: rules}); err == nil {
		t.Error("a policy with one rule too many is accepted")
	}
}

func TestCheckURL(t *testing.T) {
	p, err := ParsePolicy([]byte(`{"urls":[{"tools":["self.upgrade_firmware"],"prefixes":["https://fw.example.com/releases/","http://10.0.0.1:8080"]},
		{"tools":["self.screen.*"],"prefixes":["https://pics.example.com/a"]}]}`))
	if err != nil {
		t.Fatal(err)
	}
	g, err := Compile(p)
	if err != nil {
		t.Fatal(err)
	}
	const up, show = "self.upgrade_firmware", "self.screen.preview_image"
	for _, c := range []struct {
		tool, arguments string
		ok              bool
	}{
		{up, `{"url":"https://fw.example.com/releases/v2.bin"}`, true},
		{up, `{"url":"https://FW.example.com:443/releases/v2.bin?x=1"}`, true},
		{up, `{"url":"http://10.0.0.1:8080/x"}`, true},
		{up, `{"url":"http://10.0.0.1/x"}`, false},
		{up, `{"url":"http://10.0.0.1:80801/x"}`, false},
		{up, `{"url":"http://fw.example.com/releases/v2.bin"}`, false},
		{up, `{"url":"https://fw.example.com/releases/../evil"}`, false},
		{up, `{"url":"https://fw.example.com/releases/%2e%2e/evil"}`, false},
		{up, `{"url":"https://fw.example.com/releases%2f..%2fevil"}`, false},
		{up, `{"url":"https://fw.example.com.evil.example/releases/v"}`, false},
		{up, `{"url":"https://evil.example\\@fw.example.com/releases/v"}`, false},
		{up, `{"url":"https://fw.example.com@evil.example/releases/v"}`, false},
		{up, `{"url":"https://fw.example.com/releases/v#x"}`, false},
		{up, `{"url":" https://fw.example.com/releases/v"}`, false},
		{up, `{"url":"https://evil.example/","URL":"https://fw.example.com/releases/v"}`, false},
		{up, `{"Url":"https://evil.example/"}`, false},
		{up, `{"url\u0000x":"https://evil.example/"}`, false},
		{up, `{}`, true}, // the check of the arguments wants it
		{show, `{"url":"https://pics.example.com/a/1.jpg"}`, true},
		{show, `{"url":"https://pics.example.com/ab/1.jpg"}`, false},
		{show, `{"url":"https://fw.example.com/releases/1.jpg"}`, false},
		{"self.other", `{"url":"https://evil.example/"}`, true},
		{"self.screen.custom", `{"url":"https://pics.example.com/a/1.jpg"}`, true}, // no tool of stock firmware, and the list names it
		{"self.screen.custom", `{"url":"https://evil.example/"}`, false},
		{"self.screen.custom", `{"other":"https://evil.example/"}`, true},
	} {
		// security: K13
		if no := g.CheckURL(c.tool, json.RawMessage(c.arguments)); (no == nil) != c.ok {
			t.Errorf("%s %s: %v", c.tool, c.arguments, no)
		}
	}
	// security: K13
	if DefaultGuard().CheckURL(up, json.RawMessage(`{"url":"https://fw.example.com/"}`)) == nil {
		t.Error("without a policy every URL is allowed")
	}
}

func TestMatch(t *testing.T) {
	for _, c := range []struct {
		glob, name string
		ok         bool
	}{{"*get_*", "self.get_device_status", true}, {"*get_*", "self.set", false}, {"a?c", "abc", true}, {"a?c", "ac", false}, {"", "", true}, {"*", "", true},
		{"*a*b*c*", "xaxbxcx", true}, {"*a*b*c", "xaxbxcx", false}, {"self.[a]", "self.a", false}, {strings.Repeat("*a", 40) + "b", strings.Repeat("a", 120), false}} {
		if Match(c.glob, c.name) != c.ok {
			t.Errorf("%s %s", c.glob, c.name)
		}
	}
}

func TestByOnTheWire(t *testing.T) {
	var r Reader
	who := caller(t, "tools:call devices:read", `room=lab,a="\"b"`, "*get_*", "x")
	by := Principal{Caller: who, Via: ViaMCP, From: "10.0.0.1:5"}
	got := r.Parse(string(AppendPrincipal(nil, by)))
	if got.Via != by.Via || got.From != by.From || got.Caller == nil || got.Caller.Key != who.Key || got.Caller.Scopes != who.Scopes || got.Caller.Devices.String() != who.Devices.String() || len(got.Caller.Tools) != 2 {
		t.Errorf("%+v", got)
	}
	if again := r.Parse(string(AppendPrincipal(nil, by))); again.Caller != got.Caller {
		t.Error("the same caller was created twice")
	}
	if own := r.Parse(string(AppendPrincipal(nil, Principal{Caller: Fleet}))); own.Caller != Fleet {
		t.Errorf("a node's own request: %+v", own)
	}
	for _, bad := range []string{"rest", "{", `{"who":3}`, `{"who":null}`, `{"via":"rest"}`, string(AppendPrincipal(nil, Principal{}))} {
		if got := r.Parse(bad); got.Caller != nil {
			t.Errorf("%s is %+v", bad, got)
		}
	}
}

// FuzzParsePolicy checks the guarantees of an accepted policy:
// it is unchanged when written again, its rules have different names, and it decides.
func FuzzParsePolicy(f *testing.F) {
	f.Add([]byte(`{"rules":[{"name":"a","action":"deny"},{"name":"a","action":"allow"}]}`))
	f.Add([]byte(`{"rules":[{"name":"b","action":"confirm"}],"reads":[{"tools":["x"],"ttl":"11m"}]}`))
	f.Add([]byte(`{"rules":[{"name":"b","action":"confirm"}],"reads":[{"tools":["x"],"ttl":"10m"}]}`))
	f.Add([]byte(`{"rules":[{"name":"a","action":"deny","devices":"room in (a,b),!x,y=z*"},{"name":"b","action":"deny","devices":{"room":"a*","device":"AABBCCDDEEFF"}}]}`))
	f.Add([]byte(`{"rules":[{"name":"a","action":"deny"}],"urls":[{"tools":["*"],"prefixes":["http://a/"]}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		p, err := ParsePolicy(text)
		if err != nil {
			return
		}
		again, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		if len(again) > MaxPolicyBytes {
			return
		}
		read, err := ParsePolicy(again)
		// security: K14
		if err != nil {
			t.Fatalf("%s is refused when written again: %v", text, err)
		}
		if last, err := json.Marshal(read); err != nil || string(last) != string(again) {
			t.Errorf("%s is %s when written again: %v", again, last, err)
		}
		names := map[string]bool{}
		for _, r := range p.Rules {
			if names[r.Name] || r.Name == "" || r.Action != Allow && r.Action != Confirm && r.Action != Deny {
				t.Errorf("%s is accepted with the rule %+v", text, r)
			}
			names[r.Name] = true
		}
		for _, r := range p.Reads {
			if ttl, err := time.ParseDuration(r.TTL); r.TTL != "" && (err != nil || ttl < 0 || ttl > MaxTTL) || len(r.Tools) == 0 {
				t.Errorf("%s is accepted with %+v", text, r)
			}
		}
		guard, err := Compile(p)
		if err != nil {
			t.Fatal(err)
		}
		if len(p.Rules) == 0 {
			return
		}
		first := p.Rules[0]
		unconditional := len(first.Tools)+len(first.Keys)+len(first.Via) == 0 && first.Devices.IsZero()
		if got := guard.RuleAction(Query{By: Principal{Caller: Admin, Via: ViaREST}, Device: "d", Tool: "self.x"}); unconditional && got != first.Action {
			t.Errorf("%s judges %s by its first rule", text, got)
		}
	})
}
