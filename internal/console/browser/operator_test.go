package browser

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/fleettest"
)

// newJob creates a job that calls a tool, and returns its id.
func newJob(t *testing.T, n *fleettest.Node, spec api.JobSpec, tool, arguments string) string {
	t.Helper()
	spec.Action = api.JobAction{Call: &api.JobCall{Tool: tool, Arguments: json.RawMessage(arguments)}}
	j, err := n.CreateJob(t.Context(), api.NewJob{JobSpec: spec}, "")
	if err != nil {
		t.Fatal(err)
	}
	return j.ID
}

// happened are the lines of a timeline, newest first.
const happened = "[...document.querySelectorAll('.one summary bdi')].map((e) => e.innerText).join('\\n')"

// One happening is one line in words, whichever of the events, the device log, decisions, the audit and tool lists have it. A click
// shows these; notifications are one line; a kind can be left out; what happens meanwhile is added, and a pause holds it back.
func TestTimeline(t *testing.T) {
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	at := func(clock string) string { return "2026-11-24T" + clock + "Z" }
	items := func(w http.ResponseWriter, list ...map[string]any) bool {
		return respond(t, w, http.StatusOK, map[string]any{"items": list, "next_cursor": "", "reach": []any{}, "missing": []any{}})
	}
	front := before(t, n, func(w http.ResponseWriter, r *http.Request) bool {
		type m = map[string]any
		switch r.URL.Path {
		case "/v1/events":
			if r.URL.Query().Get("batch") != "" {
				return false
			}
			event := func(kind, clock string, data m) {
				data["time"], data["device"] = at(clock), first
				text, _ := json.Marshal(data)
				_, _ = fmt.Fprintf(w, "event: %s\ndata: %s\n\n", kind, text) // the browser is gone if this fails
			}
			event("online", "10:00:00", m{"transport": "mqtt", "seq": 1})
			event("catalog", "10:00:01", m{"added": []string{"a", "b"}, "removed": []string{"c"}})
			event("offline", "10:05:00", m{"reason": "dead"})
			event("online", "10:05:40", m{"transport": "mqtt", "seq": 2})
			event("photo", "10:06:01", m{"photo": "p", "question": "who?"})
			event("task", "10:07:00", m{"job": "job1", "round": 0, "state": "ended", "outcome": "ok", "call": "k2"})
			for i := range 5 {
				event("notifications", fmt.Sprintf("10:09:%02d", i), m{"method": "notifications/button", "params": m{"n": i}, "seq": i})
			}
			event("a.kind.of.later", "10:10:00", m{})
			return true
		case "/v1/devices/" + first + "/log":
			return items(w,
				m{"at": at("10:07:00"), "kind": "call", "call": "k2", "tool": volume, "cause": "ok", "duration_ms": 20, "count": 1},
				m{"at": at("10:06:00"), "kind": "call", "call": "kp", "tool": "self.camera.take_photo", "cause": "ok", "duration_ms": 1500, "count": 1},
				m{"at": at("10:05:40"), "kind": "connected", "text": "2.4.2", "transport": "mqtt", "count": 1},
				m{"at": at("10:05:39"), "kind": "ota.check", "cause": "offers_mqtt", "count": 1},
				m{"at": at("10:05:00"), "kind": "closed", "cause": "dead", "duration_ms": 300000, "calls": 1, "count": 1},
				m{"at": at("10:04:59"), "kind": "call", "call": "k1", "tool": volume, "cause": "connection_lost", "duration_ms": 1000, "count": 1},
				m{"at": at("10:00:01"), "kind": "catalog", "count": 1},
				m{"at": at("10:00:00"), "kind": "connected", "text": "2.4.2", "transport": "mqtt", "count": 1},
				m{"at": at("09:00:00"), "kind": "connect.refused", "cause": "wrong_token", "count": 7})
		case "/v1/devices/" + first + "/changes":
			return items(w,
				m{"revision": 3, "aspect": "label:floor", "value": "0", "who": "k7", "at": at("10:08:00")},
				m{"revision": 2, "aspect": "name", "value": "Lamp", "who": "k7", "at": at("10:08:00")},
				m{"revision": 1, "aspect": "join", "value": m{"client": "x"}, "who": "device", "at": at("08:59:00")})
		case "/v1/devices/" + first + "/catalogs":
			return items(w, m{"catalog": strings.Repeat("0", 64), "since": at("10:00:01"), "firmware": "2.4.2"})
		case "/v1/audit":
			return items(w,
				m{"run": "r", "seq": 4, "at": at("10:08:00"), "kind": "device", "action": "edit", "key": "k7", "name": "ops", "outcome": "ok", "detail": "name"},
				m{"run": "r", "seq": 3, "at": at("10:07:00"), "kind": "call", "call": "k2", "action": volume, "arguments": m{"volume": 42}, "key": "k7", "name": "ops", "outcome": "ok", "detail": "job job1", "duration_ns": 20e6},
				m{"run": "r", "seq": 2, "at": at("10:06:00"), "kind": "call", "call": "kp", "action": "self.camera.take_photo", "key": "k8", "name": "claude", "outcome": "ok"},
				m{"run": "r", "seq": 1, "at": at("10:04:59"), "kind": "call", "call": "k1", "action": volume, "key": "k8", "name": "claude", "outcome": "connection_lost"})
		}
		return false
	})
	p := b.openAt(t, front.URL, n.Token(t), "/console/devices/"+first+"/timeline")
	p.emulate(360, 740, "light")
	want := strings.Join([]string{"A.kind.of.later", "5 notifications: notifications/button", "Ops named it Lamp, and gave it the label floor=0", "Ops called set volume to 42: ok, 20 ms", "Claude called take photo: ok, 1.5 s",
		"Connected over MQTT after 40 s, firmware 2.4.2", "Lost power or network, after 5 min, in 1 call", "Claude called set volume: the connection was lost, 1.0 s", "Tools changed: 2 added, 1 removed", "Connected over MQTT, firmware 2.4.2",
		"Was refused: its credentials are of no device here ×7", "Joined by itself"}, "\n")
	p.await(fmt.Sprintf("(%s) === %q", happened, want))
	if why := p.number("document.querySelectorAll('.one > a').length"); why != 1 {
		t.Errorf("%d lines lead to an explanation, want that of the call that failed", why)
	}
	p.run("[...document.querySelectorAll('.one summary')].find((e) => e.innerText.includes('after 40 s')).click()")
	p.await("document.querySelectorAll('.one details[open] .quoted').length === 3") // an event, the check, the record
	p.click("connections")
	p.await("!(" + happened + ").includes('Connected') && (" + happened + ").includes('set volume')")
	p.await("location.search.includes('kinds=')")

	p = b.open(t, n, n.Token(t), "/console/devices/"+first+"/timeline")
	p.await("(" + happened + ").includes('Connected over')")
	p.live()
	p.click("Pause")
	kept := p.eval(happened)
	if _, err := n.Call(t.Context(), first, "self.camera.take_photo", apiclient.CallRequest{Arguments: json.RawMessage(`{"question":"what?"}`)}); err != nil {
		t.Fatal(err)
	}
	p.await("/Resume \\([1-9]/.test(document.querySelector('main').innerText)")
	if now := p.eval(happened); now != kept {
		t.Errorf("a paused timeline became %v", now)
	}
	p.eval("[...document.querySelectorAll('main button')].find((e) => e.innerText.startsWith('Resume')).click()")
	p.await("/ook a photo: what|take photo/.test(" + happened + ")")
}

