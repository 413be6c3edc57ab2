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

// Action is what a rule says about a call.
type Action string

// Actions.
const (
	Allow   Action = "allow"
	Confirm Action = "confirm" // a person has to say yes, once for each call
	Deny    Action = "deny"
)

// Bounds of a policy.
const (
	MaxPolicyBytes = 64 << 10
	MaxRules       = 500
	maxPrefixes    = 100
	MaxTTL         = 10 * time.Minute
)

// Policy is what operators write: the rules of the tool guard. It is one JSON
// document; a newer version replaces the whole of an older one.
type Policy struct {
	// Version counts up with each change; 0 is the policy of a fleet that has
	// none. It is the writer's to set.
	Version int64 `json:"version"`
	// Rules decide about calls, the first that matches and has an action.
	Rules []Rule `json:"rules,omitempty"`
	// Reads are tools that only read: their answers may be kept for a while, and
	// identical calls at the same time reach the device once.
	Reads []Read `json:"reads,omitempty"`
	// URLs are the addresses that tools may be given, by glob of the tool. Tools
	// that take one and are not listed may be given none.
	URLs []URLRule `json:"urls,omitempty"`
	// AuditArguments are globs of tools whose arguments are kept in the audit as
	// they are, where others have a digest.
	AuditArguments []string `json:"audit_arguments,omitempty"`
	// Changed says when, By who wrote this version. Written by the fleet.
	Changed time.Time `json:"changed,omitzero"`
	By      string    `json:"by,omitempty"`
	// Warnings are what the writer should look at again. Only an answer has them.
	Warnings []string `json:"warnings,omitempty"`
}

// Rule is one line of a policy. Every condition that is given must hold; a rule
// without conditions matches every call.
type Rule struct {
	Name    string            `json:"name"`
	Tools   []string          `json:"tools,omitempty"`  // globs
	Devices selector.Selector `json:"devices,omitzero"` // by id and labels alone
	Keys    []string          `json:"keys,omitempty"`   // ids or names; admin, open, voice and gateway are the callers without a key
	Via     []Via             `json:"via,omitempty"`
	Action  Action            `json:"action"`
}

// Read is about tools that only read.
type Read struct {
	Tools   []string          `json:"tools"`
	Devices selector.Selector `json:"devices,omitzero"` // by id and labels alone
	// TTL is how long an answer may be given again, such as "2s"; empty: only
	// calls at the same time share one.
	TTL string `json:"ttl,omitempty"`

	ttl time.Duration
}

// URLRule is about the addresses that tools may be given.
type URLRule struct {
	Tools    []string `json:"tools"`
	Prefixes []string `json:"prefixes"` // such as https://firmware.example.com/releases/
}

// ParsePolicy reads a document strictly and checks it. Errors name the rule.
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
		return p, errors.New("there is something behind the policy's end")
	}
	_, err := Compile(p)
	return p, err
}

// selectorError finds the rule whose selector cannot be read; nil if there is
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

// Guard is a policy, ready to judge. It does not change.
type Guard struct {
	policy Policy
	urls   []urlRule
}

// builtin rules stand behind those of every policy. A language model may be
// told to do harm by what it reads; what ends a device's work, or changes what
// it runs, therefore waits for a person.
var builtin = []Rule{{
	Name: RuleConfirm, Via: []Via{ViaMCP}, Action: Confirm,
	Tools: []string{"self.reboot", "self.upgrade_firmware", "self.assets.set_download_url", "self.res.esp_restart", "self.system.reconfigure_wifi", "self.disp.network"},
}}

// builtinReads are the readers of stock firmware: they have no effect, so calls
// at the same time may share one answer.
var builtinReads = Read{Tools: []string{"self.get_device_status", "self.get_system_info", "self.screen.get_info"}}

// DefaultGuard judges by the built-in rules alone.
func DefaultGuard() *Guard { return &Guard{} }

