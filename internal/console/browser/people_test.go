package browser

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/accessibility"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

// controls are the roles of what a person uses, which must have names.
var controls = []string{"button", "link", "textbox", "searchbox", "combobox", "checkbox", "radio", "slider", "spinbutton", "DisclosureTriangle", "listbox", "switch"}

// What a screen reader reads of each page: one heading of level 1, the landmarks, a name for each control, and the columns
// of tables.
func TestScreenReader(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 2)
	p := b.open(t, n, n.Token(t), "/console/")
	p.expect(404)
	p.emulate(1280, 800, "light")
	seen := map[string]int{}
	for _, path := range paths {
		p.visit("/console/" + path)
		p.await("!document.querySelector('[role=status].notice') && document.querySelector('.bar .live')?.className === 'live live'")
		tree, err := chromedp.Call(p.ctx, accessibility.GetFullAXTree, accessibility.GetFullAXTreeParams{})
		if err != nil {
			t.Fatal(err)
		}
		text := func(v *accessibility.Value) (s string) {
			if v != nil {
				_ = json.Unmarshal([]byte(v.Value), &s) // other values are not text
			}
			return s
		}
		roles, headings := map[string]int{}, 0
		for _, node := range tree.Nodes {
			role := text(node.Role)
			if node.Ignored || role == "" {
				continue
			}
			roles[role]++
			seen[role]++
			if name := strings.TrimSpace(text(node.Name)); name == "" && slices.Contains(controls, role) {
				t.Errorf("%s: a %s has no name", path, role)
			}
			if role == "heading" {
				for _, property := range node.Properties {
					if property.Name == "level" && property.Value != nil && string(property.Value.Value) == "1" {
						headings++
					}
				}
			}
		}
		if headings != 1 {
			t.Errorf("%s has %d headings of level 1", path, headings)
		}
		for _, landmark := range []string{"main", "navigation", "search"} {
			if roles[landmark] == 0 {
				t.Errorf("%s has no landmark %s", path, landmark)
			}
		}
		if roles["main"] != 1 {
			t.Errorf("%s has %d main parts", path, roles["main"])
		}
		if roles["table"] > 0 && roles["columnheader"] < roles["table"] {
			t.Errorf("%s has %d tables and %d headers of columns", path, roles["table"], roles["columnheader"])
		}
	}
	for _, role := range []string{"table", "columnheader", "button", "link", "textbox", "combobox", "checkbox"} {
		if seen[role] == 0 {
			t.Errorf("no page has a %s", role)
		}
	}
}

// Every page fits a small phone with text of 150 %, and a window at twice the size.
func TestLargeText(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 2)
	p := b.open(t, n, n.Token(t), "/console/")
	p.expect(404)
	for _, window := range []struct {
		width int64
		text  string
	}{{320, "150%"}, {640, "100%"}} { // 1280 at 200 % are 640
		p.emulate(window.width, 640, "light")
		for _, path := range paths {
			p.visit("/console/" + path)
			p.await("!document.querySelector('[role=status].notice')")
			p.eval(fmt.Sprintf("document.documentElement.style.setProperty('font-size', %q)", window.text))
			if width := p.number("document.documentElement.scrollWidth"); width > int(window.width) {
				t.Errorf("%s is %d wide in a window of %d with text of %s", path, width, window.width, window.text)
			}
		}
	}
}

// The keyboard skips the navigation, leaves the search, and goes from a confirmation to the explanation of its call.
func TestKeyboardSkips(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 1, "--profile", "robot")
	if _, err := n.SetPolicy(t.Context(), json.RawMessage(`{"rules":[{"name":"careful","tools":["self.test.fail"],"action":"confirm"}]}`), 0); err != nil {
		t.Fatal(err)
	}
	// The keys are there with what they lead to, not with an effect of Preact, which runs a frame or 35 ms later: a person's first key comes
	// before it on a busy machine.
	const late = "{ const real = setTimeout; window.requestAnimationFrame = () => 0; window.setTimeout = (f, ms, ...args) => real(f, ms === 35 ? 3000 : ms, ...args); }"
	p := b.openAt(t, n.Info.API, n.Token(t), "/console/devices/"+first+"/tools?user=1&tool=self.test.fail", late)
	p.expect(428)
	p.await("document.title.endsWith('fleetd') && !!document.querySelector('.skip')")
	p.press("\t")
	p.await("document.activeElement.className === 'skip' && document.activeElement.getBoundingClientRect().left >= 0")
	p.press("\r")
	p.await("document.activeElement.tagName === 'H1'")
	p.press("/")
	p.await("document.activeElement.type === 'search'")
	p.do(chromedp.KeyEvent(kb.Escape))
	p.await("document.activeElement === document.body")
	p.await("[...document.querySelectorAll('button')].some((b) => b.textContent === 'Call')")
	p.tab("Call")
	p.press("\r")
	p.await("document.querySelector('dialog')?.innerText.includes('careful') && document.activeElement.textContent === 'Confirm'")
	p.press("\r")
	p.await("document.querySelector('[data-test=result]')?.innerText.includes('the tool failed')")
	p.await("document.activeElement.textContent === 'Call'") // not somewhere at the top
	p.tab("why?")
	p.press("\r")
	p.await("location.pathname.startsWith('/console/calls/')")
	p.await("document.querySelector('[data-test=explain] code')?.textContent === 'device_error'")
}
