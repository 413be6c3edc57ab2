package mcpserver

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

// BenchmarkCall is a call of a device's tool without sockets.
func BenchmarkCall(b *testing.B) {
	f := newFleet(b)
	f.connect(b, lamp, devicetest.NewScript())
	const body = `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"call_device_tool","arguments":{"device":"` + string(lamp) + `","tool":"self.audio_speaker.set_volume","arguments":{"volume":5}},` +
		`"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"bench","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}}}`
	b.ReportAllocs()
	for b.Loop() {
		r := httptest.NewRequest(http.MethodPost, PathMCP, strings.NewReader(body))
		r.Host = "127.0.0.1"
		for name, value := range map[string]string{"Authorization": "Bearer " + admin, "Accept": "application/json, text/event-stream", "Content-Type": "application/json",
			"Mcp-Protocol-Version": revisionModern, "Mcp-Method": "tools/call", "Mcp-Name": "call_device_tool"} {
			r.Header.Set(name, value)
		}
		w := httptest.NewRecorder()
		f.mcp.ServeHTTP(w, r)
		if text, err := io.ReadAll(w.Body); err != nil || !strings.Contains(string(text), `"is_error":false`) {
			b.Fatalf("%d %s", w.Code, text)
		}
	}
}

// benchSessions is how many hosts call at once, each in a session of its own.
const benchSessions = 32

// BenchmarkSessions is calls in 32 sessions at once, here and at a bare server of the SDK with the
// same tools, whose tool answers at once.
func BenchmarkSessions(b *testing.B) {
	const call = `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"call_device_tool","arguments":{"device":"%s","tool":"self.audio_speaker.set_volume","arguments":{"volume":5}}}}`
	b.Run("fleetd", func(b *testing.B) {
		f := newFleet(b)
		for i := range benchSessions {
			f.connect(b, benchDevice(i), devicetest.NewScript())
		}
		benchCalls(b, f.url, call)
	})
	b.Run("bare", func(b *testing.B) {
		server := mcp.NewServer(&mcp.Implementation{Name: "bare", Version: "1"}, nil)
		for _, tool := range fleetTools {
			server.AddTool(&tool, func(context.Context, *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
				text := `{"device":"aa:bb:cc:dd:ee:01","tool":"self.audio_speaker.set_volume","text":["true"],"is_error":false,"duration_ms":0.123,"node":"n-test","call":"rl6ppvb52p2u53ou"}`
				return &mcp.CallToolResult{StructuredContent: json.RawMessage(text), Content: []mcp.Content{&mcp.TextContent{Text: text}}}, nil
			})
		}
		bare := httptest.NewServer(mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return server }, nil))
		b.Cleanup(bare.Close)
		benchCalls(b, bare.URL, call)
	})
}

func benchDevice(i int) devices.ID { return devices.ID(fmt.Sprintf("02:00:00:00:00:%02x", i)) }

func benchCalls(b *testing.B, url, call string) {
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: benchSessions}}
	b.Cleanup(client.CloseIdleConnections)
	post := func(body, session string) (string, string) {
		r, err := http.NewRequestWithContext(b.Context(), http.MethodPost, url+PathMCP, strings.NewReader(body))
		if err != nil {
			b.Error(err)
			return "", ""
		}
		for name, value := range map[string]string{"Authorization": "Bearer " + admin, "Accept": "application/json, text/event-stream", "Content-Type": "application/json", "Mcp-Session-Id": session} {
			if value != "" {
				r.Header.Set(name, value)
			}
		}
		response, err := client.Do(r)
		if err != nil {
			b.Error(err)
			return "", ""
		}
		defer func() { _ = response.Body.Close() }()
		text, err := io.ReadAll(response.Body)
		if err != nil {
			b.Error(err)
		}
		return string(text), response.Header.Get("Mcp-Session-Id")
	}
	var next atomic.Int64
	var hosts sync.WaitGroup
	b.ReportAllocs()
	sessions := make([]string, benchSessions)
	for i := range sessions {
		_, sessions[i] = post(hello, "")
		post(`{"jsonrpc":"2.0","method":"notifications/initialized"}`, sessions[i])
	}
	b.ResetTimer()
	for i, session := range sessions {
		hosts.Go(func() {
			body := fmt.Sprintf(call, benchDevice(i))
			for next.Add(1) <= int64(b.N) {
				if text, _ := post(body, session); !strings.Contains(text, `"is_error":false`) {
					b.Errorf("%.300s", text)
					return
				}
			}
		})
	}
	hosts.Wait()
	b.StopTimer()
	for _, session := range sessions {
		r, err := http.NewRequestWithContext(b.Context(), http.MethodDelete, url+PathMCP, nil)
		if err != nil {
			b.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer "+admin)
		r.Header.Set("Mcp-Session-Id", session)
		if response, err := client.Do(r); err == nil {
			_ = response.Body.Close()
		}
	}
}
