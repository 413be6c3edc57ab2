package browser

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"fleetd/internal/apiclient"
)

// What a form sends is of the type that the tool has; what was not entered is left out, and an empty text is not the same
// as none. What no form can show is entered as JSON, which is sent as it was typed.
func TestFormTypes(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	const path = "/v1/devices/" + first + "/tools"
	tools := `{"catalog":"","state":"ready","partial":false,"items":[
		{"name":"typed","description":"x","inputSchema":{"type":"object","required":["yes","near","word"],"properties":{
			"yes":{"type":"boolean"},"maybe":{"type":"boolean","default":true},"near":{"type":"integer","minimum":0,"maximum":10},
			"far":{"type":"integer","minimum":0,"maximum":9007199254740999},"some":{"type":"integer","default":7},"word":{"type":"string"},"rest":{"type":"string","default":"as before"}}}},
		{"name":"nested","inputSchema":{"type":"object","properties":{"list":{"type":"array","items":{"type":"integer"}}}}}]}`
	var mu sync.Mutex
	var bodies []string
	front := before(t, n, func(w http.ResponseWriter, r *http.Request) bool {
		switch {
		case r.URL.Path == path:
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, tools) // the browser is gone if this fails
		case strings.HasPrefix(r.URL.Path, path+"/"):
			body, err := io.ReadAll(r.Body)
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			bodies = append(bodies, string(body))
			mu.Unlock()
			respond(t, w, http.StatusOK, map[string]any{"content": []any{map[string]string{"type": "text", "text": "true"}}, "isError": false, "duration_ms": 1, "node": "n", "call": "c"})
		default:
			return false
		}
		return true
	})
	p := b.openAt(t, front.URL, n.Token(t), "/console/devices/"+first+"/tools?tool=typed")
	calls := 0
	// sends presses Call and compares the arguments, letter by letter.
	sends := func(want string) {
		t.Helper()
		p.click("Call")
		calls++
		n.Await(t, "a call", wait, func() bool { mu.Lock(); defer mu.Unlock(); return len(bodies) == calls })
		p.await("!!document.querySelector('[data-test=result]')") // until then the button does nothing
		mu.Lock()
		defer mu.Unlock()
		if got := strings.TrimSuffix(strings.TrimPrefix(bodies[calls-1], `{"arguments":`), "}"); got != want {
			t.Errorf("the form sends %s, want %s", got, want)
		}
	}
	p.await("document.querySelectorAll('fieldset input[type=radio]').length === 2")
	if p.eval("document.querySelectorAll('input[type=radio]:checked').length") != 0.0 {
		t.Error("a required choice is made beforehand")
	}
	p.click("Call")
	p.shows("Choose one.")
	p.shows("Enter a whole number.")
	p.shows("needed")
	p.eval("document.querySelector('fieldset input').click()")
	p.fill("#field-2", "5")
	p.fill("#field-5", "x")
	sends(`{"yes":true,"near":5,"word":"x"}`)
	p.fill("#field-2", "007")
	p.fill("#field-3", "9007199254740993") // past what a number of JavaScript holds
	sends(`{"yes":true,"near":7,"far":9007199254740993,"word":"x"}`)
	p.fill("#field-2", "1.5")
	p.click("Call")
	p.shows("Enter a whole number.")
	p.eval("(() => { const r = document.querySelector('input[type=range]'); r.value = 9; r.dispatchEvent(new Event('input', { bubbles: true })) })()")
	p.await("document.querySelector('#field-2').value === '9'")
	p.eval("(() => { const s = document.querySelector('#field-1'); s.value = 'false'; s.dispatchEvent(new Event('change', { bubbles: true })) })()")
	p.await("document.querySelector('#field-6 ~ label input, label:has(#field-6) input, .field:has(#field-6) input[type=checkbox]') !== null")
	p.eval("document.querySelector('.field:has(#field-6) input[type=checkbox]').click()") // sent, and empty
	sends(`{"yes":true,"maybe":false,"near":9,"far":9007199254740993,"word":"x","rest":""}`)

	p.visit("/console/devices/" + first + "/tools?tool=nested")
	p.fill("#arguments", `{"list":[1,`)
	p.click("Call")
	p.shows("not valid JSON")
	p.fill("#arguments", `[1]`)
	p.click("Call")
	p.shows("Arguments are a JSON object")
	p.fill("#arguments", `{"list": [1, 2.50]}`)
	sends(`{"list": [1, 2.50]}`)
}

