package browser

import (
	"bytes"
	"encoding/json"
	"fmt"
	"image/color"
	"image/png"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

// inView reports whether the middle of what a script finds can be pressed: it is in the window, and nothing is on it.
func (p *page) inView(find string) bool {
	p.t.Helper()
	return p.eval("((e) => { if (!e) return false; const r = e.getBoundingClientRect(); return e.contains(document.elementFromPoint(r.left + r.width / 2, r.top + r.height / 2)); })("+find+")") == true
}

const button = "[...document.querySelectorAll('button')].find((b) => b.checkVisibility() && b.textContent === %q)"

// What a person does on a phone: log out, go to the further pages, see the result of a call, search and follow labels.
func TestPhone(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 3)
	name := "Kitchen speaker"
	if _, err := n.Patch(t.Context(), first, api.DeviceEdit{Name: &name, Labels: map[string]*string{"room": new("kitchen")}}, 0); err != nil {
		t.Fatal(err)
	}
	p := b.open(t, n, n.Token(t), "/console/")
	p.emulate(360, 740, "light")
	p.live()

	p.run("document.querySelector('.who summary').click()")
	p.await("document.querySelector('.who').open")
	if !p.inView(fmt.Sprintf(button, "Log out")) {
		t.Error("Log out is outside the window")
	}
	p.run("document.querySelector('.who summary').click()")

	p.run("document.querySelector('nav.main .more').click()")
	p.await("!!document.querySelector('nav.main.open')")
	const bar = "[...document.querySelectorAll('nav.main li:not(.further), nav.main .more')].map((e) => Math.round(e.getBoundingClientRect().top))"
	if tops := p.number("new Set(" + bar + ").size"); tops != 1 {
		t.Errorf("the first pages are in one row with more while it is open, not in %d: %v", tops, p.eval(bar))
	}
	if p.eval("[...document.querySelectorAll('nav.main li.further')].every((e) => e.getBoundingClientRect().bottom <= document.querySelector('nav.main .more').getBoundingClientRect().top)") != true {
		t.Error("further pages are in the row of the first ones")
	}
	p.run("document.querySelector('nav.main .more').click()")

	// The count is of what the list contains, and the search is the one of the page.
	p.visit("/console/devices?q=kitchen")
	p.await("document.querySelector('[data-test=total]')?.innerText === '1 of 3: kitchen in id, name or board'")
	p.await("document.querySelector('.bar input[type=search]').value === 'kitchen'")
	const csv = "[...document.querySelectorAll('main button')].some((b) => b.textContent === 'CSV')"
	p.await("!" + csv) // it would be of all devices
	p.click("room=kitchen")
	p.await(csv)
	p.await("location.search === '?label=room%3Dkitchen' && document.querySelectorAll('tbody tr').length === 1")
	p.await("document.querySelector('.bar input[type=search]').value === ''")
	p.visit("/console/devices/" + first)
	p.click("room=kitchen")
	p.await("location.search === '?label=room%3Dkitchen' && document.querySelectorAll('tbody tr').length === 1")

	// The result of a call is below the form, and comes into view.
	p.visit("/console/devices/" + first + "/tools?tool=" + volume)
	p.fill("#field-0", "30")
	p.click("Call")
	p.await("!!document.querySelector('[data-test=result]')")
	const result = "document.querySelector('[data-test=result] .outcome')"
	p.await("(" + result + ".getBoundingClientRect().bottom < document.querySelector('nav.main').getBoundingClientRect().top)")

	// So does what a job would do, and what a trace shows once it runs.
	p.visit("/console/jobs/new?select=room%3Dkitchen&tool=" + volume)
	p.fill("#field-0", "30")
	p.click("Show what it would do")
	p.await("!!document.querySelector('[data-test=plan]')")
	const plan = "document.querySelector('[data-test=plan] .number-big')"
	p.await("(" + plan + ".getBoundingClientRect().bottom < document.querySelector('nav.main').getBoundingClientRect().top)")
	p.visit("/console/devices/" + first + "/trace")
	p.click("Start a trace")
	p.shows("The trace runs while this page is open.")
	p.await("!!document.querySelector('main .empty')")
	for _, find := range []string{"document.querySelector('[data-test=state]')", fmt.Sprintf(button, "Pause"), "document.querySelector('main .empty')"} {
		if !p.inView(find) {
			t.Errorf("%s of a trace is out of sight", find)
		}
	}
	p.click("End the trace")
	p.shows("The trace has ended.")
	if !p.inView("document.querySelector('[data-test=state]')") {
		t.Error("the end of a trace is out of sight")
	}

	// A link of fleetd console that is opened in a tab which shows the console already is redeemed, too, if the person wants it.
	before := p.sent("POST /v1/console/keys")
	p.run("window.confirm = (text) => { window.asked = text; return false; }; location.hash = 'code=UNKNOWN'")
	p.await("window.asked === 'Log in with this link?' && location.hash === ''")
	if got := p.sent("POST /v1/console/keys") - before; got != 0 {
		t.Errorf("%d codes redeemed that nobody wanted", got)
	}
	p.expect(401, 403, 404)
	p.run("window.confirm = () => true; location.hash = 'code=UNKNOWN'")
	p.await("document.querySelector('dialog')?.open && location.hash === ''")
	if got := p.sent("POST /v1/console/keys") - before; got != 1 {
		t.Errorf("%d codes redeemed", got)
	}
}

