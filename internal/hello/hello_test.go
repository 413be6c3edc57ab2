package hello

import (
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"fleetd/internal/jsonspan"
	"fleetd/internal/jsontest"
)

func vector(t *testing.T, name string, into any) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("..", "..", "testdata", "vectors", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, into); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}

func TestWebSocketVectors(t *testing.T) {
	for version, name := range map[int]string{1: "hello_ws_v1", 2: "hello_ws_v2", 3: "hello_ws_v3"} {
		var v struct {
			Sends string `json:"device_sends_text"`
			Reply string `json:"server_reply_ok"`
		}
		vector(t, name, &v)
		d, err := ParseDevice([]byte(v.Sends))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if d.Version != version || !d.MCP || !d.GlyphPush || d.AEC || d.Transport != TransportWebSocket || d.Audio != DeviceAudio || !json.Valid(d.TextFont) {
			t.Errorf("%s: %+v", name, d)
		}
		var reply struct {
			SessionID string `json:"session_id"`
		}
		if err := json.Unmarshal([]byte(v.Reply), &reply); err != nil {
			t.Fatal(err)
		}
		got, err := Server{Transport: TransportWebSocket, SessionID: reply.SessionID, Audio: ServerAudio}.Append(nil)
		if err != nil || string(got) != v.Reply {
			t.Errorf("%s: wrote %s, %v\nwant %s", name, got, err, v.Reply)
		}
	}
}

func TestVariantVectors(t *testing.T) {
	var v struct {
		Cases []struct{ Name, Text string }
	}
	vector(t, "hello_variants", &v)
	if len(v.Cases) < 6 {
		t.Fatal("vectors are missing")
	}
	for _, c := range v.Cases {
		d, err := ParseDevice([]byte(c.Text))
		if err != nil {
			t.Errorf("%s: %v", c.Name, err)
			continue
		}
		if want := strings.Contains(c.Text, `"mcp":true`); d.MCP != want {
			t.Errorf("%s: mcp %v, want %v", c.Name, d.MCP, want)
		}
		if want := strings.Contains(c.Text, `"aec":true`); d.AEC != want {
			t.Errorf("%s: aec %v, want %v", c.Name, d.AEC, want)
		}
	}
}

func TestMQTTVector(t *testing.T) {
	var v struct {
		Publishes string `json:"device_publishes"`
	}
	vector(t, "hello_mqtt", &v)
	d, err := ParseDevice([]byte(v.Publishes))
	if err != nil || d.Version != 3 || d.Transport != TransportUDP || !d.MCP {
		t.Errorf("%+v, %v", d, err)
	}
}

func TestParseRefuses(t *testing.T) {
	for _, c := range []struct {
		text string
		want error
	}{
		{`{"type":"listen"}`, ErrInvalid}, {`{}`, ErrInvalid}, {`{"type":1}`, ErrInvalid},
		{`{"type":"hello","version":"1"}`, ErrInvalid}, {`{"type":"hello","version":-1}`, ErrInvalid},
		{`{"type":"hello","transport":1}`, ErrInvalid}, {`{"type":"hello","transport":"tcp"}`, ErrInvalid},
		{`{"type":"hello","features":[]}`, ErrInvalid}, {`{"type":"hello","features":null}`, ErrInvalid},
		{`{"type":"hello","audio_params":{"sample_rate":"16000"}}`, ErrInvalid},
		{`{"type":"hello","audio_params":{"sample_rate":44100}}`, ErrInvalid},
		{`{"type":"hello","audio_params":{"frame_duration":61}}`, ErrInvalid},
		{`{"type":"hello","audio_params":{"channels":3}}`, ErrInvalid}, {`{"type":"hello","audio_params":{"channels":0}}`, ErrInvalid},
		{`{"type":"hello"`, jsonspan.ErrSyntax}, {`[1]`, jsonspan.ErrType}, {"{\"type\":\"hello\",\"x\":\"\xff\"}", jsonspan.ErrUTF8},
		{strings.Repeat(`{"type":`, 10000), jsonspan.ErrDepth},
	} {
		if d, err := ParseDevice([]byte(c.text)); !errors.Is(err, c.want) {
			t.Errorf("%.50s: got %+v, %v; want %v", c.text, d, err, c.want)
		}
	}
}

