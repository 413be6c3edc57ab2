package mcpserver

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
	"fleetd/internal/selector"
)

// allow makes an access token of a grant; the token is `flt_GRANT RESOURCE`.
func (f *testFleet) allow(t *testing.T, keyToken, scopes, resource string) string {
	t.Helper()
	who, err := f.service.Keys().Authenticate(keyToken, clock.Now())
	if err != nil {
		t.Fatal(err)
	}
	s, err := access.ParseScopes(strings.Fields(scopes))
	if err != nil {
		t.Fatal(err)
	}
	k, err := f.service.Keys().GrantKey(who, access.Grant{Host: "app.example", Resource: resource}, s, selector.Selector{}, nil, clock.Now())
	if err != nil {
		t.Fatal(err)
	}
	k, err = f.service.IssueGrant(t.Context(), access.Principal{From: "192.0.2.1:1"}, k, func(id string) string { return id })
	if err != nil {
		t.Fatal(err)
	}
	return access.AccessPrefix + k.ID + " " + resource
}

func newGrantedFleet(t *testing.T) *testFleet {
	f := newFleet(t, func(o *Options) { o.PublicURL, o.Login = "https://fleet.example.org", true })
	f.service.Keys().SetAccessTokens(func(token string, _ time.Time) (grant, resource string, err error) {
		grant, resource, ok := strings.Cut(strings.TrimPrefix(token, access.AccessPrefix), " ")
		if !ok {
			return "", "", access.ErrToken
		}
		if resource == "late" {
			return "", "", access.ErrExpired
		}
		return grant, resource, nil
	})
	return f
}

func TestAccessTokens(t *testing.T) {
	f := newGrantedFleet(t)
	f.connect(t, lamp, devicetest.NewScript())
	_, key := f.key(t, "devices:read tools:call", "", time.Hour)
	whole, old, one := f.allow(t, key, "devices:read tools:call", PathMCP), f.allow(t, key, "devices:read tools:call", PathSSE), f.allow(t, key, "devices:read", PathDevices+string(lamp))
	for name, c := range map[string]struct {
		path, token string
		status      int
	}{
		"whole fleet":                {PathMCP, whole, 200},
		"one device of it":           {PathDevices + string(lamp), whole, 200},
		"one device":                 {PathDevices + string(lamp), one, 200},
		"one device, spelled freely": {PathDevices + strings.ToUpper(lamp.Token()), one, 200},
		"another device":             {PathDevices + string(robot), one, 401},
		"the fleet with one device":  {PathMCP, one, 401},
		"the fleet with old address": {PathMCP, old, 401},
		"expired":                    {PathMCP, access.AccessPrefix + "x late", 401},
		"unknown":                    {PathMCP, access.AccessPrefix + "aaaaaaaa " + PathMCP, 401},
	} {
		// security: H21
		if a := f.send(t, http.MethodPost, c.path, c.token, hello); a.status != c.status {
			t.Errorf("%s: %d %s", name, a.status, a.body)
		}
	}
	f.ports.SetAway(true)
	if a := f.send(t, http.MethodPost, PathMCP, access.AccessPrefix+"aaaaaaaa "+PathMCP, hello); a.status != 503 || a.header.Get("Retry-After") == "" {
		t.Errorf("a grant that this node has not heard of, and cannot read: %d %s", a.status, a.body)
	}
	f.ports.SetAway(false)
	a := f.send(t, http.MethodPost, PathMCP, access.AccessPrefix+"x late", hello)
	if got, want := a.header.Get("WWW-Authenticate"), `Bearer resource_metadata="https://fleet.example.org/.well-known/oauth-protected-resource/mcp", scope="devices:read tools:call", error="invalid_token"`; got != want {
		t.Errorf("challenge %s", got)
	}
	a = f.send(t, http.MethodPost, PathMCP, "", hello)
	if got := a.header.Get("WWW-Authenticate"); strings.Contains(got, "error=") {
		t.Errorf("challenge without a token: %s", got)
	}
	for path, resource := range map[string]string{PathMCP: PathMCP, PathSSE: PathSSE, PathDevices + string(lamp): PathDevices + string(lamp), PathDevices + strings.ToUpper(lamp.Token()): PathDevices + strings.ToUpper(lamp.Token()), "": PathMCP} {
		a = f.send(t, http.MethodGet, PathMetadata+path, "", "", "Host", "localhost")
		if !strings.Contains(a.body, `"resource":"https://fleet.example.org`+resource+`"`) || !strings.Contains(a.body, `"authorization_servers":["https://fleet.example.org"]`) || !strings.Contains(a.body, `"scopes_supported":["devices:read","tools:call"]`) {
			t.Errorf("%s: %s", path, a.body)
		}
	}
	for _, path := range []string{PathMCP + "/", PathMCP + "/foo", PathDevices, PathDevices + "a/b", "/authorize", "/v1"} {
		if a = f.send(t, http.MethodGet, PathMetadata+path, "", ""); a.status != 404 {
			t.Errorf("%s has metadata: %s", path, a.body)
		}
	}
	a = f.send(t, http.MethodPost, PathDevices+strings.ToUpper(lamp.Token()), "", hello)
	if got := a.header.Get("WWW-Authenticate"); !strings.Contains(got, PathMetadata+PathDevices+strings.ToUpper(lamp.Token())+`"`) {
		t.Errorf("challenge of a device that is spelled freely: %s", got)
	}
}

