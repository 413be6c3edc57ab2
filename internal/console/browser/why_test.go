package browser

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/explain"
	"fleetd/internal/fleettest"
)

// Why a device is not well is two clicks from the table; a call that timed out has its cause and its steps.
func TestWhy(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := programs.Start(t)
	const late = "02:f1:ee:00:00:10"
	programs.Simulate(t, n.Info.OTA, "--devices", "1", "--fault", "silent", "--quiet")
	programs.Simulate(t, n.Info.OTA, "--devices", "1", "--mac-base", late, "--fault", "late-reply", "--late", "2s", "--quiet")
	n.AwaitReady(t, 1)
	p := b.open(t, n, n.Token(t), "/console/devices")
	p.expect(404)
	p.shows(first)
	p.click(first)
	p.await("document.querySelector('[data-test=explain]')?.textContent.includes('mcp_silent')")
	p.shows("does not answer MCP: initialize: no answer within 10 s.")
	if text := p.text(); strings.Contains(text, "context deadline") || strings.Contains(text, "This did not work") {
		t.Errorf("the page shows %s", text)
	}
	p.visit("/console/devices/" + first + "/timeline")
	p.shows("Tools could not be read: no answer, initialize: no answer within 10 s")

	_, err := n.Call(t.Context(), late, volume, apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":9}`), Timeout: time.Second})
	var problem *apiclient.Problem
	if !errors.As(err, &problem) || problem.Call == "" {
		t.Fatalf("the call: %v", err)
	}
	n.Await(t, "the late answer", wait, func() bool {
		why, err := n.ExplainCall(t.Context(), problem.Call)
		return err == nil && why.Cause == "answered_late"
	})
	p.visit("/console/calls/" + problem.Call)
	p.await("document.querySelector('[data-test=explain]')?.textContent.includes('answered_late')")
	p.shows("holds the device")
	p.shows("answer after the caller had left")
}

// made is how a device gets a cause: a fault of the simulator, or what TestCauses does. Of all causes the test checks that
// a page shows what the API answers.
var made = map[explain.Cause]string{
	"mcp_silent": "silent", "tools_missing": "cursor-loop", "flapping": "flap",
	"gone": "ended", "asleep": "ended-websocket", "revoked": "revoked", "waiting_approval": "waiting", "stranger_refused": "refused", "never_seen": "absent",
}

// Each cause of a device is shown two clicks from the table, and each of a call with the call.
func TestCauses(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := programs.Start(t, "--admission", "approve")
	ids := map[explain.Cause]string{}
	ended := map[explain.Cause]*fleettest.Simulation{}
	for cause, how := range made {
		id := fmt.Sprintf("02:f1:ee:00:02:%02x", len(ids))
		ids[cause] = id
		args := []string{"--devices", "1", "--quiet", "--mac-base", id, "--seed", fmt.Sprint(len(ids))}
		switch how {
		case "waiting", "refused", "absent":
			continue
		case "ended", "revoked":
			args = append(args, "--transport", "mqtt")
		case "ended-websocket":
			args = append(args, "--transport", "websocket")
		default:
			args = append(args, "--transport", "mqtt", "--time-scale", "0.05", "--fault", how)
		}
		ended[cause] = programs.Simulate(t, n.Info.OTA, args...)
		n.Await(t, "it waits", wait, func() bool { return n.Approve(t.Context(), id, "") == nil })
	}
	ask := func(cause explain.Cause, method, path string) {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), method, path, strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Device-Id", ids[cause])
		r.Header.Set("Client-Id", "client-"+ids[cause])
		r.Header.Set("Authorization", "Bearer wrong")
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		_ = answer.Body.Close() // the request is enough
	}
	ask("waiting_approval", http.MethodPost, n.Info.OTA)
	ask("stranger_refused", http.MethodGet, strings.TrimSuffix(n.Info.OTA, "ota/")+"v1/")
	for cause, simulation := range ended {
		if how := made[cause]; strings.HasPrefix(how, "ended") || how == "revoked" {
			n.Await(t, "it was connected", wait, func() bool { d, err := n.Device(t.Context(), ids[cause]); return err == nil && d.State == "online" })
			if how == "revoked" {
				if _, err := n.Revoke(t.Context(), ids[cause]); err != nil {
					t.Fatal(err)
				}
				continue
			}
			simulation.Report(t)
		}
	}

	p := b.open(t, n, n.Token(t), "/console/devices")
	p.expect(404)
	p.emulate(1280, 800, "light") // all pages are in the navigation
	for cause := range made {
		t.Logf("%s: %s", cause, made[cause])
		p.visit("/console/devices")
		switch made[cause] {
		case "refused":
			p.click("Admissions")
		case "absent": // nobody but a person knows of it
			p.visit("/console/devices?q=" + ids[cause])
		}
		p.click(ids[cause])
		p.await(fmt.Sprintf("document.querySelector('[data-test=explain] code')?.textContent === %q", cause))
	}

	// All causes, as the API would answer.
	info := make(chan explain.Info, 1)
	front := before(t, n, func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, "/explain") || strings.Contains(r.URL.Path, "policy") {
			return r.URL.Path == "/v1/calls/some" && respond(t, w, http.StatusOK, api.RecordedCall{Call: "some", Device: ids["gone"], Tool: volume, Key: "admin", Steps: []api.CallStep{}, Missing: []string{}})
		}
		i := <-info
		info <- i
		return respond(t, w, http.StatusOK, api.Why{Cause: string(i.Cause), Sentence: i.Meaning, Well: i.Cause == "well", Next: append([]string{}, i.Next...), Evidence: []api.Evidence{}, Reach: []api.Reach{}, Missing: []string{"node-lost"}})
	})
	p = b.openAt(t, front.URL, n.Token(t), "/console/devices")
	for i, c := range explain.Causes {
		if i > 0 {
			<-info
		}
		info <- c
		path := "/console/devices/" + ids["gone"]
		if c.About == explain.AboutCall {
			path = "/console/calls/some"
		}
		p.visit(path)
		p.await(fmt.Sprintf("document.querySelector('[data-test=explain] code')?.textContent === %q", c.Cause))
		texts := []string{c.Meaning, "node-lost"}
		for _, text := range c.Next {
			if !strings.HasPrefix(text, "fleetd ") && text != "Restart it." && !strings.HasPrefix(text, "Is /readyz") {
				texts = append(texts, text)
			}
		}
		for _, text := range texts {
			if p.eval(fmt.Sprintf("document.querySelector('[data-test=explain]').innerText.includes(%q)", text)) != true {
				t.Errorf("%s: %q is not shown", c.Cause, text)
			}
		}
		// What the console can do is a button or a link, and nothing is a command to copy.
		steps := fmt.Sprint(p.eval("[...document.querySelectorAll('[data-test=explain] .next li')].map((e) => e.innerText).join()"))
		commands := len(c.Next) + 2 - len(texts)
		if acts := p.number("document.querySelectorAll('[data-test=explain] .next :is(a, button)').length"); strings.Contains(","+steps, ",fleetd ") || acts < commands {
			t.Errorf("%s: %d of %d steps can be taken: %s", c.Cause, acts, commands, steps)
		}
	}
}

