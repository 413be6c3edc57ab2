package mcpserver

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

// A message is judged as a call, and says whom it did not reach.
func TestSendMessage(t *testing.T) {
	f := newFleet(t)
	shown, off := devicetest.NewScript(), devicetest.NewScript()
	f.connect(t, lamp, shown)
	f.connect(t, robot, off).Session.Close(devices.CloseGone)
	f.name(t, lamp, "Hall", map[string]string{"room": "hall"})
	f.name(t, robot, "Robot", map[string]string{"room": "hall"})
	s := f.host(t, PathMCP, "2025-11-25", admin, nil)
	r := call(t, s, "send_message", map[string]any{"select": "room=hall", "text": "Lunch \"now\"", "title": "Canteen"})
	if !strings.Contains(textOf(r), `"shown_on":["`+string(lamp)+`"],"left_out":[{"device":"`+string(robot)+`","name":"Robot","reason":"offline"}]`) {
		t.Errorf("%s", textOf(r))
	}
	want := `{"type":"alert","status":"Canteen","message":"Lunch \"now\"","emotion":"neutral"}`
	devicetest.Eventually(t, "the device has the message", func() bool {
		return slices.ContainsFunc(shown.Messages(), func(m string) bool { return strings.Contains(m, strings.Trim(want, "{}")) })
	})
	if r := call(t, s, "send_message", map[string]any{"devices": []string{"Robot"}, "text": "x"}); !r.IsError || !strings.Contains(textOf(r), "device_offline") {
		t.Errorf("%s", textOf(r))
	}
	for _, bad := range []map[string]any{{"text": "x"}, {"text": "", "select": "room=hall"}, {"text": strings.Repeat("x", 501), "select": "room=hall"}, {"text": "x", "select": "room=hall", "later": "soon"}} {
		if r := call(t, s, "send_message", bad); !r.IsError {
			t.Errorf("%v: %s", bad, textOf(r))
		}
	}
	_, reader := f.key(t, "devices:read", "", time.Hour)
	// security: H31
	if r := call(t, f.host(t, PathMCP, "2025-11-25", reader, nil), "send_message", map[string]any{"devices": []string{string(lamp)}, "text": "x"}); !r.IsError || !strings.Contains(textOf(r), "forbidden") {
		t.Errorf("%s", textOf(r))
	}
}

// Where several devices fit and one is meant, the host shows the person a choice, and the choice lasts through a confirmation.
func TestChooseDevice(t *testing.T) {
	for _, era := range eras {
		f := newFleet(t)
		script := devicetest.NewScript()
		f.connect(t, lamp, script)
		f.connect(t, robot, devicetest.NewScript())
		f.name(t, lamp, "Hall lamp", nil)
		f.name(t, robot, "Hall lamp", nil)
		devicetest.SetPolicy(t, f.service, access.Policy{Rules: []access.Rule{{Name: "ask", Tools: []string{"self.audio_speaker.*"}, Action: access.Confirm}}})
		var asked []string
		choice := string(lamp)
		s := f.host(t, PathMCP, era, admin, &mcp.ClientOptions{ElicitationHandler: func(_ context.Context, r *mcp.ElicitRequest) (*mcp.ElicitResult, error) {
			asked = append(asked, r.Params.Message)
			if strings.HasPrefix(r.Params.Message, "Which") {
				if choice == "" {
					return &mcp.ElicitResult{Action: "decline"}, nil
				}
				return &mcp.ElicitResult{Action: "accept", Content: map[string]any{"device": choice}}, nil
			}
			return &mcp.ElicitResult{Action: "accept", Content: map[string]any{}}, nil
		}})
		args := map[string]any{"device": "hall lamp", "tool": "self.audio_speaker.set_volume", "arguments": map[string]any{"volume": 7}}
		if r := call(t, s, "call_device_tool", args); r.IsError || !strings.Contains(textOf(r), `"device":"`+string(lamp)+`"`) || len(asked) != 2 {
			t.Errorf("%s: %q: %s", era, asked, textOf(r))
		}
		choice = ""
		if r := call(t, s, "call_device_tool", args); !r.IsError || !strings.Contains(textOf(r), "nothing was called") {
			t.Errorf("%s: %s", era, textOf(r))
		}
		if r := call(t, f.host(t, PathMCP, era, admin, nil), "call_device_tool", args); !r.IsError || !strings.Contains(textOf(r), "ask which one is meant") {
			t.Errorf("%s: %s", era, textOf(r))
		}
		if n := len(script.Received()); n == 0 {
			t.Errorf("%s: the device was not called", era)
		}
	}
}

// Prompts complete names, labels and tools; and their texts have the facts.
func TestPromptsOfTasks(t *testing.T) {
	f := newFleet(t, func(o *Options) { o.Jobs = &fakeJobs{} })
	f.connect(t, lamp, speaker(`{}`))
	f.name(t, lamp, "Hall lamp", map[string]string{"room": "hall"})
	s := f.host(t, PathMCP, "2025-11-25", admin, nil)
	for _, c := range []struct{ name, value, want string }{
		{"device", "hal", "Hall lamp"}, {"select", "ro", "room=hall"}, {"select", "floor=2,ro", "floor=2,room=hall"}, {"tool", "volume", "self.audio_speaker.set_volume"}, {"other", "x", ""},
	} {
		r, err := s.Complete(t.Context(), &mcp.CompleteParams{Ref: &mcp.CompleteReference{Type: "ref/prompt", Name: "control_device"}, Argument: mcp.CompleteParamsArgument{Name: c.name, Value: c.value}})
		if err != nil || strings.Join(r.Completion.Values, " ") != c.want {
			t.Errorf("%s %q: %+v, %v", c.name, c.value, r, err)
		}
	}
	r, err := s.Complete(t.Context(), &mcp.CompleteParams{Ref: &mcp.CompleteReference{Type: "ref/prompt", Name: "explain_failed_call"},
		Argument: mcp.CompleteParamsArgument{Name: "tool", Value: "self."}, Context: &mcp.CompleteContext{Arguments: map[string]string{"device": "Hall lamp"}}})
	if err != nil || len(r.Completion.Values) != 2 {
		t.Errorf("%+v, %v", r, err)
	}
	for name, c := range map[string]struct {
		args  map[string]string
		facts []string
	}{
		"control_device": {map[string]string{"device": "hall lamp", "task": "louder volume"}, []string{"Hall lamp", "self.audio_speaker.set_volume"}},
		"control_group":  {map[string]string{"select": "room=hall", "task": "set volume"}, []string{"Hall lamp", "self.audio_speaker.set_volume"}},
		"report":         {nil, []string{`"offline"`, fakeJob, `"events"`}},
	} {
		p, err := s.GetPrompt(t.Context(), &mcp.GetPromptParams{Name: name, Arguments: c.args})
		if err != nil || len(p.Messages) != 2 {
			t.Errorf("%s: %+v, %v", name, p, err)
			continue
		}
		text := p.Messages[1].Content.(*mcp.EmbeddedResource).Resource.Text
		for _, fact := range c.facts {
			if !strings.Contains(text, fact) {
				t.Errorf("%s lacks %s: %s", name, fact, text)
			}
		}
	}
	if _, err := s.GetPrompt(t.Context(), &mcp.GetPromptParams{Name: "control_group", Arguments: map[string]string{"select": "room==", "task": "x"}}); err == nil {
		t.Error("a selection with a mistake is accepted")
	}
	if i := s.InitializeResult().ServerInfo; len(i.Icons) != 1 || !strings.HasPrefix(i.Icons[0].Source, "data:image/svg+xml") {
		t.Errorf("%+v", i)
	}
}
