package devicetest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/devices/session"
	"fleetd/internal/fleet"
	"fleetd/internal/mcpclient"
)

// Device is the far end of one connection, as a front end's test makes it.
type Device interface {
	Send(text string) error
	SendAudio(opus []byte) error
	Receive() (text string, err error)      // the next text message; an error at the end
	ReceiveAudio() (opus []byte, err error) // the next packet; an error at the end
	HandleHello(hello string) error         // handles the server's hello, if audio depends on it
	Close()
}

// Frontend is one front end under test, over a service with recorded ports.
type Frontend struct {
	Service *fleet.Service
	Ports   *Ports
	// Dial connects a device that has valid credentials.
	Dial func(t testing.TB, id devices.ID, clientID string) Device
	// Hello is the device's first message.
	Hello string
	// Lacks names the behaviours of the suite that this source of devices
	// cannot have, each with the reason.
	Lacks map[string]string
	// InMemory opens the same front end over Pipes, in the synctest bubble of the
	// caller, for PushToTalk; nil if it lacks that.
	InMemory func(t *testing.T) Frontend
}

const testID = devices.ID("02:00:00:00:00:01")

// lacks starts the reason for which a front end skips a behaviour. Skips with
// any other reason count as tests that did not run.
const lacks = "LACKS: "

// Online connects a scripted device, sends its hello, answers until the test ends,
// and waits until its tools are known.
func (f Frontend) Online(t testing.TB, id devices.ID, clientID string, script *Script) Device {
	t.Helper()
	d := f.Dial(t, id, clientID)
	t.Cleanup(d.Close)
	if err := d.Send(f.Hello); err != nil {
		t.Fatal(err)
	}
	go script.Play(d)
	Eventually(t, "the device's tools are ready", func() bool {
		v, err := f.Service.Get(context.Background(), id)
		return err == nil && v.CatalogState == devices.CatalogReady && v.Presence.ClientID == clientID
	})
	return d
}

func call(s *fleet.Service, tool, args string, timeout time.Duration) (devices.ToolResult, *devices.Error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	r, err := s.CallTool(ctx, devices.ToolCall{Principal: Admin, Device: testID, Tool: tool, Arguments: json.RawMessage(args)})
	if err != nil {
		return r, devices.AsError(err)
	}
	return r, nil
}

const volume = "self.audio_speaker.set_volume"

// Run runs every behaviour against front ends that open makes, one each.
func Run(t *testing.T, open func(t *testing.T) Frontend) {
	known := map[string]bool{}
	for _, b := range []struct {
		name string
		test func(t *testing.T, f Frontend)
	}{
		{OneHello, oneHello},
		{"a call reaches the tool and returns", callReturns},
		{"vision address comes with initialize", visionGranted},
		{"an unescaped error fails its call", unescapedError},
		{"arguments are checked before the device is bothered", argumentsChecked},
		{"arguments that the device would read in another way are refused", textChecked},
		{NewestWins, newestWins},
		{CallsEnd, callsEnd},
		{"a silent tool times out and frees its slot", silentTool},
		{"seventeen calls wait, the next is refused", busy},
		{"reboot without an answer is success", reboot},
		{"bad messages are refused and harm nobody", badMessages},
		{"notifications and messages are published", notifications},
		{"late and foreign replies harm nobody", strayReplies},
		{"a notification flood is dropped, not queued", flood},
		{"device requests are answered", deviceRequests},
		{"a device without MCP has no tools, not unknown ones", withoutMCP},
		{OnlineOffline, onlineOffline},
		{"audio arrives unchanged", audio},
		{"speech reaches the device whole and in order", speaks},
		{"text for people arrives though a part of it would be dropped", textArrives},
		{"an interruption is answered", interruption},
		{"messages reach the device", messages},
		{ToolsBeforeHello, toolsBeforeHello},
		{HelloAgain, helloAgain},
		{GoodbyeEndsAudio, goodbye},
		{PushToTalk, pushToTalk},
		{GoodbyeAfterNodeLoss, goodbyeToTheDead},
		{ShortPackets, shortPackets},
	} {
		known[b.name] = true
		t.Run(b.name, func(t *testing.T) {
			f := open(t)
			if reason := f.Lacks[b.name]; reason != "" {
				t.Skip(lacks + reason)
			}
			b.test(t, f)
		})
	}
	for name := range open(t).Lacks {
		if !known[name] {
			t.Errorf("lacks %q, which is not a behaviour of the suite", name)
		}
	}
}

