package browser

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"fleetd/internal/api"
)

// Without API keys there is no login. A page of another site reaches nothing, neither by requests nor by giving its own
// name this address.
func TestWithoutKeys(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := programs.Start(t, "--api-auth", "none")
	programs.Simulate(t, n.Info.OTA, "--devices", "1", "--quiet")
	n.AwaitReady(t, 1)
	p := b.open(t, n, "", "/console/devices")
	p.rowSays(first, "online")
	p.live()
	if p.eval("!!document.querySelector('dialog') || document.body.innerText.includes('Log out')") == true {
		t.Error("a login without keys")
	}
	address, err := url.Parse(n.Info.API)
	if err != nil {
		t.Fatal(err)
	}

	rebound := b.openAt(t, "http://rebound.test:"+address.Port(), "", "/console/devices")
	rebound.expect(403)
	rebound.shows("only to localhost or an IP address")
	rebound.forgive() // the answer, of which there was no warning
	if rebound.eval("!!document.querySelector('script')") == true {
		t.Error("the console runs under a foreign name")
	}
	rebound.do(chromedp.Navigate(rebound.origin + "/v1/devices"))
	// security: N4
	rebound.shows("only to localhost or an IP address")
	foreign := before(t, n, func(w http.ResponseWriter, r *http.Request) bool {
		w.Header().Set("Content-Type", "text/html")
		_, _ = w.Write([]byte("<title>another site</title>")) // the browser is gone if this fails
		return true
	})
	site := b.openAt(t, foreign.URL, "", "/")
	for path, method := range map[string]string{"/v1/devices": "GET", "/v1/devices/" + first + "/revoke": "POST"} {
		if got := site.eval(fmt.Sprintf("fetch(%q, { method: %q }).then((r) => 'read', () => 'refused')", n.Info.API+path, method)); got != "refused" {
			t.Errorf("%s %s of another site: %v", method, path, got)
		}
	}
	// A form needs no permission of the server to be sent: it must have no effect.
	site.run(fmt.Sprintf("const f = document.createElement('form'); f.method = 'post'; f.action = %q; document.documentElement.append(f); f.submit()", n.Info.API+"/v1/devices/"+first+"/revoke"))
	site.shows("came from another site")
	if d, err := n.Device(t.Context(), first); err != nil || d.State != "online" {
		t.Errorf("%+v, %v", d, err)
	}
	site.forgive()
}

// A key ends while a form is filled in: the page requests another one and keeps what was entered. The tools and devices
// that the new key does not cover are not offered, and refused in words by their address.
func TestKeyEndsInAForm(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 2)
	scopes := []string{"devices:read", "tools:call", "events:read"}
	ends := time.Now().Add(8 * time.Second)
	brief, err := n.CreateKey(t.Context(), api.NewKey{Name: "brief", Scopes: scopes, Expires: &ends})
	if err != nil {
		t.Fatal(err)
	}
	limited, err := n.CreateKey(t.Context(), api.NewKey{Name: "limited", Scopes: scopes, Devices: api.Selection{Text: "device=" + first}, Tools: []string{volume, "self.get_device_status"}})
	if err != nil {
		t.Fatal(err)
	}
	p := b.open(t, n, brief.Token, "/console/devices/"+first+"/tools?tool="+volume)
	p.expect(401, 403, 404)
	p.fill("#field-0", "42")
	p.await("document.querySelector('dialog')?.open")
	p.fill("input[name=key]", limited.Token)
	p.do(chromedp.KeyEvent(kb.Enter))
	p.await("!document.querySelector('dialog')")
	p.live()
	if got := p.eval("document.querySelector('#field-0').value + location.search"); got != "42?tool="+volume {
		t.Errorf("the form has %v", got)
	}
	p.click("Call")
	p.await("document.querySelector('[data-test=result]')?.innerText.includes('done')")

	p.await("document.querySelectorAll('.tools .list li').length === 2")
	p.visit("/console/devices/" + first + "/tools?tool=self.camera.take_photo")
	p.shows("does not cover this tool")
	if got := p.number(fmt.Sprintf("fetch('/v1/devices/%s/tools/self.camera.take_photo/call', { method: 'POST', headers: { Authorization: 'Bearer ' + sessionStorage['fleetd.key'] }, body: '{\"arguments\":{\"question\":\"\"}}' }).then((r) => r.status)", first)); got != 403 {
		t.Errorf("a tool that the key does not cover: %d", got)
	}
	p.visit("/console/devices")
	p.shows("1 device")
	for _, path := range []string{"jobs", "audit", "admissions", "access", "nodes", "doctor", "webhooks", "devices/02:f1:ee:00:00:01", "devices/02:f1:ee:00:00:01/tools", "devices/" + first + "/access"} {
		p.visit("/console/" + path)
		p.await("!!document.querySelector('.problem')")
		p.shows("Not allowed.")
	}
}

// A key is in web storage and in the header of requests alone: not in an address, a referrer, a message to another tab,
// an event, the document or the log of the node.
func TestKeyStaysInItsPlace(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	made, err := n.CreateKey(t.Context(), api.NewKey{Name: "kept", Scopes: []string{"admin"}})
	if err != nil {
		t.Fatal(err)
	}
	const recorded = `{
		window.passed = [];
		const send = BroadcastChannel.prototype.postMessage;
		BroadcastChannel.prototype.postMessage = function (m) { window.passed.push(this.name + JSON.stringify(m)); return send.call(this, m); };
	}`
	p := b.openAt(t, n.Info.API, made.Token, "/console/", recorded)
	other := b.openAt(t, n.Info.API, made.Token, "/console/events", recorded)
	for _, path := range []string{"devices/" + first, "access", "audit", "events"} {
		p.visit("/console/" + path)
		p.live()
	}
	other.live()
	programs.Simulate(t, n.Info.OTA, "--devices", "1", "--mac-base", "02:f1:ee:00:00:10", "--quiet")
	for _, tab := range []*page{p, other} {
		tab.shows("02:f1:ee:00:00:10")
		if tab.number("window.passed.length") == 0 {
			t.Error("no messages between tabs were recorded")
		}
		for _, place := range []string{"location.href", "document.title", "document.referrer", "document.documentElement.outerHTML", "JSON.stringify(history.state)", "JSON.stringify(localStorage)", "document.cookie", "window.passed.join()",
			"JSON.stringify(performance.getEntries())", "caches.keys().then((k) => k.join())"} {
			if tab.eval("Promise.resolve("+place+").then((x) => String(x).includes("+fmt.Sprintf("%q", made.Token)+"))") != false {
				t.Errorf("the key is in %s", place)
			}
		}
		tab.mu.Lock()
		if all := strings.Join(tab.requests, "\n") + strings.Join(tab.referrers, "\n"); strings.Contains(all, made.Token) || len(tab.referrers) > 0 {
			t.Errorf("requests have the key, or referrers: %q", tab.referrers)
		}
		tab.mu.Unlock()
	}
	if strings.Contains(n.Log.String(), made.Token) {
		t.Error("the key is in the log")
	}
}
