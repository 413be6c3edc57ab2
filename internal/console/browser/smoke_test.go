package browser

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"fleetd/internal/api"
	"fleetd/internal/fleettest"
)

const (
	first  = "02:f1:ee:00:00:00" // the first simulated device
	volume = "self.audio_speaker.set_volume"
)

// fleet runs a node with simulated devices, and waits until their tools are read.
func fleet(t *testing.T, devices int, args ...string) *fleettest.Node {
	t.Helper()
	n := programs.Start(t)
	programs.Simulate(t, n.Info.OTA, append([]string{"--devices", fmt.Sprint(devices), "--quiet"}, args...)...)
	n.AwaitReady(t, devices)
	return n
}

// What a device writes is shown letter by letter, on each page that shows it, and is never markup, a link or a name.
func TestHostileText(t *testing.T) {
	t.Parallel()
	b := start(t)
	n := fleet(t, 1, "--fault", "hostile-text")
	p := b.open(t, n, n.Token(t), "/console/")
	before := p.eval("Object.getOwnPropertyNames(Object.prototype).sort().join()")
	for path, text := range map[string]string{
		"":                                     "connected",
		"devices":                              "<img src=x onerror=window.hostile=1>",
		"devices/" + first:                     "<img src=x onerror=window.hostile=1>",
		"devices/" + first + "/tools":          "</script><script>window.hostile=1</script>",
		"devices/" + first + "/timeline":       "Connected",
		"devices/" + first + "/catalog":        "one version",
		"devices?board=%3Cimg+src%3Dx+onerror": "No device matches",
	} {
		p.visit("/console/" + path)
		p.shows(text)
		// security: N45
		if found := p.eval("window.hostile ?? document.querySelectorAll('main img, main script, main svg[onload], a[href^=javascript]').length"); found != 0.0 {
			t.Errorf("%q: %v", path, found)
		}
	}
	p.visit("/console/devices/" + first + "/tools")
	for _, shown := range []string{"‹U+202E›gnp.exe", "zero‹U+200B›width‹U+2060›joined", "{{7*7}} ${7*7}", "escape ␛[31m", "\U0001F468\u200D\U0001F469\u200D\U0001F467"} {
		p.shows(shown)
	}
	if p.eval("document.body.textContent.match(/[\\u202e\\u200b\\u2066]/)") != nil {
		t.Error("invisible characters are on the page")
	}

	// A form with names that objects inherit. The answer of the API shows what was sent.
	p.click("self.hostile.inherited")
	p.shows("Paste your admin key")
	if links := p.number("document.querySelectorAll('.quoted a').length"); links != 0 {
		t.Errorf("%d links in the words of a device", links)
	}
	p.eval("[...document.querySelectorAll('fieldset')].forEach((f) => f.querySelector('input').click())")
	p.fill("#field-1", "text")
	p.fill("#field-2", "3")
	p.fill("#field-3", "empty name")
	p.click("Call")
	p.await("!!document.querySelector('[data-test=result]')")
	if after := p.eval("Object.getOwnPropertyNames(Object.prototype).sort().join()"); after != before {
		t.Errorf("Object.prototype became %v", after)
	}
	p.visit("/console/devices/" + first + "/tools?tool=self.hostile.many")
	p.await("document.querySelectorAll('fieldset').length === 100")
	p.emulate(360, 640, "light")
	if width := p.number("document.documentElement.scrollWidth"); width > 360 {
		t.Errorf("hostile text makes the page %d wide", width)
	}
	markupIsBlocked(t, b.open(t, n, n.Token(t), "/console/devices"))
}

