package browser

import (
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/fleettest"
)

// addImages adds images for the boards of profiles; without a version they are those that the devices came with.
func addImages(t *testing.T, n *fleettest.Node, profiles, version string) {
	t.Helper()
	dir := t.TempDir()
	if out, err := exec.CommandContext(t.Context(), programs.Simulator, "--images", dir, "--profile", profiles, "--image-version", version, "--ota", n.Info.OTA).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.bin"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no images: %v", err)
	}
	if _, errs, status := n.Command(t, append([]string{"firmware", "add"}, files...)...); status != 0 {
		t.Fatal(errs)
	}
}

// A release is rolled out from its page, which first says what it would do; its jobs show what each device does, and are taken
// back once the former images are there.
func TestRollout(t *testing.T) {
	t.Parallel()
	b := start(t)
	const profiles, old = "fw-2.4,robot", "fw-1.7"
	n := fleet(t, 3, "--profile", profiles, "--transport", "mqtt")
	programs.Simulate(t, n.Info.OTA, "--devices", "1", "--mac-base", "02:f1:ee:00:00:10", "--profile", old, "--transport", "mqtt", "--quiet")
	n.AwaitReady(t, 4)
	n.AwaitStored(t)
	addImages(t, n, profiles+","+old, "2.9.0")
	p := b.open(t, n, n.Token(t), "/console/firmware")
	p.expect(409)
	p.emulate(1280, 800, "light")
	p.click("Roll out")
	p.await("document.querySelector('#roll-image')?.value === 'xiaozhi@2.9.0' && document.querySelector('#roll-select').value === 'device=*'")
	p.fill("#roll-stages", "100%")
	p.fill("#roll-stay", "5s")
	p.fill("#roll-note", "spring\t")
	p.click("Show what it would do")
	const plan = "document.querySelector('[data-test=plan]')?.innerText"
	for _, text := range []string{"Firmware 2.9.0 for lichuang-dev", "Firmware 2.9.0 for otto-robot", "1 device could not get back what it runs now", "2 devices could not get back what they run now", "100%"} {
		p.await(fmt.Sprintf("%s?.includes(%q)", plan, text))
	}
	// What the check found of the oldest device may be allowed by name.
	allow := func(devices int) {
		t.Helper()
		p.run("document.querySelectorAll('[data-test=allow] input').forEach((e) => e.click())")
		p.await("!document.querySelector('[data-test=plan]')")
		p.click("Show what it would do")
		p.await(fmt.Sprintf("[...document.querySelectorAll('[data-test=plan] button')].some((e) => e.innerText === 'Start on %d devices')", devices))
	}
	p.await("document.querySelector('[data-test=allow]')?.innerText.includes('runs firmware below v1.8.0 (1)')")
	allow(4)
	for _, text := range []string{"2 of 2 devices could get it; 2 connected now", "1 of 1 device could get it; 1 connected now"} {
		p.await(fmt.Sprintf("%s?.includes(%q)", plan, text))
	}
	allow(3)
	if risks := p.number("document.querySelectorAll('[data-test=risk]').length"); risks != 2 {
		t.Errorf("%d of 2 images have a risk", risks)
	}
	for _, width := range []int64{360, 1280} {
		p.emulate(width, 740, "light")
		if wide := p.number("document.documentElement.scrollWidth"); wide > int(width) {
			t.Errorf("the page is %d px wide in a window of %d", wide, width)
		}
		for _, violation := range p.violations() {
			t.Errorf("at %d: %s", width, violation)
		}
		p.forgive() // axe itself changes styles
	}
	overview := b.open(t, n, n.Token(t), "/console/")
	overview.live()
	p.click("Start on 3 devices")
	p.shows("The jobs of one rollout.")
	overview.await(attention + ".some((x) => x.startsWith('▶ Firmware 2.9.0 for lichuang-dev is being rolled out: '))")
	p.await("document.querySelectorAll('main tbody tr').length === 2")
	p.click("Firmware 2.9.0 for lichuang-dev")
	p.await("document.querySelector('h1').innerText === 'Firmware 2.9.0 for lichuang-dev'")
	p.shows("spring")
	p.await("document.querySelector('[data-test=running]')?.innerText.includes('runs the image; it must stay up')")
	p.await("document.querySelector('.head').innerText.includes('done')")
	p.await("!document.querySelector('[data-test=running]')")
	p.click("Firmware 2.9.0 for otto-robot") // of the same rollout
	p.await("document.querySelector('h1').innerText === 'Firmware 2.9.0 for otto-robot' && document.querySelector('.head').innerText.includes('done')")

	takeBack := func() {
		t.Helper()
		p.click("Take back")
		p.await("document.querySelector('dialog')?.innerText.includes('gets back what it ran before')")
		p.run("document.querySelector('dialog button.danger').click()")
	}
	takeBack()
	p.await("document.querySelector('dialog .problem')?.innerText.includes('not stored')")
	p.run("[...document.querySelectorAll('dialog button')].find((e) => e.innerText === 'Back').click()")
	addImages(t, n, profiles, "")
	takeBack()
	p.await("!document.querySelector('dialog') && document.querySelectorAll('main [role=status] a').length === 1")
	p.run("document.querySelector('main [role=status] a').click()")
	p.await("document.querySelector('h1').innerText.startsWith('Back to firmware') && document.querySelector('.head').innerText.includes('done')")
	if takes := p.eval("[...document.querySelectorAll('button')].some((e) => e.innerText === 'Take back')"); takes != false {
		t.Error("a rollback can be taken back")
	}

	// Who may only look is not offered what it may not do.
	reader, err := n.CreateKey(t.Context(), api.NewKey{Name: "reader", Scopes: []string{"firmware:read", "jobs:read", "devices:read", "events:read"}})
	if err != nil {
		t.Fatal(err)
	}
	other := b.open(t, n, reader.Token, "/console/firmware")
	other.shows("2.9.0")
	if links := other.number("[...document.querySelectorAll('main a')].filter((e) => e.innerText === 'Roll out').length"); links != 0 {
		t.Errorf("%d ways to a rollout for a key that may not start one", links)
	}
	other.visit("/console/firmware/roll")
	other.shows("lacks the scope firmware")
}

