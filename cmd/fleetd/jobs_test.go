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
		"JOB                   STATE    ACTION              DEVICES   DONE    OK  FAILED  UNKNOWN  REFUSED  EXPIRED  CREATED               BY",
		"06q0000000abcdefghjk  running  call self.lamp.set  room=lab  1 of 3  1   0       0        0        0        2026-08-01T12:00:00Z  admin token",
		""}, "\n"), "")
	f.run("jobs", "--state", "paused").is(t, exitOK, "no job matches\n", "")
	f.run("jobs", "pause", "06q0000000abcdefghjk", "--reason", "lunch").is(t, exitOK, "job 06q0000000abcdefghjk is paused (lunch); 1 of 3 done, 1 running, 1 ok\n", "")
	f.run("jobs", "retry", "06q0000000abcdefghjk", "--outcome", "failed,unknown")
	f.run("jobs", "report", "06q0000000abcdefghjk").is(t, exitOK, "device,round\n", "")
	f.run("jobs", "report", "last").is(t, exitOK, "device,round\n", "")
	f.run("queue", "a").is(t, exitOK, "JOB                   STATE    WAITS FOR  DUE  ATTEMPT  ACTION\n06q0000000abcdefghjk  waiting  offline         0        call self.lamp.set\n", "")
	f.run("queue", "a", "--cancel", "06q0000000abcdefghjk").is(t, exitOK, "the task of job 06q0000000abcdefghjk for a is cancelled\n", "")
	f.run("queue", "a", "--cancel", "last", "--json").is(t, exitOK, "", "")
	f.run("queue", "a", "--cancel", "last").is(t, exitOK, "the task of job 06q0000000abcdefghjk for a is cancelled\n", "")
	f.run("call", "a", "self.reboot", "--later", "24h").is(t, exitOK, "a is not connected; job 06q0000000abcdefghjk calls it when it is back: `fleetd jobs 06q0000000abcdefghjk`\n", "")
	f.run("call", "a", "self.reboot", "--key", "x").is(t, exitFailed, "", "fleetd: --key needs --later: a call that is made at once is never made again\n")

	// More than one device: a yes is needed, and without a terminal the answer is no.
	f.run("jobs", "run", "room=lab", "self.lamp.set", "on=true").is(t, exitRefused, "",
		"fleetd: 1 device will be refused: the device has no tool\nfleetd: 3 devices, 2 connected; nothing was started: add --yes to start it, --dry-run to see more\n")
	f.run("jobs", "run", "room=lab", "self.lamp.set", "on=true", "text=5 o'clock", "--yes", "--rate", "30/m", "--stages", "1:30m,5%:hold,100%", "--stop", "2", "--retry", "2:10m",
		"--window", "0 2 * * */3h", "--until", "2026-08-03T00:00:00Z").is(t, exitOK, "job 06q0000000abcdefghjk is running; follow it with `fleetd jobs 06q0000000abcdefghjk --watch`\n",
		"fleetd: 1 device will be refused: the device has no tool\n")
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
		if got := asked[len(asked)-3+2*i]; got != want { // before each the plan
			t.Errorf("asked\n%s\nwant\n%s", got, want)
		}
	}
	// A job that is followed ends with its outcome.
	f.run("jobs", "06q0000000abcdefghjk", "--watch").is(t, exitTool, "job 06q0000000abcdefghjk done: 3 of 3 done, 2 ok, 1 failed\n",
		"fleetd: 1 device failed; `fleetd jobs report 06q0000000abcdefghjk` has each device, `fleetd jobs retry 06q0000000abcdefghjk` repeats them\n")
}

