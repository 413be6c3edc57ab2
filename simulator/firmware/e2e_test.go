package firmware

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
)

func TestBootHelloAndCatalog(t *testing.T) {
	s := newFakeServer(t)
	f := startFleet(t, s, "--profile", "robot")
	c := s.accept()
	if got := c.header.Get("Authorization"); got != "Bearer tok-1" {
		t.Errorf("Authorization = %q", got)
	}
	_, hello := c.read(t)
	if want := f.devices[0].profile.helloText(1); hello != want {
		t.Errorf("hello = %s\nwant    %s", hello, want)
	}
	c.send(t, `{"type":"hello","transport":"websocket","session_id":"ws-1"}`)
	init, _ := c.call(t, 1, "initialize", `{"capabilities":{}}`)
	if init.SessionID != "ws-1" || !strings.Contains(string(init.Payload.Result), `"name":"otto-robot"`) {
		t.Errorf("initialize: %+v", init)
	}
	raw, pages, cursor := "", 0, ""
	for {
		r, text := c.call(t, 2+pages, "tools/list", `{"cursor":"`+cursor+`","withUserTools":true}`)
		if n := len(r.Payload.Result); n > maxPagePayload {
			t.Errorf("page of %d bytes", n)
		}
		_, list, _ := strings.Cut(text, `"tools":[`)
		list, tail, _ := strings.Cut(list, `]`+`,"nextCursor"`)
		if tail == "" {
			list = strings.TrimSuffix(list, `]}}}`)
		}
		if raw != "" {
			raw += ","
		}
		raw += list
		pages++
		var result struct {
			NextCursor string `json:"nextCursor"`
		}
		if err := json.Unmarshal(r.Payload.Result, &result); err != nil {
			t.Fatal(err)
		}
		if cursor = result.NextCursor; cursor == "" {
			break
		}
	}
	r := eventually(t, f, "connected", inState(StateConnected))
	sum := sha256.Sum256([]byte("[" + raw + "]"))
	if got := hex.EncodeToString(sum[:]); got != r.CatalogSHA256 {
		t.Errorf("catalog %s, report has %s", got, r.CatalogSHA256)
	}
	if pages < 3 || r.Tools < 40 {
		t.Errorf("robot has %d tools on %d pages", r.Tools, pages)
	}
	if r.OTAChecks != 1 || r.Connects != 1 || r.Hellos != 1 || r.ServerHellos != 1 {
		t.Errorf("report %+v", r)
	}
}

func TestStatusFollowsTools(t *testing.T) {
	s := newFakeServer(t)
	f := startFleet(t, s)
	c := s.acceptHello("a")
	for _, volume := range []string{"0", "100"} {
		if r, _ := c.call(t, 1, "tools/call", `{"name":"self.audio_speaker.set_volume","arguments":{"volume":`+volume+`}}`); r.Payload.Error != nil {
			t.Errorf("volume %s: %s", volume, r.Payload.Error.Message)
		}
	}
	c.call(t, 1, "tools/call", `{"name":"self.audio_speaker.set_volume","arguments":{"volume":33}}`)
	c.call(t, 2, "tools/call", `{"name":"self.screen.set_theme","arguments":{"theme":"dark"}}`)
	r, _ := c.call(t, 2, "tools/call", `{"name":"self.get_device_status"}`)
	got := string(r.Payload.Result)
	if !strings.Contains(got, `{\"volume\":33}`) || !strings.Contains(got, `\"theme\":\"dark\"`) {
		t.Errorf("status %s", got)
	}
	rep := eventually(t, f, "calls", func(r DeviceReport) bool { return r.CallsTotal == 5 })
	if rep.DuplicateCallIDs != 3 || rep.Calls[3] != (CallRecord{2, "self.screen.set_theme"}) {
		t.Errorf("duplicates %d, calls %v", rep.DuplicateCallIDs, rep.Calls)
	}
}

func TestRebootNeverAnswers(t *testing.T) {
	s := newFakeServer(t)
	f := startFleet(t, s)
	c := s.acceptHello("a")
	c.request(t, 7, "tools/call", `{"name":"self.reboot"}`)
	if _, text, err := c.tryRead(); err == nil {
		t.Fatalf("device answered %s", text)
	}
	c = s.accept()
	c.read(t)
	c.send(t, `{"type":"hello","transport":"websocket"}`)
	r := eventually(t, f, "connected again", inState(StateConnected))
	if r.OTAChecks != 2 || r.Reboots != 1 || r.Connects != 2 || r.Disconnects != 1 {
		t.Errorf("report %+v", r)
	}
	// The id of the session before the restart is gone with the RAM.
	if got := strings.Join(r.SessionIDs, ","); got != "a," {
		t.Errorf("sessions %s", got)
	}
}

