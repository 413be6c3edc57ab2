package browser

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

// attention is what the overview says that needs somebody, a line each.
const attention = "[...document.querySelectorAll('.wrong li')].map((e) => e.innerText.replace(/\\s+/g, ' '))"

// The overview begins with what is wrong, the worst first, each with one way out; the navigation counts what waits for a
// person. Without anything wrong it says so. It asks only what the key may read.
func TestAttention(t *testing.T) {
	t.Parallel()
	b := start(t)
	n := programs.Start(t, "--admission", "approve", "--webhook-allow", "127.0.0.1")
	front := before(t, n, func(w http.ResponseWriter, r *http.Request) bool { // doctor has findings about this machine
		return r.URL.Path == "/v1/diagnosis" && respond(t, w, http.StatusOK, api.Diagnosis{Findings: []api.Finding{{Severity: "info", Setting: "x", Message: "a note"}}})
	})
	p := b.openAt(t, front.URL, n.Token(t), "/console/")
	p.emulate(1280, 800, "light")
	p.shows("Nothing needs attention.")
	if counts := p.number("document.querySelectorAll('nav.main .count').length"); counts != 0 {
		t.Errorf("%d numbers in the navigation of a fleet that needs nobody", counts)
	}

	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) }))
	t.Cleanup(receiver.Close)
	if _, err := n.CreateWebhook(t.Context(), api.NewWebhook{URL: receiver.URL + "/pager", Types: []string{"online"}}); err != nil {
		t.Fatal(err)
	}
	programs.Simulate(t, n.Info.OTA, "--devices", "2", "--profile", "robot", "--quiet")
	for _, id := range []string{first, "02:f1:ee:00:00:01"} {
		n.Await(t, "it waits", wait, func() bool { return n.Approve(t.Context(), id, "") == nil })
	}
	n.AwaitReady(t, 2)
	const stranger = "02:f1:ee:00:00:77"
	waits(t, n.Info.OTA, stranger)
	job := func(note, tool, arguments string, change func(*api.JobSpec)) string {
		t.Helper()
		spec := api.JobSpec{Select: "board=*", Note: note, Action: api.JobAction{Call: &api.JobCall{Tool: tool, Arguments: json.RawMessage(arguments)}}}
		change(&spec)
		j, err := n.CreateJob(t.Context(), api.NewJob{JobSpec: spec}, "")
		if err != nil {
			t.Fatal(err)
		}
		return j.ID
	}
	job("dim at night", "self.test.fail", `{}`, func(s *api.JobSpec) { s.Stop = &api.JobStop{Failed: 1} })
	held := job("volume 42", volume, `{"volume":42}`, func(s *api.JobSpec) {
		s.Stages = []api.JobStage{{OK: api.Amount{Number: 1}, Hold: true}, {OK: api.Amount{Percent: 100}}}
	})
	for _, line := range []string{
		`^✕ dim at night was halted: [12] of 2 devices failed, and its rule stops at 1 Look$`,
		`^✕ ` + receiver.URL + `/pager has accepted nothing since \\d\\d:\\d\\d: .*418.* Test$`,
		`^◐ volume 42 waits at stage 1 of 2 and needs your go-ahead Continue$`,
		`^◐ ` + stranger + ` waits for approval Approve$`,
	} {
		p.await(attention + ".some((x) => new RegExp(" + `"` + strings.ReplaceAll(line, "/", "\\\\/") + `"` + ").test(x))")
	}
	p.shows("Needs attention: 4")
	if sorted := p.eval(attention + ".map((x) => x[0]).join('')"); sorted != "✕✕◐◐" {
		t.Errorf("the lines are in the order %v", sorted)
	}
	if links := p.eval("[...document.querySelectorAll('.wrong li')].every((e) => e.querySelectorAll('a').length === 1)"); links != true {
		t.Error("a line has not one link")
	}
	p.await("[...document.querySelectorAll('nav.main li')].map((e) => e.innerText.replace(/\\s+/g, ' ')).filter((x) => /\\d/.test(x)).join() === 'Jobs 2 need somebody,Admissions 1 need somebody'")
	p.click("Continue")
	p.await("location.pathname.endsWith('/jobs/" + held + "')")
	p.await("/Stage\\s+1 \\/ 2/.test(document.querySelector('main').innerText)")
	p.click("Open stage 2")
	p.await("[...document.querySelectorAll('nav.main li')].some((e) => /Jobs\\s+1\\b/.test(e.innerText))")

	made, err := n.CreateKey(t.Context(), api.NewKey{Name: "phone", Scopes: []string{"devices:read"}, Devices: api.Selection{Text: "device=" + first}})
	if err != nil {
		t.Fatal(err)
	}
	p = b.openAt(t, front.URL, made.Token, "/console/")
	p.expect(403) // the stream of events
	p.shows("Nothing needs attention.")
	for _, path := range []string{"jobs", "webhooks", "diagnosis", "explain", "stats", "nodes"} {
		if asked := p.sent("GET /v1/" + path); asked != 0 {
			t.Errorf("/v1/%s was asked %d times with a key that may not read it", path, asked)
		}
	}
}