// Compile checks a policy and prepares it.
func Compile(p Policy) (*Guard, error) {
	if len(p.Rules) > MaxRules || len(p.Reads) > MaxRules || len(p.URLs) > MaxRules {
		return nil, fmt.Errorf("a policy may have %d rules of each kind", MaxRules)
	}
	p.Rules, p.Reads, p.URLs = slices.Clone(p.Rules), slices.Clone(p.Reads), slices.Clone(p.URLs)
	g := &Guard{policy: p}
	seen := map[string]bool{}
	for i, r := range p.Rules {
		if err := r.check(); err != nil {
			return nil, fmt.Errorf("rule %d (%q): %w", i+1, r.Name, err)
		}
		if seen[r.Name] {
			return nil, fmt.Errorf("rule %d: the name %q is taken; refusals name the rule that decided", i+1, r.Name)
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
	if r.Name == "" || len(r.Name) > maxNameBytes || !plain(r.Name) {
		return fmt.Errorf("a rule needs a name of at most %d bytes: refusals and the audit quote it", maxNameBytes)
	}
	if !slices.Contains([]Action{Allow, Confirm, Deny}, r.Action) {
		return fmt.Errorf("action %q is none of allow, confirm, deny", r.Action)
	}
	for _, via := range r.Via {
		if !slices.Contains([]Via{ViaREST, ViaRaw, ViaNATS, ViaGateway, ViaVoice, ViaMCP}, via) {
			return fmt.Errorf("via %q is none of rest, raw, nats, gateway, voice, mcp", via)
		}
	}
	if slices.Contains(r.Keys, "") || len(r.Keys) > maxGlobs {
		return fmt.Errorf("keys takes 1 to %d ids or names", maxGlobs)
	}
	return errors.Join(checkGlobs(r.Tools), identity(r.Devices))
}

func (r *Read) prepare() (err error) {
	if len(r.Tools) == 0 {
		return errors.New("tools are missing: whatever is listed must have no effect on the device")
	}
	if r.TTL != "" {
		if r.ttl, err = time.ParseDuration(r.TTL); err != nil || r.ttl < 0 || r.ttl > MaxTTL {
			return fmt.Errorf("ttl %q must be a duration such as \"2s\", at most %v", r.TTL, MaxTTL)
		}
	}
	return errors.Join(checkGlobs(r.Tools), identity(r.Devices))
}

// identity tells why a rule may not have this selector.
func identity(s selector.Selector) error {
	if err := s.Identity(); err != nil {
		return fmt.Errorf("devices: %w", err)
	}
	return nil
}

// NeedsLabels tells whether a device's labels decide about some call.
func (g *Guard) NeedsLabels() bool {
	return slices.ContainsFunc(g.policy.Rules, func(r Rule) bool { return r.Devices.NeedsLabels() }) ||
		slices.ContainsFunc(g.policy.Reads, func(r Read) bool { return r.Devices.NeedsLabels() })
}

// Policy is what the guard was made from.
func (g *Guard) Policy() Policy { return g.policy }

// Question is one call to be judged.
type Question struct {
	By     By
	Device string
	Labels map[string]string
	Tool   string
	// UserOnly says that the device marks the tool as not meant for language
	// models; Listed that this could be known: it stands in the device's list, or
	// the list is complete without it.
	UserOnly, Listed bool
}

// Decision is the answer. Refusal is set with Deny.
type Decision struct {
	Action  Action
	Rule    string
	Refusal *Refusal
}

// Decide judges a call. First comes what the key may do at all, which no rule
// can widen; then the policy's rules in their order; then the built-in ones.
func (g *Guard) Decide(q Question) Decision {
	if no := q.By.Permit(ScopeCall, q.Device, q.Labels); no != nil {
		return denied(no)
	}
	who := q.By.Who
	if !MatchAny(who.Tools, q.Tool) {
		return deny(RuleTools, "the key %q is not for the tool %q", who.Name, q.Tool)
	}
	if !who.Scopes.Has(ScopeUser) {
		switch {
		case q.UserOnly, IsUserTool(q.Tool):
			return deny(RuleUserOnly, "the tool %q is for people and not for language models; the key %q lacks the scope %s", q.Tool, who.Name, ScopeUser)
		case !q.Listed:
			return deny(RuleUnlisted, "the device has not listed the tool %q yet, so it may be one for people alone; try again, or use a key with the scope %s", q.Tool, ScopeUser)
		}
	}
	if r, prefix := g.rule(&q); r != nil {
		return r.decide(prefix+r.Name, &q)
	}
	return Decision{Action: Allow, Rule: RuleDefault}
}

// rule is the first that matches, nil if none does; prefix stands before its
// name in decisions.
func (g *Guard) rule(q *Question) (r *Rule, prefix string) {
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

// RuleAction tells what the rules alone make of a call that the key may make.
// Unlike Decide it gives no reason, and allocates nothing.
func (g *Guard) RuleAction(q Question) Action {
	if r, _ := g.rule(&q); r != nil {
		return r.Action
	}
	return Allow
}

// MayEver tells whether there can be a device on which Decide does not deny the
// tool: the question names none.
func (g *Guard) MayEver(q Question) bool {
	who := q.By.Who
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

func (r *Rule) matches(q *Question) bool { return r.mismatch(q) == "" }

// mismatch is the first condition of the rule that does not hold; empty if all
// do.
func (r *Rule) mismatch(q *Question) string {
	switch {
	case !MatchAny(r.Tools, q.Tool):
		return "it is about other tools"
	case !r.Devices.MatchIdentity(q.Device, q.Labels):
		return "it is about other devices"
	case len(r.Via) > 0 && !slices.Contains(r.Via, q.By.Via):
		return "it is about other ways in"
	case len(r.Keys) > 0 && !slices.Contains(r.Keys, q.By.Who.Key) && !slices.Contains(r.Keys, q.By.Who.Name):
		return "it is about other keys"
	}
	return ""
}

func (r *Rule) decide(name string, q *Question) Decision {
	if r.Action == Deny {
		return deny(name, "the rule %q forbids the tool %q here", r.Name, q.Tool)
	}
	return Decision{Action: r.Action, Rule: name}
}

// userTools are those of stock firmware that only people may use even where
// the device does not mark them (before v2.1.0), or has not listed them yet.
var userTools = []string{"self.reboot", "self.upgrade_firmware", "self.assets.set_download_url", "self.screen.snapshot", "self.screen.preview_image"}

// IsUserTool tells whether a tool is for people alone whatever the device says.
func IsUserTool(tool string) bool { return slices.Contains(userTools, tool) }

// Shared tells whether calls of the tool at the same time may share one
// answer, and for how long it may be given again.
func (g *Guard) Shared(device string, labels map[string]string, tool string) (ttl time.Duration, ok bool) {
	for i := range g.policy.Reads {
		if r := &g.policy.Reads[i]; MatchAny(r.Tools, tool) && r.Devices.MatchIdentity(device, labels) {
			return r.ttl, true
		}
	}
	return 0, MatchAny(builtinReads.Tools, tool)
}

// KeepsArguments tells whether the audit keeps a tool's arguments as they are.
func (g *Guard) KeepsArguments(tool string) bool {
	return len(g.policy.AuditArguments) > 0 && MatchAny(g.policy.AuditArguments, tool)
}
