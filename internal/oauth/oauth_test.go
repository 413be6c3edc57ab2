package oauth_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/connlimit"
	"fleetd/internal/credential"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
	"fleetd/internal/oauth"
	"fleetd/internal/selector"
)

const (
	issuer   = "https://fleet.example.org"
	callback = "https://app.example.com/callback?kept=1"
	appID    = "https://app.example.com/mcp/client.json"
	verifier = "a-verifier-of-at-least-43-characters-for-pkce-0123456789"
)

// world is an authorization server over a core without a network, with one key.
type world struct {
	t       testing.TB
	ports   *devicetest.Ports
	core    *fleet.Service
	mint    *credential.Mint
	auth    *access.Authenticator
	server  *oauth.Server
	key     access.Key
	token   string
	mu      sync.Mutex
	web     map[string]string // documents by URL
	fetches int
	slow    time.Duration // of each request
}

func newWorld(t testing.TB, change ...func(*oauth.Options)) *world {
	t.Helper()
	w := &world{t: t, ports: devicetest.New(), web: map[string]string{}}
	w.core = w.ports.Service(t, fleet.Config{})
	var err error
	if w.mint, err = credential.New([]byte("0123456789abcdef")); err != nil {
		t.Fatal(err)
	}
	w.core.Keys().SetAdmin(w.mint.AdminToken)
	w.core.Keys().SetAccessTokens(oauth.AccessToken(w.mint))
	w.auth = &access.Authenticator{Keys: w.core.Keys(), IsAdmin: w.mint.IsAdmin}
	opt := oauth.Options{Issuer: issuer, CIMD: true, Hosts: []string{"*"}, Service: w.core, Auth: w.auth, Mint: w.mint, Client: &http.Client{Transport: w, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }},
		Log: slog.New(slog.DiscardHandler)}
	for _, c := range change {
		c(&opt)
	}
	w.server = oauth.New(opt)
	w.publish(appID, `{"client_id":"`+appID+`","client_name":"Example App","redirect_uris":["`+callback+`","http://127.0.0.1/cb","com.example.app:/cb"]}`)
	w.key, w.token = w.makeKey("kitchen", access.AllScopes()&^scopes("admin"), `{"room":"kitchen"}`, "self.*")
	return w
}

func scopes(names ...string) access.Scopes {
	s, err := access.ParseScopes(names)
	if err != nil {
		panic(err)
	}
	return s
}

func (w *world) makeKey(name string, s access.Scopes, devices string, tools ...string) (access.Key, string) {
	w.t.Helper()
	params := fleet.NewKeyParams{Name: name, Scopes: s, Tools: tools}
	if devices != "" {
		if err := json.Unmarshal([]byte(devices), &params.Devices); err != nil {
			w.t.Fatal(err)
		}
	}
	k, token, err := w.core.CreateKey(w.t.Context(), devicetest.Admin, params)
	if err != nil {
		w.t.Fatal(err)
	}
	return k, token
}

// RoundTrip is the Internet.
func (w *world) RoundTrip(r *http.Request) (*http.Response, error) {
	time.Sleep(w.slow)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fetches++
	text, ok := w.web[r.URL.String()]
	out := httptest.NewRecorder()
	out.Header().Set("Content-Type", "application/json")
	switch {
	case !ok:
		out.WriteHeader(404)
	case strings.HasPrefix(text, "https://"):
		out.Header().Set("Location", text)
		out.WriteHeader(302)
	default:
		_, _ = io.WriteString(out, text)
	}
	return out.Result(), nil
}

func (w *world) publish(address, text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.web[address] = text
}

func challenge(verifier string) string {
	sum := sha256.Sum256([]byte(verifier))
	return base64.RawURLEncoding.EncodeToString(sum[:])
}

// ask are the parameters of a sound request; pairs of change replace or, empty, remove some.
func ask(change ...string) url.Values {
	q := url.Values{"response_type": {"code"}, "client_id": {appID}, "redirect_uri": {callback}, "state": {"st&te"}, "code_challenge": {challenge(verifier)},
		"code_challenge_method": {"S256"}, "scope": {"devices:read tools:call offline_access"}, "resource": {issuer + "/mcp"}}
	for i := 0; i < len(change); i += 2 {
		if change[i+1] == "" {
			q.Del(change[i])
		} else {
			q.Set(change[i], change[i+1])
		}
	}
	return q
}

