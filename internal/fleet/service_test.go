package fleet_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/devices/session"
	"fleetd/internal/devices/speech"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
	"fleetd/internal/hello"
)

const id = devices.ID("02:00:00:00:00:01")

// pipe is a connection to a script: each message of the core is answered at once, on the
// sender's goroutine.
type pipe struct {
	script  *devicetest.Script
	session *session.Session

	mu     sync.Mutex
	closed devices.CloseReason
	full   bool
	broken bool
	path   path
}

func (p *pipe) SendControl(msg []byte) error {
	p.mu.Lock()
	closed, full, broken := p.closed, p.full, p.broken
	p.mu.Unlock()
	switch {
	case full:
		return devices.ErrOverloaded
	case closed != "" || broken:
		return errors.New("closed")
	}
	p.path.note(msg)
	if answer := p.script.Answer(msg); answer != "" {
		_ = p.session.HandleControl([]byte(answer)) // scripts may answer unusable messages
	}
	return nil
}

func (p *pipe) Close(reason devices.CloseReason) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed == "" {
		p.closed = reason
	}
}

func (p *pipe) reason() devices.CloseReason {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.closed
}

func connect(t *testing.T, s *fleet.Service, client string, script *devicetest.Script) *pipe {
	t.Helper()
	p := &pipe{script: script}
	session, err := s.Accept(devices.Identity{Device: id, ClientID: client, Transport: devices.TransportWebSocket}, p)
	if err != nil {
		t.Fatal(err)
	}
	p.session = session
	if _, err := session.OpenAudio(hello.Device{}, hello.TransportWebSocket,
		func(*speech.Conversation) (speech.AudioPath, error) { return &p.path, nil }); err != nil {
		t.Fatal(err)
	}
	session.StartMCP(devices.FeaturesMCP)
	return p
}

func state(t *testing.T, s *fleet.Service) devices.View {
	t.Helper()
	v, err := s.Get(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func ready(t *testing.T, s *fleet.Service) {
	t.Helper()
	synctest.Wait()
	if v := state(t, s); v.CatalogState != devices.CatalogReady {
		t.Fatalf("catalog is %s, MCP %s %s", v.CatalogState, v.Presence.MCP, v.Presence.MCPError)
	}
}

// bubble runs a test in fake time and closes the core inside it.
func bubble(t *testing.T, cfg fleet.Config, test func(t *testing.T, p *devicetest.Ports, s *fleet.Service)) {
	synctest.Test(t, func(t *testing.T) {
		p := devicetest.New()
		s := p.Service(t, cfg)
		test(t, p, s)
		s.Close()
	})
}

func call(t *testing.T, s *fleet.Service, tool, args string) (devices.ToolResult, *devices.Error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), dispatch.TimeoutFor(tool))
	defer cancel()
	r, err := s.CallTool(ctx, devices.ToolCall{Principal: devicetest.Admin, Device: id, Tool: tool, Arguments: json.RawMessage(args)})
	if err != nil {
		return r, devices.AsError(err)
	}
	return r, nil
}

// records keeps what is recorded.
type records struct {
	mu    sync.Mutex
	steps []devices.Step
	calls []devices.CallStep
}

func (r *records) Step(s devices.Step) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.steps = append(r.steps, s)
}

func (r *records) Call(c devices.CallStep) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, c)
}

func (r *records) Forget(devices.ID) {}