// A halted job names the command that continues it, and a retry that repeats nothing reports it.
func TestHaltedJobs(t *testing.T) {
	halted := strings.NewReplacer(`"state":"running","reason":""`, `"state":"halted","reason":"stop"`, `"waiting":1,"running":1,"ok":1`, `"waiting":1,"failed":2`).Replace(jobJSON)
	done := strings.NewReplacer(`"state":"running"`, `"state":"done"`, `"waiting":1,"running":1,"ok":1`, `"ok":3`).Replace(jobJSON)
	f := newAPI(t, map[string]string{
		"GET /v1/jobs/06q0000000abcdefghjk":         halted,
		"POST /v1/jobs/06q0000000abcdefghjk/retry":  halted,
		"GET /v1/jobs/06q0000000abcdefghjm":         strings.Replace(halted, `"failed":2`, `"failed":1,"unknown":1`, 1),
		"POST /v1/jobs/06q0000000abcdefghjm/retry":  done,
		"POST /v1/jobs/06q0000000abcdefghjm/cancel": done,
	})
	f.run("jobs", "06q0000000abcdefghjk", "--watch").is(t, exitTimeout, "job 06q0000000abcdefghjk halted (stop): 2 of 3 done, 2 failed\n",
		"fleetd: job 06q0000000abcdefghjk is halted (stop); `fleetd jobs report 06q0000000abcdefghjk` has each device, `fleetd jobs resume 06q0000000abcdefghjk` continues it\n")
	f.run("jobs", "06q0000000abcdefghjm", "--watch").is(t, exitTimeout, "job 06q0000000abcdefghjk halted (stop): 2 of 3 done, 1 failed, 1 unknown\n",
		"fleetd: job 06q0000000abcdefghjk is halted (stop), 1 unknown; `fleetd jobs report 06q0000000abcdefghjk` has each device, `fleetd jobs resume 06q0000000abcdefghjk` continues it\n")
	f.run("jobs", "retry", "06q0000000abcdefghjk").is(t, exitOK,
		"job 06q0000000abcdefghjk is halted (stop); 2 of 3 done, 2 failed; `fleetd jobs resume 06q0000000abcdefghjk` continues it\n", "")
	f.run("jobs", "retry", "06q0000000abcdefghjm", "--outcome", "failed,unknown").is(t, exitOK,
		"job 06q0000000abcdefghjk is done; 3 of 3 done, 3 ok; no task is failed or unknown: nothing is repeated\n", "")
	f.run("jobs", "cancel", "06q0000000abcdefghjm").is(t, exitOK, "job 06q0000000abcdefghjk is done; 3 of 3 done, 3 ok\n", "")
}

// A job shows when it begins its tasks, and how many at once.
func TestJobShowsItsRules(t *testing.T) {
	f := newAPI(t, map[string]string{"GET /v1/jobs/06q0000000abcdefghjk": strings.NewReplacer(`"when":{}`,
		`"when":{"at":"2026-08-01T13:00:00Z","cron":"0 7 * * 1-5","timezone":"Europe/Berlin","window":{"cron":"0 2 * * *","for":"3h"}},`+
			`"stages":[{"ok":1,"soak":"30m"},{"ok":"5%","hold":true},{"ok":"100%"}],"stop":{"failed":2,"share":"5%","of":20},"retry":{"failed":2,"after":"10m"}`,
		`"stage":0`, `"stage":2`).Replace(jobJSON)})
	f.run("jobs", "06q0000000abcdefghjk").is(t, exitOK, strings.Join([]string{
		"job       06q0000000abcdefghjk",
		"state     running",
		"action    call self.lamp.set",
		"devices   room=lab",
		"tasks     1 of 3 done, 1 running, 1 ok",
		"created   2026-08-01T12:00:00Z by admin token",
		"at        2026-08-01T13:00:00Z",
		"schedule  0 7 * * 1-5 (Europe/Berlin)",
		"window    0 2 * * *, open for 3h (Europe/Berlin)",
		"pace      20/s, 32 at once",
		"stage     2 of 3 (1:30m, 5%:hold, 100%)",
		"stop      at 2 failed or unknown, or at 5% failed or unknown, once 20 tasks have ended",
		"retry     at most 2 of each task, 10m apart",
		"begun     2026-08-01T12:00:01Z",
		"until     2026-08-02T12:00:00Z",
		""}, "\n"), "")
}

