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

// A session that does not read keeps no other waiting, what waits for it is
// said once, and closing waits for what is under way.
func TestPost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		p := newPost(ctx)
		stalled, reads := new(mcp.ServerSession), new(mcp.ServerSession)
		var mu sync.Mutex
		var said []string
		say := func(what string) {
			mu.Lock()
			defer mu.Unlock()
			said = append(said, what)
		}
		saidSince := func() []string {
			mu.Lock()
			defer mu.Unlock()
			defer func() { said = nil }()
			return said
		}
		hang := func(ctx context.Context) { <-ctx.Done(); say("given up") }
		tell := func(what string) func(context.Context) { return func(context.Context) { say(what) } }

		p.send(stalled, "a", hang)
		synctest.Wait() // it hangs: the next one waits
		for range 3 {
			p.send(stalled, "a", tell("a to stalled"))
			p.send(stalled, "b", tell("b to stalled"))
		}
		p.send(reads, "a", tell("a to the other"))
		synctest.Wait()
		if got := saidSince(); !slices.Equal(got, []string{"a to the other"}) {
			t.Errorf("at once: %q", got)
		}
		time.Sleep(notifyLimit)
		synctest.Wait()
		if got := saidSince(); !slices.Equal(got, []string{"given up", "a to stalled", "b to stalled"}) {
			t.Errorf("after the limit: %q", got)
		}
		if len(p.waiting) != 0 {
			t.Errorf("%d sessions are remembered", len(p.waiting))
		}

		p.send(stalled, "a", hang)
		synctest.Wait()
		p.send(stalled, "b", tell("b after the end"))
		stop()
		p.close()
		p.send(reads, "a", tell("a after the end"))
		synctest.Wait()
		if got := saidSince(); !slices.Contains(got, "given up") || slices.Contains(got, "a after the end") {
			t.Errorf("closed: %q", got)
		}
	})
}
