package browser

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/counters"
	"fleetd/internal/fleettest"
)

// waits lets a device request its configuration, and returns the code that it speaks.
func waits(t *testing.T, ota, device string) string { return waitsAs(t, ota, device, "client-"+device) }

func waitsAs(t *testing.T, ota, device, client string) string {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, ota, strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Device-Id", device)
	r.Header.Set("Client-Id", client)
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }() // decoded below
	var reply struct{ Activation struct{ Code string } }
	if err := json.NewDecoder(answer.Body).Decode(&reply); err != nil || len(reply.Activation.Code) != 6 {
		t.Fatalf("the reply to a new device: %+v, %v", reply, err)
	}
	return reply.Activation.Code
}

// A device that waits is admitted by the code that it speaks, pasted with a space; a wrong code admits nobody.
func TestAdmission(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := programs.Start(t, "--admission", "approve")
	code := waits(t, n.Info.OTA, first)
	p := b.open(t, n, n.Token(t), "/console/admissions")
	p.expect(404)
	p.shows(first)
	p.fill("#code", "12345\r")
	p.shows("Six digits are needed.")
	wrong := "000000"
	if code == wrong {
		wrong = "111111"
	}
	p.fill("#code", wrong+"\r")
	p.await("!!document.querySelector('form.card .problem')")
	p.fill("#code", code[:3]+" "+code[3:]+"\r")
	p.shows(first + " is a member now.")
	p.await("document.body.innerText.includes('No device waits.')")
}

// Another client of a known device looks like a copy: both clients and their addresses are shown, and the button refuses the
// copy, while the device stays connected.
func TestCopyIsRefused(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	waitsAs(t, n.Info.OTA, first, "a-copy")
	d, err := n.Device(t.Context(), first)
	if err != nil || len(d.Pending) != 1 || d.Pending[0].Client == d.Client {
		t.Fatalf("%+v, %v", d, err)
	}
	p := b.open(t, n, n.Token(t), "/console/admissions")
	p.shows("Looks like a copy")
	p.await(fmt.Sprintf("[...document.querySelectorAll('[data-test=clones] tbody tr')].map((r) => [...r.cells].slice(0, 3).map((c) => c.innerText).join()).join(' ') === 'admitted,%s,127.0.0.1 waits,%s,127.0.0.1'", d.Client, d.Pending[0].Client))
	p.eval("[...document.querySelectorAll('table.rows button')].find((e) => e.innerText === 'Refuse').click()")
	p.await("!document.querySelector('[data-test=clones]')")
	d, err = n.Device(t.Context(), first)
	// security: D22
	if err != nil || d.State != "online" || d.Admission != "member" || len(d.Pending) > 0 {
		t.Errorf("after the refusal: %+v, %v", d, err)
	}
	waitsNot(t, n, "a-copy")
}

// waitsNot checks that a client of the first device is refused.
func waitsNot(t *testing.T, n *fleettest.Node, client string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, n.Info.OTA, strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	r.Header = http.Header{"Device-Id": {first}, "Client-Id": {client}}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }() // read below
	if text, err := io.ReadAll(answer.Body); err != nil || strings.Contains(string(text), "activation") {
		t.Errorf("a refused client waits again: %s, %v", text, err)
	}
}

// Two lists of tools of one device are compared tool by tool.
func TestToolHistory(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := programs.Start(t)
	for _, profile := range []string{"fw-1.9", "fw-2.4"} {
		s := programs.Simulate(t, n.Info.OTA, "--devices", "1", "--profile", profile, "--transport", "mqtt", "--quiet")
		n.AwaitReady(t, 1)
		n.AwaitStored(t)
		s.Report(t)
		n.Await(t, "it is offline", wait, func() bool { return n.Ready(t) == 0 })
	}
	p := b.open(t, n, n.Token(t), "/console/devices/"+first+"/catalog")
	p.await("document.querySelectorAll('[data-test=diff] section').length > 0")
	kinds := fmt.Sprint(p.eval("[...new Set([...document.querySelectorAll('[data-test=diff] h3')].map((h) => h.innerText.split(':')[0]))].sort().join()"))
	if !strings.Contains(kinds, "added") && !strings.Contains(kinds, "changed") {
		t.Errorf("the comparison has %s", kinds)
	}
	forward := p.number("document.querySelectorAll('[data-test=diff] section').length")
	versions := p.eval("[...document.querySelectorAll('select')].map((s) => [...s.options].map((o) => o.value))").([]any)[0].([]any)
	p.visit(fmt.Sprintf("/console/devices/%s/catalog?new=%v&old=%v", first, versions[1], versions[0]))
	p.await(fmt.Sprintf("document.querySelectorAll('[data-test=diff] section').length === %d", forward))
}

