package mcpserver

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/access"
	"fleetd/internal/connlimit"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devicetest"
)

const ping = `{"jsonrpc":"2.0","id":2,"method":"ping"}`

func TestOriginsAndTokens(t *testing.T) {
	f := newFleet(t, func(o *Options) {
		o.Hosts, o.Origins = []string{"fleet.example.com"}, []string{"https://console.example.com"}
	})
	_, token := f.key(t, "devices:read", "", time.Hour)
	for name, c := range map[string]struct {
		token   string
		headers []string
		status  int
	}{
		"admin":                {admin, nil, 200},
		"key":                  {token, nil, 200},
		"no token":             {"", nil, 401},
		"wrong token":          {"fld_aaaaaaaa_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", nil, 401},
		"name of this machine": {admin, []string{"Host", "localhost:80"}, 200},
		"address":              {admin, []string{"Host", "192.0.2.7:8080"}, 200},
		"address, version 6":   {admin, []string{"Host", "[2001:db8::1]:8080"}, 200},
		"listed host":          {admin, []string{"Host", "Fleet.example.com:443"}, 200},
		"other host":           {admin, []string{"Host", "evil.example"}, 403},
		"rebound":              {admin, []string{"Host", "evil.example", "Origin", "http://evil.example"}, 403},
		"local page":           {admin, []string{"Origin", "http://localhost:6274"}, 200},
		"local page, address":  {admin, []string{"Origin", "http://127.0.0.1:6274"}, 200},
		"listed page":          {admin, []string{"Origin", "https://console.example.com"}, 200},
		"other scheme":         {admin, []string{"Origin", "http://console.example.com"}, 403},
		"other page":           {admin, []string{"Origin", "https://evil.example"}, 403},
		"page of another host": {admin, []string{"Origin", "http://192.0.2.66"}, 403},
		"page without origin":  {admin, []string{"Origin", "null"}, 403},
		"own page":             {admin, []string{"Host", "192.0.2.7:8080", "Origin", "http://192.0.2.7:8080"}, 200},
		"longer name":          {admin, []string{"Host", "localhost.evil.example"}, 403},
	} {
		// security: H1
		if a := f.send(t, http.MethodPost, PathMCP, c.token, hello, c.headers...); a.status != c.status {
			t.Errorf("%s: %d %s", name, a.status, a.body)
		}
	}
	a := f.send(t, http.MethodPost, PathMCP, "", hello)
	const want = `Bearer resource_metadata="`
	found, ok := strings.CutPrefix(a.header.Get("WWW-Authenticate"), want)
	if !ok {
		t.Fatalf("WWW-Authenticate: %q", a.header.Get("WWW-Authenticate"))
	}
	path := strings.TrimPrefix(strings.TrimSuffix(found, `"`), f.url)
	// security: H1
	if a = f.send(t, http.MethodGet, path, "", ""); a.status != 200 || !strings.Contains(a.body, `"resource":"`+f.url+`/mcp"`) || !strings.Contains(a.body, `"tools:call"`) {
		t.Errorf("%s: %d %s", path, a.status, a.body)
	}
	for _, reason := range []string{refusedHost, refusedOrigin, refusedToken} {
		if f.mcp.Stats().Refused.Get(reason) == 0 {
			t.Errorf("refusals with the reason %s are not counted", reason)
		}
	}
}

