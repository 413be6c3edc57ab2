package firmware

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// vector reads one golden file into v.
func vector(t testing.TB, name string, v any) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("..", "..", "testdata", "vectors", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, v); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}

// recorder is a link that keeps what the device sends.
type recorder struct {
	mu   sync.Mutex
	sent []string
}

func (r *recorder) write(_ byte, room *[]byte) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sent = append(r.sent, string((*room)[frameRoom:]))
	return nil
}

func (r *recorder) drop() {}

func (r *recorder) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.sent
	r.sent = nil
	return out
}

// vectorTools is the tool set the transcripts were recorded with (tools_registered).
func vectorTools() *toolset {
	pad := func(c string) *tool { return done("self.pad."+c, strings.Repeat(c, 2500)) }
	reboot := done("self.reboot", "Restart.")
	reboot.userOnly = true
	plain := func(name, description, result string) *tool {
		return &tool{name: name, description: description, run: func(*Device, []arg) (outcome, error) { return text(result) }}
	}
	return newToolset([]*tool{
		done("self.audio_speaker.set_volume", "Speaker volume.", ranged("volume", 0, 100)),
		plain("self.light.get_power", "Is the light on?", "true"),
		plain("self.led_strip.get_brightness", "Brightness level.", "4"),
		{name: "self.test.image", description: "Returns a picture.", run: func(*Device, []arg) (outcome, error) {
			return outcome{text: `{"type":"image","mimeType":"image/png","data":"iVBORw=="}`, image: true}, nil
		}},
		{name: "self.test.fail", description: "Always fails.", run: func(*Device, []arg) (outcome, error) {
			return outcome{}, toolError(`no "film" left`)
		}},
		done("self.system.set_aec", "AEC on or off.", boolean("enable")),
		done("self.otto.set_trim", "Servo trim.", str("servo_type").orString("left_leg"), ranged("trim_value", -50, 50).or(0)),
		pad("a"), pad("b"), pad("c"), pad("d"), pad("e"), pad("f"),
		reboot,
	})
}

// vectorDevice is a device on a recorder with the board of the transcripts.
func vectorDevice(t *testing.T) (*Device, *recorder) {
	t.Helper()
	p := &Profile{name: "vector", board: "bread-compact-wifi", version: "2.4.2", language: "zh-CN", chip: "esp32s3", idf: "v5.5.2",
		compiled: "Aug  8 2026T08:40:00Z", withDisplay: true, withMaker: true, width: 320, height: 240, glyph: glyphOn,
		overtaking: true, userTools: true, tools: vectorTools()}
	p.factory = p.program(p.version)
	voice, err := openRecording(voiceFile)
	if err != nil {
		t.Fatal(err)
	}
	f := &Fleet{options: &Options{Profiles: []*Profile{p}}, states: map[State]int{}, hashSeed: maphash.MakeSeed(), voice: voice}
	f.ctx, f.stop = context.WithCancel(t.Context())
	t.Cleanup(f.stop)
	f.callsLeft.Store(100)
	r := &recorder{}
	d := newDevice(f, 0, 0, false)
	d.id, d.clientID = "aa:bb:cc:dd:ee:ff", "5f0c1d3e-0000-4000-8000-000000000001"
	d.out, d.opened, d.sessionID = r, true, "ws-v1-0001"
	return d, r
}

func (d *Device) feed(text string) {
	var doc jsonDoc
	d.onText(&doc, []byte(text))
}

type exchange struct {
	Note        string  `json:"note"`
	ServerSends string  `json:"server_sends"`
	DeviceSends *string `json:"device_sends"`
}

func (e exchange) check(t *testing.T, d *Device, r *recorder) {
	t.Helper()
	d.feed(e.ServerSends)
	d.pump(true)
	got := r.take()
	switch {
	case e.DeviceSends == nil:
		if len(got) != 0 {
			t.Errorf("%s: device sends %q, want silence", e.Note, got)
		}
	case len(got) != 1 || got[0] != *e.DeviceSends:
		t.Errorf("%s: device sends %q\nwant %q", e.Note, got, *e.DeviceSends)
	}
}

func TestVectorsMCPExchanges(t *testing.T) {
	for _, name := range []string{"mcp_initialize", "mcp_tools_list_edge", "mcp_call_ok", "mcp_call_errors"} {
		t.Run(name, func(t *testing.T) {
			var v struct{ Exchanges []exchange }
			vector(t, name, &v)
			if len(v.Exchanges) == 0 {
				t.Fatal("no exchanges")
			}
			for _, e := range v.Exchanges {
				d, r := vectorDevice(t)
				e.check(t, d, r)
			}
		})
	}
}