// Names of behaviours that not every source of devices has.
const (
	OneHello         = "hello is answered once with transport and session"
	NewestWins       = "the newest connection wins"
	CallsEnd         = "calls end when the connection does"
	OnlineOffline    = "online and offline events pair up"
	ToolsBeforeHello = "tools work before any hello"
	HelloAgain       = "a new hello replaces the conversation"
	GoodbyeEndsAudio = "goodbye ends the conversation and not the session"
)

func oneHello(t *testing.T, f Frontend) {
	d := f.Dial(t, testID, "c1")
	defer d.Close()
	if err := d.Send(f.Hello); err != nil {
		t.Fatal(err)
	}
	text, err := d.Receive()
	if err != nil {
		t.Fatal(err)
	}
	var h struct {
		Type, Transport string
		SessionID       string `json:"session_id"`
	}
	if json.Unmarshal([]byte(text), &h) != nil || h.Type != "hello" || h.Transport == "" || h.SessionID == "" {
		t.Fatalf("server hello %s", text)
	}
	if err := d.Send(f.Hello); err != nil {
		t.Fatal(err)
	}
	if err := d.Send(`{"type":"mcp","payload":{"jsonrpc":"2.0","id":77,"method":"ping"}}`); err != nil {
		t.Fatal(err)
	}
	for {
		text, err := d.Receive()
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(text, `"hello"`) {
			t.Fatal("a second hello was answered: it poisons the device's next connection")
		}
		if strings.Contains(text, `"id":77,"result":{}`) {
			return
		}
	}
}

func callReturns(t *testing.T, f Frontend) {
	script := NewScript()
	f.Online(t, testID, "c1", script)
	r, err := call(f.Service, volume, `{"volume":50}`, 5*time.Second)
	if err != nil || string(r.Content) != `[{"type":"text","text":"true"}]` || r.IsError || r.Node == "" || r.Duration <= 0 {
		t.Fatalf("%+v, %v", r, err)
	}
	if _, err := call(f.Service, "self.nope", `{}`, 5*time.Second); err == nil || err.Code != devices.CodeToolUnknown {
		t.Errorf("unknown tool: %v", err)
	}
	script.Call = func(string, json.RawMessage) string { return `"error":{"message":"Failed to capture photo"}` }
	if r, err := call(f.Service, volume, `{"volume":50}`, 5*time.Second); err != nil || !r.IsError || !strings.Contains(string(r.Content), "Failed to capture photo") {
		t.Errorf("a failing tool: %+v, %v", r, err)
	}
}

func visionGranted(t *testing.T, f Frontend) {
	script := NewScript()
	f.Online(t, testID, "c1", script)
	first := script.Received()[0]
	if first.Method != "initialize" || !strings.Contains(string(first.Params), `"vision":{"url":"http://192.0.2.1:8000/xiaozhi/vision/explain","token":"token-of-020000000001"}`) {
		t.Errorf("first request %s %s", first.Method, first.Params)
	}
	if second := script.Received()[1]; second.Method != "notifications/initialized" || second.ID != nil {
		t.Errorf("second message %s", second.Method)
	}
	if third := script.Received()[2]; third.Method != "tools/list" || !strings.Contains(string(third.Params), `"withUserTools":true`) {
		t.Errorf("third request %s %s", third.Method, third.Params)
	}
}

func unescapedError(t *testing.T, f Frontend) {
	script := NewScript()
	script.Call = func(string, json.RawMessage) string { return `"error":{"message":"no "film" left"}` }
	f.Online(t, testID, "c1", script)
	r, err := call(f.Service, volume, `{"volume":1}`, 5*time.Second)
	if err != nil || !r.IsError || string(r.Content) != `[{"type":"text","text":"no \"film\" left"}]` {
		t.Fatalf("%+v, %v", r, err)
	}
}

func argumentsChecked(t *testing.T, f Frontend) {
	script := NewScript()
	f.Online(t, testID, "c1", script)
	before := len(script.Received())
	for args, pointer := range map[string]string{`{}`: "/volume", `{"volume":"50"}`: "/volume", `{"volume":101}`: "/volume", `{"volume":-1}`: "/volume", `{"volume":50.5}`: "/volume"} {
		if _, err := call(f.Service, volume, args, 5*time.Second); err == nil || err.Code != devices.CodeInvalidArguments || len(err.Faults) != 1 || err.Faults[0].Pointer != pointer {
			t.Errorf("%s: %v", args, err)
		}
	}
	if after := len(script.Received()); after != before {
		t.Errorf("the device got %d requests", after-before)
	}
}

