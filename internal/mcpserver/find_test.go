package mcpserver

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

// name sets the name and labels of a device.
func (f *testFleet) name(t testing.TB, id devices.ID, name string, labels map[string]string) {
	t.Helper()
	f.ports.Put(devices.Member{ID: id, Name: name, Labels: labels})
}

// finds calls find_devices.
func finds(t testing.TB, s *mcp.ClientSession, args map[string]any) (a findResult) {
	t.Helper()
	r := call(t, s, "find_devices", args)
	if err := json.Unmarshal([]byte(textOf(r)), &a); err != nil || r.IsError {
		t.Errorf("%v: %s", args, textOf(r))
	}
	return a
}

func idsIn(a findResult) (ids []string) {
	for _, d := range a.Devices {
		ids = append(ids, d.ID)
	}
	slices.Sort(ids)
	return ids
}

// A selection that models write is read as it is meant, or refused.
func TestSelectorOf(t *testing.T) {
	for text, want := range map[string]string{
		"room=lab":                             "room=lab",
		"id=aa:bb:cc:dd:ee:01":                 "device=aa:bb:cc:dd:ee:01",
		"id in (a, b), state=online":           "device in (a,b),state=online",
		`name="a, id=5"`:                       `name="a, id=5"`,
		"room=living room, floor in (1,2)":     `floor in (1,2),room="living room"`,
		`room=living room, name="x, y"`:        `room="living room",name="x, y"`,
		"name in (Hall lamp, Kitchen lamp, x)": `name in ("Hall lamp","Kitchen lamp",x)`,
		"room!=lab or hall":                    "",
		"room!=lab !retired":                   "",
		"room not in (lab hall)":               "",
		"room=lab and floor=2":                 "",
		"room=lab or hall":                     "",
		"room=lab !retired":                    "",
		`name="open`:                           "",
		"name in (Hall lamp":                   "",
	} {
		sel, err := selectorOf(text)
		if got := sel.String(); (err != nil) != (want == "") || err == nil && got != want {
			t.Errorf("%s: %s, %v", text, got, err)
		}
	}
}

// Questions without a word that says anything list all devices, page by page; a word that could be an id is looked up like others.
func TestFindWithoutWords(t *testing.T) {
	f := newFleet(t)
	for i := range 3 {
		f.name(t, devices.ID(fmt.Sprintf("02:00:00:00:00:%02x", i)), fmt.Sprintf("Lamp %d", i), nil)
	}
	s := f.host(t, PathMCP, "2025-11-25", admin, nil)
	seen := map[string]bool{}
	for args := (map[string]any{"query": "all devices", "limit": 1}); ; {
		a := finds(t, s, args)
		for _, id := range idsIn(a) {
			seen[id] = true
		}
		if args["cursor"] = a.Next; a.Next == "" || len(seen) > 3 {
			break
		}
	}
	if len(seen) != 3 {
		t.Errorf("%v", seen)
	}
	if r := call(t, s, "describe_device", map[string]any{"device": "lamp"}); !r.IsError || !strings.Contains(textOf(r), "but these fit: Lamp 0 (") {
		t.Errorf("%s", textOf(r))
	}
	if a := finds(t, s, map[string]any{"query": "offline lamps", "limit": 2}); len(a.Devices) != 2 || a.ReadAs["offline"] != "state=offline" || a.Next == "" {
		t.Errorf("%+v", a)
	}
}

