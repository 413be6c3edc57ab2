package apiclient

import (
	"context"
	"encoding/json"
	"mime"
	"net/http"
	"time"
)

// opened notes a session and listens to what the node says unasked.
func (b *mcpBridge) opened(hello []byte, revision, session string) {
	if revision == "" || session == "" {
		return
	}
	b.mu.Lock()
	b.session, b.revision, b.hello = session, revision, hello
	b.mu.Unlock()
	b.tasks.Go(func() { b.listen(b.ctx, session) })
}

// listen reads what the node says unasked, as long as the session lives.
func (b *mcpBridge) listen(ctx context.Context, session string) {
	for ctx.Err() == nil && b.broken() == nil {
		header := b.header(&mcpMessage{})
		if header.Get("Mcp-Session-Id") != session {
			return // there is another by now
		}
		header.Set("Accept", "text/event-stream")
		resp, err := b.client.raw(ctx, http.MethodGet, b.path, nil, header)
		if err == nil {
			if resp.StatusCode == http.StatusOK {
				err = b.answers(resp.Body, "text/event-stream", b.write)
			}
			status := resp.StatusCode
			_ = resp.Body.Close() // it was read
			if status >= 400 && status < 500 && status != http.StatusTooManyRequests {
				return // the next message opens another session, or tells what is wrong
			}
		}
		if err != nil || ctx.Err() == nil {
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	}
}

// reopen makes a session in place of a lost one, which the node does not have any more, such as after its restart. The
// host knows nothing of sessions. Of several requests that find it lost, one reopens it.
func (b *mcpBridge) reopen(ctx context.Context, lost string) bool {
	b.reopening.Lock()
	defer b.reopening.Unlock()
	b.mu.Lock()
	hello, session := b.hello, b.session
	b.mu.Unlock()
	if session != lost {
		return true
	}
	var m mcpMessage
	if hello == nil || json.Unmarshal(hello, &m) != nil {
		return false
	}
	header := http.Header{"Accept": {"application/json, text/event-stream"}, "Content-Type": {"application/json"}}
	resp, err := b.client.raw(ctx, http.MethodPost, b.path, hello, header)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	var answer mcpMessage
	if resp.StatusCode != http.StatusOK || b.answers(resp.Body, kind, func(text []byte) { _ = json.Unmarshal(text, &answer) }) != nil || answer.Result.Revision == "" {
		return false
	}
	// Others may use it once it is ready.
	session = resp.Header.Get("Mcp-Session-Id")
	inSession(header, session, answer.Result.Revision)
	ready := mcpMessage{Method: "notifications/initialized"}
	if b.postWith(ctx, []byte(`{"jsonrpc":"2.0","method":"notifications/initialized"}`), &ready, header) != nil {
		return false
	}
	b.opened(hello, answer.Result.Revision, session)
	return true
}

// goodbye ends the session at the node; it ends by itself where this fails.
func (b *mcpBridge) goodbye() {
	header := b.header(&mcpMessage{})
	if header.Get("Mcp-Session-Id") == "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), mcpGoodbye)
	defer cancel()
	if resp, err := b.client.raw(ctx, http.MethodDelete, b.path, nil, header); err == nil {
		_ = resp.Body.Close() // nothing is in it
	}
}
