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

// sendMCP sends one MCP payload.
func (p *peer) sendMCP(payload string) {
	p.t.Helper()
	p.send(`{"session_id":"theirs","type":"mcp","payload":` + payload + `}`)
}

// mcpResponse returns the payload of the next message, which must be an MCP response.
func (p *peer) mcpResponse() string {
	p.t.Helper()
	text := p.text()
	payload, ours := strings.CutPrefix(text, `{"session_id":"theirs","type":"mcp","payload":`)
	if !ours {
		p.t.Fatalf("%s is not an MCP response", text)
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
		{`{"jsonrpc":"2.0","id":2,"method":"tools/list","params":{"cursor":"nobody"}}`, `{"jsonrpc":"2.0","id":2,"error":{"code":-32602,"message":"unknown cursor \"nobody\"; list the tools again without a cursor"}}`},
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
		p.sendMCP(x.ask)
		if x.want == "" {
			continue // the next response shows that there was none
		}
		if got := p.mcpResponse(); !strings.HasPrefix(got, x.want) || !json.Valid([]byte(got)) {
			t.Errorf("%s\ngets the response %s\nwant        %s", x.ask, got, x.want)
		}
	}
	for _, r := range script.Received() {
		if strings.Contains(string(r.Params), "http://chat/") {
			t.Error("the chat server's vision address reached the device")
		}
	}
	if n := f.bridge.BadMessages.Get(BadMCP); n != 0 {
		t.Errorf("%d requests were counted as unusable", n)
	}
}

// A chat server requests the tools once: the response waits for a list that is not known
// yet, and is never empty instead.
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
			p.sendMCP(`{"jsonrpc":"2.0","id":1,"method":"tools/list"}`)
			p.sendMCP(`{"jsonrpc":"2.0","id":"first","method":"ping"}`)
			if got := p.mcpResponse(); got != `{"jsonrpc":"2.0","id":"first","result":{}}` || time.Since(begun) > time.Second {
				t.Errorf("after %v: %s", time.Since(begun), got)
			}
			want := `{"jsonrpc":"2.0","id":1,"error":{"code":-32000,"message":"the device has not sent its tools yet; try again"}}`
			if learnt {
				want = `{"jsonrpc":"2.0","id":1,"result":{"tools":[` + devicetest.Volume + `]}}`
				time.Sleep(3 * time.Second) // of the test's own clock
				again := f.connect(devices.TransportMQTT, devicetest.NewScript())
				again.session.StartMCP(devices.FeaturesUnknown)
			}
			if got := p.mcpResponse(); got != want {
				t.Errorf("%s\nwant %s", got, want)
			}
			if waited := time.Since(begun); !learnt && (waited < CatalogWait || waited > CatalogWait+pollLongest) || learnt && waited > 3*time.Second+pollLongest {
				t.Errorf("answered after %v", waited)
			}
		})
	}
}

// The list of a device without MCP is known, and empty.
func TestNoTools(t *testing.T) {
	c := server(t)
	f := newFleet(t, c)
	d, p := f.conversation(c, devices.TransportMQTT)
	f.ready()
	d.session.StartMCP(devices.FeaturesNone)
	p.sendMCP(`{"jsonrpc":"2.0","id":1,"method":"tools/list"}`)
	if got := p.mcpResponse(); got != `{"jsonrpc":"2.0","id":1,"result":{"tools":[]}}` {
		t.Error(got)
	}
}

// A long list has pages like the firmware's, and contains each tool once.
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

// The calls of the chat server and of REST share the device: each gets its own result, the
// number of waiting calls is limited, and a slow tool does not delay audio.
func TestConcurrentCallsWithREST(t *testing.T) {
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
		p.sendMCP(fmt.Sprintf(`{"jsonrpc":"2.0","id":"n-%d","method":"tools/call","params":{"name":"%s","arguments":{"volume":%d}}}`, n, volume, n))
	}
	var wait sync.WaitGroup
	for n := range calls {
		wait.Go(func() {
			want := fmt.Sprintf(`[{"type":"text","text":"{\"volume\":%d}"}]`, 50+n)
			r, err := f.svc.CallTool(t.Context(), devices.ToolCall{Principal: devicetest.Admin, Device: id, Tool: volume, Arguments: fmt.Appendf(nil, `{"volume":%d}`, 50+n)})
			if err != nil || string(r.Content) != want {
				t.Errorf("REST got %s, %v; want %s", r.Content, err, want)
			}
		})
	}
	stats := f.svc.Stats()
	devicetest.Eventually(t, "one call runs and the others wait", func() bool { return stats.InFlight.Load() == 1 && stats.Waiting.Load() == 2*calls-1 })
	p.send(chatStart)
	p.play(devicetest.Packet(1))
	d.expect(t, d.message(`"type":"tts","state":"start"`), string(devicetest.Packet(1)))
	d.sendAudio(2)
	if f := p.frame(); string(f.Opus) != string(devicetest.Packet(2)) {
		t.Errorf("%q", f.Opus)
	}
	for n := calls; n < MaxRequests+3; n++ {
		p.sendMCP(fmt.Sprintf(`{"jsonrpc":"2.0","id":"n-%d","method":"tools/call","params":{"name":"%s","arguments":{"volume":%d}}}`, n, volume, n))
	}
	refused := map[string]int{}
	for range MaxRequests + 3 - (session.MaxWaitingCalls + 1 - calls) { // those above the limits
		text := p.mcpResponse()
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
		if text := p.mcpResponse(); json.Unmarshal([]byte(text), &r) != nil || len(r.Result.Content) != 1 || r.Result.Content[0].Text != `{"volume":`+strings.TrimPrefix(r.ID, "n-")+`}` {
			t.Errorf("%s", text)
		}
	}
	wait.Wait()
}

// The result of a call whose chat server has disconnected is not sent to the next one.
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
	p.sendMCP(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"` + volume + `","arguments":{"volume":1}}}`)
	<-called
	_ = p.ws.NetConn().Close()
	devicetest.Eventually(t, "the answer is dropped", func() bool { return f.bridge.Dropped.Get(DropLate) == 1 })
	f.send(d, listenStart)
	p = c.open(t)
	if got := p.text(); got != chatListen {
		t.Error(got)
	}
}

// At most MaxRequests requests are in progress, even if the device would allow more.
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
			p.sendMCP(fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"tools/list"}`, n))
		}
		if got, want := p.mcpResponse(), fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"error":{"code":-32000,"message":"%d requests are already in progress"}}`, MaxRequests, MaxRequests); got != want {
			t.Errorf("%s\nwant %s", got, want)
		}
	})
}
