package mcpserver

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// notifyLimit is how long one notification to one session may take.
const notifyLimit = 10 * time.Second

// post carries notifications to each session by itself. The SDK writes to one
// session after the other and gives all of them ten seconds together, so that
// one that does not read would cost others what they are to hear.
type post struct {
	ctx    context.Context
	bearer sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	waiting map[*mcp.ServerSession][]letter // of the sessions that have a bearer
}

// letter says that something has changed, not how: one that waits speaks for
// all of its subject. A session has as many as it follows resources, and one
// for its list of tools.
type letter struct {
	subject string
	deliver func(context.Context)
}

func newPost(ctx context.Context) *post {
	return &post{ctx: ctx, waiting: map[*mcp.ServerSession][]letter{}}
}

// send returns at once.
func (p *post) send(to *mcp.ServerSession, subject string, deliver func(context.Context)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	queue, carried := p.waiting[to]
	if p.closed || slices.ContainsFunc(queue, func(l letter) bool { return l.subject == subject }) {
		return
	}
	p.waiting[to] = append(queue, letter{subject, deliver})
	if !carried {
		p.bearer.Go(func() { p.carry(to) })
	}
}

// carry delivers what waits for a session until nothing does.
func (p *post) carry(to *mcp.ServerSession) {
	for {
		p.mu.Lock()
		queue := p.waiting[to]
		if len(queue) == 0 {
			delete(p.waiting, to)
			p.mu.Unlock()
			return
		}
		p.waiting[to] = queue[1:]
		p.mu.Unlock()
		ctx, cancel := context.WithTimeout(p.ctx, notifyLimit)
		queue[0].deliver(ctx)
		cancel()
	}
}

// close waits for what is being delivered, whose context must have ended, and
// takes no more.
func (p *post) close() {
	p.mu.Lock()
	p.closed = true
	clear(p.waiting)
	p.mu.Unlock()
	p.bearer.Wait()
}
