package upstream

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/devicetest"
)

// ask sends one MCP payload.
func (p *peer) ask(payload string) {
	p.t.Helper()
	p.say(`{"session_id":"theirs","type":"mcp","payload":` + payload + `}`)
}

// answered is the next message, which must be an MCP answer; it returns the payload.
func (p *peer) answered() string {
	p.t.Helper()
	text := p.text()
	payload, ours := strings.CutPrefix(text, `{"session_id":"theirs","type":"mcp","payload":`)
	if !ours {
		p.t.Fatalf("%s is no answer", text)
	}
	return strings.TrimSuffix(payload, "}")
}

func (f *testFleet) ready() {
	f.t.Helper()
	devicetest.Eventually(f.t, "the device's tools are ready", func() bool {
		v, err := f.svc.Get(context.Background(), id)
		return err == nil && v.CatalogState == devices.CatalogReady
	})
}

func TestMCPIsAnswered(t *testing.T) {
	c := server(t)
	f := newFleet(t, c)
	script := devicetest.NewScript()
	script.Call = func(tool string, arguments json.RawMessage) string {
		switch {
		case strings.Contains(string(arguments), `"volume":13`):
			return `"error":{"message":"the speaker is \"away\""}`
		case tool == volume:
			return fmt.Sprintf(`"result":{"content":[{"type":"text","text":%q}],"isError":false}`, arguments)
		}
		return devicetest.True
	}
	script.Other = func(r devicetest.Request) string {
		if r.Method == "resources/list" {
			return `"result":{"resources":[]}`
		}
		return ""
	}
	d := f.connect(devices.TransportMQTT, script)
	f.hello(d)
	p := c.open(t)
	f.ready()
	for _, x := range []struct{ ask, want string }{
		{`{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2024-11-05","capabilities":{"vision":{"url":"http://chat/vision","token":"secret"}},"clientInfo":{"name":"X","version":"1"}}}`,
			`{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":"2024-11-05","capabilities":{"tools":{}},"serverInfo":{"name":"bread-compact-wifi","version":"2.4.2"}}}`},
		{`{"jsonrpc":"2.0","method":"notifications/initialized"}`, ``},
		{`{"jsonrpc":"2.0","method":"notifications/cancelled","id":7,"params":{}}`, ``},
		{`{"jsonrpc":"2.0","id":null,"method":"tools/list"}`, ``},
		{`{"jsonrpc":"2.0","id":"p-1","method":"ping"}`, `{"jsonrpc":"2.0","id":"p-1","result":{}}`},
		{`{"jsonrpc":"2.0","id":2,"method":"tools/list"}`, `{"jsonrpc":"2.0","id":2,"result":{"tools":[` + devicetest.Volume + `]}}`},
		{`{"jsonrpc":"2.0","id":2,"method":"tools/list","params":{"cursor":""}}`, `{"jsonrpc":"2.0","id":2,"result":{"tools":[` + devicetest.Volume + `]}}`},
		{`{"jsonrpc":"2.0","id":2,"method":"tools/list","params":{"withUserTools":true}}`, `{"jsonrpc":"2.0","id":2,"result":{"tools":[` + devicetest.Volume + `,` + devicetest.Reboot + `]}}`},
		{`{"jsonrpc":"2.0","id":2,"method":"tools/list","params":{"cursor":"self.reboot"}}`, `{"jsonrpc":"2.0","id":2,"result":{"tools":[` + devicetest.Reboot + `]}}`},
		{`{"jsonrpc":"2.0","id":2,"method":"tools/list","params":{"cursor":"nobody"}}`, `{"jsonrpc":"2.0","id":2,"error":{"code":-32602,"message":"no tool is named by the cursor \"nobody\"; list again from the beginning"}}`},
		{`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"` + volume + `","arguments":{"volume":5}}}`,
			`{"jsonrpc":"2.0","id":1,"result":{"content":[{"type":"text","text":"{\"volume\":5}"}],"isError":false}}`},
		{`{"jsonrpc":"2.0","id":"a \" b","method":"tools/call","params":{"name":"` + volume + `","arguments":{"volume":6}}}`,
			`{"jsonrpc":"2.0","id":"a \" b","result":{"content":[{"type":"text","text":"{\"volume\":6}"}],"isError":false}}`},
		{`{"jsonrpc":"2.0","id":1.50,"method":"tools/call","params":{"name":"` + volume + `","arguments":{"volume":13}}}`,
			`{"jsonrpc":"2.0","id":1.50,"result":{"content":[{"type":"text","text":"the speaker is \"away\""}],"isError":true}}`},
		{`{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"` + volume + `","arguments":{"volume":101}}}`, `{"jsonrpc":"2.0","id":3,"error":{"code":-32602,"message":"`},
		{`{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"` + volume + `","arguments":"loud"}}`, `{"jsonrpc":"2.0","id":3,"error":{"code":-32602,"message":"`},
		{`{"jsonrpc":"2.0","id":4,"method":"tools/call","params":{"name":"self.nothing","arguments":null}}`,
			`{"jsonrpc":"2.0","id":4,"error":{"code":-32602,"message":"device aa:bb:cc:dd:ee:ff has no tool \"self.nothing\""}}`},
		{`{"jsonrpc":"2.0","id":5,"method":"tools/call","params":[]}`, `{"jsonrpc":"2.0","id":5,"error":{"code":-32602,"message":"tools/call needs`},
		{`{"jsonrpc":"2.0","id":6,"method":"resources/list","params":{}}`, `{"jsonrpc":"2.0","id":6,"result":{"resources":[]}}`},
		{`{"jsonrpc":"2.0","id":7,"method":"prompts/list"}`, `{"jsonrpc":"2.0","id":7,"error":{"code":-32`},
		{`{"jsonrpc":"2.0","id":8,"method":"prompts/list","params":3}`, `{"jsonrpc":"2.0","id":8,"error":{"code":-32602,"message":"params must be`},
	} {
		p.ask(x.ask)
		if x.want == "" {
			continue // the next answer shows that none came
		}
		if got := p.answered(); !strings.HasPrefix(got, x.want) || !json.Valid([]byte(got)) {
			t.Errorf("%s\nis answered %s\nwant        %s", x.ask, got, x.want)
		}
	}
	for _, r := range script.Received() {
		if strings.Contains(string(r.Params), "http://chat/") {
			t.Error("the chat server's vision address reached the device")
		}
	}
	if n := f.bridge.BadMessages.Get(BadMCP); n != 0 {
		t.Errorf("%d requests were called unusable", n)
	}
}