func (w *world) do(method, path string, query, form url.Values, headers ...string) *httptest.ResponseRecorder {
	w.t.Helper()
	r := httptest.NewRequest(method, issuer+path+"?"+query.Encode(), strings.NewReader(form.Encode()))
	if form != nil {
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	out := httptest.NewRecorder()
	w.server.ServeHTTP(out, r)
	return out
}

// submit sends the form of the consent page.
func (w *world) submit(query url.Values, secret string, form url.Values) *httptest.ResponseRecorder {
	w.t.Helper()
	if form == nil {
		form = url.Values{"scope": {"devices:read", "tools:call"}}
	}
	form.Set("secret", secret)
	if form.Get("decision") == "" {
		form.Set("decision", "allow")
	}
	return w.do("POST", oauth.PathAuthorize, query, form, "Sec-Fetch-Site", "same-origin")
}

// code consents, and returns the code that the browser carries back.
func (w *world) code(query url.Values, form url.Values) string {
	w.t.Helper()
	out := w.submit(query, w.token, form)
	to, err := url.Parse(out.Header().Get("Location"))
	if out.Code != http.StatusSeeOther || err != nil || to.Query().Get("code") == "" {
		w.t.Fatalf("%d %v %s", out.Code, out.Header(), out.Body)
	}
	return to.Query().Get("code")
}

type answer struct {
	Access  string `json:"access_token"`
	Refresh string `json:"refresh_token"`
	Scope   string `json:"scope"`
	Expires int    `json:"expires_in"`
	Error   string `json:"error"`
	Text    string `json:"error_description"`
	status  int
}

// post sends a request to the token endpoint or another one.
func (w *world) post(path string, form url.Values) (a answer) {
	w.t.Helper()
	out := w.do("POST", path, nil, form)
	a.status = out.Code
	if out.Body.Len() > 0 {
		if err := json.Unmarshal(out.Body.Bytes(), &a); err != nil {
			w.t.Fatalf("%s: %v", out.Body, err)
		}
	}
	return a
}

func redeemed(code string, change ...string) url.Values {
	f := url.Values{"grant_type": {"authorization_code"}, "code": {code}, "client_id": {appID}, "redirect_uri": {callback}, "code_verifier": {verifier}}
	for i := 0; i < len(change); i += 2 {
		f.Set(change[i], change[i+1])
	}
	return f
}

func refreshed(token string) url.Values {
	return url.Values{"grant_type": {"refresh_token"}, "refresh_token": {token}, "client_id": {appID}}
}

// grant logs an application in.
func (w *world) grant() answer {
	w.t.Helper()
	a := w.post(oauth.PathToken, redeemed(w.code(ask(), nil)))
	if a.status != 200 {
		w.t.Fatalf("%+v", a)
	}
	return a
}

// opens returns who uses a token at a path.
func (w *world) opens(token, path string) (*access.Caller, error) {
	who, _, err := w.auth.AuthenticateAt(token, path, clock.Now())
	return who, err
}

func TestLogin(t *testing.T) { synctest.Test(t, testLogin) }

func testLogin(t *testing.T) {
	w := newWorld(t)
	out := w.do("GET", oauth.PathAuthorize, ask(), nil)
	text := out.Body.String()
	for _, want := range []string{"Allow <strong>app.example.com</strong>", "“Example App”", "<strong>https://app.example.com</strong>", `value="devices:read" checked`, `type="password"`} {
		if !strings.Contains(text, want) {
			t.Errorf("the page has no %s:\n%s", want, text)
		}
	}
	if strings.Contains(text, "unverified") || strings.Contains(text, `class="warning"`) || strings.Contains(text, "offline_access") {
		t.Errorf("the page:\n%s", text)
	}
	h := out.Header()
	if p := h.Get("Content-Security-Policy"); !strings.Contains(p, "default-src 'none'") || !strings.Contains(p, "frame-ancestors 'none'") || strings.Contains(p, "form-action") ||
		h.Get("Referrer-Policy") != "same-origin" || h.Get("Cross-Origin-Opener-Policy") != "" || h.Get("Cache-Control") != "no-store" {
		t.Errorf("headers %v", h)
	}
	out = w.submit(ask(), w.token, nil)
	to, err := url.Parse(out.Header().Get("Location"))
	if err != nil || out.Code != http.StatusSeeOther {
		t.Fatalf("%d %s", out.Code, out.Body)
	}
	if q := to.Query(); q.Get("iss") != issuer || q.Get("state") != "st&te" || q.Get("kept") != "1" || to.Host != "app.example.com" {
		t.Errorf("redirect %v", to)
	}
	a := w.post(oauth.PathToken, redeemed(to.Query().Get("code")))
	if a.status != 200 || a.Scope != "devices:read tools:call" || a.Expires != 900 {
		t.Fatalf("%+v", a)
	}
	who, err := w.opens(a.Access, "/mcp")
	// security: H20
	if err != nil || who.Key != w.key.ID || who.Through == "" || who.Scopes != scopes("devices:read", "tools:call") || who.Devices.String() != "room=kitchen" || len(who.Tools) != 1 {
		t.Fatalf("%+v, %v", who, err)
	}
	for path, open := range map[string]bool{"/mcp": true, "/sse": true, "/mcp/devices/aa:bb:cc:dd:ee:ff": true, "/mcpx": false, "/v1/devices": false, "": false} {
		if _, err := w.opens(a.Access, path); (err == nil) != open {
			t.Errorf("%s: %v", path, err)
		}
	}
	// security: H21
	if _, err := w.auth.Authenticate(a.Access, clock.Now()); err != access.ErrResource {
		t.Errorf("REST: %v", err)
	}
	// security: H20
	if _, err := w.core.Keys().GrantKey(who, access.Grant{}, scopes("devices:read"), selector.Selector{}, nil, clock.Now()); err == nil {
		t.Error("a grant allowed another application")
	}
	if again := w.post(oauth.PathToken, redeemed(to.Query().Get("code"))); again.status != 400 || again.Error != "invalid_grant" {
		t.Errorf("the code twice: %+v", again)
	}
}

// What is wrong with a request is shown, and never redirected.
func TestRequestsThatAreRefused(t *testing.T) { synctest.Test(t, testRequestsThatAreRefused) }

func testRequestsThatAreRefused(t *testing.T) {
	w := newWorld(t, func(o *oauth.Options) { o.Hosts = []string{"*.example.com", "127.0.0.1", "com.example.app:"} })
	w.publish("https://app.example.com/other", `{"client_id":"https://app.example.com/mcp/client.json","redirect_uris":["https://app.example.com/"]}`)
	w.publish("https://app.example.com/secret", `{"client_id":"https://app.example.com/secret","client_secret":"s","redirect_uris":["https://app.example.com/"]}`)
	w.publish("https://app.example.com/moved", appID)
	w.publish("https://%D0%B0pp.example.com/app", `{"client_id":"https://аpp.example.com/app","redirect_uris":["`+callback+`"]}`)
	w.publish("https://app.example.com/dots", `{"client_id":"https://app.example.com/dots","redirect_uris":["https://claude.ai%E3%80%82evil.example.com/"]}`)
	w.publish("https://evil.example.net/app", `{"client_id":"https://evil.example.net/app","redirect_uris":["https://app.example.com/"]}`)
	for name, change := range map[string][]string{
		"no client":                 {"client_id", ""},
		"unknown client":            {"client_id", "https://app.example.com/none"},
		"http":                      {"client_id", "http://app.example.com/mcp/client.json"},
		"no path":                   {"client_id", "https://app.example.com/"},
		"dots":                      {"client_id", "https://app.example.com/mcp/../mcp/client.json"},
		"user":                      {"client_id", "https://u@app.example.com/mcp/client.json"},
		"a host that looks alike":   {"client_id", "https://аpp.example.com/app"},
		"a redirect of such a host": {"client_id", "https://app.example.com/dots", "redirect_uri", "https://claude.ai%E3%80%82evil.example.com/"},
		"another's document":        {"client_id", "https://app.example.com/other"},
		"with a secret":             {"client_id", "https://app.example.com/secret"},
		"redirected":                {"client_id", "https://app.example.com/moved"},
		"host not allowed":          {"client_id", "https://evil.example.net/app"},
		"not registered here":       {"client_id", "flc_AAAA"},
		"redirect of others":        {"redirect_uri", "https://evil.example.com/callback"},
		"redirect with more":        {"redirect_uri", callback + "&x=1"},
		"script":                    {"redirect_uri", "javascript:alert(1)"},
		"http elsewhere":            {"redirect_uri", "http://app.example.com/cb"},
		"loopback, another path":    {"redirect_uri", "http://127.0.0.1:5555/other"},
		"loopback, another name":    {"redirect_uri", "http://localhost:5555/cb"},
		"fragment":                  {"redirect_uri", callback + "#x"},
		"no PKCE":                   {"code_challenge", ""},
		"plain PKCE":                {"code_challenge_method", "plain"},
		"implicit":                  {"response_type", "token"},
		"foreign resource":          {"resource", "https://other.example.org/mcp"},
		"resource of everything":    {"resource", issuer},
		"resource that goes up":     {"resource", issuer + "/mcp/devices/../../v1"},
		"resource of no device":     {"resource", issuer + "/mcp/devices/"},
		"resource that begins so":   {"resource", issuer + ".evil.example/mcp"},
	} {
		for _, method := range []string{"GET", "POST"} {
			time.Sleep(7 * time.Second) // documents are fetched ten times a minute
			var out *httptest.ResponseRecorder
			if method == "GET" {
				out = w.do("GET", oauth.PathAuthorize, ask(change...), nil)
			} else {
				out = w.submit(ask(change...), w.token, nil)
			}
			// security: H22
			if out.Code < 400 || out.Code >= 500 || out.Header().Get("Location") != "" || !strings.Contains(out.Body.String(), "This does not work") || strings.Contains(out.Body.String(), "<form") {
				t.Errorf("%s %s: %d %v %s", name, method, out.Code, out.Header(), out.Body)
			}
		}
	}
	time.Sleep(time.Minute)
	for name, change := range map[string][]string{"any port": {"redirect_uri", "http://127.0.0.1:5555/cb"}, "private scheme": {"redirect_uri", "com.example.app:/cb"}} {
		if out := w.do("GET", oauth.PathAuthorize, ask(change...), nil); out.Code != 200 || !strings.Contains(out.Body.String(), "program on the machine") {
			t.Errorf("%s: %d %s", name, out.Code, out.Body)
		}
	}
	// security: H22
	for _, headers := range [][]string{{}, {"Sec-Fetch-Site", "cross-site"}, {"Sec-Fetch-Site", "same-site"}, {"Origin", "https://evil.example"}, {"Origin", "null"}} {
		if out := w.do("POST", oauth.PathAuthorize, ask(), url.Values{"secret": {w.token}, "scope": {"devices:read"}, "decision": {"allow"}}, headers...); out.Code != http.StatusForbidden {
			t.Errorf("%v: %d", headers, out.Code)
		}
	}
	if out := w.do("POST", oauth.PathAuthorize, ask(), url.Values{"secret": {w.token}, "scope": {"devices:read"}, "decision": {"allow"}}, "Origin", issuer); out.Code != http.StatusSeeOther {
		t.Errorf("a browser without Sec-Fetch-Site: %d", out.Code)
	}
}

// A person's key, or a code made from it, allows at most what it may do itself.
func TestWhoMayAllow(t *testing.T) { synctest.Test(t, testWhoMayAllow) }

func testWhoMayAllow(t *testing.T) {
	w := newWorld(t)
	now := clock.Now()
	by := func(token string) access.Principal {
		who, err := w.core.Keys().Authenticate(token, now)
		if err != nil {
			t.Fatal(err)
		}
		return access.Principal{Caller: who, Via: access.ViaREST}
	}
	consentCode := func(p access.Principal, most fleet.Consent) string {
		code := w.mint.Code(access.CodeConsent, now.Add(access.ConsentCodeLife))
		if err := w.core.SaveConsentCode(t.Context(), p, most, code, now.Add(access.ConsentCodeLife)); err != nil {
			t.Fatal(err)
		}
		return code
	}
	_, reader := w.makeKey("reader", scopes("devices:read"), "")
	consoleCode := w.mint.Code(access.CodeConsole, now.Add(time.Minute))
	if err := w.core.SaveConsoleCode(t.Context(), by(w.token), 0, consoleCode, now.Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	adminCode := consentCode(devicetest.Admin, fleet.Consent{Scopes: scopes("devices:read", "tools:call"), Tools: []string{"self.a"}})
	readerCode := consentCode(by(w.token), fleet.Consent{Scopes: scopes("devices:read")})
	oldCode := w.mint.Code(access.CodeConsent, now.Add(-time.Second))
	for name, tc := range map[string]struct {
		secret string
		form   url.Values
		status int
		text   string
	}{
		"nothing":           {"", nil, 400, "keys allow"},
		"wrong":             {"fld_aaaaaaaa_" + strings.Repeat("a", 32), nil, 401, "not valid"},
		"admin token":       {w.mint.AdminToken(), nil, 400, "admin token is not taken"},
		"console code":      {consoleCode, nil, 400, "code for the console"},
		"too few rights":    {reader, nil, 400, "does not have the scope tools:call"},
		"no right chosen":   {w.token, url.Values{}, 400, "at least one right"},
		"a right of admins": {w.token, url.Values{"scope": {"devices:read", "devices:write"}}, 303, ""},
		"bad selection":     {w.token, url.Values{"scope": {"devices:read"}, "devices": {"a b c"}}, 400, "Devices"},
		"more tools":        {w.token, url.Values{"scope": {"tools:call"}, "tools": {"*"}}, 400, "limited to the tools"},
		"a code for less":   {readerCode, url.Values{"scope": {"devices:read", "tools:call"}}, 303, ""},
		"a code too late":   {oldCode, nil, 401, "has expired"},
		"fewer tools":       {w.token, url.Values{"scope": {"tools:call"}, "tools": {"self.get_device_status"}}, 303, ""},
		"code of admin":     {adminCode, url.Values{"scope": {"devices:read"}, "tools": {"self.a"}}, 303, ""},
	} {
		out := w.submit(ask("scope", "devices:read tools:call devices:write"), tc.secret, tc.form)
		if out.Code != tc.status || !strings.Contains(out.Body.String(), tc.text) {
			t.Errorf("%s: %d\n%s", name, out.Code, out.Body)
		}
		// security: H23
		if strings.Contains(out.Body.String(), tc.secret) && len(tc.secret) > 8 {
			t.Errorf("%s: the page repeats the secret", name)
		}
	}
	// security: H23
	if out := w.submit(ask(), adminCode, nil); out.Code != 401 || !strings.Contains(out.Body.String(), "works once") {
		t.Errorf("a consent code twice: %d %s", out.Code, out.Body)
	}
	if out := w.submit(ask(), w.token, url.Values{"decision": {"refuse"}}); out.Code != 303 || !strings.Contains(out.Header().Get("Location"), "error=access_denied") {
		t.Errorf("refused: %d %v", out.Code, out.Header())
	}
	if _, _, err := w.core.RedeemConsoleCode(t.Context(), access.Principal{}, consentCode(by(w.token), fleet.Consent{})); err == nil {
		t.Error("a consent code opened the console")
	}
}

func TestCodesAreBound(t *testing.T) { synctest.Test(t, testCodesAreBound) }

func testCodesAreBound(t *testing.T) {
	w := newWorld(t)
	w.publish("https://app.example.com/second", `{"client_id":"https://app.example.com/second","redirect_uris":["`+callback+`"]}`)
	for name, change := range map[string][]string{
		"another application": {"client_id", "https://app.example.com/second"},
		"another redirect":    {"redirect_uri", "http://127.0.0.1/cb"},
		"another verifier":    {"code_verifier", verifier + "x"},
		"another resource":    {"resource", issuer + "/sse"},
		"no code":             {"code", "x"},
		"another kind":        {"grant_type", "password"},
	} {
		// security: H24
		if a := w.post(oauth.PathToken, redeemed(w.code(ask(), nil), change...)); a.status != 400 || a.Access != "" {
			t.Errorf("%s: %+v", name, a)
		}
	}
	if a := w.post(oauth.PathToken, redeemed(w.code(ask(), nil), "code", w.mint.Code(access.CodeGrant, clock.Now().Add(time.Hour)))); a.Error != "invalid_grant" {
		t.Errorf("a genuine code that nobody saved: %+v", a)
	}
	device := w.post(oauth.PathToken, redeemed(w.code(ask("resource", issuer+"/mcp/devices/AABBCC000001"), nil), "resource", issuer+"/mcp/devices/aa-bb-cc-00-00-01"))
	if _, err := w.opens(device.Access, "/mcp/devices/aa:bb:cc:00:00:01"); err != nil {
		t.Errorf("a device whose id is spelled freely: %+v, %v", device, err)
	}
	empty, sse := ask(), ask("resource", issuer+"/sse")
	empty["resource"] = []string{""} // as if it were not there (RFC 6749, 3.1)
	for want, query := range map[string]url.Values{"/mcp": empty, "/sse": sse} {
		a := w.post(oauth.PathToken, redeemed(w.code(query, nil), "resource", ""))
		if _, err := w.opens(a.Access, want); err != nil {
			t.Errorf("a resource without a value, for %s: %+v, %v", want, a, err)
		}
	}
	more := redeemed(w.code(ask(), nil))
	more["resource"] = []string{"", issuer + "/sse"}
	if a := w.post(oauth.PathToken, more); a.Error != "invalid_target" {
		t.Errorf("another resource behind one without a value: %+v", a)
	}
	code := w.code(ask(), nil)
	time.Sleep(2 * time.Minute)
	if a := w.post(oauth.PathToken, redeemed(code)); a.Error != "invalid_grant" {
		t.Errorf("a late code: %+v", a)
	}
}

func TestRefresh(t *testing.T) { synctest.Test(t, testRefresh) }

func testRefresh(t *testing.T) {
	w := newWorld(t)
	first := w.grant()
	second := w.post(oauth.PathToken, refreshed(first.Refresh))
	if second.status != 200 || second.Refresh == first.Refresh {
		t.Fatalf("%+v", second)
	}
	// security: H25
	if again := w.post(oauth.PathToken, refreshed(first.Refresh)); again.status != 200 || again.Refresh != second.Refresh {
		t.Errorf("the answer was lost: %+v, want the successor %s", again, second.Refresh)
	}
	if _, err := w.opens(second.Access, "/mcp"); err != nil {
		t.Error(err)
	}
	if guess := w.post(oauth.PathToken, refreshed(first.Refresh[:len(first.Refresh)-60]+strings.Repeat("A", 60))); guess.Error != "invalid_grant" {
		t.Errorf("%+v", guess)
	}
	if _, err := w.opens(second.Access, "/mcp"); err != nil {
		t.Errorf("a guess ended the grant: %v", err)
	}
	if other := w.post(oauth.PathToken, url.Values{"grant_type": {"refresh_token"}, "refresh_token": {second.Refresh}, "client_id": {"https://evil.example/app"}}); other.Error != "invalid_grant" {
		t.Errorf("of another application: %+v", other)
	}
	third := w.post(oauth.PathToken, refreshed(second.Refresh))
	if third.status != 200 {
		t.Fatalf("%+v", third)
	}
	// security: H25
	if stolen := w.post(oauth.PathToken, refreshed(first.Refresh)); stolen.Error != "invalid_grant" {
		t.Errorf("a used token: %+v", stolen)
	}
	if _, err := w.opens(third.Access, "/mcp"); err == nil {
		t.Error("the grant outlives the second use of its token")
	}
	if a := w.post(oauth.PathToken, refreshed(third.Refresh)); a.Error != "invalid_grant" {
		t.Errorf("%+v", a)
	}
}

// A used token that comes late ends the grant, even while its successor is unused.
func TestLateRefresh(t *testing.T) { synctest.Test(t, testLateRefresh) }

func testLateRefresh(t *testing.T) {
	w := newWorld(t)
	first := w.grant()
	second := w.post(oauth.PathToken, refreshed(first.Refresh))
	time.Sleep(2 * time.Minute)
	// security: H25
	if a := w.post(oauth.PathToken, refreshed(first.Refresh)); a.Error != "invalid_grant" {
		t.Errorf("%+v", a)
	}
	if a := w.post(oauth.PathToken, refreshed(second.Refresh)); a.Error != "invalid_grant" {
		t.Errorf("the grant goes on: %+v", a)
	}
}

func TestConcurrentRefresh(t *testing.T) { synctest.Test(t, testConcurrentRefresh) }

func testConcurrentRefresh(t *testing.T) {
	w := newWorld(t)
	first := w.grant()
	var tasks sync.WaitGroup
	got := make([]answer, 8)
	for i := range got {
		tasks.Go(func() { got[i] = w.post(oauth.PathToken, refreshed(first.Refresh)) })
	}
	tasks.Wait()
	for _, a := range got {
		// security: H25
		if a.status != 200 || a.Refresh != got[0].Refresh {
			t.Errorf("%+v", a)
		}
	}
	if a := w.post(oauth.PathToken, refreshed(got[0].Refresh)); a.status != 200 {
		t.Errorf("afterwards: %+v", a)
	}
}

func TestGrantsEnd(t *testing.T) { synctest.Test(t, testGrantsEnd) }

func testGrantsEnd(t *testing.T) {
	w := newWorld(t)
	a := w.grant()
	if out := w.do("POST", oauth.PathRevoke, nil, url.Values{"token": {a.Refresh}, "client_id": {appID}}); out.Code != 200 {
		t.Errorf("%d %s", out.Code, out.Body)
	}
	// security: H26
	if _, err := w.opens(a.Access, "/mcp"); err == nil {
		t.Error("the access token outlives its grant")
	}
	if out := w.do("POST", oauth.PathRevoke, nil, url.Values{"token": {"flr_unknown"}, "client_id": {appID}}); out.Code != 200 {
		t.Errorf("an unknown token: %d", out.Code)
	}
	b := w.grant()
	if out := w.do("POST", oauth.PathRevoke, nil, url.Values{"token": {b.Access}, "client_id": {"https://evil.example/app"}}); out.Code != 400 {
		t.Errorf("by another application: %d", out.Code)
	}
	if _, err := w.opens(b.Access, "/mcp"); err != nil {
		t.Error(err)
	}
	if _, _, err := w.core.RevokeKey(t.Context(), devicetest.Admin, w.key.ID); err != nil {
		t.Fatal(err)
	}
	// security: H26
	if _, err := w.opens(b.Access, "/mcp"); err == nil {
		t.Error("the grant outlives the key")
	}
	if a := w.post(oauth.PathToken, refreshed(b.Refresh)); a.Error != "invalid_grant" {
		t.Errorf("%+v", a)
	}
}

func TestAccessTokensExpire(t *testing.T) { synctest.Test(t, testAccessTokensExpire) }

func testAccessTokensExpire(t *testing.T) {
	w := newWorld(t)
	a := w.grant()
	time.Sleep(16 * time.Minute)
	// security: H26
	if _, err := w.opens(a.Access, "/mcp"); err != access.ErrExpired {
		t.Errorf("%v", err)
	}
	if b := w.post(oauth.PathToken, refreshed(a.Refresh)); b.status != 200 {
		t.Errorf("%+v", b)
	}
}

func TestUnusedGrantsEnd(t *testing.T) { synctest.Test(t, testUnusedGrantsEnd) }

func testUnusedGrantsEnd(t *testing.T) {
	w := newWorld(t)
	a := w.grant()
	who, err := w.opens(a.Access, "/mcp")
	if err != nil {
		t.Fatal(err)
	}
	use := access.GrantUse{ID: who.Through, Refresh: access.HashCode(access.CodeRefresh, a.Refresh), Used: clock.Now().Add(-access.GrantIdle)}
	if err := w.ports.Ledger.SaveGrant(t.Context(), use); err != nil {
		t.Fatal(err)
	}
	if b := w.post(oauth.PathToken, refreshed(a.Refresh)); b.Error != "invalid_grant" {
		t.Errorf("%+v", b)
	}
}

func TestNumberOfGrants(t *testing.T) { synctest.Test(t, testNumberOfGrants) }

func testNumberOfGrants(t *testing.T) {
	w := newWorld(t)
	first, second := w.grant(), w.grant()
	time.Sleep(time.Second)
	w.post(oauth.PathToken, refreshed(first.Refresh))
	for range access.MaxGrants - 1 {
		time.Sleep(time.Second)
		w.grant()
	}
	if n := len(w.core.Keys().Grants(w.key.ID, clock.Now())); n != access.MaxGrants {
		t.Errorf("%d grants", n)
	}
	if _, err := w.opens(second.Access, "/mcp"); err == nil {
		t.Error("the grant that was unused longest is valid")
	}
	if _, err := w.opens(first.Access, "/mcp"); err != nil {
		t.Errorf("one that was used: %v", err)
	}
}

// With the database away, access tokens are valid, and nothing else is decided.
func TestDatabaseAway(t *testing.T) { synctest.Test(t, testDatabaseAway) }

func testDatabaseAway(t *testing.T) {
	w := newWorld(t)
	a := w.grant()
	code := w.code(ask(), nil)
	w.ports.SetAway(true)
	if _, err := w.opens(a.Access, "/mcp"); err != nil {
		t.Error(err)
	}
	for _, form := range []url.Values{refreshed(a.Refresh), redeemed(code)} {
		out := w.do("POST", oauth.PathToken, nil, form)
		if out.Code != 503 || out.Header().Get("Retry-After") == "" || strings.Contains(out.Body.String(), "invalid_grant") {
			t.Errorf("%d %s", out.Code, out.Body)
		}
	}
	if out := w.submit(ask(), w.token, nil); out.Code != 503 || !strings.Contains(out.Body.String(), "<form") {
		t.Errorf("%d %s", out.Code, out.Body)
	}
	w.ports.SetAway(false)
	for _, form := range []url.Values{refreshed(a.Refresh), redeemed(code)} {
		if b := w.post(oauth.PathToken, form); b.status != 200 {
			t.Errorf("%+v", b)
		}
	}
}

func TestRegistration(t *testing.T) { synctest.Test(t, testRegistration) }

func testRegistration(t *testing.T) {
	w := newWorld(t)
	register := func(body string) (status int, out struct {
		ID    string `json:"client_id"`
		Error string `json:"error"`
	}) {
		r := httptest.NewRequest("POST", issuer+oauth.PathRegister, strings.NewReader(body))
		rec := httptest.NewRecorder()
		w.server.ServeHTTP(rec, r)
		if err := json.Unmarshal(rec.Body.Bytes(), &out); err != nil {
			t.Fatalf("%s: %v", rec.Body, err)
		}
		return rec.Code, out
	}
	status, made := register(`{"client_name":"Local\u202e Host","redirect_uris":["http://localhost:3118/callback"],"token_endpoint_auth_method":"client_secret_post","grant_types":["authorization_code"]}`)
	if status != 201 || made.ID == "" {
		t.Fatalf("%d %+v", status, made)
	}
	local := []string{"client_id", made.ID, "redirect_uri", "http://localhost:4000/callback"}
	out := w.do("GET", oauth.PathAuthorize, ask(local...), nil)
	if text := out.Body.String(); out.Code != 200 || !strings.Contains(text, "<strong>localhost</strong> <em>(unverified)</em>") || !strings.Contains(text, "Local Host") || strings.Contains(text, "\u202e") {
		t.Errorf("%d %s", out.Code, out.Body)
	}
	a := w.post(oauth.PathToken, redeemed(w.code(ask(local...), nil), local...))
	if a.status != 200 {
		t.Fatalf("%+v", a)
	}
	for name, body := range map[string]string{"no JSON": `{`, "no redirect": `{"client_name":"x"}`, "http": `{"redirect_uris":["http://app.example.com/"]}`, "script": `{"redirect_uris":["javascript:1"]}`,
		"too many": `{"redirect_uris":["https://a/1","https://a/2","https://a/3","https://a/4","https://a/5","https://a/6"]}`, "too long": `{"redirect_uris":["https://a/` + strings.Repeat("x", 2000) + `"]}`} {
		if status, out := register(body); status != 400 || out.Error == "" {
			t.Errorf("%s: %d %+v", name, status, out)
		}
	}
	other, err := credential.New([]byte("another secret of 16"))
	if err != nil {
		t.Fatal(err)
	}
	foreign := "flc_" + other.ClientID(`{"redirect_uris":["https://evil.example/"]}`, clock.Now())
	// security: H22
	if out := w.do("GET", oauth.PathAuthorize, ask("client_id", foreign, "redirect_uri", "https://evil.example/"), nil); out.Code != 401 {
		t.Errorf("an id of another fleet: %d", out.Code)
	}
	if a := w.post(oauth.PathToken, url.Values{"grant_type": {"refresh_token"}, "refresh_token": {"flr_aaaaaaaa_x"}, "client_id": {foreign}}); a.status != 401 || a.Error != "invalid_client" {
		t.Errorf("%+v", a)
	}
	_, unused := register(`{"redirect_uris":["http://localhost/callback"]}`)
	_, several := register(`{"redirect_uris":["https://claude.ai/callback","https://evil.example/"]}`)
	// security: H22
	if text := w.do("GET", oauth.PathAuthorize, ask("client_id", several.ID, "redirect_uri", "https://evil.example/"), nil).Body.String(); strings.Contains(text, "claude.ai") {
		t.Errorf("the host is not the one to which the browser goes:\n%s", text)
	}
	time.Sleep(25 * time.Hour)
	if out := w.do("GET", oauth.PathAuthorize, ask("client_id", unused.ID, "redirect_uri", "http://localhost/callback"), nil); out.Code != 401 {
		t.Errorf("a registration of yesterday asks for the first time: %d", out.Code)
	}
	if a := w.post(oauth.PathToken, url.Values{"grant_type": {"refresh_token"}, "refresh_token": {"flr_aaaaaaaa_x"}, "client_id": {unused.ID}}); a.status != 401 || a.Error != "invalid_client" {
		t.Errorf("an application that has to register again: %+v", a)
	}
	if out := w.do("GET", oauth.PathAuthorize, ask(local...), nil); out.Code != 200 {
		t.Errorf("one that has a grant asks for more: %d %s", out.Code, out.Body)
	}
	refresh := refreshed(a.Refresh)
	refresh.Set("client_id", made.ID)
	if b := w.post(oauth.PathToken, refresh); b.status != 200 {
		t.Errorf("one that has a grant: %+v", b)
	}
}

// An application that names keys proves itself with them (private_key_jwt).
func TestAssertions(t *testing.T) { synctest.Test(t, testAssertions) }

func testAssertions(t *testing.T) {
	w := newWorld(t)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	other, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	const id, keysURL = "https://chat.example.com/client.json", "https://chat.example.com/jwks.json"
	keys, err := json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: key.Public(), KeyID: "k1", Algorithm: "ES256", Use: "sig"}}})
	if err != nil {
		t.Fatal(err)
	}
	w.publish(id, `{"client_id":"`+id+`","redirect_uris":["https://chat.example.com/cb"],"token_endpoint_auth_method":"private_key_jwt","jwks_uri":"`+keysURL+`"}`)
	w.publish(keysURL, string(keys))
	number := 0
	assertion := func(key *ecdsa.PrivateKey, change func(*jwt.Claims)) string {
		t.Helper()
		number++
		c := jwt.Claims{Issuer: id, Subject: id, Audience: jwt.Audience{issuer}, Expiry: jwt.NewNumericDate(clock.Now().Add(time.Minute)), ID: string(rune('a' + number))}
		if change != nil {
			change(&c)
		}
		signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: key, KeyID: "k1"}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		text, err := jwt.Signed(signer).Claims(c).Serialize()
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	asked := []string{"client_id", id, "redirect_uri", "https://chat.example.com/cb"}
	with := func(proof string) url.Values {
		f := redeemed(w.code(ask(asked...), nil), asked...)
		time.Sleep(time.Second) // one request a second for a host
		f.Set("client_assertion", proof)
		f.Set("client_assertion_type", "urn:ietf:params:oauth:client-assertion-type:jwt-bearer")
		return f
	}
	// A code is good for another try after a passing failure, whether of the keys, whose host was asked for the document a moment
	// ago, or of the database.
	login := redeemed(w.code(ask(asked...), nil), asked...)
	login.Set("client_assertion_type", "urn:ietf:params:oauth:client-assertion-type:jwt-bearer")
	login.Set("client_assertion", assertion(key, nil))
	if a := w.post(oauth.PathToken, login); a.status != 503 {
		t.Errorf("the keys within a second of the document: %+v", a)
	}
	time.Sleep(time.Second)
	w.slow = time.Second
	time.AfterFunc(w.slow/2, func() { w.ports.SetAway(true) })
	login.Set("client_assertion", assertion(key, nil))
	if a := w.post(oauth.PathToken, login); a.status != 503 {
		t.Errorf("the database is away once the keys are there: %+v", a)
	}
	w.ports.SetAway(false)
	w.slow = 0
	login.Set("client_assertion", assertion(key, nil))
	a := w.post(oauth.PathToken, login)
	if a.status != 200 {
		t.Fatalf("%+v", a)
	}
	used := assertion(key, nil)
	refresh := refreshed(a.Refresh)
	refresh.Set("client_id", id)
	refresh.Set("client_assertion_type", "urn:ietf:params:oauth:client-assertion-type:jwt-bearer")
	refresh.Set("client_assertion", used)
	b := w.post(oauth.PathToken, refresh)
	if b.status != 200 {
		t.Fatalf("%+v", b)
	}
	time.Sleep(10 * time.Minute) // the keys are not cached any more
	w.slow = 1500 * time.Millisecond
	refresh.Set("refresh_token", b.Refresh)
	refresh.Set("client_assertion", assertion(key, nil))
	c := w.post(oauth.PathToken, refresh)
	refresh.Set("client_assertion", assertion(key, nil))
	// security: H25
	if again := w.post(oauth.PathToken, refresh); c.status != 200 || again.Refresh != c.Refresh {
		t.Errorf("the same token twice, while the keys are fetched: %+v, then %+v", c, again)
	}
	w.slow = 0
	time.Sleep(10 * time.Minute)
	w.publish(keysURL, "https://chat.example.com/elsewhere")
	refresh.Set("refresh_token", c.Refresh)
	refresh.Set("client_assertion", assertion(key, nil))
	// The host would forget that it was allowed anything.
	if d := w.post(oauth.PathToken, refresh); d.status != 503 {
		t.Errorf("without the keys of the application: %+v", d)
	}
	w.publish(keysURL, string(keys))
	time.Sleep(time.Second)
	refresh.Del("client_assertion")
	for name, proof := range map[string]string{
		"none":             "",
		"used":             used,
		"another key":      assertion(other, nil),
		"another audience": assertion(key, func(c *jwt.Claims) { c.Audience = jwt.Audience{"https://other.example"} }),
		"another subject":  assertion(key, func(c *jwt.Claims) { c.Subject = appID }),
		"another issuer":   assertion(key, func(c *jwt.Claims) { c.Issuer = appID }),
		"expired":          assertion(key, func(c *jwt.Claims) { c.Expiry = jwt.NewNumericDate(clock.Now().Add(-time.Minute)) }),
		"valid for long":   assertion(key, func(c *jwt.Claims) { c.Expiry = jwt.NewNumericDate(clock.Now().Add(time.Hour)) }),
		"without an end":   assertion(key, func(c *jwt.Claims) { c.Expiry = nil }),
		"without jti":      assertion(key, func(c *jwt.Claims) { c.ID = "" }),
		"no JWT":           "x.y.z",
	} {
		// security: H27
		if b := w.post(oauth.PathToken, with(proof)); b.status != 401 || b.Error != "invalid_client" {
			t.Errorf("%s: %+v", name, b)
		}
	}
}

