package restapi

import (
	"net/http"
	"strings"
	"testing"
)

// Keys go in and never come out.
func TestAttestationKeys(t *testing.T) {
	f := newFleet(t)
	key := strings.Repeat("0a", 32)
	if r := f.do(t, http.MethodPost, "/v1/attestation/keys", `{"items":[{"serial":"SN-2","key":"`+key+`"},{"serial":"SN-1","key":"`+key+`","device":"AABBCCDDEEFF"}]}`); r.status != http.StatusOK || !strings.Contains(r.body, `{"imported":2}`) {
		t.Fatalf("%d %s", r.status, r.body)
	}
	first := f.do(t, http.MethodGet, "/v1/attestation/keys?limit=1", "")
	if !strings.Contains(first.body, `"serial":"SN-1","device":"aa:bb:cc:dd:ee:ff"`) || strings.Contains(first.body, "SN-2") {
		t.Errorf("%s", first.body)
	}
	all := f.do(t, http.MethodGet, "/v1/attestation/keys", "")
	// security: D6
	if !strings.Contains(all.body, `"serial":"SN-2","device":"",`) || !strings.Contains(all.body, `"bound_at":null`) || strings.Contains(all.body, key) || strings.Contains(all.body, "sealed") {
		t.Errorf("%s", all.body)
	}
	// security: D6
	if r := f.do(t, http.MethodPost, "/v1/attestation/keys", `{"items":[{"serial":"SN-3","key":"`+key+`00"}]}`); r.status != http.StatusBadRequest || strings.Contains(r.body, key) || strings.Contains(f.log.String(), key) {
		t.Errorf("%d %s", r.status, r.body)
	}
	if r := f.do(t, http.MethodDelete, "/v1/attestation/keys/SN-1", ""); r.status != http.StatusNoContent {
		t.Errorf("%d %s", r.status, r.body)
	}
	if r := f.do(t, http.MethodDelete, "/v1/attestation/keys/SN-1", ""); r.status != http.StatusNotFound {
		t.Errorf("%d %s", r.status, r.body)
	}
	f.ports.SetAway(true)
	if r := f.do(t, http.MethodGet, "/v1/attestation/keys", ""); r.status != http.StatusServiceUnavailable {
		t.Errorf("%d %s", r.status, r.body)
	}
}
