package mcpserver

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

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