// A chat server asks once: it waits for a list that is not known yet and never
// gets an empty one instead.
func TestUnknownToolsAreAwaited(t *testing.T) {
	for _, learnt := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			c := pipeServer(t)
			f := newFleet(t, c)
			script := devicetest.NewScript()
			script.Other = func(devicetest.Request) string { return "silent" }
			d := f.connect(devices.TransportMQTT, script)
			f.hello(d)
			p := c.open(t)
			begun := time.Now()
			p.ask(`{"jsonrpc":"2.0","id":1,"method":"tools/list"}`)
			p.ask(`{"jsonrpc":"2.0","id":"first","method":"ping"}`)
			if got := p.answered(); got != `{"jsonrpc":"2.0","id":"first","result":{}}` || time.Since(begun) > time.Second {
				t.Errorf("after %v: %s", time.Since(begun), got)
			}
			want := `{"jsonrpc":"2.0","id":1,"error":{"code":-32000,"message":"the device has not told its tools yet; try again"}}`
			if learnt {
				want = `{"jsonrpc":"2.0","id":1,"result":{"tools":[` + devicetest.Volume + `]}}`
				time.Sleep(3 * time.Second) // of the test's own clock
				again := f.connect(devices.TransportMQTT, devicetest.NewScript())
				again.session.StartMCP(devices.FeaturesUnknown)
			}
			if got := p.answered(); got != want {
				t.Errorf("%s\nwant %s", got, want)
			}
			if waited := time.Since(begun); !learnt && (waited < CatalogWait || waited > CatalogWait+lookLast) || learnt && waited > 3*time.Second+lookLast {
				t.Errorf("answered after %v", waited)
			}
		})
	}
}

// A device without MCP has no tools, which is not the same.
func TestNoTools(t *testing.T) {
	c := server(t)
	f := newFleet(t, c)
	d, p := f.talking(c, devices.TransportMQTT)
	f.ready()
	d.session.StartMCP(devices.FeaturesNone)
	p.ask(`{"jsonrpc":"2.0","id":1,"method":"tools/list"}`)
	if got := p.answered(); got != `{"jsonrpc":"2.0","id":1,"result":{"tools":[]}}` {
		t.Error(got)
	}
}

// A long list comes in pages like the firmware's, each tool once.
func TestToolsArePaged(t *testing.T) {
	tool := func(name string, size int) json.RawMessage {
		return fmt.Appendf(nil, `{"description":"%s","name":%q}`, strings.Repeat("x", size), name)
	}
	var tools []json.RawMessage
	for n := range 40 {
		tools = append(tools, tool(fmt.Sprintf("self.%d", n), 900))
	}
	tools = append(tools, tool("self.huge", 20_000), tool("self.3", 10), tool(`self."quoted"`, 10))
	var names []string
	cursor := ""
	for pages := 1; ; pages++ {
		text, ok := page(tools, cursor)
		var got struct {
			Tools      []struct{ Name string }
			NextCursor string
		}
		if err := json.Unmarshal(text, &got); err != nil || !ok || pages > 20 {
			t.Fatalf("page %d: %v, %t", pages, err, ok)
		}
		if len(text) > PageBytes && len(got.Tools) > 1 {
			t.Errorf("page %d has %d bytes", pages, len(text))
		}
		for _, tool := range got.Tools {
			names = append(names, tool.Name)
		}
		if cursor = got.NextCursor; cursor == "" {
			if pages < 6 {
				t.Errorf("%d pages", pages)
			}
			break
		}
	}
	if len(names) != 42 || names[3] != "self.3" || names[40] != "self.huge" || names[41] != `self."quoted"` {
		t.Errorf("%d tools: %q", len(names), names)
	}
}

