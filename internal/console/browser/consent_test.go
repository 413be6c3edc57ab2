package browser

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/target"
	"github.com/chromedp/chromedp"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/fleettest"
)

// consentCode makes a code as the console does.
func consentCode(t *testing.T, n *fleettest.Node) string {
	t.Helper()
	code, err := apiclient.Send[api.ConsoleCode](t.Context(), n.Client, apiclient.Request{Method: http.MethodPost, Path: []string{"console", "codes"}, Body: api.NewConsoleCode{For: "consent"}})
	if err != nil {
		t.Fatal(err)
	}
	return code.Code
}

// asksFor registers an application, and returns the path at which it asks, for each of its redirects.
func asksFor(t *testing.T, n *fleettest.Node, redirects ...string) (paths []string) {
	t.Helper()
	body, err := json.Marshal(map[string]any{"client_name": "App", "redirect_uris": redirects})
	if err != nil {
		t.Fatal(err)
	}
	answer, err := http.Post(n.Info.API+"/oauth/register", "application/json", strings.NewReader(string(body)))
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	var made struct {
		ID string `json:"client_id"`
	}
	if err := json.NewDecoder(answer.Body).Decode(&made); err != nil || made.ID == "" {
		t.Fatal(answer.Status, err)
	}
	sum := sha256.Sum256([]byte("verifier"))
	for _, redirect := range redirects {
		paths = append(paths, "/oauth/authorize?"+url.Values{"response_type": {"code"}, "client_id": {made.ID}, "redirect_uri": {redirect}, "state": {"s"},
			"code_challenge": {base64.RawURLEncoding.EncodeToString(sum[:])}, "code_challenge_method": {"S256"}}.Encode())
	}
	return paths
}

// goes are the addresses to which the browser goes, and those that answers send it to.
type goes struct {
	sync.Mutex
	to []string
}

func (g *goes) note(event any) {
	g.Lock()
	defer g.Unlock()
	switch e := event.(type) {
	case *network.EventRequestWillBeSent:
		g.to = append(g.to, e.Request.URL)
	case *network.EventResponseReceivedExtraInfo:
		for name, value := range e.Headers {
			if strings.EqualFold(name, "Location") {
				g.to = append(g.to, "Location: "+fmt.Sprint(value))
			}
		}
	}
}

func (g *goes) any(prefix string) bool {
	g.Lock()
	defer g.Unlock()
	for _, to := range g.to {
		if strings.HasPrefix(to, prefix) {
			return true
		}
	}
	return false
}

