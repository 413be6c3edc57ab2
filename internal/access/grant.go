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

// Limits of grants.
const (
	MaxGrants       = 100                 // valid ones with the same parent; the one that was unused longest ends for a new one
	GrantIdle       = 90 * 24 * time.Hour // a grant that was not used for so long has ended
	KeepGrants      = 30 * 24 * time.Hour // after their end
	ConsentCodeLife = 5 * time.Minute
)

// Grant is what a person allowed an application to do over MCP (OAuth 2.1). The key that contains it is a child of the
// key that the person gave.
type Grant struct {
	// Host is that of the application's client_id; of a registered application, that of its redirect.
	Host       string `json:"host"`
	Name       string `json:"name,omitempty"` // as the application calls itself; hostile
	Client     string `json:"client"`         // SHA-256 of the client_id, hex
	Registered bool   `json:"registered,omitempty"`
	// KeysURL and Keys are where the application's public keys are (RFC 7517), if it proves itself with one; both empty: it
	// does not.
	KeysURL string          `json:"jwks_uri,omitempty"`
	Keys    json.RawMessage `json:"jwks,omitempty"`
	// Resource is the path below which its tokens are valid, such as /mcp.
	Resource string `json:"resource"`
}

// GrantScopes are the scopes that a grant may have.
var GrantScopes = mustScopes(ScopeRead, ScopeCall, ScopeUser, ScopePhotos, ScopeEvents, ScopeJobsRead, ScopeJobs)

// GrantKey returns the key of a grant by this caller, without id, for Issue. A console key gives a child of its own
// parent, with at most its own rights. devices and tools narrow the caller's; zero values leave them. The errors are
// sentences for the person.
func (r *Registry) GrantKey(who *Caller, g Grant, scopes Scopes, devices selector.Selector, tools []string, now time.Time) (Key, error) {
	switch {
	case who == nil || who == Open:
		return Key{}, errors.New("this node requires no key, so there is nothing to allow; connect the application without logging in")
	case scopes == 0:
		return Key{}, errors.New("choose at least one right")
	}
	for _, name := range scopes.Names() {
		if !GrantScopes.has(Scope(name)) {
			return Key{}, fmt.Errorf("an application cannot have the scope %s; the scopes are %s", name, strings.Join(GrantScopes.Names(), ", "))
		}
		if !who.Scopes.Has(Scope(name)) {
			return Key{}, fmt.Errorf("the key %q does not have the scope %s, so an application cannot have it from this key", who.Name, name)
		}
	}
	if err := errors.Join(checkDevices(devices), checkGlobs(tools)); err != nil {
		return Key{}, err
	}
	for _, glob := range tools {
		if len(who.Tools) > 0 && !slices.Contains(who.Tools, glob) && (strings.ContainsAny(glob, "*?") || !MatchAny(who.Tools, glob)) {
			return Key{}, fmt.Errorf("the key %q is limited to the tools %s, and %q is not one of these entries nor a tool that they match", who.Name, strings.Join(who.Tools, ", "), glob)
		}
	}
	r.mu.RLock()
	defer r.mu.RUnlock()
	k := r.childLocked(who, scopes)
	k.Grant, k.Devices = &g, selector.And(k.Devices, devices)
	if len(tools) > 0 {
		k.Tools = tools
	}
	if err := k.Devices.Check(); err != nil {
		return Key{}, fmt.Errorf("devices: %w", err)
	}
	if through := r.byID[who.Through]; through != nil && through.key.Grant != nil {
		return Key{}, errors.New("a grant cannot allow other applications; use the key that it was made from")
	}
	return k, nil
}

// AccessPrefix begins every access token of OAuth.
const AccessPrefix = "flt_"

// ErrResource refuses an access token outside of its resource.
var ErrResource = errors.New("this is a token of an application that was allowed to use MCP; it opens nothing else. Use an API key here")

// ErrUnknownGrant is of a token that is genuine, and of whose grant this node does not know, or not yet.
var ErrUnknownGrant = errors.New("this node does not know of the grant of this token")

// SetAccessTokens sets the function that opens access tokens of OAuth; without it there are none. Its error is ErrToken, or
// ErrExpired for a token that was valid once. Call it before the first token is used.
func (r *Registry) SetAccessTokens(open func(token string, now time.Time) (grant, resource string, err error)) {
	r.openAccess = open
}

// authenticateGrant returns the caller of an access token for a path of MCP; an empty path is outside of every resource.
func (r *Registry) authenticateGrant(token, path string, now time.Time) (*Caller, error) {
	if r.openAccess == nil {
		return nil, ErrToken
	}
	id, resource, err := r.openAccess(token, now)
	switch {
	case errors.Is(err, ErrToken):
		return nil, err
	case path == "":
		return nil, ErrResource
	case err != nil:
		return nil, err
	}
	_, who, err := r.GrantOf(id, now)
	if err == nil && path != resource && !strings.HasPrefix(path, resource+"/") && (resource != "/mcp" || path != "/sse") {
		err = ErrResource
	}
	if err != nil {
		return nil, err
	}
	return who, nil
}

// GrantOf returns the key of a grant with its caller. The errors are those of Registry.Authenticate; a grant that this node
// does not know is ErrUnknownGrant.
func (r *Registry) GrantOf(id string, now time.Time) (Key, *Caller, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	h := r.byID[id]
	if h == nil || h.key.Grant == nil {
		return Key{}, nil, ErrUnknownGrant
	}
	if err := r.endedLocked(&h.key, now); err != nil {
		return h.key, h.caller, fmt.Errorf("%w: the grant of %q (%s)", err, h.key.Grant.Host, h.key.ID)
	}
	return h.key, h.caller, nil
}

// HasGrant reports whether an application, by the hash of its client_id, has a grant or had one that is not forgotten.
func (r *Registry) HasGrant(client string, now time.Time) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for _, h := range r.byID {
		if h.key.Grant != nil && h.key.Grant.Client == client && !r.isForgottenLocked(&h.key, now) {
			return true
		}
	}
	return false
}

// Grants returns the keys of the valid grants of a parent.
func (r *Registry) Grants(parent string, now time.Time) (keys []Key) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for _, h := range r.byID {
		if h.key.Grant != nil && h.key.Parent.Key == parent && r.endedLocked(&h.key, now) == nil {
			keys = append(keys, h.key)
		}
	}
	return keys
}

// GrantUse is how a grant was used last. Refresh and Previous are the SHA-256, in hex, of its valid refresh token and of the one
// before it.
type GrantUse struct {
	ID                string
	Refresh, Previous string
	Rotated           time.Time // when Refresh took the place of Previous
	Used              time.Time
	Address           string
}

// Purposes of one-time codes.
const (
	CodeConsole = "console"       // a key of the console
	CodeConsent = "consent"       // the consent to an application, in place of a key
	CodeGrant   = "authorization" // the tokens of a grant (RFC 6749, 4.1.2)
	CodeRefresh = "refresh"       // a refresh token, which its successor ends
)

// HashCode returns the form in which a one-time code or a refresh token is stored. These have more than 128 random bits, so that
// the plain SHA-256 can be stored safely; the purpose keeps a code of one kind from being found as another kind.
func HashCode(purpose, code string) string { return hashOf(purpose + " " + code) }
