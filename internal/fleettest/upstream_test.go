package fleettest

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gorilla/websocket"

	"fleetd/internal/apiclient"
	"fleetd/internal/devicetest"
)

// chat is a chat server that speaks as xiaozhi-server does to its gateway.
type chat struct {
	server *http.Server
	opened chan *chatter // one for each conversation
}

// chatter is one conversation at the chat server.
type chatter struct {
	ws      *websocket.Conn
	request *http.Request
	hello   string
	texts   chan string
	frames  chan []byte // bare Opus
}

// chatAt serves a chat server at address.
func chatAt(t *testing.T, address string) *chat {
	t.Helper()
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	c := &chat{opened: make(chan *chatter, 10)}
	var serving sync.WaitGroup
	c.server = &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ws, err := (&websocket.Upgrader{}).Upgrade(w, r, nil)
		if err != nil {
			t.Error(err)
			return
		}
		t.Cleanup(func() { _ = ws.Close() })
		_, hello, err := ws.ReadMessage()
		if err != nil { // the conversation was over before it began
			return
		}
		x := &chatter{ws: ws, request: r, hello: string(hello), texts: make(chan string, 1000), frames: make(chan []byte, 1000)}
		c.opened <- x
		x.read()
	})}
	serving.Go(func() { _ = c.server.Serve(listener) })
	t.Cleanup(func() {
		_ = c.server.Close()
		serving.Wait()
	})
	return c
}

func (x *chatter) read() {
	for {
		kind, data, err := x.ws.ReadMessage()
		if err != nil {
			return
		}
		if kind == websocket.TextMessage {
			x.texts <- string(data)
		} else if len(data) > 16 && int(binary.BigEndian.Uint32(data[12:])) == len(data)-16 {
			x.frames <- data[16:]
		} else {
			x.frames <- nil
		}
	}
}

func (x *chatter) say(t *testing.T, text string) {
	t.Helper()
	if err := x.ws.WriteMessage(websocket.TextMessage, []byte(text)); err != nil {
		t.Error(err)
	}
}

func (x *chatter) play(t *testing.T, opus []byte) {
	t.Helper()
	header := make([]byte, 16)
	header[0] = 1
	binary.BigEndian.PutUint32(header[12:], uint32(len(opus)))
	if err := x.ws.WriteMessage(websocket.BinaryMessage, append(header, opus...)); err != nil {
		t.Error(err)
	}
}

// await takes from ch, for some time.
func await[T any](t testing.TB, what string, ch <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-ch:
	case <-time.After(20 * time.Second):
		t.Fatalf("did not come within 20 s: %s", what)
	}
	return v
}

// awaitText waits for a message that has all of the parts.
func awaitText(t *testing.T, texts <-chan string, parts ...string) string {
	t.Helper()
next:
	for {
		text := await(t, strings.Join(parts, " "), texts)
		for _, part := range parts {
			if !strings.Contains(text, part) {
				continue next
			}
		}
		return text
	}
}

