package browser

import (
	"fmt"
	"io"
	"net/http"
	"net/url"
	"testing"

	"github.com/chromedp/chromedp"
)

// hideable lets a test hide a tab, with hide(true), whose minute in the background takes a moment.
const hideable = `{
	const real = window.setTimeout;
	window.setTimeout = (f, ms, ...rest) => real(f, ms === 60000 ? 100 : ms, ...rest);
	let hidden = false;
	Object.defineProperty(document, 'hidden', { get: () => hidden });
	window.hide = (is) => { hidden = is; document.dispatchEvent(new Event('visibilitychange')); };
}`

// counts waits until the chip of a state shows a number of devices.
func (p *page) counts(state string, devices int) {
	p.t.Helper()
	p.await(fmt.Sprintf("[...document.querySelectorAll('.chip')].some((c) => c.innerText.replaceAll(',', '').replace(/\\s+/g, ' ') === '%s %d')", state, devices))
}

// All tabs of a browser share one stream, also where there are no Web Locks, and more of them than a browser has
// connections to a host. When the tab that reads it is closed or in the background for a minute, another one goes on.
func TestTabsShareAStream(t *testing.T) {
	long(t)
	t.Parallel()
	for _, place := range []string{"127.0.0.1", elsewhere} {
		t.Run(place, func(t *testing.T) {
			t.Parallel()
			n := fleet(t, 2)
			address, err := url.Parse(n.Info.API)
			if err != nil {
				t.Fatal(err)
			}
			b := start(t)
			pages := make([]*page, 8)
			for i := range pages {
				pages[i] = b.openAt(t, "http://"+place+":"+address.Port(), n.Token(t), "/console/devices", hideable)
				pages[i].rowSays(first, "online")
				pages[i].live()
			}
			if locks := pages[0].eval("isSecureContext && !!navigator.locks"); locks != (place == "127.0.0.1") {
				t.Fatalf("Web Locks: %v", locks)
			}
			online, offline := 2, 0
			// followed checks that tabs follow the fleet: a device comes and goes.
			followed := func(tabs []*page, streams int) {
				t.Helper()
				visitor := programs.Simulate(t, n.Info.OTA, "--devices", "1", "--quiet", "--mac-base", fmt.Sprintf("02:f1:ee:00:01:%02x", offline))
				for _, p := range tabs {
					p.counts("online", online+1)
				}
				visitor.Report(t)
				offline++
				for _, p := range tabs {
					p.counts("offline", offline)
				}
				total := func() (sum int) {
					for _, p := range pages {
						sum += p.sent("GET /v1/events")
					}
					return sum
				}
				tabs[0].awaitThat("the streams are noted", func() bool { return total() >= streams }) // what a tab sends is noted a moment later
				if total() != streams {
					t.Fatalf("%d streams, want %d", total(), streams)
				}
			}
			followed(pages, 1)
			pages[0].do(chromedp.Navigate("about:blank")) // it was the first, so it leads
			followed(pages[1:], 2)

			var leads *page
			var others []*page
			for _, p := range pages[1:] {
				if p.sent("GET /v1/events") > 0 {
					leads = p
				} else {
					others = append(others, p)
				}
			}
			leads.eval("hide(true)")
			leads.await("document.querySelector('.live').classList.contains('off')")
			followed(others, 3)
			leads.eval("hide(false)")
			leads.live()
			leads.counts("offline", offline)
			followed(pages[1:], 3)
		})
	}
}

