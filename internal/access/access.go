// Package access decides who may do what. It holds the API keys of a fleet,
// the scopes they carry, and the rules of the tool guard, and judges from
// memory: no database, no network, no clock but the one it is given. Whoever
// asks, by whichever way in, is judged by the same few functions, so that one
// key means the same over REST, NATS, MCP and the gateway's API.
package access

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"fleetd/internal/selector"
)

// Scope is one right of a key.
type Scope string

// Scopes of keys.
const (
	ScopeRead   Scope = "devices:read"    // devices, their tools and catalogs
	ScopePhotos Scope = "photos:read"     // pictures that cameras and screens uploaded
	ScopeCall   Scope = "tools:call"      // tools that are meant for language models, too
	ScopeUser   Scope = "tools:call:user" // every tool, those for people alone included; contains tools:call
	ScopeWrite  Scope = "devices:write"   // names, labels, transport; approve, revoke, forget, rotate
	ScopeEvents Scope = "events:read"
	ScopeAudio  Scope = "audio"  // what devices say and hear
	ScopeBroker Scope = "broker" // judging the logins at an external MQTT broker, and no more
	ScopeAdmin  Scope = "admin"  // everything, keys and policy included
)

// scopeBits are the bits of Scopes, in the order in which they are listed.
var scopeBits = [...]Scope{ScopeRead, ScopeCall, ScopeUser, ScopeWrite, ScopeEvents, ScopeAudio, ScopeAdmin, ScopePhotos, ScopeBroker}

// Scopes is a set of Scope.
type Scopes uint16

// ParseScopes reads names; an empty list is an error, for a key without a
// right is a mistake.
func ParseScopes(names []string) (s Scopes, err error) {
	for _, name := range names {
		i := slices.Index(scopeBits[:], Scope(name))
		if i < 0 {
			return 0, fmt.Errorf("there is no scope %q; scopes are %s", name, strings.Join(AllScopes().Names(), ", "))
		}
		s |= 1 << i
	}
	if s == 0 {
		return 0, errors.New("a key needs at least one scope: " + strings.Join(AllScopes().Names(), ", "))
	}
	return s, nil
}

// AllScopes is every scope there is.
func AllScopes() Scopes { return 1<<len(scopeBits) - 1 }

// Has tells whether the set grants the scope: itself, or by a larger one.
func (s Scopes) Has(scope Scope) bool {
	return s.has(scope) || s.has(ScopeAdmin) || scope == ScopeCall && s.has(ScopeUser)
}

func (s Scopes) has(scope Scope) bool {
	i := slices.Index(scopeBits[:], scope)
	return i >= 0 && s&(1<<i) != 0
}

// Names lists the set in a fixed order.
func (s Scopes) Names() []string {
	names := []string{}
	for i, scope := range scopeBits {
		if s&(1<<i) != 0 {
			names = append(names, string(scope))
		}
	}
	return names
}

// MarshalJSON writes the names.
func (s Scopes) MarshalJSON() ([]byte, error) { return json.Marshal(s.Names()) }

// UnmarshalJSON reads names. Those of a newer node, which this one does not
// know, grant nothing here.
func (s *Scopes) UnmarshalJSON(data []byte) error {
	var names []string
	if err := json.Unmarshal(data, &names); err != nil {
		return err
	}
	*s = 0
	for _, name := range names {
		if i := slices.Index(scopeBits[:], Scope(name)); i >= 0 {
			*s |= 1 << i
		}
	}
	return nil
}

// plain tells whether text can be part of a header and shown on a terminal.
func plain(text string) bool {
	for _, c := range text {
		if c < ' ' || c == 0x7f || c == '\uFFFD' {
			return false
		}
	}
	return true
}

// Caller is who asks, and what the key allows. It does not change.
type Caller struct {
	Key     string // the key's id; one of the names below where there is no key
	Name    string // for people
	Scopes  Scopes
	Devices selector.Selector // without an Identity error
	Tools   []string          // globs; none: every tool

	wire []byte // as AppendBy writes it
}

// Keys of callers that have no API key.
const (
	KeyAdmin   = "admin"   // the fleet's admin token
	KeyOpen    = "open"    // --api-auth none
	KeyVoice   = "voice"   // the chat server behind --voice-upstream
	KeyGateway = "gateway" // the daily token of the gateway's API
	KeyFleet   = "fleet"   // a node of an earlier version, which asked nobody but admins
)

// NewCaller returns a caller with the bytes that it has on the wire.
func NewCaller(key, name string, scopes Scopes, devices selector.Selector, tools []string) *Caller {
	c := &Caller{Key: key, Name: name, Scopes: scopes, Devices: devices, Tools: tools}
	c.wire = c.encode()
	return c
}