// Without the login, the public name still is the source of every address.
func TestPublicURLWithoutLogin(t *testing.T) {
	f := newFleet(t, func(o *Options) { o.PublicURL = "https://fleet.example.org" })
	forged := []string{"Host", "localhost", "X-Forwarded-Proto", "http"}
	a := f.send(t, http.MethodGet, PathMetadata+PathMCP, "", "", forged...)
	if !strings.Contains(a.body, `"resource":"https://fleet.example.org/mcp"`) || strings.Contains(a.body, "authorization_servers") || !strings.Contains(a.body, `"admin"`) {
		t.Error(a.body)
	}
	a = f.send(t, http.MethodPost, PathMCP, "", hello, forged...)
	if got := a.header.Get("WWW-Authenticate"); got != `Bearer resource_metadata="https://fleet.example.org/.well-known/oauth-protected-resource/mcp"` {
		t.Errorf("challenge %s", got)
	}
}

// A session belongs to its grant: not to another one of the same key, nor to the key.
func TestSessionsBelongToTheirGrant(t *testing.T) {
	f := newGrantedFleet(t)
	_, key := f.key(t, "devices:read tools:call", "", time.Hour)
	one, other := f.allow(t, key, "devices:read", PathMCP), f.allow(t, key, "devices:read", PathMCP)
	session := f.open(t, PathMCP, one)
	with := []string{"Mcp-Session-Id", session, "Mcp-Protocol-Version", "2025-06-18"}
	for name, c := range map[string]struct {
		token  string
		status int
	}{"its grant": {one, 200}, "another grant": {other, 403}, "the key": {key, 403}} {
		// security: H21
		if a := f.send(t, http.MethodPost, PathMCP, c.token, ping, with...); a.status != c.status {
			t.Errorf("%s: %d %s", name, a.status, a.body)
		}
	}
	id, _, _ := strings.Cut(strings.TrimPrefix(one, access.AccessPrefix), " ")
	if err := f.service.EndGrant(t.Context(), devicetest.Admin, id, "test"); err != nil {
		t.Fatal(err)
	}
	// security: H26
	if a := f.send(t, http.MethodPost, PathMCP, one, ping, with...); a.status != 401 {
		t.Errorf("after the end of the grant: %d", a.status)
	}
	devicetest.Eventually(t, "the session ends", func() bool { return f.mcp.Stats().Sessions.Load() == 0 })
}

