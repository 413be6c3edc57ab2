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
	"fleetd/internal/rollout"
)

// TestDetails: what only checks of images need is passed on as the device said it, or as unreadable.
func TestDetails(t *testing.T) {
	var v struct{ Request struct{ Body string } }
	vector(t, "ota_request", &v)
	var many strings.Builder
	for i := range maxMembers {
		fmt.Fprintf(&many, `"%d":0,`, i)
	}
	for name, c := range map[string]struct {
		body string
		want devices.Details
	}{
		"the firmware's":                {v.Request.Body, devices.ParseDetails(v.Request.Body)}, // has the same names
		"an SSID in quotes":             {strings.Replace(v.Request.Body, `"ssid":"lab"`, `"ssid":"the "lab""`, 1), devices.Details{Unreadable: true}},
		"an SSID that brings a board":   {strings.Replace(v.Request.Body, `"ssid":"lab"`, `"ssid":"x"},"board":{"name":"other"`, 1), devices.Details{Unreadable: true}},
		"an SSID that names the board":  {strings.Replace(v.Request.Body, `"ssid":"lab"`, `"ssid":"x","name":"other"`, 1), devices.Details{Unreadable: true}},
		"an SSID that brings a version": {strings.Replace(v.Request.Body, `"ssid":"lab"`, `"ssid":"x"},"application":{"version":"3"`, 1), devices.Details{Unreadable: true}},
		"an escape in the version":      {strings.Replace(v.Request.Body, `"version":"2.`, `"version":"2\u002e`, 1), devices.Details{Unreadable: true}},
		"too many members":              {`{` + many.String() + `"flash_size":16777216}`, devices.Details{Unreadable: true}},
		"no JSON":                       {"x", devices.Details{Unreadable: true}},
		"a huge table":                  {`{"application":{"elf_sha256":"e"},"partition_table":[` + strings.Repeat("1,", devices.MaxDetails) + `1]}`, devices.Details{Unreadable: true}},
		"numbers as text":               {`{"flash_size":"16"}`, devices.Details{Unreadable: true}},
		"a number too large":            {`{"flash_size":1e99}`, devices.Details{Unreadable: true}},
	} {
		r := httptest.NewRequest(http.MethodPost, PathOTA, strings.NewReader(c.body))
		r.Header.Set("Device-Id", mac)
		got, err := parseRequest(r)
		// security: D27
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

// TestOffers: the reply has the image that the rollout offers, with the integer 1 for force, and never beside an activation; one that
// fails its safety check is left out. Only the admitted client of a device is seen by the rollout.
func TestOffers(t *testing.T) {
	b := newBench(t, fleet.Config{}, nil)
	body := `{"application":{"version":"2.4.1","elf_sha256":"e"},"flash_size":16777216}`
	check := func(client string) string {
		t.Helper()
		header := map[string]string{"Device-Id": mac}
		if client != "" {
			header["Client-Id"] = client
		}
		return b.do("POST", PathOTA, body, header).Body.String()
	}
	if got := check("c"); strings.Contains(got, "firmware") || len(b.rollouts.seen) != 1 {
		t.Errorf("%s, seen %d", got, len(b.rollouts.seen))
	}
	if seen := b.rollouts.seen[0]; seen.Device != mac || seen.Facts.ELF != "e" || !strings.Contains(seen.Details, "16777216") || seen.Begun.IsZero() || !seen.WebSocket || seen.Activation {
		t.Errorf("%+v", seen)
	}
	b.rollouts.offer = &rollout.Offer{Version: "2.5.0", Token: "t"}
	if got := check("c"); !strings.Contains(got, `"firmware":{"version":"2.5.0","url":"http://192.0.2.1:8000/xiaozhi/f/t.`) {
		t.Error(got)
	}
	b.rollouts.offer.Force = true
	if got := check("c"); !strings.Contains(got, `"force":1}`) {
		t.Error(got)
	}
	for _, unsafe := range []rollout.Offer{{Version: "v2.5.0", Token: "t"}, {Version: "2.5.0", Token: "\x00"}} {
		b.rollouts.offer = &unsafe
		if got := check("c"); strings.Contains(got, "firmware") || !strings.Contains(got, "websocket") {
			t.Errorf("%+v: %s", unsafe, got)
		}
	}
	before := len(b.rollouts.seen)
	// security: D27
	if check("another"); len(b.rollouts.seen) != before {
		t.Error("the check of another client is seen")
	}
	if check(""); len(b.rollouts.seen) != before {
		t.Error("a check without a client is seen")
	}
	if err := Check([]byte(`{"activation":{"code":"1"},"firmware":{"version":"1","url":"http://x/f"}}`)); err == nil {
		t.Error("an image beside an activation is safe")
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
		// security: D24 D29
		if r, _ := get(path); r.StatusCode != 404 {
			t.Errorf("%s: %s", path, r.Status)
		}
	}
}
