package main

import (
	"net/url"
	"strings"
	"testing"
)

// Where one device is named, a name will do that no other device has; an id wins, and names that are near are suggested.
func TestDeviceNames(t *testing.T) {
	const lamp, desk = `{"id":"02:00:00:00:00:01","name":"Kitchen lamp"}`, `{"id":"02:00:00:00:00:02","name":"Desk"}`
	const missing = `{"status":404,"code":"device_unknown","detail":"unknown device"}`
	f := newAPI(t, map[string]string{
		"GET /v1/devices/robot-1":                   `{"id":"robot-1","name":"Desk"}`,
		"GET /v1/devices/robot-1/tools":             `{"state":"ready","items":[]}`,
		"GET /v1/devices/02:00:00:00:00:01/tools":   `{"state":"ready","items":[]}`,
		"GET /v1/devices?limit=3&q=lamp":            `{"items":[` + lamp + `]}`,
		"GET /v1/devices?limit=3&q=Kitchn+lamp":     `{"items":[]}`,
		"GET /v1/devices?limit=3&q=nothing+like+it": `{"items":[]}`,
		"GET /v1/devices?limit=500":                 `{"items":[` + lamp + `,` + desk + `]}`,
	})
	for name, devices := range map[string]string{"Kitchen lamp": lamp, "Desk": desk + "," + strings.Replace(desk, ":02", ":03", 1), "lamp": "", "Kitchn lamp": "", "nothing like it": ""} {
		missed := "GET /v1/devices/" + url.PathEscape(name)
		f.answers[missed], f.status[missed] = missing, 404
		selected := "name=" + name
		if strings.Contains(name, " ") {
			selected = `name="` + name + `"`
		}
		f.answers["GET /v1/devices?limit=3&select="+url.QueryEscape(selected)] = `{"items":[` + devices + `]}`
	}
	for _, c := range []struct {
		device string
		code   int
		asked  int
		stderr string
	}{
		{"02:00:00:00:00:01", 0, 1, ""}, // nothing is looked up
		{"robot-1", 0, 2, ""},
		{"Kitchen lamp", 0, 3, ""},
		{"Desk", 2, 2, `several devices are called "Desk": "Desk" (02:00:00:00:00:02), "Desk" (02:00:00:00:00:03); give the id of one`},
		{"lamp", 2, 3, `no device has the id or the name "lamp"; did you mean "Kitchen lamp" (02:00:00:00:00:01)?`},
		{"Kitchn lamp", 2, 4, `did you mean "Kitchen lamp" (02:00:00:00:00:01)?`},
		{"nothing like it", 2, 4, "no device has the id or the name \"nothing like it\"; `fleetd devices` lists them"},
	} {
		before := len(f.requests())
		got := f.run("tools", c.device)
		if asked := len(f.requests()) - before; got.code != c.code || asked != c.asked || !strings.Contains(got.stderr, c.stderr) {
			t.Errorf("%s: %+v after %d requests, want exit status %d after %d", c.device, got, asked, c.code, c.asked)
		}
	}
}

// A device that was forgotten has records, too, whatever its id is.
func TestRecordsOfAFormerDevice(t *testing.T) {
	f := newAPI(t, map[string]string{"GET /v1/devices/robot-1": `{"status":404,"code":"device_unknown","detail":"no such device"}`, "GET /v1/devices?limit=3&select=name%3Drobot-1": `{"items":[]}`,
		"GET /v1/devices?limit=3&q=robot-1": `{"items":[]}`, "GET /v1/devices?limit=500": `{"items":[]}`, "GET /v1/audit?device=robot-1&limit=101": `{"items":[]}`})
	f.status["GET /v1/devices/robot-1"] = 404
	if got := f.run("audit", "--device", "robot-1"); got.code != exitOK {
		t.Errorf("%+v", got)
	}
}

// What deletes asks on a terminal, and wants --yes elsewhere.
func TestDeletionAsks(t *testing.T) {
	f := newAPI(t, map[string]string{"DELETE /v1/devices/02:00:00:00:00:01": "", "DELETE /v1/webhooks/w1": "", "DELETE /v1/photos/p1": "", "DELETE /v1/attestation/keys/s1": ""})
	for _, args := range [][]string{{"devices", "forget", "02:00:00:00:00:01"}, {"webhooks", "delete", "w1"}, {"photos", "delete", "p1"}, {"chips", "remove", "s1"}} {
		before := len(f.requests())
		if got := f.run(args...); got.code != exitRefused || !strings.Contains(got.stderr, "--yes") || len(f.requests()) != before {
			t.Errorf("%v: %+v", args, got)
		}
		yes := func(a *app) { a.interactive, a.stdin = true, strings.NewReader("y\n") }
		if got := f.runWith(yes, args...); got.code != exitOK || !strings.Contains(got.stderr, "[y/N]") {
			t.Errorf("%v on a terminal: %+v", args, got)
		}
		if got := f.run(append(args, "--yes")...); got.code != exitOK {
			t.Errorf("%v --yes: %+v", args, got)
		}
		if got := len(f.requests()) - before; got != 2 {
			t.Errorf("%v: %d requests", args, got)
		}
	}
}
