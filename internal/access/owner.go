package access

import (
	"cmp"
	"strings"
	"time"
)

// Owner returns the owner of what the caller creates: the id of its key, then a slash and the id of the child if that has fewer rights.
func (b Principal) Owner() string {
	if b.Caller == nil {
		return ""
	}
	return cmp.Or(b.Caller.owner, b.Caller.Key)
}

// Self returns the owner whose jobs, with those of its children, are the caller's own. A grant does not own the jobs of its key.
func (b Principal) Self() string {
	if b.Caller != nil && b.Caller.Grant {
		return b.Owner()
	}
	return b.Key()
}

// Owns reports whether jobs of an owner are the caller's own.
func (b Principal) Owns(owner string) bool {
	return owner == b.Self() || strings.HasPrefix(owner, b.Self()+"/")
}

// Acting returns the caller for the jobs of an owner. A child keeps its rights after its own end; the key's end ends both. open says that
// requests need no key. The error is ErrToken for a key or a child that this node does not know, or not yet.
func (r *Registry) Acting(owner string, open bool, now time.Time) (*Caller, error) {
	key, child, _ := strings.Cut(owner, "/")
	switch {
	case owner == KeyAdmin:
		return Admin, nil
	case owner == KeyOpen && open:
		return Open, nil
	case owner == KeyOpen:
		return nil, ErrRevoked
	}
	r.mu.RLock()
	defer r.mu.RUnlock()
	parent, h := r.byID[key], r.byID[cmp.Or(child, key)]
	if h == nil || parent == nil && key != KeyAdmin {
		return nil, ErrToken
	}
	if parent != nil {
		if err := parent.key.EndedError(now); err != nil {
			return nil, err
		}
	}
	if child == "" {
		return h.caller, nil
	}
	acting := NewCaller(h.caller.Key, h.caller.Name, h.caller.Scopes, h.caller.Devices, h.caller.Tools)
	acting.owner = owner
	return acting, nil
}

// KeyOf returns the key of an owner.
func KeyOf(owner string) string {
	key, _, _ := strings.Cut(owner, "/")
	return key
}