// The page of a device has what waits for it in words, with the tool; a step of its explanation is a button or a link; what was called
// here is in its timeline.
func TestDeviceInWords(t *testing.T) {
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	const gone = "02:f1:ee:00:00:10"
	away := programs.Simulate(t, n.Info.OTA, "--devices", "1", "--mac-base", gone, "--transport", "mqtt", "--quiet")
	n.AwaitReady(t, 2)
	away.Report(t)
	n.Await(t, "it is offline", wait, func() bool { return n.Ready(t) == 1 })
	newJob(t, n, api.JobSpec{Select: "device=" + gone, Note: "for the night"}, volume, `{"volume":7}`)
	p := b.open(t, n, n.Token(t), "/console/devices/"+gone)
	const queue = "document.querySelector('[data-test=queue]')?.innerText"
	p.await(queue + "?.includes('set volume to 7') && " + queue + ".includes('" + volume + "') && " + queue + ".includes('for the night, waits: not connected')")
	p.click("Cancel")
	p.await(queue + ".includes('Nothing.')")
	if _, err := n.Revoke(t.Context(), gone); err != nil {
		t.Fatal(err)
	}
	p.click("Approve it")
	n.Await(t, "it is a member", wait, func() bool { d, err := n.Device(t.Context(), gone); return err == nil && d.Admission == "member" })

	p.visit("/console/devices/" + first)
	p.await("!!document.querySelector('.control input[type=range]')")
	p.eval("((e) => { Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(e, 33); e.dispatchEvent(new Event('input', {bubbles: true})); e.dispatchEvent(new Event('change', {bubbles: true})); })(document.querySelector('.control input[type=range]'))")
	p.await("(" + happened + ").includes('called set volume')")
}