// The next search reflects changes by operators and by devices.
func TestFindAfterChanges(t *testing.T) {
	f := newFleet(t)
	s := f.host(t, PathMCP, "2025-11-25", admin, nil)
	f.name(t, lamp, "Kitchen lamp", nil)
	f.name(t, robot, "Robot", map[string]string{"room": "kitchen"})
	if ids := idsIn(finds(t, s, map[string]any{"query": "kitchen"})); !slices.Equal(ids, []string{string(lamp), string(robot)}) {
		t.Errorf("%q", ids)
	}
	f.name(t, lamp, "Hall lamp", map[string]string{"floor": "2"})
	if ids := idsIn(finds(t, s, map[string]any{"query": "kitchen"})); !slices.Equal(ids, []string{string(robot)}) {
		t.Errorf("after the renaming: %q", ids)
	}
	if ids := idsIn(finds(t, s, map[string]any{"query": "2nd floor"})); !slices.Equal(ids, []string{string(lamp)}) {
		t.Errorf("after the label: %q", ids)
	}
	if err := f.service.Forget(t.Context(), devicetest.Admin, lamp); err != nil {
		t.Fatal(err)
	}
	a := finds(t, s, map[string]any{"query": "hall"})
	if len(a.Devices) > 0 || a.Total != 1 || !slices.Equal(a.Labels["room"], []string{"kitchen"}) || !slices.Equal(a.Unknown, []string{"hall"}) {
		t.Errorf("after the removal: %+v", a)
	}
	f.connect(t, "aa:bb:cc:dd:ee:03", devicetest.NewScript())
	f.events.happen(t, devices.StreamEvent{Kind: devices.EventOnline, Device: "aa:bb:cc:dd:ee:03"})
	devicetest.Eventually(t, "its tools are searched", func() bool {
		return slices.Equal(idsIn(finds(t, s, map[string]any{"query": "volume"})), []string{"aa:bb:cc:dd:ee:03"})
	})
}

// A search can be combined with a selector, and its pages contain every device once.
func TestFindWithSelector(t *testing.T) {
	f := newFleet(t)
	for i := range 30 {
		f.name(t, devices.ID(fmt.Sprintf("02:00:00:00:00:%02x", i)), "Lamp", map[string]string{"room": []string{"lab", "hall"}[i%2], "floor": fmt.Sprint(i % 3)})
	}
	f.connect(t, "02:00:00:00:00:00", devicetest.NewScript())
	s := f.host(t, PathMCP, "2025-11-25", admin, nil)
	for name, c := range map[string]struct {
		args map[string]any
		want int
	}{
		"words":          {map[string]any{"query": "lamp", "limit": 100}, 30},
		"two labels":     {map[string]any{"select": "room=lab,floor=0", "limit": 100}, 5},
		"words and both": {map[string]any{"query": "lamp", "select": "room=lab,floor=0", "limit": 100}, 5},
		"words, state":   {map[string]any{"query": "lamp", "state": "online"}, 1},
		"state":          {map[string]any{"state": "online", "select": "room=lab"}, 1},
	} {
		if a := finds(t, s, c.args); len(a.Devices) != c.want {
			t.Errorf("%s: %d, want %d", name, len(a.Devices), c.want)
		}
	}
	var ids []string
	a := finds(t, s, map[string]any{"query": "lamp", "limit": 7})
	for ids = idsIn(a); a.Next != ""; ids = append(ids, idsIn(a)...) {
		if a.Matched != 30 {
			t.Errorf("%+v", a)
		}
		if a = finds(t, s, map[string]any{"query": "lamp", "limit": 7, "cursor": a.Next}); len(a.Devices) == 0 {
			t.Fatal("an empty page")
		}
	}
	if slices.Sort(ids); len(slices.Compact(ids)) != 30 {
		t.Errorf("%d devices in pages", len(ids))
	}
	for _, args := range []map[string]any{{"select": "room=="}, {"query": "lamp", "cursor": "x"}, {"cursor": "5"}, {"select": "nothing<3"}} {
		if r := call(t, s, "find_devices", args); !r.IsError || !strings.Contains(textOf(r), "invalid_arguments") {
			t.Errorf("%v: %s", args, textOf(r))
		}
	}
	many := call(t, s, "call_many", map[string]any{"select": "room=lab,floor=0", "tool": "self.audio_speaker.set_volume", "arguments": map[string]any{"volume": 3}})
	if !strings.Contains(textOf(many), `"ok":1`) {
		t.Errorf("%s", textOf(many))
	}
}