// A call, a raw request and a shared read that waited for the device are recorded with the call that they waited for.
func TestWaitsAreRecorded(t *testing.T) {
	for name, waiter := range map[string]func(s *fleet.Service, ctx context.Context) error{
		"call": func(s *fleet.Service, ctx context.Context) error {
			_, err := s.CallTool(ctx, devices.ToolCall{Principal: devicetest.Admin, Device: id, Tool: "self.lamp.set", Arguments: json.RawMessage(`{"on":true}`)})
			return err
		},
		"tools/call": func(s *fleet.Service, ctx context.Context) error {
			_, err := s.CallRPC(ctx, devices.RPCCall{Principal: devicetest.Admin, Device: id, Method: "tools/call", Params: json.RawMessage(`{"name":"self.lamp.set","arguments":{"on":true}}`)})
			return err
		},
		"raw request": func(s *fleet.Service, ctx context.Context) error {
			_, err := s.CallRPC(ctx, devices.RPCCall{Principal: devicetest.Admin, Device: id, Method: "resources/list"})
			return err
		},
		"shared read": func(s *fleet.Service, ctx context.Context) error {
			_, err := s.CallTool(ctx, devices.ToolCall{Principal: devicetest.Admin, Device: id, Tool: "self.get_device_status"})
			return err
		},
	} {
		for _, limit := range []time.Duration{time.Second, 10 * time.Second} {
			synctest.Test(t, func(t *testing.T) {
				var r records
				s := devicetest.New().ServiceOver(t, fleet.Config{}, func(p *fleet.Ports) { p.Recorder = &r })
				script := devicetest.NewScript()
				script.Tools = guardedTools
				script.Call = func(string, json.RawMessage) string {
					time.Sleep(2 * time.Second)
					return devicetest.True
				}
				connect(t, s, "c1", script)
				ready(t, s)
				var first sync.WaitGroup
				first.Go(func() { _, _ = call(t, s, "self.get_device_status", "") })
				synctest.Wait()
				ctx, cancel := context.WithTimeout(t.Context(), limit)
				defer cancel()
				err := waiter(s, ctx)
				first.Wait()
				i := slices.IndexFunc(r.calls, func(c devices.CallStep) bool { return c.Ahead != "" })
				if i < 0 || r.calls[i].Ahead != r.calls[1-i].Call || r.calls[i].Waited != min(limit, 2*time.Second) {
					t.Errorf("%s, %s: %v, recorded %+v", name, limit, err, r.calls)
				}
				s.Close()
			})
		}
	}
}

// Messages are recorded as calls are, those of a conversation are not. A restart has the outcome of a tool that restarts.
func TestMessagesAreRecorded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r records
		s := devicetest.New().ServiceOver(t, fleet.Config{}, func(p *fleet.Ports) { p.Recorder = &r })
		connect(t, s, "c1", devicetest.NewScript())
		ready(t, s)
		send(t, s, devices.RestartMessage)
		send(t, s, `{"type":"alert","status":"s","message":"m","emotion":"e"}`)
		send(t, s, ttsStart)
		if err := s.SendMessage(t.Context(), devices.Message{Principal: devicetest.Admin, Device: id, Body: []byte(`{"type":"hello"}`)}); err == nil {
			t.Error("a hello was sent")
		}
		var got []string
		for _, c := range r.calls {
			if c.Call == "" || c.Device != id || c.Key != access.KeyAdmin || c.At.IsZero() {
				t.Errorf("%+v", c)
			}
			got = append(got, fmt.Sprint(c.Tool, " ", c.Outcome, " ", c.Sent))
		}
		if want := []string{"system restarting true", "alert sent true", " forbidden false"}; !slices.Equal(got, want) {
			t.Errorf("recorded %q, want %q", got, want)
		}
		for _, step := range r.steps {
			if !step.Proven {
				t.Errorf("a step of a session is not proven: %+v", step)
			}
		}
		s.Close()
	})
}

// The answer to an upgrade that failed says that the device needs a restart, and how it gets one.
func TestFailedUpgradeNeedsARestart(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		script := devicetest.NewScript()
		script.Tools = `[{"name":"self.upgrade_firmware","description":"d","inputSchema":{"type":"object","properties":{"url":{"type":"string"}},"required":["url"]}}]`
		script.Call = func(string, json.RawMessage) string { return devicetest.True }
		connect(t, s, "c1", script)
		ready(t, s)
		devicetest.SetPolicy(t, s, access.Policy{URLs: []access.URLRule{{Tools: []string{"self.upgrade_firmware"}, Prefixes: []string{"http://192.0.2.1/"}}}})
		r, err := call(t, s, "self.upgrade_firmware", `{"url":"http://192.0.2.1/f.bin"}`)
		if err != nil || !r.IsError || !strings.Contains(string(r.Content), "button and wake word do not work until it restarts") || !strings.Contains(string(r.Content), "fleetd restart "+string(id)) {
			t.Errorf("%s, %v", r.Content, err)
		}
	})
}

// A device whose connection ends while its tools are listed has that in its log.
func TestEndWhileListing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r records
		s := devicetest.New().ServiceOver(t, fleet.Config{}, func(p *fleet.Ports) { p.Recorder = &r })
		script := devicetest.NewScript()
		script.Other = func(q devicetest.Request) string {
			if q.Method == "tools/list" {
				return "silent"
			}
			return ""
		}
		p := connect(t, s, "c1", script)
		synctest.Wait()
		p.session.Close(devices.CloseGone)
		if last := r.steps[len(r.steps)-1]; last.Kind != devices.StepClosed || last.Text != devices.TextListing {
			t.Errorf("%+v", last)
		}
		s.Close()
	})
}

