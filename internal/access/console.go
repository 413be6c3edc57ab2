package access

import (
	"cmp"
	"errors"
	"fmt"
	"time"
)

// Limits of the console's login.
const (
	ConsoleCodeLife = time.Minute
	ConsoleKeyLife  = 12 * time.Hour
	MaxConsoleKeys  = 100                // valid ones with the same parent
	KeepConsoleKeys = 7 * 24 * time.Hour // after their end
)

// Parent is the key from which a console key was made. The console key has at most its rights,
// acts in its name, and ends with it.
type Parent struct {
	Key  string `json:"key"` // id, or KeyAdmin
	Name string `json:"name"`
	// Admin is the SHA-256 of the admin token that made the key, hex. The key ends when that
	// token is rotated.
	Admin string `json:"admin,omitempty"`
}

// SetAdmin sets a function that returns the fleet's admin token. Call it before the first
// console key is used.
func (r *Registry) SetAdmin(token func() string) { r.adminToken = token }

func (r *Registry) adminHash() string {
	if r.adminToken == nil {
		return ""
	}
	return hashOf(r.adminToken())
}

// IsForgotten reports whether a key is one of the console that ended KeepConsoleKeys ago, or a grant that ended KeepGrants ago.
// Everybody refuses it, known or not.
func (k *Key) IsForgotten(now time.Time) bool {
	if k.Grant != nil {
		return k.endedBefore(now.Add(-KeepGrants))
	}
	return k.Parent.Key != "" && now.Sub(k.Expires) > KeepConsoleKeys
}

// IsForgotten is [Key.IsForgotten], or that a grant ended with its parent KeepGrants ago.
func (r *Registry) IsForgotten(k Key, now time.Time) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.isForgottenLocked(&k, now)
}

func (r *Registry) isForgottenLocked(k *Key, now time.Time) bool {
	parent := r.byID[k.Parent.Key]
	return k.IsForgotten(now) || k.Grant != nil && parent != nil && parent.key.endedBefore(now.Add(-KeepGrants))
}

// endedBefore reports whether the key itself ended before this time.
func (k *Key) endedBefore(t time.Time) bool {
	return !k.Revoked.IsZero() && k.Revoked.Before(t) || !k.Expires.IsZero() && k.Expires.Before(t)
}

// ConsoleKey returns what a console key of this caller may do, without id and token, for
// Issue. No scopes means all scopes of the caller.
func (r *Registry) ConsoleKey(who *Caller, scopes Scopes, now time.Time) (Key, error) {
	switch {
	case who == nil || who.Through != "":
		return Key{}, errors.New("a key of the console cannot make another one; run `fleetd console` with the key that made it, or with the admin token")
	case who == Open:
		return Key{}, errors.New("this node requires no key; open the console without a code")
	}
	for _, name := range scopes.Names() {
		if !who.Scopes.Has(Scope(name)) {
			return Key{}, fmt.Errorf("the key %q does not have the scope %s, so a key of the console made from it cannot have it", who.Name, name)
		}
	}
	r.mu.RLock()
	defer r.mu.RUnlock()
	k := r.childLocked(who, cmp.Or(scopes, who.Scopes))
	k.Narrow = k.Scopes != who.Scopes
	return k, r.checkChildrenLocked(&k.Parent, now)
}

// childLocked returns a key with some scopes of a caller and its other rights, which ends with the caller's key.
func (r *Registry) childLocked(who *Caller, scopes Scopes) Key {
	k := Key{Scopes: scopes, Devices: who.Devices, Tools: who.Tools, Since: scopesVersion, Parent: Parent{Key: who.Key, Name: who.Name}}
	if who.Key == KeyAdmin {
		k.Parent.Admin = r.adminHash()
	}
	if h := r.byID[who.Key]; h != nil {
		k.Expires = h.key.Expires
	}
	return k
}

// checkChildrenLocked returns an error if a key has as many console keys as it may, those that are being issued included.
func (r *Registry) checkChildrenLocked(parent *Parent, now time.Time) error {
	children := r.issuing[parent.Key]
	for _, h := range r.byID {
		if h.key.Parent.Key == parent.Key && h.key.Grant == nil && r.endedLocked(&h.key, now) == nil {
			children++
		}
	}
	if children >= MaxConsoleKeys {
		return fmt.Errorf("the key %q has %d valid keys of the console, which is the limit; revoke some with `fleetd keys revoke`, or wait until they end", parent.Name, children)
	}
	return nil
}

// Issue completes a key that ConsoleKey or GrantKey returned, and returns it with its token. It fails if the parent has ended
// meanwhile, or has MaxConsoleKeys: codes are not limited. Call Issued once the key is in the registry or cannot be stored.
func (r *Registry) Issue(k Key, now time.Time) (_ Key, token string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.endedLocked(&k, now); err != nil {
		return Key{}, "", fmt.Errorf("%w: %q (%s)", err, k.Parent.Name, k.Parent.Key)
	}
	k.ID = randomText(idBytes)
	token = tokenPrefix + k.ID + "_" + randomText(secretBytes)
	k.Hash, k.Created = hashOf(token), now.UTC().Truncate(time.Microsecond)
	if k.Grant != nil {
		k.Name = "grant " + k.ID
		return k, "", nil
	}
	if err := r.checkChildrenLocked(&k.Parent, now); err != nil {
		return Key{}, "", err
	}
	r.issuing[k.Parent.Key]++
	k.Name = "console " + k.ID
	if end := k.Created.Add(ConsoleKeyLife); k.Expires.IsZero() || end.Before(k.Expires) {
		k.Expires = end
	}
	return k, token, nil
}

// Issued ends the issue of a key.
func (r *Registry) Issued(k Key) {
	if k.Grant != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.issuing[k.Parent.Key]--; r.issuing[k.Parent.Key] == 0 {
		delete(r.issuing, k.Parent.Key)
	}
}

// EndedError returns why a key of the registry has ended, itself or with its parent; nil if it
// is valid.
func (r *Registry) EndedError(k Key, now time.Time) error {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.endedLocked(&k, now)
}

func (r *Registry) endedLocked(k *Key, now time.Time) error {
	err := k.EndedError(now)
	switch parent := r.byID[k.Parent.Key]; {
	case err != nil || k.Parent.Key == "":
		return err
	case k.Parent.Key == KeyAdmin:
		if k.Parent.Admin != r.adminHash() {
			return ErrRevoked
		}
		return nil
	case parent == nil: // it ended so long ago that it was dropped
		return ErrRevoked
	default:
		return parent.key.EndedError(now)
	}
}

// newKeyCaller returns the caller of a key: of a console key, its parent with the rights of
// the console key.
func newKeyCaller(k *Key) *Caller {
	c := &Caller{Key: k.ID, Name: k.Name, Scopes: k.Scopes, Devices: k.Devices, Tools: k.Tools}
	if k.Parent.Key != "" {
		c.Key, c.Name, c.Through, c.Grant = k.Parent.Key, k.Parent.Name, k.ID, k.Grant != nil
		c.Narrow = k.Narrow || c.Grant
	}
	c.derive()
	return c
}
