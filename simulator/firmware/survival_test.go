package firmware

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"fleetd/internal/attest"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/espimage"
	core "fleetd/internal/fleet"
	"fleetd/internal/provision"
	serverside "fleetd/internal/rollout"
)

// The simulator shares no code with the server, so that it can disagree with it. This is where the two are compared:
// only tests import both, and what fleetd's checker passes must be survived by the firmware's reader as it is written
// here.

// survive reads a reply as a device does that boots, with a new flash and with one that another server has filled, and
// then once more. It fails where the device aborts, cannot read the reply, or connects elsewhere than the reply names.
func survive(t *testing.T, reply []byte) nvs {
	t.Helper()
	if len(reply) >= maxHTTPBody {
		t.Fatalf("the device's HTTP client hangs at %d bytes", len(reply))
	}
	d := json.NewDecoder(bytes.NewReader(reply))
	d.UseNumber()
	var parts map[string]map[string]any
	if err := d.Decode(&parts); err != nil {
		t.Fatalf("%q: %v", reply, err)
	}
	used := nvs{entries: []nvsEntry{{space: "mqtt", key: "endpoint", isString: true, text: "old.example.test"},
		{space: "websocket", key: "url", isString: true, text: "wss://old.example.test/"}, {space: "websocket", key: "version", isString: true, text: "3"}}}
	var fresh nvs
	for _, flash := range []*nvs{&used, &fresh, &fresh} {
		answer, err := readOTA(reply, flash, "2.4.2")
		if err != nil {
			t.Fatalf("%q: %v", reply, err)
		}
		if answer.upgrade && answer.firmwareURL != "" {
			u, err := parseHTTPURL(answer.firmwareURL)
			compareURL(t, answer.firmwareURL, u, err)
		}
		if answer.websocket && !answer.mqtt {
			if text, ok := parts["websocket"]["url"].(string); ok {
				stored := flash.text("websocket", "url")
				u, err := parseWSURL(stored)
				compareURL(t, text, u, err)
			}
			continue
		}
		endpoint := flash.text("mqtt", "endpoint")
		u, err := parseEndpoint(endpoint)
		if err != nil {
			t.Fatalf("%q: %v", reply, err)
		}
		text, ok := parts["mqtt"]["endpoint"].(string)
		if !ok {
			continue
		}
		host, port, splitErr := net.SplitHostPort(text)
		if n, err := strconv.Atoi(port); splitErr != nil || err != nil || u.host != host || u.port != n {
			t.Fatalf("%q sends the device to %q port %d", reply, u.host, u.port)
		}
	}
	return fresh
}

// compareURL compares what the device dials with what net/url reads.
func compareURL(t *testing.T, text string, u deviceURL, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	want, err := url.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	port := 80
	if want.Scheme == "wss" || want.Scheme == "https" {
		port = 443
	}
	if p := want.Port(); p != "" {
		port, err = strconv.Atoi(p)
	}
	if err != nil || u.host != want.Hostname() || u.port != port || !strings.HasSuffix(text, u.path) && u.path != "/" {
		t.Fatalf("the device dials %+v for %q, error %v", u, text, err)
	}
}

// FuzzCheckedReply: the device survives whatever provision.Check passes.
func FuzzCheckedReply(f *testing.F) {
	var v struct{ Cases []struct{ Body string } }
	vector(f, "ota_responses", &v)
	for _, c := range v.Cases {
		f.Add([]byte(c.Body))
	}
	for _, reply := range []string{`{"mqtt":{"endpoint":"h:1883","keepalive":240},"firmware":{"version":"2.4.3","url":"http://h:81/f"}}`, `{"MQTT":{"sixteen_chars_xx":1}}`,
		`{"firmware":{"version":"2147483647","url":""}}`, `{"firmware":{"version":"2147483648","url":""}}`, `{"websocket":{"token":"` + strings.Repeat("x", 3999) + `"}}`,
		`{"mqtt":{"endpoint":"h:65535","fifteen_chars_x":"é"}}`, `{"mqtt":{"endpoint":"h"}}`, `{"mqtt":{"endpoint":"[::1]:1883"}}`, `{"websocket":{"url":"wss://h:8443/a"}}`,
		`{"websocket":{"url":"ws://h:/"}}`, `{"websocket":{"url":"wss://h?a/b"}}`, `{"mqtt":{"endpoint":"\u0000h:1"}}`, `{"a":{"b":["\ud83d"]}}`, `{"websocket":{"url":"ws://h/","a":1e300}}`} {
		f.Add([]byte(reply))
	}
	f.Fuzz(func(t *testing.T, reply []byte) {
		if provision.Check(reply) == nil {
			survive(t, reply)
		}
	})
}

// everyImage offers an image to every device whose version can be compared with it, as the preflight has it.
type everyImage struct{ own string }