// A chat server takes the conversation, fleetd keeps MCP to itself; when the
// chat server dies, the device is notified, and can begin again.
func TestVoiceUpstream(t *testing.T) {
	t.Parallel()
	const id, frames = "02:00:00:00:05:01", 40
	address := freePort(t)
	server := chatAt(t, address)
	node := programs.Start(t, "--voice-upstream", "ws://"+address+"/xiaozhi/v1/")
	script := devicetest.NewScript()
	d := boot(t, node.Info.OTA, id).dial(t, script)
	node.AwaitReady(t, 1)
	c := d.hello(t)
	x := await(t, "the chat server's connection", server.opened)
	if h := x.request.Header; h.Get("Device-Id") != id || h.Get("Client-Id") != clientOf(id) || h.Get("Protocol-Version") != "2" || h.Get("Authorization") != "Bearer test-token" ||
		x.request.URL.Query().Get("from") != "mqtt_gateway" {
		t.Errorf("request %s %v", x.request.URL, h)
	}
	if !strings.Contains(x.hello, `"transport":"websocket"`) || !strings.Contains(x.hello, `"sample_rate":16000`) {
		t.Errorf("hello %s", x.hello)
	}
	x.say(t, `{"type":"hello","transport":"websocket","session_id":"theirs","audio_params":{"sample_rate":24000,"frame_duration":60}}`)

	// REST calls all the while.
	ctx, stop := context.WithCancel(t.Context())
	var callers sync.WaitGroup
	made := 0
	callers.Go(func() {
		for ; ctx.Err() == nil; made++ {
			r, err := node.Call(t.Context(), id, volume, apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":7}`), Timeout: 5 * time.Second})
			if err != nil || r.IsError {
				t.Errorf("call %d during the conversation: %+v, %v", made, r, err)
				return
			}
			select {
			case <-time.After(10 * time.Millisecond):
			case <-ctx.Done():
			}
		}
	})
	if err := d.Send(`{"session_id":"` + c.Session + `","type":"listen","state":"start","mode":"auto"}`); err != nil {
		t.Fatal(err)
	}
	every(t, frameTime/3, frames, func(int) { c.say(t) })
	for n := range frames {
		if got, ok := numberOf(await(t, "a frame of the device", x.frames)); !ok || got != uint32(n+1) {
			t.Fatalf("the chat server received frame %d, %t, as number %d", got, ok, n+1)
		}
	}
	awaitText(t, x.texts, `"type":"listen"`, `"state":"start"`)
	x.say(t, `{"type":"stt","session_id":"theirs","text":"hello"}`)
	x.say(t, `{"type":"tts","session_id":"theirs","state":"start"}`)
	for n := range frames {
		x.play(t, frame(uint32(5000+n)))
	}
	for n := range frames / 2 { // 1.2 s; the sentence goes on
		if got, ok := numberOf(await(t, "a frame of the chat server", c.Packets)); !ok || got != uint32(5000+n) {
			t.Fatalf("the device received frame %d, %t, as number %d", got, ok, n)
		}
	}
	// The chat server's own tool calls are answered by fleetd, under its ids.
	x.say(t, `{"type":"mcp","session_id":"theirs","payload":{"jsonrpc":"2.0","id":77,"method":"tools/call","params":{"name":"`+volume+`","arguments":{"volume":9}}}}`)
	awaitText(t, x.texts, `"type":"mcp"`, `"id":77`, `"isError":false`)

	if err := server.server.Close(); err != nil {
		t.Error(err)
	}
	_ = x.ws.NetConn().Close() // killed: no Close frame
	devicetest.Eventually(t, "the device gets a goodbye", func() bool {
		for _, text := range d.Messages() {
			if strings.Contains(text, `"type":"goodbye"`) && strings.Contains(text, c.Session) {
				return true
			}
		}
		return false
	})
	stop()
	callers.Wait()
	if made < 20 {
		t.Errorf("only %d calls were made meanwhile", made)
	}
	messages := strings.Join(d.Messages(), "\n")
	for _, want := range []string{`"type":"stt"`, `"state":"start"`} {
		if !strings.Contains(messages, want) {
			t.Errorf("the device never got %s:\n%s", want, messages)
		}
	}
	if v, err := node.Device(t.Context(), id); err != nil || v.State != "online" || v.Audio.Open {
		t.Errorf("after the goodbye: %+v, %v", v, err)
	}

	server = chatAt(t, address)
	begun := time.Now()
	again := d.hello(t)
	if took := time.Since(begun); took > time.Second || again.Session == c.Session {
		t.Errorf("hello took %v, session %s after %s", took, again.Session, c.Session)
	}
	x = await(t, "the new connection", server.opened)
	x.say(t, `{"type":"hello","transport":"websocket","session_id":"theirs-2","audio_params":{"sample_rate":24000,"frame_duration":60}}`)
	again.say(t)
	if n, ok := numberOf(await(t, "a frame", x.frames)); !ok || n != 1 {
		t.Errorf("frame %d, %t", n, ok)
	}
	if calls := fmt.Sprint(node.Metric(t, "fleetd_calls_total", `outcome="ok"`)); calls != fmt.Sprint(made+1) {
		t.Errorf("%s calls counted, %d made", calls, made+1)
	}
}
