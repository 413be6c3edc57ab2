package restapi

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/audit"
	"fleetd/internal/connlimit"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
	"fleetd/internal/selector"
)

func withConsole(o *Options) {
	o.Console = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_, _ = w.Write([]byte("console at " + r.URL.Path))
	})
}

// The files of the console need no token; nothing else opens with them.
func TestConsole(t *testing.T) {
	f := newFleet(t, withConsole)
	for _, path := range []string{"/console/", "/console/devices/aa:bb:cc:dd:ee:ff", "/console/static/1/a.js"} {
		if r := f.do(t, "GET", path, "", "Authorization", ""); r.status != 200 || r.body != "console at "+path {
			t.Errorf("%s: %d %s", path, r.status, r.body)
		}
		if r := f.do(t, "HEAD", path, "", "Authorization", ""); r.status != 200 || r.body != "" {
			t.Errorf("HEAD %s: %d %s", path, r.status, r.body)
		}
	}
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	answer, err := client.Get(f.url + "/console")
	if err != nil {
		t.Fatal(err)
	}
	answer.Body.Close()
	if answer.StatusCode != http.StatusFound || answer.Header.Get("Location") != "/console/" {
		t.Errorf("/console: %d %v", answer.StatusCode, answer.Header)
	}
	f.do(t, "POST", "/console/", "", "Authorization", "").problem(t, 401, devices.CodeUnauthorized)
	f.do(t, "GET", "/consoles", "", "Authorization", "").problem(t, 401, devices.CodeUnauthorized)
	f.do(t, "POST", "/console/", "").problem(t, 405, devices.CodeMethodNotAllowed)
	for _, path := range []string{"/console/..%2fv1/devices", "/console/%2e%2e/v1/devices", "/console/../v1/devices", "/v1/devices/..%2f..%2fconsole/", "/console//evil.example/"} {
		r := httptest.NewRequest("GET", "http://127.0.0.1"+path, nil)
		w := httptest.NewRecorder()
		f.api.ServeHTTP(w, r)
		// security: N45
		if location := w.Header().Get("Location"); strings.Contains(w.Body.String(), "items") || strings.HasPrefix(location, "//") || strings.Contains(location, "://") {
			t.Errorf("%s: %d %v %s", path, w.Code, w.Header(), w.Body)
		}
	}
}

func TestConsoleOff(t *testing.T) {
	f := newFleet(t)
	f.do(t, "GET", "/console/", "", "Authorization", "").problem(t, 404, devices.CodeNotFound)
	f.do(t, "GET", "/console/static/1/a.js", "", "Authorization", "").problem(t, 404, devices.CodeNotFound)
}

// Without tokens, a page of another site that gives its own name this address gets nothing.
func TestConsoleWithoutTokens(t *testing.T) {
	f := newFleet(t, withConsole, func(o *Options) { o.AuthNone = true })
	for host, status := range map[string]int{"127.0.0.1:8080": 200, "localhost:8080": 200, "evil.example:8080": 403} {
		r, w := httptest.NewRequest("GET", "/console/", nil), httptest.NewRecorder()
		r.Host = host
		f.api.ServeHTTP(w, r)
		// security: N4
		if w.Code != status {
			t.Errorf("%s: %d", host, w.Code)
		}
	}
}

// No answer of the API is a page, whatever a device wrote into it.
func TestAnswersAreNoPages(t *testing.T) {
	f := newFleet(t)
	for _, path := range []string{"/v1/devices", "/v1/devices/none", "/v1/nowhere", "/v1/photos/photo9", "/", "/livez", "/openapi.json"} {
		// security: N45
		if got := f.do(t, "GET", path, "").header["Content-Security-Policy"]; len(got) != 1 || got[0] != "default-src 'none'; frame-ancestors 'none'; sandbox" {
			t.Errorf("%s: %q", path, got)
		}
	}
	if got := f.do(t, "GET", "/docs", "").header["Content-Security-Policy"]; len(got) != 1 || !strings.Contains(got[0], "style-src 'sha256-") {
		t.Errorf("/docs: %q", got)
	}
}

// login makes a code with a token and exchanges it.
func (f *testFleet) login(t testing.TB, token string) (api.CreatedKey, string) {
	t.Helper()
	r := f.do(t, "POST", "/v1/console/codes", "", as(token)...)
	var code api.ConsoleCode
	if r.status != 201 || json.Unmarshal([]byte(r.body), &code) != nil || time.Until(code.Expires) > time.Minute {
		t.Fatalf("%d %s", r.status, r.body)
	}
	r = f.do(t, "POST", "/v1/console/keys", `{"code":"`+code.Code+`"}`, "Authorization", "")
	var k api.CreatedKey
	if r.status != 201 || json.Unmarshal([]byte(r.body), &k) != nil || r.header.Get("Cache-Control") != "no-store" {
		t.Fatalf("%d %s", r.status, r.body)
	}
	return k, code.Code
}

