package cluster

import (
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/timescale"
)

// A process that did not run for a while (frozen virtual machine, SIGSTOP, host out
// of memory) resumes with a backlog of requests whose callers have long received a
// timeout. It runs none of them.
var (
	stallTick  = timescale.Of(250 * time.Millisecond)
	stallLimit = lostAfter // after this time without a tick, callers may have given up
)

// stallDetector detects that the process did not run.
type stallDetector struct {
	start  time.Time
	ticked atomic.Int64 // nanoseconds since start, by the monotonic clock
	limit  time.Duration
}

func newStallDetector(limit time.Duration) *stallDetector {
	return &stallDetector{start: time.Now(), limit: limit}
}

// resumed reports whether the process did not run for longer than the limit, once
// for each stall.
func (n *stallDetector) resumed() bool {
	last, now := n.ticked.Load(), int64(time.Since(n.start))
	return now-last > int64(n.limit) && n.ticked.CompareAndSwap(last, now)
}

func (n *stallDetector) tick() { n.ticked.Store(int64(time.Since(n.start))) }

// resumeMark is put into the inbox after a stall; requests before it may be stale.
var resumeMark = &nats.Msg{}

// watch detects stalls and lost connections until the link is closed.
func (l *Link) watch() {
	ticker := time.NewTicker(stallTick)
	defer ticker.Stop()
	status := l.opt.Conn.StatusChanged(nats.RECONNECTING, nats.CLOSED)
	defer l.opt.Conn.RemoveStatusListener(status)
	for {
		select {
		case <-l.ctx.Done():
			return
		case <-status:
			l.answers.connectionLost()
		case <-ticker.C:
			l.detectStall()
			l.stalls.tick()
		}
	}
}

// detectStall starts the refusal of stale requests after a stall.
func (l *Link) detectStall() {
	if !l.stalls.resumed() {
		return
	}
	l.stalled.Add(1)
	l.Stalls.Add(1)
	l.tasks.Go(func() {
		l.opt.Log.Warn("this process did not run for a while; requests of that time are refused. Check the host's memory and CPU", "limit", stallLimit)
		// All requests that the server held before its answer to this flush are in the
		// inbox. A connection that was lost meanwhile delivers no stale requests.
		_ = l.opt.Conn.FlushTimeout(attachTimeout)
		select {
		case l.inbox <- resumeMark:
		case <-l.ctx.Done():
			return
		}
		if l.opt.OnResume != nil {
			l.opt.OnResume()
		}
	})
}
