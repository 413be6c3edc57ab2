package browser

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

// A webhook is created with a secret that is shown once, tried, changed, and deleted after a question. The page names why
// a receiver fails, and which setting allows an address.
func TestWebhooksPage(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := programs.Start(t, "--webhook-allow", "127.0.0.1")
	var mu sync.Mutex
	var got []string
	var status atomic.Int64
	status.Store(http.StatusAccepted)
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body struct{ Type string }
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			t.Error(err)
		}
		mu.Lock()
		got = append(got, body.Type+" "+fmt.Sprint(r.Header.Get("webhook-signature") != ""))
		mu.Unlock()
		w.WriteHeader(int(status.Load()))
	}))
	t.Cleanup(receiver.Close)
	received := func(want string) {
		t.Helper()
		n.Await(t, want, wait, func() bool {
			mu.Lock()
			defer mu.Unlock()
			return strings.Contains(strings.Join(got, "\n"), want)
		})
	}
	p := b.open(t, n, n.Token(t), "/console/webhooks")
	p.expect(400)
	p.shows("No webhooks yet.")
	p.click("New webhook")
	p.fill("#hook-url", "http://192.0.2.1/\r")
	p.await("document.querySelector('dialog .problem')?.innerText.includes('--webhook-allow')")
	p.fill("#hook-url", receiver.URL+"/token\r")
	p.await("!document.querySelector('dialog')")
	secret := fmt.Sprint(p.eval("document.querySelector('[data-test=secret] code').innerText"))
	if !strings.HasPrefix(secret, "whsec_") {
		t.Errorf("the secret is %q", secret)
	}
	row := func(text string) {
		t.Helper()
		p.await(fmt.Sprintf("document.querySelector('[data-row]')?.innerText.includes(%q)", text))
	}
	row(receiver.URL + "/token")
	row("active")
	p.click("Deliver a test")
	p.await("/delivered, answered 202 in/.test(document.querySelector('[data-test=test]').innerText)")
	received("test true")
	status.Store(http.StatusTeapot)
	p.click("Deliver a test")
	p.await("/not delivered.*418/s.test(document.querySelector('[data-test=test]').innerText)")

	programs.Simulate(t, n.Info.OTA, "--devices", "1", "--quiet")
	received("online true")
	row("failing")
	row("418")
	status.Store(http.StatusOK)
	row("active")
	p.await("/\\b1\\b/.test(document.querySelector('[data-row] td[data-name=Delivered]').innerText)")

	// The secret is not shown again. A change leaves what it is not about as it is.
	p.visit("/console/webhooks")
	row("active")
	if p.eval(fmt.Sprintf("document.documentElement.outerHTML.includes(%q)", secret)) == true {
		t.Error("the secret is shown again")
	}
	p.click("Edit")
	p.await("document.querySelector('#hook-url').value.endsWith('/token') && document.querySelector('#hook-secret').value === ''")
	p.fill("#hook-select", "room=lab")
	p.eval("document.querySelector('dialog input[value=photo]').click()")
	p.click("Save")
	row("room=lab")
	row("photo")
	for h, err := range apiclient.List[api.Webhook](t.Context(), n.Client, nil, "webhooks") {
		if err != nil || h.URL != receiver.URL+"/token" || h.Select != "room=lab" || strings.Join(h.Types, " ") != "online offline photo" {
			t.Errorf("%+v, %v", h, err)
		}
	}
	if p.eval("!!document.querySelector('[data-test=secret]')") == true {
		t.Error("a change made a secret")
	}
	p.click("Edit")
	p.click("Make a new secret")
	p.click("Save")
	p.await("document.querySelector('[data-test=secret] code')?.innerText.startsWith('whsec_')")
	if p.eval("document.querySelector('[data-test=secret] code').innerText") == secret {
		t.Error("the new secret is the old one")
	}

	p.eval("[...document.querySelectorAll('main button')].find((b) => b.textContent === 'Delete').focus()")
	p.do(chromedp.KeyEvent(kb.Enter))
	p.await("!!document.querySelector('dialog')")
	p.do(chromedp.KeyEvent(kb.Escape))
	p.await("!document.querySelector('dialog') && document.activeElement.textContent === 'Delete'")
	p.click("Delete")
	p.await("document.querySelector('dialog')?.innerText.includes('/token')")
	p.do(chromedp.KeyEvent(kb.Enter))
	p.shows("No webhooks yet.")
	for h := range apiclient.List[api.Webhook](t.Context(), n.Client, nil, "webhooks") {
		t.Errorf("%s is still there", h.ID)
	}
}

