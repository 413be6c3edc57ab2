package access

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"fleetd/internal/selector"
)

// Action is the action of a rule.
type Action string

// Actions.
const (
	Allow   Action = "allow"
	Confirm Action = "confirm" // a person has to confirm each call
	Deny    Action = "deny"
)

// Limits of a policy.
const (
	MaxPolicyBytes = 64 << 10
	MaxRules       = 500
	maxPrefixes    = 100
	MaxTTL         = 10 * time.Minute
)

// Policy contains the rules of the tool guard, written by operators. It is one JSON document;
// a newer version replaces the older one completely.
type Policy struct {
	// Version is increased with each change; 0 is the policy of a fleet without one. The
	// writer sets it.
	Version int64 `json:"version"`
	// Rules decide about calls: the first that matches and has an action.
	Rules []Rule `json:"rules,omitempty"`
	// Reads are read-only tools: their results may be reused for a while, and concurrent
	// identical calls reach the device once.
	Reads []Read `json:"reads,omitempty"`
	// URLs are the allowed URLs, by glob of the tool. A tool that takes a URL and is not
	// listed may be given none.
	URLs []URLRule `json:"urls,omitempty"`
	// AuditArguments are globs of tools whose arguments are kept in the audit log; for
	// others it has a digest.
	AuditArguments []string `json:"audit_arguments,omitempty"`
	// Changed is when, and By is who wrote this version. The server sets them.
	Changed time.Time `json:"changed,omitzero"`
	By      string    `json:"by,omitempty"`
	// Warnings are probable mistakes. They are only in responses.
	Warnings []string `json:"warnings,omitempty"`
}

// Rule is one rule of a policy. All its conditions must match; a rule without conditions
// matches every call.
type Rule struct {
	Name    string            `json:"name"`
	Tools   []string          `json:"tools,omitempty"`  // globs
	Devices selector.Selector `json:"devices,omitzero"` // only by id and labels
	Keys    []string          `json:"keys,omitempty"`   // ids or names of keys; admin, open, voice and gateway are the callers without a key
	Via     []Via             `json:"via,omitempty"`
	Action  Action            `json:"action"`
}

// Read describes read-only tools.
type Read struct {
	Tools   []string          `json:"tools"`
	Devices selector.Selector `json:"devices,omitzero"` // only by id and labels
	// TTL is for how long a result may be reused, such as "2s"; empty: only concurrent calls
	// share one.
	TTL string `json:"ttl,omitempty"`

	ttl time.Duration
}

// URLRule lists the URLs that tools may be given.
type URLRule struct {
	Tools    []string `json:"tools"`
	Prefixes []string `json:"prefixes"` // such as https://firmware.example.com/releases/
}

// ParsePolicy parses a document strictly and validates it. Errors name the rule.
func ParsePolicy(text []byte) (Policy, error) {
	var p Policy
	if len(text) > MaxPolicyBytes {
		return p, fmt.Errorf("the policy has %d bytes, at most %d are allowed", len(text), MaxPolicyBytes)
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&p); err != nil {
		return p, fmt.Errorf("the policy is not a valid document: %w", cmp.Or(selectorError(text), err))
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return p, errors.New("the policy must be a single JSON document; remove the text after its end")
	}
	_, err := Compile(p)
	return p, err
}

// selectorError returns the error of the first rule with an invalid selector; nil if there is
// none.
func selectorError(text []byte) error {
	var p struct {
		Rules, Reads []struct {
			Name    string
			Devices json.RawMessage
		}
	}
	if json.Unmarshal(text, &p) != nil {
		return nil
	}
	var s selector.Selector
	for i, r := range p.Rules {
		if len(r.Devices) > 0 {
			if err := json.Unmarshal(r.Devices, &s); err != nil {
				return fmt.Errorf("rule %d (%q): devices: %w", i+1, r.Name, err)
			}
		}
	}
	for i, r := range p.Reads {
		if len(r.Devices) > 0 {
			if err := json.Unmarshal(r.Devices, &s); err != nil {
				return fmt.Errorf("reads %d: devices: %w", i+1, err)
			}
		}
	}
	return nil
}