// Of duplicate keys the first counts, as on the device.
func TestFirstOfDuplicateKeysCounts(t *testing.T) {
	d, err := ParseDevice([]byte(`{"type":"hello","version":1,"version":2,"transport":"udp","transport":"websocket","features":{"mcp":true,"mcp":false}}`))
	if err != nil || d.Version != 1 || d.Transport != TransportUDP || !d.MCP {
		t.Errorf("%+v, %v", d, err)
	}
}

// A reply that crashes or misleads a device must be impossible to build.
func TestInvalidServerHelloCannotBeWritten(t *testing.T) {
	for _, s := range []Server{
		{SessionID: "x", Audio: ServerAudio}, {Transport: "1", SessionID: "x", Audio: ServerAudio},
		{Transport: TransportWebSocket, Audio: ServerAudio}, {Transport: TransportWebSocket, SessionID: `a"b`, Audio: ServerAudio},
		{Transport: TransportWebSocket, SessionID: "x"}, {Transport: TransportWebSocket, SessionID: strings.Repeat("x", 65), Audio: ServerAudio},
		{Transport: TransportUDP, SessionID: "x", Audio: ServerAudio}, {Transport: TransportWebSocket, SessionID: "x", Audio: ServerAudio, UDP: &UDP{Server: "192.0.2.1", Port: 1}},
		{Transport: TransportUDP, SessionID: "x", Audio: ServerAudio, UDP: &UDP{Server: "192.0.2.1"}},
		{Transport: TransportUDP, SessionID: "x", Audio: ServerAudio, UDP: &UDP{Server: "2001:db8::1", Port: 1}},
		{Transport: TransportUDP, SessionID: "x", Audio: ServerAudio, UDP: &UDP{Server: `a"b`, Port: 1}},
		{Transport: TransportUDP, SessionID: "x", Audio: ServerAudio, UDP: &UDP{Server: strings.Repeat("x", 254), Port: 1}},
	} {
		if out, err := s.Append(nil); !errors.Is(err, ErrInvalid) {
			t.Errorf("%+v: wrote %s, %v", s, out, err)
		}
	}
	for _, server := range []string{"192.0.2.1", "fleet.example.com", strings.Repeat("x", 253)} {
		if _, err := (Server{Transport: TransportUDP, SessionID: strings.Repeat("x", 64), Audio: ServerAudio, UDP: &UDP{Server: server, Port: 1}}).Append(nil); err != nil {
			t.Errorf("%s: %v", server, err)
		}
	}
}

// Whatever fleetd can write differs from every recorded answer that crashes,
// misleads or is ignored: it has a transport and a session id, both strings.
func TestInvalidServerHelloVectors(t *testing.T) {
	var v struct {
		WebSocket, MQTT []struct{ Text, Device string }
	}
	vector(t, "server_hello_invalid", &v)
	complete := func(text string) bool {
		var h struct {
			Type, Transport string
			SessionID       string `json:"session_id"`
			UDP             json.RawMessage
		}
		return json.Unmarshal([]byte(text), &h) == nil && h.Type == "hello" && h.SessionID != "" &&
			(h.Transport == TransportWebSocket || h.Transport == TransportUDP && h.UDP != nil)
	}
	written, err := Server{Transport: TransportWebSocket, SessionID: "x", Audio: ServerAudio}.Append(nil)
	if err != nil || !complete(string(written)) {
		t.Errorf("fleetd's own hello %s, %v", written, err)
	}
	if len(v.WebSocket) < 5 {
		t.Fatal("vectors are missing")
	}
	for _, c := range v.WebSocket {
		if complete(c.Text) {
			t.Errorf("%s counts as complete, yet: %s", c.Text, c.Device)
		}
	}
}

