package mcpserver

import (
	"net/http"
	"slices"
	"strings"
	"testing"

	"fleetd/internal/connlimit"
)

const console = "https://console.example.com"

// Only pages of allowed origins may read responses.
func TestPages(t *testing.T) {
	f := newFleet(t, func(o *Options) { o.Origins, o.Failures = []string{console}, connlimit.NewFailures(nil) })
	question := []string{"Access-Control-Request-Method", "POST", "Access-Control-Request-Headers", "authorization,content-type,mcp-protocol-version"}
	for _, path := range []string{PathMCP, PathDevices + string(lamp), PathSSE, PathMetadata + PathMCP} {
		for _, origin := range []string{console, "http://localhost:6274", "http://127.0.0.1:6274", "http://[::1]:6274", f.url} {
			a := f.send(t, http.MethodOptions, path, "", "", append(question, "Origin", origin)...)
			if a.status != http.StatusNoContent || a.body != "" {
				t.Errorf("%s of %s: %d %s", path, origin, a.status, a.body)
			}
			mayRead(t, a, origin)
			for name, wants := range map[string]string{"Methods": "GET, POST, DELETE",
				"Headers": "authorization, content-type, accept, last-event-id, mcp-session-id, mcp-protocol-version, mcp-method, mcp-name"} {
				given := strings.Split(strings.ToLower(a.header.Get("Access-Control-Allow-"+name)), ", ")
				for want := range strings.SplitSeq(strings.ToLower(wants), ", ") {
					if !slices.Contains(given, want) {
						t.Errorf("%s of %s: no %s in %s %q", path, origin, want, name, given)
					}
				}
			}
			if a.header.Get("Access-Control-Max-Age") == "" {
				t.Errorf("%s of %s: preflight results are not cached", path, origin)
			}
		}
		for _, origin := range []string{"https://evil.example", "http://console.example.com", "https://console.example.com:8443", "null"} {
			for _, method := range []string{http.MethodOptions, http.MethodGet, http.MethodPost} {
				a := f.send(t, method, path, admin, "", append(question, "Origin", origin)...)
				// security: H1
				if a.status != http.StatusForbidden {
					t.Errorf("%s %s of %s: %d", method, path, origin, a.status)
				}
				// security: H1
				mayNotRead(t, a)
			}
		}
	}
	if a := f.send(t, http.MethodOptions, PathMCP, "", "", append(question, "Origin", console, "Host", "evil.example")...); a.status != http.StatusForbidden {
		t.Errorf("with another host name: %d", a.status)
	} else {
		mayNotRead(t, a)
	}
	if n := f.mcp.Stats().Refused.Get(refusedToken); n != 0 {
		t.Errorf("%d preflight requests are counted as refused", n)
	}
}

// On a node that needs no key, pages of other local servers have no access.
func TestPagesWithoutKeys(t *testing.T) {
	f := newFleet(t, func(o *Options) {
		auth := *o.Auth
		auth.Open = true
		o.Auth, o.Origins = &auth, []string{console}
	})
	for origin, may := range map[string]bool{console: true, "http://localhost:6274": false, f.url: false} {
		asked := f.send(t, http.MethodOptions, PathMCP, "", "", "Access-Control-Request-Method", "POST", "Origin", origin)
		opened := f.send(t, http.MethodPost, PathMCP, "", hello, "Origin", origin)
		if opened.status != 200 {
			t.Errorf("%s: %d", origin, opened.status)
		}
		for _, a := range []answer{asked, opened} {
			if may {
				mayRead(t, a, origin)
			} else {
				mayNotRead(t, a)
			}
		}
	}
}

// A page can read every response, including errors.
func TestPagesReadResponses(t *testing.T) {
	f := newFleet(t, func(o *Options) { o.Origins = []string{console} })
	for name, c := range map[string]struct {
		method, path, token, body string
		headers                   []string
		status                    int
		reads                     string
	}{
		"a session":         {http.MethodPost, PathMCP, admin, hello, nil, 200, "Mcp-Session-Id"},
		"no key":            {http.MethodPost, PathMCP, "", hello, nil, 401, "WWW-Authenticate"},
		"no preflight":      {http.MethodOptions, PathMCP, "", "", nil, 401, "WWW-Authenticate"},
		"unknown path":      {http.MethodPost, PathMCP + "/else", admin, hello, nil, 404, ""},
		"unknown session":   {http.MethodPost, PathMCP, admin, ping, []string{"Mcp-Session-Id", "gone"}, 404, ""},
		"unknown method":    {http.MethodPut, PathMCP, admin, "", nil, 405, ""},
		"no stream":         {http.MethodGet, PathMCP, admin, "", nil, 400, ""},
		"without a session": {http.MethodPost, PathMCP, admin, ping, []string{"Mcp-Protocol-Version", "2026-07-28"}, 400, ""},
		"no SSE session":    {http.MethodPost, PathSSE, admin, ping, nil, 404, ""},
	} {
		a := f.send(t, c.method, c.path, c.token, c.body, append(c.headers, "Origin", console)...)
		if a.status != c.status {
			t.Errorf("%s: %d %s", name, a.status, a.body)
		}
		mayRead(t, a, console)
		exposed := strings.Split(a.header.Get("Access-Control-Expose-Headers"), ", ")
		if c.reads != "" && (a.header.Get(c.reads) == "" || !slices.Contains(exposed, c.reads)) {
			t.Errorf("%s: %q of %v", name, exposed, a.header)
		}
		mayNotRead(t, f.send(t, c.method, c.path, c.token, c.body, c.headers...)) // without an Origin
	}
	f.draining.Store(true)
	if a := f.send(t, http.MethodPost, PathMCP, admin, hello, "Origin", console); a.status != 503 || a.header.Get("Retry-After") == "" {
		t.Errorf("a stopping node: %d %v", a.status, a.header)
	} else {
		mayRead(t, a, console)
	}
	if a := f.send(t, http.MethodGet, PathMetadata+PathMCP, "", "", "Origin", console); a.status != 200 || a.header.Get("Access-Control-Allow-Origin") != "*" {
		t.Errorf("the metadata: %d %v", a.status, a.header)
	}
}

func mayRead(t *testing.T, a answer, origin string) {
	t.Helper()
	if got := a.header.Values("Access-Control-Allow-Origin"); !slices.Equal(got, []string{origin}) {
		t.Errorf("%d for %s: allowed to %q", a.status, origin, got)
	}
	if !slices.Contains(a.header.Values("Vary"), "Origin") {
		t.Errorf("%d for %s: a cache would return it to other pages", a.status, origin)
	}
	if a.header.Get("Access-Control-Allow-Credentials") != "" {
		t.Errorf("%d for %s: cookies are allowed", a.status, origin)
	}
}

func mayNotRead(t *testing.T, a answer) {
	t.Helper()
	for name := range a.header {
		if strings.HasPrefix(name, "Access-Control-") {
			t.Errorf("%d with %s", a.status, name)
		}
	}
}
