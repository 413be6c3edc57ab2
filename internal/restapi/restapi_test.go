package restapi

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"testing"

	"fleetd/internal/devices"
)

// table is the API as promised: every route there is.
var table = []string{
	"GET /v1/devices", "PATCH /v1/devices", "GET /v1/fleet", "POST /v1/devices/import", "GET /v1/devices/export", "GET /v1/changes", "GET /v1/devices/{device}/changes",
	"GET /v1/devices/{device}", "PATCH /v1/devices/{device}", "DELETE /v1/devices/{device}", "DELETE /v1/devices/{device}/clients/{client}",
	"POST /v1/devices/{device}/rotate", "POST /v1/devices/rotate",
	"POST /v1/attestation/keys", "GET /v1/attestation/keys", "DELETE /v1/attestation/keys/{serial}",
	"POST /v1/devices/{device}/approve", "POST /v1/devices/{device}/revoke",
	"GET /v1/devices/{device}/tools", "POST /v1/devices/{device}/tools/refresh", "POST /v1/devices/{device}/tools/{tool}/call",
	"POST /v1/devices/{device}/mcp", "POST /v1/devices/{device}/messages", "GET /v1/events", "GET /v1/catalogs/{sha256}", "GET /v1/calls/{call}", "GET /v1/calls/{call}/explain", "GET /v1/explain", "GET /v1/devices/{device}/explain", "GET /v1/devices/{device}/log", "POST /v1/devices/{device}/trace", "GET /v1/devices/{device}/trace", "DELETE /v1/devices/{device}/trace", "GET /v1/refusals", "GET /v1/devices/{device}/catalogs",
	"GET /v1/keys", "GET /v1/keys/{key}", "POST /v1/keys", "POST /v1/secret/rotate", "DELETE /v1/keys/{key}", "GET /v1/policy", "PUT /v1/policy", "GET /v1/policy/versions",
	"GET /v1/policy/versions/{version}", "GET /v1/self", "DELETE /v1/self", "POST /v1/console/codes", "POST /v1/console/keys", "GET /v1/policy/explain", "GET /v1/audit", "GET /v1/audit/export", "GET /v1/audit/verify",
	"GET /v1/photos", "GET /v1/photos/{id}", "DELETE /v1/photos/{id}", "GET /v1/nodes", "GET /v1/stats", "GET /v1/diagnosis",
	"GET /v1/webhooks", "GET /v1/webhooks/{id}", "POST /v1/webhooks", "PATCH /v1/webhooks/{id}", "DELETE /v1/webhooks/{id}", "POST /v1/webhooks/{id}/test",
	"POST /v1/firmware", "GET /v1/firmware", "GET /v1/firmware/check", "GET /v1/firmware/{id}", "PATCH /v1/firmware/{id}", "DELETE /v1/firmware/{id}", "GET /v1/firmware/{id}/file", "GET /v1/devices/{device}/firmware", "DELETE /v1/devices/{device}/firmware/bar", "POST /v1/firmware/roll",
	"POST /v1/jobs", "GET /v1/jobs", "GET /v1/jobs/{job}", "PATCH /v1/jobs/{job}", "POST /v1/jobs/{job}/pause", "POST /v1/jobs/{job}/resume", "POST /v1/jobs/{job}/cancel",
	"POST /v1/jobs/{job}/retry", "POST /v1/jobs/{job}/advance", "POST /v1/jobs/{job}/rollback", "GET /v1/jobs/{job}/tasks", "GET /v1/jobs/{job}/report", "GET /v1/devices/{device}/tasks",
	"POST /v1/devices/{device}/tasks/{job}/cancel",
	"GET /v1/log-level", "PUT /v1/log-level", "GET /livez", "GET /readyz", "GET /metrics",
}

func TestToken(t *testing.T) {
	f := newFleet(t)
	f.api.HandlePublic("GET /metrics", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("up 1\n")) }))
	f.api.Handle("GET /debug/pprof/", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("profiles\n")) }))
	for _, path := range []string{"/livez", "/readyz", "/metrics", "/openapi.json", "/docs", "/"} {
		if r := f.do(t, "GET", path, "", "Authorization", ""); r.status != 200 || r.header.Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%s without a token: %d %v", path, r.status, r.header)
		}
	}
	for _, path := range []string{"/v1/devices", "/v1/nowhere", "/debug/pprof/", "/livez/"} {
		for name, header := range map[string]string{"none": "", "wrong": "Bearer " + strings.Repeat("0", 64), "short": "Bearer " + f.token[:63],
			"long": "Bearer " + f.token + "0", "scheme": "Basic " + f.token, "bare": f.token, "empty": "Bearer "} {
			r := f.do(t, "GET", path, "", "Authorization", header)
			r.problem(t, 401, devices.CodeUnauthorized)
			if !strings.HasPrefix(r.header.Get("WWW-Authenticate"), "Bearer") {
				t.Errorf("%s, %s token: %v", path, name, r.header)
			}
		}
	}
	if r := f.do(t, "GET", "/debug/pprof/", ""); r.body != "profiles\n" {
		t.Errorf("%d %s", r.status, r.body)
	}
	if r := f.do(t, "GET", "/v1/devices", "", "Authorization", "bearer "+f.token); r.status != 200 {
		t.Errorf("the scheme has no case: %d", r.status)
	}
}

