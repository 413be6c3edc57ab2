package main

import (
	"strings"
	"testing"
)

// why is an explanation of the server.
func why(device, state, cause string, well bool) string {
	text := "false"
	if well {
		text = "true"
	}
	return `{"device":"` + device + `","state":"` + state + `","well":` + text + `,"cause":"` + cause + `","sentence":"Because \u001b[31mit is so.","certain":` + text +
		`,"evidence":[{"at":"2026-08-01T11:00:00Z","node":"a","kind":"closed","text":"gone\u202e"}],"next":["Look at it."],"reach":[{"node":"a","since":"2026-08-01T10:00:00Z"}],"missing":["b"]}`
}

// The exit status is for scripts: whether something is wrong. The text is for people: what it is.
func TestExplain(t *testing.T) {
	f := newAPI(t, map[string]string{
		"GET /v1/devices/a/explain":                     why("a", "online", "well", true),
		"GET /v1/devices/b/explain":                     why("b", "offline", "gone", false),
		"GET /v1/devices/c/explain":                     why("c", "offline", "unknown", false),
		"GET /v1/calls/abcdefghij234567/explain":        why("b", "device_timeout", "answered_late", false),
		"GET /v1/devices?limit=1000&state=offline":      `{"items":[{"id":"b"},{"id":"b"}],"next_cursor":""}`,
		"GET /v1/refusals":                              `{"items":[{"at":"2026-08-01T11:00:00Z","node":"a","kind":"connect.refused","device":"x","cause":"unknown_device","count":3}],"reach":[],"missing":[]}`,
		"GET /v1/devices/b/recording?kind=call&limit=7": `{"items":[{"at":"2026-08-01T11:00:00Z","node":"a","kind":"call","device":"b","cause":"ok","count":1,"call":"c1","tool":"self.light.set","duration_ms":1500}],"reach":[],"missing":["b"]}`,
	})
	f.run("explain", "b").is(t, 3, strings.Join([]string{
		"Device b is offline: gone (not certain: it fits best)",
		"Because [31mit is so.",
		"Evidence  2026-08-01T11:00:00Z  closed  gone  (node a)",
		"What to do",
		"  1. Look at it.",
		"Records of a since 2026-08-01T10:00:00Z",
		"b did not answer: its records are missing",
		"",
	}, "\n"), "")
	if got := f.run("explain", "a"); got.code != exitOK || !strings.Contains(got.stdout, "Device a is online: well\n") {
		t.Errorf("well: %+v", got)
	}
	if got := f.run("explain", "c"); got.code != 4 {
		t.Errorf("unknown: %+v", got)
	}
	if got := f.run("explain", "abcdefghij234567", "--json"); got.code != 3 || !strings.Contains(got.stdout, `"cause":"answered_late"`) && !strings.Contains(got.stdout, `"cause": "answered_late"`) || got.stderr != "" {
		t.Errorf("a call: %+v", got)
	}
	f.run("explain", "--offline").is(t, 3, "CAUSE  DEVICES  WHICH  WHAT TO DO\ngone   2        b b    Look at it.\n", "")
	f.run("explain", "--strangers").is(t, exitOK, "TIME                  NODE  DEVICE  KIND             CAUSE           DETAIL\n2026-08-01T11:00:00Z  a     x       connect.refused  unknown_device  3 times\n", "")
	f.run("log", "b", "--kind", "call", "--limit", "7").is(t, exitOK,
		"TIME                  NODE  KIND  CAUSE  DETAIL\n2026-08-01T11:00:00Z  a     call  ok     self.light.set c1 1.5s\nb did not answer: its records are missing\n", "")
	for _, args := range [][]string{{"explain"}, {"explain", "a", "--offline"}, {"explain", "a", "--strangers"}, {"explain", "--offline", "--strangers"}} {
		if got := f.run(args...); got.code != exitFailed || got.stdout != "" {
			t.Errorf("%v: %+v", args, got)
		}
	}
}