// Callers without an API key.
var (
	Admin = NewCaller(KeyAdmin, "admin token", AllScopes(), selector.Selector{}, nil)
	Open  = NewCaller(KeyOpen, "no token asked", AllScopes(), selector.Selector{}, nil)
	Fleet = NewCaller(KeyFleet, "another node", AllScopes(), selector.Selector{}, nil)
	// Voice listens, speaks and lets a language model use tools.
	Voice = NewCaller(KeyVoice, "voice upstream", mustScopes(ScopeRead, ScopeCall, ScopeAudio), selector.Selector{}, nil)
	// Gateway are consoles made for the gateway, whose one token opens all.
	Gateway = NewCaller(KeyGateway, "daily token", mustScopes(ScopeRead, ScopeUser), selector.Selector{}, nil)
)

func mustScopes(scopes ...Scope) (s Scopes) {
	for i, scope := range scopeBits {
		if slices.Contains(scopes, scope) {
			s |= 1 << i
		}
	}
	return s
}

// NeedsLabels tells whether a device's labels decide what the caller may do with
// it.
func (c *Caller) NeedsLabels() bool { return c != nil && c.Devices.NeedsLabels() }

// Limited tells whether the caller may not see all devices.
func (c *Caller) Limited() bool { return c == nil || !c.Devices.IsZero() }

// Via is the way by which somebody asks.
type Via string

// Ways in.
const (
	ViaREST    Via = "rest"
	ViaRaw     Via = "raw" // the raw MCP route of REST
	ViaNATS    Via = "nats"
	ViaGateway Via = "gateway"
	ViaVoice   Via = "voice"
	ViaMCP     Via = "mcp"
)

// By says who asks, how, and from where. The zero By may do nothing.
type By struct {
	Who  *Caller
	Via  Via
	From string // address of the peer, for the record
}

// Key is the caller's key id; empty for nobody.
func (b By) Key() string {
	if b.Who == nil {
		return ""
	}
	return b.Who.Key
}

// Name is the caller's name; empty for nobody.
func (b By) Name() string {
	if b.Who == nil {
		return ""
	}
	return b.Who.Name
}

// Refusal is why somebody may not do something.
type Refusal struct {
	Rule   string // which rule decided, such as `scope` or `policy:no reboots`
	Detail string // one sentence for people
	Tool   bool   // it is about the tool, and not about the caller or the device
}

// Error is the sentence.
func (r *Refusal) Error() string { return r.Detail }

// Rules that decide without a policy.
const (
	RuleCaller   = "caller"      // nobody asks
	RuleScope    = "scope"       // the key lacks a scope
	RuleDevices  = "key-devices" // the key is for other devices
	RuleTools    = "key-tools"   // the key is for other tools
	RuleUserOnly = "user-only"   // the tool is for people, the key for language models
	RuleUnlisted = "unlisted"    // the tool may be for people: the device has not listed it
	RuleURL      = "urls"        // the address is not on the allow-list
	RuleDeclined = "declined"    // the person who was asked said no
	RuleConfirm  = "builtin:confirm-restarts"
	RuleDefault  = "builtin:allow"
	rulePolicy   = "policy:"
)

// Permit tells whether the caller has the scope, and, unless device is empty,
// whether that is one of its devices. It is nil if so. The labels must be known:
// see PermitUnknown.
func (b By) Permit(scope Scope, device string, labels map[string]string) *Refusal {
	switch {
	case b.Who == nil:
		return &Refusal{Rule: RuleCaller, Detail: "nobody is known to ask"}
	case !b.Who.Scopes.Has(scope):
		return &Refusal{Rule: RuleScope, Detail: fmt.Sprintf("the key %q lacks the scope %s", b.Who.Name, scope)}
	case device != "" && !b.Who.Devices.MatchIdentity(device, labels):
		return b.otherDevices()
	}
	return nil
}

// PermitUnknown is Permit for a device whose labels are not known. A key that
// depends on labels is refused: a condition such as room!=lab would hold for
// every device that was not found.
func (b By) PermitUnknown(scope Scope, device string) *Refusal {
	if no := b.Permit(scope, device, nil); no != nil {
		return no
	}
	if device != "" && b.Who.Devices.NeedsLabels() {
		return b.otherDevices()
	}
	return nil
}

func (b By) otherDevices() *Refusal {
	return &Refusal{Rule: RuleDevices, Detail: fmt.Sprintf("the key %q is for devices with %s alone", b.Who.Name, b.Who.Devices)}
}

// Door tells who presents a token: the admin token, or an API key. Every way in
// asks the same one.
type Door struct {
	Keys *Registry
	// IsAdmin tells whether a token is the fleet's admin token.
	IsAdmin func(token string) bool
	// Open asks nobody for a token.
	Open bool
}

// Admit returns who presents the token, which may be empty. Errors are those of
// Registry.Authenticate.
func (d *Door) Admit(token string, now time.Time) (*Caller, error) {
	switch {
	case d.IsAdmin(token):
		return Admin, nil
	case d.Open && token == "":
		return Open, nil
	}
	who, err := d.Keys.Authenticate(token, now)
	if err != nil && d.Open {
		return Open, nil // a token left over in somebody's settings shuts nobody out
	}
	return who, err
}