// A key's token is shown once; a policy that somebody else changed meanwhile is not overwritten.
func TestKeysAndPolicy(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	p := b.open(t, n, n.Token(t), "/console/access")
	p.expect(409, 412)
	p.click("New key")
	p.fill("#key-name", "kitchen tablet")
	p.eval("document.querySelector('input[name=scope][value=\"devices:read\"]').click()")
	p.do(chromedp.KeyEvent("\r"))
	p.await("!!document.querySelector('dialog') === false && !!document.querySelector('[data-test=token] code')")
	token := fmt.Sprint(p.eval("document.querySelector('[data-test=token] code').innerText"))
	if len(token) < 20 {
		t.Errorf("the token is %q", token)
	}
	p.shows("kitchen tablet")
	for _, leave := range []func(){
		func() { p.run("location.reload()") },
		func() { p.click("Devices"); p.await("document.title.startsWith('Devices')"); p.run("history.back()") },
	} {
		leave()
		p.await("document.title.startsWith('Keys and policy')")
		p.shows("kitchen tablet")
		if p.eval("document.documentElement.outerHTML.includes("+fmt.Sprintf("%q", token)+")") == true {
			t.Error("the token is shown again")
		}
	}

	p.visit("/console/access/policy")
	p.await("!!document.querySelector('#policy')?.value")
	if _, err := n.SetPolicy(t.Context(), json.RawMessage(`{"rules":[{"name":"other","tools":["self.reboot"],"action":"deny"}]}`), 0); err != nil {
		t.Fatal(err)
	}
	p.fill("#policy", `{"rules":[{"name":"mine","tools":["self.reboot"],"action":"allow"}]}`)
	p.click("Save")
	p.await("!!document.querySelector('form .problem')")
	if text, _, _ := n.Command(t, "policy", "show", "--json"); !strings.Contains(text, "other") || strings.Contains(text, "mine") {
		t.Errorf("the policy is %s", text)
	}
	if got := p.eval("document.querySelector('#policy').value.includes('mine')"); got != true {
		t.Error("what was written is gone")
	}
}

// The table of a plot has the figures of the API, gaps as gaps, and a plot follows the size of the window.
func TestPlots(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 3)
	n.Await(t, "a figure", time.Minute, func() bool {
		s, err := apiclient.Get[api.Stats](t.Context(), n.Client, apiclient.Query{"since": time.Now().Add(-time.Hour).UTC().Format(time.RFC3339)}, "stats")
		if err != nil {
			return false
		}
		for _, series := range s.Series {
			for _, point := range series.Points {
				if series.Name == "online" && point != nil && *point == 3 {
					return true
				}
			}
		}
		return false
	})
	p := b.open(t, n, n.Token(t), "/console/stats")
	p.await("document.querySelectorAll('figure.plot canvas').length > 5")
	p.eval("document.querySelector('figure.plot details').open = true")
	p.await("[...document.querySelectorAll('figure.plot:first-of-type tbody tr')].some((r) => r.lastElementChild.innerText === '3')")
	if gaps := p.number("[...document.querySelectorAll('figure.plot:first-of-type tbody tr')].filter((r) => r.lastElementChild.innerText === '–').length"); gaps == 0 {
		t.Error("the time before the node was started has figures")
	}
	for _, width := range []int64{1280, 500} {
		p.emulate(width, 800, "light")
		p.await(fmt.Sprintf("[...document.querySelectorAll('figure.plot canvas')].every((c) => c.getBoundingClientRect().right <= %d)", width))
	}
}

// The p99 of calls that the page shows is in the bucket in which /metrics has it. One call in ten is slow, so that this is
// not the bucket of most calls.
func TestPlotAndMetrics(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	const late = "02:f1:ee:00:00:10"
	programs.Simulate(t, n.Info.OTA, "--devices", "1", "--mac-base", late, "--fault", "slow", "--slow", "60ms", "--quiet")
	n.AwaitReady(t, 2)
	const calls = 20
	for i := range calls {
		id := first
		if i%10 == 0 {
			id = late
		}
		if _, err := n.Call(t.Context(), id, volume, apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":9}`)}); err != nil {
			t.Fatal(err)
		}
	}
	var bounds []float64
	for _, bound := range counters.Bounds {
		bounds = append(bounds, bound.Seconds())
	}
	lower, upper := 0.0, 0.0
	for _, bound := range bounds {
		if n.Metric(t, "fleetd_call_seconds_bucket", fmt.Sprintf("le=%q", strconv.FormatFloat(bound, 'g', -1, 64))) >= 0.99*calls {
			upper = bound
			break
		}
		lower = bound
	}
	if total := n.Metric(t, "fleetd_call_seconds_count"); total != calls || upper <= 0.05 {
		t.Fatalf("/metrics counts %v calls; the p99 is in the bucket up to %v s", total, upper)
	}
	p := b.open(t, n, n.Token(t), "/console/stats")
	// A step of the plot may have a part of the calls: the p99 of all is between those of the steps.
	const shown = "[...[...document.querySelectorAll('figure.plot')].find((f) => f.querySelector('h2').textContent === 'Time of calls')?.querySelectorAll('tbody td:last-child') ?? []]" +
		".map((e) => e.textContent).filter((x) => x !== '–').map((x) => parseFloat(x) / (x.endsWith(' ms') ? 1000 : 1))"
	p.await(fmt.Sprintf("((found) => found.length && Math.max(...found) >= %v && Math.min(...found) <= %v)(%s)", lower, upper, shown))
	p.await(fmt.Sprintf("%s.every((x) => x <= %v)", shown, upper))
}