func TestDocumentsOfApplications(t *testing.T) { synctest.Test(t, testDocumentsOfApplications) }

func testDocumentsOfApplications(t *testing.T) {
	w := newWorld(t)
	for range 5 {
		if out := w.do("GET", oauth.PathAuthorize, ask(), nil); out.Code != 200 {
			t.Fatalf("%d %s", out.Code, out.Body)
		}
	}
	if w.fetches != 1 {
		t.Errorf("%d requests for one document", w.fetches)
	}
	// security: H28
	out := w.do("GET", oauth.PathAuthorize, ask("client_id", "https://app.example.com/none"), nil)
	if out.Code != 503 || w.fetches != 1 {
		t.Errorf("a second request to a host within a second: %d, %d requests", out.Code, w.fetches)
	}
	busy := 0
	for i := range 20 {
		if out := w.do("GET", oauth.PathAuthorize, ask("client_id", "https://h"+string(rune('a'+i))+".example.com/x"), nil); out.Code == 503 {
			busy++
		}
	}
	if w.fetches > 10 || busy < 10 {
		t.Errorf("%d requests, %d refused", w.fetches, busy)
	}
	time.Sleep(10 * time.Minute)
	before, begun := w.fetches, time.Now()
	for i := 0; time.Since(begun) < time.Minute; i++ {
		w.do("GET", oauth.PathAuthorize, ask("client_id", fmt.Sprintf("https://m%d.example.com/x", i)), nil)
		time.Sleep(500 * time.Millisecond)
	}
	// security: H28
	if n := w.fetches - before; n < 9 || n > 10 {
		t.Errorf("%d requests within a minute", n)
	}
	time.Sleep(10 * time.Minute)
	before = w.fetches
	for _, host := range []string{"one.example", "ONE.example", "one.example:443", "one.example:8443", "one.example."} {
		w.do("GET", oauth.PathAuthorize, ask("client_id", "https://"+host+"/x"), nil)
	}
	// security: H28
	if n := w.fetches - before; n != 1 {
		t.Errorf("%d requests to one host at once", n)
	}
}