// A job is headed by its note or by what it does, and nothing of it is cut. One that waits says who has to do what, and what follows;
// one that would do nothing has no button, and what can go wrong is said before the button.
func TestJobsSayWhatTheyNeed(t *testing.T) {
	t.Parallel()
	b := start(t)
	n := fleet(t, 3)
	note := strings.Repeat("as people write at length ", 8) + "to its end"
	newJob(t, n, api.JobSpec{Select: "device=" + first, Note: note}, volume, `{"volume":1}`)
	held := newJob(t, n, api.JobSpec{Select: "board=*", Stages: []api.JobStage{{OK: api.Amount{Number: 1}, Hold: true}, {OK: api.Amount{Percent: 100}}}, Stop: &api.JobStop{Failed: 2}, Pace: &api.JobPace{Concurrency: 2}}, volume, `{"volume":42}`)
	reader, err := n.CreateKey(t.Context(), api.NewKey{Name: "reader", Scopes: []string{"jobs:read", "devices:read", "events:read"}})
	if err != nil {
		t.Fatal(err)
	}
	p := b.open(t, n, n.Token(t), "/console/jobs")
	// cut are the elements whose text is not all in sight.
	const cut = "[...document.querySelectorAll('main *')].filter((e) => e.checkVisibility() && !e.matches('.away, .scroll, textarea, pre, select, input') && (e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0 && getComputedStyle(e).overflowX !== 'visible' || getComputedStyle(e).textOverflow === 'ellipsis' || e.matches('.scroll') && e.scrollWidth > e.clientWidth)).map((e) => e.outerHTML.slice(0, 80))"
	for _, width := range []int64{1280, 360} {
		p.emulate(width, 740, "light")
		p.visit("/console/jobs")
		p.shows(note)
		p.await("[...document.querySelectorAll('main td.first')].some((e) => e.innerText.trim() === 'set volume to 42')")
		if found, _ := p.eval(cut).([]any); len(found) > 0 {
			t.Errorf("at %d these are cut: %v", width, found)
		}
		if wide := p.eval("[...document.querySelectorAll('.scroll')].some((e) => e.scrollWidth > e.clientWidth)"); wide != false {
			t.Errorf("at %d the table is cut", width)
		}
		p.visit("/console/jobs/" + held)
		p.await("document.querySelector('h1').innerText === 'set volume to 42'")
		if found, _ := p.eval(cut).([]any); len(found) > 0 {
			t.Errorf("at %d these are cut of a job: %v", width, found)
		}
	}
	const needs = "document.querySelector('[data-test=needs]')?.innerText"
	p.await(needs + "?.includes('Stage 1 of 2 has passed, and the job waits for a person.')")
	p.shows("You can let it go on. Stage 2 opens next; 2 devices still wait. It runs on at most 2 devices at the same time and stops by itself when 2 failed.")
	other := b.open(t, n, reader.Token, "/console/jobs/"+held)
	other.shows("Somebody whose key has the scope jobs has to let it go on.")
	if buttons := other.number("document.querySelectorAll('[data-test=needs] button').length"); buttons != 0 {
		t.Errorf("%d buttons for a key that may not use them", buttons)
	}
	p.click("Open stage 2")
	p.await("!document.querySelector('[data-test=needs]') && document.querySelector('.head').innerText.includes('done')")
	p.await("!document.querySelector('main thead')?.innerText.includes('State')") // all are ok
	p.shows("State: ✓ ok")

	p.visit("/console/jobs/new?select=board%3D*")
	p.fill("#tool", "self.no.such_tool")
	p.click("Show what it would do")
	p.shows("Every one of these devices would be refused, so there is nothing to start.")
	if buttons := p.number("document.querySelectorAll('[data-test=plan] button.primary').length"); buttons != 0 {
		t.Error("a job that would do nothing can be started")
	}
	p.fill("#tool", volume)
	p.fill("#field-0", "30")
	p.eval("document.querySelector('main details').open = true")
	p.fill("#job-failed", "1")
	p.click("Show what it would do")
	p.await("document.querySelector('[data-test=risk]')?.innerText === 'It runs on at most 1 device at the same time and stops by itself when 1 failed. At most 2 devices can fail or get lost before it stops.'")
	if p.eval("document.querySelector('[data-test=risk]').compareDocumentPosition(document.querySelector('[data-test=plan] button.primary')) & Node.DOCUMENT_POSITION_FOLLOWING") == 0.0 {
		t.Error("the risk stands after the button")
	}
}