func TestInsufficientScope(t *testing.T) {
	f := newGrantedFleet(t)
	script := devicetest.NewScript()
	script.Tools = "[" + devicetest.Volume + "," + strings.Replace(devicetest.Reboot, "self.reboot", "self.get_system_info", 1) + "]"
	f.connect(t, lamp, script)
	name := "Lamp"
	if err := f.service.Edit(t.Context(), devicetest.Admin, lamp, 0, fleet.Edit{Name: &name}); err != nil {
		t.Fatal(err)
	}
	_, key := f.key(t, "devices:read tools:call events:read", "", time.Hour)
	granted := f.allow(t, key, "devices:read", PathMCP)
	call := func(tool string) string {
		return `{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"` + tool + `","arguments":{}}}`
	}
	session := f.open(t, PathMCP, granted)
	with := []string{"Mcp-Session-Id", session, "Mcp-Protocol-Version", "2025-06-18"}
	for tool, want := range map[string]string{"find_devices": "", "call_device_tool": "tools:call", "list_recent_events": "events:read", "run_job": "jobs tools:call", "get_job": "jobs:read", "explain_device": "devices:read events:read"} {
		a := f.send(t, http.MethodPost, PathMCP, granted, call(tool), with...)
		// security: H21
		if status := map[bool]int{true: 200, false: 403}[want == ""]; a.status != status || want != "" && !strings.Contains(a.header.Get("WWW-Authenticate"), `error="insufficient_scope", scope="`+want+`"`) {
			t.Errorf("%s: %d %v %s", tool, a.status, a.header, a.body)
		}
	}
	if a := f.send(t, http.MethodPost, PathDevices+string(lamp), granted, call("self.audio_speaker.set_volume")); a.status != 403 {
		t.Errorf("at a device: %d %s", a.status, a.body)
	}
	// What a call is of may need more than the tool of the fleet.
	plain := f.allow(t, key, "devices:read tools:call", PathMCP)
	plainSession := f.open(t, PathMCP, plain)
	for name, c := range map[string]struct{ path, tool, arguments, want string }{
		"a tool for models":          {PathMCP, "call_device_tool", `{"device":"` + string(lamp) + `","tool":"self.audio_speaker.set_volume","arguments":{"volume":1}}`, ""},
		"a call that waits":          {PathMCP, "call_device_tool", `{"device":"` + string(lamp) + `","tool":"self.audio_speaker.set_volume","later":"1h"}`, "tools:call jobs"},
		"a message that waits":       {PathMCP, "send_message", `{"text":"x","later":"1h"}`, "tools:call jobs"},
		"user-only":                  {PathMCP, "call_device_tool", `{"device":"` + string(robot) + `","tool":"self.reboot"}`, "tools:call tools:call:user"},
		"marked by the device":       {PathMCP, "call_device_tool", `{"device":"` + string(lamp) + `","tool":"self.get_system_info"}`, "tools:call tools:call:user"},
		"of a device with a name":    {PathMCP, "call_device_tool", `{"device":"Lamp","tool":"get_system_info"}`, "tools:call tools:call:user"},
		"of a group":                 {PathMCP, "call_many", `{"tool":"self.reboot"}`, "tools:call tools:call:user"},
		"user-only, in a job":        {PathMCP, "run_job", `{"select":"","tool":"self.reboot"}`, "jobs tools:call tools:call:user"},
		"at the address of a device": {PathDevices + string(lamp), "get_system_info", `{}`, "tools:call tools:call:user"},
	} {
		body := `{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"` + c.tool + `","arguments":` + c.arguments + `}}`
		var headers []string
		if c.path == PathMCP {
			headers = []string{"Mcp-Session-Id", plainSession, "Mcp-Protocol-Version", "2025-06-18"}
		}
		a := f.send(t, http.MethodPost, c.path, plain, body, headers...)
		// security: H21
		if status := map[bool]int{true: 200, false: 403}[c.want == ""]; a.status != status || c.want != "" && !strings.Contains(a.header.Get("WWW-Authenticate"), `error="insufficient_scope", scope="`+c.want+`"`) {
			t.Errorf("%s: %d %v %s", name, a.status, a.header, a.body)
		}
	}
	caller := f.allow(t, key, "tools:call", PathMCP)
	if a := f.send(t, http.MethodPost, PathDevices+string(lamp), caller, hello); a.status != 403 || !strings.Contains(a.header.Get("WWW-Authenticate"), `error="insufficient_scope", scope="devices:read"`) {
		t.Errorf("the address of a device: %d %v %s", a.status, a.header, a.body)
	}
	for uri, want := range map[string]string{"fleet://photos/x": "photos:read", "fleet://devices/" + string(lamp): ""} {
		a := f.send(t, http.MethodPost, PathMCP, granted, `{"jsonrpc":"2.0","id":7,"method":"resources/read","params":{"uri":"`+uri+`"}}`, with...)
		if status := map[bool]int{true: 200, false: 403}[want == ""]; a.status != status || want != "" && !strings.Contains(a.header.Get("WWW-Authenticate"), `scope="`+want+`"`) {
			t.Errorf("%s: %d %v %s", uri, a.status, a.header, a.body)
		}
	}
	_, reader := f.key(t, "devices:read", "", time.Hour)
	with[1] = f.open(t, PathMCP, reader)
	if a := f.send(t, http.MethodPost, PathMCP, reader, call("list_recent_events"), with...); a.status != 200 {
		t.Errorf("with a pasted key: %d %s", a.status, a.body)
	}
}

// Each tool of the fleet says which scopes it needs.
func TestToolScopes(t *testing.T) {
	for _, tool := range fleetTools {
		if len(toolScopes[tool.Name]) == 0 {
			t.Errorf("%s has no scopes", tool.Name)
		}
	}
}
