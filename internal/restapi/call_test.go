package restapi

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/devicetest"
)

func TestCall(t *testing.T) {
	f := newFleet(t)
	script := devicetest.NewScript()
	var got string
	script.Call = func(tool string, args json.RawMessage) string {
		got = tool + " " + string(args)
		return `"result":{"content":[ {"type":"text","text":"é<\u00e9>"} ],"isError":false}`
	}
	f.connect(t, robot, script)
	for _, path := range []string{volumePath, "/v1/devices/AABBCCDDEEFF/tools/self.audio_speaker.set_volume/call",
		"/v1/devices/aa%3Abb%3Acc%3Add%3Aee%3Aff/tools/self%2Eaudio_speaker.set_volume/call"} {
		r := f.do(t, "POST", path, `{"arguments":{"volume":50},"timeout":"10s"}`)
		var result api.ToolResult
		r.json(t, &result)
		if got != `self.audio_speaker.set_volume {"volume":50}` {
			t.Errorf("device got %s", got)
		}
		// The content stays as it was, white space and escapes included.
		if !strings.HasPrefix(r.body, `{"content":[ {"type":"text","text":"é<\u00e9>"} ],"isError":false,"duration_ms":`) || result.Node != "n-test" {
			t.Errorf("answer %s", r.body)
		}
	}
	script.Call = func(string, json.RawMessage) string {
		return `"result":{"content":[{"type":"text","text":"the arm is stuck"}],"isError":true}`
	}
	var result api.ToolResult
	f.do(t, "POST", volumePath, `{"arguments":{"volume":50}}`).json(t, &result)
	if !result.IsError {
		t.Error("a tool that fails on the device is a result")
	}
	f.do(t, "POST", "/v1/devices/aa:bb:cc:dd:ee:ff/tools/self.reboot/call", "").json(t, &result)
	f.do(t, "POST", "/v1/devices/aa:bb:cc:dd:ee:ff/tools/self.reboot/call", ` {"arguments":null} `).json(t, &result)
	f.do(t, "POST", "/v1/devices/aa:bb:cc:dd:ee:ff/mcp", `{"method":"tools/call","params":{"name":"self.reboot","arguments":null}}`).json(t, &result)
}

// Every call has an id that the answer, its header and the audit agree on; what
// never became a call has none.
func TestCallIDs(t *testing.T) {
	f := newFleet(t)
	f.connect(t, robot, silence())
	raw := "/v1/devices/aa:bb:cc:dd:ee:ff/mcp"
	seen := map[string]bool{}
	for _, c := range []struct{ name, path, body string }{
		{"a call", volumePath, `{"arguments":{"volume":50},"timeout":"20ms"}`},
		{"a call with wrong arguments", volumePath, `{"arguments":{"volume":"x"}}`},
		{"a call of nobody", "/v1/devices/nobody/tools/x/call", ""},
		{"a raw request", raw, `{"method":"tools/list","timeout":"20ms"}`},
		{"a refused raw request", raw, `{"method":"initialize"}`},
		{"a message", messagesPath, `{"type":"system","command":"x"}`},
		{"a message for nobody", "/v1/devices/nobody/messages", `{"type":"system","command":"x"}`},
	} {
		r := f.do(t, "POST", c.path, c.body)
		var answer struct {
			Call string `json:"call"`
		}
		if err := json.Unmarshal([]byte(r.body), &answer); err != nil {
			t.Fatalf("%s: %v in %s", c.name, err, r.body)
		}
		entries := f.ports.Recorded()
		last := entries[len(entries)-1]
		if r.body == "{\"ok\":true}\n" { // its id is in the header alone
			answer.Call = last.Call
		}
		if answer.Call == "" || r.header.Get(HeaderCall) != answer.Call || last.Call != answer.Call || seen[answer.Call] {
			t.Errorf("%s: answer %s, header %q, audit %+v", c.name, r.body, r.header.Get(HeaderCall), last)
		}
		seen[answer.Call] = true
	}
	if r := f.do(t, "POST", volumePath, `[]`); strings.Contains(r.body, `"call"`) || r.header.Get(HeaderCall) != "" {
		t.Errorf("no call: %s, %v", r.body, r.header)
	}
}