// The link that fleetd console prints opens the console once, without a key in the address.
func TestLink(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	out, errs, status := n.Command(t, "console", "--no-open")
	at := strings.Index(out, "http")
	if status != 0 || at < 0 {
		t.Fatalf("%d %s %s", status, out, errs)
	}
	link, err := url.Parse(strings.Fields(out[at:])[0])
	if err != nil || link.Fragment == "" {
		t.Fatalf("the link %q: %v", out, err)
	}
	p := b.openAt(t, "http://"+link.Host, "", link.Path+"#"+link.Fragment)
	p.await("document.querySelector('nav.main') && !document.querySelector('dialog')?.open")
	p.visit("/console/devices")
	p.shows(first)
	// security: K19
	for _, place := range []string{"location.href", "JSON.stringify(history.state)", "document.documentElement.outerHTML"} {
		if p.eval(place+".includes('"+strings.TrimPrefix(link.Fragment, "code=")+"')") == true {
			t.Errorf("the code is in %s", place)
		}
	}
	token := p.eval("sessionStorage['fleetd.key']").(string)
	p.expect(401)
	p.eval("document.querySelector('.who').open = true")
	p.click("Log out")
	n.Await(t, "the key has ended", wait, func() bool { return n.Status(t, token) == http.StatusUnauthorized })
	again := b.openAt(t, "http://"+link.Host, "", link.Path+"#"+link.Fragment)
	again.expect(401)
	again.await("document.querySelector('dialog')?.open")
}
