package apiclient

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"time"

	"fleetd/internal/clock"
)

// maxMCPFollowed is how many resources a session may follow at the node.
const maxMCPFollowed = 64

// opened notes a session and listens for notifications of the node.
func (b *mcpBridge) opened(hello []byte, revision, session string) {
	if revision == "" || session == "" {
		return
	}
	b.mu.Lock()
	b.session, b.revision, b.hello = session, revision, hello
	b.mu.Unlock()
	b.tasks.Go(func() { b.listen(b.ctx, session) })
}

// listen reads notifications of the node until the session ends.
func (b *mcpBridge) listen(ctx context.Context, session string) {
	for ctx.Err() == nil && b.broken() == nil {
		header := b.header(&mcpMessage{})
		if header.Get("Mcp-Session-Id") != session {
			return // there is another already
		}
		header.Set("Accept", "text/event-stream")
		resp, err := b.client.raw(ctx, http.MethodGet, b.path, nil, header)
		if err == nil {
			if resp.StatusCode == http.StatusOK {
				err = b.answers(resp.Body, "text/event-stream", b.write)
			}
			status := resp.StatusCode
			_ = resp.Body.Close() // it was read
			switch {
			case status == http.StatusNotFound && len(b.following()) > 0: // the host may wait for news, and say nothing itself
				if b.reopen(ctx, session) {
					return
				}
			case status >= 400 && status < 500 && status != http.StatusTooManyRequests:
				return // the next message opens another session, or reports what is wrong
			}
		}
		if err != nil || ctx.Err() == nil {
			clock.Sleep(ctx, time.Second)
		}
	}
}

// follow notes a resource that the host has subscribed to.
func (b *mcpBridge) follow(uri string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.followed) < maxMCPFollowed && !slices.Contains(b.followed, uri) {
		b.followed = append(b.followed, uri)
	}
}

func (b *mcpBridge) unfollow(uri string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.followed = slices.DeleteFunc(b.followed, func(f string) bool { return f == uri })
}

// following are the resources that the host has subscribed to.
func (b *mcpBridge) following() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.followed)
}

// reopen makes a session in place of a lost one, which the node does not have any more, such as after its restart, and
// subscribes in it to what the host followed. The host has no sessions. Of several requests that find it
// lost, one reopens it.
func (b *mcpBridge) reopen(ctx context.Context, lost string) bool {
	b.reopening.Lock()
	defer b.reopening.Unlock()
	b.mu.Lock()
	hello, session := b.hello, b.session
	b.mu.Unlock()
	if session != lost {
		return true
	}
	if hello == nil {
		return false
	}
	header := http.Header{"Accept": {"application/json, text/event-stream"}, "Content-Type": {"application/json"}}
	answer, session, err := b.ask(ctx, hello, header)
	if err != nil || answer.Result == nil || answer.Result.Revision == "" {
		return false
	}
	// Others may use it once it is ready.
	revision := answer.Result.Revision
	inSession(header, session, revision)
	ready := mcpMessage{Method: "notifications/initialized"}
	if b.postWith(ctx, []byte(`{"jsonrpc":"2.0","method":"notifications/initialized"}`), &ready, header) != nil || b.subscribe(ctx, header) != nil {
		b.leave(header) // the next try would be one more
		return false
	}
	b.opened(hello, revision, session)
	return true
}

// ask sends a request that the host has not made now, and returns its answer, which the host does not see, and the
// session that came with it.
func (b *mcpBridge) ask(ctx context.Context, line []byte, header http.Header) (answer *mcpMessage, session string, err error) {
	err = b.carry(ctx, line, header, func(message []byte, in string) {
		var m mcpMessage
		if json.Unmarshal(message, &m) == nil && m.Method == "" {
			answer, session = &m, in
		}
	})
	if err == nil && answer == nil {
		err = errNoAnswer
	}
	return answer, session, err
}

// subscribe subscribes in a new session to what the host followed in the lost one. What the node refuses now is
// dropped: the host has the answer that it follows it, and MCP cannot take that back. An error is that of the session.
func (b *mcpBridge) subscribe(ctx context.Context, header http.Header) error {
	type params struct {
		URI string `json:"uri"`
	}
	for _, uri := range b.following() {
		line, err := json.Marshal(struct {
			Version string `json:"jsonrpc"`
			ID      string `json:"id"` // none that the host has
			Method  string `json:"method"`
			Params  params `json:"params"`
		}{"2.0", "fleetd-" + rand.Text(), "resources/subscribe", params{uri}})
		if err != nil { // strings marshal
			return err
		}
		answer, _, err := b.ask(ctx, line, header)
		if err != nil {
			return err
		}
		if answer.Result == nil {
			b.unfollow(uri)
			b.note(fmt.Errorf("the session with the node was lost, and in the new one it refuses the subscription to %s: %s", uri, answer.Error.Message))
		}
	}
	return nil
}

// goodbye ends the session at the node.
func (b *mcpBridge) goodbye() {
	if header := b.header(&mcpMessage{}); header.Get("Mcp-Session-Id") != "" {
		b.leave(header)
	}
}

// leave ends the session that the header names; it ends by itself where this fails.
func (b *mcpBridge) leave(header http.Header) {
	ctx, cancel := context.WithTimeout(context.Background(), mcpGoodbye)
	defer cancel()
	if resp, err := b.client.raw(ctx, http.MethodDelete, b.path, nil, header); err == nil {
		_ = resp.Body.Close() // nothing is in it
	}
}
