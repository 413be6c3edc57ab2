package browser

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto"
	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/heapprofiler"
	cdplog "github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	cdppage "github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"fleetd/internal/fleettest"
)

var programs fleettest.Programs

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "console")
	if err == nil {
		defer func() { _ = os.RemoveAll(dir) }() // nobody uses it any more
		programs, err = fleettest.Build(dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	status := m.Run()
	if chromium.end != nil {
		chromium.end()
	}
	return status
}

const (
	wait = 40 * time.Second // for what a page shows at last
	poll = 50 * time.Millisecond
)

// chromium is the browser of all tests, which the first one starts.
var chromium struct {
	sync.Once
	ctx context.Context
	end func()
	err error
}

// elsewhere is a name under which a browser reaches this machine, and which it counts neither as this machine nor as a
// secure context, like a node in a local network.
const elsewhere = "fleet.test"

// browser has a profile of its own: what its tabs store, they share, and nobody else sees.
type browser struct{ ctx context.Context }

// start opens a profile in Chromium. Tests without one are NOT RUN, which fails in CI.
func start(t *testing.T) *browser {
	t.Helper()
	program, err := exec.LookPath("chromium-headless-shell")
	if err != nil {
		t.Skip("NOT RUN: there is no chromium-headless-shell")
	}
	chromium.Do(func() {
		options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(program), chromedp.NoSandbox, chromedp.Flag("host-resolver-rules", "MAP *.test 127.0.0.1"))
		allocated, free := chromedp.NewExecAllocator(context.Background(), options...)
		ctx, end := chromedp.NewContext(allocated)
		chromium.ctx, chromium.end = ctx, func() { end(); free() }
		chromium.err = chromedp.Do(ctx, chromedp.Navigate("about:blank"))
	})
	if chromium.err != nil {
		t.Fatal(chromium.err)
	}
	ctx, end := chromedp.NewContext(chromium.ctx, chromedp.WithNewBrowserContext())
	t.Cleanup(end)
	if err := chromedp.Do(ctx, chromedp.Navigate("about:blank")); err != nil {
		t.Fatal(err)
	}
	return &browser{ctx}
}

// page is one tab. The test fails at its end if the page broke its policy, logged an error or had an uncaught one,
// asked another host, or was refused something that the test does not expect.
type page struct {
	t      *testing.T
	ctx    context.Context
	origin string

	mu        sync.Mutex
	faults    []string
	requests  []string // method and path of all requests
	resumed   []string // the ids after which streams began
	referrers []string
	expected  map[int64]bool
}

// open opens a tab on a path of the console, with a key if there is one.
func (b *browser) open(t *testing.T, n *fleettest.Node, key, path string) *page {
	t.Helper()
	return b.openAt(t, n.Info.API, key, path)
}

// openAt is open for another origin. scripts run at the start of each document.
func (b *browser) openAt(t *testing.T, origin, key, path string, scripts ...string) *page {
	t.Helper()
	ctx, cancel := chromedp.NewContext(b.ctx)
	p := &page{t: t, ctx: ctx, origin: origin, expected: map[int64]bool{}}
	t.Cleanup(func() {
		if t.Failed() {
			p.mu.Lock()
			t.Logf("the last requests of the page: %q", p.requests[max(0, len(p.requests)-10):])
			p.mu.Unlock()
			t.Logf("the page shows:\n%.1500s", p.text())
		}
		cancel()
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, fault := range p.faults {
			t.Errorf("page %s: %s", path, fault)
		}
	})
	p.do(chromedp.Navigate("about:blank"))
	if err := chromedp.Listen(ctx, p.note); err != nil {
		t.Fatal(err)
	}
	command(p, network.Enable, network.EnableParams{})
	command(p, cdplog.Enable, cdp.Empty{})
	for _, script := range scripts {
		p.before(script)
	}
	if key != "" { // storage belongs to an origin: it is written on a page of it
		p.do(chromedp.Navigate(origin + "/console/static/"))
		p.forgive() // that page is a 404
		p.eval(fmt.Sprintf("sessionStorage.setItem('fleetd.key', %q)", key))
	}
	p.do(chromedp.Navigate(origin + path))
	return p
}