// A device that has reported no features and does not answer is asked again within 5 minutes, however long it was silent.
func TestRetriesOfUnannouncedDevices(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		script := devicetest.NewScript()
		script.Other = func(devicetest.Request) string { return "silent" }
		p := &pipe{script: script}
		session, err := s.Accept(devices.Identity{Device: id, ClientID: "c1", Transport: devices.TransportMQTT}, p)
		if err != nil {
			t.Fatal(err)
		}
		p.session = session
		session.StartMCP(devices.FeaturesUnknown)
		time.Sleep(20 * time.Minute)
		before := len(script.Received())
		time.Sleep(5*time.Minute + 10*time.Second) // with the time that is left for an answer
		synctest.Wait()
		if after := len(script.Received()); after == before {
			t.Errorf("%d requests in 20 minutes, and none in the next 5 minutes", before)
		}
	})
}

func TestRetriesWithBackoffWhileTheDeviceIsSilent(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		script := devicetest.NewScript()
		var answers atomic.Bool
		script.Other = func(devicetest.Request) string {
			if !answers.Load() {
				return "silent"
			}
			return ""
		}
		connect(t, s, "c1", script)
		time.Sleep(11 * time.Second) // fake time: the first initialize timed out after 10 s
		synctest.Wait()
		if v := state(t, s); v.Presence.MCP != devices.MCPUnresponsive || v.CatalogState != devices.CatalogError || v.Presence.MCPError != "initialize: no answer within 10 s" {
			t.Errorf("MCP %s (%s), catalog %s", v.Presence.MCP, v.Presence.MCPError, v.CatalogState)
		}
		time.Sleep(5*time.Minute - 11*time.Second)
		var tries int
		for _, r := range script.Received() {
			if r.Method == "initialize" {
				tries++
			}
		}
		if tries < 4 || tries > 7 {
			t.Errorf("%d tries in five minutes; pauses double from 5 s", tries)
		}
		answers.Store(true)
		time.Sleep(6 * time.Minute)
		ready(t, s)
	})
}

func TestToolsAreKnownBeforeTheyAreVerified(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		first := connect(t, s, "c1", devicetest.NewScript())
		ready(t, s)
		first.session.Close(devices.CloseGone)
		if list, err := s.Tools(t.Context(), id, true); err != nil || list.State != devices.CatalogStale || len(list.Tools) != 2 {
			t.Errorf("offline: %+v, %v", list, err)
		}
		script := devicetest.NewScript()
		script.Other = func(r devicetest.Request) string {
			if r.Method == "initialize" {
				return "silent"
			}
			return ""
		}
		connect(t, s, "c1", script)
		if list, err := s.Tools(t.Context(), id, false); err != nil || list.State != devices.CatalogStale || len(list.Tools) != 1 {
			t.Errorf("just connected: %+v, %v", list, err)
		}
		if _, err := call(t, s, "self.audio_speaker.set_volume", `{"volume":3}`); err != nil {
			t.Errorf("a call while stale: %v", err)
		}
		if len(p.Seen(devices.EventCatalog)) != 1 {
			t.Error("an unchanged list published an event")
		}
	})
}

func TestCatalogOfTheSameFirmwareImageIsShown(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		check := admission.CheckIn{Device: id, ClientID: "c1", Facts: devices.Facts{Firmware: "2.4.2", ELF: strings.Repeat("a", 64)}}
		if _, err := s.CheckIn(t.Context(), check); err != nil {
			t.Fatal(err)
		}
		connect(t, s, "c1", devicetest.NewScript())
		ready(t, s)
		check.Device = "02:00:00:00:00:02"
		if _, err := s.CheckIn(t.Context(), check); err != nil {
			t.Fatal(err)
		}
		twin, err := s.Accept(devices.Identity{Device: check.Device, ClientID: "c1"}, &pipe{script: devicetest.NewScript()})
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait() // its row contains the image
		if list, err := s.Tools(t.Context(), check.Device, true); err != nil || list.State != devices.CatalogStale || len(list.Tools) != 2 {
			t.Errorf("%+v, %v", list, err)
		}
		twin.Close(devices.CloseGone)
	})
}