// A session belongs to its key and its path until it ends.
func TestSessionsBelongToTheirKey(t *testing.T) {
	f := newFleet(t)
	f.connect(t, lamp, devicetest.NewScript())
	_, one := f.key(t, "devices:read tools:call", "", time.Hour)
	_, other := f.key(t, "devices:read tools:call", "", time.Hour)
	session := f.open(t, PathMCP, one)
	if !strings.HasPrefix(session, "n-test.") {
		t.Errorf("the session %q does not contain its node's name", session)
	}
	with := []string{"Mcp-Session-Id", session, "Mcp-Protocol-Version", "2025-06-18"}
	for name, c := range map[string]struct {
		path, token string
		status      int
	}{"its key": {PathMCP, one, 200}, "another key": {PathMCP, other, 403}, "the admin": {PathMCP, admin, 403}, "another address": {PathDevices + string(lamp), one, 403}} {
		// security: H2
		if a := f.send(t, http.MethodPost, c.path, c.token, ping, with...); a.status != c.status {
			t.Errorf("%s: %d %s", name, a.status, a.body)
		}
	}
	// security: H2
	if a := f.send(t, http.MethodGet, PathMCP, other, "", with...); a.status != 403 {
		t.Errorf("another key opens the stream: %d", a.status)
	}
	// security: H2
	if a := f.send(t, http.MethodDelete, PathMCP, other, "", with...); a.status != 403 {
		t.Errorf("another key ends it: %d", a.status)
	}
	if a := f.send(t, http.MethodDelete, PathMCP, one, "", with...); a.status != 204 {
		t.Errorf("its key ends it: %d", a.status)
	}
	if a := f.send(t, http.MethodPost, PathMCP, one, ping, with...); a.status != 404 {
		t.Errorf("it continues after its end: %d", a.status)
	}
	if n := f.mcp.Stats().Sessions.Load(); n != 0 {
		t.Errorf("%d sessions are counted", n)
	}
	// The transport before Streamable HTTP.
	old := f.host(t, PathSSE, "2024-11-05", one, nil)
	f.mcp.sseStreams.mu.Lock()
	for id := range f.mcp.sseStreams.byID {
		session = id
	}
	f.mcp.sseStreams.mu.Unlock()
	// security: H2
	if a := f.send(t, http.MethodPost, PathSSE+"?sessionid="+session, other, ping); a.status != 403 {
		t.Errorf("another key uses an SSE session: %d %s", a.status, a.body)
	}
	if _, err := old.ListTools(t.Context(), nil); err != nil {
		t.Error(err)
	}
}

func TestSessionsAreBounded(t *testing.T) {
	f := newFleet(t)
	_, one := f.key(t, "devices:read", "", time.Hour)
	_, other := f.key(t, "devices:read", "", time.Hour)
	var open []string
	for range MaxKeySessions {
		open = append(open, f.open(t, PathMCP, one))
	}
	alive := func(session string) int {
		return f.send(t, http.MethodPost, PathMCP, one, `{"jsonrpc":"2.0","id":9,"method":"ping"}`, "Mcp-Session-Id", session, "Mcp-Protocol-Version", "2025-06-18").status
	}
	if status := alive(open[0]); status != http.StatusOK {
		t.Fatal(status)
	}
	// One more replaces the session that was idle longest: clients disconnect without a DELETE.
	open = append(open, f.open(t, PathMCP, one))
	for i, want := range map[int]int{0: http.StatusOK, 1: http.StatusNotFound, 2: http.StatusOK, MaxKeySessions: http.StatusOK} {
		if status := alive(open[i]); status != want {
			t.Errorf("session %d: %d, want %d", i, status, want)
		}
	}
	// A session with a stream is not replaced.
	f.mcp.sessions.lock.Lock()
	for _, x := range f.mcp.sessions.byID {
		x.busy++
	}
	f.mcp.sessions.lock.Unlock()
	// security: H3
	if a := f.send(t, http.MethodPost, PathMCP, one, hello); a.status != 429 {
		t.Errorf("one more: %d", a.status)
	}
	f.open(t, PathMCP, other)
	for range 50 { // failed attempts must not use up slots
		f.send(t, http.MethodPost, PathMCP, other, ping)
		f.send(t, http.MethodPost, PathMCP, other, strings.Repeat("x", BodyLimit+1))
	}
	// security: H3
	if n := f.mcp.Stats().Sessions.Load(); n != MaxKeySessions+1 {
		t.Errorf("%d sessions are counted", n)
	}
	s := f.mcp.sessions
	others := MaxSessions - MaxKeySessions - 1
	add := func(n int) {
		s.lock.Lock()
		defer s.lock.Unlock()
		s.total += n
	}
	add(others - 1)
	f.open(t, PathMCP, other)
	// At the limit of the node, the key with the most sessions makes room, while it has idle ones.
	busy := func(n int) {
		s.lock.Lock()
		defer s.lock.Unlock()
		for _, x := range s.byID {
			x.busy += n
		}
	}
	busy(-1)
	s.lock.Lock()
	of := s.byKey[s.byID[open[2]].v.caller.Key]
	s.lock.Unlock()
	before := of.sessions
	// security: H3
	if f.open(t, PathMCP, other); of.sessions != before-1 {
		t.Errorf("the key with the most has %d sessions, had %d", of.sessions, before)
	}
	busy(2)
	// security: H3
	if a := f.send(t, http.MethodPost, PathMCP, other, hello); a.status != 503 {
		t.Errorf("a session above the limit of the node: %d", a.status)
	}
	busy(-1)
	add(1 - others)
}

