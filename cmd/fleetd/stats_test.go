package main

import (
	"strings"
	"testing"
	"time"
)

const someStats = `{"since":"2026-08-01T11:59:00Z","until":"2026-08-01T12:00:00Z","step":20,"nodes":["a","b\u001b[31m"],"nodes_missing":["c"],
	"starts":[{"node":"a","at":"2026-08-01T11:59:25Z"}],"series":[
	{"name":"online","label":"transport","value":"mqtt","unit":"","points":[null,4,8]},
	{"name":"online","label":"transport","value":"websocket","unit":"","points":[null,1,2]},
	{"name":"calls","label":"outcome","value":"ok","unit":"1/s","points":[null,0.5,0]},
	{"name":"calls","label":"outcome","value":"timeout","unit":"1/s","points":[null,0.25,0]},
	{"name":"call_p99","unit":"s","points":[null,0.0125,null]},
	{"name":"memory","unit":"bytes","points":[null,52428800,104857600]}]}`

func TestFleetHistory(t *testing.T) {
	f := newAPI(t, map[string]string{"GET /v1/stats?since=2026-08-01T11%3A59%3A00Z": someStats, "GET /v1/stats?since=2026-08-01T11%3A59%3A00Z&step=10s": someStats})
	f.run("fleet", "--since", "1m").is(t, exitOK, strings.Join([]string{
		"TIME                  ONLINE  CONNECTS/S  CLOSES/S  OTA_CHECKS/S  CALLS/S  FAILED_CALLS/S  CALL_P50  CALL_P99  HELLO_P99  HANDSHAKE_P99  EVENTS_LOST/S  MEMORY",
		"2026-08-01T11:59:20Z  5       -           -         -             0.75     0.25            -         12.5ms    -          -              -              50MiB",
		"2026-08-01T11:59:40Z  10      -           -         -             0        0               -         -         -          -              -              100MiB",
		"",
	}, "\n"), "fleetd: 2026-08-01T11:59:00Z to 2026-08-01T12:00:00Z, step 20s, nodes: a b; no answer from: c\nfleetd: node a started 2026-08-01T11:59:25Z\nfleetd: there are no figures from before 2026-08-01T11:59:20Z\n")
	if got := f.run("fleet", "--since", "1m", "--json"); got.code != exitOK || !strings.HasPrefix(got.stdout, "{\n  \"since\": ") {
		t.Errorf("%+v", got)
	}
	if got := f.run("fleet", "room=lab", "--since", "1m"); got.code != exitFailed || !strings.Contains(got.stderr, `leave out "room=lab"`) {
		t.Errorf("%+v", got)
	}
	if got := f.run("fleet", "--since", "soon"); got.code != exitFailed || !strings.Contains(got.stderr, "--since takes a duration") {
		t.Errorf("%+v", got)
	}

	a, stdout, stderr := newApp()
	a.environ, a.columns = []string{"FLEETD_API=" + f.url, "FLEETD_TOKEN=t0ken"}, 60
	if code := a.run(t.Context(), []string{"fleet", "--since", "1m"}); code != exitOK || stderr.String() != "" {
		t.Fatalf("%d %s", code, stderr)
	}
	lines := strings.Split(stdout.String(), "\n")
	for i, want := range map[int]string{0: "2026-08-01T11:59:00Z to 2026-08-01T12:00:00Z, step 20s, nodes: a b; no answer from: c",
		1: "online          ▅█  max 10       last 10", 6: "failed calls/s  █▁  max 0.25     last 0", 8: "call p99        █   max 12.5ms   last 12.5ms", 13: "node starts     ^"} {
		if lines[i] != want {
			t.Errorf("line %d:\n%s, want\n%s", i, lines[i], want)
		}
	}
}

// A drawing has at most as many points as fit, in steps that the server takes.
func TestDrawnStep(t *testing.T) {
	for _, tc := range []struct {
		span   time.Duration
		points int
		want   time.Duration
	}{{time.Minute, 100, 10 * time.Second}, {time.Hour, 61, time.Minute}, {24 * time.Hour, 80, 20 * time.Minute}, {12 * time.Hour, 80, 9*time.Minute + 10*time.Second}, {7 * 24 * time.Hour, 300, 35 * time.Minute}, {7 * 24 * time.Hour, 20, 535 * time.Minute}} {
		if got := drawnStep(tc.span, tc.points); got != tc.want {
			t.Errorf("%v in %d: %v, want %v", tc.span, tc.points, got, tc.want)
		}
	}
}
