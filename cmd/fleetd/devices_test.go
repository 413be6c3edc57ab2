package main

import (
	"context"
	"reflect"
	"strings"
	"testing"
	"time"

	"fleetd/internal/devicetest"
)

const twoDevices = `{"items":[
	{"id":"aa:bb:cc:dd:ee:01","name":"lamp\u001b[31m\nred","state":"online","transport":"websocket","board":"bread-compact-wifi","firmware":"2.4.2",
	 "mcp":{"state":"ready","tools":7,"catalog_state":"ready"},"last_seen":"2026-08-01T11:59:00Z"},
	{"id":"robot-2","name":"","state":"offline","transport":"","board":"otto","firmware":"2.1.0",
	 "mcp":{"state":"unknown","tools":12,"catalog_state":"stale"},"last_seen":"2026-08-01T09:00:00Z"},
	{"id":"aa:bb:cc:dd:ee:03","name":"new","state":"pending","mcp":{"state":"unknown","tools":0,"catalog_state":"unknown"},"last_seen":null}
],"next_cursor":""}`

func TestDevicesTable(t *testing.T) {
	f := newAPI(t, map[string]string{"GET /v1/devices?limit=1000": twoDevices})
	f.run("devices").is(t, exitOK, strings.Join([]string{
		"ID                 NAME      STATE    TRANSPORT  BOARD               FIRMWARE  TOOLS       LAST SEEN",
		"aa:bb:cc:dd:ee:01  lamp red  online   websocket  bread-compact-wifi  2.4.2     7           now",
		"robot-2            -         offline  -          otto                2.1.0     12 (stale)  2026-08-01T09:00:00Z",
		"aa:bb:cc:dd:ee:03  new       pending  -          -                   -         unknown     -",
		"",
	}, "\n"), "")
}

func TestDevicesJSON(t *testing.T) {
	f := newAPI(t, map[string]string{
		"GET /v1/devices?limit=1000":                    `{"items":[{"id":"a","later":{"z":1,"a":1.50}},` + "\n" + `{"id":"b","name":"` + "\u009b" + `31m"}],"next_cursor":"n"}`,
		"GET /v1/devices?cursor=n&limit=1000":           `{"items":[{"id":"c"}],"next_cursor":""}`,
		"GET /v1/devices?limit=1000&state=x":            `{"items":[],"next_cursor":""}`,
		"GET /v1/devices?label=a%3Db&limit=1000&q=lamp": `{"items":[],"next_cursor":""}`,
	})
	f.run("devices", "--json").is(t, exitOK, `{"id":"a","later":{"z":1,"a":1.50}}`+"\n"+`{"id":"b","name":"\u009b31m"}`+"\n"+`{"id":"c"}`+"\n", "")
	f.run("devices", "list", "--state", "x", "--json").is(t, exitOK, "", "")
	f.run("devices", "--label", "a=b", "--search", "lamp").is(t, exitOK, "no device matches\n", "")
}

func TestDevicesWatch(t *testing.T) {
	f := newAPI(t, map[string]string{"GET /v1/devices?limit=1000": `{"items":[{"id":"a","state":"online"}],"next_cursor":""}`})
	a, stdout, stderr := newApp()
	a.environ = []string{"FLEETD_API=" + f.url, "FLEETD_TOKEN=t0ken"}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	code := make(chan int, 1)
	go func() { code <- a.run(ctx, []string{"devices", "--watch"}) }()
	defer func() {
		if t.Failed() {
			t.Logf("stdout %q, stderr %q", stdout, stderr)
		}
	}()
	devicetest.Eventually(t, "the devices are read repeatedly", func() bool { return len(f.requests()) > 3 })
	f.mu.Lock()
	f.answers["GET /v1/devices?limit=1000"] = `{"items":[{"id":"a","state":"offline","last_seen":"2026-08-01T11:00:00Z"}],"next_cursor":""}`
	f.mu.Unlock()
	devicetest.Eventually(t, "the change is printed", func() bool { return strings.Contains(stdout.String(), "offline") })
	cancel()
	if got := <-code; got != exitOK {
		t.Errorf("status %d", got)
	}
	want := "ID  NAME  STATE   TRANSPORT  BOARD  FIRMWARE  TOOLS  LAST SEEN\n" +
		"a   -     online  -          -      -         -      now\n\n" +
		"ID  NAME  STATE    TRANSPORT  BOARD  FIRMWARE  TOOLS  LAST SEEN\n" +
		"a   -     offline  -          -      -         -      2026-08-01T11:00:00Z\n"
	if stdout.String() != want || stderr.String() != "" {
		t.Errorf("stdout\n%s\nstderr %s", stdout, stderr)
	}
}

