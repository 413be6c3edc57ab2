package apiclient

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/devicetest"
)

// mcpNode is the node of a bridge, as far as MCP goes, between two restarts.
type mcpNode struct {
	server *mcp.Server
	http   [2]http.Handler // with sessions, and without
	refuse string          // a resource that nobody may follow

	mu    sync.Mutex
	asked []string // methods, and the resources of subscriptions
}

func newMCPNode(refuse string) *mcpNode {
	n := &mcpNode{refuse: refuse}
	n.server = mcp.NewServer(&mcp.Implementation{Name: "node", Version: "1"}, &mcp.ServerOptions{
		Capabilities: &mcp.ServerCapabilities{Resources: &mcp.ResourceCapabilities{Subscribe: true}},
		SubscribeHandler: func(_ context.Context, r *mcp.SubscribeRequest) error {
			if r.Params.URI == n.refuse {
				return errors.New("it is not for you")
			}
			return nil
		},
		UnsubscribeHandler: func(context.Context, *mcp.UnsubscribeRequest) error { return nil },
	})
	n.server.AddReceivingMiddleware(func(next mcp.MethodHandler) mcp.MethodHandler {
		return func(ctx context.Context, method string, r mcp.Request) (mcp.Result, error) {
			result, err := next(ctx, method, r)
			if p, ok := r.GetParams().(*mcp.SubscribeParams); ok {
				method += " " + p.URI
			}
			n.mu.Lock()
			defer n.mu.Unlock()
			n.asked = append(n.asked, method)
			return result, err
		}
	})
	get := func(*http.Request) *mcp.Server { return n.server }
	// What is sent before the bridge listens is kept until then, as fleetd does.
	n.http[0] = mcp.NewStreamableHTTPHandler(get, &mcp.StreamableHTTPOptions{EventStore: mcp.NewMemoryEventStore(nil)})
	n.http[1] = mcp.NewStreamableHTTPHandler(get, &mcp.StreamableHTTPOptions{Stateless: true})
	return n
}

func (n *mcpNode) was() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.asked)
}

// mcpHost speaks to a node over pipes.
type mcpHost struct {
	node   atomic.Pointer[mcpNode]
	server *httptest.Server
	in     *io.PipeWriter
	lines  chan string

	mu    sync.Mutex
	notes []string
}

func newMCPHost(t *testing.T) *mcpHost {
	t.Helper()
	h := &mcpHost{lines: make(chan string, 100)}
	h.node.Store(newMCPNode("test://no"))
	h.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		modern := 0
		if r.Header.Get("Mcp-Protocol-Version") >= mcpRevision {
			modern = 1
		}
		h.node.Load().http[modern].ServeHTTP(w, r)
	}))
	t.Cleanup(h.server.Close)
	c, err := New(h.server.URL, "")
	if err != nil {
		t.Fatal(err)
	}
	in, host := io.Pipe()
	out, bridge := io.Pipe()
	h.in = host
	over := make(chan error, 1)
	go func() {
		over <- c.BridgeMCP(context.Background(), MCPPath(""), in, bridge, func(err error) {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.notes = append(h.notes, err.Error())
		})
		_ = bridge.Close() // a pipe
	}()
	go func() {
		defer close(h.lines)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			h.lines <- lines.Text()
		}
	}()
	t.Cleanup(func() {
		_ = host.Close() // a pipe
		if err := <-over; err != nil {
			t.Error(err)
		}
	})
	return h
}

// restart puts a node in place of the one that was there, whose sessions end.
func (h *mcpHost) restart(refuse string) *mcpNode {
	n := newMCPNode(refuse)
	for s := range h.node.Swap(n).server.Sessions() {
		_ = s.Close() // nothing is asked
	}
	return n
}

func (h *mcpHost) say(t *testing.T, format string, args ...any) {
	t.Helper()
	if _, err := fmt.Fprintf(h.in, `{"jsonrpc":"2.0",`+format+"}\n", args...); err != nil {
		t.Fatal(err)
	}
}

// hear returns the next message for the host.
func (h *mcpHost) hear(t *testing.T) (m struct {
	ID            int
	Method        string
	Params        struct{ URI string }
	Result, Error json.RawMessage
}) {
	t.Helper()
	select {
	case line := <-h.lines:
		if err := json.Unmarshal([]byte(line), &m); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("nothing is sent to the host")
	}
	return m
}

