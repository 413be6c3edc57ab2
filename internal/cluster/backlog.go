package cluster

import "github.com/nats-io/nats.go"

// Limits of the requests that wait for the dispatcher.
const (
	MaxBacklog      = 65_536   // requests
	MaxBacklogBytes = 64 << 20 // of requests, headers included
	// requestCost is about what a message takes beside its text.
	requestCost = 512
)

// backlog is the requests taken from NATS and not dispatched yet, first come
// first served. It belongs to the dispatcher.
type backlog struct {
	waiting []*nats.Msg // from next on
	next    int
	bytes   int
}

// put takes a request; false if there is no room for it.
func (b *backlog) put(msg *nats.Msg) bool {
	cost := costOf(msg)
	if len(b.waiting)-b.next >= MaxBacklog || b.bytes+cost > MaxBacklogBytes {
		return false
	}
	if b.next > len(b.waiting)/2 && len(b.waiting) == cap(b.waiting) { // room at the front, before growing
		n := copy(b.waiting, b.waiting[b.next:])
		clear(b.waiting[n:])
		b.waiting, b.next = b.waiting[:n], 0
	}
	b.bytes += cost
	b.waiting = append(b.waiting, msg)
	return true
}

// take returns the oldest request, nil if there is none.
func (b *backlog) take() *nats.Msg {
	if b.next == len(b.waiting) {
		return nil
	}
	msg := b.waiting[b.next]
	b.waiting[b.next] = nil
	b.bytes -= costOf(msg)
	if b.next++; b.next == len(b.waiting) {
		b.waiting, b.next = b.waiting[:0], 0
	}
	return msg
}

func costOf(msg *nats.Msg) int { return requestCost + msg.Size() }
