package browser

import (
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/cdproto/network"

	"fleetd/internal/fleettest"
)

// throttle changes the network of a page.
func (p *page) throttle(c network.Conditions) {
	p.t.Helper()
	command(p, network.EmulateNetworkConditionsByRule, network.EmulateNetworkConditionsByRuleParams{MatchedNetworkConditions: []*network.Conditions{&c}})
}

// rowSays waits until the row of a device contains a text.
func (p *page) rowSays(device, text string) {
	p.t.Helper()
	p.await(fmt.Sprintf("document.querySelector('[data-device=%q]')?.innerText.includes(%q)", device, text))
}

// On a slow network a page is there and shows that it loads; without one it keeps what it shows, and then goes on after
// the last event, or loads again if there was none, so that nothing is missing.
func TestSlowAndAbsentNetwork(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 2)
	away := programs.Simulate(t, n.Info.OTA, "--devices", "1", "--mac-base", "02:f1:ee:00:00:10", "--quiet")
	n.AwaitReady(t, 3)
	wire := fleettest.NewWire(t, 1, strings.TrimPrefix(n.Info.API, "http://"))
	p := b.openAt(t, "http://"+wire.Address(), n.Token(t), "/console/devices")
	p.throttle(network.Conditions{Latency: 400, DownloadThroughput: 50_000, UploadThroughput: 50_000})
	p.visit("/console/devices")
	p.await("document.body.innerText.includes('Loading') || document.querySelectorAll('tbody tr').length === 3")
	p.shows("02:f1:ee:00:00:10")
	p.live()

	p.throttle(network.Conditions{DownloadThroughput: -1, UploadThroughput: -1})
	wire.Break(0, fleettest.Cut)
	p.await("document.querySelector('.live').classList.contains('lost')")
	away.Report(t)
	if rows := p.number("document.querySelectorAll('tbody tr').length"); rows != 3 {
		t.Errorf("%d rows without a network", rows)
	}
	wire.Break(0, fleettest.None) // no event was there to resume after
	p.live()
	p.rowSays("02:f1:ee:00:00:10", "offline")

	back := programs.Simulate(t, n.Info.OTA, "--devices", "1", "--mac-base", "02:f1:ee:00:00:10", "--quiet")
	p.rowSays("02:f1:ee:00:00:10", "online")
	before := len(p.resumes())
	wire.Break(0, fleettest.Cut)
	p.await("document.querySelector('.live').classList.contains('lost')")
	back.Report(t)
	wire.Break(0, fleettest.None)
	p.live()
	p.rowSays("02:f1:ee:00:00:10", "offline")
	if resumes := p.resumes(); len(resumes) == before || resumes[len(resumes)-1] == "" {
		t.Errorf("the stream began after %q, not after the last event", resumes)
	}
	p.forgive() // the browser's own words about a network that is not there
}

func (p *page) resumes() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string(nil), p.resumed...)
}

// Without the database a page names that, keeps what it shows with its age, tries again ever more slowly, and recovers by
// itself. A node that was killed and is there again is found again by itself, too.
func TestPartsAway(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	c := programs.StartCluster(t, fleettest.ClusterOptions{Nodes: 2, Seed: 41})
	programs.Simulate(t, c.OTA, "--devices", "4", "--quiet")
	c.AwaitReady(t, 4, time.Minute)
	n := c.Nodes[0]
	p := b.open(t, n, n.Token(t), "/console/devices")
	p.expect(503)
	p.shows(first)
	p.live()
	c.BreakSQL(fleettest.Cut)
	p.visit("/console/audit")
	p.visit("/console/devices?sort=name")
	lists := p.sent("GET /v1/devices")
	p.shows("Not available.")
	p.shows("Trying again by itself.")
	begun := time.Now()
	p.await(fmt.Sprintf("performance.now() > %d", p.number("Math.round(performance.now())")+10_000))
	if tries := p.sent("GET /v1/devices") - lists; tries < 1 || float64(tries) > time.Since(begun).Seconds()/1.5+1 {
		t.Errorf("%d attempts in %v", tries, time.Since(begun))
	}
	c.BreakSQL(fleettest.None)
	p.shows(first)
	p.await("!document.querySelector('.problem')")

	n.Kill(t)
	p.await("document.querySelector('.live').classList.contains('lost')")
	p.shows(first)
	n.Run(t)
	p.live()
	p.visit("/console/devices")
	p.shows(first)
	p.forgive()
}