// Of what the overview cannot ask it says so, and not that nothing is wrong.
func TestAttentionUnknown(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := programs.Start(t)
	front := before(t, n, func(w http.ResponseWriter, r *http.Request) bool {
		switch r.URL.Path {
		case "/v1/webhooks":
			return respond(t, w, http.StatusServiceUnavailable, map[string]any{"status": 503, "code": "unavailable", "detail": "the database cannot be reached"})
		case "/readyz":
			return respond(t, w, http.StatusServiceUnavailable, api.Readiness{Down: map[string]string{"nats": "no servers"}})
		}
		return false
	})
	p := b.openAt(t, front.URL, n.Token(t), "/console/")
	p.expect(503)
	p.shows("Not known now: Webhooks.")
	p.await(attention + ".some((x) => x.startsWith('✕ The node of this page is not ready: nats, no servers'))")
}

// A device that goes and comes back is one happening, and so is the same of many devices; the words have names in place of
// ids and codes.
func TestHappenings(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	name := "Kitchen lamp"
	if _, err := n.Patch(t.Context(), first, api.DeviceEdit{Name: &name}, 0); err != nil {
		t.Fatal(err)
	}
	front := before(t, n, func(w http.ResponseWriter, r *http.Request) bool {
		if r.URL.Path != "/v1/events" || r.URL.Query().Get("batch") != "" {
			return false
		}
		event := func(kind string, second int, data map[string]any) {
			data["time"] = fmt.Sprintf("2026-11-24T10:00:%02d.000Z", second)
			text, _ := json.Marshal(data)
			_, _ = fmt.Fprintf(w, "event: %s\ndata: %s\n\n", kind, text) // the browser is gone if this fails
		}
		for i := range 12 {
			event("offline", 1+i/6, map[string]any{"device": fmt.Sprintf("02:f1:ee:00:01:%02x", i), "reason": "dead"})
		}
		event("offline", 5, map[string]any{"device": first, "reason": "gone"})
		event("online", 45, map[string]any{"device": first, "transport": "mqtt"})
		event("catalog", 46, map[string]any{"device": first, "added": []string{"x"}})
		event("online", 47, map[string]any{"device": first, "transport": "mqtt"})
		event("offline", 47, map[string]any{"device": first, "reason": "superseded"})
		event("offline", 50, map[string]any{"device": "02:f1:ee:00:01:ff", "reason": "a_reason_of_later"})
		event("job.halted", 55, map[string]any{"job": "j1", "note": "dim at night", "reason": "key", "counts": map[string]int{"total": 3}})
		return true
	})
	p := b.openAt(t, front.URL, n.Token(t), "/console/")
	const rows = "[...document.querySelectorAll('.happened li')].map((e) => e.innerText.replace(/\\s+/g, ' ').replace(/^\\S+ /, ''))"
	want := []string{"✕ dim at night was halted: the key that created it has ended", "↓ 02:f1:ee:00:01:ff a reason of later why?", "↑ Kitchen lamp connected MQTT", "↑ Kitchen lamp came back after 40 s MQTT", "↓ 12 devices lost power or network"}
	p.await(fmt.Sprintf(rows+".slice(-5).join('|').trim() === %q", strings.Join(want, "|")))
}

// top is where an element begins, in pixels.
func (p *page) top(selector string) int {
	p.t.Helper()
	return p.number(fmt.Sprintf("Math.round(document.querySelector(%q).getBoundingClientRect().top)", selector))
}

