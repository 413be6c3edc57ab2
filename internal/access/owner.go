package access

import (
	"cmp"
	"strings"
	"time"
)

// Owner names the caller as the owner of the jobs that it creates: by its key, and behind a slash by the child with fewer rights through
// which it acts.
func (b Principal) Owner() string {
	if b.Caller != nil && b.Caller.Narrow {
		return b.Caller.Key + "/" + b.Caller.Through
	}
	return b.Key()
}

// Self is the owner whose jobs are the caller's own, with those of its children. The jobs of its key are not those of a grant.
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

// Acting returns the caller as whom the jobs of an owner act: with the rights of a child, and until the key itself ends. open is whether
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
	return NewCaller(h.caller.Key, h.caller.Name, h.caller.Scopes, h.caller.Devices, h.caller.Tools), nil
}

func keyOf(owner string) string {
	key, _, _ := strings.Cut(owner, "/")
	return key
}
