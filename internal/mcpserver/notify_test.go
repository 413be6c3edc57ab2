package mcpserver

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devicetest"
	"fleetd/internal/selector"
)

// quietTime is how long a test in fake time waits for something that must not happen.
const quietTime = 10 * time.Second

// Only sessions whose list of tools has changed are notified.
func TestListChanged(t *testing.T) {
	t.Parallel()
	for _, era := range []string{"2025-06-18", "2025-11-25", "2026-07-28"} {
		t.Run(era, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFleetInMemory(t)
				script := devicetest.NewScript()
				f.connect(t, lamp, script)
				f.connect(t, robot, devicetest.NewScript())
				_, getters := f.key(t, "devices:read tools:call", "", time.Hour, "*get_*")
				notified := map[string]*atomic.Int64{}
				for name, c := range map[string]struct{ path, token string }{"device": {PathDevices + string(lamp), admin}, "again": {PathDevices + string(lamp), admin},
					"other device": {PathDevices + string(robot), admin}, "sees no change": {PathDevices + string(lamp), getters}, "fleet": {PathMCP, admin}} {
					n := &atomic.Int64{}
					notified[name] = n
					s := f.host(t, c.path, era, c.token, &mcp.ClientOptions{ToolListChangedHandler: func(context.Context, *mcp.ToolListChangedRequest) { n.Add(1) }})
					namesOf(t, s)
				}
				expect := func(what string, want int64) {
					t.Helper()
					devicetest.Eventually(t, what, func() bool { return notified["device"].Load() == want && notified["again"].Load() == want })
					time.Sleep(quietTime)
					for _, name := range []string{"other device", "sees no change", "fleet"} {
						if n := notified[name].Load(); n != 0 {
							t.Errorf("%s: %s is notified %d times", what, name, n)
						}
					}
					if n := notified["device"].Load(); n != want {
						t.Errorf("%s: notified %d times, not %d", what, n, want)
					}
				}
				devicetest.Eventually(t, "all listen", func() bool { return len(f.mcp.toolLists.sessionsOf("")) == 4 })
				f.events.happen(t, devices.StreamEvent{Kind: devices.EventOnline, Device: lamp}) // which changes nothing
				expect("nothing changed", 0)
				script.Tools = tools("self.lamp.on", "self.lamp.off")
				f.connect(t, lamp, script)
				f.events.happen(t, devices.StreamEvent{Kind: devices.EventCatalog, Device: lamp})
				expect("the list changed", 1)
				devicetest.SetPolicy(t, f.service, access.Policy{Rules: []access.Rule{{Name: "dark", Tools: []string{"self.lamp.on"}, Devices: selector.FromMap(map[string]string{"device": string(lamp)}), Action: access.Deny}}})
				expect("a rule removed a tool", 2)
			})
		})
	}
}

// Changes of the policy during a comparison of all lists, which asks other nodes for each, make one more, not one each.
func TestPolicyChangesDoNotPileUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFleetInMemory(t)
		if _, err := f.service.CheckIn(t.Context(), admission.CheckIn{Device: robot, ClientID: "c"}); err != nil {
			t.Fatal(err)
		}
		const open, each, changes = 20, 200 * time.Millisecond, 4 // one comparison lasts 4 s
		for range open {
			session := f.open(t, PathDevices+string(robot), admin)
			f.send(t, http.MethodPost, PathDevices+string(robot), admin, `{"jsonrpc":"2.0","id":2,"method":"tools/list"}`,
				"Mcp-Session-Id", session, "Mcp-Protocol-Version", "2025-06-18")
		}
		asked := f.ports.SlowNodes(each)
		for range changes {
			devicetest.SetPolicy(t, f.service, access.Policy{})
			time.Sleep(2 * sweepEvery)
		}
		time.Sleep(time.Minute)
		if n := asked(); n != 2*open {
			t.Errorf("%d questions for %d lists, not one for each and once more", n, open)
		}
	})
}