func newestWins(t *testing.T, f Frontend) {
	old := NewScript()
	started := make(chan struct{})
	old.Call = func(string, json.RawMessage) string { close(started); return "" }
	f.Online(t, testID, "c1", old)
	done := make(chan *devices.Error)
	go func() {
		_, err := call(f.Service, volume, `{"volume":1}`, 8*time.Second)
		done <- err
	}()
	<-started
	f.Online(t, testID, "c1", NewScript())
	if err := <-done; err == nil || err.Code != devices.CodeSuperseded || !err.Sent || err.Outcome != devices.OutcomeUnknown {
		t.Errorf("the call on the old connection: %+v", err)
	}
	if _, err := call(f.Service, volume, `{"volume":1}`, 5*time.Second); err != nil {
		t.Errorf("the new connection: %v", err)
	}
	Eventually(t, "one announcement is left", func() bool { _, _, _, held := f.Ports.Of(testID); return held == 1 })
	if _, n, _, _ := f.Ports.Of(testID); !n.Online {
		t.Error("the old connection's end marked the device offline")
	}
}

func callsEnd(t *testing.T, f Frontend) {
	script := NewScript()
	started := make(chan struct{})
	script.Call = func(string, json.RawMessage) string { close(started); return "" }
	d := f.Online(t, testID, "c1", script)
	done := make(chan *devices.Error)
	go func() {
		_, err := call(f.Service, volume, `{"volume":1}`, 8*time.Second)
		done <- err
	}()
	<-started
	d.Close()
	if err := <-done; err == nil || err.Code != devices.CodeConnectionLost || !err.Sent {
		t.Errorf("%+v", err)
	}
	Eventually(t, "the device is offline", func() bool {
		_, err := call(f.Service, volume, `{"volume":1}`, time.Second)
		return err != nil && err.Code == devices.CodeDeviceOffline
	})
}

func silentTool(t *testing.T, f Frontend) {
	script := NewScript()
	silent := true
	script.Call = func(string, json.RawMessage) string {
		if silent {
			silent = false
			return ""
		}
		return True
	}
	f.Online(t, testID, "c1", script)
	if _, err := call(f.Service, volume, `{"volume":1}`, 100*time.Millisecond); err == nil || err.Code != devices.CodeDeviceTimeout || err.Outcome != devices.OutcomeUnknown {
		t.Errorf("%+v", err)
	}
	if _, err := call(f.Service, volume, `{"volume":1}`, 5*time.Second); err != nil {
		t.Errorf("after the timeout: %v", err)
	}
	Eventually(t, "a probe follows the timeout", func() bool {
		for _, r := range script.Received() {
			if r.Method == "ping" {
				return true
			}
		}
		return false
	})
}

func busy(t *testing.T, f Frontend) {
	script := NewScript()
	release := make(chan struct{})
	script.Call = func(string, json.RawMessage) string { <-release; return True }
	f.Online(t, testID, "c1", script)
	var wg sync.WaitGroup
	errs := make(chan *devices.Error, 20)
	for range session.MaxWaitingCalls + 1 {
		wg.Go(func() {
			_, err := call(f.Service, volume, `{"volume":1}`, 20*time.Second)
			errs <- err
		})
	}
	stats := f.Service.Stats()
	Eventually(t, "16 calls wait for one", func() bool {
		return stats.Waiting.Load() == session.MaxWaitingCalls && stats.InFlight.Load() == 1
	})
	if _, err := call(f.Service, volume, `{"volume":1}`, time.Second); err == nil || err.Code != devices.CodeDeviceBusy {
		t.Errorf("the 18th call: %v", err)
	}
	close(release)
	wg.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			t.Errorf("a waiting call: %v", err)
		}
	}
}

func reboot(t *testing.T, f Frontend) {
	script := NewScript()
	var d Device
	script.Call = func(string, json.RawMessage) string { d.Close(); return "" }
	d = f.Online(t, testID, "c1", script)
	r, err := call(f.Service, "self.reboot", `{}`, 8*time.Second)
	if err != nil || r.Outcome != dispatch.OutcomeRestarting || r.IsError {
		t.Errorf("%+v, %v", r, err)
	}
}