// markupIsBlocked checks that the policy holds in this page: what turns text into markup or code is refused.
func markupIsBlocked(t *testing.T, p *page) {
	p.shows(first)
	p.eval("(window.violations = [], document.addEventListener('securitypolicyviolation', (e) => window.violations.push(e.effectiveDirective)))")
	for name, script := range map[string]string{
		"markup":       "(() => { try { document.body.innerHTML = '<b>x</b>'; return 'done' } catch { return 'refused' } })()",
		"a policy":     "(() => { try { trustedTypes.createPolicy('x', {}); return 'done' } catch { return 'refused' } })()",
		"a script":     "(() => { try { const s = document.createElement('script'); s.textContent = 'window.hostile = 1'; document.body.append(s) } catch {} return window.hostile ? 'done' : 'refused' })()",
		"a style":      "(() => { const s = document.createElement('style'); s.textContent = 'body { color: rgb(1, 2, 3) }'; document.head.append(s); return getComputedStyle(document.body).color === 'rgb(1, 2, 3)' ? 'done' : 'refused' })()",
		"other hosts":  "fetch('http://127.0.0.2:1/').then(() => 'done', () => 'refused')",
		"data as page": "(() => { const f = document.createElement('iframe'); f.src = 'data:text/html,x'; document.body.append(f); return 'refused' })()",
	} {
		if got := p.eval(script); got != "refused" {
			t.Errorf("%s: %v", name, got)
		}
	}
	if n := p.number("window.violations.length"); n < 4 {
		t.Errorf("%d violations reported", n)
	}
	p.forgive()
}

// A key is asked for, kept in storage alone, and asked for again when it ends; what it does not cover is not there.
func TestKeys(t *testing.T) {
	t.Parallel()
	b := start(t)
	n := fleet(t, 3)
	_, err := n.Patch(t.Context(), first, api.DeviceEdit{Labels: map[string]*string{"room": new("lab")}}, 0)
	if err != nil {
		t.Fatal(err)
	}
	made, err := n.CreateKey(t.Context(), api.NewKey{Name: "phone", Scopes: []string{"devices:read", "tools:call", "events:read"}, Devices: api.Selection{Text: "room=lab"}, Tools: []string{volume}})
	if err != nil {
		t.Fatal(err)
	}
	token := made.Token

	p := b.open(t, n, "", "/console/devices?q=02%3Af1")
	p.expect(401, 403, 404)
	p.await("document.querySelector('dialog')?.open")
	p.fill("input[name=key]", "fld_wrong")
	p.do(chromedp.KeyEvent(kb.Enter))
	p.shows("does not accept this key. Copy it again, whole")
	p.fill("input[name=key]", token)
	p.do(chromedp.KeyEvent(kb.Enter))
	p.shows(first)
	if rows := p.number("document.querySelectorAll('tbody tr').length"); rows != 1 {
		t.Errorf("%d devices for a key that covers one", rows)
	}
	p.shows("1 of 1: 02:f1 in id, name or board")
	if nav := p.eval("document.querySelector('nav.main').innerText"); strings.Contains(nav.(string), "Audit") {
		t.Error("a page for admins is in the navigation")
	}
	for _, place := range []string{"location.href", "document.title", "document.documentElement.outerHTML", "JSON.stringify(history.state)", "JSON.stringify(localStorage)", "document.cookie"} {
		if p.eval(place+".includes("+fmt.Sprintf("%q", token)+")") == true {
			t.Errorf("the key is in %s", place)
		}
	}
	p.visit("/console/devices/" + first + "/tools")
	p.shows(volume)
	p.visit("/console/audit")
	p.shows("Not allowed")
	p.visit("/console/devices/02:f1:ee:00:00:01")
	p.shows("Not allowed")

	// Revoked while a page is open: the page requests a key, and is the same after another key.
	p.visit("/console/devices?q=02%3Af1")
	p.shows(first)
	p.live()
	if _, err := n.RevokeKey(t.Context(), made.ID); err != nil {
		t.Fatal(err)
	}
	p.await("document.querySelector('dialog')?.innerText.includes('make another one: fleetd keys create')")
	if p.eval("location.search") != "?q=02%3Af1" {
		t.Errorf("the address became %v", p.eval("location.href"))
	}
	p.fill("input[name=key]", n.Token(t))
	p.do(chromedp.KeyEvent(kb.Enter))
	p.shows("02:f1:ee:00:00:02")

	other := b.open(t, n, n.Token(t), "/console/devices")
	other.expect(401)
	other.shows(first)
	p.eval("document.querySelector('.who').open = true")
	p.click("Log out")
	for _, tab := range []*page{p, other} {
		tab.await("document.querySelector('dialog')?.open && !sessionStorage['fleetd.key'] && !localStorage['fleetd.key']")
	}
}

