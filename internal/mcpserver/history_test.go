package mcpserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"fleetd/internal/audit"
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

func TestValueOf(t *testing.T) {
	now := time.Now()
	list := appendValues(nil, "self.get_device_status", nil, []byte(`{"screen":{"brightness":10,"theme":"dark"},"lamp":{"brightness":70},"list":[1],"state":"ok","api_token":"x","deep":{"a":{"b":{"c":{"d":1}}}}}`), now)
	list = appendValues(list, "self.fan.get_state", nil, []byte(`{"speed":3}`), now)
	if len(list) != 5 {
		t.Errorf("%+v", list)
	}
	for _, c := range []struct{ name, tool, want string }{
		{"brightness", "self.screen.set_brightness", "10"}, {"brightness", "self.lamp.set_brightness", "70"}, {"theme", "self.screen.set_theme", `"dark"`}, {"volume", "x", ""},
		{"brightness", "self.led.set_brightness", ""}, // of another thing
		{"speed", "self.fan.set_speed", "3"}, {"speed", "self.car.set_speed", ""}, {"state", "self.door.set_state", ""},
	} {
		got := ""
		if at := valueOf(list, c.name, c.tool); at >= 0 {
			got = string(list[at].value)
		}
		if got != c.want {
			t.Errorf("%s of %s: %s", c.name, c.tool, got)
		}
	}
}

// An application sees its own calls, not those of the key that allowed it.
func TestHistoryOfAGrant(t *testing.T) {
	f := newGrantedFleet(t)
	f.connect(t, lamp, speaker(`{"audio_speaker":{"volume":35}}`))
	_, mine := f.key(t, "devices:read tools:call events:read", "", time.Hour)
	granted := f.allow(t, mine, "devices:read events:read tools:call", PathMCP)
	set := map[string]any{"device": string(lamp), "tool": "self.audio_speaker.set_volume", "arguments": map[string]any{"volume": 80}}
	s, app := f.host(t, PathMCP, "2025-11-25", mine, nil), f.host(t, PathMCP, "2025-11-25", granted, nil)
	call(t, s, "get_device_status", map[string]any{"device": string(lamp)})
	call(t, s, "call_device_tool", set)
	// security: H30
	if text := textOf(call(t, app, "list_recent_events", map[string]any{"type": "call"})); text != `{"events":[]}` {
		t.Errorf("%s", text)
	}
	call(t, app, "call_device_tool", set)
	// security: H30
	if text := textOf(call(t, app, "list_recent_events", map[string]any{"type": "call"})); strings.Count(text, `"type":"call"`) != 1 || strings.Contains(text, `"before"`) {
		t.Errorf("%s", text)
	}
	if text := textOf(call(t, s, "list_recent_events", map[string]any{"type": "call"})); strings.Count(text, `"type":"call"`) != 2 {
		t.Errorf("%s", text)
	}
}

// oldAudit has a call of the administrator, and many blocks of others after it.
type oldAudit struct{ blocks int64 }

func (a oldAudit) AuditBlocks(_ context.Context, q audit.Query) (blocks []audit.Block, err error) {
	if a.blocks == 0 {
		return nil, errors.New("the database is away")
	}
	for n := a.blocks; n > 0 && len(blocks) < q.Limit; n-- {
		key := "other"
		if n == 1 {
			key = "admin"
		}
		if q.Before.Run == "" || n <= q.Before.FirstSeq {
			blocks = append(blocks, audit.Block{Run: "r", FirstSeq: n, LastAt: time.Unix(n, 0), Entries: fmt.Appendf(nil, `{"seq":%d,"at":"2026-03-01T00:00:00Z","kind":"call","action":"t","key":"%s","outcome":"ok"}`+"\n", n, key)})
		}
	}
	return blocks, nil
}

// A call is found behind many of others; where the audit is too long, the answer says how far it was read, and where it cannot be read,
// the events are there all the same.
func TestHistoryIsLong(t *testing.T) {
	for _, c := range []struct {
		blocks     int64
		kind, want string
	}{{400, "call", `"tool":"t"`}, {5000, "call", `"calls_looked_back_to":"1970`}, {0, "call", `"code":`}, {0, "", `"hint":"calls are left out`}} {
		f := newFleet(t, func(o *Options) { o.Audit = oldAudit{c.blocks} })
		args := map[string]any{}
		if c.kind != "" {
			args["type"] = c.kind
		}
		if text := textOf(call(t, f.host(t, PathMCP, "2025-11-25", admin, nil), "list_recent_events", args)); !strings.Contains(text, c.want) {
			t.Errorf("%d blocks, %q: %s", c.blocks, c.kind, text)
		}
	}
}
