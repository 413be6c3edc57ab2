package oauth_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/connlimit"
	"fleetd/internal/credential"
	"fleetd/internal/devicetest"
	"fleetd/internal/egress"
	"fleetd/internal/fleet"
	"fleetd/internal/oauth"
)

// A document that is endless, or never comes, ends at its limits, and is nothing else to the person than one that is wrong.
func TestHostileDocuments(t *testing.T) {
	for name, answer := range map[string]func(w http.ResponseWriter, r *http.Request){
		"10 MB": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, `{"client_id":"`+strings.Repeat("x", 10<<20)+`"}`)
		},
		"slow":        func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
		"not JSON":    func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "<html>") },
		"an error":    func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "the secret of an inner service", 500) },
		"a list":      func(w http.ResponseWriter, _ *http.Request) { writeDocument(w, `[]`) },
		"odd members": func(w http.ResponseWriter, _ *http.Request) { writeDocument(w, `{"client_id":1,"redirect_uris":"x"}`) },
		"null":        func(w http.ResponseWriter, _ *http.Request) { writeDocument(w, `null`) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := httptest.NewTLSServer(http.HandlerFunc(answer))
			defer server.Close()
			client := server.Client()
			client.Timeout = time.Second
			w := newWorld(t, func(o *oauth.Options) { o.Client = client })
			out := w.do("GET", oauth.PathAuthorize, ask("client_id", server.URL+"/app"), nil)
			// security: H28
			if out.Code != 401 || strings.Contains(out.Body.String(), "inner service") || strings.Contains(out.Body.String(), "<form") {
				t.Errorf("%d %s", out.Code, out.Body)
			}
		})
	}
}

func writeDocument(w http.ResponseWriter, text string) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, text)
}

// A name that means a public address first and this machine when it is dialled is refused: the address that is dialled counts.
func TestRebinding(t *testing.T) {
	allow, err := egress.Parse("", nil)
	if err != nil {
		t.Fatal(err)
	}
	target, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = target.Close() }()
	dial := allow.Dialer(time.Second)
	for _, name := range []string{"localhost", "127.0.0.1", "[::ffff:127.0.0.1]", "0.0.0.0"} {
		_, port, _ := net.SplitHostPort(target.Addr().String())
		conn, err := dial(context.Background(), "tcp", strings.Trim(name, "[]")+":"+port)
		if strings.Contains(name, "::") {
			conn, err = dial(context.Background(), "tcp", name+":"+port)
		}
		// security: H28
		if err == nil {
			_ = conn.Close()
			t.Errorf("%s was dialled", name)
		}
	}
	if err := allow.CheckHost(netip.MustParseAddr("169.254.169.254").String()); err == nil {
		t.Error("the metadata of a cloud")
	}
}

// Registering stores nothing, however often.
func TestManyRegistrations(t *testing.T) {
	w := newWorld(t)
	measure := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := measure()
	for range 10_000 {
		r := httptest.NewRequest("POST", issuer+oauth.PathRegister, strings.NewReader(`{"redirect_uris":["https://app.example.com/cb"]}`))
		out := httptest.NewRecorder()
		w.server.ServeHTTP(out, r)
		if out.Code != http.StatusCreated {
			t.Fatalf("%d %s", out.Code, out.Body)
		}
	}
	// security: H22
	if after := measure(); after > before+4<<20 {
		t.Errorf("10,000 registrations keep %d KiB", (after-before)>>10)
	}
}

// The page is framed by nobody.
func TestFramedPage(t *testing.T) { synctest.Test(t, testFramedPage) }

func testFramedPage(t *testing.T) {
	w := newWorld(t)
	for _, query := range []url.Values{ask(), ask("client_id", "")} {
		h := w.do("GET", oauth.PathAuthorize, query, nil).Header()
		// security: H22
		if !strings.Contains(h.Get("Content-Security-Policy"), "frame-ancestors 'none'") || h.Get("X-Frame-Options") != "DENY" {
			t.Errorf("headers %v", h)
		}
	}
}

// A proof without a signature, or with one by a shared secret, proves nothing.
func TestUnsignedAssertions(t *testing.T) { synctest.Test(t, testUnsignedAssertions) }

