package cluster

import (
	"fmt"
	"sync"

	"github.com/nats-io/nats.go"

	"fleetd/internal/devices"
	"fleetd/internal/tasks"
)

// Limits of the dispatcher's backlog.
const (
	MaxBacklog      = 65_536   // requests
	MaxBacklogBytes = 64 << 20 // of requests, headers included
	// requestCost estimates the memory of a message beside its text, in bytes.
	requestCost = 512
)

// backlog holds requests that were received from NATS and not dispatched yet, first
// in, first out. Only the dispatcher uses it.
type backlog struct {
	waiting []*nats.Msg // from index next on
	next    int
	bytes   int
}

// put adds a request. It reports whether there was room; there always is for
// resumeMark.
func (b *backlog) put(msg *nats.Msg) bool {
	cost := costOf(msg)
	if msg != resumeMark && (len(b.waiting)-b.next >= MaxBacklog || b.bytes+cost > MaxBacklogBytes) {
		return false
	}
	if b.next > len(b.waiting)/2 && len(b.waiting) == cap(b.waiting) { // reuse the space at the front before growing
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

// dispatch starts requests without waiting for them, so that one slow device delays
// no other. After every request it moves all requests that arrived from NATS into
// the backlog, within its limits of requests and bytes.
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
		if !l.refuseStalled(msg) && !l.serveInOrder(msg) {
			l.start(msg)
		}
		for n := len(l.inbox); n > 0; n-- {
			l.collect(&queue, <-l.inbox)
		}
		l.Waiting.Store(int64(queue.bytes))
	}
}

// refuseStalled refuses requests that arrived while the process did not run.
func (l *Link) refuseStalled(msg *nats.Msg) bool {
	if msg == resumeMark {
		l.stalled.Add(-1)
		return true
	}
	l.detectStall() // the watch may notice it later than this
	if l.stalled.Load() == 0 {
		return false
	}
	l.refuse(msg, &devices.Error{Code: devices.CodeUnavailable, Part: "node", Detail: "the node did not run for a while and refuses the requests of that time; send the request again"})
	return true
}

// collect adds a request to the backlog, or refuses it.
func (l *Link) collect(queue *backlog, msg *nats.Msg) {
	switch {
	case len(msg.Data) > maxHop:
		l.refuse(msg, tooLarge(msg))
	case !queue.put(msg):
		l.refuse(msg, &devices.Error{Code: devices.CodeUnavailable, Part: "node", Detail: "the node has too many waiting requests; try again later"})
	}
}

// start serves one request in its own goroutine. Until the caller is authenticated,
// which takes microseconds, the request occupies one of maxAuthenticating slots, and
// the dispatcher waits for a free one. A caller that floods the node therefore fills
// only its own share of the requests in progress.
func (l *Link) start(msg *nats.Msg) {
	select {
	case l.authenticating <- struct{}{}:
	case <-l.ctx.Done():
		return
	}
	l.serving.Add(1)
	l.tasks.Go(func() {
		defer l.serving.Add(-1)
		authenticated := sync.OnceFunc(func() { <-l.authenticating })
		defer authenticated()
		defer tasks.Contain(l.opt.Log, func() {
			l.refuse(msg, &devices.Error{Code: devices.CodeInternal, Detail: "internal error (bug); see the log of the node"})
		})
		l.serve(msg, authenticated)
	})
}

func tooLarge(msg *nats.Msg) *devices.Error {
	return &devices.Error{Code: devices.CodeTooLarge, Detail: fmt.Sprintf("the request has %d bytes, at most %d are allowed", len(msg.Data), maxBody)}
}
