package load

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gorilla/websocket"
)

// Both sides of the lists have the same shape as the firmware's pages.
func TestToolPages(t *testing.T) {
	for _, callable := range []bool{false, true} {
		pages, err := ToolPages(7, callable)
		if err != nil || len(pages) != 3 {
			t.Fatalf("%d pages, %v", len(pages), err)
		}
		var names []string
		cursor := ""
		for i, text := range pages {
			var page struct {
				Tools      []tool
				NextCursor string
			}
			if err := json.Unmarshal([]byte(text), &page); err != nil || len(text) > 8000 {
				t.Fatalf("page %d of %d bytes: %v", i, len(text), err)
			}
			if cursor != "" && page.Tools[0].Name != cursor {
				t.Errorf("page %d begins with %s, not %s", i, page.Tools[0].Name, cursor)
			}
			for _, tool := range page.Tools {
				names = append(names, tool.Name)
			}
			cursor = page.NextCursor
		}
		if len(names) != listLength || cursor != "" || slices.Contains(names, ToolSetVolume) != callable {
			t.Errorf("callable %v: %d tools, last cursor %q, %q", callable, len(names), cursor, names[:2])
		}
	}
}

func TestReadResponse(t *testing.T) {
	good := bufio.NewReader(strings.NewReader("HTTP/1.1 429 Too Many Requests\r\nContent-Length: 5\r\nX: y\r\n\r\nhelloHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"))
	for _, want := range []struct {
		status int
		body   string
	}{{429, "hello"}, {200, "hi"}} {
		if status, body, err := ReadResponse(good); err != nil || status != want.status || string(body) != want.body {
			t.Errorf("%d %q, %v, want %+v", status, body, err, want)
		}
	}
	for _, bad := range []string{"", "HTTP/1.1 abc\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", "HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"} {
		if _, _, err := ReadResponse(bufio.NewReader(strings.NewReader(bad))); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

// A device answers calls and pings on a real connection.
func TestAnswerCalls(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	conns := make(chan *websocket.Conn, 1)
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if host, _, _ := net.SplitHostPort(r.RemoteAddr); host != "127.0.0.4" {
			t.Errorf("device 3001 dials from %s", host)
		}
		c, err := new(websocket.Upgrader).Upgrade(w, r, nil)
		if err != nil {
			t.Error(err)
		}
		conns <- c
	})}
	go func() { _ = server.Serve(listener) }()
	defer func() { _ = server.Close() }()
	_, line, err := Attach(t.Context(), listener.Addr().String(), 3001, nil)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		AnswerCalls(line)
	}()
	const request = `{"session_id":"abc","type":"mcp","payload":{"jsonrpc":"2.0","method":"tools/call","params":{"name":"x","arguments":{"id":9}},"id":41}}`
	c := <-conns
	pong := ""
	c.SetPongHandler(func(text string) error { pong = text; return nil })
	if err := errors.Join(c.WriteMessage(websocket.PingMessage, []byte("hi")), c.WriteMessage(websocket.TextMessage, []byte(`{"type":"noop"}`)), c.WriteMessage(websocket.TextMessage, []byte(request))); err != nil {
		t.Fatal(err)
	}
	want := `{"session_id":"abc","type":"mcp","payload":{"jsonrpc":"2.0","id":41,"result":{"content":[{"type":"text","text":"true"}],"isError":false}}}`
	if _, text, err := c.ReadMessage(); err != nil || string(text) != want || pong != "hi" {
		t.Errorf("%s, %v, pong %q", text, err, pong)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	<-ended
}

func TestInParallel(t *testing.T) {
	done := make([]bool, 100)
	err := InParallel(7, len(done), func() (func(int) error, func(), error) {
		return func(i int) error { done[i] = true; return nil }, func() {}, nil
	})
	if err != nil || slices.Contains(done, false) {
		t.Errorf("%v, %v", done, err)
	}
	broken := errors.New("broken")
	err = InParallel(7, 100, func() (func(int) error, func(), error) {
		return func(int) error { return broken }, func() {}, nil
	})
	if !errors.Is(err, broken) {
		t.Errorf("error %v", err)
	}
}

// The run's end reaches callers that have nobody to call.
func TestCallLoadEnds(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := CallLoad(ctx, Target{Address: listener.Addr().String()}, 2, 2, time.Minute); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}
