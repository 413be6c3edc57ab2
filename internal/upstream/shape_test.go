package upstream

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/gorilla/websocket"

	"fleetd/internal/devices"
	"fleetd/internal/devices/speech"
	"fleetd/internal/devicetest"
	"fleetd/internal/envelope"
)

// No message of a chat server ends the conversation: invalid ones are counted by kind.
func TestAnyShape(t *testing.T) {
	nested := func(n int) string { return strings.Repeat(`{"a":`, n) + "1" + strings.Repeat("}", n) }
	frame := func(header string, opus []byte) string { return header + string(opus) }
	for _, x := range []struct {
		kind MessageError
		text string
	}{
		{BadMCP, `{"type":"mcp"}`}, {BadMCP, `{"type":"mcp","payload":null}`}, {BadMCP, `{"type":"mcp","payload":7}`}, {BadMCP, `{"type":"mcp","payload":"{}"}`},
		{BadMCP, `{"type":"mcp","payload":[]}`}, {BadMCP, `{"type":"mcp","payload":[{"jsonrpc":"2.0","id":1,"method":"ping"}]}`}, {BadMCP, `{"type":"mcp","payload":{}}`},
		{BadMCP, `{"type":"mcp","payload":{"id":1}}`}, {BadMCP, `{"type":"mcp","payload":{"id":1,"method":null}}`}, {BadMCP, `{"type":"mcp","payload":{"id":{},"method":"ping"}}`},
		{BadMCP, `{"type":"mcp","payload":{"id":[1],"method":"ping"}}`}, {BadMCP, `{"type":"mcp","payload":{"id":true,"method":"ping"}}`},
		{BadMCP, `{"type":"mcp","payload":{"id":1,"result":{}}}`}, {BadMCP, `{"type":"mcp","payload":{"id":"` + strings.Repeat("x", MaxIDLength) + `","method":"ping"}}`},
		{BadMCP, `{"type":"mcp","payload":{"id":1,"method":["ping"],"params":{}}}`},
		{BadEnvelope, `[]`}, {BadEnvelope, `[[[]]]`}, {BadEnvelope, `1`}, {BadEnvelope, `-0.1e9`}, {BadEnvelope, `null`}, {BadEnvelope, `true`}, {BadEnvelope, `"mcp"`}, {BadEnvelope, `{}`},
		{BadEnvelope, `{"type":1}`}, {BadEnvelope, `{"type":null,"session_id":{}}`}, {BadEnvelope, `{"type":["tts"]}`},
		{BadJSON, ``}, {BadJSON, ` `}, {BadJSON, `{`}, {BadJSON, `认证失败`}, {BadJSON, `{"type":"tts"`}, {BadJSON, `{"type":"stt","text":"say "hi""}`}, {BadJSON, `{"type":"mcp","payload":` + nested(10_000) + `}`},
		{BadJSON, `{"type":"x\ud"}`}, {BadJSON, "{\"type\":\"a\x00b\"}"},
		{BadRefused, `{"type":"tts"}`}, {BadRefused, `{"type":"tts","state":3}`}, {BadRefused, `{"type":"alert"}`}, {BadRefused, `{"type":"alert","status":1,"message":2,"emotion":3}`},
		{BadRefused, `{"type":"custom","payload":"` + strings.Repeat("x", speech.MaxMessage) + `"}`},
		{BadTooLarge, `{"type":"stt","text":"` + strings.Repeat("x", 1<<20) + `"}`}, {BadTooLarge, strings.Repeat("x", MaxText+1)}, {BadJSON, strings.Repeat("x", MaxText)},
	} {
		t.Run(fmt.Sprintf("%s %.30q", x.kind, x.text), func(t *testing.T) { shape(t, websocket.TextMessage, x.kind, x.text) })
	}
	for _, x := range []struct {
		kind MessageError
		data string
	}{
		{BadFrame, ""}, {BadFrame, "x"}, {BadFrame, strings.Repeat("\x00", headerLength)}, {BadFrame, strings.Repeat("\xff", 200)},
		{BadFrame, string(devicetest.Packet(1))}, {BadFrame, frame("\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02", []byte("abc"))},
		{BadFrame, frame("\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\xff\xff", []byte("abc"))},
		{BadAudio, frame("\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01", []byte("\x03"))}, // code 3 without a count
		{BadTooLarge, strings.Repeat("x", MaxBinary+1)},
	} {
		t.Run(fmt.Sprintf("%s %.30q", x.kind, x.data), func(t *testing.T) { shape(t, websocket.BinaryMessage, x.kind, x.data) })
	}
}

