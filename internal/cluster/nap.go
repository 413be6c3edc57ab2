package cluster

import (
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/timescale"
)

// A node that was stopped for a while (a frozen virtual machine, SIGSTOP, a
// host out of memory) wakes up with a backlog of requests whose callers have
// long been told that it did not answer. It runs none of them.
var (
	napTick  = timescale.Of(250 * time.Millisecond)
	napLimit = lostAfter // without a tick, after which a waiting request may have been given up
)

// naps notices that the process did not run.
type naps struct {
	start  time.Time
	ticked atomic.Int64 // nanoseconds since start, by the monotonic clock
	limit  time.Duration
}

func newNaps(limit time.Duration) *naps { return &naps{start: time.Now(), limit: limit} }

// over tells whether the process has just slept longer than the limit, once
// per sleep.
func (n *naps) over() bool {
	last, now := n.ticked.Load(), int64(time.Since(n.start))
	return now-last > int64(n.limit) && n.ticked.CompareAndSwap(last, now)
}

func (n *naps) tick() { n.ticked.Store(int64(time.Since(n.start))) }

// wakeMark goes through the inbox behind everything that waited there when the
// node woke up.
var wakeMark = &nats.Msg{}

// watch notices sleeps, and lost connections, until the link is closed.
func (l *Link) watch() {
	ticker := time.NewTicker(napTick)
	defer ticker.Stop()
	status := l.opt.Conn.StatusChanged(nats.RECONNECTING, nats.CLOSED)
	defer l.opt.Conn.RemoveStatusListener(status)
	for {
		select {
		case <-l.ctx.Done():
			return
		case <-status:
			l.answers.lose()
		case <-ticker.C:
			l.wake()
			l.naps.tick()
		}
	}
}

// wake starts the refusal of requests that are too old, if the node slept.
func (l *Link) wake() {
	if !l.naps.over() {
		return
	}
	l.drowsy.Add(1)
	l.Naps.Add(1)
	l.tasks.Go(func() {
		l.opt.Log.Warn("this node did not run for a while; requests of that time are refused", "limit", napLimit)
		// What the server sent before its answer to this has been waiting. A
		// connection that was lost meanwhile brings nothing old any more.
		_ = l.opt.Conn.FlushTimeout(attachTimeout)
		select {
		case l.inbox <- wakeMark:
		case <-l.ctx.Done():
			return
		}
		if l.opt.Woken != nil {
			l.opt.Woken()
		}
	})
}