// One search takes words and selections, and says how it read them; the counts follow. The table begins in the upper third,
// has ten devices in view, and no column that says the same in every row; columns sort by a click, and labels filter.
func TestSearch(t *testing.T) {
	t.Parallel()
	b := start(t)
	n := fleet(t, 12, "--profile", "fw-2.4")
	for i, edit := range []struct{ name, room string }{{"Counter lamp", "hall"}, {"Door lamp", "hall"}, {"Reading lamp", "attic"}, {"Speaker", "hall"}} {
		if _, err := n.Patch(t.Context(), fmt.Sprintf("02:f1:ee:00:00:%02x", i), api.DeviceEdit{Name: &edit.name, Labels: map[string]*string{"room": &edit.room}}, 0); err != nil {
			t.Fatal(err)
		}
	}
	p := b.open(t, n, n.Token(t), "/console/devices")
	p.emulate(1280, 800, "light")
	p.await("document.querySelector('[data-test=total]')?.innerText === '12 devices, 12 online'")
	p.await("document.querySelectorAll('tbody tr').length === 12")
	if top := p.top("table.devices"); top > 800/3 {
		t.Errorf("the table begins at %d", top)
	}
	if inView := p.number("[...document.querySelectorAll('tbody tr')].filter((e) => e.getBoundingClientRect().bottom <= innerHeight).length"); inView < 10 {
		t.Errorf("%d devices in view", inView)
	}
	if heights := p.eval("[...document.querySelectorAll('tbody tr')].map((e) => e.getBoundingClientRect().height).filter((h) => h < 36 || h > 52)").([]any); len(heights) > 0 {
		t.Errorf("rows with heights of %v", heights)
	}
	p.await("/^(for \\d+ (s|min))$/.test(document.querySelector('tbody tr small:not(.mono)').innerText)")
	if columns := p.eval("[...document.querySelectorAll('thead th')].slice(1).map((e) => e.innerText).join()"); columns != "Device,State,Labels" {
		t.Errorf("the columns are %v, although board, firmware, transport, node and tools are the same in all rows", columns)
	}

	read := func(text, reading string, devices int) {
		t.Helper()
		p.fill("input[type=search]", text+"\r")
		p.await(fmt.Sprintf("document.querySelector('[data-test=total]')?.innerText === %q && document.querySelectorAll('tbody tr').length === %d", reading, devices))
	}
	read("lamp room=hall", "2 of 12: lamp in id, name or board, and label room is hall", 2)
	p.counts("online", 2)
	p.counts("offline", 0)
	read("room in (hall, attic) !floor", "4 of 12: label room is hall or attic, and without label floor", 4)
	read(`"reading lamp" state=online firmware>=1.0`, "1 of 12: reading lamp in id, name or board, and state is online, and firmware from 1.0", 1)
	p.fill("input[type=search]", "lamp\r")
	p.await("location.search === '?q=lamp' && document.querySelectorAll('tbody tr').length === 3")
	p.click("room=attic")
	p.await("document.querySelector('[data-test=total]')?.innerText === '1 of 12: label room is attic'")

	p.visit("/console/devices?q=lamp")
	const names = "[...document.querySelectorAll('tbody .first a')].map((e) => e.innerText).join()"
	sort := func(column, order string) {
		t.Helper()
		p.await("!!document.querySelector('thead .sort')")
		p.run(fmt.Sprintf("[...document.querySelectorAll('thead .sort')].find((e) => e.innerText.startsWith(%q)).click()", column))
		p.await(names + fmt.Sprintf(" === %q", order))
	}
	sort("Labels", "Reading lamp,Counter lamp,Door lamp")
	sort("Device", "Counter lamp,Door lamp,Reading lamp")
	sort("Device", "Reading lamp,Door lamp,Counter lamp")
	p.await("document.querySelector('th[aria-sort]').ariaSort === 'descending'")
	if lists := p.eval("location.search"); lists != "?q=lamp&sort=-name" {
		t.Errorf("the address has %v", lists)
	}
}

// Check boxes lead to what can be done with devices: their labels, a job.
func TestChosenDevices(t *testing.T) {
	t.Parallel()
	b := start(t)
	n := fleet(t, 3)
	p := b.open(t, n, n.Token(t), "/console/devices")
	p.emulate(1280, 800, "light")
	box := func(device string) {
		t.Helper()
		find := fmt.Sprintf("document.querySelector('[data-device=%q] input')", device)
		p.await("!!" + find)
		p.eval(find + ".click()")
	}
	const second, third = "02:f1:ee:00:00:01", "02:f1:ee:00:00:02"
	p.await("document.querySelectorAll('tbody tr').length === 3")
	at := p.top("tbody tr")
	box(first)
	box(second)
	p.shows("2 chosen")
	if now := p.top("tbody tr"); now != at {
		t.Errorf("the rows moved from %d to %d under the pointer", at, now)
	}
	p.eval("[...document.querySelectorAll('main button')].find((e) => e.textContent === 'Edit labels').focus()")
	p.press("\r")
	p.fill("#edit-labels", "room")
	p.eval("[...document.querySelectorAll('dialog button')].find((e) => e.textContent === 'Save').click()")
	p.shows("is not of the form name=value")
	p.fill("#edit-labels", "room=hall")
	p.eval("[...document.querySelectorAll('dialog button')].find((e) => e.textContent === 'Save').click()")
	p.shows("2 devices changed.")
	p.await("document.activeElement.textContent === 'Edit labels'")
	for d, err := range apiclient.List[api.Device](t.Context(), n.Client, nil, "devices") {
		if want := map[string]string{first: "hall", second: "hall"}[d.ID]; err != nil || d.Labels["room"] != want {
			t.Errorf("%s has the labels %v, %v", d.ID, d.Labels, err)
		}
	}
	p.rowSays(second, "room=hall")
	box(second)
	box(third)
	p.click("Restart")
	p.await("document.querySelector('[data-test=chosen]')?.innerText.startsWith('2 devices that you chose.')")
	p.await("document.querySelector('input[name=kind]:checked').parentElement.innerText.trim() === 'Restart'")
	p.run("history.back()")
	box(first)
	box(third)
	p.click("New job")
	p.await("!!document.querySelector('[data-test=chosen]') && document.activeElement.tagName === 'H1'") // later, it would take the focus away
	p.fill("#tool", volume)
	p.fill("#field-0", "30")
	p.click("Show what it would do")
	p.click("Start on 2 devices")
	p.await("location.pathname.match(/jobs\\/[a-z0-9]+$/) && document.querySelector('.head').innerText.includes('done')")
	p.await("[...document.querySelectorAll('tbody td.first')].map((e) => e.innerText.trim()).sort().join() === '" + first + "," + third + "'")
}