// note keeps what must not happen, and the requests.
func (p *page) note(event any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fault := func(format string, args ...any) { p.faults = append(p.faults, fmt.Sprintf(format, args...)) }
	switch e := event.(type) {
	case *runtime.EventConsoleAPICalled:
		if e.Type == "error" || e.Type == "assert" {
			for _, arg := range e.Args {
				fault("console.%s: %s %s", e.Type, arg.Value, arg.Description)
			}
		}
	case *runtime.EventExceptionThrown:
		fault("uncaught: %s %s", e.ExceptionDetails.Text, description(e.ExceptionDetails))
	case *cdplog.EventEntryAdded:
		if e.Entry.Level == "error" && e.Entry.Source != "network" { // a refused policy is among them
			fault("log: %s %s", e.Entry.Text, e.Entry.URL)
		}
	case *network.EventRequestWillBeSent:
		at, err := url.Parse(e.Request.URL)
		if err != nil || at.Scheme != "blob" && at.Scheme != "data" && at.Scheme+"://"+at.Host != p.origin && e.Request.URL != "about:blank" { // data: a picture of the browser's own
			fault("request to %s", e.Request.URL)
		} else {
			p.requests = append(p.requests, e.Request.Method+" "+at.RequestURI())
			if from, ok := e.Request.Headers["Referer"]; ok && from != "" {
				p.referrers = append(p.referrers, fmt.Sprint(from))
			}
			if id, resumed := e.Request.Headers["Last-Event-ID"]; resumed {
				p.resumed = append(p.resumed, fmt.Sprint(id))
			}
		}
	case *network.EventResponseReceived:
		if e.Response.Status >= 400 && !p.expected[e.Response.Status] && !absent(e.Response.URL) {
			fault("%d from %s", e.Response.Status, e.Response.URL)
		}
	}
}

func description(d *runtime.ExceptionDetails) string {
	if d.Exception == nil {
		return ""
	}
	return d.Exception.Description
}

// absent reports whether a browser requests something that no page names.
func absent(address string) bool { return strings.HasSuffix(address, "/favicon.ico") }

// expect names the refusals that a test provokes.
func (p *page) expect(statuses ...int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, status := range statuses {
		p.expected[status] = true
	}
}

// sent returns how many requests so far begin with a method and path.
func (p *page) sent(prefix string) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, request := range p.requests {
		if strings.HasPrefix(request, prefix) {
			n++
		}
	}
	return n
}

func (p *page) do(actions ...chromedp.Action[chromedp.Void]) {
	p.t.Helper()
	if err := chromedp.Do(p.ctx, actions...); err != nil {
		p.t.Fatal(err)
	}
}

func command[P, R any](p *page, c cdp.Command[P, R], params P) {
	p.t.Helper()
	if _, err := chromedp.Call(p.ctx, c, params); err != nil {
		p.t.Fatal(err)
	}
}

// eval runs a script of the page and waits for its promise; what it returns must be JSON.
func (p *page) eval(script string) any {
	p.t.Helper()
	value, err := p.tryEval(script)
	if err != nil {
		p.t.Fatal(err)
	}
	return value
}

// tryEval is eval with an error, which is errLeft if the page left the document while the script ran.
func (p *page) tryEval(script string) (value any, err error) {
	result, err := chromedp.Run(p.ctx, chromedp.Evaluate[json.RawMessage]("Promise.resolve("+script+").then((v) => JSON.stringify(v ?? null))", chromedp.EvalAwaitPromise))
	var of *cdproto.Error
	switch {
	case errors.As(err, &of) && of.Code == serverError:
		return nil, fmt.Errorf("%s: %w: %w", script, errLeft, err)
	case err != nil:
		return nil, fmt.Errorf("%s: %w", script, err)
	}
	var text string
	if err := errors.Join(json.Unmarshal(result, &text), json.Unmarshal([]byte(text), &value)); err != nil {
		return nil, fmt.Errorf("%s: %s: %w", script, result, err)
	}
	return value, nil
}

var errLeft = errors.New("the page left the document")

// serverError is the code with which a browser answers that a script's document is gone, in several wordings.
const serverError = -32000

// run runs a script that returns nothing.
func (p *page) run(script string) {
	p.t.Helper()
	if _, err := chromedp.Run(p.ctx, chromedp.Evaluate[any]("(() => {"+script+"})()")); err != nil {
		p.t.Fatal(err)
	}
}

// forgive forgets what was noted so far: the test provoked it.
func (p *page) forgive() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults = nil
}

// text is what the page shows.
func (p *page) text() string {
	text, _ := chromedp.Run(p.ctx, chromedp.Evaluate[string]("document.body.innerText")) // for a log: empty if the page is gone
	return text
}

