package browser

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"fleetd/internal/api"
	"fleetd/internal/fleettest"
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

// A large fleet is paged and counted by the server: a page has a bounded number of elements and makes few requests, for the
// fiftieth page as for the first. Storms of reconnects neither let it grow nor load it again for each event, screen readers
// read none of them out, and at the end the counts are right.
func TestLargeFleet(t *testing.T) {
	long(t)
	const devices, storms = 10_000, 2 // the second shows what the first has left
	b := start(t)
	n := programs.Start(t)
	connect := func() *fleettest.Simulation {
		t.Helper()
		s := programs.Simulate(t, n.Info.OTA, "--devices", fmt.Sprint(devices), "--ramp", "1000/s", "--transport", "mqtt", "--quiet")
		n.Await(t, "the fleet is ready", 3*time.Minute, func() bool { return n.Metric(t, "fleetd_devices", `mcp_state="ready"`) == devices })
		return s
	}
	running := connect()
	const quiet = `window.spoken = 0; new MutationObserver((list) => { for (const m of list) if ((m.target.parentElement ?? m.target).closest?.('[role=status], [aria-live]')) window.spoken++; }).observe(document, { childList: true, characterData: true, subtree: true });`
	p := b.openAt(t, n.Info.API, n.Token(t), "/console/devices", quiet)
	p.shows("10,000 devices")
	p.await("document.querySelectorAll('tbody tr').length === 100")
	p.live()
	events := b.open(t, n, n.Token(t), "/console/events")
	events.live()
	bounded := func() {
		t.Helper()
		for _, page := range []*page{p, events} {
			if nodes := page.number("document.querySelectorAll('*').length"); nodes > maxNodes {
				t.Errorf("%d elements", nodes)
			}
		}
	}
	bounded()
	if heap := p.heap(); heap > 50<<20 {
		t.Errorf("the table takes %d bytes", heap)
	}
	var heaps [2][storms]int
	for storm := range storms {
		requests := p.sent("GET /v1/") + events.sent("GET /v1/")
		p.eval("window.spoken = 0")
		begun := time.Now()
		running.Report(t)
		p.counts("offline", devices)
		running = connect()
		p.counts("online", devices)
		p.await("document.querySelectorAll('tbody tr .state.online').length === 100")
		bounded()
		// 20,000 events: each list and the counts are read again at most once in 2 s.
		if more := p.sent("GET /v1/") + events.sent("GET /v1/") - requests; more > 10+int(time.Since(begun)/time.Second)*2 {
			t.Errorf("%d requests in %v", more, time.Since(begun))
		}
		if spoken := p.number("window.spoken"); spoken > 0 {
			t.Errorf("%d changes were read out", spoken)
		}
		heaps[0][storm], heaps[1][storm] = p.heap(), events.heap()
	}
	events.await("!!document.querySelector('[data-test=omitted]')")
	for _, h := range heaps {
		if h[storms-1] > h[0]+4<<20 {
			t.Errorf("the heap was %v bytes after each storm", h)
		}
	}

	lists := p.sent("GET /v1/devices")
	p.visit("/console/devices?q=" + "02%3Af1%3Aee%3A00")
	for number := 1; ; number++ {
		p.await(fmt.Sprintf("document.querySelector('tbody tr')?.dataset.device === '02:f1:ee:00:%02x:%02x'", (number-1)*100/256, (number-1)*100%256))
		if number == 50 {
			break
		}
		p.click("Next page")
	}
	bounded()
	if more := p.sent("GET /v1/devices") - lists; more != 50 {
		t.Errorf("%d requests for 50 pages", more)
	}
	p.do(chromedp.NavigateBack())
	p.await(fmt.Sprintf("document.querySelector('tbody tr')?.dataset.device === '02:f1:ee:00:%02x:%02x'", 4800/256, 4800%256))
}

// A person works with the keyboard alone: find a device, open it, call a tool, read the result.
func TestKeyboard(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 2)
	p := b.open(t, n, n.Token(t), "/console/")
	p.await("document.title.startsWith('Overview')") // which is set as the page begins to listen to keys
	p.press("/")
	p.await("document.activeElement.type === 'search'")
	p.fill("input[type=search]", "02:f1\r")
	p.await("location.search === '?q=02%3Af1' && document.querySelectorAll('tbody tr').length === 2")
	p.tab(first)
	p.press("\r")
	p.await("location.pathname.endsWith('" + first + "') && document.activeElement.tagName === 'H1'")
	p.tab("Tools")
	p.press("\r")
	p.shows(volume)
	p.tab(volume)
	p.press("\r")
	p.await("!!document.querySelector('#field-0')")
	p.tab("0 to 100")
	p.press("55\r")
	p.await("document.querySelector('[data-test=result]')?.innerText.includes('done')")
}

// A job is tried, started and followed, and its tasks link to their devices.
func TestJob(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 5)
	name := "Kitchen speaker"
	if _, err := n.Patch(t.Context(), first, api.DeviceEdit{Name: &name}, 0); err != nil {
		t.Fatal(err)
	}
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
	p.await("[...document.querySelectorAll('tbody td.first')].map((e) => e.innerText).join().startsWith('Kitchen speaker,02:f1:ee:00:00:01,')")
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
		p.await("document.querySelectorAll('tbody tr').length === 100 && document.querySelector('.bar .live').className === 'live live'")
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
