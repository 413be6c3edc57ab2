// Package access decides who may do what: with the API keys of a fleet, their scopes, and
// the rules of the tool guard. It decides from memory, without database, network or clock.
// All interfaces use the same functions, so that a key has the same rights over REST, NATS,
// MCP and the gateway's API.
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
	ScopePhotos Scope = "photos:read"     // photos and screenshots
	ScopeCall   Scope = "tools:call"      // tools for language models
	ScopeUser   Scope = "tools:call:user" // every tool, including user-only ones; contains tools:call
	ScopeWrite  Scope = "devices:write"   // names, labels, transport; approve, revoke, forget, rotate
	ScopeEvents Scope = "events:read"
	ScopeAudio  Scope = "audio"  // audio and messages of conversations
	ScopeBroker Scope = "broker" // authenticating logins for an external MQTT broker, nothing else
	// ScopeJobsRead shows jobs; ScopeJobs creates and changes them, and contains it. What a job
	// does on devices needs the scope of its action as well.
	ScopeJobsRead Scope = "jobs:read"
	ScopeJobs     Scope = "jobs"
	ScopeWebhooks Scope = "webhooks"
	// ScopeFirmwareRead shows firmware images and checks; ScopeFirmware changes images, and contains it.
	ScopeFirmwareRead Scope = "firmware:read"
	ScopeFirmware     Scope = "firmware"
	// ScopeAudit shows calls and changes of other keys, as far as the key's devices and tools go.
	ScopeAudit Scope = "audit:read"
	ScopeAdmin Scope = "admin" // everything, including keys and policy
)

// scopeBits are the bits of Scopes, in the order of Names.
var scopeBits = [...]Scope{ScopeRead, ScopeCall, ScopeUser, ScopeWrite, ScopeEvents, ScopeAudio, ScopeAdmin, ScopePhotos, ScopeBroker, ScopeJobsRead, ScopeJobs, ScopeWebhooks, ScopeFirmwareRead, ScopeFirmware, ScopeAudit}

// Scopes is a set of Scope.
type Scopes uint16

// ParseScopes parses names; an empty list is an error, since a key without rights is a
// mistake.
func ParseScopes(names []string) (s Scopes, err error) {
	for _, name := range names {
		i := slices.Index(scopeBits[:], Scope(name))
		if i < 0 {
			return 0, fmt.Errorf("unknown scope %q; the scopes are %s", name, strings.Join(AllScopes().Names(), ", "))
		}
		s |= 1 << i
	}
	if s == 0 {
		return 0, errors.New("a key needs at least one scope: " + strings.Join(AllScopes().Names(), ", "))
	}
	return s, nil
}

// AllScopes returns the set of all scopes.
func AllScopes() Scopes { return 1<<len(scopeBits) - 1 }

// Has reports whether the set contains the scope, or one that includes it.
func (s Scopes) Has(scope Scope) bool {
	return s.has(scope) || s.has(ScopeAdmin) || scope == ScopeCall && s.has(ScopeUser) || scope == ScopeJobsRead && s.has(ScopeJobs) || scope == ScopeFirmwareRead && s.has(ScopeFirmware)
}

func (s Scopes) has(scope Scope) bool {
	i := slices.Index(scopeBits[:], scope)
	return i >= 0 && s&(1<<i) != 0
}

// Both returns the scopes that are in s, or included in one that is, and in other.
func (s Scopes) Both(other Scopes) (both Scopes) {
	for i, scope := range scopeBits {
		if other.has(scope) && s.Has(scope) {
			both |= 1 << i
		}
	}
	return both
}

// Names returns the names of the set in a fixed order.
func (s Scopes) Names() []string {
	names := []string{}
	for i, scope := range scopeBits {
		if s&(1<<i) != 0 {
			names = append(names, string(scope))
		}
	}
	return names
}

// MarshalJSON encodes the names.
func (s Scopes) MarshalJSON() ([]byte, error) { return json.Marshal(s.Names()) }

