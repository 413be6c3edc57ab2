package firmware

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"testing"
)

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestVectorsHelloMQTT(t *testing.T) {
	var v struct {
		Device string `json:"device_publishes"`
		Old    string `json:"device_publishes_v1_9_4_to_v2_3_0"`
		Server string `json:"server_reply_ok"`
	}
	vector(t, "hello_mqtt", &v)
	profiles := func(name string) *Profile { return named(t, name) }
	for name, want := range map[string]string{"fw-2.4": v.Device, "fw-2.1": v.Old, "fw-1.9": v.Old, "robot": v.Old} {
		if got := profiles(name).helloUDP(); got != want {
			t.Errorf("%s: %s\nwant %s", name, got, want)
		}
	}
	d, _ := vectorDevice(t)
	d.mqtt = &mqttState{}
	wait := make(chan struct{})
	d.helloWait = wait
	d.feed(v.Server)
	select {
	case <-wait:
	default:
		t.Fatal("server hello not accepted")
	}
	o := d.mqtt.offer
	if o.server != "192.0.2.10" || o.port != 8884 || d.sessionID != "udp-0001" || d.stats.mqtt.ssrc != "c0ffee01" {
		t.Errorf("offer %+v, session %s, ssrc %s", o, d.sessionID, d.stats.mqtt.ssrc)
	}
	if hex.EncodeToString(o.key) != "6b6579206d75737420626520313662ff" || hex.EncodeToString(o.nonce) != "01000000c0ffee010000000000000000" {
		t.Errorf("key %x, nonce %x", o.key, o.nonce)
	}
}

func TestVectorsServerHelloInvalidMQTT(t *testing.T) {
	var v struct {
		MQTT []struct{ Text, Device string }
	}
	vector(t, "server_hello_invalid", &v)
	if len(v.MQTT) == 0 {
		t.Fatal("no cases")
	}
	outcome := func(text string, lax bool) string {
		d, _ := vectorDevice(t)
		p := *d.profile
		p.laxUDP = lax
		d.profile, d.mqtt = &p, &mqttState{}
		wait := make(chan struct{})
		d.helloWait = wait
		d.feed(text)
		select {
		case <-wait:
			return "accepted " + fmt.Sprintf("%x %x %d", d.mqtt.offer.key, d.mqtt.offer.nonce, d.mqtt.offer.port)
		default:
		}
		if d.life == StateCrashed {
			return "CRASH"
		}
		if strings.Contains(text, `"udp-0001"`) && d.sessionID != "udp-0001" {
			return "ignored and the session id with it"
		}
		return "ignored"
	}
	// What the vectors say in words about v1.9.4 to v2.3.0.
	lax := []string{
		"CRASH",
		"ignored",
		"accepted 6b6579206d7573742062652031366200 01000000c0ffee010000000000000000 8884",
		"accepted 6b6579206d75737420626520313662ff 01000000c0ffee01000000000000000000 8884",
		"accepted 006579206d75737420626520313662ff 01000000c0ffee010000000000000000 8884",
		"accepted 6b6579206d75737420626520313662ff 01000000c0ffee010000000000000000 0",
		"CRASH",
	}
	if len(lax) != len(v.MQTT) {
		t.Fatalf("%d cases, %d expectations", len(v.MQTT), len(lax))
	}
	for i, c := range v.MQTT {
		if got := outcome(c.Text, false); got != "ignored" {
			t.Errorf("HEAD: %s\n%s, want: %s", c.Text, got, c.Device)
		}
		if got := outcome(c.Text, true); got != lax[i] {
			t.Errorf("old: %s\n%s, want %s: %s", c.Text, got, lax[i], c.Device)
		}
	}
}

