package provision

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"fleetd/internal/clock"
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

// TestProbe: the probe is served as images have to be, and to its address alone.
func TestProbe(t *testing.T) {
	b := newBench(t, fleet.Config{}, nil)
	web := httptest.NewUnstartedServer(b.mux)
	web.Config.ReadTimeout = time.Second // shorter than the download
	web.Start()
	defer web.Close()
	probe := b.server.Diagnose("").Probe
	path := strings.TrimPrefix(probe.URL, "http://192.0.2.1:8000")
	if len(probe.URL) > 200 || !strings.HasPrefix(path, PathFirmware) {
		t.Errorf("URL %s", probe.URL)
	}
	get := func(path string) (r *http.Response, after func() error) {
		t.Helper()
		conn, err := net.Dial("tcp", web.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		if _, err := fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\nConnection: close\r\n\r\n", path); err != nil {
			t.Fatal(err)
		}
		in := bufio.NewReader(conn)
		if r, err = http.ReadResponse(in, nil); err != nil {
			t.Fatal(err)
		}
		return r, func() error {
			_ = conn.SetReadDeadline(time.Now().Add(time.Second))
			_, err := in.ReadByte()
			return err
		}
	}
	r, after := get(path)
	if r.StatusCode != 200 || r.ContentLength != probe.Size || r.Header.Get("Content-Encoding") != "" || len(r.TransferEncoding) != 0 {
		t.Errorf("%+v", r)
	}
	sum := sha256.New()
	if n, err := io.Copy(sum, r.Body); err != nil || n != probe.Size || hex.EncodeToString(sum.Sum(nil)) != probe.SHA256 {
		t.Errorf("%d bytes, error %v", n, err)
	}
	if err := after(); err == nil || !strings.Contains(err.Error(), "timeout") {
		t.Errorf("the node closes first: %v", err)
	}
	expired := PathFirmware + b.mint.Code(codeProbe, clock.Now().Add(-time.Second))
	altered := path[:len(path)-1] + string('A'+(path[len(path)-1]-'A'+1)%26)
	for _, path := range []string{PathFirmware + "x", expired, altered, PathFirmware + "..%2f..%2fetc%2fpasswd", PathFirmware + b.mint.Code("console", clock.Now().Add(time.Hour))} {
		// security: D24
		if r, _ := get(path); r.StatusCode != 404 {
			t.Errorf("%s: %s", path, r.Status)
		}
	}
}