func TestResources(t *testing.T) {
	f := newFleet(t)
	script := devicetest.NewScript()
	script.Call = func(tool string, _ rawJSON) string {
		if tool == toolStatus {
			return `"result":{"content":[{"type":"text","text":"{\"battery\":5}"}],"isError":false}`
		}
		return devicetest.True
	}
	script.Tools = tools(toolStatus, "self.reboot", "self.lamp.on")
	f.connect(t, lamp, script)
	f.connect(t, robot, devicetest.NewScript())
	f.label(t, lamp, map[string]string{"room": "lab"})
	f.photos.add(devices.Photo{ID: "p1", Device: lamp})
	f.photos.add(devices.Photo{ID: "p2", Device: robot})
	_, lab := f.key(t, "devices:read photos:read tools:call events:read", "room=lab", time.Hour)
	for _, era := range eras {
		s := f.host(t, PathMCP, era, lab, nil)
		list, err := s.ListResources(t.Context(), nil)
		if err != nil || len(list.Resources) != 1 || list.Resources[0].URI != uriOf(lamp) {
			t.Errorf("%s: %+v, %v", era, list, err)
		}
		if templates, err := s.ListResourceTemplates(t.Context(), nil); err != nil || len(templates.ResourceTemplates) != 4 {
			t.Errorf("%s: %+v, %v", era, templates, err)
		}
		for uri, want := range map[string]string{uriOf(lamp): `"state":"online"`, uriDevices + "aabbccddee01": `"room":"lab"`, uriDevices + "aa%3Abb%3Acc%3Add%3Aee%3A01/status": `"battery":5`,
			uriOf(lamp) + "/tools": `"self.lamp.on"`, uriPhotos + "p1": "jpeg of p1"} {
			r, err := s.ReadResource(t.Context(), &mcp.ReadResourceParams{URI: uri})
			if err != nil || len(r.Contents) != 1 || !strings.Contains(r.Contents[0].Text+string(r.Contents[0].Blob), want) || strings.Contains(r.Contents[0].Text, "reboot") {
				t.Errorf("%s %s: %+v, %v", era, uri, r, err)
			}
			if err == nil && era >= revisionModern && r.CacheScope != "private" {
				t.Errorf("%s may be cached for other callers", uri)
			}
		}
		for _, uri := range []string{uriOf(robot), uriOf(robot) + "/tools", uriOf("aa:bb:cc:dd:ee:99"), uriPhotos + "p2", uriPhotos + "p3", uriOf(lamp) + "/else", "fleet://else", "file:///etc/passwd"} {
			if r, err := s.ReadResource(t.Context(), &mcp.ReadResourceParams{URI: uri}); err == nil {
				t.Errorf("%s %s: %+v", era, uri, r)
			}
		}
		done, err := s.Complete(t.Context(), &mcp.CompleteParams{Ref: &mcp.CompleteReference{Type: "ref/resource", URI: uriDevices + "{device}"}, Argument: mcp.CompleteParamsArgument{Name: "device", Value: "AA:bb"}})
		if err != nil || !slices.Equal(done.Completion.Values, []string{string(lamp)}) {
			t.Errorf("%s: %+v, %v", era, done, err)
		}
		for name, args := range map[string]map[string]string{"diagnose_device": {"device": string(lamp)}, "explain_failed_call": {"device": string(lamp), "tool": "self.lamp.on", "error": "a\u202eb"}} {
			p, err := s.GetPrompt(t.Context(), &mcp.GetPromptParams{Name: name, Arguments: args})
			if err != nil || len(p.Messages) != 2 {
				t.Errorf("%s %s: %+v, %v", era, name, p, err)
			}
			args["device"] = string(robot)
			if _, err := s.GetPrompt(t.Context(), &mcp.GetPromptParams{Name: name, Arguments: args}); err == nil {
				t.Errorf("%s %s: for a device that the key may not see", era, name)
			}
		}
	}
}

// Subscribers of a device are notified as long as they may see it.
func TestSubscriptions(t *testing.T) {
	for _, era := range []string{"2025-06-18", "2025-11-25", "2026-07-28"} {
		t.Run(era, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFleetInMemory(t)
				f.connect(t, lamp, devicetest.NewScript())
				f.connect(t, robot, devicetest.NewScript())
				f.label(t, lamp, map[string]string{"room": "lab"})
				_, lab := f.key(t, "devices:read", "room=lab", time.Hour)
				var mu sync.Mutex
				var updated []string
				s := f.host(t, PathMCP, era, lab, &mcp.ClientOptions{ResourceUpdatedHandler: func(_ context.Context, r *mcp.ResourceUpdatedNotificationRequest) {
					mu.Lock()
					defer mu.Unlock()
					updated = append(updated, r.Params.URI)
				}})
				if err := s.Subscribe(t.Context(), &mcp.SubscribeParams{URI: uriOf(lamp)}); err != nil {
					t.Fatal(err)
				}
				if era < revisionModern { // newer revisions send refusals on the stream
					for _, uri := range []string{uriOf(robot), uriPhotos + "p1", "test://x"} {
						if err := s.Subscribe(t.Context(), &mcp.SubscribeParams{URI: uri}); err == nil {
							t.Errorf("it can subscribe to %s", uri)
						}
					}
				}
				devicetest.Eventually(t, "it has subscribed", func() bool { return len(f.mcp.subscriptions.urisOf(lamp)) == 1 })
				count := func() int {
					mu.Lock()
					defer mu.Unlock()
					return len(updated)
				}
				f.events.happen(t, devices.StreamEvent{Kind: devices.EventOffline, Device: lamp})
				f.events.happen(t, devices.StreamEvent{Kind: devices.EventOffline, Device: robot})
				devicetest.Eventually(t, "it is notified", func() bool { return count() == 1 })
				f.label(t, lamp, map[string]string{"room": "hall"})
				f.events.happen(t, devices.StreamEvent{Kind: devices.EventOnline, Device: lamp})
				time.Sleep(quietTime)
				if n := count(); n != 1 {
					t.Errorf("it was notified %d times of a device that it may no longer see", n)
				}
				_ = s.Close()
				devicetest.Eventually(t, "all sessions and subscriptions have ended", func() bool { return len(f.mcp.subscriptions.urisOf("")) == 0 && f.mcp.Stats().Sessions.Load() == 0 })
			})
		})
	}
}

