package mcpserver

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// A session that does not read does not delay others, a queued notification is delivered
// once, and close waits for deliveries in progress.
func TestNotifier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		p := newNotifier(ctx)
		stalled, reads := new(mcp.ServerSession), new(mcp.ServerSession)
		var mu sync.Mutex
		var delivered []string
		say := func(what string) {
			mu.Lock()
			defer mu.Unlock()
			delivered = append(delivered, what)
		}
		deliveredSince := func() []string {
			mu.Lock()
			defer mu.Unlock()
			defer func() { delivered = nil }()
			return delivered
		}
		hang := func(ctx context.Context) { <-ctx.Done(); say("given up") }
		tell := func(what string) func(context.Context) { return func(context.Context) { say(what) } }

		p.send(stalled, "a", hang)
		synctest.Wait() // the delivery blocks: the next one is queued
		for range 3 {
			p.send(stalled, "a", tell("a to stalled"))
			p.send(stalled, "b", tell("b to stalled"))
		}
		p.send(reads, "a", tell("a to the other"))
		synctest.Wait()
		if got := deliveredSince(); !slices.Equal(got, []string{"a to the other"}) {
			t.Errorf("at once: %q", got)
		}
		time.Sleep(notifyLimit)
		synctest.Wait()
		if got := deliveredSince(); !slices.Equal(got, []string{"given up", "a to stalled", "b to stalled"}) {
			t.Errorf("after the limit: %q", got)
		}
		if len(p.queues) != 0 {
			t.Errorf("%d sessions have queues", len(p.queues))
		}

		p.send(stalled, "a", hang)
		synctest.Wait()
		p.send(stalled, "b", tell("b after the end"))
		stop()
		p.close()
		p.send(reads, "a", tell("a after the end"))
		synctest.Wait()
		if got := deliveredSince(); !slices.Contains(got, "given up") || slices.Contains(got, "a after the end") {
			t.Errorf("closed: %q", got)
		}
	})
}