// ask makes a request; it returns whether it has a result.
func (h *mcpHost) ask(t *testing.T, id int, method, params string) bool {
	t.Helper()
	h.say(t, `"id":%d,"method":%q,"params":%s`, id, method, params)
	m := h.hear(t)
	if m.ID != id || m.Method != "" {
		t.Fatalf("%s: %+v", method, m)
	}
	return m.Result != nil
}

func (h *mcpHost) open(t *testing.T, revision string) {
	t.Helper()
	if !h.ask(t, 1, "initialize", fmt.Sprintf(`{"protocolVersion":%q,"capabilities":{},"clientInfo":{"name":"h","version":"1"}}`, revision)) {
		t.Fatal("no session")
	}
	h.say(t, `"method":"notifications/initialized"`)
}

func (h *mcpHost) hearsOf(t *testing.T, uri string) {
	t.Helper()
	if err := h.node.Load().server.ResourceUpdated(t.Context(), &mcp.ResourceUpdatedNotificationParams{URI: uri}); err != nil {
		t.Fatal(err)
	}
	if m := h.hear(t); m.Method != "notifications/resources/updated" || m.Params.URI != uri {
		t.Errorf("of %s: %+v", uri, m)
	}
}

// What the host follows it follows in the session that takes the place of a
// lost one, and sees nothing of how.
func TestSubscriptionsOutliveTheirSession(t *testing.T) {
	for _, revision := range []string{"2025-06-18", "2025-11-25"} {
		t.Run(revision, func(t *testing.T) {
			h := newMCPHost(t)
			h.open(t, revision)
			for i, uri := range []string{"test://a", "test://b", "test://c", "test://a", "test://no"} {
				if ok := h.ask(t, 10+i, "resources/subscribe", fmt.Sprintf(`{"uri":%q}`, uri)); ok == (uri == "test://no") {
					t.Errorf("%s: %t", uri, ok)
				}
			}
			h.ask(t, 20, "resources/unsubscribe", `{"uri":"test://b"}`)
			h.hearsOf(t, "test://a")

			h.restart("test://c")
			h.ask(t, 21, "ping", `{}`)
			if was, want := h.node.Load().was(), []string{"initialize", "notifications/initialized", "resources/subscribe test://a", "resources/subscribe test://c", "ping"}; !slices.Equal(was, want) {
				t.Errorf("%q", was)
			}
			h.hearsOf(t, "test://a")
			h.mu.Lock()
			if len(h.notes) != 1 || !strings.Contains(h.notes[0], "test://c") || !strings.Contains(h.notes[0], "it is not for you") {
				t.Errorf("%q", h.notes)
			}
			h.mu.Unlock()

			h.restart("")
			h.ask(t, 22, "ping", `{}`)
			if was, want := h.node.Load().was(), []string{"initialize", "notifications/initialized", "resources/subscribe test://a", "ping"}; !slices.Equal(was, want) {
				t.Errorf("%q", was)
			}
		})
	}
}

// A host that follows something may have nothing to say itself.
func TestSubscriptionsOfASilentHost(t *testing.T) {
	t.Parallel()
	h := newMCPHost(t)
	h.open(t, "2025-11-25")
	if !h.ask(t, 2, "resources/subscribe", `{"uri":"test://a"}`) {
		t.Fatal("refused")
	}
	h.hearsOf(t, "test://a")
	n := h.restart("")
	devicetest.Eventually(t, "the bridge subscribes again", func() bool { return slices.Contains(n.was(), "resources/subscribe test://a") })
	h.hearsOf(t, "test://a")
	h.ask(t, 3, "ping", `{}`)
	if was := n.was(); len(was) != 4 { // in the session that is there already
		t.Errorf("%q", was)
	}
}

// A stream of the revisions without sessions ends with its node, and the host
// gets an error: it opens another one, since it may have missed something.
func TestListeningEndsWithTheNode(t *testing.T) {
	h := newMCPHost(t)
	h.say(t, `"id":5,"method":"subscriptions/listen","params":{"notifications":{"resourceSubscriptions":["test://a"]},"_meta":{%q:%q,`+
		`"io.modelcontextprotocol/clientInfo":{"name":"h","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}}`, mcpVersionKey, mcpRevision)
	if m := h.hear(t); m.Method != "notifications/subscriptions/acknowledged" {
		t.Fatalf("%+v", m)
	}
	h.hearsOf(t, "test://a")
	h.server.CloseClientConnections()
	if m := h.hear(t); m.ID != 5 || m.Error == nil {
		t.Errorf("%+v", m)
	}
}
