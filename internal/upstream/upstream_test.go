package upstream

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/devices/speech"
	"fleetd/internal/devicetest"
	"fleetd/internal/envelope"
)

var transports = []devices.Transport{devices.TransportMQTT, devices.TransportWebSocket}

func TestURL(t *testing.T) {
	for given, want := range map[string]string{
		"ws://h:8000/xiaozhi/v1/":       "ws://h:8000/xiaozhi/v1/?from=mqtt_gateway",
		"wss://h/v1/?from=mqtt_gateway": "wss://h/v1/?from=mqtt_gateway",
		"ws://h/?a=b":                   "ws://h/?a=b&from=mqtt_gateway",
		"ws://h/?from=mqtt_gateway&a=b": "ws://h/?from=mqtt_gateway&a=b",
		"http://h/":                     "", "ws:///x": "", "h:8000": "", "": "", "ws://u:p@h/": "", "ws://h/#x": "", "ws://h/?from=x": "", "ws://h/%zz": "",
	} {
		b, err := New(Options{URL: given, Log: slog.New(slog.DiscardHandler)})
		switch {
		case err == nil && b.url != want:
			t.Errorf("%s becomes %s, want %s", given, b.url, want)
		case err != nil && want != "", err != nil && !strings.HasPrefix(err.Error(), "--voice-upstream: "):
			t.Errorf("%s: %v", given, err)
		}
		if err == nil {
			b.Close()
		}
	}
}