// shape sends one message, whole and in fragments, and checks that the conversation
// continues.
func shape(t *testing.T, kind int, want MessageError, data string) {
	c := server(t)
	f := newFleet(t, c)
	d, p := f.conversation(c, devices.TransportMQTT)
	if err := p.ws.WriteMessage(kind, []byte(data)); err != nil {
		t.Fatal(err)
	}
	w, err := p.ws.NextWriter(kind)
	if err != nil {
		t.Fatal(err)
	}
	for piece := []byte(data); len(piece) > 0; { // 4 KB, the buffer's size, in each fragment
		n := min(len(piece), 5000)
		if _, err := w.Write(piece[:n]); err != nil {
			t.Fatal(err)
		}
		piece = piece[n:]
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	p.sendMCP(`{"jsonrpc":"2.0","id":1,"method":"ping"}`)
	if got := p.mcpResponse(); got != `{"jsonrpc":"2.0","id":1,"result":{}}` {
		t.Error(got)
	}
	p.send(`{"type":"stt","text":"hi"}`)
	d.expect(t, d.message(`"type":"stt","text":"hi"`))
	f.bridge.BadMessages.Each(func(kind MessageError, n int64) {
		if kind != want || n != 2 {
			t.Errorf("%d counted as %s, want 2 as %s", n, kind, want)
		}
	})
	if f.bridge.BadMessages.Len() == 0 {
		t.Error("it is not counted")
	}
}

// An invalid session id is replaced by an empty one.
func TestOddSessionID(t *testing.T) {
	for hello, want := range map[string]string{
		`{"type":"hello"}`: "", `{"type":"hello","session_id":7}`: "", `{"type":"hello","session_id":"` + strings.Repeat("x", MaxIDLength+1) + `"}`: "",
		`{"type":"hello","session_id":null,"session_id":"b"}`: "b",
	} {
		c := server(t)
		f := newFleet(t, c)
		d := f.connect(devices.TransportMQTT, devicetest.NewScript())
		f.hello(d)
		p := c.next(t)
		p.send(hello)
		f.send(d, listenStart)
		if got := p.text(); got != strings.Replace(chatListen, "theirs", want, 1) {
			t.Errorf("%.60s: %s", hello, got)
		}
	}
}

// FuzzUpstreamMessage checks that no message causes a panic, that messages to the device are
// valid, belong to the conversation and are not MCP, and that responses are JSON-RPC.
func FuzzUpstreamMessage(f *testing.F) {
	for _, text := range []string{`{"type":"mcp"}`, `{"type":"mcp","payload":{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{"cursor":"a","withUserTools":true}}}`,
		`{"type":"mcp","payload":{"id":"x","method":"tools/call","params":{"name":"self.reboot","arguments":{}}}}`, `{"type":"mcp","payload":{"id":1,"method":"initialize"}}`,
		chatStart, chatStop, `{"type":"hello","session_id":"a\"b"}`, `{"type":"goodbye"}`, `{"type":"custom","session_id":1,"a\u0022":[{}]}`, `[]`, `{"type":"alert"}`} {
		f.Add(false, []byte(text))
	}
	f.Add(true, append([]byte("\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x11"), devicetest.Packet(1)...))
	f.Add(true, []byte("short"))
	fl := newFleet(f, &chat{url: "ws://192.0.2.1/"})
	d := fl.connect(devices.TransportMQTT, devicetest.NewScript())
	if _, err := d.session.OpenAudio(helloOf(f), "udp", func(c *speech.Conversation) (speech.AudioPath, error) { d.c = c; return path{d}, nil }); err != nil {
		f.Fatal(err)
	}
	d.session.StartMCP(devices.FeaturesMCP)
	fl.ready()
	f.Fuzz(func(t *testing.T, binary bool, data []byte) {
		session := newBridgeSession(fl.bridge, d.c)
		session.phase, session.running = phaseWanted, true
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		session.ctx, session.cancel = ctx, cancel
		l := &link{t: session, ctx: ctx, gotHello: true}
		session.link = l
		kind := websocket.TextMessage
		if binary {
			kind = websocket.BinaryMessage
		}
		before := len(d.received())
		if err := l.handle(kind, data); err != nil && (binary || !bytes.Contains(data, []byte("goodbye")) && !bytes.ContainsRune(data, '\\')) {
			t.Errorf("%q ends the connection: %v", data, err)
		}
		for l.calls.Load() > 0 { // requests are answered at once, because the device is a script
			runtime.Gosched()
		}
		for _, it := range session.queue {
			var answer struct {
				JSONRPC       string
				ID            json.RawMessage
				Result, Error json.RawMessage
			}
			if json.Unmarshal(it.data, &answer) != nil || answer.JSONRPC != "2.0" || answer.ID == nil || (answer.Result == nil) == (answer.Error == nil) {
				t.Errorf("%q gets the response %q", data, it.data)
			}
		}
		for _, got := range d.received()[before:] {
			if !strings.HasPrefix(got, "{") {
				continue // a packet, of this message or an earlier one
			}
			if m, err := envelope.Parse([]byte(got)); err != nil || string(m.SessionID) != d.c.ID() || string(m.Type) == "mcp" || string(m.Type) == "hello" {
				t.Errorf("%q becomes %q", data, got)
			}
		}
	})
}