// An action is named with its arguments or its text, and a stage on hold with what it waits for.
func TestJobShowsItsAction(t *testing.T) {
	f := newAPI(t, map[string]string{"GET /v1/jobs/06q0000000abcdefghjk": strings.NewReplacer(`{"tool":"self.lamp.set"}`,
		`{"tool":"self.lamp.set","arguments":{"on":true,"text":"good night","mode":"warm"}}`, `"when":{}`, `"when":{},"stages":[{"ok":1,"hold":true},{"ok":"100%"}]`,
		`"reason":""`, `"reason":"hold"`, `"stage":0`, `"stage":1`).Replace(jobJSON)})
	got := f.run("jobs", "06q0000000abcdefghjk").stdout
	for _, want := range []string{`  call self.lamp.set mode=warm on=true text="good night"`,
		"  1 of 2 (1:hold, 100%); it has passed, and `fleetd jobs advance 06q0000000abcdefghjk` opens the next"} {
		if !strings.Contains(got, want+"\n") {
			t.Errorf("%q is not in\n%s", want, got)
		}
	}
	f = newAPI(t, map[string]string{"GET /v1/jobs/06q0000000abcdefghjk": strings.Replace(jobJSON, `{"call":{"tool":"self.lamp.set"}}`,
		`{"message":{"type":"alert","status":"Note","message":"The lab closes"}}`, 1)})
	if got := f.run("jobs", "06q0000000abcdefghjk").stdout; !strings.Contains(got, `  message alert message="The lab closes" status=Note`+"\n") {
		t.Error(got)
	}
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

// A job for nobody is not started, unless devices may come to match.
func TestJobForNobody(t *testing.T) {
	f := newAPI(t, map[string]string{
		"POST /v1/jobs?dry_run=true": `{"spec":{"action":{"call":{"tool":"self.lamp.set"}},"select":"room=lab","when":{"until":"2026-08-02T12:00:00Z"}},"devices":0,"online":0,"at_risk":0,"next_at":null,"refusals":[],"confirm":[],"estimated":""}`,
		"POST /v1/jobs":              jobJSON,
	})
	f.run("jobs", "run", "room=lab", "self.lamp.set", "--yes").is(t, exitRefused, "",
		"fleetd: no device matches room=lab; nothing was started (with --follow, --at or --cron a job waits for devices that come to match)\n")
	for _, args := range [][]string{{"room=lab", "--follow"}, {"room=lab", "--at=2h"}, {"room=lab", "--cron=0 7 * * *"},
		{"room=lab", "--key=k"}, // of a job that exists, and after which its devices match no more
		{"a"}} {                 // the server refuses a named device itself
		f.run(append([]string{"jobs", "run", args[0], "self.lamp.set", "--yes"}, args[1:]...)...).is(t, exitOK, "job 06q0000000abcdefghjk is running; follow it with `fleetd jobs 06q0000000abcdefghjk --watch`\n", "")
	}
}

// What a plan refuses names parts of the schemas that devices sent: none of it controls the terminal.
func TestPlansOfHostileDevices(t *testing.T) {
	f := newAPI(t, map[string]string{
		"POST /v1/jobs?dry_run=true": `{"spec":{"action":{"call":{"tool":"self.lamp.set"}},"when":{"until":"2026-08-02T12:00:00Z"}},"devices":1,"online":0,"at_risk":1,"next_at":null,` +
			`"refusals":[{"code":"invalid_arguments","detail":"/\u001b]0;owned\u0007\u202e is required\nfleetd: done","count":1,"devices":["a"]}],"confirm":[],"estimated":""}`,
		"POST /v1/jobs": jobJSON,
	})
	f.run("jobs", "run", "a", "self.lamp.set").is(t, exitOK, "job 06q0000000abcdefghjk is running; follow it with `fleetd jobs 06q0000000abcdefghjk --watch`\n",
		"fleetd: 1 device will be refused: / is required fleetd: done\n")
}