func testUnsignedAssertions(t *testing.T) {
	w := newWorld(t)
	const id = "https://chat.example.com/client.json"
	w.publish(id, `{"client_id":"`+id+`","redirect_uris":["https://chat.example.com/cb"],"token_endpoint_auth_method":"private_key_jwt","jwks_uri":"https://chat.example.com/jwks.json"}`)
	w.publish("https://chat.example.com/jwks.json", `{"keys":[{"kty":"oct","k":"c2VjcmV0","alg":"HS256"}]}`)
	asked := []string{"client_id", id, "redirect_uri", "https://chat.example.com/cb"}
	claims, err := json.Marshal(map[string]any{"iss": id, "sub": id, "aud": issuer, "exp": clock.Now().Add(time.Minute).Unix(), "jti": "1"})
	if err != nil {
		t.Fatal(err)
	}
	for _, header := range []string{`{"alg":"none"}`, `{"alg":"None","typ":"JWT"}`, `{"alg":"HS256"}`, `{"alg":"ES256","jwk":{"kty":"EC"}}`} {
		proof := base64.RawURLEncoding.EncodeToString([]byte(header)) + "." + base64.RawURLEncoding.EncodeToString(claims) + "."
		form := redeemed(w.code(ask(asked...), nil), asked...)
		form.Set("client_assertion", proof)
		form.Set("client_assertion_type", "urn:ietf:params:oauth:client-assertion-type:jwt-bearer")
		time.Sleep(2 * time.Second)
		// security: H27
		if a := w.post(oauth.PathToken, form); a.status != 401 || a.Access != "" {
			t.Errorf("%s: %+v", header, a)
		}
	}
}

// An address whose tokens have expired is no guesser: a good token from it is taken at once.
func TestExpiredTokensAreNoGuesses(t *testing.T) { synctest.Test(t, testExpiredTokensAreNoGuesses) }

func testExpiredTokensAreNoGuesses(t *testing.T) {
	failures := connlimit.NewFailures(nil)
	w := newWorld(t, func(o *oauth.Options) { o.Failures = failures })
	first := w.grant()
	current := first
	for range 30 {
		current = w.post(oauth.PathToken, refreshed(current.Refresh))
		if current.status != 200 {
			t.Fatalf("%+v", current)
		}
		time.Sleep(2 * time.Second)
	}
	begun := time.Now()
	for range 30 { // of another grant that was used long ago: genuine, and refused
		other := w.grant()
		w.post(oauth.PathToken, refreshed(other.Refresh))
		time.Sleep(2 * time.Minute)
		if a := w.post(oauth.PathToken, refreshed(other.Refresh)); a.Error != "invalid_grant" {
			t.Fatalf("%+v", a)
		}
	}
	waited := time.Since(begun) - 30*2*time.Minute
	// security: H26
	if a := w.post(oauth.PathToken, refreshed(current.Refresh)); a.status != 200 || waited > time.Second {
		t.Errorf("after 30 tokens that had ended: %+v, delayed by %v", a, waited)
	}
}

// What an application asks for beyond the scopes of grants is neither shown nor given.
func TestScopesOfAdmins(t *testing.T) { synctest.Test(t, testScopesOfAdmins) }

func testScopesOfAdmins(t *testing.T) {
	w := newWorld(t)
	query := ask("scope", "devices:read admin devices:write webhooks firmware broker")
	text := w.do("GET", oauth.PathAuthorize, query, nil).Body.String()
	a := w.post(oauth.PathToken, redeemed(w.code(query, url.Values{"scope": {"devices:read", "admin", "devices:write"}})))
	// security: H20
	if strings.Contains(text, `value="admin"`) || strings.Contains(text, `value="devices:write"`) || a.Scope != "devices:read" {
		t.Errorf("%+v\n%s", a, text)
	}
	who, err := w.opens(a.Access, "/mcp")
	if err != nil {
		t.Fatal(err)
	}
	by := access.Principal{Caller: who, Via: access.ViaMCP}
	// security: H20
	if _, _, err := w.core.CreateKey(t.Context(), by, fleet.NewKeyParams{Name: "mine", Scopes: scopes("devices:read")}); err == nil {
		t.Error("a grant made a key")
	}
	if err := w.core.SaveConsoleCode(t.Context(), by, 0, "code", clock.Now().Add(time.Minute)); err == nil {
		t.Error("a grant made a code of the console")
	}
}