// A code of a device that somebody else approved meanwhile admits nobody again, and after too many wrong codes the page
// names what else leads on.
func TestAdmissionElsewhere(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := programs.Start(t, "--admission", "approve")
	code := waits(t, n.Info.OTA, first)
	p := b.open(t, n, n.Token(t), "/console/admissions")
	p.expect(403, 404)
	p.shows(first)
	if err := n.Approve(t.Context(), first, ""); err != nil {
		t.Fatal(err)
	}
	p.fill("#code", code+"\r")
	p.await("!!document.querySelector('form.card .problem')")
	p.shows("No device waits.")

	const second = "02:f1:ee:00:00:01"
	right := waits(t, n.Info.OTA, second)
	wrong := "000000"
	if right == wrong {
		wrong = "111111"
	}
	for tries := 0; p.eval("!!document.querySelector('form.card .problem')?.innerText.includes('too many wrong codes')") != true; tries++ {
		if tries > 50 {
			t.Fatal("codes can be guessed without a limit")
		}
		sent := p.sent("POST /v1/devices/")
		p.fill("#code", wrong+"\r")
		n.Await(t, "the code is sent", wait, func() bool { return p.sent("POST /v1/devices/") > sent })
		p.await("!!document.querySelector('form.card .problem')")
	}
	p.fill("#code", right+"\r") // not even this one, for a minute
	p.shows("approve the device by its id")
	if d, err := n.Device(t.Context(), second); err == nil && d.State != "pending" {
		t.Errorf("it is %s", d.State)
	}
	p.await("[...document.querySelectorAll('tbody button')].some((b) => b.textContent === 'Approve')")
	p.eval("[...document.querySelectorAll('tbody button')].find((b) => b.textContent === 'Approve').click()")
	n.Await(t, "it is a member", wait, func() bool { d, err := n.Device(t.Context(), second); return err == nil && d.State != "pending" })
}

// The record of decisions is verified, and its export is what the command line exports.
func TestAuditExport(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	const calls = 3
	for range calls {
		if _, err := n.Call(t.Context(), first, "self.get_device_status", apiclient.CallRequest{}); err != nil {
			t.Fatal(err)
		}
	}
	n.Await(t, "the calls are in the audit", 20*time.Second, func() bool {
		found, err := apiclient.Collect(apiclient.List[api.AuditEntry](t.Context(), n.Client, apiclient.Query{"kind": "call"}, "audit"))
		return err == nil && len(found) == calls
	})
	p := b.openAt(t, n.Info.API, n.Token(t), "/console/audit", `{
		const make = URL.createObjectURL;
		URL.createObjectURL = (blob) => { blob.text().then((text) => { window.exported = text; }); return make(blob); };
	}`)
	p.await(fmt.Sprintf("document.querySelectorAll('tbody tr').length >= %d", calls))
	p.click("Verify the record")
	p.await("/The record is complete: [1-9]\\d* entr(y|ies) verified/.test(document.body.innerText)")
	command, errs, status := n.Command(t, "audit", "export", "-")
	p.click("Export")
	p.await("window.exported?.length > 0")
	exported := fmt.Sprint(p.eval("window.exported"))
	// What came after the first export is at the end of the second: both begin alike, entry by entry.
	first, second := entries(command), entries(exported)
	if status != 0 || len(first) < calls || len(second) < len(first) {
		t.Fatalf("%d and %d entries, status %d: %s", len(first), len(second), status, errs)
	}
	for i := range first {
		if first[i] != second[i] {
			t.Fatalf("line %d of the command line: %s; of the page: %s", i+1, first[i], second[i])
		}
	}
}

