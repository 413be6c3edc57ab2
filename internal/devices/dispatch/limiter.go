package dispatch

import (
	"sync"
	"sync/atomic"

	"fleetd/internal/devices"
)

// MaxServing is how many requests of callers a node serves at once, over all interfaces.
const MaxServing = 4_096

// Limiter divides MaxServing slots between callers. A caller may have as many requests in
// progress as it leaves free: a key whose calls wait for silent devices gets half of the
// slots, a second one half of the rest, and others still find one. NATS does not report
// that a caller has left; its calls keep their slots until they time out. The zero value is
// ready to use; it is safe for concurrent use.
type Limiter struct {
	// OverShare counts requests that were refused because their caller had used up its
	// share.
	OverShare atomic.Uint64

	mu    sync.Mutex
	total int
	byKey map[string]int
}

// Acquire takes a slot for a request of this key until Release.
func (p *Limiter) Acquire(key string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	own := p.byKey[key]
	switch {
	case own > 0 && own >= MaxServing-p.total:
		p.OverShare.Add(1)
		return &devices.Error{Code: devices.CodeRateLimited,
			Detail: "too many requests of this caller are in progress on the node; wait for their answers"}
	case p.total >= MaxServing:
		return &devices.Error{Code: devices.CodeUnavailable, Part: "node", Detail: "too many requests are in progress on the node; try again later"}
	}
	if p.byKey == nil {
		p.byKey = map[string]int{}
	}
	p.total++
	p.byKey[key] = own + 1
	return nil
}

// Release frees a slot.
func (p *Limiter) Release(key string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.total--
	if p.byKey[key]--; p.byKey[key] == 0 {
		delete(p.byKey, key)
	}
}

// InUse returns how many slots are in use.
func (p *Limiter) InUse() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.total
}