// The client that a node uses connects to public addresses alone.
func TestDocumentsArePublic(t *testing.T) {
	asked := false
	target := httptest.NewTLSServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked = true }))
	defer target.Close()
	w := newWorld(t, func(o *oauth.Options) { o.Client = nil })
	// security: H28
	out := w.do("GET", oauth.PathAuthorize, ask("client_id", target.URL+"/app"), nil)
	if out.Code != 401 || asked || strings.Contains(out.Body.String(), "127.0.0.1") && strings.Contains(out.Body.String(), "refused") {
		t.Errorf("%d %s, asked %v", out.Code, out.Body, asked)
	}
}

func TestMetadata(t *testing.T) { synctest.Test(t, testMetadata) }

func testMetadata(t *testing.T) {
	w := newWorld(t)
	out := w.do("GET", oauth.PathMetadata, nil, nil)
	var m map[string]any
	if err := json.Unmarshal(out.Body.Bytes(), &m); err != nil || out.Header().Get("Access-Control-Allow-Origin") != "*" {
		t.Fatal(err, out.Header())
	}
	for name, want := range map[string]any{"issuer": issuer, "authorization_endpoint": issuer + "/oauth/authorize", "client_id_metadata_document_supported": true, "authorization_response_iss_parameter_supported": true} {
		if m[name] != want {
			t.Errorf("%s is %v, want %v", name, m[name], want)
		}
	}
	closed := newWorld(t, func(o *oauth.Options) { o.CIMD = false })
	if out := closed.do("GET", oauth.PathMetadata, nil, nil); strings.Contains(out.Body.String(), "client_id_metadata_document_supported") {
		t.Errorf("%s", out.Body)
	}
	if out := closed.do("GET", oauth.PathAuthorize, ask(), nil); out.Code == 200 || closed.fetches > 0 {
		t.Errorf("%d, %d requests", out.Code, closed.fetches)
	}
}