// A device is found, and a tool called from its form: types, faults at their fields, a photo, and a confirmation that acts once.
func TestCallFromAForm(t *testing.T) {
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	p := b.open(t, n, n.Token(t), "/console/")
	p.expect(422, 428)
	p.fill("input[type=search]", first[:14]+"\r")
	p.click(first)
	p.click("Tools")
	p.click(volume)
	p.click("Call")
	p.shows("Enter a whole number.")
	p.fill("#field-0", "400")
	p.click("Call")
	p.shows("must be at most 100, not 400")
	if p.eval("document.querySelector('#field-0').getAttribute('aria-invalid')") != "true" {
		t.Error("the fault is not at its field")
	}
	p.fill("#field-0", "40")
	p.do(chromedp.KeyEvent(kb.Enter))
	p.await("document.querySelector('[data-test=result]')?.innerText.includes('done')")
	if status, _, _ := n.Command(t, "call", first, "self.get_device_status"); !strings.Contains(status, `"volume":40`) {
		t.Errorf("the device has %s", status)
	}

	p.visit("/console/devices/" + first + "/tools?tool=self.camera.take_photo")
	p.fill("#field-0", "What is this?")
	p.click("Call")
	p.await("document.querySelector('img.picture')?.naturalWidth === 320 && document.querySelector('img.picture').src.startsWith('blob:')")

	_, err := n.SetPolicy(t.Context(), json.RawMessage(`{"rules":[{"name":"careful","tools":["`+volume+`"],"action":"confirm"}]}`), 0)
	if err != nil {
		t.Fatal(err)
	}
	p.visit("/console/devices/" + first + "/tools?tool=" + volume)
	p.fill("#field-0", "50")
	p.click("Call")
	p.await("document.querySelector('dialog')?.innerText.includes('careful')")
	p.do(chromedp.KeyEvent(kb.Escape))
	p.await("!document.querySelector('dialog')")
	p.click("Call")
	p.await("!!document.querySelector('dialog')")
	p.eval("[...document.querySelectorAll('dialog button')].find((b) => b.textContent === 'Confirm').dispatchEvent(new MouseEvent('click', { bubbles: true })) && document.querySelector('dialog button')?.click()")
	p.await("document.querySelector('[data-test=result]')?.innerText.includes('done')")
	if posts := p.sent("POST /v1/devices/" + first + "/tools/" + volume); posts != 3+2 {
		t.Errorf("%d requests: the first form sent two, then one was cancelled, and one repeated with the confirmation", posts)
	}
}

// The table follows the fleet without loading again, and rows keep their place and the focus.
func TestTableFollows(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 3)
	away := programs.Simulate(t, n.Info.OTA, "--devices", "1", "--mac-base", "02:f1:ee:00:00:10", "--quiet")
	n.AwaitReady(t, 4)
	p := b.open(t, n, n.Token(t), "/console/devices")
	p.shows("02:f1:ee:00:00:10")
	p.live()
	lists := p.sent("GET /v1/devices")
	const order = "[...document.querySelectorAll('tbody tr')].map((r) => r.dataset.device).join()"
	before := p.eval(order)
	p.eval("document.querySelector('[data-device=\"02:f1:ee:00:00:10\"] a').focus()")
	p.eval("getSelection().selectAllChildren(document.querySelector('[data-device=\"" + first + "\"] a'))")
	away.Report(t) // its end
	p.rowSays("02:f1:ee:00:00:10", "offline")
	p.counts("offline", 1)
	programs.Simulate(t, n.Info.OTA, "--devices", "1", "--mac-base", "02:f1:ee:00:00:10", "--quiet")
	p.rowSays("02:f1:ee:00:00:10", "online")
	p.counts("online", 4)
	if got := p.eval(order); got != before {
		t.Errorf("the rows became %v", got)
	}
	if got := p.eval("document.activeElement.textContent + ' ' + getSelection()"); got != "02:f1:ee:00:00:10 "+first {
		t.Errorf("focus and selection went to %v", got)
	}
	if again := p.sent("GET /v1/devices"); again != lists {
		t.Errorf("the list was loaded %d times more", again-lists)
	}
	if streams := p.sent("GET /v1/events"); streams != 1 {
		t.Errorf("%d streams", streams)
	}
}

