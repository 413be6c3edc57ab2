package browser

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"fleetd/internal/apiclient"
)

// Why a device is not well is two clicks from the table; a call that timed out has its cause and its steps.
func TestWhy(t *testing.T) {
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
	p.await("document.querySelector('[data-test=explain]')?.innerText.includes('mcp_silent')")
	p.shows("does not answer MCP")
	p.visit("/console/devices/" + first + "/timeline")
	p.shows("mcp.failed · unresponsive")

	_, err := n.Call(t.Context(), late, volume, apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":9}`), Timeout: time.Second})
	var problem *apiclient.Problem
	if !errors.As(err, &problem) || problem.Call() == "" {
		t.Fatalf("the call: %v", err)
	}
	n.Await(t, "the late answer", wait, func() bool {
		why, err := n.ExplainCall(t.Context(), problem.Call())
		return err == nil && why.Cause == "answered_late"
	})
	p.visit("/console/calls/" + problem.Call())
	p.await("document.querySelector('[data-test=explain]')?.innerText.includes('answered_late')")
	p.shows("holds the device")
	p.shows("answer after the caller had left")
}

// The link that fleetd console prints opens the console once, without a key in the address.
func TestLink(t *testing.T) {
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
