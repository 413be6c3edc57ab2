package restapi

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"fleetd/internal/api"
	"fleetd/internal/devices"
)

// A key and a webhook can be read alone, have an ETag, and are changed only as they were read. Answers with a secret are
// not stored on the way.
func TestRevisions(t *testing.T) {
	f := newFleet(t)
	var made api.CreatedKey
	r := f.do(t, "POST", "/v1/keys", `{"name":"reader","scopes":["devices:read"]}`)
	if err := json.Unmarshal([]byte(r.body), &made); err != nil || r.status != http.StatusCreated {
		t.Fatal(r.body, err)
	}
	if r.header.Get("Cache-Control") != "no-store" {
		t.Errorf("a new key: %v", r.header)
	}
	r = f.do(t, "GET", "/v1/keys/reader", "")
	var read api.Key
	r.json(t, &read)
	tag := r.header.Get("ETag")
	if read.ID != made.ID || strings.Contains(r.body, made.Token) || len(tag) < 3 || tag[0] != '"' {
		t.Errorf("%s, ETag %s", r.body, tag)
	}
	f.do(t, "GET", "/v1/keys/nobody", "").problem(t, 404, devices.CodeNotFound)
	f.do(t, "DELETE", "/v1/keys/reader", "", "If-Match", `"other"`).problem(t, 412, devices.CodeStale)
	if r := f.do(t, "DELETE", "/v1/keys/reader", "", "If-Match", tag); r.status != http.StatusNoContent {
		t.Errorf("%d %s", r.status, r.body)
	}
	f.do(t, "DELETE", "/v1/keys/reader", "", "If-Match", tag).problem(t, 412, devices.CodeStale) // its end has changed it

	if r := f.do(t, "GET", "/v1/webhooks/wh_1", ""); r.status != 200 || r.header.Get("ETag") != `"7"` {
		t.Errorf("%d %v %s", r.status, r.header, r.body)
	}
	if r := f.do(t, "POST", "/v1/secret/rotate", `{"admin_only":true}`); r.header.Get("Cache-Control") != "no-store" {
		t.Errorf("%d %v", r.status, r.header)
	}
}