// Guard is a compiled policy. It is immutable.
type Guard struct {
	policy Policy
	urls   []urlRule
}

// builtin are the rules after those of every policy. A language model may read text that
// makes it do harm; tools that interrupt a device's work, or change what it runs, therefore
// need the confirmation of a person.
var builtin = []Rule{{
	Name: RuleConfirm, Via: []Via{ViaMCP}, Action: Confirm,
	Tools: []string{"self.reboot", "self.upgrade_firmware", "self.assets.set_download_url", "self.res.esp_restart", "self.system.reconfigure_wifi", "self.disp.network"},
}}

// builtinReads are the read-only tools of stock firmware, whose concurrent calls may share
// one result.
var builtinReads = Read{Tools: []string{"self.get_device_status", "self.get_system_info", "self.screen.get_info"}}

// DefaultGuard returns a Guard with only the built-in rules.
func DefaultGuard() *Guard { return &Guard{} }

// Compile validates a policy and returns its Guard.
func Compile(p Policy) (*Guard, error) {
	if len(p.Rules) > MaxRules || len(p.Reads) > MaxRules || len(p.URLs) > MaxRules {
		return nil, fmt.Errorf("a policy has at most %d rules of each kind", MaxRules)
	}
	p.Rules, p.Reads, p.URLs = slices.Clone(p.Rules), slices.Clone(p.Reads), slices.Clone(p.URLs)
	g := &Guard{policy: p}
	seen := map[string]bool{}
	for i, r := range p.Rules {
		if err := r.check(); err != nil {
			return nil, fmt.Errorf("rule %d (%q): %w", i+1, r.Name, err)
		}
		if seen[r.Name] {
			return nil, fmt.Errorf("rule %d: the name %q is used by another rule; choose another, since refusals contain the name", i+1, r.Name)
		}
		seen[r.Name] = true
	}
	for i := range p.Reads {
		if err := p.Reads[i].prepare(); err != nil {
			return nil, fmt.Errorf("reads %d: %w", i+1, err)
		}
	}
	for i, r := range p.URLs {
		rule, err := r.compile()
		if err != nil {
			return nil, fmt.Errorf("urls %d: %w", i+1, err)
		}
		g.urls = append(g.urls, rule)
	}
	if err := checkGlobs(p.AuditArguments); err != nil {
		return nil, fmt.Errorf("audit_arguments: %w", err)
	}
	return g, nil
}

func (r *Rule) check() error {
	if r.Name == "" || len(r.Name) > maxNameBytes || !isPlain(r.Name) {
		return fmt.Errorf("a rule needs a name of at most %d bytes, since refusals and the audit log contain it", maxNameBytes)
	}
	if !slices.Contains([]Action{Allow, Confirm, Deny}, r.Action) {
		return fmt.Errorf("unknown action %q; use allow, confirm or deny", r.Action)
	}
	for _, via := range r.Via {
		if !slices.Contains([]Via{ViaREST, ViaRaw, ViaNATS, ViaGateway, ViaVoice, ViaMCP, ViaJob}, via) {
			return fmt.Errorf("unknown via %q; use rest, raw, nats, gateway, voice, mcp or job", via)
		}
	}
	if slices.Contains(r.Keys, "") || len(r.Keys) > maxGlobs {
		return fmt.Errorf("keys takes 1 to %d ids or names", maxGlobs)
	}
	return errors.Join(checkGlobs(r.Tools), checkIdentity(r.Devices))
}

func (r *Read) prepare() (err error) {
	if len(r.Tools) == 0 {
		return errors.New("tools are missing; list tools without an effect on the device")
	}
	if r.TTL != "" {
		if r.ttl, err = time.ParseDuration(r.TTL); err != nil || r.ttl < 0 || r.ttl > MaxTTL {
			return fmt.Errorf("ttl %q must be a duration such as \"2s\", at most %v", r.TTL, MaxTTL)
		}
	}
	return errors.Join(checkGlobs(r.Tools), checkIdentity(r.Devices))
}

