package access

import "time"

// Holder is what the shares of a limit depend on: whose key it is that holds something.
type Holder struct {
	Admin bool // it has all rights, and no share limits it
	Ended bool // what it held counts no longer
}

// Holder returns what the shares need to know of a key, by its id or one of the constants such as KeyAdmin. A key that
// this node does not know yet counts as a valid one without the scope admin.
func (r *Registry) Holder(key string, now time.Time) Holder {
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

// Share returns how many more of a limit the caller with this key may take. held is what each key holds, with what is
// held through its console keys; of returns whose keys they are.
//
// A quarter of the limit is left to administrators. Of the rest a key without the scope admin may take n more if it then
// holds at most as many as all such keys together leave free after it: one that is alone gets half of the three
// quarters, a second one half of what is left. So none of them keeps others from getting any.
func Share(limit int64, held map[string]int64, key string, of func(key string) Holder) int64 {
	free, shared := limit, 3*limit/4
	for other, n := range held {
		switch h := of(other); {
		case h.Ended:
			continue
		case !h.Admin:
			shared -= n
		}
		free -= n
	}
	if !of(key).Admin {
		free = min(free, (shared-held[key])/2)
	}
	return max(free, 0)
}