// A trace shows what a device and its node send each other as it happens, the newest first, also over another connection;
// a pause keeps its rows. Payloads are for administrators. It is read no more when its page is left.
func TestTracePage(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	front := before(t, n, func(http.ResponseWriter, *http.Request) bool { return false })
	const path = "/console/devices/" + first + "/trace"
	p := b.openAt(t, front.URL, n.Token(t), path)
	p.expect(404)
	p.click("Read one that runs")
	p.shows("is not traced")
	p.click("Show the messages themselves")
	p.eval("[...document.querySelectorAll('main button')].find((b) => b.textContent === 'Start a trace').focus()")
	p.do(chromedp.KeyEvent(kb.Enter))
	p.shows("The trace runs while this page is open. It ends at")
	if got := p.eval("document.activeElement.textContent"); got != "End the trace" {
		t.Errorf("the focus is on %q", got)
	}
	call := func(level int) {
		t.Helper()
		if _, err := n.Call(t.Context(), first, volume, apiclient.CallRequest{Arguments: json.RawMessage(fmt.Sprintf(`{"volume":%d}`, level))}); err != nil {
			t.Fatal(err)
		}
	}
	const rows = "[...document.querySelectorAll('[data-test=trace] li')].map((e) => e.innerText)"
	// shown waits for the message of a call.
	shown := func(level int) {
		t.Helper()
		p.await(fmt.Sprintf(rows+".some((r) => /to the device[^]*tools\\/call[^]*volume[^]{0,4}%d/.test(r))", level))
	}
	n.Await(t, "the stream is open: its first line", wait, func() bool { call(11); return p.eval(rows+".length > 0") == true })
	shown(11)
	call(12)
	shown(12)
	p.await(rows + ".some((r) => r.includes('from the device'))")
	p.await(rows + ".some((r) => r.startsWith('call') || /\\ncall/.test(r))")
	times := p.eval("[...document.querySelectorAll('[data-test=trace] time')].map((e) => e.dateTime)").([]any)
	if newest, oldest := times[0].(string), times[len(times)-1].(string); newest < oldest {
		t.Errorf("the first line is of %s, the last one of %s", newest, oldest)
	}

	p.click("Pause")
	p.await("[...document.querySelectorAll('main button')].some((b) => b.innerText.startsWith('Resume'))")
	kept := p.eval(rows + ".join()")
	call(13)
	p.await("/Resume \\([1-9]/.test(document.querySelector('main').innerText)")
	if got := p.eval(rows + ".join()"); got != kept {
		t.Error("the rows of a paused trace changed")
	}
	p.eval("[...document.querySelectorAll('main button')].find((b) => b.innerText.startsWith('Resume')).click()")
	shown(13)

	reads := p.sent("GET /v1/devices/" + first + "/trace")
	front.CloseClientConnections()
	n.Await(t, "it is read again", wait, func() bool { return p.sent("GET /v1/devices/"+first+"/trace") > reads })
	p.shows("lines may be missing here")
	call(14)
	shown(14)
	p.forgive() // connections that the test closed

	p.click("End the trace")
	p.shows("The trace has ended.")
	shown(14)
	if err := n.EndTrace(t.Context(), first); err == nil {
		t.Error("it goes on")
	}
	p.click("Start a trace")
	p.shows("It ends at")
	ended := func() (count int) {
		for e, err := range apiclient.List[api.AuditEntry](t.Context(), n.Client, apiclient.Query{"device": first}, "audit") {
			if err != nil {
				t.Fatal(err)
			}
			if e.Action == "trace_end" && strings.Contains(e.Detail, "its reader left") {
				count++
			}
		}
		return count
	}
	before := ended()
	p.click("Facts")
	n.Await(t, "nobody reads it", wait, func() bool { return ended() > before })

	made, err := n.CreateKey(t.Context(), api.NewKey{Name: "limited", Scopes: []string{"devices:read", "events:read"}})
	if err != nil {
		t.Fatal(err)
	}
	p = b.open(t, n, made.Token, path)
	p.expect(403)
	p.click("Read one that runs") // with payloads
	p.shows("payloads need the scope admin")
	if p.eval("document.querySelector('main').innerText.includes('messages themselves')") == true {
		t.Error("payloads are offered")
	}
	if made, err = n.CreateKey(t.Context(), api.NewKey{Name: "less", Scopes: []string{"devices:read"}}); err != nil {
		t.Fatal(err)
	}
	p = b.open(t, n, made.Token, path)
	p.expect(403)
	p.shows("lacks the scope events:read")
	if p.eval("document.querySelector('.tabs').innerText.includes('Trace')") == true {
		t.Error("the tab is there without its scope")
	}
}