// FuzzParseDevice compares with what encoding/json reads: of each member the
// first counts, within features any that is true, within audio_params the last.
func FuzzParseDevice(f *testing.F) {
	for _, msg := range []string{`{"type":"hello","version":1,"features":{"mcp":true},"transport":"websocket","audio_params":{"format":"opus","sample_rate":16000,"channels":1,"frame_duration":60}}`,
		`{"type":"hello","version": 3,"transport":"udp"}`, `{"type":"hello","features":{"mcp":1,"aec":true,"glyph_push":true},"text_font":{"a":1},"transport":"mqtt","version":1.5}`,
		`{"type":"hello","type":"x","audio_params":{"sample_rate":8000,"sample_rate":24000,"channels":3}}`, `{"type":"hello","features":[]}`, `{"type":"h\u0065llo","text_font":5}`} {
		f.Add([]byte(msg))
	}
	f.Fuzz(func(t *testing.T, msg []byte) {
		d, err := ParseDevice(msg)
		want, good := readHello(msg)
		if (err == nil) != good && jsontest.Depth(msg) <= jsonspan.MaxDepth {
			t.Fatalf("%q: %v, want %t", msg, err, good)
		}
		if err == nil && !reflect.DeepEqual(d, want) {
			t.Errorf("%q is %+v, want %+v", msg, d, want)
		}
	})
}

func readHello(msg []byte) (d Device, ok bool) {
	d.Audio = AudioParams{16000, 1, 60}
	list, err := jsontest.ObjectMembers(msg)
	first := map[string]jsontest.Member{}
	for _, m := range list {
		if _, seen := first[m.Key]; !seen {
			first[m.Key] = m
		}
	}
	kind, _ := first["type"].Text()
	ok = err == nil && utf8.Valid(msg) && kind == "hello"
	if m, has := first["version"]; has {
		d.Version, has = integerOf(m, 1000)
		ok = ok && has
	}
	if m, has := first["transport"]; has {
		text, _ := m.Text()
		d.Transport, has = map[string]string{"websocket": "websocket", "udp": "udp", "mqtt": "udp"}[text]
		ok = ok && has
	}
	if m, has := first["features"]; has {
		d.Features = []byte(m.Value)
		flags, err := jsontest.ObjectMembers(d.Features)
		ok = ok && err == nil
		d.MCP, d.AEC, d.GlyphPush = isTrue(flags, "mcp"), isTrue(flags, "aec"), isTrue(flags, "glyph_push")
	}
	if m, has := first["text_font"]; has && m.Value[0] == '{' {
		d.TextFont = []byte(m.Value)
	}
	if m, has := first["audio_params"]; has {
		params, err := jsontest.ObjectMembers([]byte(m.Value))
		ok = ok && err == nil
		for _, p := range params {
			if field := map[string]*int{"sample_rate": &d.Audio.SampleRate, "channels": &d.Audio.Channels, "frame_duration": &d.Audio.FrameDuration}[p.Key]; field != nil {
				*field, has = integerOf(p, 1_000_000)
				ok = ok && has
			}
		}
	}
	return d, ok && slices.Contains([]int{8000, 12000, 16000, 24000, 48000}, d.Audio.SampleRate) && (d.Audio.Channels == 1 || d.Audio.Channels == 2) &&
		slices.Contains([]int{5, 10, 20, 40, 60, 80, 100, 120}, d.Audio.FrameDuration)
}

// integerOf is a number from 0 to limit without a fraction, which may be
// written with one; jsonspan takes 18 characters.
func integerOf(m jsontest.Member, limit float64) (int, bool) {
	var n float64
	err := json.Unmarshal([]byte(m.Value), &n)
	return int(n), err == nil && m.Value != "null" && n >= 0 && n <= limit && n == math.Trunc(n) && len(strings.TrimPrefix(m.Value, "-")) <= 18
}

func isTrue(list []jsontest.Member, name string) bool {
	return slices.Contains(list, jsontest.Member{Key: name, Value: "true"})
}

// What a member's name costs does not depend on how many members are known: a hostile hello may have thousands with escapes.
func TestNamesAreReadOnce(t *testing.T) {
	const names = 1000
	msg := []byte(`{"type":"hello"` + strings.Repeat(`,"\u00e9":1`, names) + `}`)
	once := testing.AllocsPerRun(10, func() {
		for walk := jsonspan.Object(msg); walk.Next(); {
			_ = walk.Key()
		}
	})
	got := testing.AllocsPerRun(10, func() {
		if _, err := ParseDevice(msg); err != nil {
			t.Error(err)
		}
	})
	if once < names || got > once+10 {
		t.Errorf("%v allocations, where the names once need %v", got, once)
	}
}