// A caller that requests progress receives it, and a cancelled call ends.
func TestProgressAndCancellation(t *testing.T) {
	for _, era := range eras {
		t.Run(era, func(t *testing.T) {
			f := newFleet(t)
			script := devicetest.NewScript()
			silent := atomic.Bool{}
			script.Call = func(string, rawJSON) string {
				if silent.Load() {
					return ""
				}
				return devicetest.True
			}
			f.connect(t, lamp, script)
			f.connect(t, robot, devicetest.NewScript())
			var notified atomic.Int64
			s := f.host(t, PathMCP, era, admin, &mcp.ClientOptions{ProgressNotificationHandler: func(_ context.Context, r *mcp.ProgressNotificationClientRequest) {
				notified.Add(1)
				if r.Params.Total != 2 {
					t.Errorf("%+v", r.Params)
				}
			}})
			params := &mcp.CallToolParams{Name: "call_many", Arguments: map[string]any{"devices": []string{string(lamp), string(robot)}, "tool": "self.audio_speaker.set_volume", "arguments": map[string]any{"volume": 1}}}
			params.SetProgressToken("p")
			r, err := s.CallTool(t.Context(), params)
			if err != nil || r.IsError || !strings.Contains(textOf(r), `"ok":2`) {
				t.Fatalf("%s, %v", textOf(r), err)
			}
			devicetest.Eventually(t, "progress is reported", func() bool { return notified.Load() == 2 })
			silent.Store(true)
			ctx, cancel := context.WithCancel(t.Context())
			failed := make(chan error, 1)
			go func() {
				_, err := s.CallTool(ctx, params)
				failed <- err
			}()
			devicetest.Eventually(t, "the call is in progress", func() bool { return f.mcp.sessions.calls.Load() == 1 })
			cancel()
			if err := <-failed; err == nil {
				t.Error("a cancelled call has a result")
			}
			devicetest.Eventually(t, "the call has ended on the node", func() bool { return f.mcp.sessions.calls.Load() == 0 })
		})
	}
}

// Events are shown with limited size, to callers that may read them.
func TestEvents(t *testing.T) {
	f := newFleet(t)
	f.connect(t, lamp, devicetest.NewScript())
	f.connect(t, robot, devicetest.NewScript())
	f.label(t, lamp, map[string]string{"room": "lab"})
	for _, id := range []devices.ID{lamp, robot} {
		f.events.happen(t, devices.StreamEvent{Kind: devices.EventNotification, Device: id, Data: []byte("{\"params\":{\"text\":\"a\u202eb\"}}")})
		f.events.happen(t, devices.StreamEvent{Kind: devices.EventNotification, Device: id, Data: []byte(`{"x":"` + strings.Repeat("x", maxEventRaw) + `"}`)})
	}
	_, lab := f.key(t, "events:read", "room=lab", time.Hour)
	s := f.host(t, PathMCP, "2026-07-28", lab, nil)
	r := call(t, s, "list_recent_events", map[string]any{})
	if text := textOf(r); r.IsError || strings.Count(text, `"type":"notifications"`) != 2 || strings.Contains(text, string(robot)) || !strings.Contains(text, `"text":"ab"`) || len(text) > 1000 {
		t.Errorf("%s", text)
	}
	for name, args := range map[string]map[string]any{"list_recent_events": {"device": string(robot)}, "find_devices": {}, "describe_device": {"device": string(lamp)},
		"search_device_tools": {"query": "x"}, "get_device_status": {"device": string(lamp)}, "wait_for_device": {"device": string(lamp)},
		"call_device_tool": {"device": string(lamp), "tool": "self.audio_speaker.set_volume", "arguments": map[string]any{"volume": 1}}} {
		if r := call(t, s, name, args); !r.IsError || !strings.Contains(textOf(r), "forbidden") || !strings.Contains(textOf(r), `"rule":"`) {
			t.Errorf("%s: %s", name, textOf(r))
		}
	}
}
