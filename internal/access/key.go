package access

import (
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

// An API token is `fld_<id>_<secret>`: the prefix lets scanners for leaked
// secrets find it, the id is the key's public name, and the secret has 160
// bits, so that its plain SHA-256 is a safe thing to store.
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

// Errors of Authenticate. They say nothing of how close a guess was. Who shows a
// key that has ended is told which it was, and so is the record.
var (
	ErrToken   = errors.New("the token is not valid")
	ErrExpired = errors.New("the key has expired")
	ErrRevoked = errors.New("the key was revoked")
)

// Key is the record of one API key. Everything but the two times of its end is
// fixed when it is made.
type Key struct {
	ID      string            `json:"id"`
	Name    string            `json:"name"`
	Hash    string            `json:"hash"` // SHA-256 of the token, hex
	Scopes  Scopes            `json:"scopes"`
	Devices selector.Selector `json:"devices,omitzero"` // without an Identity error
	Tools   []string          `json:"tools,omitempty"`
	Created time.Time         `json:"created"`
	Expires time.Time         `json:"expires,omitzero"` // zero: never
	Revoked time.Time         `json:"revoked,omitzero"` // zero: it was not
	// Since is the version of the list of scopes that the key was made under.
	Since int `json:"since,omitempty"`
}

// scopesVersion is that of the list of scopes: 1 has photos:read, which was part of
// devices:read before.
const scopesVersion = 1

// UnmarshalJSON reads a key. One that is older than a scope keeps what it could do.
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

// NewKey checks what a key shall be and returns it with its token, which is
// kept nowhere.
func NewKey(name string, scopes Scopes, devices selector.Selector, tools []string, created, expires time.Time) (k Key, token string, err error) {
	switch {
	case !keyName.MatchString(name) || len(name) > maxNameBytes:
		return k, "", fmt.Errorf("%q is no name of a key: 1 to %d letters, digits, blanks and . _ @ -, the first a letter or digit", name, maxNameBytes)
	case slices.ContainsFunc([]*Caller{Admin, Open, Voice, Gateway, Fleet}, func(c *Caller) bool { return name == c.Key || name == c.Name }):
		return k, "", fmt.Errorf("the name %q means somebody else in rules; choose another", name)
	case keyID.MatchString(name):
		return k, "", fmt.Errorf("the name %q looks like the id of a key, which has eight of a-z and 2-7, and rules take either; choose a longer or shorter one", name)
	case scopes == 0:
		_, err := ParseScopes(nil)
		return k, "", err
	case !expires.IsZero() && !expires.After(created):
		return k, "", errors.New("the key would have expired already")
	}
	if err := errors.Join(checkDevices(devices), checkGlobs(tools)); err != nil {
		return k, "", err
	}
	if scopes.has(ScopeAdmin) && (!devices.IsZero() || len(tools) > 0) {
		return k, "", errors.New("the scope admin changes keys and rules, so it cannot be limited to devices or tools; leave one of them out")
	}
	id := randomText(idBytes)
	token = tokenPrefix + id + "_" + randomText(secretBytes)
	return Key{ID: id, Name: name, Hash: hashOf(token), Scopes: scopes, Devices: devices, Tools: tools,
		Created: created.UTC().Truncate(time.Microsecond), Expires: utc(expires), Since: scopesVersion}, token, nil
}

// checkDevices tells why a selector may not be that of a new key.
func checkDevices(s selector.Selector) error {
	if err := identity(s); err != nil {
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

// Ended is why the key is worth nothing at this time; nil if it is.
func (k *Key) Ended(now time.Time) error {
	switch {
	case !k.Revoked.IsZero():
		return ErrRevoked
	case !k.Expires.IsZero() && !now.Before(k.Expires):
		return ErrExpired
	}
	return nil
}

// held is a key as the registry keeps it.
type held struct {
	key    Key
	hash   [sha256.Size]byte
	caller *Caller
}

// Registry holds all keys of the fleet in memory. It is safe for concurrent
// use.
type Registry struct {
	mu   sync.RWMutex
	byID map[string]*held
}

// NewRegistry returns an empty one.
func NewRegistry() *Registry { return &Registry{byID: map[string]*held{}} }

// Authenticate returns who presents an API token. It takes the same time for
// every wrong secret of a key. The caller is one and the same as long as the
// key is.
func (r *Registry) Authenticate(token string, now time.Time) (*Caller, error) {
	if len(token) != tokenLength || token[:len(tokenPrefix)] != tokenPrefix || token[len(tokenPrefix)+idLength] != '_' {
		return nil, ErrToken
	}
	r.mu.RLock()
	h := r.byID[token[len(tokenPrefix):len(tokenPrefix)+idLength]]
	r.mu.RUnlock()
	var text [tokenLength]byte // on the stack
	copy(text[:], token)
	sum := sha256.Sum256(text[:])
	if h == nil || subtle.ConstantTimeCompare(sum[:], h.hash[:]) != 1 {
		return nil, ErrToken
	}
	if err := h.key.Ended(now); err != nil {
		return nil, fmt.Errorf("%w: %q (%s)", err, h.key.Name, h.key.ID)
	}
	return h.caller, nil
}

// Valid tells why a caller may not go on: its key ended since it was let in.
// Callers that are not known by a key, and keys that this node has not heard
// of, are for others to judge.
func (r *Registry) Valid(c *Caller, now time.Time) error {
	if c == nil {
		return ErrToken
	}
	r.mu.RLock()
	h := r.byID[c.Key]
	r.mu.RUnlock()
	if h == nil {
		return nil
	}
	return h.key.Ended(now)
}

// Put adds a key, or ends one earlier: of two ends the earlier counts, and
// nothing else of a key ever changes. changed tells whether it was news.
func (r *Registry) Put(k Key, now time.Time) (changed bool, err error) {
	hash, err := hex.DecodeString(k.Hash)
	if err != nil || len(hash) != sha256.Size || len(k.ID) != idLength {
		return false, fmt.Errorf("key %.20q has no usable hash", k.ID)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	old := r.byID[k.ID]
	if old == nil {
		if len(r.byID) >= maxKeys && !r.dropEndedLocked(now) {
			return false, fmt.Errorf("there are %d keys that have not ended; revoke some", maxKeys)
		}
		h := &held{key: k, caller: NewCaller(k.ID, k.Name, k.Scopes, k.Devices, k.Tools)}
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

// dropEndedLocked makes room: of the keys that have ended, the oldest goes.
func (r *Registry) dropEndedLocked(now time.Time) bool {
	oldest := ""
	for id, h := range r.byID {
		if h.key.Ended(now) != nil && (oldest == "" || h.key.Created.Before(r.byID[oldest].key.Created)) {
			oldest = id
		}
	}
	delete(r.byID, oldest)
	return oldest != ""
}

// Find returns the key with this id, or the one valid key with this name.
func (r *Registry) Find(name string, now time.Time) (Key, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if h := r.byID[name]; h != nil {
		return h.key, true
	}
	var found *held
	for _, h := range r.byID {
		if h.key.Name == name && (found == nil || found.key.Ended(now) != nil && h.key.Ended(now) == nil) {
			found = h
		}
	}
	if found == nil {
		return Key{}, false
	}
	return found.key, true
}

// Caller returns whom the key with this id lets in, valid or not.
func (r *Registry) Caller(id string) (*Caller, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	h := r.byID[id]
	if h == nil {
		return nil, false
	}
	return h.caller, true
}

// Keys lists all keys, oldest first.
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