// checkIdentity returns an error if a rule may not have this selector.
func checkIdentity(s selector.Selector) error {
	if err := s.Identity(); err != nil {
		return fmt.Errorf("devices: %w", err)
	}
	return nil
}

// NeedsLabels reports whether some decision depends on a device's labels.
func (g *Guard) NeedsLabels() bool {
	return slices.ContainsFunc(g.policy.Rules, func(r Rule) bool { return r.Devices.NeedsLabels() }) ||
		slices.ContainsFunc(g.policy.Reads, func(r Read) bool { return r.Devices.NeedsLabels() })
}

// Policy returns the policy of the guard.
func (g *Guard) Policy() Policy { return g.policy }

// Query is a call to be decided.
type Query struct {
	By     Principal
	Device string
	Labels map[string]string
	Tool   string
	// UserOnly means that the device marks the tool as not meant for language models; Listed
	// that this is known: the tool is in the device's list, or the list is complete.
	UserOnly, Listed bool
}

// Decision is the result. Refusal is set with Deny.
type Decision struct {
	Action  Action
	Rule    string
	Refusal *Refusal
}

// Decide decides about a call: first by the rights of the key, which no rule can extend; then
// by the policy's rules in order; then by the built-in ones.
func (g *Guard) Decide(q Query) Decision {
	if no := q.By.Permit(ScopeCall, q.Device, q.Labels); no != nil {
		return denied(no)
	}
	who := q.By.Caller
	if !MatchAny(who.Tools, q.Tool) {
		return deny(RuleTools, "the key %q does not cover the tool %q", who.Name, q.Tool)
	}
	if !who.Scopes.Has(ScopeUser) {
		switch {
		case q.UserOnly, IsUserTool(q.Tool):
			return deny(RuleUserOnly, "the tool %q is user-only (not for language models), and the key %q does not have the scope %s", q.Tool, who.Name, ScopeUser)
		case !q.Listed:
			return deny(RuleUnlisted, "the device has not listed the tool %q yet, so it may be user-only; try again, or use a key with the scope %s", q.Tool, ScopeUser)
		}
	}
	if r, prefix := g.rule(&q); r != nil {
		return r.decide(prefix+r.Name, &q)
	}
	return Decision{Action: Allow, Rule: RuleDefault}
}

// rule returns the first rule that matches, nil if none does; prefix precedes its name in
// decisions.
func (g *Guard) rule(q *Query) (r *Rule, prefix string) {
	for i := range g.policy.Rules {
		if r := &g.policy.Rules[i]; r.matches(q) {
			return r, rulePolicy
		}
	}
	for i := range builtin {
		if r := &builtin[i]; r.matches(q) {
			return r, ""
		}
	}
	return nil, ""
}

// RuleAction returns the action of the rules alone, for a call that the key may make. Unlike
// Decide it gives no reason, and does not allocate.
func (g *Guard) RuleAction(q Query) Action {
	if r, _ := g.rule(&q); r != nil {
		return r.Action
	}
	return Allow
}

// MayAllow reports whether there can be a device on which Decide does not deny the tool; the
// query contains no device.
func (g *Guard) MayAllow(q Query) bool {
	who := q.By.Caller
	if who == nil || !who.Scopes.Has(ScopeCall) || !MatchAny(who.Tools, q.Tool) || !who.Scopes.Has(ScopeUser) && (q.UserOnly || IsUserTool(q.Tool)) {
		return false
	}
	for i := range g.policy.Rules {
		r := g.policy.Rules[i]
		everywhere := r.Devices.IsZero()
		r.Devices = selector.Selector{}
		if r.matches(&q) && (everywhere || r.Action != Deny) {
			return r.Action != Deny
		}
	}
	return true
}

func deny(rule, format string, args ...any) Decision {
	return denied(&Refusal{Rule: rule, Tool: true, Detail: fmt.Sprintf(format, args...)})
}

func denied(no *Refusal) Decision { return Decision{Action: Deny, Rule: no.Rule, Refusal: no} }

func (r *Rule) matches(q *Query) bool { return r.mismatch(q) == "" }

