package browser

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
)

// A device that waits is admitted by the code that it speaks, pasted with a space; a wrong code admits nobody.
func TestAdmission(t *testing.T) {
	long(t)
	b := start(t)
	n := programs.Start(t, "--admission", "approve")
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, n.Info.OTA, strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Device-Id", first)
	r.Header.Set("Client-Id", "client-1")
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }() // decoded below
	var reply struct{ Activation struct{ Code string } }
	if err := json.NewDecoder(answer.Body).Decode(&reply); err != nil || len(reply.Activation.Code) != 6 {
		t.Fatalf("the reply to a new device: %+v, %v", reply, err)
	}
	code := reply.Activation.Code
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

// Two lists of tools of one device are compared tool by tool.
func TestToolHistory(t *testing.T) {
	long(t)
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
		p.await("document.title.startsWith('Access')")
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
	b := start(t)
	n := fleet(t, 3)
	n.Await(t, "a figure", time.Minute, func() bool {
		s, err := n.Stats(t.Context(), time.Now().Add(-time.Hour), 0)
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