// await waits until a script is true. Between two documents there is no body, and nothing is.
func (p *page) await(script string) {
	p.t.Helper()
	for deadline := time.Now().Add(wait); ; time.Sleep(poll) {
		value, err := p.tryEval("document.body && (" + script + ")")
		switch {
		case err != nil && !errors.Is(err, errLeft):
			p.t.Fatal(err)
		case value == true:
			return
		case time.Now().After(deadline):
			p.t.Fatalf("never true: %s", script)
		}
	}
}

// awaitThat waits for something that the page itself does not show.
func (p *page) awaitThat(what string, happened func() bool) {
	p.t.Helper()
	for deadline := time.Now().Add(wait); !happened(); time.Sleep(poll) {
		if time.Now().After(deadline) {
			p.t.Fatalf("never: %s", what)
		}
	}
}

// shows waits until the page contains a text.
func (p *page) shows(text string) {
	p.t.Helper()
	p.await(fmt.Sprintf("document.body.innerText.includes(%q)", text))
}

// live waits until the page follows the fleet.
func (p *page) live() {
	p.t.Helper()
	p.await("document.querySelector('.bar .live')?.className === 'live live'")
}

// number is a script's result as a number.
func (p *page) number(script string) int {
	p.t.Helper()
	n, ok := p.eval(script).(float64)
	if !ok {
		p.t.Fatalf("%s is not a number", script)
	}
	return int(n)
}

// click presses the first button, link or label with a text, as a script can: it must be there and enabled.
func (p *page) click(text string) {
	p.t.Helper()
	find := fmt.Sprintf(`[...document.querySelectorAll('button, a, summary, label')].find((e) => e.checkVisibility() && !e.disabled && e.textContent.trim() === %q)`, text)
	p.await("!!" + find)
	p.eval(find + ".click()")
}

// fill writes into a field as a person does, with keys.
func (p *page) fill(selector, text string) {
	p.t.Helper()
	p.await(fmt.Sprintf("!!document.querySelector(%q)", selector))
	p.eval(fmt.Sprintf("(document.querySelector(%q).focus(), document.querySelector(%q).select())", selector, selector))
	p.do(chromedp.KeyEvent(text))
}

// press presses keys, one after the other.
func (p *page) press(keys string) {
	p.t.Helper()
	p.do(chromedp.KeyEvent(keys))
}

// tab goes on with the keyboard until the focus is visibly on something with this text.
func (p *page) tab(text string) {
	p.t.Helper()
	for range 80 {
		if strings.Contains(fmt.Sprint(p.eval("!document.activeElement.matches('a, button, input, select, summary') ? '' : (document.activeElement.innerText ?? '') + (document.activeElement.labels?.[0]?.innerText ?? '')")), text) {
			if p.eval("getComputedStyle(document.activeElement).outlineStyle") == "none" {
				p.t.Errorf("the focus on %q is not visible", text)
			}
			return
		}
		p.press("\t")
	}
	p.t.Fatalf("the keyboard does not reach %q", text)
}

// emulate sets the size of the window and the scheme of colours.
func (p *page) emulate(width, height int64, scheme string) {
	p.t.Helper()
	p.do(chromedp.EmulateViewport(width, height))
	command(p, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}})
}

// media emulates a feature of the medium alone.
func (p *page) media(name, value string) {
	p.t.Helper()
	command(p, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: name, Value: value}}})
}

// before runs a script at the start of each document that is loaded from now on.
func (p *page) before(script string) {
	p.t.Helper()
	command(p, cdppage.AddScriptToEvaluateOnNewDocument, cdppage.AddScriptToEvaluateOnNewDocumentParams{Source: script})
}

// heap is how many bytes of JavaScript are in use.
func (p *page) heap() int {
	p.t.Helper()
	command(p, heapprofiler.CollectGarbage, cdp.Empty{})
	usage, err := chromedp.Call(p.ctx, runtime.GetHeapUsage, cdp.Empty{})
	if err != nil {
		p.t.Fatal(err)
	}
	return int(usage.UsedSize)
}

// print shows the page as it is printed.
func (p *page) print() {
	p.t.Helper()
	command(p, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Media: "print"})
}

// visit loads a path, and waits for its title.
func (p *page) visit(path string) {
	p.t.Helper()
	p.do(chromedp.Navigate(p.origin + path))
	p.await("document.querySelectorAll('h1').length === 1 && document.title.endsWith('fleetd') && document.title !== 'fleetd'")
}