// The chat server's calls and those of REST share the device: every one gets its
// own answer, the waiting are bounded, and a slow tool holds up no audio.
func TestCallsMeetThoseOfREST(t *testing.T) {
	c := server(t)
	f := newFleet(t, c)
	script := devicetest.NewScript()
	release := make(chan struct{})
	echo := func(_ string, arguments json.RawMessage) string {
		return fmt.Sprintf(`"result":{"content":[{"type":"text","text":%q}],"isError":false}`, arguments)
	}
	script.Call = func(tool string, arguments json.RawMessage) string { <-release; return echo(tool, arguments) }
	d := f.connect(devices.TransportMQTT, script)
	f.hello(d)
	p := c.open(t)
	f.ready()
	const calls = 6
	for n := range calls {
		p.ask(fmt.Sprintf(`{"jsonrpc":"2.0","id":"n-%d","method":"tools/call","params":{"name":"%s","arguments":{"volume":%d}}}`, n, volume, n))
	}
	var rest sync.WaitGroup
	for n := range calls {
		rest.Go(func() {
			want := fmt.Sprintf(`[{"type":"text","text":"{\"volume\":%d}"}]`, 50+n)
			r, err := f.svc.CallTool(t.Context(), devices.ToolCall{By: devicetest.Admin, Device: id, Tool: volume, Arguments: fmt.Appendf(nil, `{"volume":%d}`, 50+n)})
			if err != nil || string(r.Content) != want {
				t.Errorf("REST got %s, %v; want %s", r.Content, err, want)
			}
		})
	}
	stats := f.svc.Stats()
	devicetest.Eventually(t, "one call runs and the others wait", func() bool { return stats.InFlight.Load() == 1 && stats.Waiting.Load() == 2*calls-1 })
	p.say(theirStart)
	p.play(devicetest.Packet(1))
	d.awaits(t, d.ours(`"type":"tts","state":"start"`), string(devicetest.Packet(1)))
	d.hear(2)
	if f := p.frame(); string(f.Opus) != string(devicetest.Packet(2)) {
		t.Errorf("%q", f.Opus)
	}
	for n := calls; n < MaxRequests+3; n++ {
		p.ask(fmt.Sprintf(`{"jsonrpc":"2.0","id":"n-%d","method":"tools/call","params":{"name":"%s","arguments":{"volume":%d}}}`, n, volume, n))
	}
	refused := map[string]int{}
	for range MaxRequests + 3 - (session.MaxWaitingCalls + 1 - calls) { // what finds a place nowhere
		text := p.answered()
		var e struct{ Error struct{ Message string } }
		if err := json.Unmarshal([]byte(text), &e); err != nil || e.Error.Message == "" {
			t.Fatal(text)
		}
		refused[e.Error.Message]++
	}
	close(release)
	for range session.MaxWaitingCalls + 1 - calls {
		var r struct {
			ID     string
			Result struct{ Content []struct{ Text string } }
		}
		if text := p.answered(); json.Unmarshal([]byte(text), &r) != nil || len(r.Result.Content) != 1 || r.Result.Content[0].Text != `{"volume":`+strings.TrimPrefix(r.ID, "n-")+`}` {
			t.Errorf("%s", text)
		}
	}
	rest.Wait()
}

// A call that is in progress when its chat server goes is not answered to the next.
func TestLateAnswerIsDropped(t *testing.T) {
	t.Parallel()
	c := server(t)
	f := newFleet(t, c)
	script := devicetest.NewScript()
	called := make(chan struct{}, 2)
	script.Call = func(string, json.RawMessage) string { called <- struct{}{}; return "" }
	d := f.connect(devices.TransportWebSocket, script)
	f.hello(d)
	p := c.open(t)
	f.ready()
	p.ask(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"` + volume + `","arguments":{"volume":1}}}`)
	<-called
	_ = p.ws.NetConn().Close()
	devicetest.Eventually(t, "the answer is dropped", func() bool { return f.bridge.Dropped.Get(DropLate) == 1 })
	f.say(d, listenStart)
	p = c.open(t)
	if got := p.text(); got != theirListen {
		t.Error(got)
	}
}

// At most as many requests as MaxRequests are in progress, whatever the device allows.
func TestRequestsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := pipeServer(t)
		f := newFleet(t, c)
		script := devicetest.NewScript()
		script.Other = func(devicetest.Request) string { return "silent" }
		d := f.connect(devices.TransportMQTT, script)
		f.hello(d)
		p := c.open(t)
		for n := range MaxRequests + 1 {
			p.ask(fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"tools/list"}`, n))
		}
		if got, want := p.answered(), fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"error":{"code":-32000,"message":"%d requests are in progress already"}}`, MaxRequests, MaxRequests); got != want {
			t.Errorf("%s\nwant %s", got, want)
		}
	})
}