func TestHistoryAndDiff(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		connect(t, s, "c1", devicetest.NewScript())
		ready(t, s)
		script := devicetest.NewScript()
		script.Tools = "[" + strings.Replace(devicetest.Volume, "Speaker", "Loudspeaker", 1) + `,{"name":"self.new","inputSchema":{"type":"object","properties":{}}}]`
		script.Firmware = "2.5.0"
		connect(t, s, "c1", script)
		ready(t, s)
		events := p.Seen(devices.EventCatalog)
		if len(events) != 2 || !strings.Contains(string(events[1].Fields), `"added":["self.new"],"removed":["self.reboot"],"changed":["self.audio_speaker.set_volume"]`) {
			t.Errorf("%s", events[len(events)-1].Fields)
		}
		script.Firmware = "2.5.1" // the same tools under another firmware: an entry, but not an event
		connect(t, s, "c1", script)
		ready(t, s)
		history, err := s.History(t.Context(), id, 0, 0, 10)
		if err != nil || len(history) != 3 || history[0].Firmware != "2.5.1" || history[0].Catalog != history[1].Catalog || history[2].Firmware != "2.4.2" {
			t.Errorf("%+v, %v", history, err)
		}
		if n := len(p.Seen(devices.EventCatalog)); n != 2 {
			t.Errorf("%d catalog events, want 2", n)
		}
	})
}

func TestClonedIDKeepsTheIncumbent(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		var last *pipe
		for i := range 6 {
			last = connect(t, s, []string{"a", "b"}[i%2], devicetest.NewScript())
		}
		identity := devices.Identity{Device: id, ClientID: "a"}
		if _, err := s.Accept(identity, &pipe{}); err == nil || devices.AsError(err).Code != devices.CodeForbidden {
			t.Errorf("the seventh: %v", err)
		}
		if v := state(t, s); v.State != devices.StateContested || last.reason() != "" {
			t.Errorf("state %s, incumbent closed as %q", v.State, last.reason())
		}
		if len(p.Seen(devices.EventContested)) == 0 {
			t.Error("no event")
		}
		time.Sleep(31 * time.Second)
		if _, err := s.Accept(identity, &pipe{script: devicetest.NewScript()}); err != nil {
			t.Errorf("after the pause: %v", err)
		}
	})
}

func TestEpochsRiseEvenWhenTheClockDoesNot(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		var before devices.Epoch
		for range 5 { // fake time does not advance
			p := connect(t, s, "c1", devicetest.NewScript())
			if p.session.Epoch() <= before {
				t.Fatalf("epoch %d after %d", p.session.Epoch(), before)
			}
			before = p.session.Epoch()
		}
	})
}

func TestSlowConnectionIsClosed(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		p := connect(t, s, "c1", devicetest.NewScript())
		ready(t, s)
		p.mu.Lock()
		p.full = true
		p.mu.Unlock()
		if _, err := call(t, s, "self.reboot", `{}`); err == nil || err.Sent {
			t.Errorf("%+v", err)
		}
		if p.reason() != devices.CloseSlow {
			t.Errorf("closed as %q", p.reason())
		}
	})
}

func TestRestartingToolsSucceedInSilence(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		script := devicetest.NewScript()
		script.Call = func(string, json.RawMessage) string { return "" }
		connect(t, s, "c1", script)
		ready(t, s)
		begun := time.Now()
		r, err := call(t, s, "self.reboot", `{}`)
		if err != nil || r.Outcome != dispatch.OutcomeRestarting || time.Since(begun) != 5*time.Second {
			t.Errorf("%+v, %v after %v", r, err, time.Since(begun))
		}
		if _, err := call(t, s, "self.upgrade_firmware", `{}`); err == nil || err.Code != devices.CodeToolUnknown {
			t.Errorf("a tool that is not in the list: %v", err)
		}
	})
}

func TestUpgradeNeedsURLAndAnswersMeanFailure(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		script := devicetest.NewScript()
		script.Tools = `[{"name":"self.upgrade_firmware","inputSchema":{"type":"object","properties":{"url":{"type":"string","default":"The URL of the firmware binary file to download and install"}}}}]`
		devicetest.AllowURLs(t, s, "http://192.0.2.1/")
		p := connect(t, s, "c1", script)
		ready(t, s)
		if _, err := call(t, s, "self.upgrade_firmware", `{}`); err == nil || err.Code != devices.CodeInvalidArguments || err.Faults[0].Pointer != "/url" {
			t.Errorf("without url: %+v", err)
		}
		if r, err := call(t, s, "self.upgrade_firmware", `{"url":"http://192.0.2.1/f.bin"}`); err != nil || !r.IsError {
			t.Errorf("an answer: %+v, %v", r, err)
		}
		script.Call = func(string, json.RawMessage) string { go p.session.Close(devices.CloseGone); return "" }
		if r, err := call(t, s, "self.upgrade_firmware", `{"url":"http://192.0.2.1/f.bin"}`); err != nil || r.Outcome != dispatch.OutcomeRestarting {
			t.Errorf("a disconnect: %+v, %v", r, err)
		}
	})
}