func TestDeviceChanges(t *testing.T) {
	f := newAPI(t, map[string]string{
		"POST /v1/devices/aa:bb:cc:dd:ee:01/approve":                "",
		"POST /v1/devices/aa:bb:cc:dd:ee:01/revoke":                 "",
		"DELETE /v1/devices/aa:bb:cc:dd:ee:01":                      "",
		"DELETE /v1/devices/aa:bb:cc:dd:ee:01/clients/4b4a121564d3": "",
		"DELETE /v1/devices/nobody":                                 `{"title":"Not Found","status":404,"code":"device_unknown","detail":"no device is called nobody"}`,
	})
	f.status["DELETE /v1/devices/nobody"] = 404
	const id = "aa:bb:cc:dd:ee:01"
	f.run("devices", "approve", id).is(t, exitOK, id+" approved; this takes effect at the device's next OTA check\n", "")
	f.run("devices", "approve", id, "4b4a121564d3").is(t, exitOK, id+" approved; this takes effect at the device's next OTA check\n", "")
	f.run("devices", "refuse", id, "4b4a121564d3").is(t, exitOK, id+" keeps its client; 4b4a121564d3 is refused\n", "")
	f.run("devices", "revoke", id).is(t, exitOK, id+" revoked; the device waits for approval from its next OTA check on\n", "")
	f.run("devices", "forget", id, "--yes").is(t, exitOK, id+" forgotten\n", "")
	f.run("devices", "forget", "nobody", "--yes").is(t, exitRefused, "", "fleetd: no device is called nobody; `fleetd devices` lists them (device_unknown)\n")
	want := []string{"POST /v1/devices/" + id + "/approve {}", "POST /v1/devices/" + id + `/approve {"client":"4b4a121564d3"}`, "DELETE /v1/devices/" + id + "/clients/4b4a121564d3", "POST /v1/devices/" + id + "/revoke", "DELETE /v1/devices/" + id, "DELETE /v1/devices/nobody"}
	if got := f.requests(); !reflect.DeepEqual(got, want) {
		t.Errorf("asked %q", got)
	}
}

func TestAgo(t *testing.T) {
	for _, tc := range []struct {
		d    time.Duration
		want string
	}{{time.Second, "now"}, {-time.Hour, "now"}, {42 * time.Second, "42s ago"}, {7 * time.Minute, "7m ago"}, {5 * time.Hour, "5h ago"}, {12 * 24 * time.Hour, "12d ago"}} {
		if got := ago(testNow.Add(-tc.d), testNow); got != tc.want {
			t.Errorf("%s: %q, want %q", tc.d, got, tc.want)
		}
	}
	if got := ago(time.Time{}, testNow); got != "-" {
		t.Errorf("never: %q", got)
	}
}

func TestTerminalSafety(t *testing.T) {
	if got, want := string(safeJSON([]byte("{\"a\":\"\u009b\x7f\u202e\u200b\U000e0041\"}\n"))), `{"a":"\u009b\u007f\u202e\u200b\udb40\udc41"}`+"\n"; got != want {
		t.Errorf("safeJSON: %q, want %q", got, want)
	}
}