func TestPhoto(t *testing.T) {
	s := newFakeServer(t)
	var seen http.Header
	var file []byte
	s.uploads = func(r *http.Request, data []byte) (int, string) {
		seen, file = r.Header, data
		return 200, `{"text":"a "` + r.FormValue("question") + `"}`
	}
	f := startFleet(t, s)
	c := s.acceptHello("a")
	r, _ := c.call(t, 1, "tools/call", `{"name":"self.camera.take_photo","arguments":{"question":"cat?"}}`)
	if r.Payload.Error == nil || r.Payload.Error.Message != "Image explain URL or token is not set" {
		t.Fatalf("without url: %+v", r)
	}
	c.call(t, 2, "initialize", `{"capabilities":{"vision":{"url":"`+s.base+`/upload","token":"vt"}}}`)
	r, _ = c.call(t, 3, "tools/call", `{"name":"self.camera.take_photo","arguments":{"question":"cat?"}}`)
	if want := `{"content":[{"type":"text","text":"{\"text\":\"a \"cat?\"}"}],"isError":false}`; string(r.Payload.Result) != want {
		t.Errorf("result %s\nwant   %s", r.Payload.Result, want)
	}
	if seen.Get("Authorization") != "Bearer vt" || seen.Get("Device-Id") != f.devices[0].id || seen.Get("Client-Id") != f.devices[0].clientID {
		t.Errorf("headers %v", seen)
	}
	rep := f.devices[0].Report()
	if len(rep.Photos) != 1 || rep.Photos[0].SHA256 != hexSHA256(file) || rep.Photos[0].Status != 200 || len(file) < 1000 {
		t.Errorf("photos %+v, file of %d bytes", rep.Photos, len(file))
	}
	s.mu.Lock()
	s.uploads = func(r *http.Request, data []byte) (int, string) {
		if r.Header.Get("Device-Id") != "" {
			t.Error("a snapshot carries no Device-Id")
		}
		return 200, "ok"
	}
	s.mu.Unlock()
	r, _ = c.call(t, 4, "tools/call", `{"name":"self.screen.snapshot","arguments":{"url":"`+s.base+`/upload"}}`)
	if !strings.Contains(string(r.Payload.Result), `"text":"true"`) {
		t.Errorf("snapshot %s", r.Payload.Result)
	}
	// 8192 bytes never come back.
	s.mu.Lock()
	s.uploads = func(*http.Request, []byte) (int, string) { return 200, strings.Repeat("x", maxHTTPBody) }
	s.mu.Unlock()
	c.request(t, 5, "tools/call", `{"name":"self.camera.take_photo","arguments":{"question":"?"}}`)
	eventually(t, f, "hung", inState(StateHung))
}

func TestPongWhileMainLoopIsBusy(t *testing.T) {
	s := newFakeServer(t)
	startFleet(t, s, "--profile", "robot")
	c := s.acceptHello("a")
	c.request(t, 1, "tools/call", `{"name":"self.test.sleep","arguments":{"ms":300}}`)
	c.frame(t, opPing, []byte("p1"))
	if opcode, text := c.read(t); opcode != opPong || text != "p1" {
		t.Fatalf("got opcode %d %q, want the pong first", opcode, text)
	}
	if _, text := c.read(t); !strings.Contains(text, `"id":1,"result"`) {
		t.Fatalf("then %s", text)
	}
}

func TestBadBrainStates(t *testing.T) {
	ws := func(s *fakeServer, rest string) string {
		return `{"websocket":{"url":"` + strings.Replace(s.base, "http", "ws", 1) + `/xiaozhi/v1/"` + rest
	}
	tests := []struct {
		name   string
		answer func(*fakeServer) string
		state  State
		reason string
	}{
		{"key of 18 characters", func(s *fakeServer) string { return ws(s, `,"use_compression_v2":"yes"}}`) }, StateBootLoop, "18 characters"},
		{"token of 4000 bytes", func(s *fakeServer) string { return ws(s, `,"token":"`+strings.Repeat("t", 4000)+`"}}`) }, StateBootLoop, "4000 bytes"},
		{"firmware v2.5.0", func(s *fakeServer) string { return ws(s, `},"firmware":{"version":"v2.5.0","url":"http://x/"}}`) }, StateBootLoop, "v2.5.0"},
		{"endpoint with scheme", func(*fakeServer) string { return `{"mqtt":{"endpoint":"mqtt://192.0.2.5:1883"}}` }, StateBootLoop, "mqtt://"},
		{"mqtt without endpoint", func(s *fakeServer) string { return ws(s, `},"mqtt":{}}`) }, StateNoEndpoint, "selects MQTT"},
		{"nothing", func(*fakeServer) string { return `{}` }, StateNoEndpoint, "no transport"},
		{"8192 bytes", func(s *fakeServer) string { return ws(s, `},"pad":"`+strings.Repeat("x", 8192)+`"}`) }, StateHung, "ota_too_large"},
		{"colon in the path", func(*fakeServer) string { return `{"websocket":{"url":"ws://192.0.2.5/v1?d=aa:bb"}}` }, StateCrashed, "aa:bb"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := newFakeServer(t)
			answer := tt.answer(s)
			s.ota = func(int, []byte) (int, string) { return 200, answer }
			f := startFleet(t, s)
			r := eventually(t, f, string(tt.state), inState(tt.state))
			if !strings.Contains(r.Error, tt.reason) {
				t.Errorf("error %q does not name %q", r.Error, tt.reason)
			}
		})
	}
}