// Without a token nothing may come from a web page.
func TestNoToken(t *testing.T) {
	f := newFleet(t, func(o *Options) { o.AuthNone = true })
	for _, tc := range []struct {
		name, method, host, origin, site string
		status                           int
	}{
		{"curl", "GET", "127.0.0.1:8080", "", "", 200},
		{"localhost", "GET", "localhost:8080", "", "", 200},
		{"no port", "GET", "localhost", "", "", 200},
		{"IPv6", "GET", "[::1]:8080", "", "", 200},
		{"curl writes", "PUT", "127.0.0.1:8080", "", "", 200},
		{"rebound name", "GET", "evil.example:8080", "", "", 403},
		{"other origin", "PUT", "127.0.0.1:8080", "https://evil.example", "", 403},
		{"other site", "PUT", "127.0.0.1:8080", "", "cross-site", 403},
		{"own page", "PUT", "127.0.0.1:8080", "http://127.0.0.1:8080", "same-origin", 200},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := httptest.NewRequest(tc.method, "/v1/log-level", strings.NewReader(`{"level":"info"}`))
			r.Host = tc.host
			if tc.origin != "" {
				r.Header.Set("Origin", tc.origin)
			}
			if tc.site != "" {
				r.Header.Set("Sec-Fetch-Site", tc.site)
			}
			w := httptest.NewRecorder()
			f.api.ServeHTTP(w, r)
			// security: N4
			if w.Code != tc.status {
				t.Errorf("%d %s", w.Code, w.Body)
			}
			if w.Code == 403 {
				response{w.Code, w.Header(), w.Body.String()}.problem(t, 403, devices.CodeForbidden)
			}
		})
	}
}

func TestRoutes(t *testing.T) {
	f := newFleet(t)
	for _, path := range []string{"/v1", "/v1/", "/v1/device", "/v1/devices/x/y", "/v1/devices/", "/v2/devices"} {
		f.do(t, "GET", path, "").problem(t, 404, devices.CodeNotFound)
	}
	for _, tc := range []struct{ method, path, allow string }{
		{"POST", "/v1/devices", "GET, PATCH"},
		{"PUT", "/v1/devices/x", "GET, PATCH, DELETE"},
		{"GET", volumePath, "POST"},
		{"DELETE", "/v1/events", "GET"},
		{"POST", "/readyz", "GET"},
		{"BREW", "/v1/log-level", "GET, PUT"},
	} {
		r := f.do(t, tc.method, tc.path, "")
		r.problem(t, 405, devices.CodeMethodNotAllowed)
		if r.header.Get("Allow") != tc.allow {
			t.Errorf("%s %s: allowed is %q", tc.method, tc.path, r.header.Get("Allow"))
		}
	}
	if r := f.do(t, "HEAD", "/v1/devices", ""); r.status != 200 || r.body != "" {
		t.Errorf("HEAD: %d %q", r.status, r.body)
	}
}

// Every code of the core has its status, as the table of the interface has it.
func TestStatuses(t *testing.T) {
	want := map[devices.Code]int{"bad_request": 400, "too_large": 413, "not_found": 404, "invalid_arguments": 422, "unauthorized": 401,
		"forbidden": 403, "tool_denied": 403, "confirmation_required": 428, "device_unknown": 404, "tool_unknown": 404, "device_offline": 409,
		"superseded": 409, "connection_lost": 502, "device_busy": 429, "queue_full": 429, "rate_limited": 429, "conflict": 409, "limit_reached": 409, "stale": 412,
		"method_not_allowed": 405, "device_error": 502, "device_timeout": 504, "unavailable": 503, "internal": 500}
	for code, status := range want {
		w := httptest.NewRecorder()
		newProblem(&devices.Error{Code: code, Detail: "d", Outcome: "unknown", Part: "p", Faults: []devices.Fault{{Pointer: "/a", Detail: "b"}}}).write(w)
		p := response{w.Code, http.Header{"Content-Type": w.Header()["Content-Type"], "X-Content-Type-Options": {"nosniff"}}, w.Body.String()}.problem(t, status, code)
		if p.Outcome != "unknown" || p.Part != "p" || len(p.Errors) != 1 {
			t.Errorf("%s", w.Body)
		}
	}
	if p := newProblem(&devices.Error{Code: "new"}); p.Status != 500 {
		t.Errorf("an unknown code is %d", p.Status)
	}
}