// UnmarshalJSON decodes names. Unknown ones, as of a newer node, grant nothing.
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

// isPlain reports whether text can be used in a header and shown on a terminal.
func isPlain(text string) bool {
	return !strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r == 0x7f || r == '\uFFFD' })
}

// Caller is an authenticated caller with its rights. It is immutable. Other nodes get it as JSON.
type Caller struct {
	Key     string            `json:"key"`            // the key's id; one of the constants below if there is no key
	Name    string            `json:"name,omitempty"` // for people
	Scopes  Scopes            `json:"scopes"`
	Devices selector.Selector `json:"devices,omitzero"` // without an Identity error
	Tools   []string          `json:"tools,omitempty"`  // globs; none: all tools
	// Through is the id of the console key or the grant that the caller uses; empty: its own key.
	Through string `json:"through,omitempty"`
	Grant   bool   `json:"grant,omitempty"`  // Through is a grant
	Narrow  bool   `json:"narrow,omitempty"` // Through has fewer rights than its parent, as every grant

	owner   string // of what it creates; empty: its key
	wire    []byte // as written by AppendPrincipal
	refusal string // of a device that Devices does not select
}

// Keys of callers without an API key.
const (
	KeyAdmin   = "admin"   // the fleet's admin token
	KeyOpen    = "open"    // --api-auth none
	KeyVoice   = "voice"   // the chat server of --voice-upstream
	KeyGateway = "gateway" // the daily token of the gateway's API
	KeyFleet   = "fleet"   // another node of the fleet, which asks on its own behalf
)

// NewCaller returns a caller with its encoding for other nodes.
func NewCaller(key, name string, scopes Scopes, devices selector.Selector, tools []string) *Caller {
	c := &Caller{Key: key, Name: name, Scopes: scopes, Devices: devices, Tools: tools}
	c.derive()
	return c
}

// derive computes what is needed often.
func (c *Caller) derive() {
	if c.Narrow {
		c.owner = c.Key + "/" + c.Through
	}
	c.wire = c.encode()
	c.refusal = fmt.Sprintf("the key %q covers only devices with %s", c.Name, c.Devices)
}

