package browser

import (
	"fmt"
	"strings"
	"testing"
)

// A control calls when it is released, once for all values that were chosen meanwhile, and shows what the device answered. It reads
// nothing by itself.
func TestControls(t *testing.T) {
	t.Parallel()
	b := start(t)
	n := fleet(t, 2)
	p := b.open(t, n, n.Token(t), "/console/devices/"+first)
	p.emulate(360, 740, "light")
	p.shows("Controls")
	const slider = "document.querySelector('.control input[type=range]')"
	p.await("!!" + slider)
	calls := fmt.Sprintf("POST /v1/devices/%s/tools/", first)
	if made := p.sent(calls); made != 0 {
		t.Errorf("%d calls were made by opening the page", made)
	}
	// set moves the slider to these values, at once, and releases it at each.
	set := func(released bool, values ...int) {
		t.Helper()
		p.eval(fmt.Sprintf("((e, values) => { for (const v of values) { Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(e, v);"+
			" e.dispatchEvent(new Event('input', {bubbles: true})); if (%t) e.dispatchEvent(new Event('change', {bubbles: true})); } })(%s, %s)", released, slider, strings.ReplaceAll(fmt.Sprint(values), " ", ",")))
	}
	set(false, 20)
	if made := p.sent(calls); made != 0 {
		t.Errorf("%d calls were made before it was released", made)
	}
	set(true, 30, 40, 50, 60, 70)
	p.await("document.querySelector('.controls [role=status]')?.innerText.includes('volume 70, the device answered true')")
	if made := p.sent(calls); made != 2 {
		t.Errorf("%d calls for five values in a moment, want those of the first and the last", made)
	}
	p.click("Ask the device how it is set")
	p.await("[...document.querySelectorAll('.control .num')].some((e) => e.innerText === '70')")
	p.await("[...document.querySelectorAll('.control')].find((e) => e.innerText.includes('theme')).querySelector('[aria-pressed=true]') !== null")
}