// A code gives one key, which acts as the one that made it and ends with it.
func TestConsoleLogin(t *testing.T) {
	f := newFleet(t, withConsole)
	f.connect(t, robot, devicetest.NewScript())
	token := f.key(t, "lab", "devices:read tools:call", "", "*get_device_status", "*set_volume")
	parent, _ := f.service.Keys().Find("lab", time.Now())
	k, code := f.login(t, token)
	if parent.By != "admin token" || k.CreatedBy != "lab" || k.Parent != parent.ID || k.State != "valid" || time.Until(k.Expires.Time) > 12*time.Hour || !strings.HasPrefix(k.Name, "console ") {
		t.Errorf("%+v", k)
	}
	// security: K19
	f.do(t, "POST", "/v1/console/keys", `{"code":"`+code+`"}`, "Authorization", "").problem(t, 401, devices.CodeUnauthorized)
	var self api.Self
	f.do(t, "GET", "/v1/self", "", as(k.Token)...).json(t, &self)
	if self.Key != parent.ID || self.Name != "lab" || self.Through != k.ID || !self.Expires.Equal(k.Expires.Time) {
		t.Errorf("%+v", self)
	}
	if r := f.do(t, "POST", volumePath, `{"arguments":{"volume":5}}`, as(k.Token)...); r.status != 200 {
		t.Errorf("%d %s", r.status, r.body)
	}
	// security: K19
	f.do(t, "GET", "/v1/keys", "", as(k.Token)...).problem(t, 403, devices.CodeForbidden)
	// security: K19
	f.do(t, "POST", "/v1/console/codes", "", as(k.Token)...).problem(t, 400, devices.CodeBadRequest)
	calls := f.audited(audit.KindCall)
	// security: K19
	if len(calls) != 1 || calls[0].Key != parent.ID || calls[0].Name != "lab" || calls[0].Through != k.ID {
		t.Errorf("%+v", calls)
	}
	logins := slices.DeleteFunc(f.audited(audit.KindKey), func(e audit.Entry) bool { return e.Action != fleet.ActionConsoleLogin })
	if len(logins) != 1 || logins[0].Key != parent.ID || logins[0].Through != k.ID || logins[0].Outcome != audit.OutcomeOK {
		t.Errorf("%+v", logins)
	}
	// Logging out ends the console's key alone; the one that made it does not end in this way.
	out, _ := f.login(t, token)
	f.do(t, "DELETE", "/v1/self", "", as(token)...).problem(t, 400, devices.CodeBadRequest)
	if r := f.do(t, "DELETE", "/v1/self", "", as(out.Token)...); r.status != 204 {
		t.Errorf("%d %s", r.status, r.body)
	}
	// security: K19
	f.do(t, "GET", "/v1/self", "", as(out.Token)...).problem(t, 401, devices.CodeUnauthorized)
	if r := f.do(t, "GET", "/v1/self", "", as(k.Token)...); r.status != 200 {
		t.Errorf("another console of the same key: %d %s", r.status, r.body)
	}
	if _, _, err := f.service.RevokeKey(t.Context(), devicetest.Admin, "lab"); err != nil {
		t.Fatal(err)
	}
	// security: K19
	f.do(t, "GET", "/v1/self", "", as(k.Token)...).problem(t, 401, devices.CodeUnauthorized)
	var keys api.List[api.Key]
	f.do(t, "GET", "/v1/keys", "").json(t, &keys)
	if len(keys.Items) != 3 || keys.Items[1].ID != k.ID || keys.Items[1].State != "revoked" {
		t.Errorf("%+v", keys)
	}
}

// The admin token's console key may do everything, until the token is rotated.
func TestConsoleLoginOfAdmin(t *testing.T) {
	f := newFleet(t, withConsole)
	k, _ := f.login(t, f.token)
	if r := f.do(t, "GET", "/v1/keys", "", as(k.Token)...); r.status != 200 || k.Parent != access.KeyAdmin {
		t.Errorf("%d %+v", r.status, k)
	}
	r := f.do(t, "POST", "/v1/console/codes", `{"scopes":["devices:read"]}`)
	var code api.ConsoleCode
	if err := json.Unmarshal([]byte(r.body), &code); err != nil {
		t.Fatal(err)
	}
	r = f.do(t, "POST", "/v1/console/keys", `{"code":"`+code.Code+`"}`, "Authorization", "")
	if err := json.Unmarshal([]byte(r.body), &k); err != nil || !slices.Equal(k.Scopes, []string{"devices:read"}) {
		t.Errorf("%d %s", r.status, r.body)
	}
	f.do(t, "GET", "/v1/keys", "", as(k.Token)...).problem(t, 403, devices.CodeForbidden)
	f.do(t, "POST", "/v1/console/codes", `{"scopes":["none"]}`).problem(t, 400, devices.CodeBadRequest)
}