// Callers without an API key.
var (
	Admin = NewCaller(KeyAdmin, "admin token", AllScopes(), selector.Selector{}, nil)
	Open  = NewCaller(KeyOpen, "no token required", AllScopes(), selector.Selector{}, nil)
	Fleet = NewCaller(KeyFleet, "another node", AllScopes(), selector.Selector{}, nil)
	// Voice is the chat server, which may listen, speak and use tools.
	Voice = NewCaller(KeyVoice, "voice upstream", mustScopes(ScopeRead, ScopeCall, ScopeAudio), selector.Selector{}, nil)
	// Gateway is a console made for the gateway; its token allows everything there.
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

// Is reports whether both use the same key and, if it is a child of another one, the same child.
func (c *Caller) Is(other *Caller) bool { return c.Key == other.Key && c.Through == other.Through }

// NeedsLabels reports whether the caller's rights on a device depend on its labels.
func (c *Caller) NeedsLabels() bool { return c != nil && c.Devices.NeedsLabels() }

// Limited reports whether the caller may not see all devices.
func (c *Caller) Limited() bool { return c == nil || !c.Devices.IsZero() }

// OwnJobsOnly reports whether the caller sees, changes and hears of no jobs but its own: see Principal.Owns.
func (c *Caller) OwnJobsOnly() bool { return c.Limited() || len(c.Tools) > 0 }

// Via is the interface of a request.
type Via string

// Interfaces.
const (
	ViaREST    Via = "rest"
	ViaRaw     Via = "raw" // the raw MCP route of REST
	ViaNATS    Via = "nats"
	ViaGateway Via = "gateway"
	ViaVoice   Via = "voice"
	ViaMCP     Via = "mcp"
	ViaJob     Via = "job" // a task of a job; the job itself came over another interface
)

// Principal is who sends a request, over which interface, and from where. The zero Principal
// has no rights.
type Principal struct {
	Caller *Caller
	Via    Via
	From   string // address of the peer, for the audit log
}

// Key returns the caller's key id; empty without a caller.
func (b Principal) Key() string {
	if b.Caller == nil {
		return ""
	}
	return b.Caller.Key
}

// Name returns the caller's name; empty without a caller.
func (b Principal) Name() string {
	if b.Caller == nil {
		return ""
	}
	return b.Caller.Name
}

// Refusal is why a request is refused.
type Refusal struct {
	Rule   string // the rule that decided, such as `scope` or `policy:no reboots`
	Detail string // one sentence for people
	Tool   bool   // it concerns the tool, not the caller or the device
}

// Error returns the detail.
func (r *Refusal) Error() string { return r.Detail }

// Rules that decide without a policy.
const (
	RuleCaller   = "caller"      // there is no authenticated caller
	RuleScope    = "scope"       // the key does not have a scope
	RuleDevices  = "key-devices" // the key does not cover the device
	RuleTools    = "key-tools"   // the key does not cover the tool
	RuleUserOnly = "user-only"   // the tool is user-only, the key is for language models
	RuleUnlisted = "unlisted"    // the device has not listed the tool, so it may be user-only
	RuleURL      = "urls"        // the URL is not on the allow-list
	RuleDeclined = "declined"    // a person declined the confirmation
	RuleConfirm  = "builtin:confirm-restarts"
	RuleDefault  = "builtin:allow"
	rulePolicy   = "policy:"
)

// Permit returns nil if the caller has the scope, and covers the device unless it is empty.
// The labels must be known: see PermitUnknown.
func (b Principal) Permit(scope Scope, device string, labels map[string]string) *Refusal {
	switch {
	case b.Caller == nil:
		return &Refusal{Rule: RuleCaller, Detail: "the request has no authenticated caller"}
	case !b.Caller.Scopes.Has(scope):
		return &Refusal{Rule: RuleScope, Detail: fmt.Sprintf("the key %q does not have the scope %s", b.Caller.Name, scope)}
	case device != "" && !b.Caller.Devices.MatchIdentity(device, labels):
		return b.otherDevices()
	}
	return nil
}

// PermitUnknown is Permit for a device whose labels are unknown. A key that depends on labels
// is refused: a selector such as room!=lab would match every device that was not found.
func (b Principal) PermitUnknown(scope Scope, device string) *Refusal {
	if no := b.Permit(scope, device, nil); no != nil {
		return no
	}
	if device != "" && b.Caller.Devices.NeedsLabels() {
		return b.otherDevices()
	}
	return nil
}

func (b Principal) otherDevices() *Refusal {
	return &Refusal{Rule: RuleDevices, Detail: b.Caller.refusal}
}

// Authenticator authenticates the admin token and API keys, for all interfaces.
type Authenticator struct {
	Keys *Registry
	// IsAdmin reports whether a token is the fleet's admin token.
	IsAdmin func(token string) bool
	// Open accepts requests without a token.
	Open bool
}

// AuthenticateAt is Authenticate for a path of MCP, where access tokens of OAuth are valid, too. granted reports whether the
// token is one of these.
func (d *Authenticator) AuthenticateAt(token, path string, now time.Time) (who *Caller, granted bool, err error) {
	if !strings.HasPrefix(token, AccessPrefix) || d.Open {
		who, err = d.Authenticate(token, now)
		return who, false, err
	}
	who, err = d.Keys.authenticateGrant(token, path, now)
	return who, true, err
}

// Authenticate returns the caller of a token, which may be empty. Errors are those of
// Registry.Authenticate.
func (d *Authenticator) Authenticate(token string, now time.Time) (*Caller, error) {
	switch {
	case d.IsAdmin(token):
		return Admin, nil
	case d.Open && token == "":
		return Open, nil
	}
	who, err := d.Keys.Authenticate(token, now)
	if err != nil && d.Open {
		return Open, nil // an outdated token in a client's settings must not lock it out
	}
	return who, err
}