func TestVectorsMCPPages(t *testing.T) {
	var v struct {
		Pages []struct {
			ServerSends string `json:"server_sends"`
			Short       string `json:"device_sends_short"`
			Length      int    `json:"length"`
			SHA256      string `json:"sha256"`
		}
	}
	vector(t, "mcp_tools_list_3pages", &v)
	expand := regexp.MustCompile(`\{\{(\w)\*(\d+)\}\}`)
	d, r := vectorDevice(t)
	for i, p := range v.Pages {
		want := expand.ReplaceAllStringFunc(p.Short, func(m string) string {
			part := expand.FindStringSubmatch(m)
			n, _ := strconv.Atoi(part[2])
			return strings.Repeat(part[1], n)
		})
		d.feed(p.ServerSends)
		d.pump(true)
		got := r.take()
		if len(got) != 1 || got[0] != want {
			t.Fatalf("page %d: %q", i, got)
		}
		sum := sha256.Sum256([]byte(got[0]))
		if len(got[0]) != p.Length || hex.EncodeToString(sum[:]) != p.SHA256 {
			t.Errorf("page %d: %d bytes, sha %x", i, len(got[0]), sum)
		}
	}
}

func TestVectorsMCPSilentDrops(t *testing.T) {
	var v struct {
		Requests []struct {
			Reason      string `json:"reason"`
			ServerSends string `json:"server_sends"`
		}
	}
	vector(t, "mcp_silent_drops", &v)
	d, r := vectorDevice(t)
	for _, q := range v.Requests {
		exchange{Note: q.Reason, ServerSends: q.ServerSends}.check(t, d, r)
	}
}

func TestVectorsMCPIDs(t *testing.T) {
	var v struct {
		Cases []struct {
			ID      string `json:"request_id"`
			Request string `json:"request"`
			Reply   int32  `json:"reply_id"`
		}
	}
	vector(t, "mcp_ids", &v)
	d, r := vectorDevice(t)
	for _, c := range v.Cases {
		request := c.Request
		if request == "" {
			request = `{"jsonrpc":"2.0","method":"ping","id":` + c.ID + `}`
		}
		want := fmt.Sprintf(`{"session_id":"ws-v1-0001","type":"mcp","payload":{"jsonrpc":"2.0","id":%d,"error":{"message":"Method not implemented: ping"}}}`, c.Reply)
		exchange{Note: request, ServerSends: `{"type":"mcp","payload":` + request + `}`, DeviceSends: &want}.check(t, d, r)
	}
}