// Check implements provision.Rollouts.
func (e *everyImage) Check(_ context.Context, c *serverside.Check) *serverside.Offer {
	e.own = c.Facts.Firmware
	if _, ok := espimage.Version(c.Facts.Firmware); !ok {
		return nil
	}
	return &serverside.Offer{Version: "2.5.0", Token: "t", Force: len(c.Facts.Firmware)%2 == 0}
}

// Open implements provision.Rollouts.
func (*everyImage) Open(context.Context, string, netip.Addr) (*serverside.Download, error) {
	return nil, serverside.ErrNoDownload
}

// FuzzOTAToFirmware goes the whole way: a request, fleetd's handler, its reply, the device. What the device stores must
// let it in.
func FuzzOTAToFirmware(f *testing.F) {
	var v struct{ Request struct{ Body string } }
	vector(f, "ota_request", &v)
	f.Add([]byte(v.Request.Body), "aa:bb:cc:dd:ee:ff", "11111111-2222-4333-8444-555555555555", "otto-robot/2.4.2", "", uint8(0))
	f.Add([]byte(`{"board":{"ssid":"a"b"},"application":{"version":"1.0"}}`), "robot-1", "c", "", "SN-1", uint8(1))
	f.Add([]byte(`{"mac_address":"aa:bb:cc:dd:ee:ff","uuid":"a\u0000b"}`), "", "", "x/1.0", "", uint8(2))
	f.Add([]byte("{"), "AABBCCDDEEFF", "\xff", "", "", uint8(2))
	f.Add([]byte(`{}`), "robot-2", strings.Repeat("é", 64), "", "", uint8(7))
	mint, err := credential.New([]byte("a secret for tests only"))
	if err != nil {
		f.Fatal(err)
	}
	quiet := slog.New(slog.DiscardHandler)
	paths := []string{provision.PathOTA, provision.PathOTAWS, provision.PathOTAMQTT}
	f.Fuzz(func(t *testing.T, body []byte, id, client, agent, serial string, choice uint8) {
		fields := map[string]string{"Device-Id": id, "Client-Id": client, "User-Agent": agent, "Serial-Number": serial}
		for _, value := range fields {
			if strings.ContainsFunc(value, func(c rune) bool { return c < ' ' || c == 0x7f }) {
				return // net/http refuses the request
			}
		}
		approve, transport := choice&1 != 0, devices.TransportWebSocket
		if choice&2 != 0 {
			transport = devices.TransportMQTT
		}
		ports, images := devicetest.New(), &everyImage{}
		server := provision.New(provision.Options{Service: ports.Service(t, core.Config{Approve: approve}), Mint: mint, Attest: attest.New(ports, mint, quiet),
			PublicURL: "http://192.0.2.1:8000/a", MQTT: &provision.MQTT{Endpoint: "192.0.2.1:1883", Keepalive: 240}, Transport: transport,
			Framing: 1 + int(choice>>2)%3, Location: time.UTC, Rollouts: images, Draining: func() bool { return false }, Log: quiet})
		mux := http.NewServeMux()
		server.Register(mux)
		r := httptest.NewRequest(http.MethodPost, paths[int(choice>>4)%len(paths)], bytes.NewReader(body))
		for name, value := range fields {
			r.Header.Set(name, value)
		}
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, r)
		if w.Code == http.StatusBadRequest {
			return
		}
		if err := provision.Check(w.Body.Bytes()); w.Code != http.StatusOK || err != nil {
			t.Fatalf("%d %s: %v", w.Code, w.Body, err)
		}
		flash := survive(t, w.Body.Bytes())
		if strings.Contains(w.Body.String(), `"firmware":{`) {
			var settings nvs
			if a, err := readOTA(w.Body.Bytes(), &settings, images.own); err != nil || a.firmwareURL == "" || a.hasCode {
				t.Errorf("the offer %s to a device that runs %q: %+v, %v", w.Body, images.own, a, err)
			}
		}
		members := ports.Devices()
		if len(members) > 1 || len(members) == 1 == approve {
			t.Fatalf("%d devices, approval needed: %t", len(members), approve)
		}
		name, password := "", flash.text("websocket", "token")
		if slices.ContainsFunc(flash.entries, func(e nvsEntry) bool { return e.space == "mqtt" }) {
			name, _ = credential.ClientOfUser(flash.text("mqtt", "username"))
			password = flash.text("mqtt", "password")
		}
		if approve && password != "" {
			t.Errorf("a device that waits has %q", password)
		}
		for device, row := range members {
			if !mint.IsDevice(password, string(device), cmp.Or(name, row.ClientID), 0) {
				t.Errorf("%s as client %q has %q", device, name, password)
			}
		}
	})
}