// Wrong codes are refused without the database, and delayed like wrong tokens.
func TestWrongConsoleCodes(t *testing.T) {
	t.Parallel()
	f := newFleet(t, withConsole, func(o *Options) { o.Failures = connlimit.NewFailures(nil) })
	f.ports.Ledger.SetAway(true)
	guess := func() response { return f.do(t, "POST", "/v1/console/keys", `{"code":"guess"}`, "Authorization", "") }
	for range connlimit.FailureBurst {
		guess().problem(t, 401, devices.CodeUnauthorized)
	}
	begun := time.Now()
	// security: D7
	if r := guess(); r.status != http.StatusTooManyRequests || time.Since(begun) < connlimit.FailureDelay {
		t.Errorf("%d after %v", r.status, time.Since(begun))
	}
	for _, body := range []string{"", "[]", `{"code":1}`, `{"key":"x"}`} {
		f.do(t, "POST", "/v1/console/keys", body, "Authorization", "").problem(t, 400, devices.CodeBadRequest)
	}
	f.do(t, "POST", "/v1/console/keys", `{"code":"`+strings.Repeat("x", 2000)+`"}`, "Authorization", "").problem(t, 413, devices.CodeTooLarge)
	f.do(t, "POST", "/v1/console/codes", "").problem(t, 503, devices.CodeUnavailable)
}

func TestConsoleLoginOff(t *testing.T) {
	f := newFleet(t)
	f.do(t, "POST", "/v1/console/codes", "").problem(t, 404, devices.CodeNotFound)
	f.do(t, "POST", "/v1/console/keys", `{"code":"x"}`, "Authorization", "").problem(t, 404, devices.CodeNotFound)
	open := newFleet(t, withConsole, func(o *Options) { o.AuthNone = true })
	open.do(t, "POST", "/v1/console/codes", "", "Authorization", "").problem(t, 400, devices.CodeBadRequest)
	r := httptest.NewRequest("POST", "/v1/console/keys", strings.NewReader(`{"code":"x"}`))
	r.Host = "evil.example"
	w := httptest.NewRecorder()
	open.api.ServeHTTP(w, r)
	// security: N4
	if w.Code != 403 {
		t.Errorf("%d", w.Code)
	}
}

