package access

import "time"

// Holder is what the shares of a limit depend on: whose key it is that holds something.
type Holder struct {
	Admin bool // it has all rights, and no share limits it
	Ended bool // what it held counts no longer
}

// Holder returns what the shares need to know of an owner, by its key or one of the constants such as KeyAdmin. A key that
// this node does not know yet counts as a valid one without the scope admin.
func (r *Registry) Holder(owner string, now time.Time) Holder {
	key := KeyOf(owner)
	switch key {
	case KeyAdmin, KeyOpen, KeyFleet:
		return Holder{Admin: true}
	}
	r.mu.RLock()
	defer r.mu.RUnlock()
	h := r.byID[key]
	if h == nil {
		return Holder{}
	}
	return Holder{Admin: h.key.Scopes.Has(ScopeAdmin), Ended: h.key.EndedError(now) != nil}
}

// Share returns how many more of a limit an owner may take. held is what each owner holds, and counts for its key; of returns
// whose keys they are.
//
// A quarter of the limit is left to administrators. Of the rest a key without the scope admin may take n more if it then
// holds at most as many as all such keys together leave free after it: one that is alone gets half of the three
// quarters, a second one half of what is left. So none of them keeps others from getting any.
func Share(limit int64, held map[string]int64, owner string, of func(owner string) Holder) int64 {
	free, shared, own := limit, 3*limit/4, int64(0)
	for other, n := range held {
		if KeyOf(other) == KeyOf(owner) {
			own += n
		}
		switch h := of(other); {
		case h.Ended:
			continue
		case !h.Admin:
			shared -= n
		}
		free -= n
	}
	if !of(owner).Admin {
		free = min(free, (shared-own)/2)
	}
	return max(free, 0)
}
