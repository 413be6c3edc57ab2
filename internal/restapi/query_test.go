package restapi

import (
	"net/http"
	"strings"
	"testing"

	"fleetd/internal/devices"
)

// The page shows the scope that each operation needs.
func TestPageShowsScopes(t *testing.T) {
	f := newFleet(t)
	page := f.do(t, "GET", "/docs", "", "Authorization", "").body
	for operation, want := range map[string]string{
		"GET /v1/devices": "Needs the scope <code>devices:read</code>.", "PATCH /v1/devices/{device}": "Needs the scope <code>devices:write</code>.",
		"GET /v1/photos/{id}": "Needs the scope <code>photos:read</code>.", "GET /v1/self": "Needs any valid token.", "GET /livez": "Needs no token.",
	} {
		_, rest, found := strings.Cut(page, ">"+operation+"</h3>")
		text, _, _ := strings.Cut(rest, "<h3")
		if !found || !strings.Contains(text, want) {
			t.Errorf("%s: no %q in %.300s", operation, want, text)
		}
	}
	if n := strings.Count(page, "Needs no token."); n > 4 {
		t.Errorf("%d operations need no token", n)
	}
}

// Parameters that are unknown or given twice are refused by name.
func TestQueries(t *testing.T) {
	f := newFleet(t)
	for _, tc := range []struct{ method, path, body, name string }{
		{"GET", "/v1/events?devise=x", "", "devise"},
		{"GET", "/v1/events?device=02:00:00:00:00:01&device=02:00:00:00:00:02", "", "device"},
		{"GET", "/v1/policy?version=3", "", "version"},
		{"PUT", "/v1/policy?base=3", "{}", "base"},
		{"POST", volumePath + "?timeout=3s", "{}", "timeout"},
		{"GET", "/v1/photos/p1?size=small", "", "size"},
		{"GET", "/v1/devices?label=room=lab&label=floor=1", "", "label"},
		{"GET", "/v1/devices?labels=room=lab", "", "labels"},
		{"GET", "/v1/photos?device=a&device=b", "", "device"},
		{"GET", "/v1/devices?q=%zz", "", "query"},
	} {
		r := f.do(t, tc.method, tc.path, tc.body)
		if r.status != http.StatusBadRequest || !strings.Contains(r.body, string(devices.CodeBadRequest)) || !strings.Contains(r.body, tc.name) {
			t.Errorf("%s %s: %d %s", tc.method, tc.path, r.status, r.body)
		}
	}
	if r := f.do(t, "GET", "/livez?probe=1", ""); r.status != http.StatusOK {
		t.Errorf("a probe: %d", r.status)
	}
}