func TestActivation(t *testing.T) {
	s := newFakeServer(t)
	ok := s.ota
	s.ota = func(n int, body []byte) (int, string) {
		if n == 1 {
			return 500, "broken"
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.acts) < 3 {
			return 200, `{"activation":{"code":"123456","challenge":"ch"},"websocket":{"url":"ws://127.0.0.1:1/"}}`
		}
		return ok(n, body)
	}
	s.activate = func(n int, _ string) int { return []int{202, 404, 200}[n-1] }
	f := startFleet(t, s)
	s.acceptHello("a")
	r := eventually(t, f, "connected", inState(StateConnected))
	if r.OTAChecks != 3 || r.Activations != 3 {
		t.Errorf("checks %d, activations %d", r.OTAChecks, r.Activations)
	}
	d := f.devices[0]
	if want := activationBody(d.serial, d.efuseKey(), "ch"); s.acts[0] != want || d.serial == "" {
		t.Errorf("body %s, want %s", s.acts[0], want)
	}
}

func TestServerHelloDecidesOverLife(t *testing.T) {
	t.Run("no transport crashes", func(t *testing.T) {
		t.Parallel()
		s := newFakeServer(t)
		f := startFleet(t, s)
		c := s.accept()
		c.read(t)
		c.send(t, `{"type":"hello","session_id":"x"}`)
		if r := eventually(t, f, "crashed", inState(StateCrashed)); r.Crashes != 1 {
			t.Errorf("crashes %d", r.Crashes)
		}
	})
	t.Run("other transport times out, missing id keeps the old one", func(t *testing.T) {
		t.Parallel()
		s := newFakeServer(t)
		f := startFleet(t, s, "--wake", "50ms")
		c := s.accept()
		c.read(t)
		c.send(t, `{"type":"hello","transport":"udp","session_id":"x"}`)
		s.acceptHello("first")
		eventually(t, f, "connected", inState(StateConnected))
		// The device treats a close frame as the end, keeps TCP, and opens a new socket at the next wake.
		f.devices[0].mu.Lock()
		conn := f.devices[0].conn
		f.devices[0].mu.Unlock()
		conn.drop()
		c = s.accept()
		c.read(t)
		c.send(t, `{"type":"hello","transport":"websocket"}`)
		if r, _ := c.call(t, 1, "initialize", ""); r.SessionID != "first" {
			t.Errorf("session %q", r.SessionID)
		}
	})
}

func TestSecondHelloPoisonsNextConnection(t *testing.T) {
	s := newFakeServer(t)
	f := startFleet(t, s, "--wake", "50ms")
	c := s.acceptHello("a")
	c.send(t, `{"type":"hello","transport":"websocket","session_id":"b"}`)
	eventually(t, f, "two hellos", func(r DeviceReport) bool { return r.ServerHellos == 2 })
	c.frame(t, opClose, []byte{3, 232})
	c = s.accept()
	c.read(t)
	// No server hello at all, and yet the device takes the channel for open.
	r := eventually(t, f, "connected", inState(StateConnected))
	if r.CloseFrames != 1 {
		t.Errorf("close frames %d", r.CloseFrames)
	}
	if r, _ := c.call(t, 1, "initialize", ""); r.SessionID != "b" {
		t.Errorf("session %q", r.SessionID)
	}
	// The flag is used up: the connection after that waits again.
	c.frame(t, opClose, []byte{3, 232})
	c = s.accept()
	c.read(t)
	if r := f.devices[0].Report(); r.State != StateConnecting {
		t.Errorf("state %s before the server's hello", r.State)
	}
	c.send(t, `{"type":"hello","transport":"websocket","session_id":"c"}`)
	eventually(t, f, "connected", inState(StateConnected))
}

func TestImageResultIsEncodedTwice(t *testing.T) {
	s := newFakeServer(t)
	startFleet(t, s, "--profile", "robot")
	c := s.acceptHello("a")
	r, _ := c.call(t, 1, "tools/call", `{"name":"self.test.image"}`)
	var result struct {
		Content []struct{ Type, Image string }
	}
	if err := json.Unmarshal(r.Payload.Result, &result); err != nil || result.Content[0].Type != "image" {
		t.Fatalf("%v in %s", err, r.Payload.Result)
	}
	var inner struct{ MimeType, Data string }
	if err := json.Unmarshal([]byte(result.Content[0].Image), &inner); err != nil || inner.MimeType != "image/png" {
		t.Fatalf("%v in %s", err, result.Content[0].Image)
	}
	if png, err := base64.StdEncoding.DecodeString(inner.Data); err != nil || !strings.HasPrefix(string(png), "\x89PNG") {
		t.Errorf("data %q, %v", png, err)
	}
}