// The documents that hosts publish, as of September 2026: each of them can ask, with each of its redirects, on loopback with a
// port of its own choice.
func TestPublishedHosts(t *testing.T) { synctest.Test(t, testPublishedHosts) }

func testPublishedHosts(t *testing.T) {
	raw, err := os.ReadFile("testdata/hosts.json")
	if err != nil {
		t.Fatal(err)
	}
	var list []json.RawMessage
	if err := json.Unmarshal(raw, &list); err != nil {
		t.Fatal(err)
	}
	w := newWorld(t)
	for _, document := range list {
		var host struct {
			ID        string   `json:"client_id"`
			Name      string   `json:"client_name"`
			Redirects []string `json:"redirect_uris"`
		}
		if err := json.Unmarshal(document, &host); err != nil {
			t.Fatal(err)
		}
		w.publish(host.ID, string(document))
		for _, redirect := range host.Redirects {
			time.Sleep(7 * time.Second)
			u, err := url.Parse(redirect)
			if err != nil {
				t.Fatal(err)
			}
			if u.Scheme == "http" {
				u.Host = u.Hostname() + ":51234"
			}
			out := w.do("GET", oauth.PathAuthorize, ask("client_id", host.ID, "redirect_uri", u.String(), "scope", ""), nil)
			id, _ := url.Parse(host.ID)
			if text := out.Body.String(); out.Code != 200 || !strings.Contains(text, "<strong>"+id.Host+"</strong>") || !strings.Contains(text, "“"+host.Name+"”") {
				t.Errorf("%s to %s: %d\n%s", host.ID, u, out.Code, text)
			}
		}
	}
}