// Faults of our own are logged once and not shown.
func TestInternalFault(t *testing.T) {
	f := newFleet(t)
	f.photos.err = http.ErrBodyNotAllowed
	p := f.do(t, "GET", "/v1/photos", "").problem(t, 500, devices.CodeInternal)
	if strings.Contains(p.Detail, "body") || strings.Count(f.log.String(), http.ErrBodyNotAllowed.Error()) != 1 {
		t.Errorf("detail %q, log %s", p.Detail, f.log)
	}
}

// spec is as much of OpenAPI 3.1 as the test looks at.
type spec struct {
	OpenAPI string
	Info    struct{ Title, Version string }
	Paths   map[string]map[string]struct {
		OperationID string
		Security    []map[string][]string
		Tags        []string
		Summary     string
		Parameters  []struct {
			Name, In string
			Required bool
			Schema   json.RawMessage
		}
		RequestBody struct {
			Content map[string]struct{ Schema json.RawMessage }
		}
		Responses map[string]struct {
			Description string
			Content     map[string]struct{ Schema json.RawMessage }
		}
	}
	Components struct {
		Schemas         map[string]json.RawMessage
		SecuritySchemes map[string]json.RawMessage
	}
	Security []map[string][]string
}

func TestDocument(t *testing.T) {
	f := newFleet(t)
	r := f.do(t, "GET", "/openapi.json", "")
	var doc spec
	r.json(t, &doc)
	if doc.OpenAPI != "3.1.0" || doc.Info.Title != "fleetd" || doc.Info.Version != "1.2.3" || len(doc.Security) != 1 || doc.Components.SecuritySchemes["token"] == nil {
		t.Errorf("%+v", doc.Info)
	}
	for _, match := range regexp.MustCompile(`"\$ref":"([^"]*)"`).FindAllStringSubmatch(r.body, -1) {
		if name, ok := strings.CutPrefix(match[1], "#/components/schemas/"); !ok || doc.Components.Schemas[name] == nil {
			t.Errorf("reference %s leads nowhere", match[1])
		}
	}
	for name, strict := range map[string]bool{"ToolCall": true, "DeviceEdit": true, "LogLevel": true, "Device": false, "Problem": false} {
		if got := strings.Contains(string(doc.Components.Schemas[name]), `"additionalProperties":false`); got != strict {
			t.Errorf("%s is strict: %v", name, got)
		}
	}
	if doc.Components.Schemas["ErrorModel"] != nil {
		t.Error("huma's own error is in the document")
	}
	ids := map[string]bool{}
	var found []string
	for path, item := range doc.Paths {
		for method, op := range item {
			route := strings.ToUpper(method) + " " + path
			found = append(found, route)
			if op.OperationID == "" || ids[op.OperationID] || op.Summary == "" || len(op.Tags) != 1 || len(op.Responses) == 0 {
				t.Errorf("%s: %+v", route, op)
			}
			ids[op.OperationID] = true
			for _, name := range regexp.MustCompile(`\{(\w+)\}`).FindAllStringSubmatch(path, -1) {
				if !slices.ContainsFunc(op.Parameters, func(p struct {
					Name, In string
					Required bool
					Schema   json.RawMessage
				}) bool {
					return p.Name == name[1] && p.In == "path" && p.Required && p.Schema != nil
				}) {
					t.Errorf("%s does not describe %s", route, name[1])
				}
			}
			for status, response := range op.Responses {
				if response.Description == "" {
					t.Errorf("%s: %s has no description", route, status)
				}
				for contentType, media := range response.Content {
					if media.Schema == nil || status == "default" && contentType != "application/problem+json" {
						t.Errorf("%s: %s %s", route, status, contentType)
					}
				}
			}
			if strings.HasPrefix(path, "/v1") && op.Responses["default"].Content == nil {
				t.Errorf("%s does not describe its problems", route)
			}
		}
	}
	slices.Sort(found)
	want := slices.Sorted(slices.Values(table))
	if !slices.Equal(found, want) {
		t.Errorf("described: %v\nwant: %v", found, want)
	}
	// What is described is served.
	for _, route := range table {
		method, path, _ := strings.Cut(route, " ")
		if path == "/metrics" {
			continue // the node's
		}
		r := httptest.NewRequest(method, strings.NewReplacer("{", "", "}", "").Replace(path), nil)
		if _, pattern := f.api.mux.Handler(r); pattern != route {
			t.Errorf("%s is served by %q", route, pattern)
		}
	}
	for _, part := range []string{`"arguments"`, `"timeout"`, `"isError"`, `"duration_ms"`, `"catalog_state"`, `"next_cursor"`, `"pending"`} {
		if !strings.Contains(r.body, part) {
			t.Errorf("%s is not in the document", part)
		}
	}
}