// A page whose browser has a wrong clock counts ages by the server's.
func TestWrongClock(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	p := b.open(t, n, n.Token(t), "/console/")
	for _, shift := range []time.Duration{-10 * time.Minute, 10 * time.Minute} {
		p.before(fmt.Sprintf("{ const real = Date.now.bind(Date); Date.now = () => real() + (%d); }", shift.Milliseconds()))
		p.visit("/console/devices/" + first)
		p.await("document.querySelectorAll('main time').length > 0 && [...document.querySelectorAll('main time')].every((e) => /^(now|\\d+ s ago|1 min( \\d+ s)? ago|\\d{4}-.*)$/.test(e.innerText))")
	}
}

// A page that was loaded from an older node offers to load the console again, and keeps what was entered until then.
func TestOtherVersion(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	var upgraded atomic.Bool
	hash := regexp.MustCompile("/console/static/[0-9a-f]+/")
	front := before(t, n, func(w http.ResponseWriter, r *http.Request) bool {
		if !upgraded.Load() || r.URL.Path != "/console/" {
			return false
		}
		answer, err := http.Get(n.Info.API + "/console/")
		if err != nil {
			t.Error(err)
			return false
		}
		defer func() { _ = answer.Body.Close() }() // read to its end
		body, err := io.ReadAll(answer.Body)
		if err != nil {
			t.Error(err)
		}
		_, _ = w.Write(hash.ReplaceAll(body, []byte("/console/static/0123456789abcdef/"))) // the browser is gone if this fails
		return true
	})
	p := b.openAt(t, front.URL, n.Token(t), "/console/devices/"+first+"/tools?tool="+volume)
	p.fill("#field-0", "33")
	p.live()
	upgraded.Store(true)
	front.CloseClientConnections()
	p.shows("another version of the console")
	if got := p.eval("document.querySelector('#field-0').value"); got != "33" {
		t.Errorf("the form has %v", got)
	}
	upgraded.Store(false)
	p.click("Load it")
	p.await("!document.body.innerText.includes('another version')")
	p.shows(volume)
	p.forgive() // connections that the test closed
}

// Every address opens its page, also after a reload and by going back; others lead to one.
func TestAddresses(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 2)
	p := b.open(t, n, n.Token(t), "/console/")
	p.expect(400, 404)
	p.visit("/console")
	if at := p.eval("location.pathname"); at != "/console/" {
		t.Errorf("/console leads to %v", at)
	}
	p.visit("/console/devices")
	p.shows(first)
	p.click(first)
	p.await("location.pathname.endsWith('" + first + "')")
	p.click("Tools")
	p.await("location.pathname.endsWith('/tools')")
	p.shows(volume)
	p.run("history.go(-2)")
	p.await("location.pathname === '/console/devices' && document.querySelectorAll('tbody tr').length === 2")
	p.run("history.go(2)")
	p.await("location.pathname.endsWith('/tools')")
	p.run("location.reload()")
	p.shows(volume)
	for path, text := range map[string]string{"nothing/here": "There is no page", "devices/02:00:00:00:00:99": "Not found.", "devices/%2e%2e%2f%2e%2e": "", "..%2f..%2fv1": "", "/evil.example": "There is no page"} {
		p.visit("/console/" + path)
		p.shows(text)
		if origin := p.eval("location.origin"); origin != n.Info.API {
			t.Errorf("%s leads to %v", path, origin)
		}
	}
}

