package main

import (
	"reflect"
	"testing"
)

func TestRotate(t *testing.T) {
	f := newAPI(t, map[string]string{
		"POST /v1/devices/aa:bb:cc:dd:ee:01/rotate": `{"id":"aa:bb:cc:dd:ee:01","credentials":{"generation":2,"previous_until":"2026-09-01T12:00:00Z"}}`,
		"POST /v1/devices/rotate":                   `{"generation":3,"previous_until":"2026-09-01T12:00:00Z"}`,
	})
	const rest = "; new credentials come with the next OTA check: restart each device that does not restart by itself before 2026-09-01T12:00:00Z\n"
	f.run("devices", "rotate", "aa:bb:cc:dd:ee:01", "--grace", "48h").is(t, exitOK, "aa:bb:cc:dd:ee:01 rotated to generation 2"+rest, "")
	f.run("devices", "rotate", "--all").is(t, exitOK, "all devices rotated to generation 3"+rest, "")
	for _, args := range [][]string{{"devices", "rotate"}, {"devices", "rotate", "--all", "x"}} {
		f.run(args...).is(t, exitFailed, "", "fleetd: give a device, or --all (see fleetd devices rotate --help)\n")
	}
	want := []string{`POST /v1/devices/aa:bb:cc:dd:ee:01/rotate {"grace":"48h0m0s"}`, `POST /v1/devices/rotate {"grace":"720h0m0s"}`}
	if got := f.requests(); !reflect.DeepEqual(got, want) {
		t.Errorf("asked %q", got)
	}
}
