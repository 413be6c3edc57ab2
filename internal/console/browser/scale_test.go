package browser

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"
)

// long leaves a test to make verify.
func long(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("IN VERIFY: this test takes longer than make test may")
	}
}

// maxNodes is how many elements a page of the table may have, whatever the size of the fleet.
const maxNodes = 3000

// A large fleet is paged and counted by the server: the page has a bounded number of elements and makes few requests,
// and a storm of reconnects neither lets it grow nor loads it again for each event.
func TestLargeFleet(t *testing.T) {
	long(t)
	const devices = 2000
	b := start(t)
	n := programs.Start(t)
	storm := programs.Simulate(t, n.Info.OTA, "--devices", fmt.Sprint(devices), "--ramp", "400/s", "--quiet")
	n.AwaitReady(t, devices)
	p := b.open(t, n, n.Token(t), "/console/devices")
	p.shows("2,000 devices")
	p.await("document.querySelectorAll('tbody tr').length === 100")
	if nodes := p.number("document.querySelectorAll('*').length"); nodes > maxNodes {
		t.Errorf("%d elements", nodes)
	}
	p.live()
	requests := p.sent("GET /v1/")
	heap := func() int {
		p.run("window.gc && window.gc()")
		return p.number("performance.memory.usedJSHeapSize")
	}
	before := heap()
	storm.Report(t)
	programs.Simulate(t, n.Info.OTA, "--devices", fmt.Sprint(devices), "--ramp", "400/s", "--quiet")
	n.AwaitReady(t, devices)
	p.await(fmt.Sprintf("[...document.querySelectorAll('.chip')].some((c) => c.innerText.replace(/[\\s,]+/g, '') === 'online%d')", devices))
	if nodes := p.number("document.querySelectorAll('*').length"); nodes > maxNodes {
		t.Errorf("%d elements after a storm", nodes)
	}
	// 4,000 events: the counts and the page are read again at most once in 2 s, and the stream goes on.
	if more := p.sent("GET /v1/") - requests; more > 60 {
		t.Errorf("%d requests during a storm", more)
	}
	if after := heap(); after > before+20<<20 {
		t.Errorf("the heap grew from %d to %d bytes", before, after)
	}

	p.visit("/console/devices?q=" + "02%3Af1%3Aee%3A00%3A07")
	p.await("document.querySelectorAll('tbody tr').length === 100")
	p.click("Next page")
	p.await("document.querySelectorAll('tbody tr').length === 100 && location.search.includes('cursor=')")
	p.do(chromedp.NavigateBack())
	p.await("document.querySelectorAll('tbody tr').length === 100 && !location.search.includes('cursor=')")
}

// All tabs of a browser share one stream; when the one that reads it closes, another goes on.
func TestTabsShareAStream(t *testing.T) {
	long(t)
	b := start(t)
	n := fleet(t, 2)
	const tabs = 6
	pages := make([]*page, tabs)
	for i := range pages {
		pages[i] = b.open(t, n, n.Token(t), "/console/devices")
		pages[i].shows(first)
	}
	streams := func() (total int) {
		for _, p := range pages {
			total += p.sent("GET /v1/events")
		}
		return total
	}
	for _, p := range pages {
		p.live()
	}
	if got := streams(); got != 1 {
		t.Fatalf("%d streams for %d tabs", got, tabs)
	}
	pages[0].do(chromedp.Navigate("about:blank")) // it was the first, so it leads
	away := programs.Simulate(t, n.Info.OTA, "--devices", "1", "--mac-base", "02:f1:ee:00:00:10", "--quiet")
	n.AwaitReady(t, 3)
	for _, p := range pages[1:] {
		p.await("document.querySelector('.changed') !== null || document.body.innerText.includes('02:f1:ee:00:00:10') || [...document.querySelectorAll('.faint')].some((e) => e.innerText === '3 devices')")
	}
	away.Report(t)
	if got := streams(); got != 2 {
		t.Errorf("%d streams after the first tab closed", got)
	}
}