// Why a device is offline is two steps from the overview, with the keyboard alone, on a phone.
func TestWhyOnAPhone(t *testing.T) {
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	const gone = "02:f1:ee:00:00:10"
	away := programs.Simulate(t, n.Info.OTA, "--devices", "1", "--mac-base", gone, "--transport", "mqtt", "--quiet")
	n.AwaitReady(t, 2)
	away.Report(t) // its end
	p := b.open(t, n, n.Token(t), "/console/")
	p.emulate(360, 640, "light")
	p.await("[...document.querySelectorAll('section.panel')].some((c) => c.innerText.startsWith('Why 1 device is offline') && c.innerText.includes('closed the connection'))")
	p.tab("closed the connection")
	p.press("\r")
	p.await("location.search.includes('reason=gone') && document.querySelectorAll('tbody tr').length === 1")
	p.tab(gone)
	p.press("\r")
	p.await("document.querySelector('[data-test=explain] code')?.textContent === 'gone'")
	if width := p.number("document.documentElement.scrollWidth"); width > 360 {
		t.Errorf("the page is %d wide", width)
	}
}

// paths are all pages, of a fleet with the first device.
var paths = []string{"", "devices", "devices/" + first, "devices/" + first + "/tools?tool=" + volume, "devices/" + first + "/timeline", "devices/" + first + "/trace", "devices/" + first + "/catalog",
	"devices/" + first + "/queue", "devices/" + first + "/access", "admissions", "jobs", "jobs/new", "firmware", "firmware/roll", "events", "webhooks", "audit", "access", "access/policy",
	"access/explain?key=admin&tool=" + volume + "&device=" + first + "&via=rest", "nodes", "doctor", "stats", "calls"}

// violations are the serious findings of axe on the page.
func (p *page) violations() []any {
	p.t.Helper()
	axe, err := os.ReadFile("testdata/axe.min.js")
	if err != nil {
		p.t.Fatal(err)
	}
	p.run(string(axe))
	return p.eval("axe.run({ resultTypes: ['violations'] }).then((r) => r.violations.filter((v) => ['serious', 'critical'].includes(v.impact)).map((v) => v.id + ': ' + v.nodes.slice(0, 3).map((n) => n.html.slice(0, 120)).join(' ')))").([]any)
}

// Every page fits a phone, has a title, and passes axe, in both schemes, of which make test has one.
func TestPagesForPeople(t *testing.T) {
	t.Parallel()
	b := start(t)
	n := fleet(t, 4, "--profile", "fw-2.4,robot,fw-2.1,fw-1.9")
	if _, err := n.CreateWebhook(t.Context(), api.NewWebhook{URL: "https://example.com/" + strings.Repeat("unbroken", 40), Types: []string{"photo"}}); err != nil { // nothing is delivered
		t.Fatal(err)
	}
	p := b.open(t, n, n.Token(t), "/console/")
	p.expect(404)
	schemes := []string{"light", "dark"}
	if testing.Short() {
		schemes = schemes[:1]
	}
	for _, scheme := range schemes {
		p.emulate(360, 640, scheme)
		for _, path := range paths {
			p.visit("/console/" + path)
			p.await("!document.querySelector('[role=status].notice')")
			if width := p.number("document.documentElement.scrollWidth"); width > 360 {
				t.Errorf("%s is %d wide in a window of 360", path, width)
			}
			small := p.eval("[...document.querySelectorAll('button, select, summary, .chip, .tabs a, nav.main a')].filter((e) => e.checkVisibility() && !e.closest('.u-wrap') && !e.classList.contains('link') && e.getBoundingClientRect().height < 43.5).map((e) => e.outerHTML.slice(0, 80))")
			if list, _ := small.([]any); len(list) > 0 {
				t.Errorf("%s has targets under 44 pixels: %v", path, list)
			}
			for _, violation := range p.violations() {
				t.Errorf("%s, %s: %s", path, scheme, violation)
			}
		}
	}
	p.forgive() // axe itself changes styles
}
