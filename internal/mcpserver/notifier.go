package mcpserver

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// notifyLimit is the time limit of one notification to one session.
const notifyLimit = 10 * time.Second

// notifier delivers notifications to each session independently. The SDK notifies
// sessions one after the other, with ten seconds for all of them, so that one session
// that does not read would delay the others.
type notifier struct {
	ctx     context.Context
	workers sync.WaitGroup

	mu     sync.Mutex
	closed bool
	queues map[*mcp.ServerSession][]notification // for each session with a worker
}

// notification contains only what has changed, so one queued notification per subject
// is enough. A session has one subject for each resource that it subscribes to, and one
// for its list of tools.
type notification struct {
	subject string
	deliver func(context.Context)
}

func newNotifier(ctx context.Context) *notifier {
	return &notifier{ctx: ctx, queues: map[*mcp.ServerSession][]notification{}}
}

// send queues a notification and returns at once.
func (p *notifier) send(to *mcp.ServerSession, subject string, deliver func(context.Context)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	queue, hasWorker := p.queues[to]
	if p.closed || slices.ContainsFunc(queue, func(l notification) bool { return l.subject == subject }) {
		return
	}
	p.queues[to] = append(queue, notification{subject, deliver})
	if !hasWorker {
		p.workers.Go(func() { p.deliver(to) })
	}
}

// deliver delivers the queued notifications of a session.
func (p *notifier) deliver(to *mcp.ServerSession) {
	for {
		p.mu.Lock()
		queue := p.queues[to]
		if len(queue) == 0 {
			delete(p.queues, to)
			p.mu.Unlock()
			return
		}
		p.queues[to] = queue[1:]
		p.mu.Unlock()
		ctx, cancel := context.WithTimeout(p.ctx, notifyLimit)
		queue[0].deliver(ctx)
		cancel()
	}
}

// close waits for the deliveries in progress, whose context must have ended, and
// refuses further notifications.
func (p *notifier) close() {
	p.mu.Lock()
	p.closed = true
	clear(p.queues)
	p.mu.Unlock()
	p.workers.Wait()
}