// A person works with the keyboard alone: find a device, open it, call a tool, read the result.
func TestKeyboard(t *testing.T) {
	long(t)
	b := start(t)
	n := fleet(t, 2)
	p := b.open(t, n, n.Token(t), "/console/")
	p.await("document.title.startsWith('Overview')") // which is set as the page begins to listen to keys
	press := func(keys string) { p.do(chromedp.KeyEvent(keys)) }
	// tab goes on until the focus is on something with this text.
	tab := func(text string) {
		t.Helper()
		for range 80 {
			if strings.Contains(fmt.Sprint(p.eval("!document.activeElement.matches('a, button, input, select, summary') ? '' : (document.activeElement.innerText ?? '') + (document.activeElement.labels?.[0]?.innerText ?? '')")), text) {
				if p.eval("getComputedStyle(document.activeElement).outlineStyle") == "none" {
					t.Errorf("the focus on %q is not visible", text)
				}
				return
			}
			press("\t")
		}
		t.Fatalf("the keyboard does not reach %q", text)
	}
	press("/")
	p.await("document.activeElement.type === 'search'")
	p.fill("input[type=search]", "02:f1\r")
	p.await("location.search === '?q=02%3Af1' && document.querySelectorAll('tbody tr').length === 2")
	tab(first)
	press("\r")
	p.await("location.pathname.endsWith('" + first + "') && document.activeElement.tagName === 'H1'")
	tab("Tools")
	press("\r")
	p.shows(volume)
	tab(volume)
	press("\r")
	p.await("!!document.querySelector('#field-0')")
	tab("0 to 100")
	press("55\r")
	p.await("document.querySelector('[data-test=result]')?.innerText.includes('done')")
}

// A job is tried, started and followed, and its tasks link to their devices.
func TestJob(t *testing.T) {
	long(t)
	b := start(t)
	n := fleet(t, 5)
	p := b.open(t, n, n.Token(t), "/console/jobs/new?select=board%3Dlichuang-dev")
	p.fill("#tool", volume)
	p.await("!!document.querySelector('#field-0')")
	p.fill("#field-0", "30")
	p.click("Show what it would do")
	p.shows("5 devices, of which 5 connected now")
	p.fill("#field-0", "35") // what was shown is no longer what would be sent
	p.await("!document.querySelector('[data-test=plan]')")
	p.click("Show what it would do")
	p.click("Start on 5 devices")
	p.await("location.pathname.match(/jobs\\/[a-z0-9]+$/) && document.querySelector('.head').innerText.includes('done')")
	p.await("document.querySelectorAll('tbody tr').length === 5")
	p.shows("5 of 5")
	if status, _, _ := n.Command(t, "call", first, "self.get_device_status"); !strings.Contains(status, `"volume":35`) {
		t.Errorf("the device has %s", status)
	}
}

// The picture of the README: the overview with 1,000 devices, in both schemes. With FLEETD_TEST_UPDATE it is taken anew.
func TestPicture(t *testing.T) {
	long(t)
	b := start(t)
	n := programs.Start(t)
	programs.Simulate(t, n.Info.OTA, "--devices", "880", "--profile", "fw-2.4,robot,fw-2.1,fw-1.9", "--ramp", "200/s", "--notify", "60s", "--quiet")
	gone := programs.Simulate(t, n.Info.OTA, "--devices", "120", "--profile", "fw-2.4,fw-2.1", "--mac-base", "02:f1:ee:00:10:00", "--quiet")
	n.AwaitReady(t, 1000)
	gone.Report(t)
	p := b.open(t, n, n.Token(t), "/console/")
	for _, scheme := range []string{"light", "dark"} {
		p.emulate(1280, 800, scheme)
		p.visit("/console/devices")
		p.shows("1,000 devices")
		p.await("[...document.querySelectorAll('.chip')].some((c) => c.innerText.replace(/\\s+/g, ' ') === 'offline 120')")
		p.await("document.querySelectorAll('tbody tr').length === 100 && document.querySelector('.live').classList.contains('live')")
		picture, err := chromedp.Run(p.ctx, chromedp.CaptureScreenshot())
		if err != nil {
			t.Fatal(err)
		}
		name := filepath.Join("..", "..", "..", "docs", "console-"+scheme+".png")
		if os.Getenv("FLEETD_TEST_UPDATE") != "" {
			err = os.WriteFile(name, picture, 0o644)
		} else {
			_, err = os.Stat(name)
		}
		if err != nil {
			t.Error(err)
		}
	}
}