// Tables and choices show their whole text in the windows of a phone and of a computer, and controls have the colours of
// the scheme.
func TestNothingIsCut(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	p := b.open(t, n, n.Token(t), "/console/access/explain?key=admin&tool="+volume+"&device="+first+"&via=rest")
	p.emulate(360, 740, "dark")
	const wide = "[...document.querySelectorAll('.scroll')].some((e) => e.scrollWidth > e.clientWidth)"
	p.await("!!document.querySelector('main tbody')")
	if p.eval(wide) == true {
		t.Error("the reasons of a decision are cut on a phone")
	}
	for _, width := range []int64{360, 1280} {
		p.emulate(width, 740, "dark")
		p.visit("/console/devices/" + first + "/catalog")
		p.await("!!document.querySelector('main select')")
		cut := p.eval("[...document.querySelectorAll('main select')].filter((e) => { const c = document.createElement('canvas').getContext('2d'); c.font = getComputedStyle(e).font; return c.measureText(e.selectedOptions[0].text).width > e.clientWidth - 44; }).length")
		if cut != 0.0 {
			t.Errorf("%v choices of a version are cut in a window of %d", cut, width)
		}
	}

	// The part of a slider that is not filled is dark.
	p.visit("/console/devices/" + first + "/tools?tool=" + volume)
	p.fill("#field-0", "10")
	p.await("!!document.querySelector('input[type=range]')")
	shot, err := chromedp.Run(p.ctx, chromedp.CaptureScreenshot())
	if err != nil {
		t.Fatal(err)
	}
	picture, err := png.Decode(bytes.NewReader(shot))
	if err != nil {
		t.Fatal(err)
	}
	const slider = "document.querySelector('input[type=range]').getBoundingClientRect()"
	x, y := p.number("Math.round("+slider+".left + "+slider+".width * 0.9)"), p.number("Math.round("+slider+".top + "+slider+".height / 2)")
	if c := color.GrayModel.Convert(picture.At(x, y)).(color.Gray); c.Y > 0x80 {
		t.Errorf("the slider is light in the dark scheme: %d at %d, %d", c.Y, x, y)
	}

	if _, err := n.SetPolicy(t.Context(), json.RawMessage(`{"rules":[{"name":"careful","tools":["`+volume+`"],"action":"confirm"}]}`), 0); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Call(t.Context(), first, volume, apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":9}`)}); err == nil {
		t.Fatal("a call without its confirmation")
	}
	n.Await(t, "the refusal in the audit", wait, func() bool {
		for e, err := range apiclient.List[api.AuditEntry](t.Context(), n.Client, apiclient.Query{"device": first}, "audit") {
			if err != nil {
				t.Fatal(err)
			}
			if e.Outcome == "confirmation_required" {
				return true
			}
		}
		return false
	})
	p.visit("/console/audit")
	const refused = "[...document.querySelectorAll('main td')].some((e) => e.innerText.includes('needs a confirmation'))"
	p.await(refused)
	if p.eval(wide) == true {
		t.Error("the details of the audit are cut")
	}
	if p.eval("((e) => { const c = document.createElement('canvas').getContext('2d'); c.font = getComputedStyle(e).font; return c.measureText(e.placeholder).width > e.clientWidth - 22; })(document.querySelector('input[name=since]'))") == true {
		t.Error("the example of a date is cut")
	}
	day := time.Now().UTC().AddDate(0, 0, -1).Format(time.DateOnly)
	p.fill("input[name=since]", day+"\r")
	p.await(fmt.Sprintf("new URLSearchParams(location.search).get('since') === '%sT00:00:00Z'", day))
	p.await(refused)
	scopes := []string{"devices:read", "devices:write", "photos:read", "tools:call", "events:read"}
	expires := time.Now().Add(time.Hour)
	if _, err := n.CreateKey(t.Context(), api.NewKey{Name: "a tablet in the kitchen", Scopes: scopes, Expires: &expires, Tools: []string{"self.audio_speaker.set_volume", "self.screen.set_brightness"}}); err != nil {
		t.Fatal(err)
	}
	p.visit("/console/access")
	p.shows("a tablet in the kitchen")
	if width := p.number("Math.round(document.querySelector('td:nth-child(2)').getBoundingClientRect().width)"); width < 170 || p.eval(wide) == true {
		t.Errorf("the scopes of a key have %d pixels, or the table is cut", width)
	}
}

// A dialog that cancels a job has no second button with the word cancel.
func TestCancelDialog(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := programs.Start(t)
	job, err := n.CreateJob(t.Context(), api.NewJob{JobSpec: api.JobSpec{Select: "room=attic", Follow: true, Action: api.JobAction{Call: &api.JobCall{Tool: volume, Arguments: json.RawMessage(`{"volume":1}`)}}}}, "")
	if err != nil {
		t.Fatal(err)
	}
	p := b.open(t, n, n.Token(t), "/console/jobs/"+job.ID)
	p.click("Cancel the job")
	p.await("document.querySelector('dialog')?.open")
	if got := fmt.Sprint(p.eval("[...document.querySelectorAll('dialog button')].map((b) => b.textContent)")); got != "[Cancel the job Back]" {
		t.Errorf("buttons %s", got)
	}
}