func TestVectorsUDPAudio(t *testing.T) {
	var v struct {
		Key     string `json:"server_hello_key_hex"`
		Nonce   string `json:"server_hello_nonce_hex"`
		Packets []struct {
			Dir       string `json:"dir"`
			Timestamp uint32 `json:"timestamp"`
			Sequence  uint32 `json:"sequence"`
			Plain     string `json:"plaintext_hex"`
			Packet    string `json:"packet_hex"`
		} `json:"packets"`
	}
	vector(t, "udp_audio", &v)
	keys, err := newUDPKeys(unhex(t, v.Key), unhex(t, v.Nonce), false)
	if err != nil {
		t.Fatal(err)
	}
	up, down := 0, 0
	for _, p := range v.Packets {
		if p.Dir == "device->server" {
			up++
			// A packet without payload burns the number in between.
			for keys.local+1 < p.Sequence {
				if b := keys.seal(nil, nil, 0); len(b) != 0 {
					t.Errorf("an empty payload became %x", b)
				}
			}
			if got := hex.EncodeToString(keys.seal(nil, unhex(t, p.Plain), p.Timestamp)); got != p.Packet {
				t.Errorf("sequence %d: sealed %s\nwant %s", p.Sequence, got, p.Packet)
			}
			continue
		}
		down++
		opus, _, verdict := keys.open(unhex(t, p.Packet))
		if verdict != Accepted || hex.EncodeToString(opus) != p.Plain || keys.remote != p.Sequence {
			t.Errorf("sequence %d: opened %x, %s, remote %d", p.Sequence, opus, verdictNames()[verdict], keys.remote)
		}
	}
	if up != 3 || down != 2 {
		t.Errorf("%d packets up, %d down", up, down)
	}
}

func TestVectorsUDPMalformed(t *testing.T) {
	var v struct {
		Key   string `json:"key_hex"`
		Cases []struct {
			Packet string `json:"packet_hex"`
			Reason string `json:"reject_reason"`
			Head   string `json:"head_device"`
			Old    string `json:"firmware_le_v2_3_0"`
		}
	}
	vector(t, "udp_audio_malformed", &v)
	for _, c := range v.Cases {
		for _, lax := range []bool{false, true} {
			keys, err := newUDPKeys(unhex(t, v.Key), make([]byte, udpHeader), lax)
			if err != nil {
				t.Fatal(err)
			}
			if strings.HasPrefix(c.Reason, "exact duplicate") {
				keys.remote = 1
			}
			want := c.Head
			if lax {
				want = c.Old
			}
			_, _, verdict := keys.open(unhex(t, c.Packet))
			// The empty datagram never gets this far: it ends the reader (TestEmptyDatagramEndsTheReceiver).
			if accepted := strings.HasPrefix(want, "accepted"); accepted != (verdict == Accepted) {
				t.Errorf("lax %v, %s: %s, want %s", lax, c.Reason, verdictNames()[verdict], want)
			}
		}
	}
}

func TestVectorsKeystreamOverlap(t *testing.T) {
	var v struct {
		Key  string `json:"key_hex"`
		One  string `json:"zeros_seq1_ts0_hex"`
		Two  string `json:"zeros_seq2_ts0_hex"`
		Over struct{ Equal bool }
	}
	vector(t, "udp_keystream_overlap", &v)
	keys, err := newUDPKeys(unhex(t, v.Key), unhex(t, "01000000c0ffee010000000000000000"), false)
	if err != nil {
		t.Fatal(err)
	}
	zeros := make([]byte, len(v.One)/2)
	for i, want := range []string{v.One, v.Two} {
		if got := hex.EncodeToString(keys.seal(nil, zeros, 0)[udpHeader:]); got != want {
			t.Errorf("sequence %d: %s, want %s", i+1, got, want)
		}
	}
}

