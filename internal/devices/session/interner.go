package session

import (
	"sync"
	"sync/atomic"
)

// maxInterned is how many strings an interner keeps.
const maxInterned = 10_000

// interner keeps one copy of strings that many devices share (boards, firmware versions,
// image hashes).
type interner struct {
	m sync.Map
	n atomic.Int32
}

func (i *interner) get(text string) string {
	if v, ok := i.m.Load(text); ok {
		return v.(string)
	}
	if i.n.Load() >= maxInterned {
		return text
	}
	v, loaded := i.m.LoadOrStore(text, text)
	if !loaded {
		i.n.Add(1)
	}
	return v.(string)
}