func TestCallRestarting(t *testing.T) {
	for path, c := range map[string]struct{ body, want string }{
		"tools/self.reboot/call": {"", `"content":[],"isError":false,`},
		"mcp":                    {`{"method":"tools/call","params":{"name":"self.reboot","arguments":{}}}`, `{"result":{"content":[],"isError":false,"outcome":"restarting"},`},
	} {
		f := newFleet(t)
		script := silence()
		l := f.connect(t, robot, script)
		script.Call = func(string, json.RawMessage) string {
			go l.session.Close(devices.CloseGone)
			return ""
		}
		r := f.do(t, "POST", "/v1/devices/aa:bb:cc:dd:ee:ff/"+path, c.body)
		if r.status != 200 || !strings.Contains(r.body, c.want) || !strings.Contains(r.body, `"outcome":"restarting"`) {
			t.Errorf("%s: %d %s", path, r.status, r.body)
		}
		if e := f.ports.Recorded(); len(e) == 0 || e[len(e)-1].Outcome != "restarting" {
			t.Errorf("%s: the audit has %+v", path, e)
		}
	}
}

// TestCallProblems covers the codes a call can end with.
func TestCallProblems(t *testing.T) {
	f := newFleet(t)
	script := devicetest.NewScript()
	l := f.connect(t, robot, script)
	answer := ""
	script.Call = func(string, json.RawMessage) string { return answer }
	cases := []struct {
		name, path, body, answer string
		status                   int
		code                     devices.Code
		detail                   string
	}{
		{"bad id", "/v1/devices/a.b/tools/x/call", "", "", 400, devices.CodeBadRequest, "not a device id"},
		{"bad JSON", volumePath, `{"arguments":`, "", 400, devices.CodeBadRequest, "not valid JSON"},
		{"array", volumePath, `[]`, "", 400, devices.CodeBadRequest, "must be a JSON object"},
		{"trailing", volumePath, `{}{}`, "", 400, devices.CodeBadRequest, "not valid JSON"},
		{"unknown member", volumePath, `{"argument":{}}`, "", 400, devices.CodeBadRequest, `"argument"`},
		{"case", volumePath, `{"Arguments":{}}`, "", 400, devices.CodeBadRequest, `"Arguments"`},
		{"twice", volumePath, `{"arguments":{},"arguments":{}}`, "", 400, devices.CodeBadRequest, "twice"},
		{"arguments no object", volumePath, `{"arguments":[1]}`, "", 400, devices.CodeBadRequest, "arguments must be a JSON object"},
		{"timeout no string", volumePath, `{"timeout":10}`, "", 400, devices.CodeBadRequest, "timeout must be a string"},
		{"timeout no duration", volumePath, `{"timeout":"10"}`, "", 400, devices.CodeBadRequest, "duration"},
		{"timeout zero", volumePath, `{"timeout":"0s"}`, "", 400, devices.CodeBadRequest, "duration"},
		{"timeout negative", volumePath, `{"timeout":"-1s"}`, "", 400, devices.CodeBadRequest, "duration"},
		{"timeout too long", volumePath, `{"timeout":"301s"}`, "", 400, devices.CodeBadRequest, "5m0s"},
		{"too large", volumePath, `{"arguments":{"x":"` + strings.Repeat("x", BodyLimit) + `"}}`, "", 413, devices.CodeTooLarge, "65536"},
		{"unknown device", "/v1/devices/nobody/tools/x/call", "", "", 404, devices.CodeDeviceUnknown, "nobody"},
		{"unknown tool", "/v1/devices/aa:bb:cc:dd:ee:ff/tools/x/call", "", "", 404, devices.CodeToolUnknown, `"x"`},
		{"refused by the device", volumePath, `{"arguments":{"volume":5}}`, `"error":{"message":"Method not implemented: tools/call"}`, 502, devices.CodeDeviceError, "Method not"},
		{"malformed answer", volumePath, `{"arguments":{"volume":5}}`, `"result":7`, 502, devices.CodeDeviceError, "malformed"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			answer = tc.answer
			p := f.do(t, "POST", tc.path, tc.body).problem(t, tc.status, tc.code)
			if !strings.Contains(p.Detail, tc.detail) {
				t.Errorf("detail %q, want %q in it", p.Detail, tc.detail)
			}
		})
	}
	t.Run("arguments", func(t *testing.T) {
		p := f.do(t, "POST", volumePath, `{"arguments":{"volume":500}}`).problem(t, 422, devices.CodeInvalidArguments)
		if len(p.Errors) != 1 || p.Errors[0].Pointer != "/volume" || p.Errors[0].Detail == "" || p.Sent != nil {
			t.Errorf("%+v", p)
		}
	})
	t.Run("arguments by the device", func(t *testing.T) {
		answer = `"error":{"message":"Missing valid argument: volume"}`
		p := f.do(t, "POST", volumePath, `{"arguments":{"volume":5}}`).problem(t, 422, devices.CodeInvalidArguments)
		if p.Sent == nil || !*p.Sent {
			t.Errorf("%+v", p)
		}
	})
	t.Run("timeout", func(t *testing.T) {
		answer = ""
		p := f.do(t, "POST", volumePath, `{"arguments":{"volume":5},"timeout":"20ms"}`).problem(t, 504, devices.CodeDeviceTimeout)
		if p.Sent == nil || !*p.Sent || p.Outcome != devices.OutcomeUnknown {
			t.Errorf("%+v", p)
		}
	})
	t.Run("connection lost before a byte left", func(t *testing.T) {
		l.mu.Lock()
		l.broken = errors.New("broken pipe")
		l.mu.Unlock()
		r := f.do(t, "POST", volumePath, `{"arguments":{"volume":5}}`)
		if p := r.problem(t, 502, devices.CodeConnectionLost); p.Sent == nil || *p.Sent || p.Outcome != "" {
			t.Errorf("%s", r.body)
		}
	})
	t.Run("offline", func(t *testing.T) {
		l.session.Close(devices.CloseGone)
		f.do(t, "POST", volumePath, `{"arguments":{"volume":5}}`).problem(t, 409, devices.CodeDeviceOffline)
	})
	t.Run("database away", func(t *testing.T) {
		f.ports.Put(devices.Member{ID: "offline", Labels: map[string]string{"room": "lab"}})
		token := f.key(t, "lab", "tools:call", "room=lab")
		f.ports.SetAway(true)
		p := f.do(t, "POST", "/v1/devices/offline/tools/x/call", "", as(token)...).problem(t, 503, devices.CodeUnavailable)
		if p.Part != "database" {
			t.Errorf("%+v", p)
		}
		f.ports.SetAway(false)
	})
	t.Run("draining", func(t *testing.T) {
		f.draining.Store(true)
		defer f.draining.Store(false)
		for _, path := range []string{volumePath, "/v1/devices/aa:bb:cc:dd:ee:ff/mcp", "/v1/devices/aa:bb:cc:dd:ee:ff/tools/refresh"} {
			r := f.do(t, "POST", path, `{}`)
			if p := r.problem(t, 503, devices.CodeUnavailable); p.Part != "node" || r.header.Get("Retry-After") != "1" {
				t.Errorf("%s: %+v", path, p)
			}
		}
	})
}