func TestPage(t *testing.T) {
	f := newFleet(t)
	r := f.do(t, "GET", "/docs", "")
	if r.header.Get("Content-Type") != "text/html; charset=utf-8" {
		t.Errorf("%v", r.header)
	}
	policy := r.header.Get("Content-Security-Policy")
	if !strings.HasPrefix(policy, "default-src 'none'; style-src 'sha256-") || strings.Contains(policy, "unsafe") || strings.Contains(policy, "script-src") {
		t.Errorf("policy %s", policy)
	}
	for _, no := range []string{"<script", "<link", "<img", "<iframe", "http://", "https://", "@import", "url(", "src=", "style="} {
		if strings.Contains(r.body, no) {
			t.Errorf("the page has %s in it", no)
		}
	}
	for _, match := range regexp.MustCompile(`href="([^"]*)"`).FindAllStringSubmatch(r.body, -1) {
		if id, inner := strings.CutPrefix(match[1], "#"); match[1] != "/openapi.json" && (!inner || !strings.Contains(r.body, `id="`+id+`"`)) {
			t.Errorf("link to %s leads nowhere", match[1])
		}
	}
	for _, route := range table {
		if !strings.Contains(r.body, ">"+route+"<") {
			t.Errorf("%s is not on the page", route)
		}
	}
	if !strings.Contains(r.body, pageStyle[:40]) {
		t.Error("the style is not in the page as it was hashed")
	}
}

// Bodies are refused with the name of what is wrong.
func TestBodies(t *testing.T) {
	f := newFleet(t)
	if _, err := f.service.Accept(devices.Identity{Device: robot, ClientID: "c"}, &line{}); err != nil {
		t.Fatal(err)
	}
	const path = "/v1/devices/aa:bb:cc:dd:ee:ff"
	for _, tc := range []struct {
		body   string
		status int
		code   devices.Code
		detail string
	}{
		{`{"nmae":"x"}`, 400, devices.CodeBadRequest, "nmae"},
		{`{"name":7}`, 400, devices.CodeBadRequest, "name"},
		{`{"name":"x"`, 400, devices.CodeBadRequest, "body"},
		{`{"name":"x"}{}`, 400, devices.CodeBadRequest, "body"},
		{``, 400, devices.CodeBadRequest, "body"},
		{`[]`, 400, devices.CodeBadRequest, "body"},
		{`{"labels":{"a":1}}`, 400, devices.CodeBadRequest, "labels"},
		{`{"labels":{"a b":"1"}}`, 400, devices.CodeBadRequest, "a b"},
		{`{"transport_wanted":"carrier pigeon"}`, 400, devices.CodeBadRequest, "transport_wanted"},
		{`{"name":"` + strings.Repeat("x", 129) + `"}`, 400, devices.CodeBadRequest, "128"},
		{`{"name":"` + strings.Repeat("x", BodyLimit) + `"}`, 413, devices.CodeTooLarge, ""},
	} {
		p := f.do(t, "PATCH", path, tc.body).problem(t, tc.status, tc.code)
		if !strings.Contains(p.Detail, tc.detail) {
			t.Errorf("%.40s: %s", tc.body, p.Detail)
		}
	}
	if r := f.do(t, "PATCH", path, strings.Repeat(" ", BodyLimit-2)+"{}"); r.status != 200 {
		t.Errorf("64 KiB exactly: %d %s", r.status, r.body)
	}
	if r := f.do(t, "PATCH", path, `{}`, "Content-Type", "application/x-www-form-urlencoded"); r.status != 200 {
		t.Errorf("curl -d: %d %s", r.status, r.body)
	}
	for _, query := range []string{"limit=0", "limit=1001", "limit=x", "limit=-1", "cursor=%21", "state=sleeping", "transport=ble", "stat=online"} {
		f.do(t, "GET", "/v1/devices?"+query, "").problem(t, 400, devices.CodeBadRequest)
	}
}