// Every tool accepts the name of a device if it is unique. The error for an ambiguous
// name lists the devices, and no key learns of devices that it may not see.
func TestDevicesByName(t *testing.T) {
	f := newFleet(t)
	f.connect(t, lamp, devicetest.NewScript())
	f.connect(t, robot, devicetest.NewScript())
	f.name(t, lamp, "Küchenlampe", map[string]string{"room": "kitchen"})
	f.name(t, robot, "Twin", nil)
	f.name(t, "aa:bb:cc:dd:ee:03", "Twin", map[string]string{"room": "lab"})
	f.name(t, "twin", "Something else", nil)
	_, caller := f.key(t, "tools:call", "", time.Hour)
	_, limited := f.key(t, "devices:read tools:call events:read", "room=lab", time.Hour)
	for _, era := range eras {
		s := f.host(t, PathMCP, era, admin, nil)
		volume := map[string]any{"volume": 3}
		for tool, args := range map[string]map[string]any{
			"describe_device": {}, "get_device_status": {}, "list_recent_events": {}, "wait_for_device": {"until": "online"},
			"call_device_tool": {"tool": "self.audio_speaker.set_volume", "arguments": volume},
		} {
			args["device"] = "küchenlampe"
			// The device of this test has no status tool; that is an error of its own.
			if text := textOf(call(t, s, tool, args)); strings.Contains(text, "invalid_arguments") || strings.Contains(text, "device_unknown") {
				t.Errorf("%s, %s: %s", era, tool, text)
			}
		}
		r := call(t, s, "call_many", map[string]any{"devices": []string{"KUCHENLAMPE", string(lamp)}, "tool": "audio_speaker_set_volume", "arguments": volume})
		if !strings.Contains(textOf(r), `"ok":1`) {
			t.Errorf("%s: %s", era, textOf(r))
		}
		if r = call(t, s, "describe_device", map[string]any{"device": "Twin"}); r.IsError || !strings.Contains(textOf(r), "Something else") { // an id takes precedence
			t.Errorf("%s: %s", era, textOf(r))
		}
		if r = call(t, s, "describe_device", map[string]any{"device": " Twin"}); !r.IsError || !strings.Contains(textOf(r), string(robot)+"), Twin (aa:bb:cc:dd:ee:03)") {
			t.Errorf("%s: %s", era, textOf(r))
		}
		if r = call(t, s, "describe_device", map[string]any{"device": "unknown lamp"}); !r.IsError || !strings.Contains(textOf(r), "find_devices") {
			t.Errorf("%s: %s", era, textOf(r))
		}
		s = f.host(t, PathMCP, era, caller, nil) // a key without devices:read can address devices by id
		// security: H11
		if r = call(t, s, "call_device_tool", map[string]any{"device": " Twin", "tool": "self.audio_speaker.set_volume", "arguments": volume}); !r.IsError || strings.Contains(textOf(r), string(robot)) {
			t.Errorf("%s: %s", era, textOf(r))
		}
		s = f.host(t, PathMCP, era, limited, nil)
		// security: H11
		if r = call(t, s, "describe_device", map[string]any{"device": " Twin"}); r.IsError || !strings.Contains(textOf(r), "aa:bb:cc:dd:ee:03") {
			t.Errorf("%s: %s", era, textOf(r))
		}
		// security: H11
		if r = call(t, s, "describe_device", map[string]any{"device": "Küchenlampe"}); !r.IsError || strings.Contains(textOf(r), string(lamp)) {
			t.Errorf("%s: %s", era, textOf(r))
		}
		// security: H11
		if a := finds(t, s, map[string]any{"query": "kitchen"}); len(a.Devices) > 0 || a.Total != 1 || !slices.Equal(a.Unknown, []string{"kitchen"}) || a.Labels["room"][0] != "lab" {
			t.Errorf("%s: %+v", era, a)
		}
	}
}