func badMessages(t *testing.T, f Frontend) {
	f.Online(t, devices.ID("02:00:00:00:00:02"), "other", NewScript())
	d := f.Online(t, testID, "c1", NewScript())
	for _, text := range []string{`{`, `[]`, `null`, `{"type":1}`, `{"type":"mcp"}`, `{"type":"mcp","payload":null}`, `{"type":"mcp","payload":"x"}`,
		`{"type":"mcp","payload":[{}]}`, "{\"type\":\"\xff\"}", `{"type":"mcp","payload":` + strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000) + `}`,
		`{"type":"mcp","payload":{"jsonrpc":"2.0","id":1e99,"result":{}}}`, "{\"type\":\"a\x00b\"}", `{"type":"mcp","type":"x","payload":{},"payload":{}}`} {
		if err := d.Send(text); err != nil {
			t.Fatalf("%.40q ended the connection: %v", text, err)
		}
	}
	if _, err := call(f.Service, volume, `{"volume":1}`, 5*time.Second); err != nil {
		t.Errorf("after bad messages: %v", err)
	}
}

func notifications(t *testing.T, f Frontend) {
	d := f.Online(t, testID, "c1", NewScript())
	for _, text := range []string{
		`{"session_id":"","type":"mcp","payload":{"jsonrpc":"2.0","method":"notifications/button/pressed up","params":{"n":1}}}`,
		`{"session_id":"","type":"listen","state":"start","mode":"auto"}`} {
		if err := d.Send(text); err != nil {
			t.Fatal(err)
		}
	}
	Eventually(t, "both are published", func() bool {
		return len(f.Ports.Seen(devices.EventNotification)) == 1 && len(f.Ports.Seen(devices.EventMessage)) == 1
	})
	n := f.Ports.Seen(devices.EventNotification)[0]
	if n.Subject != "button.pressed_up" || string(n.Fields) != `"method":"notifications/button/pressed up","params":{"n":1}` || n.MsgID == "" {
		t.Errorf("%s %s %s", n.Subject, n.Fields, n.MsgID)
	}
	m := f.Ports.Seen(devices.EventMessage)[0]
	if m.Subject != "listen" || string(m.Fields) != `"message":{"session_id":"","type":"listen","state":"start","mode":"auto"}` || m.MsgID != "" {
		t.Errorf("%s %s %s", m.Subject, m.Fields, m.MsgID)
	}
}

func strayReplies(t *testing.T, f Frontend) {
	script := NewScript()
	var mu sync.Mutex
	var held string
	script.Other = func(r Request) string {
		mu.Lock()
		defer mu.Unlock()
		if r.Method == "slow" {
			held = string(r.ID)
			return "silent"
		}
		return ""
	}
	d := f.Online(t, testID, "c1", script)
	slow := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), 8*time.Second)
		defer cancel()
		_, err := f.Service.CallRPC(ctx, devices.RPCCall{Principal: Admin, Device: testID, Method: "slow"})
		slow <- err
	}()
	Eventually(t, "the slow request arrived", func() bool { mu.Lock(); defer mu.Unlock(); return held != "" })
	late := fmt.Sprintf(`{"session_id":"","type":"mcp","payload":{"jsonrpc":"2.0","id":%s,"result":{}}}`, held)
	foreign := `{"session_id":"","type":"mcp","payload":{"jsonrpc":"2.0","id":1999999999,"result":{"mine":false}}}`
	if err := errors.Join(d.Send(foreign), d.Send(late), d.Send(late)); err != nil {
		t.Fatal(err)
	}
	if err := <-slow; err != nil {
		t.Errorf("the slow request: %v", err)
	}
	Eventually(t, "both unmatched answers are counted", func() bool {
		var late, foreign int64
		f.Service.Stats().Deviations.Each(func(k session.DeviationKey, n int64) {
			switch k.Kind {
			case mcpclient.DeviationLateReply:
				late += n
			case mcpclient.DeviationForeignReply:
				foreign += n
			}
		})
		return late == 1 && foreign == 1
	})
}

func flood(t *testing.T, f Frontend) {
	d := f.Online(t, testID, "c1", NewScript())
	for range 300 {
		if err := d.Send(`{"session_id":"","type":"mcp","payload":{"jsonrpc":"2.0","method":"notifications/x"}}`); err != nil {
			t.Fatal(err)
		}
	}
	Eventually(t, "all are published or dropped", func() bool {
		s := f.Service.Stats()
		return s.Notified.Load()+s.NotifyDrops.Load() >= 300
	})
	if got := len(f.Ports.Seen(devices.EventNotification)); got < 40 || got > 140 {
		t.Errorf("%d of 300 published; the burst is 40 and the rate 20 a second", got)
	}
}