// TestCallEndings covers calls that end while they are on the device.
func TestCallEndings(t *testing.T) {
	start := func(t *testing.T, f *testFleet, ctx context.Context, l *line) chan response {
		done := make(chan response, 1)
		l.sent = make(chan string, 1)
		go func() {
			done <- f.send(t, ctx, "POST", volumePath, strings.NewReader(`{"arguments":{"volume":5}}`))
		}()
		<-l.sent
		return done
	}
	t.Run("superseded", func(t *testing.T) {
		f := newFleet(t)
		done := start(t, f, t.Context(), f.connect(t, robot, silence()))
		f.connect(t, robot, silence())
		p := (<-done).problem(t, 409, devices.CodeSuperseded)
		if p.Sent == nil || !*p.Sent || p.Outcome != devices.OutcomeUnknown {
			t.Errorf("%+v", p)
		}
	})
	t.Run("lost", func(t *testing.T) {
		f := newFleet(t)
		l := f.connect(t, robot, silence())
		done := start(t, f, t.Context(), l)
		l.session.Close(devices.CloseGone)
		p := (<-done).problem(t, 502, devices.CodeConnectionLost)
		if p.Sent == nil || !*p.Sent || p.Outcome != devices.OutcomeUnknown {
			t.Errorf("%+v", p)
		}
	})
	t.Run("busy", func(t *testing.T) {
		f := newFleet(t)
		l := f.connect(t, robot, silence())
		calls := []chan response{start(t, f, t.Context(), l)}
		l.sent = nil
		for range session.MaxWaitingCalls {
			done := make(chan response, 1)
			calls = append(calls, done)
			go func() { done <- f.do(t, "POST", volumePath, `{"arguments":{"volume":5}}`) }()
		}
		devicetest.Eventually(t, "all wait", func() bool { return f.service.Stats().Waiting.Load() == session.MaxWaitingCalls })
		r := f.do(t, "POST", volumePath, `{"arguments":{"volume":5}}`)
		r.problem(t, 429, devices.CodeDeviceBusy)
		if r.header.Get("Retry-After") != "1" {
			t.Error("no Retry-After")
		}
		l.session.Close(devices.CloseGone)
		for _, done := range calls {
			(<-done).problem(t, 502, devices.CodeConnectionLost)
		}
	})
	t.Run("client gone", func(t *testing.T) {
		f := newFleet(t)
		l := f.connect(t, robot, silence())
		l.sent = make(chan string, 1)
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			<-l.sent
			cancel()
		}()
		r, err := http.NewRequestWithContext(ctx, "POST", f.url+volumePath, strings.NewReader(`{"arguments":{"volume":5}}`))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer "+f.token)
		if answer, err := http.DefaultClient.Do(r); err == nil {
			answer.Body.Close()
			t.Fatal("the call was answered")
		}
		devicetest.Eventually(t, "the slot is free", func() bool { return f.service.Stats().InFlight.Load() == 0 })
	})
	t.Run("node stops", func(t *testing.T) {
		f := newFleet(t)
		l := f.connect(t, robot, silence())
		l.sent = make(chan string, 1)
		ctx, cancel := context.WithCancel(t.Context()) // as the server's base context
		w := httptest.NewRecorder()
		r := httptest.NewRequestWithContext(ctx, "POST", volumePath, strings.NewReader(`{"arguments":{"volume":5}}`))
		r.Header.Set("Authorization", "Bearer "+f.token)
		go func() {
			<-l.sent
			f.draining.Store(true)
			cancel()
		}()
		f.api.ServeHTTP(w, r)
		p := response{w.Code, w.Header(), w.Body.String()}.problem(t, 503, devices.CodeUnavailable)
		if p.Part != "node" || p.Outcome != devices.OutcomeUnknown || p.Sent == nil || !*p.Sent {
			t.Errorf("%s", w.Body)
		}
	})
}