// The policy is a table of rules in their order, which are added, changed, moved and removed; the JSON follows, and what is in force
// is tried against a device and a tool.
func TestPolicyTable(t *testing.T) {
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	p := b.open(t, n, n.Token(t), "/console/access/policy")
	p.emulate(1280, 800, "light")
	add := func(name, tools, action string) {
		t.Helper()
		p.click("Add a rule")
		p.fill("#rule-name", name)
		p.fill("#rule-tools", tools)
		p.eval(fmt.Sprintf("document.querySelector('#rule-action').value = %q", action))
		p.click("Take over")
		p.await("!document.querySelector('dialog')")
	}
	p.shows("No rules yet.")
	add("no volume", volume, "deny")
	add("hall may", "self.audio_speaker.*", "allow")
	const names = "[...document.querySelectorAll('main .panel:first-child td.first bdi')].map((e) => e.innerText).join()"
	p.await(names + " === 'no volume,hall may'")
	p.shows("Not saved yet.")
	p.click("Save")
	p.shows("Version 1 is in force.")
	decides := func(action, rule string) {
		t.Helper()
		p.fill("input[name=device]", first)
		p.fill("input[name=tool]", volume+"\r")
		p.await(fmt.Sprintf("document.querySelector('[data-test=decision] .outcome')?.innerText.includes(%q) && document.querySelector('[data-test=decision] code').innerText === %q", action, rule))
	}
	decides("denied", "policy:no volume")
	p.eval("document.querySelector('button[aria-label=\"hall may: Earlier\"]').click()")
	p.await(names + " === 'hall may,no volume'")
	p.await("document.querySelector('#policy').value.indexOf('hall may') < document.querySelector('#policy').value.indexOf('no volume')")
	p.eval("document.querySelector('button[aria-label=\"hall may: Edit\"]').click()")
	p.fill("#rule-devices", "room=hall")
	p.click("Take over")
	p.await("document.querySelector('#policy').value.includes('\"devices\": \"room=hall\"')")
	p.click("Save")
	p.shows("Version 2 is in force.")
	p.visit("/console/access/policy")
	decides("denied", "policy:no volume") // it is not in the hall
	p.eval("document.querySelector('button[aria-label=\"no volume: Remove\"]').click()")
	p.await(names + " === 'hall may'")
	p.eval("((e) => { e.value = '{'; e.dispatchEvent(new Event('input', { bubbles: true })); })(document.querySelector('#policy'))")
	p.shows("The JSON is not a document of rules now.")
	p.click("Discard")
	p.await(names + " === 'hall may,no volume'")
	if wide := p.eval("[...document.querySelectorAll('.scroll')].some((e) => e.scrollWidth > e.clientWidth)"); wide != false {
		t.Error("the table of rules is cut")
	}
}

