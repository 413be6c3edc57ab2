package mcpserver

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"fleetd/internal/devicetest"
)

const statusTool = `{"name":"self.get_device_status","description":"State.","inputSchema":{"type":"object","properties":{}}}`

// speaker is a device that answers with its volume, unless it is called to set it.
func speaker(status string) *devicetest.Script {
	script := devicetest.NewScript()
	script.Tools = "[" + devicetest.Volume + "," + statusTool + "]"
	script.Call = func(tool string, _ json.RawMessage) string {
		if tool != "self.get_device_status" {
			return devicetest.True
		}
		text, err := json.Marshal(status)
		if err != nil {
			panic(err) // a string can be encoded
		}
		return `"result":{"content":[{"type":"text","text":` + string(text) + `}],"isError":false}`
	}
	return script
}

// A caller sees its own calls with the value before, as an answer to itself showed it; those of others need audit:read.
func TestHistory(t *testing.T) {
	f := newFleet(t)
	f.connect(t, lamp, speaker(`{"audio_speaker":{"volume":35},"headset":{"volume":9},"wifi_password":"x"}`))
	_, mine := f.key(t, "devices:read tools:call events:read", "", time.Hour)
	_, auditor := f.key(t, "devices:read tools:call events:read audit:read", "", time.Hour)
	_, elsewhere := f.key(t, "devices:read events:read audit:read", "room=lab", time.Hour)
	set := map[string]any{"device": string(lamp), "tool": "self.audio_speaker.set_volume", "arguments": map[string]any{"volume": 80}}
	calls := map[string]any{"type": "call", "device": string(lamp), "since": "1h"}
	s := f.host(t, PathMCP, "2025-11-25", mine, nil)
	other := f.host(t, PathMCP, "2025-11-25", auditor, nil)
	call(t, other, "get_device_status", map[string]any{"device": string(lamp)})
	call(t, s, "call_device_tool", set)
	// security: H30
	if text := textOf(call(t, s, "list_recent_events", calls)); !strings.Contains(text, `"arguments":{"volume":80}`) || strings.Contains(text, `"before"`) || strings.Contains(text, "get_device_status") {
		t.Errorf("a value that only another caller has seen, or a call of another: %s", text)
	}
	call(t, s, "get_device_status", map[string]any{"device": string(lamp)})
	call(t, s, "call_device_tool", set)
	text := textOf(call(t, s, "list_recent_events", calls))
	if !strings.Contains(text, `"before":{"volume":35},"before_age_seconds":0`) || strings.Count(text, `"tool":"self.audio_speaker.set_volume"`) != 2 {
		t.Errorf("%s", text)
	}
	call(t, s, "call_device_tool", set)
	if text := textOf(call(t, s, "list_recent_events", calls)); strings.Count(text, `"before":`) != 1 {
		t.Errorf("the value that a call has replaced is shown as the value before the next one: %s", text)
	}
	calls["everyone"] = true
	// security: H30
	if r := call(t, s, "list_recent_events", calls); !r.IsError || !strings.Contains(textOf(r), "audit:read") {
		t.Errorf("%s", textOf(r))
	}
	if text := textOf(call(t, other, "list_recent_events", calls)); strings.Count(text, `"by":"key of TestHistory"`) < 3 {
		t.Errorf("%s", text)
	}
	// security: H30
	if r := call(t, f.host(t, PathMCP, "2025-11-25", elsewhere, nil), "list_recent_events", map[string]any{"everyone": true}); r.IsError || strings.Contains(textOf(r), string(lamp)) {
		t.Errorf("%s", textOf(r))
	}
	calls["until"] = "30m"
	if text := textOf(call(t, other, "list_recent_events", calls)); text != `{"events":[]}` {
		t.Errorf("before half an hour ago: %s", text)
	}
	calls["until"] = "soon"
	if r := call(t, other, "list_recent_events", calls); !r.IsError || !strings.Contains(textOf(r), "until must be a time") {
		t.Errorf("%s", textOf(r))
	}
}

func TestBestValue(t *testing.T) {
	list := appendValues(nil, nil, []byte(`{"screen":{"brightness":10,"theme":"dark"},"lamp":{"brightness":70},"list":[1],"api_token":"x","deep":{"a":{"b":{"c":{"d":1}}}}}`), time.Now())
	if len(list) != 3 {
		t.Errorf("%+v", list)
	}
	for _, c := range []struct{ name, tool, want string }{
		{"brightness", "self.screen.set_brightness", "10"}, {"brightness", "self.lamp.set_brightness", "70"}, {"theme", "self.screen.set_theme", `"dark"`}, {"volume", "x", ""},
	} {
		got := ""
		if at := bestValue(list, c.name, c.tool); at >= 0 {
			got = string(list[at].value)
		}
		if got != c.want {
			t.Errorf("%s of %s: %s", c.name, c.tool, got)
		}
	}
}
