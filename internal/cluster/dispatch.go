package cluster

import (
	"fmt"
	"sync"

	"github.com/nats-io/nats.go"

	"fleetd/internal/devices"
	"fleetd/internal/tasks"
)

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

// put takes a request; false if there is no room for it. The mark behind what
// waited while the node slept always finds some.
func (b *backlog) put(msg *nats.Msg) bool {
	cost := costOf(msg)
	if msg != wakeMark && (len(b.waiting)-b.next >= MaxBacklog || b.bytes+cost > MaxBacklogBytes) {
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

// dispatch only hands requests on, so that one slow device delays no other.
// With every request it takes all that came meanwhile from NATS, as far as the
// backlog has room for them, in requests and in bytes.
func (l *Link) dispatch() {
	var queue backlog
	for {
		msg := queue.take()
		if msg == nil {
			select {
			case <-l.ctx.Done():
				return
			case msg = <-l.inbox:
			}
		} else if l.ctx.Err() != nil {
			return
		}
		if !l.late(msg) && !l.inOrder(msg) {
			l.start(msg)
		}
		for n := len(l.inbox); n > 0; n-- {
			l.collect(&queue, <-l.inbox)
		}
		l.Waiting.Store(int64(queue.bytes))
	}
}

// late refuses what waited while the node slept.
func (l *Link) late(msg *nats.Msg) bool {
	if msg == wakeMark {
		l.drowsy.Add(-1)
		return true
	}
	l.wake() // the watch may wake up later than this
	if l.drowsy.Load() == 0 {
		return false
	}
	l.refuse(msg, &devices.Error{Code: devices.CodeUnavailable, Part: "node", Detail: "the node was stopped for a while, and this request with it"})
	return true
}

// collect takes a request into the backlog, or refuses it.
func (l *Link) collect(queue *backlog, msg *nats.Msg) {
	switch {
	case len(msg.Data) > maxHop:
		l.refuse(msg, tooLarge(msg))
	case !queue.put(msg):
		l.refuse(msg, &devices.Error{Code: devices.CodeUnavailable, Part: "node", Detail: "too many requests wait"})
	}
}

// start serves one request in a task of its own. Until it is known who asks,
// which takes microseconds, the task has one of a few places for which requests
// wait here, so that a caller's flood fills only the caller's share of those
// being served.
func (l *Link) start(msg *nats.Msg) {
	select {
	case l.opening <- struct{}{}:
	case <-l.ctx.Done():
		return
	}
	l.serving.Add(1)
	l.tasks.Go(func() {
		defer l.serving.Add(-1)
		opened := sync.OnceFunc(func() { <-l.opening })
		defer opened()
		defer tasks.Contain(l.opt.Log, func() {
			l.refuse(msg, &devices.Error{Code: devices.CodeInternal, Detail: "a fault of the node; its log says more"})
		})
		l.serve(msg, opened)
	})
}

func tooLarge(msg *nats.Msg) *devices.Error {
	return &devices.Error{Code: devices.CodeTooLarge, Detail: fmt.Sprintf("the request has %d bytes, at most %d are allowed", len(msg.Data), maxBody)}
}
