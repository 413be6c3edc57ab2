package main

import (
	"strings"
	"testing"
)

const jobJSON = `{"id":"06q0000000abcdefghjk","state":"running","reason":"","spec":{"action":{"call":{"tool":"self.lamp.set"}},"select":"room=lab","when":{},"pace":{"rate":"20/s","concurrency":32}},` +
	`"stage":0,"round":0,"next_at":null,"until":"2026-08-02T12:00:00Z","counts":{"total":3,"waiting":1,"running":1,"ok":1},"missed":0,"created_by":"admin token","created_at":"2026-08-01T12:00:00Z","begun_at":"2026-08-01T12:00:01Z","ended_at":null}`

func TestJobs(t *testing.T) {
	done := strings.NewReplacer(`"state":"running"`, `"state":"done"`, `"waiting":1,"running":1,"ok":1`, `"waiting":0,"running":0,"ok":2,"failed":1`).Replace(jobJSON)
	f := newAPI(t, map[string]string{
		"GET /v1/jobs?limit=1000":                             `{"items":[` + jobJSON + `],"next_cursor":""}`,
		"GET /v1/jobs?limit=1000&state=paused":                `{"items":[],"next_cursor":""}`,
		"GET /v1/jobs/06q0000000abcdefghjk":                   done,
		"POST /v1/jobs/06q0000000abcdefghjk/pause":            strings.Replace(jobJSON, `"running","reason":""`, `"paused","reason":"lunch"`, 1),
		"POST /v1/jobs/06q0000000abcdefghjk/retry":            jobJSON,
		"GET /v1/jobs/06q0000000abcdefghjk/report?format=csv": "device,round\n",
		"POST /v1/jobs?dry_run=true": `{"spec":{"action":{"call":{"tool":"self.lamp.set"}},"select":"room=lab","when":{"until":"2026-08-02T12:00:00Z"}},"devices":3,"online":2,"at_risk":3,` +
			`"next_at":null,"refusals":[{"code":"tool_unknown","detail":"the device has no tool","count":1,"devices":["a"]}],"confirm":[],"estimated":"1s"}`,
		"POST /v1/jobs":           jobJSON,
		"GET /v1/devices/a/tasks": `{"items":[{"job":"06q0000000abcdefghjk","state":"waiting","reason":"offline","due_at":null,"attempt":0}],"next_cursor":""}`,
		"POST /v1/devices/a/tasks/06q0000000abcdefghjk/cancel": "",
		"POST /v1/devices/a/tools/self.reboot/call":            `{"job":"06q0000000abcdefghjk"}`,
	})
	f.run("jobs").is(t, exitOK, strings.Join([]string{
		"JOB                   STATE    ACTION              DEVICES   DONE    OK  FAILED  UNKNOWN  CREATED              BY",
		"06q0000000abcdefghjk  running  call self.lamp.set  room=lab  1 of 3  1   0       0        2026-08-01 12:00:00  admin token",
		""}, "\n"), "")
	f.run("jobs", "--state", "paused").is(t, exitOK, "no jobs; `fleetd jobs run SELECT TOOL` starts one\n", "")
	f.run("jobs", "pause", "06q0000000abcdefghjk", "--reason", "lunch").is(t, exitOK, "job 06q0000000abcdefghjk is paused (lunch); 1 of 3 done, 1 running, 1 ok\n", "")
	f.run("jobs", "retry", "06q0000000abcdefghjk", "--outcome", "failed,unknown")
	f.run("jobs", "report", "06q0000000abcdefghjk").is(t, exitOK, "device,round\n", "")
	f.run("jobs", "report", "last").is(t, exitOK, "device,round\n", "")
	f.run("queue", "a").is(t, exitOK, "JOB                   STATE    WAITS FOR  DUE  ATTEMPT\n06q0000000abcdefghjk  waiting  offline         0\n", "")
	f.run("queue", "a", "--cancel", "06q0000000abcdefghjk").is(t, exitOK, "the task of job 06q0000000abcdefghjk for a is cancelled\n", "")
	f.run("call", "a", "self.reboot", "--later", "24h").is(t, exitOK, "a is not connected; job 06q0000000abcdefghjk calls it when it is back: `fleetd jobs 06q0000000abcdefghjk`\n", "")
	f.run("call", "a", "self.reboot", "--key", "x").is(t, exitFailed, "", "fleetd: --key needs --later: a call that is made at once is never made again\n")

	// More than one device: a yes is needed, and without a terminal the answer is no.
	f.run("jobs", "run", "room=lab", "self.lamp.set", "on=true").is(t, exitRefused, "",
		"fleetd: 3 devices, 2 connected; nothing was started: add --yes to start it, --dry-run to see more\n")
	f.run("jobs", "run", "room=lab", "self.lamp.set", "on=true", "text=5 o'clock", "--yes", "--rate", "30/m", "--stages", "1:30m,5%:hold,100%", "--stop", "2", "--retry", "2:10m",
		"--window", "0 2 * * */3h", "--until", "2026-08-03T00:00:00Z").is(t, exitOK, "job 06q0000000abcdefghjk is running; follow it with `fleetd jobs 06q0000000abcdefghjk --watch`\n", "")
	asked := f.requests()
	const want = `POST /v1/jobs {"action":{"call":{"tool":"self.lamp.set","arguments":{"on":true,"text":"5 o'clock"}}},"select":"room=lab",` +
		`"when":{"until":"2026-08-03T00:00:00.000Z","window":{"cron":"0 2 * * *","for":"3h"}},"pace":{"rate":"30/m"},` +
		`"stages":[{"ok":1,"soak":"30m"},{"ok":"5%","hold":true},{"ok":"100%"}],"stop":{"failed":2},"retry":{"failed":2,"after":"10m"}}`
	if got := asked[len(asked)-1]; got != want {
		t.Errorf("asked\n%s\nwant\n%s", got, want)
	}
	f.run("jobs", "run", "room=lab", "self.lamp.set", "--dry-run").is(t, exitOK, strings.Join([]string{
		"devices  3, 2 connected",
		"action   call self.lamp.set",
		"at risk  3 can fail or get lost before it halts by itself",
		"takes    1s for the connected devices",
		"until    2026-08-02T12:00:00Z",
		"refused  1 device: the device has no tool (a)",
		""}, "\n"), "")
	f.run("restart", "a", "--yes", "--now")
	f.run("jobs", "message", "room=lab", "alert", "status=Note", "message=Back at ten", "--yes")
	asked = f.requests()
	for i, want := range []string{`POST /v1/jobs {"action":{"restart":{"when":"now"}},"devices":["a"]}`,
		`POST /v1/jobs {"action":{"message":{"message":"Back at ten","status":"Note","type":"alert"}},"select":"room=lab"}`} {
		if got := asked[len(asked)-2+i]; got != want {
			t.Errorf("asked\n%s\nwant\n%s", got, want)
		}
	}
	// A job that is followed ends with its outcome.
	f.run("jobs", "06q0000000abcdefghjk", "--watch").is(t, exitTool, "job 06q0000000abcdefghjk done: 3 of 3 done, 2 ok, 1 failed\n",
		"fleetd: 1 device failed; `fleetd jobs report 06q0000000abcdefghjk` has each device, `fleetd jobs retry 06q0000000abcdefghjk` repeats them\n")
}

func TestJobFlags(t *testing.T) {
	f := newAPI(t, nil)
	for _, c := range []struct{ flag, value, want string }{
		{"--at", "soon", "--at takes a duration"}, {"--window", "0 2 * * *", "--window takes a cron expression"}, {"--stages", "x", `--stages: "x" must be a number`},
		{"--stages", "1:soon", "belongs a duration"}, {"--stop", "0", "--stop must be a number"}, {"--retry", "5%", "--retry takes a number"},
	} {
		if got := f.run("jobs", "run", "a=b", "tool", c.flag, c.value); got.code != exitFailed || !strings.Contains(got.stderr, c.want) {
			t.Errorf("%s %s: %+v", c.flag, c.value, got)
		}
	}
}