func TestRawRequest(t *testing.T) {
	f := newFleet(t)
	script := devicetest.NewScript()
	script.Other = func(r devicetest.Request) string {
		switch r.Method {
		case "resources/list":
			return `"result":{"resources": [],"params":` + string(r.Params) + `}`
		case "bad":
			return `"error":{"code":-5,"message":"no"}`
		}
		return ""
	}
	f.connect(t, robot, script)
	const path = "/v1/devices/aa:bb:cc:dd:ee:ff/mcp"
	for body, want := range map[string]string{
		`{"method":"resources/list","params":{"a": 1}}`: `{"result":{"resources": [],"params":{"a": 1}}}`,
		`{"method":"bad"}`: `{"error":{"code":-5,"message":"no"}}`,
		`{"method":"tools/call","params":{"name":"self.audio_speaker.set_volume","arguments":{"volume":1}},"timeout":"5s"}`: `{"result":{"content":[{"type":"text","text":"true"}],"isError":false}}`,
	} {
		r := f.do(t, "POST", path, body)
		want = strings.TrimSuffix(want, "}") + `,"call":"` + r.header.Get(HeaderCall) + `"}`
		if r.status != 200 || strings.TrimSpace(r.body) != want || r.header.Get("Content-Type") != "application/json" {
			t.Errorf("%s: %d %s", body, r.status, r.body)
		}
	}
	for _, tc := range []struct {
		body   string
		status int
		code   devices.Code
	}{
		{``, 400, devices.CodeBadRequest},
		{`{"method":7}`, 400, devices.CodeBadRequest},
		{`{"method":"x","params":[]}`, 400, devices.CodeBadRequest},
		{`{"method":"x","id":1}`, 400, devices.CodeBadRequest},
		{`{"method":"x","method":"y"}`, 400, devices.CodeBadRequest},
		{`{"method":"x","timeout":"1h"}`, 400, devices.CodeBadRequest},
		{`{"method":"notifications/initialized"}`, 400, devices.CodeBadRequest},
		{`{"method":"initialize"}`, 403, devices.CodeForbidden},
		{`{"method":"tools/call","params":{"name":"self.audio_speaker.set_volume","arguments":{"volume":-1}}}`, 422, devices.CodeInvalidArguments},
		{`{"method":"` + strings.Repeat("x", BodyLimit) + `"}`, 413, devices.CodeTooLarge},
	} {
		f.do(t, "POST", path, tc.body).problem(t, tc.status, tc.code)
	}
}

