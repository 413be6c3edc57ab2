package firmware

import (
	"errors"
	"net"
	"strings"
	"testing"
)

func TestReadAudioRefuses(t *testing.T) {
	const key = "000102030405060708090a0b0c0d0e0f"
	good := `{"server":"127.0.0.1","port":1,"key":"` + key + `","nonce":"` + key + `"}`
	a, err := ReadAudio([]byte(`{"type":"hello","transport":"udp","session_id":"s","udp":` + good + `}`))
	if err != nil || a.Session != "s" || a.Server.String() != "127.0.0.1:1" || a.SSRC() != [4]byte{4, 5, 6, 7} {
		t.Fatalf("%+v, %v", a, err)
	}
	if p := a.SealAs(7, []byte("opus")); len(p) != AudioHeader+4 || p[15] != 7 {
		t.Errorf("packet %x", p)
	}
	for _, udp := range []string{"{}", `{"server":"127.0.0.1","port":1,"key":"00","nonce":"00"}`, `{"server":"x","port":1,"key":"` + key + `","nonce":"` + key + `"}`,
		`{"server":"127.0.0.1","port":1,"key":"` + key + `","nonce":"0100"}`} {
		if _, err := ReadAudio([]byte(`{"type":"hello","transport":"udp","udp":` + udp + `}`)); err == nil {
			t.Errorf("%s is accepted", udp)
		}
	}
	if _, err := ReadAudio([]byte(`{"type":"hello","transport":"websocket","udp":` + good + `}`)); err == nil {
		t.Error("a hello of another transport is accepted")
	}
}

// CONNECT has what the login has, a refusal is an error, and messages of any length come through both ways.
func TestLineOverMQTT(t *testing.T) {
	b := newFakeBroker(t)
	l := Login{Endpoint: b.ln.Addr().String(), ClientID: "02f1ee000000", Username: "client:u", Password: "pw", PublishTopic: "fleetd/02f1ee000000/up", Keepalive: 120}
	line, err := l.Dial(t.Context(), Defaults())
	if err != nil {
		t.Fatal(err)
	}
	defer line.Close()
	c := b.accept()
	if want := "\x00\x04MQTT\x04\xc2\x00\x78\x00\x0c02f1ee000000\x00\x08client:u\x00\x02pw"; c.connect != want {
		t.Errorf("CONNECT %q\nwant    %q", c.connect, want)
	}
	for _, n := range []int{1, 103, 104, 300, 16_359, 16_360, 60_000} {
		want := strings.Repeat("x", n)
		if err := line.Send([]byte(want)); err != nil {
			t.Fatal(err)
		}
		if got := c.text(); got != want {
			t.Errorf("%d of %d bytes sent", len(got), n)
		}
		if _, err := c.Write([]byte{mqttPingResp << 4, 0}); err != nil { // passed over
			t.Fatal(err)
		}
		c.send(want)
		if m, err := line.Receive(); err != nil || m.Audio || string(m.Data) != want {
			t.Errorf("%d of %d bytes received, %v", len(m.Data), n, err)
		}
	}
	if err := line.SendAudio([]byte("opus")); err == nil {
		t.Error("audio is sent over MQTT")
	}
	b.mu.Lock()
	b.connack = 5
	b.mu.Unlock()
	var refused connackError
	if _, err := l.Dial(t.Context(), Defaults()); !errors.As(err, &refused) || refused != 5 {
		t.Errorf("a refusal is %v", err)
	}
	server, device := net.Pipe()
	_ = server.Close()
	if _, err := l.Open(t.Context(), device); err == nil {
		t.Error("a server that is gone logs the device in")
	}
}

