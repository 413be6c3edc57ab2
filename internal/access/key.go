package access

import (
	"cmp"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base32"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"fleetd/internal/selector"
)

// An API token is `fld_<id>_<secret>`: secret scanners find it by its prefix, the id is the
// key's public id, and the secret has 160 bits, so that its plain SHA-256 can be stored
// safely.
const (
	tokenPrefix  = "fld_"
	idBytes      = 5  // 8 characters
	secretBytes  = 20 // 32 characters
	idLength     = 8
	tokenLength  = len(tokenPrefix) + idLength + 1 + 32
	maxKeys      = 10_000
	maxNameBytes = 64
)

var (
	tokenEncoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)
	keyID         = regexp.MustCompile(`^[a-z2-7]{8}$`)
	keyName       = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9 ._@-]*$`)
)

// Errors of Authenticate. They do not reveal how close a guess was. Only the holder of a key
// that has ended gets the reason, which is also recorded.
var (
	ErrToken   = errors.New("the token is not valid")
	ErrExpired = errors.New("the key has expired")
	ErrRevoked = errors.New("the key was revoked")
)

// Key is the record of one API key. All fields but Expires and Revoked are immutable.
type Key struct {
	ID      string            `json:"id"`
	Name    string            `json:"name"`
	Hash    string            `json:"hash"` // SHA-256 of the token, hex
	Scopes  Scopes            `json:"scopes"`
	Devices selector.Selector `json:"devices,omitzero"` // without an Identity error
	Tools   []string          `json:"tools,omitempty"`
	Created time.Time         `json:"created"`
	Expires time.Time         `json:"expires,omitzero"` // zero: the key does not expire
	Revoked time.Time         `json:"revoked,omitzero"` // zero: it was not revoked
	Parent  Parent            `json:"parent,omitzero"`  // of a console key or a grant
	Grant   *Grant            `json:"grant,omitempty"`  // nil: it is no grant. Nobody has the token of a grant's key
	Narrow  bool              `json:"narrow,omitempty"` // a console key with fewer scopes than its parent
	By      string            `json:"by,omitempty"`     // name of the caller who created it; empty in keys of earlier versions
	// Since is the version of the list of scopes when the key was created.
	Since int `json:"since,omitempty"`
}

// scopesVersion is the version of the list of scopes. Version 1 separates photos:read from
// devices:read.
const scopesVersion = 1

// UnmarshalJSON decodes a key. A key from before a new scope keeps its rights.
func (k *Key) UnmarshalJSON(data []byte) error {
	type plain Key
	if err := json.Unmarshal(data, (*plain)(k)); err != nil {
		return err
	}
	if k.Since < 1 && k.Scopes.has(ScopeRead) {
		k.Scopes |= mustScopes(ScopePhotos)
	}
	return nil
}

// NewKey validates the properties of a new key and returns it with its token, which is not
// stored.
func NewKey(name string, scopes Scopes, devices selector.Selector, tools []string, created, expires time.Time) (k Key, token string, err error) {
	switch {
	case !keyName.MatchString(name) || len(name) > maxNameBytes:
		return k, "", fmt.Errorf("%q is not a valid name: use 1 to %d letters, digits, blanks and . _ @ -, starting with a letter or digit", name, maxNameBytes)
	case slices.ContainsFunc([]*Caller{Admin, Open, Voice, Gateway, Fleet}, func(c *Caller) bool { return name == c.Key || name == c.Name }):
		return k, "", fmt.Errorf("the name %q is reserved in rules; choose another", name)
	case keyID.MatchString(name):
		return k, "", fmt.Errorf("the name %q has the form of a key id (eight characters of a-z and 2-7), and rules accept both; choose a longer or shorter name", name)
	case scopes == 0:
		_, err := ParseScopes(nil)
		return k, "", err
	case !expires.IsZero() && !expires.After(created):
		return k, "", errors.New("the expiry is in the past; choose a later time")
	}
	if err := errors.Join(checkDevices(devices), checkGlobs(tools)); err != nil {
		return k, "", err
	}
	if scopes.has(ScopeAdmin) && (!devices.IsZero() || len(tools) > 0) {
		return k, "", errors.New("a key with the scope admin can change keys and rules, so it cannot be limited to devices or tools; remove the scope or the limits")
	}
	id := randomText(idBytes)
	token = tokenPrefix + id + "_" + randomText(secretBytes)
	return Key{ID: id, Name: name, Hash: hashOf(token), Scopes: scopes, Devices: devices, Tools: tools,
		Created: created.UTC().Truncate(time.Microsecond), Expires: utc(expires), Since: scopesVersion}, token, nil
}

// checkDevices returns an error if a new key may not have this selector.
func checkDevices(s selector.Selector) error {
	if err := checkIdentity(s); err != nil {
		return err
	}
	if err := s.Check(); err != nil {
		return fmt.Errorf("devices: %w", err)
	}
	return nil
}

func utc(t time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	return t.UTC().Truncate(time.Microsecond)
}

func randomText(n int) string {
	b := make([]byte, n)
	rand.Read(b) // never fails (crypto/rand)
	return tokenEncoding.EncodeToString(b)
}

func hashOf(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:])
}

// EndedError returns why the key itself has ended at this time; nil if it is valid. A console
// key may have ended with its parent, which Registry.EndedError includes.
func (k *Key) EndedError(now time.Time) error {
	switch {
	case !k.Revoked.IsZero():
		return ErrRevoked
	case !k.Expires.IsZero() && !now.Before(k.Expires):
		return ErrExpired
	}
	return nil
}

// keyEntry is a key in the registry.
type keyEntry struct {
	key    Key
	hash   [sha256.Size]byte
	caller *Caller
}

// Registry holds all keys of the fleet in memory. It is safe for concurrent use.
type Registry struct {
	mu         sync.RWMutex
	byID       map[string]*keyEntry
	issuing    map[string]int // console keys on their way into the registry, by parent
	adminToken func() string  // nil: there is none
	openAccess func(token string, now time.Time) (grant, resource string, err error)
}

// NewRegistry returns an empty Registry.
func NewRegistry() *Registry {
	return &Registry{byID: map[string]*keyEntry{}, issuing: map[string]int{}}
}

// Authenticate returns the caller of an API token. It takes the same time for every wrong
// secret of a key. It always returns the same *Caller for a key.
func (r *Registry) Authenticate(token string, now time.Time) (*Caller, error) {
	if strings.HasPrefix(token, AccessPrefix) {
		return r.authenticateGrant(token, "", now)
	}
	if len(token) != tokenLength || token[:len(tokenPrefix)] != tokenPrefix || token[len(tokenPrefix)+idLength] != '_' {
		return nil, ErrToken
	}
	r.mu.RLock()
	defer r.mu.RUnlock()
	h := r.byID[token[len(tokenPrefix):len(tokenPrefix)+idLength]]
	var text [tokenLength]byte // allocated on the stack
	copy(text[:], token)
	sum := sha256.Sum256(text[:])
	if h == nil || subtle.ConstantTimeCompare(sum[:], h.hash[:]) != 1 {
		return nil, ErrToken
	}
	if err := r.endedLocked(&h.key, now); err != nil {
		return nil, fmt.Errorf("%w: %q (%s)", err, h.key.Name, h.key.ID)
	}
	return h.caller, nil
}

// Valid returns an error if the caller's key has ended since it was authenticated. Callers
// without a key, and keys unknown to this node, count as valid.
func (r *Registry) Valid(c *Caller, now time.Time) error {
	if c == nil {
		return ErrToken
	}
	r.mu.RLock()
	defer r.mu.RUnlock()
	h := r.byID[cmp.Or(c.Through, c.Key)]
	if h == nil {
		return nil
	}
	return r.endedLocked(&h.key, now)
}

// Put adds a key, or ends it: the earlier of two ends counts, and nothing else of a key
// changes. changed reports whether the registry changed.
func (r *Registry) Put(k Key, now time.Time) (changed bool, err error) {
	hash, err := hex.DecodeString(k.Hash)
	if err != nil || len(hash) != sha256.Size || len(k.ID) != idLength {
		return false, fmt.Errorf("key %.20q does not have a valid hash", k.ID)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	old := r.byID[k.ID]
	if old == nil {
		if len(r.byID) >= maxKeys && !r.dropEndedLocked(now) {
			return false, fmt.Errorf("the limit of %d keys is reached; revoke some", maxKeys)
		}
		h := &keyEntry{key: k, caller: newKeyCaller(&k)}
		copy(h.hash[:], hash)
		r.byID[k.ID] = h
		return true, nil
	}
	revoked := old.key.Revoked
	if revoked.IsZero() || !k.Revoked.IsZero() && k.Revoked.Before(revoked) {
		revoked = k.Revoked
	}
	if revoked.Equal(old.key.Revoked) {
		return false, nil
	}
	changedKey := *old
	changedKey.key.Revoked = revoked
	r.byID[k.ID] = &changedKey
	return true, nil
}

// dropEndedLocked removes the key that ended first. It reports false if no key has ended.
func (r *Registry) dropEndedLocked(now time.Time) bool {
	oldest := ""
	for id, h := range r.byID {
		if r.endedLocked(&h.key, now) != nil && (oldest == "" || h.key.Created.Before(r.byID[oldest].key.Created)) {
			oldest = id
		}
	}
	delete(r.byID, oldest)
	return oldest != ""
}

// Find returns the key with this id, or the valid key with this name.
func (r *Registry) Find(name string, now time.Time) (Key, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if h := r.byID[name]; h != nil {
		return h.key, true
	}
	var found *keyEntry
	for _, h := range r.byID {
		if h.key.Name == name && (found == nil || found.key.EndedError(now) != nil && h.key.EndedError(now) == nil) {
			found = h
		}
	}
	if found == nil {
		return Key{}, false
	}
	return found.key, true
}

// Caller returns the caller of the key with this id, valid or not.
func (r *Registry) Caller(id string) (*Caller, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	h := r.byID[id]
	if h == nil {
		return nil, false
	}
	return h.caller, true
}

// Keys returns all keys, oldest first.
func (r *Registry) Keys() []Key {
	r.mu.RLock()
	defer r.mu.RUnlock()
	keys := make([]Key, 0, len(r.byID))
	for _, h := range r.byID {
		keys = append(keys, h.key)
	}
	slices.SortFunc(keys, func(a, b Key) int {
		if c := a.Created.Compare(b.Created); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return keys
}