// Each kind of result is shown as what it is: text, JSON, a picture, an error of the tool, a restart, and what is not known,
// which is explained when the answer came late. A call that lasts can be left. A picture is given back with its page.
func TestResults(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 2, "--profile", "robot,fw-2.4")
	const second = "02:f1:ee:00:00:01"
	p := b.openAt(t, n.Info.API, n.Token(t), "/console/devices/"+first, `{
		window.kept = new Set();
		const make = URL.createObjectURL, end = URL.revokeObjectURL;
		URL.createObjectURL = (x) => { const u = make(x); window.kept.add(u); return u; };
		URL.revokeObjectURL = (u) => { window.kept.delete(u); end(u); };
	}`)
	p.expect(502, 503, 504)
	tool := func(device, name string, fields ...string) {
		t.Helper()
		p.visit("/console/devices/" + device + "/tools?user=1&tool=" + name)
		p.await("document.querySelector('main h2')?.innerText === '" + name + "'")
		for i, value := range fields {
			p.fill(fmt.Sprintf("#field-%d", i), value)
		}
		p.click("Call")
	}
	result := func(texts ...string) {
		t.Helper()
		for _, text := range texts {
			p.await(fmt.Sprintf("document.querySelector('[data-test=result]')?.innerText.includes(%q)", text))
		}
	}
	tool(first, "self.test.echo", "<b>not bold</b>")
	result("done", "<b>not bold</b>")
	tool(first, "self.get_device_status")
	result("done", "\"volume\": ")
	tool(first, "self.test.fail")
	result("the tool failed", "film", "why?")
	tool(first, "self.test.image")
	result("done")
	p.await("document.querySelector('img.picture')?.naturalWidth === 8")
	tool(second, "self.camera.take_photo", "What?")
	p.await("document.querySelector('img.picture')?.naturalWidth === 320")
	if got := p.number("window.kept.size"); got != 1 {
		t.Errorf("%d pictures are kept for one", got)
	}
	p.click("Facts")
	p.await("[...document.querySelectorAll('img.picture')].some((i) => i.naturalWidth === 320)")
	p.click("Timeline")
	p.await("!document.querySelector('img.picture')")
	p.await("window.kept.size === 0")

	// The device answers after the caller got its error.
	p.visit("/console/devices/" + first + "/tools?user=1&tool=self.test.sleep")
	p.fill("#field-0", "3000")
	p.eval("document.querySelector('form details').open = true")
	p.fill("form details input", "1")
	p.click("Call")
	p.shows("not known whether the device acted")
	p.click("Why?")
	p.await("location.pathname.startsWith('/console/calls/')")
	p.await("document.querySelector('[data-test=explain]')?.textContent.includes('answered_late')")

	tool(first, "self.test.sleep", "30000")
	p.click("Stop waiting")
	p.shows("The device may act all the same.")
	tool(second, "self.reboot")
	result("restarting")
	if p.eval("document.querySelector('[data-test=result] .outcome').className") != "outcome neutral" {
		t.Error("a restart is shown as good or bad")
	}
}

// A confirmation shows the rule and the arguments, ends after a minute, and is never given by itself.
func TestConfirmation(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	_, err := n.SetPolicy(t.Context(), json.RawMessage(`{"rules":[{"name":"careful","tools":["`+volume+`"],"action":"confirm"}]}`), 0)
	if err != nil {
		t.Fatal(err)
	}
	p := b.openAt(t, n.Info.API, n.Token(t), "/console/devices/"+first+"/tools?tool="+volume, `{
		const real = window.setInterval;
		window.setInterval = (f, ms, ...rest) => real(f, ms === 1000 ? 50 : ms, ...rest); // a minute takes 3 s
	}`)
	p.expect(428)
	p.fill("#field-0", "61")
	p.eval("document.querySelector('form button.primary').focus()")
	p.do(chromedp.KeyEvent(kb.Enter))
	p.await("document.querySelector('dialog')?.innerText.includes('careful')")
	p.await(`document.querySelector('dialog').innerText.includes('{"arguments":{"volume":61}}') && document.querySelector('dialog').innerText.includes('` + volume + `')`)
	p.shows("The time is over. Start again.")
	p.await("[...document.querySelectorAll('dialog button')].find((b) => b.textContent === 'Confirm').disabled")
	p.click("Cancel")
	p.await("!document.querySelector('dialog')")
	if got := p.eval("document.activeElement.textContent"); got != "Call" {
		t.Errorf("after the dialog the focus is on %q", got)
	}
	if d, err := n.Call(t.Context(), first, "self.get_device_status", apiclient.CallRequest{}); err != nil || strings.Contains(string(d.Raw), `\"volume\":61`) {
		t.Errorf("%s, %v", d.Raw, err)
	}
}