func TestVisionTokenIsRenewed(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		script := devicetest.NewScript()
		connect(t, s, "c1", script)
		ready(t, s)
		time.Sleep(12*time.Hour + 2*time.Minute)
		synctest.Wait()
		n := slices.IndexFunc(script.Received()[1:], func(r devicetest.Request) bool { return r.Method == "initialize" })
		if n < 0 {
			t.Error("no second initialize after 12 h")
		}
	})
}

func TestSnapshotGetsAnAddress(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		script := devicetest.NewScript()
		script.Tools = `[{"name":"self.screen.snapshot","inputSchema":{"type":"object","properties":{"url":{"type":"string"},"quality":{"type":"integer","default":80,"minimum":1,"maximum":100}},"required":["url"]}}]`
		connect(t, s, "c1", script)
		ready(t, s)
		r, err := call(t, s, "self.screen.snapshot", `{"quality":50}`)
		if err != nil || !strings.Contains(string(r.Content), `photo-of-020000000001`) {
			t.Errorf("%s, %v", r.Content, err)
		}
		last := script.Received()[len(script.Received())-1]
		if !strings.Contains(string(last.Params), `"arguments":{"url":"http://192.0.2.1:8000/xiaozhi/snapshot/020000000001","quality":50}`) {
			t.Errorf("sent %s", last.Params)
		}
	})
}

func TestUnknownOfflineAndUnavailable(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		if _, err := call(t, s, "x", `{}`); err == nil || err.Code != devices.CodeDeviceUnknown {
			t.Errorf("unknown: %v", err)
		}
		check(t, s, "c1")
		p.SetAway(true)
		if _, err := call(t, s, "x", `{}`); err == nil || err.Code != devices.CodeDeviceOffline {
			t.Errorf("never connected, database away: %v", err)
		}
		connect(t, s, "c1", devicetest.NewScript()).session.Close(devices.CloseGone)
		if _, err := call(t, s, "x", `{}`); err == nil || err.Code != devices.CodeDeviceOffline {
			t.Errorf("offline, database away: %v", err)
		}
	})
}

func TestRestartKeepsMembersAndEndsLostSessions(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		connect(t, s, "c1", devicetest.NewScript())
		ready(t, s)
		// The database after a node was killed: still online.
		_, left, _, _ := p.Of(id)
		next := devicetest.New()
		next.Ledger, next.Texts = p.Ledger, p.Texts
		next.Presences[id] = left
		again := next.Service(t, fleet.Config{})
		v, err := again.Get(t.Context(), id)
		if err != nil || v.State != devices.StateOffline || v.CatalogState != devices.CatalogStale {
			t.Errorf("%+v, %v", v, err)
		}
		if n, err := again.MarkNodeLost(t.Context(), left.Node, func(context.Context, string, devices.ID, int) ([]devices.Presence, error) {
			return []devices.Presence{left}, nil
		}); err != nil || n != 1 {
			t.Fatal(n, err)
		}
		if v, err := again.Get(t.Context(), id); err != nil || v.State != devices.StateOffline || v.Presence.Reason != "node_lost" || v.CatalogState != devices.CatalogStale {
			t.Errorf("%+v, %v", v, err)
		}
		lost := next.Seen(devices.EventOffline)
		if len(lost) != 1 || !strings.HasSuffix(lost[0].MsgID, "-offline") || string(lost[0].Fields) != `"reason":"node_lost"` {
			t.Errorf("%+v", lost)
		}
		p2 := &pipe{script: devicetest.NewScript()}
		session, err := again.Accept(devices.Identity{Device: id, ClientID: "c1"}, p2)
		synctest.Wait() // the database refuses its first row: the clock has not advanced
		if err != nil || session.Epoch() <= left.Epoch {
			t.Errorf("epoch %d after %d, %v", session.Epoch(), left.Epoch, err)
		}
	})
}
