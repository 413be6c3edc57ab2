package browser

import (
	"fmt"
	"testing"
)

// A control calls when it is released, once for all values that were chosen meanwhile, and shows what the device answered. It reads
// nothing by itself.
func TestControls(t *testing.T) {
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
	set := func(value string, released bool) {
		events := "e.dispatchEvent(new Event('input', {bubbles: true}));"
		if released {
			events += "e.dispatchEvent(new Event('change', {bubbles: true}));"
		}
		p.eval("((e) => { Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(e, " + value + "); " + events + " })(" + slider + ")")
	}
	set("20", false)
	if made := p.sent(calls); made != 0 {
		t.Errorf("%d calls were made before it was released", made)
	}
	for _, value := range []string{"30", "40", "50", "60", "70"} {
		set(value, true)
	}
	p.await("document.querySelector('.controls [role=status]')?.innerText.includes('volume 70, the device answered true')")
	if made := p.sent(calls); made < 1 || made > 3 {
		t.Errorf("%d calls for five values in a moment, of which the first and the last count", made)
	}
	p.click("Ask the device how it is set")
	p.await("[...document.querySelectorAll('.control .num')].some((e) => e.innerText === '70')")
	p.await("[...document.querySelectorAll('.control')].find((e) => e.innerText.includes('theme')).querySelector('[aria-pressed=true]') !== null")
}