// A lost answer is repeated, whatever happened between the two requests.
func TestRepeatedAnswers(t *testing.T) { synctest.Test(t, testRepeatedAnswers) }

func testRepeatedAnswers(t *testing.T) {
	w := newWorld(t)
	a := w.grant()
	b := w.post(oauth.PathToken, refreshed(a.Refresh))
	next := w.mint.NewSecret(1)
	c := w.post(oauth.PathToken, refreshed(b.Refresh))
	if err := w.mint.Adopt(credential.Rotation{Secrets: []credential.SealedSecret{{Number: 1, Since: 1, Sealed: next}}, PreviousUntil: clock.Now().Add(time.Hour)}, clock.Now()); err != nil {
		t.Fatal(err)
	}
	// security: H25
	if again := w.post(oauth.PathToken, refreshed(b.Refresh)); again.Refresh != c.Refresh {
		t.Errorf("over a rotation of the secret: %+v, want %s", again, c.Refresh)
	}
	if d := w.post(oauth.PathToken, refreshed(c.Refresh)); d.status != 200 {
		t.Errorf("%+v", d)
	}
}

// A token of one grant does nothing to another one.
func TestTokensOfOthers(t *testing.T) { synctest.Test(t, testTokensOfOthers) }

func testTokensOfOthers(t *testing.T) {
	w := newWorld(t)
	victim, own := w.grant(), w.grant()
	mixed := victim.Refresh[:len("flr_")+9] + own.Refresh[len("flr_")+9:]
	// security: H25
	if a := w.post(oauth.PathToken, refreshed(mixed)); a.Error != "invalid_grant" {
		t.Errorf("%+v", a)
	}
	w.post(oauth.PathRevoke, url.Values{"token": {mixed}, "client_id": {appID}})
	if _, err := w.opens(victim.Access, "/mcp"); err != nil {
		t.Errorf("the grant was ended with the token of another one: %v", err)
	}
}

