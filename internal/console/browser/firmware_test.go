package browser

import (
	"crypto/ed25519"
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/fleettest"
	"fleetd/simulator/firmware"
)

// choose puts a file into the field of the page, as a person does.
func (p *page) choose(name string, content []byte) {
	p.t.Helper()
	p.run(fmt.Sprintf(`{
		const files = new DataTransfer();
		files.items.add(new File([Uint8Array.from(atob(%q), (c) => c.charCodeAt(0))], %q));
		const field = document.querySelector("#firmware-file");
		field.files = files.files;
		field.dispatchEvent(new Event("change", { bubbles: true }));
	}`, base64.StdEncoding.EncodeToString(content), name))
}

// runs makes a check of a device that nobody simulates, which runs this image, and waits until it is written: two that are written at once are one.
func runs(t *testing.T, n *fleettest.Node, version, elf string) {
	t.Helper()
	const stranger = "02:00:00:00:00:99"
	n.CheckIn(t, stranger, fmt.Sprintf(`{"flash_size":16777216,"application":{"name":"xiaozhi","version":%q,"elf_sha256":%q},"board":{"name":"lichuang-dev"}}`, version, elf))
	n.Await(t, "the check is written", wait, func() bool {
		ran, err := apiclient.Get[api.DeviceFirmware](t.Context(), n.Client, nil, "devices", stranger, "firmware")
		return err == nil && ran.ELF == elf
	})
}

// A file is read before it is kept; a bad one says everything that is wrong with it. A check says who could get an image, and why
// others could not.
func TestFirmwarePage(t *testing.T) {
	t.Parallel()
	b := start(t)
	n := fleet(t, 3, "--profile", "fw-2.4,fw-2.1,fw-1.7")
	p := b.open(t, n, n.Token(t), "/console/firmware")
	p.emulate(1280, 800, "light")
	p.shows("There are no images yet.")
	p.shows("2.4.2")
	p.expect(422)
	p.choose("page.html", []byte("<html>not an image</html>"))
	p.click("Read it")
	p.shows("image_invalid")
	if kept := p.eval("[...document.querySelectorAll('button')].some((b) => b.innerText === 'Keep its images')"); kept != false {
		t.Error("a bad file can be kept")
	}
	profiles, err := firmware.ParseProfiles("fw-2.4")
	if err != nil {
		t.Fatal(err)
	}
	_, release, err := profiles[0].Release("2.5.0", n.Info.OTA)
	if err != nil {
		t.Fatal(err)
	}
	p.choose("v2.5.0_lichuang-dev.zip", release)
	p.click("Read it")
	p.shows("It has an image that devices can run.")
	p.shows("There are no images yet.")
	p.click("Keep its images")
	p.await("document.querySelector('[data-test=images] tbody')?.innerText.includes('xiaozhi@2.5.0')")
	p.fill("#check-image", "2.5.0")
	p.run("document.querySelector('[data-test=check] form').requestSubmit()")
	p.await("/1 must wait/.test(document.querySelector('[data-test=counts]')?.innerText) && /2 cannot get it/.test(document.querySelector('[data-test=counts]').innerText)")
	p.await("document.querySelectorAll('[data-test=check] tbody tr').length === 3")
	p.shows("esp-box-3")
	p.emulate(360, 740, "dark")
	if wide := p.number("document.documentElement.scrollWidth"); wide > 360 {
		t.Errorf("the page is %d px wide on a phone", wide)
	}
	p.emulate(1280, 800, "light")
	kept, err := apiclient.Get[api.List[api.FirmwareImage]](t.Context(), n.Client, nil, "firmware")
	if err != nil || len(kept.Items) != 1 {
		t.Fatalf("%+v, error %v", kept, err)
	}
	runs(t, n, "2.5.0", kept.Items[0].ELF)
	runs(t, n, "2.6.0", strings.Repeat("c", 64)) // no device runs the image now, and one may want it back
	p.expect(409)
	p.click("Delete")
	const confirm = "[...document.querySelectorAll('dialog button')].find((b) => b.innerText === 'Delete').click()"
	p.run(confirm)
	p.shows("lose their way back: 1")
	p.shows("all the same?")
	p.run(confirm)
	p.shows("There are no images yet.")
}

// A fleet that wants signatures gets one from the page, too, which asks for it when the node does.
func TestSignedUpload(t *testing.T) {
	t.Parallel()
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	const algorithm = "Ed" + "12345678" // and the id of the key
	keys := filepath.Join(t.TempDir(), "minisign.pub")
	if err := os.WriteFile(keys, []byte(base64.StdEncoding.EncodeToString([]byte(algorithm+string(public)))), 0o600); err != nil {
		t.Fatal(err)
	}
	b := start(t)
	n := programs.Start(t, "--firmware-keys", keys)
	p := b.open(t, n, n.Token(t), "/console/firmware")
	profiles, err := firmware.ParseProfiles("fw-2.4")
	if err != nil {
		t.Fatal(err)
	}
	image := profiles[0].Image("2.5.0", n.Info.OTA)
	p.shows("There are no images yet.")
	if asked := p.eval("!!document.querySelector('#firmware-signature')"); asked != false {
		t.Error("the page asks for a signature that nobody wants")
	}
	p.expect(422)
	p.choose("xiaozhi.bin", image)
	p.click("Read it")
	p.shows("must be signed with minisign")
	p.fill("#firmware-signature", base64.StdEncoding.EncodeToString([]byte(algorithm+string(ed25519.Sign(private, image)))))
	p.click("Read it")
	p.shows("It has an image that devices can run.")
	p.click("Keep its images")
	p.await("document.querySelector('[data-test=images] tbody')?.innerText.includes('xiaozhi@2.5.0')")
	p.choose("other.bin", profiles[0].Image("2.6.0", n.Info.OTA))
	if left := p.eval("document.querySelector('#firmware-signature').value"); left != "" {
		t.Error("the signature of one file is kept for the next")
	}
}

// A device that came with another image is there at once, with what it ran before.
func TestFirmwareChanges(t *testing.T) {
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	p := b.open(t, n, n.Token(t), "/console/firmware")
	p.shows("No device has come with another image in the last day.")
	for version, elf := range map[string]string{"2.4.0": strings.Repeat("a", 64), "2.5.0": strings.Repeat("b", 64)} {
		runs(t, n, version, elf)
	}
	p.await("/2[.][45][.]0\\s*2[.][45][.]0/.test(document.querySelector('[data-test=changes] tbody')?.innerText)")
	p.shows("not by fleetd")
}