// A person allows an application on the page of fleetd, by the keyboard alone, and the browser goes on: to https, to a program on this
// machine, to a private scheme; in the same tab and from a window that the application has opened.
func TestConsent(t *testing.T) {
	t.Parallel()
	b := start(t)
	n := programs.Start(t, "--public-api-url", "https://fleet.example.org", "--oauth-cimd=false")
	app := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		if r.URL.Path == "/callback" {
			_, _ = fmt.Fprint(w, `<h1>Back</h1><script>opener?.postMessage(location.search, "*")</script>`) // fails only if the browser is gone
			return
		}
		_, _ = fmt.Fprint(w, `<h1>App</h1><button autofocus onclick="window.open(new URLSearchParams(location.search).get('to'))">Connect</button><script>onmessage = (e) => { window.got = e.data }</script>`)
	}))
	defer app.Close()
	const secure, private = "https://app.test/callback?kept=1", "com.example.app:/callback"
	paths := asksFor(t, n, app.URL+"/callback", secure, private)

	p := b.openAt(t, n.Info.API, "", paths[0])
	for _, scheme := range []string{"light", "dark"} {
		p.emulate(360, 640, scheme)
		if width := p.number("document.documentElement.scrollWidth"); width > 360 {
			t.Errorf("the page is %d wide in a window of 360", width)
		}
		for _, violation := range p.violations() {
			t.Errorf("%s: %s", scheme, violation)
		}
	}
	p.forgive() // axe itself changes styles
	p.shows("127.0.0.1 (unverified)")
	p.shows("a program on the machine of this browser")
	p.expect(401)
	p.press("wrong\r")
	p.await("document.querySelector('[role=alert]')?.innerText.includes('not valid')")
	p.await("document.querySelector('input[type=password]').value === '' && document.activeElement.name === 'secret'")

	for i, redirect := range []string{app.URL + "/callback?code=", secure + "&code=", private + "?code="} {
		p := b.openAt(t, n.Info.API, "", paths[i])
		var seen goes
		if err := chromedp.Listen(p.ctx, seen.note); err != nil {
			t.Fatal(err)
		}
		p.await("document.activeElement.name === 'secret'")
		p.press(consentCode(t, n) + "\r")
		p.awaitThat("the browser goes to "+redirect, func() bool { return seen.any(redirect) || i == 2 && seen.any("Location: "+redirect) })
		if i == 0 {
			p.await("document.querySelector('h1').innerText === 'Back' && location.search.includes('iss=https%3A%2F%2Ffleet.example.org')")
		}
		p.forgive() // it left the console, and nobody listens there
	}

	opener := b.openAt(t, app.URL, "", "/?to="+url.QueryEscape(n.Info.API+paths[0]))
	opened := chromedp.WaitNewTarget(opener.ctx, func(info *target.Info) bool {
		return strings.Contains(info.URL, "/oauth/authorize") || info.OpenerID != ""
	})
	opener.await("document.activeElement.innerText === 'Connect'")
	opener.press("\r")
	ctx, cancel := chromedp.NewContext(opener.ctx, chromedp.WithTargetID(<-opened))
	defer cancel()
	popup := &page{t: t, ctx: ctx, origin: n.Info.API, expected: map[int64]bool{}}
	popup.await("document.activeElement.name === 'secret'")
	popup.press(consentCode(t, n) + "\r")
	opener.await("window.got?.includes('code=')")
	opener.forgive()
}

// The console makes a code for the consent to an application, lists what was allowed in words, and ends it with one click.
func TestGrants(t *testing.T) {
	t.Parallel()
	b := start(t)
	n := programs.Start(t, "--public-api-url", "https://fleet.example.org", "--oauth-cimd=false")
	p := b.open(t, n, n.Token(t), "/console/access")
	p.click("Allow an application")
	p.shows("It works once, within 5 minutes")
	code := fmt.Sprint(p.eval("document.querySelector('dialog .copyable code').innerText"))
	query := asksFor(t, n, "https://app.test/callback")[0]
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	post := func(path string, form url.Values) *http.Response {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, n.Info.API+path, strings.NewReader(form.Encode()))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		r.Header.Set("Sec-Fetch-Site", "same-origin")
		answer, err := client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		return answer
	}
	to, err := post(query, url.Values{"decision": {"allow"}, "secret": {code}, "scope": {"devices:read", "tools:call"}, "devices": {"room=lab"}}).Location()
	if err != nil {
		t.Fatal(err)
	}
	asked, err := url.ParseQuery(strings.SplitN(query, "?", 2)[1])
	if err != nil {
		t.Fatal(err)
	}
	if answer := post("/oauth/token", url.Values{"grant_type": {"authorization_code"}, "code": {to.Query().Get("code")}, "client_id": {asked.Get("client_id")}, "redirect_uri": {"https://app.test/callback"}, "code_verifier": {"verifier"}}); answer.StatusCode != 200 {
		t.Fatal(answer.Status)
	}
	p.visit("/console/access")
	p.emulate(1280, 800, "light")
	const rows = "[...document.querySelectorAll('main tbody tr')].map((e) => e.innerText.replace(/\\s+/g, ' '))"
	p.await(rows + ".some((x) => /^app.test unverified, calls itself “App” .*See devices, call tools; only room=lab.* allowed by admin token .*127.0.0.1/.test(x))")
	p.click("End")
	p.await("!document.querySelector('main tbody button') && " + rows + ".some((x) => /^app.test .*revoked/i.test(x))")
}