// A key says in words what it opens, who made it, and what it did last; the audit is filtered by lists. What is the same in all rows
// is said once.
func TestKeysAndAuditInWords(t *testing.T) {
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	made, err := n.CreateKey(t.Context(), api.NewKey{Name: "tablet", Scopes: []string{"devices:read", "tools:call"}, Tools: []string{"self.audio_speaker.*"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.CreateKey(t.Context(), api.NewKey{Name: "idle", Scopes: []string{"events:read"}}); err != nil {
		t.Fatal(err)
	}
	keyed, err := apiclient.New(n.Info.API, made.Token)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := keyed.Call(t.Context(), first, volume, apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":9}`)}); err != nil {
		t.Fatal(err)
	}
	if _, err := keyed.Call(t.Context(), first, "self.camera.take_photo", apiclient.CallRequest{}); err == nil {
		t.Fatal("a tool that the key does not cover")
	}
	time.Sleep(time.Second) // the audit has it
	p := b.open(t, n, n.Token(t), "/console/access")
	p.emulate(1280, 800, "light")
	const rows = "[...document.querySelectorAll('main tbody tr')].map((e) => e.innerText.replace(/\\s+/g, ' '))"
	p.await(rows + ".some((x) => /^tablet .*See devices, call tools; only self.audio_speaker.\\* admin token .* Called take photo/.test(x))")
	p.await(rows + ".some((x) => /^idle .*Follow events .*none recorded/.test(x))")
	p.shows("In every row: State: ✓ valid · Ends: never")
	p.click("Called take photo: a rule denied it")
	p.await("location.pathname.endsWith('/audit') && document.querySelectorAll('main tbody tr').length === 2")
	choose := func(name, value string) {
		t.Helper()
		p.eval(fmt.Sprintf("((e) => { e.value = %q; e.dispatchEvent(new Event('change', { bubbles: true })); })(document.querySelector('select[name=%s]'))", value, name))
		p.await(fmt.Sprintf("new URLSearchParams(location.search).get(%q) === %q", name, value))
	}
	choose("outcome", "tool_denied")
	p.await(rows + ".length === 1 && /a rule denied it/.test(" + rows + "[0])")
	choose("outcome", "ok")
	choose("kind", "call")
	p.await(rows + ".length === 1 && /Called set volume/.test(" + rows + "[0])")
}

// A plot has the colours of the scheme, also when that changes.
func TestPlotsFollowTheScheme(t *testing.T) {
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	p := b.openAt(t, n.Info.API, n.Token(t), "/console/stats", `{ const real = CanvasRenderingContext2D.prototype.stroke; window.strokes = new Set(); CanvasRenderingContext2D.prototype.stroke = function (...a) { window.strokes.add(this.strokeStyle); return real.apply(this, a); }; }`)
	p.emulate(1280, 800, "light")
	const legend = "document.querySelector('.legend line').getAttribute('stroke')"
	p.await("document.querySelectorAll('figure.plot canvas').length > 5 && window.strokes.has('#d5dae1')")
	light := p.eval(legend)
	p.eval("window.strokes.clear()")
	p.emulate(1280, 800, "dark")
	p.await("window.strokes.has('#2f3843')")
	if dark := p.eval(legend); dark == light {
		t.Errorf("the legend is %v in both schemes", dark)
	}
}

// taps counts what a person taps, from the overview on.
type taps struct {
	*page
	made int
}

// tap taps on the first visible element with a text or of a selector: it must be there to be tapped, not under something else.
func (p *taps) tap(what string) {
	p.t.Helper()
	find := fmt.Sprintf("[...document.querySelectorAll('button, a, summary')].find((e) => e.checkVisibility() && !e.disabled && e.innerText.trim() === %q)", what)
	if strings.HasPrefix(what, "document.") {
		find = what
	}
	// The page may still be loading what stands above it: it is scrolled to until it is in sight.
	p.await("((e) => { if (!e) return false; e.scrollIntoView({ block: 'center', behavior: 'instant' }); const r = e.getBoundingClientRect(); return e.contains(document.elementFromPoint(r.left + r.width / 2, r.top + r.height / 2)); })(" + find + ")")
	p.eval(find + ".click()")
	p.made++
}

// From the overview of a phone, the ten things that people come for are three taps away at most.
func TestThreeTaps(t *testing.T) {
	t.Parallel()
	b := start(t)
	n := programs.Start(t, "--admission", "approve", "--webhook-allow", "127.0.0.1")
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) }))
	t.Cleanup(receiver.Close)
	if _, err := n.CreateWebhook(t.Context(), api.NewWebhook{URL: receiver.URL + "/pager", Types: []string{"online"}}); err != nil {
		t.Fatal(err)
	}
	const second, gone, stranger, robot = "02:f1:ee:00:00:01", "02:f1:ee:00:00:10", "02:f1:ee:00:00:77", "02:f1:ee:00:00:20"
	programs.Simulate(t, n.Info.OTA, "--devices", "2", "--profile", "fw-2.4", "--quiet")
	programs.Simulate(t, n.Info.OTA, "--devices", "2", "--mac-base", robot, "--profile", "robot", "--quiet")
	away := programs.Simulate(t, n.Info.OTA, "--devices", "1", "--mac-base", gone, "--transport", "mqtt", "--quiet")
	for id, name := range map[string]string{first: "Kitchen lamp", second: "Door lamp", gone: "Hall lamp", robot: "Robot", robot[:16] + "1": "Other robot"} {
		n.Await(t, "it waits", wait, func() bool { return n.Approve(t.Context(), id, "") == nil })
		if _, err := n.Patch(t.Context(), id, api.DeviceEdit{Name: &name}, 0); err != nil {
			t.Fatal(err)
		}
	}
	n.AwaitReady(t, 5)
	away.Report(t)
	n.Await(t, "it is offline", wait, func() bool { return n.Ready(t) == 4 })
	waits(t, n.Info.OTA, stranger)
	waitsAs(t, n.Info.OTA, second, "a-copy")
	if _, err := n.Call(t.Context(), first, volume, apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":9}`)}); err != nil {
		t.Fatal(err)
	}
	newJob(t, n, api.JobSpec{Devices: []string{robot, robot[:16] + "1"}, Note: "dim at night", Stop: &api.JobStop{Failed: 1}}, "self.test.fail", `{}`)
	p := &taps{page: b.open(t, n, n.Token(t), "/console/")}
	p.emulate(360, 740, "light")
	const slider = "document.querySelector('.control input[type=range]')"
	for _, x := range []struct {
		what string
		do   func()
	}{
		{"why is this device offline", func() {
			p.tap("closed the connection\n1")
			p.tap("Hall lamp")
			p.shows("closed the connection or the network did")
		}},
		{"the volume of a device", func() {
			p.tap("Devices")
			p.tap("Kitchen lamp")
			p.tap(slider)
			p.eval("((e) => { Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(e, 70); e.dispatchEvent(new Event('input', {bubbles: true})); e.dispatchEvent(new Event('change', {bubbles: true})); })(" + slider + ")")
			p.shows("volume 70, the device answered true")
		}},
		{"a photo of a device", func() {
			p.tap("Devices")
			p.tap("Kitchen lamp")
			p.tap("Take a photo")
			p.await("document.querySelector('img.picture')?.naturalWidth > 0")
		}},
		{"approve the one that waits", func() {
			p.tap("document.querySelector('.wrong a[aria-label^=\"Approve\"]')")
			p.tap("document.querySelector('main td button.primary')")
			n.Await(t, "it is a member", wait, func() bool { d, err := n.Device(t.Context(), stranger); return err == nil && d.Admission == "member" })
		}},
		{"refuse the clone", func() {
			p.tap("Compare")
			p.tap("Refuse")
			n.Await(t, "it waits no more", wait, func() bool { d, err := n.Device(t.Context(), second); return err == nil && len(d.Pending) == 0 })
		}},
		{"which jobs need me", func() {
			p.tap("Jobs")
			p.await("[...document.querySelectorAll('main tbody tr')].some((e) => /dim at night[^]*halted/.test(e.innerText))")
		}},
		{"resume one", func() {
			p.tap("Look")
			p.tap("Resume")
			p.await("!document.querySelector('.problem')")
			n.Await(t, "it went on", wait, func() bool { return p.sent("POST /v1/jobs/") > 0 })
		}},
		{"find a device by name", func() {
			p.tap("document.querySelector('.bar input[type=search]')")
			p.fill("input[type=search]", "door\r")
			p.tap("Door lamp")
			p.await("document.querySelector('h1').innerText === 'Door lamp'")
		}},
		{"what did it do today", func() {
			p.tap("Devices")
			p.tap("Kitchen lamp")
			p.await("(" + happened + ").includes('called set volume: ok')")
		}},
		{"is a webhook failing", func() {
			p.tap("More")
			p.tap("Webhooks")
			p.shows("failing")
		}},
	} {
		p.visit("/console/")
		p.made = 0
		x.do()
		t.Logf("%s: %d taps", x.what, p.made)
		if p.made > 3 {
			t.Errorf("%s: %d taps", x.what, p.made)
		}
	}
}
