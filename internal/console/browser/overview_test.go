package browser

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"fleetd/internal/api"
)

// attention is what the overview says that needs somebody, a line each.
const attention = "[...document.querySelectorAll('.wrong li')].map((e) => e.innerText.replace(/\\s+/g, ' '))"

// The overview begins with what is wrong, the worst first, each with one way out; the navigation counts what waits for a
// person. Without anything wrong it says so. It asks only what the key may read.
func TestAttention(t *testing.T) {
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
	p.click("Next stage")
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