// The error for an unknown tool names similar tools.
func TestSimilarToolsAreSuggested(t *testing.T) {
	f := newFleet(t)
	f.connect(t, lamp, devicetest.NewScript())
	for _, era := range eras {
		s := f.host(t, PathMCP, era, admin, nil)
		if r := call(t, s, "call_device_tool", map[string]any{"device": string(lamp), "tool": "self.speaker.volume"}); !r.IsError || !strings.Contains(textOf(r), "similar names: self.audio_speaker.set_volume") {
			t.Errorf("%s: %s", era, textOf(r))
		}
		if _, err := s.CallTool(t.Context(), &mcp.CallToolParams{Name: "find_device"}); err == nil || !strings.Contains(err.Error(), "similar names: find_devices") {
			t.Errorf("%s: %v", era, err)
		}
		s = f.host(t, PathDevices+string(lamp), era, admin, nil)
		if _, err := s.CallTool(t.Context(), &mcp.CallToolParams{Name: "set_volume"}); err == nil || !strings.Contains(err.Error(), "similar names: audio_speaker_set_volume") {
			t.Errorf("%s: %v", era, err)
		}
	}
}

// Size limits of what a model reads.
const (
	maxListBytes   = 10_400 // bytes of tools/list: 2,600 tokens (o200k)
	maxToolBytes   = 1300   // bytes of one tool in it
	maxDeviceBytes = 200    // bytes of a device in a list: 50 tokens
	maxEventBytes  = 240    // bytes of an event: 60 tokens
)

// The descriptions of tools are short, with an example that matches the schema of the tool.
func TestToolsAreShort(t *testing.T) {
	f := newFleet(t)
	s := f.host(t, PathMCP, "2025-11-25", admin, nil)
	list, err := s.ListTools(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	sum := 0
	for _, tool := range list.Tools {
		text, err := json.Marshal(tool)
		if err != nil {
			t.Fatal(err)
		}
		if sum += len(text); len(text) > maxToolBytes {
			t.Errorf("%s has %d bytes; the maximum is %d", tool.Name, len(text), maxToolBytes)
		}
		_, example, ok := strings.Cut(tool.Description, "Example: ")
		var args map[string]any
		if err := json.Unmarshal([]byte(strings.TrimSuffix(example, ".")), &args); !ok || err != nil {
			t.Errorf("%s has no example: %v", tool.Name, err)
		}
		input, err := json.Marshal(tool.InputSchema)
		if err != nil {
			t.Fatal(err)
		}
		for name := range args {
			if !strings.Contains(string(input), `"`+name+`":`) {
				t.Errorf("the example of %s contains %s, which its schema does not", tool.Name, name)
			}
		}
	}
	if t.Logf("tools/list: %d bytes", sum); sum > maxListBytes {
		t.Errorf("tools/list has %d bytes; the maximum is %d", sum, maxListBytes)
	}
}

// Lists contain only what distinguishes a device or an event from others.
func TestAnswersAreShort(t *testing.T) {
	f := newFleet(t)
	f.connect(t, lamp, devicetest.NewScript())
	f.name(t, lamp, "Kitchen lamp", map[string]string{"room": "kitchen", "floor": "2"})
	f.events.happen(t, devices.StreamEvent{Kind: devices.EventOnline, Device: lamp, Data: []byte(`{"device":"aa:bb:cc:dd:ee:01","node":"n-abcdef","session":"hfjcp3of2bu63ryj","epoch":1795420661826708,"seq":1,"time":"2026-11-23T07:57:41.826Z","transport":"mqtt","client":"36c983633656"}`)})
	s := f.host(t, PathMCP, "2025-11-25", admin, nil)
	one := textOf(call(t, s, "find_devices", map[string]any{"query": "kitchen lamp"}))
	if t.Logf("%d bytes: %s", len(one), one); len(one)-len(`{"devices":[]}`) > maxDeviceBytes {
		t.Errorf("a device has %d bytes; the maximum is %d: %s", len(one), maxDeviceBytes, one)
	}
	event := textOf(call(t, s, "list_recent_events", map[string]any{}))
	if t.Logf("%d bytes: %s", len(event), event); len(event)-len(`{"events":[]}`) > maxEventBytes || !strings.Contains(event, `"time":"2026-11-23T07:57:41.826Z","data":{"transport":"mqtt"}`) {
		t.Errorf("an event has %d bytes; the maximum is %d: %s", len(event), maxEventBytes, event)
	}
}
