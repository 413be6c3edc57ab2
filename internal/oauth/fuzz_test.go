package oauth_test

import (
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"fleetd/internal/oauth"
)

// Whatever a request says, the server answers, and sends nobody to an address that no application has named.
func FuzzAuthorize(f *testing.F) {
	for _, redirect := range []string{callback, "http://127.0.0.1:5555/cb", "http://localhost.evil/cb", "http://127.0.0.1@evil.example/cb", "http://[::1]:1/cb", "HTTPS://app.example.com/callback?kept=1", "com.example.app:/cb", "https://app.example.com%2f.evil.example/", "https:///evil.example"} {
		f.Add(uint8(0), ask("redirect_uri", redirect).Encode(), "scope=devices:read&devices=room%3Dlab&tools=self.a")
	}
	f.Add(uint8(1), "", redeemed("x.y").Encode())
	f.Add(uint8(1), "", refreshed("flr_aaaaaaaa_x").Encode())
	f.Add(uint8(1), "", "grant_type=refresh_token&client_assertion_type=urn:ietf:params:oauth:client-assertion-type:jwt-bearer&client_assertion=eyJhbGciOiJFUzI1NiJ9.e30.AA")
	f.Add(uint8(2), "", `{"client_name":"x","redirect_uris":["https://app.example.com/callback"]}`)
	f.Add(uint8(2), "", `{"redirect_uris":["https://\u0430pp.example.com/"],"jwks":null,"REDIRECT_URIS":[]}`)
	f.Add(uint8(3), "", "token=flr_aaaaaaaa_x&client_id="+url.QueryEscape(appID))
	w := newWorld(f)
	named := map[string]bool{callback: true, "http://127.0.0.1/cb": true, "com.example.app:/cb": true}
	f.Fuzz(func(t *testing.T, which uint8, query, body string) {
		path := []string{oauth.PathAuthorize, oauth.PathToken, oauth.PathRegister, oauth.PathRevoke}[which%4]
		kind := "application/x-www-form-urlencoded"
		if path == oauth.PathRegister {
			kind = "application/json"
		} else if path == oauth.PathAuthorize {
			body += "&decision=allow&secret=" + url.QueryEscape(w.token)
		}
		send := func(path, query, kind, body string) *httptest.ResponseRecorder {
			r := httptest.NewRequest("POST", issuer+path, strings.NewReader(body))
			r.URL.RawQuery = query
			r.Header.Set("Content-Type", kind)
			r.Header.Set("Sec-Fetch-Site", "same-origin")
			out := httptest.NewRecorder()
			w.server.ServeHTTP(out, r)
			return out
		}
		begun := time.Now()
		out := send(path, query, kind, body)
		if out.Code < 200 || out.Code >= 500 && out.Code != 503 || time.Since(begun) > 5*time.Second {
			t.Errorf("%d after %v: %s", out.Code, time.Since(begun), out.Body)
		}
		to := out.Header().Get("Location")
		if to == "" {
			return
		}
		u, err := url.Parse(to)
		if err != nil || path != oauth.PathAuthorize || out.Code != 303 || u.Query().Get("iss") != issuer {
			t.Fatalf("%d to %q", out.Code, to)
		}
		// What was added goes, and so does the port of a loopback address.
		u.RawQuery, _, _ = strings.Cut(u.RawQuery, "&code=")
		if _, added, _ := strings.Cut(u.RawQuery, "code="); added != "" || strings.HasPrefix(u.RawQuery, "code=") {
			u.RawQuery = ""
		}
		if u.Hostname() == "127.0.0.1" {
			u.Host = "127.0.0.1"
		}
		if !named[u.String()] {
			t.Errorf("to %q, which no application has named", to)
		}
	})
}