// When a key is revoked or expires, its sessions, streams and calls in progress end
// within a second.
func TestKeysEndMidStream(t *testing.T) {
	t.Parallel()
	for _, end := range []string{"revoked", "expired"} {
		t.Run(end, func(t *testing.T) {
			for _, era := range []string{"2025-11-25", "2026-07-28", "sse"} {
				t.Run(era, func(t *testing.T) { keyEnds(t, era, end == "revoked") })
			}
		})
	}
}

func keyEnds(t *testing.T, era string, revoke bool) {
	f := newFleet(t)
	script := devicetest.NewScript()
	script.Call = func(string, rawJSON) string { return "" } // it never answers
	f.connect(t, lamp, script)
	life := time.Hour
	if !revoke {
		life = 2 * time.Second
	}
	key, token := f.key(t, "devices:read tools:call", "", life)
	path, version := PathMCP, era
	if era == "sse" {
		path, version = PathSSE, "2024-11-05"
	}
	s := f.host(t, path, version, token, nil)
	failed := make(chan error, 1)
	go func() {
		_, err := s.CallTool(context.Background(), &mcp.CallToolParams{Name: "call_device_tool", Arguments: map[string]any{"device": string(lamp), "tool": "self.audio_speaker.set_volume",
			"arguments": map[string]any{"volume": 1}}})
		failed <- err
	}()
	devicetest.Eventually(t, "the call is on its way", func() bool { return f.mcp.sessions.calls.Load() > 0 })
	if revoke {
		key.Revoked = time.Now()
		if _, err := f.service.Keys().Put(key, time.Now()); err != nil {
			t.Fatal(err)
		}
	}
	begun := time.Now()
	// security: H4
	devicetest.Eventually(t, "its sessions and calls have ended", func() bool {
		return f.mcp.Stats().Sessions.Load() == 0 && f.mcp.sessions.calls.Load() == 0
	})
	// security: H4
	if took := time.Since(begun); revoke && took > time.Second {
		t.Errorf("it continued for %v", took)
	}
	select {
	case <-failed:
	case <-time.After(5 * time.Second): // the client may try to resume first
		// security: H4
		t.Error("the client still waits")
	}
	// security: H4
	if _, err := f.tryHost(t, path, version, token, nil); err == nil {
		t.Error("the key opens another session")
	}
}

// A key ends within a second even while a policy change makes the node compare the
// lists of many sessions with slow nodes.
func TestKeysEndWhileListsAreLookedUp(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	if _, err := f.service.CheckIn(t.Context(), admission.CheckIn{Device: robot, ClientID: "c"}); err != nil {
		t.Fatal(err)
	}
	const open = 50
	for range open {
		session := f.open(t, PathDevices+string(robot), admin)
		if a := f.send(t, http.MethodPost, PathDevices+string(robot), admin, `{"jsonrpc":"2.0","id":2,"method":"tools/list"}`,
			"Mcp-Session-Id", session, "Mcp-Protocol-Version", "2025-06-18"); a.status != http.StatusOK {
			t.Fatalf("tools/list: %d %s", a.status, a.body)
		}
	}
	key, token := f.key(t, "devices:read", "", time.Hour)
	f.open(t, PathMCP, token)
	asked := f.ports.SlowNodes(100 * time.Millisecond)
	devicetest.SetPolicy(t, f.service, access.Policy{Rules: []access.Rule{{Name: "dark", Tools: []string{"self.lamp.on"}, Action: access.Deny}}})
	devicetest.Eventually(t, "the lists are being read", func() bool { return asked() > 0 })
	key.Revoked = time.Now()
	if _, err := f.service.Keys().Put(key, time.Now()); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	devicetest.Eventually(t, "its session has ended", func() bool { return f.mcp.Stats().Sessions.Load() == open })
	// security: H10
	if took := time.Since(begun); took > time.Second || asked() == open {
		t.Errorf("it continued for %v, with %d of %d lists read", took, asked(), open)
	}
}