// Nothing that a request says of its host or its scheme reaches the metadata or a redirect.
func TestForgedHost(t *testing.T) { synctest.Test(t, testForgedHost) }

func testForgedHost(t *testing.T) {
	w := newWorld(t)
	for _, path := range []string{oauth.PathMetadata, oauth.PathAuthorize} {
		r := httptest.NewRequest("GET", "http://evil.example"+path+"?"+ask().Encode(), nil)
		r.Header.Set("X-Forwarded-Host", "evil.example")
		r.Header.Set("X-Forwarded-Proto", "http")
		r.Header.Set("Forwarded", "host=evil.example")
		out := httptest.NewRecorder()
		w.server.ServeHTTP(out, r)
		// security: H22
		if strings.Contains(out.Body.String(), "evil.example") {
			t.Errorf("%s: %s", path, out.Body)
		}
	}
}

// The secret that others know of another fleet makes neither codes nor tokens here.
func TestSecretOfAnotherFleet(t *testing.T) { synctest.Test(t, testSecretOfAnotherFleet) }

func testSecretOfAnotherFleet(t *testing.T) {
	w := newWorld(t)
	a := w.grant()
	who, err := w.opens(a.Access, "/mcp")
	if err != nil {
		t.Fatal(err)
	}
	other, err := credential.New([]byte("another secret of 16"))
	if err != nil {
		t.Fatal(err)
	}
	now := clock.Now()
	forged := access.AccessPrefix + other.AccessToken(who.Through, "/mcp", now.Add(time.Hour), now)
	// security: H21
	if _, err := w.opens(forged, "/mcp"); err != access.ErrToken {
		t.Errorf("%v", err)
	}
	if b := w.post(oauth.PathToken, redeemed(other.Code(access.CodeGrant, now.Add(time.Hour)))); b.Error != "invalid_grant" {
		t.Errorf("%+v", b)
	}
	if b := w.post(oauth.PathToken, refreshed("flr_"+who.Through+"_"+other.Code(access.CodeRefresh, now.Add(time.Hour)))); b.Error != "invalid_grant" {
		t.Errorf("%+v", b)
	}
	if _, err := w.opens(a.Access, "/mcp"); err != nil {
		t.Errorf("a forged refresh token ended the grant: %v", err)
	}
}

// On three nodes that share a registry, a token works everywhere while the database is away.
func TestThreeNodesWithoutTheDatabase(t *testing.T) {
	synctest.Test(t, testThreeNodesWithoutTheDatabase)
}

func testThreeNodesWithoutTheDatabase(t *testing.T) {
	w := newWorld(t)
	a := w.grant()
	var nodes []*access.Authenticator
	for _, name := range []string{"b", "c"} {
		core := w.ports.Service(t, fleet.Config{Node: name})
		core.Keys().SetAdmin(w.mint.AdminToken)
		core.Keys().SetAccessTokens(oauth.AccessToken(w.mint))
		devicetest.Refresh(t, core)
		nodes = append(nodes, &access.Authenticator{Keys: core.Keys(), IsAdmin: w.mint.IsAdmin})
	}
	w.ports.SetAway(true)
	for _, node := range append(nodes, w.auth) {
		// security: H21
		if _, _, err := node.AuthenticateAt(a.Access, "/mcp", clock.Now()); err != nil {
			t.Error(err)
		}
	}
	w.ports.SetAway(false)
}

// A form that the page itself sent counts, whatever else a browser says of its origin: a sandbox or an extension makes that null.
func TestOriginNull(t *testing.T) { synctest.Test(t, testOriginNull) }

func testOriginNull(t *testing.T) {
	w := newWorld(t)
	form := url.Values{"secret": {w.token}, "scope": {"devices:read"}, "decision": {"allow"}}
	if out := w.do("POST", oauth.PathAuthorize, ask(), form, "Sec-Fetch-Site", "same-origin", "Origin", "null"); out.Code != http.StatusSeeOther {
		t.Errorf("%d %s", out.Code, out.Body)
	}
}
