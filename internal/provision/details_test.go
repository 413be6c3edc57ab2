package provision

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"fleetd/internal/devices"
	"fleetd/internal/fleet"
)

// TestDetails: what only checks of images need is passed on as the device said it, or as unreadable.
func TestDetails(t *testing.T) {
	var v struct{ Request struct{ Body string } }
	vector(t, "ota_request", &v)
	for name, c := range map[string]struct {
		body string
		want devices.Details
	}{
		"the firmware's":     {v.Request.Body, devices.ParseDetails(v.Request.Body)}, // has the same names
		"an SSID in quotes":  {strings.Replace(v.Request.Body, `"ssid":"lab"`, `"ssid":"the "lab""`, 1), devices.Details{Unreadable: true}},
		"no JSON":            {"x", devices.Details{Unreadable: true}},
		"a huge table":       {`{"application":{"elf_sha256":"e"},"partition_table":[` + strings.Repeat("1,", devices.MaxDetails) + `1]}`, devices.Details{Unreadable: true}},
		"numbers as text":    {`{"flash_size":"16"}`, devices.Details{Unreadable: true}},
		"a number too large": {`{"flash_size":1e99}`, devices.Details{Unreadable: true}},
	} {
		r := httptest.NewRequest(http.MethodPost, PathOTA, strings.NewReader(c.body))
		r.Header.Set("Device-Id", mac)
		got, err := parseRequest(r)
		if details := devices.ParseDetails(got.Details); err != nil || fmt.Sprintf("%+v", details) != fmt.Sprintf("%+v", c.want) || len(got.Details) > devices.MaxDetails {
			t.Errorf("%s: %q is %+v, error %v", name, got.Details, details, err)
		}
	}
	r := httptest.NewRequest(http.MethodPost, PathOTA, strings.NewReader(v.Request.Body))
	r.Header.Set("Device-Id", mac)
	got, _ := parseRequest(r)
	if d := devices.ParseDetails(got.Details); d.FlashSize != 16<<20 || d.Chip.Revision != 2 || d.Application.Project != "xiaozhi" || len(d.Table) != 2 || d.Table[1].Size != 4128768 || d.OTA.Label != "ota_0" || d.Display.Width != 320 {
		t.Errorf("%+v", d)
	}
	for _, body := range []string{`{}`, `{"board":{"name":"x"}}`} {
		r := httptest.NewRequest(http.MethodPost, PathOTA, strings.NewReader(body))
		r.Header.Set("Device-Id", mac)
		if got, err := parseRequest(r); err != nil || got.Details != "" {
			t.Errorf("%s: %q, error %v", body, got.Details, err)
		}
	}
}

// TestNothingIsOffered: no reply has a section firmware, whatever version the device has.
func TestNothingIsOffered(t *testing.T) {
	b := newBench(t, fleet.Config{}, nil)
	for _, version := range []string{"2.4.2", "v2.4.2-dirty", "", "abcdef0"} {
		w := b.do("POST", PathOTA, `{"application":{"version":"`+version+`","elf_sha256":"e"}}`, map[string]string{"Device-Id": mac, "Client-Id": "c"})
		if reply := decode(t, w); reply.Firmware != nil || strings.Contains(w.Body.String(), "firmware") {
			t.Errorf("%q: %s", version, w.Body)
		}
	}
}
