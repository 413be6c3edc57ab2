package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"fleetd/internal/api"
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

// offlinePage is a page of causes with numbers of devices.
func offlinePage(next string, counts ...any) string {
	groups, total := []api.OfflineCause{}, 0
	for i := 0; i < len(counts); i += 2 {
		g := api.OfflineCause{Cause: counts[i].(string), Well: counts[i] == "normal", Count: counts[i+1].(int), Devices: []string{}, Next: []string{"Look at " + counts[i].(string) + "."}}
		for n := range g.Count {
			g.Devices = append(g.Devices, fmt.Sprint(g.Cause, "-", n))
		}
		if total += g.Count; g.Count > 0 {
			groups = append(groups, g)
		}
	}
	text, err := json.Marshal(api.OfflineCauses{Groups: groups, Explained: total, NextCursor: next, Missing: []string{"c"}})
	if err != nil {
		panic(err)
	}
	return string(text)
}

// The exit status is for scripts: whether something is wrong. The text is for people: what it is.
func TestExplain(t *testing.T) {
	f := newAPI(t, map[string]string{
		"GET /v1/devices/a/explain":                                      why("a", "online", "well", true),
		"GET /v1/devices/b/explain":                                      why("b", "offline", "gone", false),
		"GET /v1/devices/c/explain":                                      why("c", "offline", "unknown", false),
		"GET /v1/calls/abcdefghij234567/explain":                         why("b", "device_timeout", "answered_late", false),
		"GET /v1/explain?limit=1000":                                     offlinePage("p1", "gone", 1000, "dead", 3, "unknown", 0),
		"GET /v1/explain?cursor=p1&limit=1000":                           offlinePage("p2"),
		"GET /v1/explain?cursor=p2&limit=1000":                           offlinePage("", "normal", 4000, "gone", 2),
		"GET /v1/explain?limit=1000&select=room%3Dlab":                   offlinePage("", "normal", 2),
		"GET /v1/explain?limit=1000&select=room%3Dhall":                  offlinePage("", "normal", 2, "unknown", 1, "gone", 1),
		"GET /v1/explain?limit=1000&select=room%3Dcellar":                offlinePage(""),
		"GET /v1/devices/b/log?before=2026-01-01T00%3A00%3A00Z&limit=50": `{"items":[],"reach":[],"missing":[]}`,
		"GET /v1/refusals?limit=1000":                                    `{"items":[{"at":"2026-08-01T11:00:00Z","node":"a","kind":"connect.refused","device":"x","cause":"unknown_device","count":3}],"reach":[],"missing":[]}`,
		"GET /v1/devices/b/log?kind=call&limit=7":                        `{"items":[{"at":"2026-08-01T11:00:00Z","node":"a","kind":"call","device":"b","cause":"ok","count":1,"call":"c1","tool":"self.light.set","duration_ms":1500}],"reach":[],"missing":["b"]}`,
	})
	f.run("explain", "b").is(t, 3, strings.Join([]string{
		"Device b is offline: gone (not certain, but the best fit)",
		"Because it is so.",
		"Evidence  2026-08-01T11:00:00Z  closed  gone  (node a)",
		"What to do",
		"  1. Look at it.",
		"The device log begins on node a at 2026-08-01T10:00:00Z",
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
	f.run("explain", "--offline").is(t, 3, strings.Join([]string{
		"CAUSE   DEVICES  WHICH                                             WHAT TO DO",
		"normal  4000     normal-0 normal-1 normal-2 normal-3 normal-4 ...  Look at normal.",
		"gone    1002     gone-0 gone-1 gone-2 gone-3 gone-4 ...            Look at gone.",
		"dead    3        dead-0 dead-1 dead-2                              Look at dead.",
		"c did not answer: its records are missing",
		"",
	}, "\n"), "")
	if got := f.run("explain", "--offline", "--select", "room=lab"); got.code != exitOK || !strings.Contains(got.stdout, "normal-0 normal-1  Look") {
		t.Errorf("all well: %+v", got)
	}
	if got := f.run("explain", "--offline", "--select", "room=hall", "--json"); got.code != 4 || strings.Count(got.stdout, "\n") != 1 || !strings.Contains(got.stdout, `"explained":4`) {
		t.Errorf("one is unknown: %+v", got)
	}
	f.run("explain", "--offline", "--select", "room=cellar").is(t, exitOK, "no offline devices\nc did not answer: its records are missing\n", "")
	f.run("log", "b", "--before", "2026-01-01").is(t, exitOK, "no entries\n", "")
	f.run("explain", "--strangers").is(t, exitOK, "TIME                  NODE  DEVICE  KIND             CAUSE           DETAIL\n2026-08-01T11:00:00Z  a     x       connect.refused  unknown_device  3 times\n", "")
	f.run("log", "b", "--kind", "call", "--limit", "7").is(t, exitOK,
		"TIME                  NODE  KIND  CAUSE  DETAIL\n2026-08-01T11:00:00Z  a     call  ok     self.light.set c1 1.5s\nb did not answer: its records are missing\n", "")
	for _, args := range [][]string{{"explain"}, {"explain", "a", "--offline"}, {"explain", "a", "--strangers"}, {"explain", "--offline", "--strangers"}, {"explain", "b", "--select", "room=lab"}} {
		if got := f.run(args...); got.code != exitFailed || got.stdout != "" {
			t.Errorf("%v: %+v", args, got)
		}
	}
}