func TestLineOverWebSocket(t *testing.T) {
	s := newFakeServer(t)
	l := Login{URL: strings.Replace(s.base, "http", "ws", 1) + "/xiaozhi/v1/", Device: "d", Client: "c", Token: "tok", Version: 2}
	line, err := l.Dial(t.Context(), Defaults())
	if err != nil {
		t.Fatal(err)
	}
	defer line.Close()
	c := s.accept()
	if h := c.header; h.Get("Device-Id") != "d" || h.Get("Client-Id") != "c" || h.Get("Authorization") != "Bearer tok" || h.Get("Protocol-Version") != "2" {
		t.Errorf("headers %v", h)
	}
	if err := line.SendAudio([]byte("opus")); err != nil {
		t.Fatal(err)
	}
	opcode, frame := c.read(t)
	if opus, _, err := unpackAudio(2, []byte(frame)); opcode != opBinary || err != nil || string(opus) != "opus" {
		t.Errorf("audio is opcode %d, %q, %v", opcode, opus, err)
	}
	c.frame(t, opBinary, []byte(frame))
	c.frame(t, opPing, []byte("p"))
	c.send(t, `{"type":"noop"}`)
	if m, err := line.Receive(); err != nil || !m.Audio || string(m.Data) != "opus" {
		t.Errorf("%+v, %v", m, err)
	}
	if m, err := line.Receive(); err != nil || m.Audio || string(m.Data) != `{"type":"noop"}` {
		t.Errorf("%+v, %v", m, err)
	}
	if opcode, text := c.read(t); opcode != opPong || text != "p" {
		t.Errorf("a ping is answered with opcode %d, %q", opcode, text)
	}
	if err := line.Publish("topic", nil); err == nil {
		t.Error("a WebSocket publishes")
	}
	c.frame(t, opClose, []byte{3, 232})
	if m, err := line.Receive(); err == nil {
		t.Errorf("after a Close frame: %+v", m)
	}
}

func TestReadReply(t *testing.T) {
	const mqtt = `{"mqtt":{"endpoint":"h:1883","client_id":"i","username":"u","password":"p","publish_topic":"up","subscribe_topic":"down","keepalive":120}}`
	var f Flash
	r, err := f.ReadReply([]byte(mqtt), "2.4.2")
	if want := (Login{Endpoint: "h:1883", ClientID: "i", Username: "u", Password: "p", PublishTopic: "up", SubscribeTopic: "down", Keepalive: 120}); err != nil || r.Login != want {
		t.Errorf("%+v, %v", r, err)
	}
	if address, err := r.Login.Address(); err != nil || address != "h:1883" {
		t.Errorf("%s, %v", address, err)
	}
	// What a reply leaves out stays as it was.
	if r, err = f.ReadReply([]byte(`{"mqtt":{"endpoint":"g"},"activation":{"code":"1","challenge":"c"},"firmware":{"version":"2.5.0","url":"http://x/"}}`), "2.4.2"); err != nil ||
		r.Login.Endpoint != "g" || r.Login.Password != "p" || r.Code != "1" || r.Challenge != "c" || !r.Upgrade || r.UpgradeURL != "http://x/" {
		t.Errorf("%+v, %v", r, err)
	}
	if r, err = f.ReadReply([]byte(`{"websocket":{"url":"ws://h/","token":"t","version":3}}`), "2.4.2"); err != nil || r.Login != (Login{URL: "ws://h/", Token: "t", Version: 3}) {
		t.Errorf("%+v, %v", r, err)
	}
	for reply, want := range map[string]error{
		`{`:                                      ErrRetry,
		`{"mqtt":{"sixteen_chars_xx":1}}`:        ErrAbort,
		`{"mqtt":{"endpoint":"mqtt://h:1"}}`:     ErrAbort,
		`{"firmware":{"version":"v2","url":""}}`: ErrAbort,
		`{"websocket":{"url":"ws://h/a:b"}}`:     ErrCrash,
		strings.Repeat(" ", maxHTTPBody):         ErrHang,
	} {
		if _, err := new(Flash).ReadReply([]byte(reply), "2.4.2"); !errors.Is(err, want) {
			t.Errorf("%.50s: %v, want %v", reply, err, want)
		}
	}
}