// mismatch returns the first condition of the rule that does not match; empty if all do.
func (r *Rule) mismatch(q *Query) string {
	switch {
	case !MatchAny(r.Tools, q.Tool):
		return "it applies to other tools"
	case !r.Devices.MatchIdentity(q.Device, q.Labels):
		return "it applies to other devices"
	case len(r.Via) > 0 && !slices.Contains(r.Via, q.By.Via):
		return "it applies to other interfaces"
	case len(r.Keys) > 0 && !slices.Contains(r.Keys, q.By.Caller.Key) && !slices.Contains(r.Keys, q.By.Caller.Name):
		return "it applies to other keys"
	}
	return ""
}

func (r *Rule) decide(name string, q *Query) Decision {
	if r.Action == Deny {
		return deny(name, "the rule %q denies the tool %q on this device", r.Name, q.Tool)
	}
	return Decision{Action: r.Action, Rule: name}
}

// userTools are the user-only tools of stock firmware, even if the device does not mark them
// (before v2.1.0), or has not listed them yet.
var userTools = []string{"self.reboot", "self.upgrade_firmware", "self.assets.set_download_url", "self.screen.snapshot", "self.screen.preview_image"}

// IsUserTool reports whether a tool is user-only, whatever the device reports.
func IsUserTool(tool string) bool { return slices.Contains(userTools, tool) }

// Shared reports whether concurrent calls of the tool may share one result, and for how long
// it may be reused.
func (g *Guard) Shared(device string, labels map[string]string, tool string) (ttl time.Duration, ok bool) {
	for i := range g.policy.Reads {
		if r := &g.policy.Reads[i]; MatchAny(r.Tools, tool) && r.Devices.MatchIdentity(device, labels) {
			return r.ttl, true
		}
	}
	return 0, MatchAny(builtinReads.Tools, tool)
}

// KeepsArguments reports whether the audit log keeps a tool's arguments.
func (g *Guard) KeepsArguments(tool string) bool {
	return len(g.policy.AuditArguments) > 0 && MatchAny(g.policy.AuditArguments, tool)
}

// JobRules decides about a tool that a job is to call, when the job is created over the interface
// of the query: confirm are the rules that ask for a confirmation on some device, whatever the
// devices are. Each call is decided again when it begins, via ViaJob; rules that deny only the
// interface of the creation are therefore applied here, even if they are about other devices.
func (g *Guard) JobRules(q Query) (confirm []string, no *Refusal) {
	if no := q.By.Permit(ScopeCall, "", nil); no != nil {
		return nil, no
	}
	who := q.By.Caller
	if !MatchAny(who.Tools, q.Tool) {
		return nil, deny(RuleTools, "the key %q does not cover the tool %q", who.Name, q.Tool).Refusal
	}
	if !who.Scopes.Has(ScopeUser) && (q.UserOnly || IsUserTool(q.Tool)) {
		return nil, deny(RuleUserOnly, "the tool %q is user-only (not for language models), and the key %q does not have the scope %s", q.Tool, who.Name, ScopeUser).Refusal
	}
	for _, via := range []Via{q.By.Via, ViaJob} {
		q.By.Via = via
		reached := true
		for i := range g.policy.Rules {
			r := g.policy.Rules[i]
			everywhere := r.Devices.IsZero()
			r.Devices = selector.Selector{}
			if !reached || !r.matches(&q) {
				continue
			}
			switch {
			case r.Action == Confirm && !slices.Contains(confirm, rulePolicy+r.Name):
				confirm = append(confirm, rulePolicy+r.Name)
			case r.Action == Deny && (everywhere || via != ViaJob && len(r.Via) > 0 && !slices.Contains(r.Via, ViaJob)):
				return nil, r.decide(rulePolicy+r.Name, &q).Refusal
			}
			reached = !everywhere
		}
		for i := range builtin {
			if r := &builtin[i]; reached && r.matches(&q) && r.Action == Confirm && !slices.Contains(confirm, r.Name) {
				confirm = append(confirm, r.Name)
			}
		}
	}
	return confirm, nil
}