func TestGoodbyePerGeneration(t *testing.T) {
	profiles := func(name string) *Profile { return named(t, name) }
	for _, tt := range []struct {
		profile, text string
		obeyed, echo  bool
		crash         bool
	}{
		{"fw-2.4", `{"type":"goodbye","session_id":"s"}`, true, false, false},
		{"fw-2.4", `{"type":"goodbye"}`, false, false, false},
		{"fw-2.4", `{"type":"goodbye","session_id":"other"}`, false, false, false},
		{"fw-2.4", `{"type":"goodbye","session_id":7}`, false, false, false},
		{"robot", `{"type":"goodbye"}`, true, false, false},
		{"robot", `{"type":"goodbye","session_id":7}`, false, false, true},
		{"fw-2.1", `{"type":"goodbye"}`, true, true, false},
		{"fw-2.1", `{"type":"goodbye","session_id":"other"}`, false, false, false},
		{"fw-1.9", `{"type":"goodbye","session_id":"s"}`, true, true, false},
	} {
		d, r := vectorDevice(t)
		d.profile, d.mqtt, d.sessionID = profiles(tt.profile), &mqttState{channel: &udpChannel{}}, "s"
		d.feed(tt.text)
		d.pump(false)
		sent := strings.Join(r.take(), "")
		if got := d.life == StateCrashed; got != tt.crash {
			t.Errorf("%s %s: crashed %v", tt.profile, tt.text, got)
		}
		if tt.crash {
			continue
		}
		if echo := sent == `{"session_id":"s","type":"goodbye"}`; echo != tt.echo || (!echo && sent != "") {
			t.Errorf("%s %s: sent %q", tt.profile, tt.text, sent)
		}
		if obeyed := d.mqtt.channel == nil; obeyed != tt.obeyed || (d.stats.goodbyesObeyed == 1) != tt.obeyed {
			t.Errorf("%s %s: obeyed %v", tt.profile, tt.text, obeyed)
		}
	}
}

func TestMQTTPackets(t *testing.T) {
	for _, tt := range []struct {
		name      string
		got, want []byte
	}{
		{"connect", appendConnect(nil, &Login{ClientID: "a", Username: "u", Password: "p", Keepalive: 240}),
			[]byte("\x10\x13\x00\x04MQTT\x04\xc2\x00\xf0\x00\x01a\x00\x01u\x00\x01p")},
		{"connect without credentials", appendConnect(nil, &Login{ClientID: "a", Keepalive: 1}),
			[]byte("\x10\x0d\x00\x04MQTT\x04\x02\x00\x01\x00\x01a")},
		{"connect without user name", appendConnect(nil, &Login{ClientID: "a", Password: "p"}),
			[]byte("\x10\x10\x00\x04MQTT\x04\x42\x00\x00\x00\x01a\x00\x01p")},
		{"publish", appendPublish(nil, "t/u", []byte("hi")), []byte("\x30\x07\x00\x03t/uhi")},
		{"publish of 200", appendPublish(nil, "t", make([]byte, 197))[:6], []byte("\x30\xc8\x01\x00\x01t")},
		{"subscribe", appendSubscribe(nil, 1, "t"), []byte("\x82\x06\x00\x01\x00\x01t\x00")},
		{"puback", appendAck(nil, mqttPubAck, 258), []byte("\x40\x02\x01\x02")},
	} {
		if !bytes.Equal(tt.got, tt.want) {
			t.Errorf("%s: %x, want %x", tt.name, tt.got, tt.want)
		}
	}
	for _, tt := range []struct {
		in   string
		want error
	}{
		{"\x30\x80\x80\x80\x80\x01", errMQTT},
		{"\x30\xff\xff\xff\x7f", errMemory},
	} {
		r := mqttReader{byteReader{src: strings.NewReader(tt.in), buf: make([]byte, 32)}}
		if _, err := r.next(); !errors.Is(err, tt.want) {
			t.Errorf("%x: %v, want %v", tt.in, err, tt.want)
		}
	}
	for _, body := range []string{"", "\x00", "\x00\x05abc", "\x00\x01a"} {
		if _, _, _, err := (mqttPacket{kind: mqttPublish, flags: 2, body: []byte(body)}).publish(); !errors.Is(err, errMQTT) {
			t.Errorf("publish %q: %v", body, err)
		}
	}
}