// A consent code has at most the rights of whoever asks for it, and opens neither REST nor the console. An access token opens nothing here.
func TestConsentCodes(t *testing.T) {
	f := newFleet(t, withConsole)
	f.service.Keys().SetAccessTokens(func(token string, _ time.Time) (grant, resource string, err error) {
		return strings.TrimPrefix(token, access.AccessPrefix), "/mcp", nil
	})
	kitchen := f.key(t, "kitchen", "devices:read tools:call webhooks", "room=kitchen", "self.a.*")
	broker := f.key(t, "broker", "broker", "")
	console, _ := f.login(t, kitchen)
	for name, c := range map[string]struct {
		token, body string
		status      int
	}{
		"all that it may":     {kitchen, `{"for":"consent"}`, 201},
		"less":                {kitchen, `{"for":"consent","scopes":["devices:read"],"devices":"floor=1","tools":["self.a.b"]}`, 201},
		"of a console key":    {console.Token, `{"for":"consent"}`, 201},
		"more scopes":         {kitchen, `{"for":"consent","scopes":["jobs"]}`, 400},
		"a right of no grant": {kitchen, `{"for":"consent","scopes":["webhooks"]}`, 400},
		"of admins":           {f.token, `{"for":"consent","scopes":["admin"]}`, 400},
		"more tools":          {kitchen, `{"for":"consent","tools":["self.*"]}`, 400},
		"no such selection":   {kitchen, `{"for":"consent","devices":"room="}`, 400},
		"a key without any":   {broker, `{"for":"consent"}`, 400},
		"another purpose":     {kitchen, `{"for":"everything"}`, 400},
		"a wrong token":       {"fld_x", `{"for":"consent"}`, 401},
		"devices, no purpose": {kitchen, `{"devices":"room=lab"}`, 400},
		"tools, no purpose":   {kitchen, `{"tools":["self.a.b"]}`, 400},
		"tools, the console":  {kitchen, `{"for":"console","tools":["self.a.b"]}`, 400},
	} {
		r := f.do(t, "POST", "/v1/console/codes", c.body, as(c.token)...)
		// security: H20
		if r.status != c.status {
			t.Errorf("%s: %d %s", name, r.status, r.body)
			continue
		}
		if r.status != 201 {
			continue
		}
		var code api.ConsoleCode
		if err := json.Unmarshal([]byte(r.body), &code); err != nil || time.Until(code.Expires) > access.ConsentCodeLife {
			t.Fatalf("%s: %v", r.body, err)
		}
		// security: H23
		f.do(t, "POST", "/v1/console/keys", `{"code":"`+code.Code+`"}`, "Authorization", "").problem(t, 401, devices.CodeUnauthorized)
		who, err := f.service.TakeConsentCode(t.Context(), code.Code)
		if err != nil {
			t.Fatal(err)
		}
		// security: H20
		if who.Through != "" || who.Name != "kitchen" || who.Scopes.Has(access.ScopeWebhooks) || len(who.Tools) != 1 || !strings.Contains(who.Devices.String(), "room=kitchen") {
			t.Errorf("%s: %+v", name, who)
		}
	}
	f.do(t, "POST", "/v1/console/codes", `{"for":"consent"}`, "Authorization", "").problem(t, 401, devices.CodeUnauthorized)
	who, err := f.service.Keys().Authenticate(kitchen, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	k, err := f.service.Keys().GrantKey(who, access.Grant{Host: "claude.ai", Resource: "/mcp"}, who.Scopes.Both(access.GrantScopes), selector.Selector{}, nil, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if k, err = f.service.IssueGrant(t.Context(), access.Principal{From: "192.0.2.7"}, k, func(id string) string { return id }); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/v1/devices", "/v1/self", "/v1/keys", "/v1/nothing"} {
		// security: H21
		f.do(t, "GET", path, "", as(access.AccessPrefix+k.ID)...).problem(t, 403, devices.CodeForbidden)
	}
	// security: H21
	f.do(t, "POST", "/v1/console/codes", `{"for":"consent"}`, as(access.AccessPrefix+k.ID)...).problem(t, 403, devices.CodeForbidden)
	var shown api.Key
	f.do(t, "GET", "/v1/keys/"+k.ID, "").json(t, &shown)
	if shown.State != "valid" || shown.Grant == nil || shown.Grant.Host != "claude.ai" || shown.Grant.Address != "192.0.2.7" || shown.Grant.Used.IsZero() || shown.CreatedBy != "kitchen" {
		t.Errorf("%+v %+v", shown, shown.Grant)
	}
	listed := func() bool {
		var keys api.List[api.Key]
		f.do(t, "GET", "/v1/keys", "").json(t, &keys)
		return slices.ContainsFunc(keys.Items, func(l api.Key) bool { return l.ID == k.ID })
	}
	if !listed() {
		t.Error("a grant is not listed")
	}
	use := access.GrantUse{ID: k.ID, Used: time.Now().Add(-access.GrantIdle)}
	if err := f.ports.Ledger.SaveGrant(t.Context(), use); err != nil {
		t.Fatal(err)
	}
	if f.do(t, "GET", "/v1/keys/"+k.ID, "").json(t, &shown); shown.State != "expired" || !listed() {
		t.Errorf("unused for long: %+v", shown)
	}
	// The database has pruned it, and the memory of this node has not.
	use.Used = use.Used.Add(-access.KeepGrants)
	if err := f.ports.Ledger.SaveGrant(t.Context(), use); err != nil {
		t.Fatal(err)
	}
	if listed() {
		t.Error("a grant that was forgotten is listed")
	}
	use.Used = time.Now()
	if err := f.ports.Ledger.SaveGrant(t.Context(), use); err != nil {
		t.Fatal(err)
	}
	parent, _ := f.service.Keys().Find("kitchen", time.Now())
	for _, want := range []bool{true, false} {
		ago := access.KeepGrants - time.Hour
		if !want {
			ago = access.KeepGrants + time.Hour
		}
		parent.Revoked = time.Now().Add(-ago)
		if _, err := f.service.Keys().Put(parent, time.Now()); err != nil {
			t.Fatal(err)
		}
		if has := f.service.Keys().HasGrant(k.Grant.Client, time.Now()); listed() != want || has != want {
			t.Errorf("its key ended %v ago: listed %v, counted %v", ago, listed(), has)
		}
	}
}
