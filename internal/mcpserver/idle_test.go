//go:build !race

package mcpserver

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// Memory limits of an idle session with a stream.
const (
	idleSessions = 300
	idleShare    = 1.5 // relative to a bare server of the SDK
)

// An idle session with a stream takes at most 1.5 times the memory of one on a bare
// server of the SDK: heap and stacks, including the connection.
func TestIdleSessions(t *testing.T) {
	server := mcp.NewServer(&mcp.Implementation{Name: "bare", Version: "1"}, nil)
	bare := httptest.NewServer(mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return server }, nil))
	defer bare.Close()
	defer func() {
		for session := range server.Sessions() {
			_ = session.Close() // no request is in progress
		}
	}()
	f := newFleet(t)
	var keys []string
	for range idleSessions/MaxKeySessions + 1 {
		_, token := f.key(t, "devices:read", "", time.Hour)
		keys = append(keys, token)
	}
	of := idleBytes(t, bare.URL, []string{"none"})
	own := idleBytes(t, f.url, keys)
	if t.Logf("%.1f KB, bare %.1f KB", own/1024, of/1024); own > idleShare*of {
		t.Errorf("an idle session takes %.0f bytes, %.2f of a bare one's %.0f; at most %.1f", own, own/of, of, idleShare)
	}
}

// idleBytes returns the memory per session with an open stream.
func idleBytes(t *testing.T, url string, tokens []string) float64 {
	t.Helper()
	open := func(i int) net.Conn {
		c, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		head := "Host: 127.0.0.1\r\nAuthorization: Bearer " + tokens[i/(MaxKeySessions-10)%len(tokens)] + "\r\nAccept: application/json, text/event-stream\r\nContent-Type: application/json\r\n"
		answers := bufio.NewReaderSize(c, 512)
		session := ""
		for _, body := range []string{hello, `{"jsonrpc":"2.0","method":"notifications/initialized"}`} {
			fmt.Fprintf(c, "POST /mcp HTTP/1.1\r\n%s%sContent-Length: %d\r\n\r\n%s", head, session, len(body), body)
			response, err := http.ReadResponse(answers, nil)
			if err != nil {
				t.Fatal(err)
			}
			for b := make([]byte, 256); err == nil; {
				_, err = response.Body.Read(b)
			}
			if session == "" {
				session = "Mcp-Session-Id: " + response.Header.Get("Mcp-Session-Id") + "\r\nMcp-Protocol-Version: 2025-06-18\r\n"
			}
		}
		fmt.Fprintf(c, "GET /mcp HTTP/1.1\r\n%s%s\r\n", head, session)
		if line, err := answers.ReadString('\n'); err != nil || !strings.Contains(line, "200") {
			t.Fatalf("%q, %v", line, err)
		}
		return c
	}
	first := open(0) // allocates what is shared
	defer func() { _ = first.Close() }()
	memory := func() float64 {
		var m runtime.MemStats
		for range 3 {
			runtime.GC()
		}
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc + m.StackInuse)
	}
	before := memory()
	for i := range idleSessions {
		c := open(i)
		defer func() { _ = c.Close() }()
	}
	return (memory() - before) / idleSessions
}
