package mcpserver

import (
	"net/http"
	"strings"
	"testing"

	"fleetd/internal/connlimit"
	"fleetd/internal/devicetest"
)

// A key over its rate searches no more and sends no large bodies; its calls of devices go on.
func TestWorkOfOneKey(t *testing.T) {
	work := connlimit.NewWork()
	f := newFleet(t, func(o *Options) { o.Work = work })
	f.connect(t, lamp, devicetest.NewScript())
	const meta = `"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"x","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}`
	call := func(tool, arguments string) answer {
		return f.send(t, http.MethodPost, PathMCP, admin, `{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"`+tool+`","arguments":`+arguments+`,`+meta+`}}`,
			"Mcp-Protocol-Version", "2026-07-28", "Mcp-Method", "tools/call", "Mcp-Name", tool)
	}
	const refused = "too many requests of one caller"
	if a := call("find_devices", `{}`); a.status != http.StatusOK || strings.Contains(a.body, refused) {
		t.Fatalf("%d %s", a.status, a.body)
	}
	const era = "2025-03-26"
	session := f.send(t, http.MethodPost, PathMCP, admin, strings.Replace(hello, "2025-06-18", era, 1)).header.Get("Mcp-Session-Id")
	batch := func() answer {
		const message = `{"jsonrpc":"2.0","method":"notifications/initialized"}`
		return f.send(t, http.MethodPost, PathMCP, admin, "["+message+","+message+"]", "Mcp-Session-Id", session, "Mcp-Protocol-Version", era)
	}
	if a := batch(); a.status != http.StatusAccepted {
		t.Fatalf("a batch: %d %s", a.status, a.body)
	}
	for range 20 {
		work.Charge("admin", 1<<40)
	}
	// security: H14 N43
	if a := batch(); a.status != http.StatusTooManyRequests {
		t.Errorf("a batch: %d %s", a.status, a.body)
	}
	for _, tool := range []string{"find_devices", "search_device_tools", "describe_device"} {
		// security: N43
		if a := call(tool, `{"query":"x"}`); !strings.Contains(a.body, refused) {
			t.Errorf("%s: %d %s", tool, a.status, a.body)
		}
	}
	for _, method := range []string{"resources/list", "tools/list"} {
		// security: N43
		if a := f.send(t, http.MethodPost, PathMCP, admin, `{"jsonrpc":"2.0","id":4,"method":"`+method+`"}`, "Mcp-Session-Id", session, "Mcp-Protocol-Version", era); !strings.Contains(a.body, refused) {
			t.Errorf("%s: %d %s", method, a.status, a.body)
		}
	}
	// security: N43
	if a := call("call_device_tool", `{"a":"`+strings.Repeat("x", connlimit.BodyWork)+`"}`); a.status != http.StatusTooManyRequests {
		t.Errorf("a large body: %d %s", a.status, a.body)
	}
	if a := call("call_device_tool", `{"device":"`+string(lamp)+`","tool":"self.none"}`); strings.Contains(a.body, refused) || a.status == http.StatusTooManyRequests {
		t.Errorf("a call of a device: %d %s", a.status, a.body)
	}
}
