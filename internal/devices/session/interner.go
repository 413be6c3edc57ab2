package session

import (
	"sync"
	"sync/atomic"

	"fleetd/internal/devices"
)

// maxInterned is how many different facts an interner keeps.
const maxInterned = 10_000

// interner keeps one copy of what many devices report alike: without serial number and time.
type interner struct {
	m sync.Map
	n atomic.Int32
}

func (i *interner) get(f devices.Facts) *devices.Facts {
	if v, ok := i.m.Load(f); ok {
		return v.(*devices.Facts)
	}
	if i.n.Load() >= maxInterned {
		return &f
	}
	v, loaded := i.m.LoadOrStore(f, &f)
	if !loaded {
		i.n.Add(1)
	}
	return v.(*devices.Facts)
}