// A person can read the pages in the dark, with colours of the system, without motion and on paper; without JavaScript
// the page names what is needed.
func TestAppearance(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	p := b.open(t, n, n.Token(t), "/console/devices/"+first)
	p.shows("Connected")
	ground := func() string {
		return fmt.Sprint(p.eval("getComputedStyle(document.documentElement).backgroundColor + getComputedStyle(document.body).backgroundColor"))
	}
	p.emulate(1280, 800, "light")
	light := ground()
	p.emulate(1280, 800, "dark")
	if dark := ground(); dark == light {
		t.Errorf("dark and light are both %s", dark)
	}
	p.media("prefers-reduced-motion", "reduce")
	if moving := p.number("[...document.querySelectorAll('*')].filter((e) => parseFloat(getComputedStyle(e).transitionDuration) > 0.01 || parseFloat(getComputedStyle(e).animationDuration) > 0.01).length"); moving != 0 {
		t.Errorf("%d elements move", moving)
	}
	p.media("forced-colors", "active")
	if hidden := p.eval("[...document.querySelectorAll('.state, .outcome')].filter((e) => !e.innerText.trim()).length"); hidden != 0.0 {
		t.Errorf("%v states are colours alone", hidden)
	}
	p.print()
	if shown := p.eval("[...document.querySelectorAll('nav.main, header.bar')].some((e) => getComputedStyle(e).display !== 'none')"); shown != false {
		t.Error("the navigation is printed")
	}
	if shown := p.eval("document.querySelector('main').checkVisibility()"); shown != true {
		t.Error("the facts are not printed")
	}
	response, err := http.Get(n.Info.API + "/console/")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }() // read to its end
	if page, err := io.ReadAll(response.Body); err != nil || !strings.Contains(string(page), "<noscript>") || strings.Count(string(page), "fleetd devices") != 2 {
		t.Errorf("without JavaScript: %s, %v", page, err)
	}
}

// What a page keeps while the database is away has its age, and it is tried again ever more slowly, at most every 30 s.
func TestRetriesGrow(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	var away atomic.Bool
	front := before(t, n, func(w http.ResponseWriter, r *http.Request) bool {
		return away.Load() && r.URL.Path == "/v1/devices/"+first && respond(t, w, http.StatusServiceUnavailable, map[string]any{"status": 503, "code": "unavailable", "detail": "the database cannot be reached", "part": "database"})
	})
	p := b.openAt(t, front.URL, n.Token(t), "/console/devices/"+first+"/catalog", `{
		window.delays = [];
		const real = window.setTimeout; // a minute takes 1 s; retries alone are of a random length
		window.setTimeout = (f, ms, ...rest) => real(f, ms >= 1500 && window.away ? (Number.isInteger(ms) || window.delays.push(ms), ms / 60) : ms, ...rest);
	}`)
	p.expect(503)
	p.shows("There is one version")
	p.live()
	away.Store(true)
	p.eval("(window.away = true, window.dispatchEvent(new Event('fleetd.key')))") // it is loaded again
	p.shows("Not available.")
	p.shows("part: database")
	p.await("/What is shown is from \\d\\d:\\d\\d:\\d\\d\\./.test(document.querySelector('main').innerText)")
	p.shows("There is one version")
	p.await("window.delays.filter((ms) => ms > 22000).length >= 3")
	delays := p.eval("window.delays").([]any)
	longest := 0.0
	for i, want := range []float64{2000, 4000, 8000, 16_000, 30_000, 30_000} {
		if got := delays[i].(float64); got < want*0.75-1 || got > want*1.25+1 {
			t.Errorf("retry %d after %v ms, want about %v: %v", i+1, got, want, delays)
		}
	}
	for _, delay := range delays {
		longest = max(longest, delay.(float64))
	}
	if longest > 37_501 {
		t.Errorf("a retry after %v ms", longest)
	}
	away.Store(false)
	p.await("!document.querySelector('.problem')")
}