// A node that has not heard of a grant yet reads about it, and says that it is not available if it cannot.
func TestGrantOfAnotherNode(t *testing.T) { synctest.Test(t, testGrantOfAnotherNode) }

func testGrantOfAnotherNode(t *testing.T) {
	w := newWorld(t)
	late := w.ports.Service(t, fleet.Config{})
	late.Keys().SetAdmin(w.mint.AdminToken)
	late.Keys().SetAccessTokens(oauth.AccessToken(w.mint))
	a := w.grant()
	if _, _, err := (&access.Authenticator{Keys: late.Keys(), IsAdmin: w.mint.IsAdmin}).AuthenticateAt(a.Access, "/mcp", clock.Now()); !errors.Is(err, access.ErrUnknownGrant) {
		t.Fatalf("%v", err)
	}
	w.server = oauth.New(oauth.Options{Issuer: issuer, CIMD: true, Hosts: []string{"*"}, Service: late, Auth: w.auth, Mint: w.mint, Client: &http.Client{Transport: w}, Log: slog.New(slog.DiscardHandler)})
	w.ports.SetAway(true)
	if out := w.do("POST", oauth.PathToken, nil, refreshed(a.Refresh)); out.Code != 503 {
		t.Errorf("%d %s", out.Code, out.Body)
	}
	if out := w.do("POST", oauth.PathRevoke, nil, url.Values{"token": {a.Refresh}, "client_id": {appID}}); out.Code != 503 {
		t.Errorf("revoke: %d %s", out.Code, out.Body)
	}
	w.ports.SetAway(false)
	if b := w.post(oauth.PathToken, refreshed(a.Refresh)); b.status != 200 {
		t.Errorf("%+v", b)
	}
}

