package browser

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

// hostile is text that must be shown letter by letter.
const hostile = `<img src=x onerror=window.hostile=1>`

// What people and devices wrote is text on all other pages, too: names, labels, notes, results, events, the audit
// log, and the dialog of a confirmation. A name without a break, of marks and of half characters stays in its place.
func TestHostileTextOfPeople(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 2, "--fault", "hostile-text:1")
	name := hostile
	if _, err := n.Patch(t.Context(), first, api.DeviceEdit{Name: &name}, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Call(t.Context(), first, hostile, apiclient.CallRequest{Arguments: json.RawMessage(`{"` + hostile + `":"x"}`)}); err != nil { // for the audit
		t.Fatal(err)
	}
	job, err := n.CreateJob(t.Context(), api.NewJob{JobSpec: api.JobSpec{Select: "device=" + first, Note: hostile, Action: api.JobAction{Call: &api.JobCall{Tool: volume, Arguments: json.RawMessage(`{"volume":1}`)}}}}, "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.SetPolicy(t.Context(), json.RawMessage(`{"rules":[{"name":"careful","tools":["`+volume+`"],"action":"confirm"}]}`), 0); err != nil {
		t.Fatal(err)
	}
	var broken strings.Builder // a name as only a server that was tampered with would send it
	broken.WriteString(strings.Repeat("unbroken", 1280) + `\u202e\ud800` + strings.Repeat(`\u0301`, 60) + `\u0000`)
	front := before(t, n, func(w http.ResponseWriter, r *http.Request) bool {
		switch {
		case r.URL.Path == "/v1/events" && r.URL.Query().Get("batch") == "":
			for _, kind := range []string{"notifications", "photo", "offline", hostile} {
				data, _ := json.Marshal(map[string]any{"device": first, "time": "2026-11-24T00:00:00Z", "method": hostile, "question": hostile, "reason": hostile, "params": map[string]string{hostile: hostile}})
				_, _ = fmt.Fprintf(w, "event: %s\ndata: %s\n\n", kind, data) // the browser is gone if this fails
			}
			return true
		case r.URL.Path == "/v1/webhooks":
			return respond(t, w, http.StatusOK, api.List[api.Webhook]{Items: []api.Webhook{{ID: "wh_1", URL: hostile, Types: []string{hostile}, Select: hostile, CreatedBy: hostile, State: hostile, LastError: hostile}}})
		case r.URL.Path == "/v1/devices/"+first+"/trace" && r.Method == http.MethodPost:
			return respond(t, w, http.StatusCreated, api.Trace{ID: "t", Device: first, Missing: []string{hostile}})
		case r.URL.Path == "/v1/devices/"+first+"/trace":
			for range 3000 {
				data, _ := json.Marshal(api.TraceEntry{Kind: "received", Type: hostile, Method: hostile, RPC: hostile, Text: hostile, Call: "c", Payload: hostile + strings.Repeat("unbroken", 128)})
				_, _ = fmt.Fprintf(w, "event: trace\ndata: %s\n\n", data) // the browser is gone if this fails
			}
			_, _ = io.WriteString(w, "event: end\ndata: {}\n\n")
			return true
		case r.URL.Path == "/v1/keys": // whose names fleetd restricts
			return respond(t, w, http.StatusOK, api.List[api.Key]{Items: []api.Key{{ID: "k1", Name: hostile, Scopes: []string{"admin"}, Tools: []string{hostile}, State: "valid"}}})
		case r.URL.Path == "/v1/devices" && r.URL.RawQuery == "sort=name&limit=100":
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, `{"items":[{"id":"`+first+`","name":"`+broken.String()+`","state":"online","board":"b","firmware":"f","transport":"mqtt","labels":{"room":"`+broken.String()+`"},"mcp":{"state":"ready","tools":1},"node":"n"}]}`)
			return true
		}
		return false
	})
	p := b.openAt(t, front.URL, n.Token(t), "/console/")
	p.expect(404, 428)
	for _, path := range []string{"", "devices", "devices/" + first, "devices/" + first + "/timeline", "events", "events?device=" + first, "jobs", "jobs/" + job.ID, "access", "audit", "webhooks", "devices/" + first + "/trace"} {
		p.visit("/console/" + path)
		if strings.HasSuffix(path, "trace") {
			p.click("Start a trace")
			p.shows("The trace has ended.")
			p.await("document.querySelectorAll('[data-test=trace] li').length === 250") // of 3000 lines
		}
		p.shows(hostile)
		// security: N45
		if found := p.eval("window.hostile ?? document.querySelectorAll('main img:not(.picture), main script, main svg[onload], a[href^=javascript]').length"); found != 0.0 {
			t.Errorf("%q: %v", path, found)
		}
	}
	p.visit("/console/devices/" + first)
	p.await(fmt.Sprintf("document.title.startsWith(%q)", hostile))
	p.visit("/console/devices/" + first + "/tools?tool=" + volume)
	p.fill("#field-0", "7")
	p.click("Call")
	p.await(fmt.Sprintf("document.querySelector('dialog')?.innerText.includes(%q)", hostile))
	p.click("Cancel")

	p.emulate(360, 640, "light")
	p.visit("/console/devices/" + first + "/trace")
	p.click("Start a trace")
	p.shows("unbroken")
	if width := p.number("document.documentElement.scrollWidth"); width > 360 {
		t.Errorf("a trace makes the page %d wide", width)
	}
	p.visit("/console/devices?sort=name")
	p.shows("unbroken")
	if text := p.eval("document.querySelector('tbody').textContent"); strings.ContainsAny(text.(string), "\u202e\x00") || len(text.(string)) > 1000 {
		t.Errorf("the row has %.2000q", text)
	}
	if width := p.number("document.documentElement.scrollWidth"); width > 360 {
		t.Errorf("a name makes the page %d wide", width)
	}
}

// The console is not shown in a page of another site, and only a picture is shown as one.
func TestTampering(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	if _, err := n.Call(t.Context(), first, "self.camera.take_photo", apiclient.CallRequest{Arguments: json.RawMessage(`{"question":"x"}`)}); err != nil {
		t.Fatal(err)
	}
	front := before(t, n, func(w http.ResponseWriter, r *http.Request) bool {
		switch {
		case strings.HasPrefix(r.URL.Path, "/v1/photos/"):
			w.Header().Set("Content-Type", "text/html")
			_, _ = io.WriteString(w, "<script>window.hostile=1</script>") // the browser is gone if this fails
		case r.URL.Path == "/frame":
			w.Header().Set("Content-Type", "text/html")
			_, _ = fmt.Fprintf(w, "<body><iframe src='%s/console/'></iframe>", n.Info.API)
		default:
			return false
		}
		return true
	})
	p := b.openAt(t, front.URL, n.Token(t), "/console/devices/"+first)
	p.shows("This is not a picture but text/html.")
	// security: N45
	if p.eval("window.hostile || document.querySelector('img.picture, iframe, object, embed')") != nil {
		t.Error("something else than a picture is shown")
	}
	frame := b.openAt(t, front.URL, "", "/frame")
	frame.await("!!document.querySelector('iframe')")
	n.Await(t, "the browser refuses the frame", wait, func() bool {
		frame.mu.Lock()
		defer frame.mu.Unlock()
		return strings.Contains(strings.Join(frame.faults, "\n"), "frame")
	})
	frame.forgive()
}