func TestBadRequests(t *testing.T) {
	f := newFleet(t)
	f.connect(t, lamp, devicetest.NewScript())
	session := f.open(t, PathMCP, admin)
	with := []string{"Mcp-Session-Id", session, "Mcp-Protocol-Version", "2025-06-18"}
	modern := func(method, name string) []string {
		return []string{"Mcp-Protocol-Version", "2026-07-28", "Mcp-Method", method, "Mcp-Name", name}
	}
	const meta = `"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"x","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}`
	call := `{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"find_devices","arguments":{},` + meta + `}}`
	for name, c := range map[string]struct {
		method, path, body string
		headers            []string
		status             int
		contains           string
	}{
		"10 MB":                    {http.MethodPost, PathMCP, strings.Repeat(" ", 10<<20), with, 413, ""},
		"10 MB, modern":            {http.MethodPost, PathMCP, strings.Repeat(" ", 10<<20), modern("tools/call", "find_devices"), 413, ""},
		"not JSON":                 {http.MethodPost, PathMCP, "{", with, 400, ""},
		"unknown session":          {http.MethodPost, PathMCP, ping, []string{"Mcp-Session-Id", "n-test.x", "Mcp-Protocol-Version", "2025-06-18"}, 404, ""},
		"GET without session":      {http.MethodGet, PathMCP, "", nil, 400, ""},
		"PUT":                      {http.MethodPut, PathMCP, "", with, 405, ""},
		"unknown revision":         {http.MethodPost, PathMCP, ping, []string{"Mcp-Session-Id", session, "Mcp-Protocol-Version", "2020-01-01"}, 400, ""},
		"modern":                   {http.MethodPost, PathMCP, call, modern("tools/call", "find_devices"), 200, `"devices"`},
		"other method in header":   {http.MethodPost, PathMCP, call, modern("tools/list", "find_devices"), 400, "-32020"},
		"other name in header":     {http.MethodPost, PathMCP, call, modern("tools/call", "call_many"), 400, "-32020"},
		"other revision in header": {http.MethodPost, PathMCP, call, []string{"Mcp-Protocol-Version", "2027-01-01", "Mcp-Method", "tools/call", "Mcp-Name", "find_devices"}, 400, ""},
		"GET, modern":              {http.MethodGet, PathMCP, "", modern("", ""), 405, ""},
		"DELETE, modern":           {http.MethodDelete, PathMCP, "", modern("", ""), 405, ""},
		"unknown method, modern":   {http.MethodPost, PathMCP, strings.ReplaceAll(call, "tools/call", "tools/explode"), modern("tools/explode", "find_devices"), 404, "-32601"},
		"unknown path":             {http.MethodPost, PathMCP + "/else", hello, nil, 404, ""},
		"unusable device":          {http.MethodPost, PathDevices + "..%2f", hello, nil, 404, ""},
		"unknown device":           {http.MethodPost, PathDevices + "aa:bb:cc:dd:ee:99", hello, nil, 404, "device_unknown"},
		"bad cursor":               {http.MethodPost, PathMCP, `{"jsonrpc":"2.0","id":4,"method":"resources/list","params":{"cursor":"%%%"}}`, with, 200, "-32602"},
		"bad cursor of tools":      {http.MethodPost, PathMCP, `{"jsonrpc":"2.0","id":4,"method":"tools/list","params":{"cursor":"%%%"}}`, with, 200, "-32602"},
		"member of another type":   {http.MethodPost, PathMCP, strings.Replace(call, `"arguments":{}`, `"arguments":{"select":{"room":"lab"}}`, 1), modern("tools/call", "find_devices"), 200, "/select"},
		"unknown member":           {http.MethodPost, PathMCP, strings.Replace(call, `"arguments":{}`, `"arguments":{"stat":"online"}`, 1), modern("tools/call", "find_devices"), 200, "invalid_arguments"},
		"tool of devices' server":  {http.MethodPost, PathMCP, strings.ReplaceAll(call, "find_devices", dispatchTool), modern("tools/call", dispatchTool), 400, "-32602"},
		"dispatch itself":          {http.MethodPost, PathDevices + string(lamp), strings.ReplaceAll(call, "find_devices", dispatchTool), modern("tools/call", dispatchTool), 400, "-32602"},
	} {
		// security: H9
		if a := f.send(t, c.method, c.path, admin, c.body, c.headers...); a.status != c.status || !strings.Contains(a.body, c.contains) {
			t.Errorf("%s: %d %.300s", name, a.status, a.body)
		}
	}
	f.draining.Store(true)
	if a := f.send(t, http.MethodPost, PathMCP, admin, hello); a.status != 503 {
		t.Errorf("a stopping node opens a session: %d", a.status)
	}
	devicetest.Eventually(t, "the sessions of a stopping node end", func() bool { return f.mcp.Stats().Sessions.Load() == 0 })
}