// The page of events has a bounded number of rows and of bytes, however many events come. While it is paused its rows
// stay, also when events went missing meanwhile, and what came since is shown afterwards.
func TestEventsAreBounded(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := programs.Start(t)
	programs.Simulate(t, n.Info.OTA, "--devices", "40", "--notify", "100ms", "--quiet")
	n.AwaitReady(t, 40)
	gap := make(chan struct{})
	front := before(t, n, func(w http.ResponseWriter, r *http.Request) bool {
		if r.URL.Path != "/v1/events" || r.URL.Query().Get("batch") == "" {
			return false
		}
		select {
		case <-gap:
			_, _ = io.WriteString(w, "event: gap\ndata: {}\n\n") // the browser is gone if this fails
			return true
		default:
			return false
		}
	})
	p := b.openAt(t, front.URL, n.Token(t), "/console/events")
	p.live()
	// grown waits until n more events were received, and returns the heap.
	seen := func() float64 { return n.Metric(t, "fleetd_notifications_total") }
	grown := func(more float64) int {
		t.Helper()
		from := seen()
		n.Await(t, "events", wait, func() bool { return seen() >= from+more })
		return p.heap()
	}
	low := grown(2000) // as many as the page keeps, twice
	high := grown(4000)
	if high > low+4<<20 {
		t.Errorf("the heap grew from %d to %d bytes", low, high)
	}
	const rows = "[...document.querySelectorAll('main ol.log li')].map((e) => e.innerText).join()"
	if got := p.number("document.querySelectorAll('main ol.log li').length"); got == 0 || got > 1000 {
		t.Errorf("%d rows", got)
	}
	if nodes := p.number("document.querySelectorAll('*').length"); nodes > maxNodes {
		t.Errorf("%d elements", nodes)
	}

	p.click("Pause")
	p.await("document.querySelector('main form').innerText.includes('Resume')")
	kept := p.eval(rows)
	p.await("/Resume \\(1,000 new\\)/.test(document.querySelector('main form').innerText)") // no more are kept
	if got := p.eval(rows); got != kept {
		t.Error("the rows of a paused page changed")
	}
	histories, streams := p.sent("GET /v1/events?since"), p.sent("GET /v1/events?batch")
	close(gap)
	front.CloseClientConnections()
	n.Await(t, "gaps", wait, func() bool { return p.sent("GET /v1/events?batch") > streams+3 }) // more than 2 s after the first one
	if got := p.eval(rows); got != kept {
		t.Error("the rows of a paused page were loaded again")
	}
	p.eval("[...document.querySelectorAll('main form button')].find((b) => b.innerText.startsWith('Resume')).click()")
	p.await(rows + " !== " + fmt.Sprintf("%q", kept))
	p.await("!document.querySelector('main form').innerText.includes('Resume')")
	n.Await(t, "what was missed is loaded", wait, func() bool { return p.sent("GET /v1/events?since") > histories })
	p.forgive() // connections that the test closed

	// What the page read and what came by the stream meanwhile is shown once.
	p = b.openAt(t, n.Info.API, n.Token(t), "/console/events", `window.twice = 0; new MutationObserver(() => {
		const all = [...document.querySelectorAll('main ol.log li')].map((e) => e.innerText);
		window.most = Math.max(window.most ?? 0, all.length);
		if (new Set(all).size !== all.length) window.twice++;
	}).observe(document, { childList: true, subtree: true })`)
	p.live()
	p.await("window.most > 50")
	grown(400)
	if got := p.eval("window.twice"); got != 0.0 {
		t.Errorf("%v times an event was shown twice", got)
	}
}

// What a paused page held back is of the filter it came for: after another one was chosen it is not shown.
func TestPausedPageTakesAnotherFilter(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := programs.Start(t)
	programs.Simulate(t, n.Info.OTA, "--devices", "2", "--notify", "100ms", "--quiet")
	n.AwaitReady(t, 2)
	p := b.open(t, n, n.Token(t), "/console/events")
	p.await("document.querySelectorAll('main ol.log li').length > 0")
	p.click("Pause")
	p.await("/Resume \\([1-9]/.test(document.querySelector('main form').innerText)")
	p.run("const type = document.querySelector('main form select'); type.value = 'photo'; type.dispatchEvent(new Event('change', { bubbles: true }))")
	p.shows("No events in the last 15 minutes.")
	p.run("[...document.querySelectorAll('main form button')].find((b) => b.innerText.startsWith('Resume')).click()")
	p.await("document.querySelector('main form').innerText.includes('Pause')")
	if rows := p.number("document.querySelectorAll('main ol.log li').length"); rows != 0 {
		t.Errorf("%d rows of a fleet without photos", rows)
	}
}

// The counts beside a filter are right at last, although the API reuses those of a selection for some seconds.
func TestCountsOfAFilter(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 2)
	p := b.open(t, n, n.Token(t), "/console/devices?board=lichuang-dev")
	p.live()
	p.counts("online", 2)
	visitor := programs.Simulate(t, n.Info.OTA, "--devices", "1", "--mac-base", "02:f1:ee:00:00:10", "--quiet")
	p.counts("online", 3)
	visitor.Report(t)
	p.counts("offline", 1)
}

// The last events of the overview are notable ones: notifications of devices do not take their place.
func TestLastEvents(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 1, "--notify", "200ms")
	p := b.open(t, n, n.Token(t), "/console/events?type=notifications")
	p.await("document.querySelectorAll('.log li').length > 20")
	p.visit("/console/")
	const rows = "[...document.querySelectorAll('.log li')].map((e) => e.innerText)"
	p.await(rows + ".some((r) => r.includes('connected'))")
	if p.eval(rows+".some((r) => r.includes('notification'))") == true {
		t.Errorf("the last events are %v", p.eval(rows))
	}
}