// What was genuine once does not count as a wrong credential; what never was does.
func TestWrongCredentials(t *testing.T) {
	failures := connlimit.NewFailures(nil)
	w := newWorld(t, func(o *oauth.Options) { o.Failures = failures })
	a := w.grant()
	count := func() uint64 { return failures.Answered.Load() + failures.Delayed.Load() + failures.Refused.Load() }
	for name, try := range map[string]func(){
		"an old consent code": func() { w.submit(ask(), w.mint.Code(access.CodeConsent, clock.Now().Add(-time.Second)), nil) },
		"an old authorization code": func() {
			w.post(oauth.PathToken, redeemed(w.mint.Code(access.CodeGrant, clock.Now().Add(-time.Second))))
		},
	} {
		before := count()
		if try(); count() != before {
			t.Errorf("%s counts", name)
		}
	}
	for name, try := range map[string]func(){
		"a guessed refresh token":             func() { w.post(oauth.PathToken, refreshed(a.Refresh[:len(a.Refresh)-60]+strings.Repeat("A", 60))) },
		"a refresh token of an unknown grant": func() { w.post(oauth.PathToken, refreshed("flr_aaaaaaaa_x")) },
	} {
		before := count()
		if try(); count() == before {
			t.Errorf("%s does not count", name)
		}
	}
	late := clock.Now().Add(time.Hour)
	if _, err := w.auth.Authenticate(a.Access, late); err != access.ErrResource {
		t.Errorf("an old access token at REST: %v", err)
	}
}

// Guessed addresses of documents cost neither memory nor another host's turn.
func TestManyHosts(t *testing.T) { synctest.Test(t, testManyHosts) }

func testManyHosts(t *testing.T) {
	w := newWorld(t)
	for i := range 50 {
		w.do("GET", oauth.PathAuthorize, ask("client_id", fmt.Sprintf("https://h%d.example.com/x", i)), nil)
	}
	if n := w.server.HostsAsked(); n > 10 {
		t.Errorf("%d hosts are remembered", n)
	}
	time.Sleep(10 * time.Second)
	out := w.do("GET", oauth.PathAuthorize, ask("client_id", "https://h49.example.com/x"), nil)
	if out.Code == 503 {
		t.Errorf("%d %s", out.Code, out.Body)
	}
	out = w.do("GET", oauth.PathAuthorize, ask("client_id", "https://h50.example.com/x"), nil)
	if out.Code != 503 || out.Header().Get("Retry-After") == "" {
		t.Errorf("%d %v", out.Code, out.Header())
	}
}

// A key of the console gives a grant of its parent, with at most its own rights; grants of the admin end with the admin token.
func TestGrantsOfConsoleAndAdmin(t *testing.T) { synctest.Test(t, testGrantsOfConsoleAndAdmin) }

func testGrantsOfConsoleAndAdmin(t *testing.T) {
	w := newWorld(t)
	now := clock.Now()
	who, err := w.core.Keys().Authenticate(w.token, now)
	if err != nil {
		t.Fatal(err)
	}
	code := w.mint.Code(access.CodeConsole, now.Add(time.Minute))
	if err := w.core.SaveConsoleCode(t.Context(), access.Principal{Caller: who}, scopes("devices:read"), code, now.Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	console, token, err := w.core.RedeemConsoleCode(t.Context(), access.Principal{}, code)
	if err != nil {
		t.Fatal(err)
	}
	// security: H20
	if out := w.submit(ask(), token, nil); out.Code != 400 || !strings.Contains(out.Body.String(), "does not have the scope tools:call") {
		t.Errorf("%d %s", out.Code, out.Body)
	}
	own := w.token
	w.token = token
	a := w.post(oauth.PathToken, redeemed(w.code(ask(), url.Values{"scope": {"devices:read"}, "devices": {"floor=1"}})))
	w.token = own
	who, err = w.opens(a.Access, "/mcp")
	// security: H20
	if err != nil || who.Key != w.key.ID || who.Through == console.ID || !strings.Contains(who.Devices.String(), "room=kitchen") || !strings.Contains(who.Devices.String(), "floor=1") || who.Scopes != scopes("devices:read") {
		t.Fatalf("%+v %v", who, err)
	}
	if err := w.core.EndGrant(t.Context(), devicetest.Admin, console.ID, "logged out"); err != nil {
		t.Fatal(err)
	}
	if _, err := w.opens(a.Access, "/mcp"); err != nil {
		t.Errorf("after the logout of the console: %v", err)
	}
	code = w.mint.Code(access.CodeConsent, now.Add(time.Minute))
	if err := w.core.SaveConsentCode(t.Context(), devicetest.Admin, fleet.Consent{}, code, now.Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	w.token = code
	b := w.post(oauth.PathToken, redeemed(w.code(ask(), nil)))
	if who, err := w.opens(b.Access, "/mcp"); err != nil || who.Key != access.KeyAdmin {
		t.Fatalf("%+v %v", who, err)
	}
	if err := w.mint.Adopt(credential.Rotation{Admin: 1}, now); err != nil {
		t.Fatal(err)
	}
	// security: H26
	if _, err := w.opens(b.Access, "/mcp"); err == nil {
		t.Error("the grant outlives the admin token")
	}
	if c := w.post(oauth.PathToken, refreshed(b.Refresh)); c.Error != "invalid_grant" {
		t.Errorf("%+v", c)
	}
	if _, err := w.opens(a.Access, "/mcp"); err != nil {
		t.Errorf("a grant of a key: %v", err)
	}
}