// The overview says which device halted a rollout and how, and the device says why it gets no further firmware.
func TestRolloutHalts(t *testing.T) {
	t.Parallel()
	b := start(t)
	n := fleet(t, 2, "--profile", "fw-2.4", "--transport", "mqtt", "--fault", "crash-boot")
	n.AwaitStored(t)
	addImages(t, n, "fw-2.4", "2.9.0")
	name := "Hall lamp"
	for i := range 2 {
		if _, err := n.Patch(t.Context(), fmt.Sprintf("02:f1:ee:00:00:%02x", i), api.DeviceEdit{Name: &name}, 0); err != nil {
			t.Fatal(err)
		}
	}
	var lifted atomic.Bool
	front := before(t, n, func(w http.ResponseWriter, r *http.Request) bool { // a bar takes two flashes, ten minutes apart
		switch {
		case r.Method == http.MethodDelete:
			lifted.Store(r.URL.Path == "/v1/devices/"+first+"/firmware/bar")
			w.WriteHeader(http.StatusNoContent)
			return true
		case r.URL.Path == "/v1/devices/"+first+"/firmware" && !lifted.Load():
			return respond(t, w, http.StatusOK, api.DeviceFirmware{Device: first, Bar: "it came back twice", Last: &api.Task{Job: "j1", State: "running", Firmware: &api.TaskFirmware{Phase: "loading", Bytes: 450_000, Size: 1_000_000}}})
		case r.URL.Path == "/v1/devices/"+first+"/firmware":
			return respond(t, w, http.StatusOK, api.DeviceFirmware{Device: first, Last: &api.Task{Job: "j1", State: "ended", Outcome: "failed", Code: "rolled_back", EndedAt: api.At(time.Now())}})
		}
		return false
	})
	p := b.openAt(t, front.URL, n.Token(t), "/console/firmware/roll?image=2.9.0")
	p.click("Show what it would do")
	p.click("Start on 2 devices")
	p.await("document.querySelector('[data-test=needs]')?.innerText.includes('The job was halted: a device did not run the image, and its rule stops at 1.')")
	p.shows("came back with its former image")
	p.emulate(1280, 800, "light")
	p.visit("/console/")
	p.await(attention + ".includes('✕ Firmware 2.9.0 for lichuang-dev was halted: Hall lamp came back with its former image Look')")
	p.visit("/console/devices/" + first)
	p.shows("The device gets no firmware for now: it came back twice")
	p.shows("Fetches the image: 45 %")
	if wide := p.eval("[...document.querySelectorAll('[data-test=device-firmware], [data-test=device-firmware] *')].some((e) => e.getBoundingClientRect().right > innerWidth)"); wide != false {
		t.Error("why the device gets no firmware is cut")
	}
	for _, violation := range p.violations() {
		t.Error(violation)
	}
	p.forgive() // axe itself changes styles
	p.click("Lift the bar")
	p.await("!!document.querySelector('dialog')")
	p.run("document.querySelector('dialog button.primary').click()")
	p.await("!document.querySelector('dialog') && !document.body.innerText.includes('it came back twice')")
	p.shows("The last rollout: failed, came back with its former image")
}