// A chunked body has no length to refuse by.
func TestCallTooLargeWithoutLength(t *testing.T) {
	f := newFleet(t)
	body := struct{ *strings.Reader }{strings.NewReader(strings.Repeat(" ", BodyLimit+1))}
	f.send(t, t.Context(), "POST", volumePath, body).problem(t, 413, devices.CodeTooLarge)
	body = struct{ *strings.Reader }{strings.NewReader(strings.Repeat(" ", BodyLimit))}
	f.send(t, t.Context(), "POST", volumePath, body).problem(t, 404, devices.CodeDeviceUnknown)
}

// quiet is a response writer that keeps nothing.
type quiet struct {
	header http.Header
	status int
	bytes  int
}

func (q *quiet) Header() http.Header { return q.header }
func (q *quiet) WriteHeader(s int)   { q.status = s }
func (q *quiet) Write(b []byte) (int, error) {
	q.bytes += len(b)
	return len(b), nil
}

type readCloser struct{ *strings.Reader }

func (readCloser) Close() error { return nil }

func BenchmarkCall(b *testing.B) {
	f := newFleet(b)
	f.connect(b, robot, devicetest.NewScript())
	const body = `{"arguments":{"volume":50},"timeout":"10s"}`
	reader := strings.NewReader(body)
	r := httptest.NewRequest("POST", volumePath, nil)
	r.Body, r.ContentLength = readCloser{reader}, int64(len(body))
	r.Header.Set("Authorization", "Bearer "+f.token)
	w := &quiet{header: http.Header{}}
	b.ReportAllocs()
	for b.Loop() {
		reader.Reset(body)
		f.api.ServeHTTP(w, r)
	}
}

// BenchmarkHTTPCall is BenchmarkCall over a connection.
func BenchmarkHTTPCall(b *testing.B) {
	f := newFleet(b)
	f.connect(b, robot, devicetest.NewScript())
	server := httptest.NewServer(f.api)
	defer server.Close()
	b.ReportAllocs()
	for b.Loop() {
		r, err := http.NewRequestWithContext(b.Context(), http.MethodPost, server.URL+volumePath, strings.NewReader(`{"arguments":{"volume":50}}`))
		if err != nil {
			b.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer "+f.token)
		response, err := server.Client().Do(r)
		if err != nil {
			b.Fatal(err)
		}
		text, err := io.ReadAll(response.Body)
		_ = response.Body.Close() // read to its end
		if err != nil || !strings.Contains(string(text), `"isError":false`) {
			b.Fatalf("%s, %v", text, err)
		}
	}
}

// FuzzCallBody: whatever is accepted is valid JSON of the right shape, and
// nothing is accepted that a lenient decoder would refuse.
func FuzzCallBody(f *testing.F) {
	for _, seed := range []string{``, ` `, `{}`, `{"arguments":{"a":[1,{"b":null}]},"timeout":"1s"}`, `{"timeout":"\u0031s"}`, `{"arguments":null}`,
		`{"arguments":{},"arguments":{}}`, `{"x":1}`, `[]`, `{"arguments":{"a":1}`, "{\"arguments\":{\"a\":\"\xff\"}}"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		c, err := decodeCall(body)
		if err != nil {
			var p *problem
			if !errors.As(err, &p) || p.Status != http.StatusBadRequest || p.Detail == "" {
				t.Fatalf("%v is not a problem with a detail", err)
			}
			return
		}
		if strings.TrimSpace(string(body)) == "" {
			return
		}
		var plain struct {
			Arguments map[string]json.RawMessage `json:"arguments"`
			Timeout   string                     `json:"timeout"`
		}
		if err := json.Unmarshal(body, &plain); err != nil {
			t.Fatalf("%q was accepted: %v", body, err)
		}
		if plain.Timeout != c.timeout || (plain.Arguments == nil) != (c.arguments == nil) {
			t.Fatalf("%q: %+v, encoding/json reads %+v", body, c, plain)
		}
		if _, err := decodeRPC(body); err != nil && c.arguments == nil && c.timeout == "" && string(body) == "{}" {
			t.Fatal("an empty object is a request too")
		}
	})
}
