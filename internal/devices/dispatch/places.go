package dispatch

import (
	"sync"
	"sync/atomic"

	"fleetd/internal/devices"
)

// MaxServing is how many requests of callers a node serves at once, whichever way
// they came in.
const MaxServing = 4_096

// Places divides the MaxServing places between callers: one may have as many as
// it leaves free, so that a key whose calls wait for silent devices takes half of
// them, the next such key half of the rest, and somebody else still finds one.
// Nobody tells when a caller of NATS is gone; its calls keep their places until
// they time out. The zero value is ready; it is safe for concurrent use.
type Places struct {
	// OverShare counts requests that were refused because their caller had as many
	// in progress as were left for others.
	OverShare atomic.Uint64

	mu    sync.Mutex
	total int
	byKey map[string]int
}

// Enter takes a place for a request of the caller with this key until Leave.
func (p *Places) Enter(key string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	own := p.byKey[key]
	switch {
	case own > 0 && own >= MaxServing-p.total:
		p.OverShare.Add(1)
		return &devices.Error{Code: devices.CodeDeviceBusy,
			Detail: "this caller has as many requests in progress on the node as are left for others; wait for their answers"}
	case p.total >= MaxServing:
		return &devices.Error{Code: devices.CodeUnavailable, Part: "node", Detail: "too many requests are being served"}
	}
	if p.byKey == nil {
		p.byKey = map[string]int{}
	}
	p.total++
	p.byKey[key] = own + 1
	return nil
}

// Leave gives a place back.
func (p *Places) Leave(key string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.total--
	if p.byKey[key]--; p.byKey[key] == 0 {
		delete(p.byKey, key)
	}
}

// Taken is how many places are taken.
func (p *Places) Taken() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.total
}
