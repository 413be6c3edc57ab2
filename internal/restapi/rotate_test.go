package restapi

import (
	"net/http"
	"strings"
	"testing"

	"fleetd/internal/devices/admission"
	"fleetd/internal/devicetest"
)

func TestRotateRoutes(t *testing.T) {
	f := newFleet(t)
	const id = "aa:bb:cc:dd:ee:ff"
	if _, err := f.service.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: "c"}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.service.Approve(t.Context(), devicetest.Admin, id, ""); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		path, body string
		status     int
		has        string
	}{
		{"/v1/devices/nobody/rotate", "", 404, "device_unknown"},
		{"/v1/devices/" + id + "/rotate", `{"grace":"soon"}`, 400, "30d"},
		{"/v1/devices/" + id + "/rotate", `{"grace":"1s"}`, 400, "1m0s"},
		{"/v1/devices/" + id + "/rotate", `{"grace":"90000h"}`, 400, "8760h"},
		{"/v1/devices/" + id + "/rotate", `{"days":1}`, 400, ""},
		{"/v1/devices/" + id + "/rotate", "", 200, `"credentials":{"generation":1,"previous_until":"2`},
		{"/v1/devices/" + id + "/rotate", "", 403, "rotated already"},
		{"/v1/devices/rotate", `{"grace":"24h"}`, 200, `{"generation":2,"previous_until":"2`},
		{"/v1/devices/rotate", `{"grace":"24h"}`, 403, "rotated already"},
	} {
		if r := f.do(t, http.MethodPost, tc.path, tc.body); r.status != tc.status || !strings.Contains(r.body, tc.has) {
			t.Errorf("%s %s: %d %s", tc.path, tc.body, r.status, r.body)
		}
	}
}