// Clients that try tokens get a delayed answer. A valid token is served at once from the
// same address, and a request without a token does not count.
func TestWrongTokensAreSlowedDown(t *testing.T) {
	t.Parallel()
	f := newFleet(t, func(o *Options) { o.Failures = connlimit.NewFailures(nil) })
	for range connlimit.FailureBurst {
		if a := f.send(t, http.MethodPost, PathMCP, "guess", hello); a.status != http.StatusUnauthorized {
			t.Fatalf("%d", a.status)
		}
	}
	late := make(chan struct{})
	go func() {
		defer close(late)
		begun := time.Now()
		// security: D7
		if a := f.send(t, http.MethodPost, PathMCP, "guess", hello); a.status != http.StatusTooManyRequests || time.Since(begun) < connlimit.FailureDelay {
			t.Errorf("above the limit: %d after %v", a.status, time.Since(begun))
		}
	}()
	begun := time.Now()
	// security: D7
	if a := f.send(t, http.MethodPost, PathMCP, admin, hello); a.status != http.StatusOK || time.Since(begun) > connlimit.FailureDelay/2 {
		t.Errorf("the valid token: %d after %v", a.status, time.Since(begun))
	}
	if a := f.send(t, http.MethodPost, PathMCP, "", hello); a.status != http.StatusUnauthorized || time.Since(begun) > connlimit.FailureDelay {
		t.Errorf("no token: %d", a.status)
	}
	<-late
}

// A request whose id the SDK would change is refused, and nothing runs: its host would wait for an answer that never comes, and could take it
// for that of another request.
func TestIDsThatWouldChange(t *testing.T) {
	f := newFleet(t)
	var calls atomic.Int32
	script := devicetest.NewScript()
	script.Call = func(string, json.RawMessage) string {
		calls.Add(1)
		return `"result":{"content":[{"type":"text","text":"true"}],"isError":false}`
	}
	f.connect(t, lamp, script)
	modern := []string{"Mcp-Protocol-Version", "2026-07-28", "Mcp-Method", "tools/call", "Mcp-Name", "call_device_tool"}
	const call = `{"jsonrpc":"2.0","id":%s,"method":"tools/call","params":{"name":"call_device_tool","arguments":{"device":"` + string(lamp) + `","tool":"self.audio_speaker.set_volume","arguments":{"volume":5}}%m}}`
	body := func(id, meta string) string { return strings.NewReplacer("%s", id, "%m", meta).Replace(call) }
	if f.send(t, http.MethodPost, PathMCP, admin, body("1", ","+benchMeta), modern...); calls.Swap(0) != 1 {
		t.Fatal("the call does not reach the device: the test proves nothing")
	}
	for era, headers := range map[string][]string{"2026-07-28": modern, "2025-06-18": {"Mcp-Session-Id", f.open(t, PathMCP, admin), "Mcp-Protocol-Version", "2025-06-18"}} {
		meta := ""
		if era == "2026-07-28" {
			meta = "," + benchMeta
		}
		for _, id := range []string{"9007199254740993", "-9007199254740993", "12345678901234567890", "1e30", "1.5"} {
			if a := f.send(t, http.MethodPost, PathMCP, admin, body(id, meta), headers...); a.status != 400 || !strings.Contains(a.body, `"id":`+id+`,`) || !strings.Contains(a.body, "-32600") || calls.Load() != 0 {
				t.Errorf("%s, id %s: %d %.200s, %d calls", era, id, a.status, a.body, calls.Load())
			}
		}
		for _, id := range []string{"9007199254740992", "-9007199254740992", "0", `"9007199254740993"`} {
			if a := f.send(t, http.MethodPost, PathMCP, admin, body(id, meta), headers...); a.status != 200 || !strings.Contains(a.body, `"id":`+id+`,`) {
				t.Errorf("%s, id %s: %d %.200s", era, id, a.status, a.body)
			}
		}
		calls.Store(0)
	}
	batch := "[" + body("1", "") + "," + body("9007199254740993", "") + "]"
	session := f.send(t, http.MethodPost, PathMCP, admin, strings.Replace(hello, "2025-06-18", "2025-03-26", 1)).header.Get("Mcp-Session-Id")
	if a := f.send(t, http.MethodPost, PathMCP, admin, batch, "Mcp-Session-Id", session, "Mcp-Protocol-Version", "2025-03-26"); a.status != 400 || !strings.Contains(a.body, "-32600") || calls.Load() != 0 {
		t.Errorf("a batch: %d %.200s, %d calls", a.status, a.body, calls.Load())
	}
}