// entries are the lines of an export that are entries, which have an instant and a place in their run.
func entries(text string) (found []string) {
	for line := range strings.Lines(text) {
		if strings.Contains(line, `"seq":`) && strings.Contains(line, `"at":`) {
			found = append(found, strings.TrimSpace(line))
		}
	}
	return found
}

// Of a hundred lists of tools any two can be compared, and of a tool only what differs is shown.
func TestManyVersions(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	schema := func(most int) string {
		return fmt.Sprintf(`{"items":[{"name":"level","description":"the same words","inputSchema":{"type":"object","properties":{"volume":{"type":"integer","minimum":0,"maximum":%d}}}},{"name":"other","inputSchema":{"type":"object"}}]}`, most)
	}
	front := before(t, n, func(w http.ResponseWriter, r *http.Request) bool {
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Path == "/v1/devices/"+first+"/catalogs" {
			var items []string
			for i := range 100 {
				items = append(items, fmt.Sprintf(`{"catalog":"%064d","since":"2026-11-24T00:%02d:%02dZ","firmware":"2.4.%d"}`, 100-i, (100-i)/60, (100-i)%60, i))
			}
			_, _ = fmt.Fprintf(w, `{"items":[%s]}`, strings.Join(items, ",")) // the browser is gone if this fails
			return true
		}
		if name, ok := strings.CutPrefix(r.URL.Path, "/v1/catalogs/"); ok {
			number, err := strconv.Atoi(strings.TrimLeft(name, "0"))
			if err != nil {
				t.Error(err)
			}
			_, _ = fmt.Fprint(w, schema(number))
			return true
		}
		w.Header().Del("Content-Type")
		return false
	})
	p := b.openAt(t, front.URL, n.Token(t), "/console/devices/"+first+"/catalog")
	difference := func(old, fresh int) {
		t.Helper()
		p.await(fmt.Sprintf("document.querySelector('[data-test=diff]')?.innerText.includes('\"maximum\": %d') && document.querySelector('[data-test=diff]').innerText.includes('\"maximum\": %d')", old, fresh))
		shown := fmt.Sprint(p.eval("document.querySelector('[data-test=diff]').innerText"))
		if strings.Count(shown, "changed") != 1 || strings.Contains(shown, "the same words") || strings.Contains(shown, "other") {
			t.Errorf("the difference is %s", shown)
		}
	}
	difference(99, 100)
	if n := p.number("document.querySelectorAll('main select')[1].options.length"); n != 100 {
		t.Errorf("%d versions to choose from", n)
	}
	p.eval("(() => { const s = document.querySelectorAll('main select')[1]; s.value = s.options[99].value; s.dispatchEvent(new Event('change', { bubbles: true })) })()")
	difference(1, 100)
	if nodes := p.number("document.querySelectorAll('*').length"); nodes > maxNodes {
		t.Errorf("%d elements", nodes)
	}
}

// A start of a node is marked in the plots.
func TestStartsInPlots(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	n.Stop(t)
	n.Run(t)
	var without atomic.Bool
	front := before(t, n, func(w http.ResponseWriter, r *http.Request) bool {
		if r.URL.Path != "/v1/stats" || !without.Load() {
			return false
		}
		s, err := apiclient.Get[api.Stats](t.Context(), n.Client, apiclient.Query{"since": time.Now().Add(-time.Hour).UTC().Format(time.RFC3339)}, "stats")
		if err != nil {
			t.Error(err)
		}
		s.Starts = []api.NodeStart{}
		for _, series := range s.Series {
			if series.Name == "online" && series.Value == "mqtt" {
				mean := 4.6
				series.Points[len(series.Points)-1] = &mean
			}
		}
		return respond(t, w, http.StatusOK, s)
	})
	// A mark is a dashed line; the series of a plot are not drawn point by point.
	p := b.openAt(t, front.URL, n.Token(t), "/console/stats", `{
		const real = CanvasRenderingContext2D.prototype.moveTo;
		window.marks = 0;
		CanvasRenderingContext2D.prototype.moveTo = function (x, y) { if (this.getLineDash().join() === "3,3") window.marks++; return real.call(this, x, y); };
	}`)
	p.await("document.querySelectorAll('figure.plot canvas').length > 5 && window.marks >= document.querySelectorAll('figure.plot canvas').length")
	without.Store(true)
	p.visit("/console/stats")
	p.await("document.querySelectorAll('figure.plot canvas').length > 5")
	if marks := p.number("window.marks"); marks != 0 {
		t.Errorf("%d marks of no start", marks)
	}
	p.await("document.querySelector('figure.plot').innerText.includes('now 5, most 5')") // 4.6 on average in this step
}