// The request headers are byte for byte those of the gateway where a chat server reads them.
func TestRequestHeader(t *testing.T) {
	token := func(clientID, device string, now time.Time) string {
		return credential.UpstreamToken("Te1st12134", clientID, device, now)
	}
	b, err := New(Options{URL: "ws://h/", Token: token, Version: "1.2.3", Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	for remote, ip := range map[string]string{"203.0.113.9:4711": "203.0.113.9", "[::ffff:203.0.113.9]:1": "203.0.113.9", "[2001:db8::1%eth0]:1": "2001:db8::1", "203.0.113.9": "203.0.113.9", "": "", "broker": ""} {
		h := b.header(devices.Identity{Device: id, ClientID: uuid, Remote: remote}, time.Unix(1754640000, 0))
		for name, want := range map[string]string{"device-id": "aa:bb:cc:dd:ee:ff", "client-id": uuid, "protocol-version": "2", "x-forwarded-for": ip,
			"authorization": "Bearer syQ4C037HBT7oiD1DGUGV36J6wFRooVF4uFF3wIz7QE.1754640000"} {
			if got := h.Get(name); got != want {
				t.Errorf("%s is %q, want %q", name, got, want)
			}
		}
		if _, there := h["X-Forwarded-For"]; there && ip == "" {
			t.Error("an empty X-Forwarded-For")
		}
	}
}

// The hello of TestHello and of every other test is checked by chat.next.
func TestConversationIsDialled(t *testing.T) {
	for _, transport := range transports {
		t.Run(string(transport), func(t *testing.T) {
			c := server(t)
			f := newFleet(t, c)
			d, p := f.conversation(c, transport)
			if uri := p.request.RequestURI; uri != "/xiaozhi/v1/?from=mqtt_gateway" {
				t.Errorf("it requests %s", uri)
			}
			for name, want := range map[string]string{"Device-Id": string(id), "Client-Id": uuid, "Protocol-Version": "2", "Authorization": "Bearer test-token", "User-Agent": "fleetd/1.2.3"} {
				if got := p.request.Header.Get(name); got != want {
					t.Errorf("%s is %q, want %q", name, got, want)
				}
			}
			d.session.Close(devices.CloseRevoked)
			p.ended()
			devicetest.Eventually(t, "the end is counted", func() bool { return f.bridge.Connections.Get(Ended) == 1 })
			if n := f.bridge.Connections.Get(Dialled); n != 1 {
				t.Errorf("%d dials", n)
			}
		})
	}
}

func TestAudioPassesBothWays(t *testing.T) {
	t.Parallel()
	for _, transport := range transports {
		t.Run(string(transport), func(t *testing.T) {
			c := server(t)
			f := newFleet(t, c)
			d, p := f.conversation(c, transport)
			const packets = 50
			for n := range packets {
				d.sendAudio(n)
			}
			for n := range packets {
				if f := p.frame(); !bytes.Equal(f.Opus, devicetest.Packet(n)) || f.Timestamp != uint32(60*n) {
					t.Fatalf("packet %d is %+v", n, f)
				}
			}
			p.send(chatStart)
			want := []string{d.message(`"type":"tts","state":"start"`)}
			for n := range 10 {
				p.play(devicetest.Packet(100 + n))
				want = append(want, string(devicetest.Packet(100+n)))
			}
			p.send(chatStop)
			d.expect(t, append(want, d.message(`"type":"tts","state":"stop"`))...)
			if up, down := f.bridge.Frames.Get(Up), f.bridge.Frames.Get(Down); up != packets || down != 10 {
				t.Errorf("%d frames up, %d down", up, down)
			}
		})
	}
}

// The device speaks directly after its hello, before the chat server is ready.
func TestNothingIsLostBeforeTheServerIsReady(t *testing.T) {
	c := server(t)
	f := newFleet(t, c)
	d := f.connect(devices.TransportMQTT, devicetest.NewScript())
	f.hello(d)
	const burst = 40
	for n := range burst {
		d.sendAudio(n)
	}
	f.send(d, `{"session_id":"`+d.c.ID()+`","type":"listen","state":"detect","text":"你好小智"}`)
	f.send(d, listenStart)
	d.sendAudio(burst)
	p := c.next(t)
	d.sendAudio(burst + 1)
	p.send(`{"type":"stt","text":"before hello"}`)
	p.send(`{"type":"hello","transport":"websocket","session_id":"the\"irs"}`)
	d.sendAudio(burst + 2)
	for n := range burst {
		if f := p.frame(); !bytes.Equal(f.Opus, devicetest.Packet(n)) {
			t.Fatalf("packet %d is %q", n, f.Opus)
		}
	}
	for _, want := range []string{`{"session_id":"the\"irs","type":"listen","state":"detect","text":"你好小智"}`, strings.Replace(chatListen, "theirs", `the\"irs`, 1)} {
		if got := p.text(); got != want {
			t.Errorf("message %s, want %s", got, want)
		}
	}
	for n := range 3 {
		if f := p.frame(); !bytes.Equal(f.Opus, devicetest.Packet(burst+n)) {
			t.Fatalf("packet %d is %q", burst+n, f.Opus)
		}
	}
	d.expect(t, d.message(`"type":"stt","text":"before hello"`))
}

// When the queue is full, new items are refused and counted.
func TestQueueIsBounded(t *testing.T) {
	c := server(t)
	f := newFleet(t, c)
	d := f.connect(devices.TransportMQTT, devicetest.NewScript())
	f.hello(d)
	p := c.next(t)
	for n := range MaxQueuedFrames + 100 {
		d.sendAudio(n)
	}
	if n := f.bridge.Dropped.Get(DropFull); n != 100 {
		t.Errorf("%d packets were refused, want 100", n)
	}
	session := f.bridge.session(d.c)
	for range MaxQueuedMessages + 5 {
		session.message("custom", []byte(`{"type":"custom"}`))
	}
	if n := f.bridge.Dropped.Get(DropFull); n != 105 {
		t.Errorf("%d items were refused, want 105", n)
	}
	p.send(`{"type":"hello","session_id":"theirs"}`)
	for n := range MaxQueuedFrames {
		if f := p.frame(); !bytes.Equal(f.Opus, devicetest.Packet(n)) {
			t.Fatalf("packet %d is %q", n, f.Opus)
		}
	}
	for range MaxQueuedMessages {
		if text := p.text(); text != `{"session_id":"theirs","type":"custom"}` {
			t.Fatal(text)
		}
	}
	session.message("custom", fmt.Appendf(nil, `{"type":"custom","payload":"%s"}`, strings.Repeat("x", MaxQueuedBytes)))
	if n := f.bridge.Dropped.Get(DropFull); n != 106 {
		t.Errorf("%d items were refused, want 106", n)
	}
}

func TestMessagesPassBothWays(t *testing.T) {
	c := server(t)
	f := newFleet(t, c)
	d, p := f.conversation(c, devices.TransportMQTT)
	f.send(d, `{"type":"custom","payload":{"session_id":"inner","é\u0041":[1.0,null]}}`)
	if got := p.text(); got != `{"session_id":"theirs","type":"custom","payload":{"session_id":"inner","é\u0041":[1.0,null]}}` {
		t.Error(got)
	}
	f.send(d, `{"session_id":"x","type":"abort","session_id":"y","reason":"wake_word_detected"}`)
	if got := p.text(); got != `{"session_id":"theirs","type":"abort","reason":"wake_word_detected"}` {
		t.Error(got)
	}
	stop := fmt.Sprintf(`{"type":"tts","state":"stop","session_id":"%s"}`, d.c.ID()) // the core's response to abort
	d.expect(t, stop)
	p.send(`{"type":"hello","session_id":"again"}`)
	p.send(`{"type":"stt","text":"hi","session_id":"theirs"}`)
	p.send(`{"type":"llm","emotion":"happy","text":"😀"}`)
	p.send(`{"session_id":"theirs","type":"tts","state":"start","session_id":"twice"}`)
	p.send(`{"type":"tts","state":"sentence_start","text":"Hello"}`)
	d.expect(t, stop, d.message(`"type":"stt","text":"hi"`), d.message(`"type":"llm","emotion":"happy","text":"😀"`),
		d.message(`"type":"tts","state":"start"`), d.message(`"type":"tts","state":"sentence_start","text":"Hello"`))
	f.send(d, listenStart)
	if got := p.text(); got != chatListen {
		t.Errorf("the chat server's second hello changed the session: %s", got)
	}
}

// The device's goodbye ends the connection, and no goodbye is sent back.
func TestGoodbyeOfTheDevice(t *testing.T) {
	c := server(t)
	f := newFleet(t, c)
	d, p := f.conversation(c, devices.TransportMQTT)
	f.send(d, `{"session_id":"`+d.c.ID()+`","type":"goodbye"}`)
	p.ended()
	devicetest.Eventually(t, "the end is counted", func() bool { return f.bridge.Connections.Get(Ended) == 1 })
	d.expect(t)
	f.hello(d)
	c.open(t)
	if n := f.bridge.Connections.Get(Dialled); n != 2 {
		t.Errorf("%d dials", n)
	}
	kept := 0
	f.bridge.sessions.Range(func(any, any) bool { kept++; return true })
	if kept != 1 {
		t.Errorf("%d conversations are kept, want 1", kept)
	}
}

// A hello without a goodbye replaces the conversation and its chat server.
func TestHelloReplaces(t *testing.T) {
	c := server(t)
	f := newFleet(t, c)
	d, first := f.conversation(c, devices.TransportMQTT)
	f.hello(d)
	second := c.open(t)
	first.ended()
	d.sendAudio(7)
	if f := second.frame(); !bytes.Equal(f.Opus, devicetest.Packet(7)) {
		t.Errorf("%q", f.Opus)
	}
	d.expect(t)
}

// Over UDP a frame or the end may arrive before Begin.
func TestAnyOrder(t *testing.T) {
	c := server(t)
	f := newFleet(t, c)
	d := f.connect(devices.TransportMQTT, devicetest.NewScript())
	opened := func() *speech.Conversation {
		t.Helper()
		if _, err := d.session.OpenAudio(helloOf(t), "udp", func(c *speech.Conversation) (speech.AudioPath, error) { d.c = c; return path{d}, nil }); err != nil {
			t.Fatal(err)
		}
		return d.c
	}
	ended := opened()
	d.sendAudio(0)
	opened() // replaces it before Begin
	f.bridge.Begin(ended)
	d.sendAudio(1)
	d.sendAudio(2)
	d.session.BeginConversation()
	d.session.BeginConversation()
	p := c.open(t)
	for n := 1; n <= 2; n++ {
		if f := p.frame(); !bytes.Equal(f.Opus, devicetest.Packet(n)) {
			t.Errorf("packet %d is %q", n, f.Opus)
		}
	}
	for range 2 * maxEarly {
		f.bridge.Audio(opened(), envelope.Frame{Opus: devicetest.Packet(3)})
	}
	p.ended()
	f.bridge.mu.Lock()
	defer f.bridge.mu.Unlock()
	if n := len(f.bridge.early); n != maxEarly {
		t.Errorf("%d early conversations are kept", n)
	}
	if n := f.bridge.Connections.Get(Dialled); n != 1 {
		t.Errorf("%d dials", n)
	}
}