func TestVectorsMCPOutOfOrder(t *testing.T) {
	var v struct {
		Server []string `json:"server_sends_in_order"`
		Device []string `json:"device_sends_in_order"`
	}
	vector(t, "mcp_out_of_order", &v)
	d, r := vectorDevice(t)
	for _, text := range v.Server {
		d.feed(text)
	}
	// The main loop was busy until here, and a hello came by.
	d.sessionID = "udp-0002"
	d.pump(true)
	if got := r.take(); strings.Join(got, "\n") != strings.Join(v.Device, "\n") {
		t.Errorf("order:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(v.Device, "\n"))
	}
	// Up to v2.0 replies keep the order of the requests.
	old, r := vectorDevice(t)
	older := *old.profile
	older.overtaking = false
	old.profile = &older
	for _, text := range v.Server {
		old.feed(text)
	}
	old.pump(true)
	ids := regexp.MustCompile(`"id":(\d+)`).FindAllString(strings.Join(r.take(), ""), -1)
	if got := strings.Join(ids, " "); got != `"id":60 "id":61 "id":62 "id":63` {
		t.Errorf("old firmware answers in the order %s", got)
	}
}

func TestVectorsHello(t *testing.T) {
	for version := int32(1); version <= 3; version++ {
		var v struct {
			Upgrade struct {
				Path    string      `json:"path"`
				Headers [][2]string `json:"headers_in_wire_order"`
			} `json:"upgrade_request"`
			Device string `json:"device_sends_text"`
			Server string `json:"server_reply_ok"`
		}
		vector(t, fmt.Sprintf("hello_ws_v%d", version), &v)
		d, _ := vectorDevice(t)
		if got := d.profile.helloText(version); got != v.Device {
			t.Errorf("v%d hello\n%s\nwant\n%s", version, got, v.Device)
		}
		u, err := parseWSURL("ws://ws.example.test:8000" + v.Upgrade.Path)
		if err != nil {
			t.Fatal(err)
		}
		want := "GET " + v.Upgrade.Path + " HTTP/1.1\r\n"
		for _, h := range v.Upgrade.Headers {
			want += h[0] + ": " + strings.Replace(h[1], "<16 random bytes, base64>", "AAAA", 1) + "\r\n"
		}
		got := string(upgradeRequest(u, &Login{Token: "tok-123", Client: d.clientID, Device: d.id, Version: version}, "AAAA"))
		if got != want+"\r\n" {
			t.Errorf("v%d upgrade request\n%s\nwant\n%s", version, got, want)
		}
		wait := make(chan struct{})
		d.helloWait = wait
		d.feed(v.Server)
		select {
		case <-wait:
		default:
			t.Errorf("v%d: server hello not accepted", version)
		}
		if want := fmt.Sprintf("ws-v%d-0001", version); d.sessionID != want {
			t.Errorf("session %q, want %q", d.sessionID, want)
		}
	}
}

func TestVectorsHelloVariants(t *testing.T) {
	var v struct{ Cases []struct{ Name, Text string } }
	vector(t, "hello_variants", &v)
	devices := map[string]struct {
		profile Profile
		version int32
	}{
		"HEAD, custom font": {Profile{glyph: glyphOff}, 1},
		"HEAD, server-AEC":  {Profile{glyph: glyphOn, serverAEC: true}, 2},
		"v1.8.0 .. v2.3.0":  {Profile{}, 1},
		"websocket.version": {Profile{glyph: glyphOn}, 4},
	}
	checked := 0
	for _, c := range v.Cases {
		for name, d := range devices {
			if strings.HasPrefix(c.Name, name) {
				checked++
				if got := d.profile.helloText(d.version); got != c.Text {
					t.Errorf("%s\n%s\nwant\n%s", c.Name, got, c.Text)
				}
			}
		}
	}
	if checked != len(devices) {
		t.Errorf("checked %d of %d variants", checked, len(devices))
	}
}

func TestVectorsServerHelloInvalid(t *testing.T) {
	var v struct {
		WebSocket []struct{ Text, Device string }
	}
	vector(t, "server_hello_invalid", &v)
	for _, c := range v.WebSocket {
		d, _ := vectorDevice(t)
		d.sessionID = "old"
		wait := make(chan struct{})
		d.helloWait = wait
		d.feed(c.Text)
		accepted := false
		select {
		case <-wait:
			accepted = true
		default:
		}
		crashed := d.life == StateCrashed
		if crashed != strings.HasPrefix(c.Device, "CRASH") || accepted != strings.HasPrefix(c.Device, "accepted") || d.sessionID != "old" {
			t.Errorf("%s: crashed %v, accepted %v, session %q; want: %s", c.Text, crashed, accepted, d.sessionID, c.Device)
		}
	}
}

func TestVectorsAudioFrames(t *testing.T) {
	for version := int32(1); version <= 3; version++ {
		var v struct {
			Frames []struct {
				Timestamp uint32
				Opus      string `json:"opus_hex"`
				Message   string `json:"message_hex"`
			}
		}
		vector(t, fmt.Sprintf("ws_binary_v%d", version), &v)
		for _, f := range v.Frames {
			opus, _ := hex.DecodeString(f.Opus)
			msg, _ := hex.DecodeString(f.Message)
			if got := packAudio(nil, version, f.Timestamp, opus); hex.EncodeToString(got) != f.Message {
				t.Errorf("v%d pack %x, want %s", version, got, f.Message)
			}
			got, ts, err := unpackAudio(version, msg)
			if err != nil || hex.EncodeToString(got) != f.Opus || ts != f.Timestamp {
				t.Errorf("v%d unpack %s: %x at %d, %v", version, f.Message, got, ts, err)
			}
		}
	}
	var bad struct {
		Cases []struct {
			Protocol int32
			Message  string `json:"message_hex"`
			Device   string
		}
	}
	vector(t, "ws_binary_malformed", &bad)
	for _, c := range bad.Cases {
		msg, _ := hex.DecodeString(c.Message)
		_, _, err := unpackAudio(c.Protocol, msg)
		harmless := strings.HasPrefix(c.Device, "plays") || strings.HasPrefix(c.Device, "feeds")
		if harmless != (err == nil) {
			t.Errorf("v%d %s: %v, want: %s", c.Protocol, c.Message, err, c.Device)
		}
	}
}

func TestVectorsTextMessages(t *testing.T) {
	var v struct{ Messages map[string]string }
	vector(t, "device_text_messages", &v)
	d, _ := vectorDevice(t)
	for name, state := range map[string]string{
		"listen_start_auto": `"start","mode":"auto"`, "listen_start_manual": `"start","mode":"manual"`,
		"listen_stop": `"stop"`, "listen_detect": `"detect","text":"Hi,ESP"`,
	} {
		if got := d.listenText(state); got != v.Messages[name] {
			t.Errorf("%s: %s, want %s", name, got, v.Messages[name])
		}
	}
}

func TestVectorsOTARequest(t *testing.T) {
	var v struct {
		Request struct {
			Headers [][2]string `json:"headers_in_wire_order"`
			Body    string
		}
	}
	vector(t, "ota_request", &v)
	d, _ := vectorDevice(t)
	runs, profile := *d.runs, *d.profile
	runs.elf = strings.Repeat("0", 60) + "1234"
	profile.table = `[{"label":"nvs","type":1,"subtype":2,"address":36864,"size":16384},{"label":"ota_0","type":0,"subtype":16,"address":131072,"size":4128768}]`
	body := systemInfo{profile: &profile, runs: &runs, mac: d.id, clientID: d.clientID, ssid: "lab", rssi: -52, channel: 6, ip: "192.0.2.33"}.json()
	if body != v.Request.Body {
		t.Errorf("body\n%s\nwant\n%s", body, v.Request.Body)
	}
	u, err := parseHTTPURL("http://ota.example.test/xiaozhi/ota/")
	if err != nil {
		t.Fatal(err)
	}
	want := "POST /xiaozhi/ota/ HTTP/1.1\r\n"
	for _, h := range v.Request.Headers {
		want += h[0] + ": " + h[1] + "\r\n"
	}
	if got := string(httpRequest("POST", u, d.identity().headers(), []byte(body))); got != want+"\r\n"+body {
		t.Errorf("request\n%s\nwant\n%s", got, want)
	}
	d.serial = "S"
	if got := d.identity().headers(); got[1].value != "2" || got[5] != (header{"Serial-Number", "S"}) {
		t.Errorf("headers with a serial number: %v", got)
	}
}

func TestVectorsOTAResponses(t *testing.T) {
	var v struct {
		Cases []struct{ Body, Device string }
	}
	vector(t, "ota_responses", &v)
	wants := []func(t *testing.T, a otaAnswer, n *nvs, err error) bool{
		func(_ *testing.T, a otaAnswer, n *nvs, err error) bool {
			return err == nil && a.websocket && !a.mqtt && n.number("websocket", "version") == 3 && a.clock == 1786150000000+480*60_000
		},
		func(_ *testing.T, a otaAnswer, n *nvs, err error) bool {
			return err == nil && a.mqtt && n.text("websocket", "url") == "ws://192.0.2.5:8000/"
		},
		func(_ *testing.T, a otaAnswer, _ *nvs, err error) bool { return err == nil && !a.mqtt && !a.websocket },
		func(_ *testing.T, _ otaAnswer, n *nvs, err error) bool {
			return err == nil && n.number("websocket", "version") == 0 && n.text("websocket", "version") == "3"
		},
		func(_ *testing.T, _ otaAnswer, _ *nvs, err error) bool { return errors.Is(err, errNVS) },
		func(_ *testing.T, a otaAnswer, n *nvs, err error) bool {
			return err == nil && a.mqtt && badEndpoint(n.text("mqtt", "endpoint"))
		},
		func(_ *testing.T, _ otaAnswer, n *nvs, err error) bool {
			_, abort := parseWSURL(n.text("websocket", "url"))
			return err == nil && errors.Is(abort, errStoi)
		},
		func(_ *testing.T, _ otaAnswer, _ *nvs, err error) bool { return errors.Is(err, errStoi) },
		func(_ *testing.T, a otaAnswer, _ *nvs, err error) bool { return err == nil && a.upgrade },
		func(_ *testing.T, a otaAnswer, _ *nvs, err error) bool { return err == nil && !a.upgrade },
	}
	for i, want := range wants {
		var settings nvs
		a, err := readOTA([]byte(v.Cases[i].Body), &settings, "2.4.2")
		if !want(t, a, &settings, err) {
			t.Errorf("%s\nread as %+v, %v; want: %s", v.Cases[i].Body, a, err, v.Cases[i].Device)
		}
	}
	// The last case has a size instead of a body and is played over a socket in TestBadBrainStates.
	if len(v.Cases) != len(wants)+1 {
		t.Errorf("%d cases, %d checks", len(v.Cases), len(wants))
	}
}

func badEndpoint(endpoint string) bool {
	_, err := parseEndpoint(endpoint)
	return errors.Is(err, errStoi)
}

func TestVectorsActivation(t *testing.T) {
	var v struct {
		Key       string `json:"efuse_key0_hex"`
		Challenge string `json:"challenge"`
		Body      string `json:"request_body"`
		Bare      string `json:"request_body_without_serial"`
	}
	vector(t, "activation_v2", &v)
	var key [32]byte
	if _, err := hex.Decode(key[:], []byte(v.Key)); err != nil {
		t.Fatal(err)
	}
	if got := activationBody("SN0123456789ABCDEF0123456789ABCD", key, v.Challenge); got != v.Body {
		t.Errorf("body %s\nwant %s", got, v.Body)
	}
	if got := activationBody("", key, v.Challenge); got != v.Bare {
		t.Errorf("body without a serial number %s, want %s", got, v.Bare)
	}
}

var _ link = (*recorder)(nil)
