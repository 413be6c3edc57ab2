package fleettest

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/espimage/imagetest"
)

// checkBody is the body of an OTA check of a device that could get an image for its board.
func checkBody(board, elf string, slot int) string {
	return fmt.Sprintf(`{"version":2,"flash_size":16777216,"chip_model_name":"esp32s3","chip_info":{"model":9,"cores":2,"revision":102,"features":18},`+
		`"application":{"name":"xiaozhi","version":"2.4.1","compile_time":"Aug  8 2026T08:40:00Z","idf_version":"v5.5.2","elf_sha256":"%s"},`+
		`"partition_table":[{"label":"ota_0","type":0,"subtype":16,"address":131072,"size":%[2]d},{"label":"ota_1","type":0,"subtype":17,"address":4259840,"size":%[2]d},{"label":"assets","type":1,"subtype":130,"address":8388608,"size":8388608}],`+
		`"ota":{"label":"ota_0"},"display":{"monochrome":false,"width":320,"height":240},"board":{"type":"%[3]s","name":"%[3]s","ssid":"lab","rssi":-52}}`, elf, slot, board)
}

// must runs a command that has to succeed, and returns what it prints.
func (n *Node) must(t testing.TB, want string, args ...string) string {
	t.Helper()
	stdout, stderr, status := n.Command(t, args...)
	if status != 0 || !strings.Contains(stdout, want) {
		t.Errorf("fleetd %s: %d %s%s; want %q", strings.Join(args, " "), status, stdout, stderr, want)
	}
	return stdout
}

var spaces = regexp.MustCompile(` +`)

// TestFirmware: files are inspected and added, devices are checked, and what a killed upload, a killed node, a full store and a damaged
// disk leave is no image that somebody could get.
func TestFirmware(t *testing.T) {
	t.Parallel()
	node := programs.Start(t, "--firmware-storage", "1MiB")
	dir := t.TempDir()
	write := func(name string, content []byte) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	server := strings.TrimSuffix(node.Info.OTA, "/xiaozhi/ota/") + "/xiaozhi/ota/"
	images := map[string][]byte{}
	for i, board := range []string{"bread", "robot", "lamp"} {
		literals := imagetest.Literals(board)
		literals[1] = server
		images[board] = imagetest.Build{Chip: 9, ELF: byte(0xa0 + i), Literals: literals, Segments: [][]byte{bytes.Repeat([]byte{byte(i)}, 100<<10)}}.Image()
	}
	release := write("release.zip", imagetest.Zip(t, map[string][]byte{"bread.bin": images["bread"], "lamp.bin": imagetest.Merged(images["lamp"]), "robot.bin": images["robot"], "assets.bin": {1, 2, 3}}))
	if out, err := exec.CommandContext(t.Context(), programs.Fleetd, "firmware", "inspect", release).Output(); err != nil || !strings.Contains(string(out), "release.zip: 3 images, fit") { // it takes no node
		t.Errorf("%s %v", out, err)
	}
	node.must(t, "release.zip: 3 images, fit", "firmware", "add", "--dry-run", release)
	node.must(t, "no firmware images", "firmware")
	node.must(t, "release.zip: 3 images, added", "firmware", "add", "--note", "carefully", release)
	node.must(t, "release.zip: 3 images, nothing new", "firmware", "add", release)
	sum := sha256.Sum256(images["bread"])
	bread := hex.EncodeToString(sum[:])
	node.must(t, "carefully", "firmware", "show", bread[:12])

	// Devices of all kinds. Each checks in twice: at its first check nothing could be offered.
	old, large := strings.Repeat("0f", 32), 1<<20
	bodies := map[string]string{
		"02:00:00:00:0f:01": checkBody("bread", old, large),
		"02:00:00:00:0f:02": checkBody("robot", old, len(images["robot"])-1),
		"02:00:00:00:0f:03": strings.Replace(checkBody("lamp", old, large), `"lab"`, `"the "lab""`, 1),
		"02:00:00:00:0f:04": checkBody("fridge", old, large),
		"02:00:00:00:0f:05": strings.Replace(checkBody("bread", old, large), `"version":"2.4.1"`, `"version":"v2.4.1-dirty"`, 1),
		"02:00:00:00:0f:06": strings.Replace(checkBody("bread", old, large), `"version":"2.4.1"`, `"version":"1.7.7"`, 1),
	}
	for range 2 {
		for id, body := range bodies {
			if reply := node.CheckIn(t, id, body); strings.Contains(reply, "firmware") {
				t.Errorf("%s is offered something: %s", id, reply)
			}
		}
		node.AwaitStored(t)
	}
	checked := node.must(t, "", "firmware", "check", "2.4.2")
	for _, want := range []string{"Devices 6", "fit 1", "already 0", "waits 0", "blocked 5", "Finding check_unreadable 1", "Finding slot 1", "Finding board 1", "Finding version_aborts 1", "Finding version_too_old 1"} {
		if !strings.Contains(spaces.ReplaceAllString(checked, " "), want+"\n") {
			t.Errorf("%q is not in\n%s", want, checked)
		}
	}
	for id, want := range map[string]string{"02:00:00:00:0f:01": "fit", "02:00:00:00:0f:02": "slot", "02:00:00:00:0f:03": "check_unreadable", "02:00:00:00:0f:04": "board", "02:00:00:00:0f:05": "version_aborts", "02:00:00:00:0f:06": "version_too_old"} {
		found := false
		for line := range strings.Lines(checked) {
			found = found || strings.HasPrefix(line, id) && strings.Contains(line, want)
		}
		if !found {
			t.Errorf("%s is not %s in\n%s", id, want, checked)
		}
	}
	node.must(t, "Blocks    The image has", "firmware", "explain", "02:00:00:00:0f:02", "--image", node.imageOf(t, "robot"))

	// A device that comes with an image which nobody gave it.
	x := node.image(t, bread)
	node.CheckIn(t, "02:00:00:00:0f:01", checkBody("bread", x.ELF, large))
	node.Await(t, "the event of another image", 30*time.Second, func() bool {
		text := node.storedEvents(t, node.Token(t), "02:00:00:00:0f:01", "firmware")
		return strings.Contains(text, `"cause":"foreign"`) && strings.Contains(text, x.ELF) && strings.Contains(text, old)
	})
	if _, stderr, status := node.Command(t, "firmware", "remove", "--yes", bread[:12]); status != 2 || !strings.Contains(stderr, "run this image: 1") {
		t.Errorf("%d %s", status, stderr)
	}

	// An upload that is killed, one that is too large for the store, and one by a key that is limited.
	before := node.must(t, "", "firmware", "--json")
	conn, err := net.Dial("tcp", strings.TrimPrefix(node.Info.API, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	other := imagetest.Build{Chip: 9, Literals: imagetest.Literals("other"), Segments: [][]byte{make([]byte, 1<<20)}}.Image()
	if _, err := fmt.Fprintf(conn, "POST /v1/firmware HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s", node.Token(t), len(other), other[:len(other)/2]); err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	if _, stderr, status := node.Command(t, "firmware", "add", write("large.bin", other)); status != 2 || !strings.Contains(stderr, "--firmware-storage") {
		t.Errorf("%d %s", status, stderr)
	}
	key, err := node.CreateKey(t.Context(), api.NewKey{Name: "lab", Scopes: []string{"firmware"}, Devices: api.Selection{Text: "room=lab"}})
	if err != nil {
		t.Fatal(err)
	}
	// security: K44
	if status, text := node.ask(t, key.Token, http.MethodPost, "/v1/firmware", string(images["lamp"])); status != http.StatusForbidden {
		t.Errorf("%d %s", status, text)
	}
	if status, text := node.ask(t, key.Token, http.MethodGet, "/v1/firmware/check?release=2.4.2", ""); status != http.StatusOK || strings.Contains(text, "02:00:00") {
		t.Errorf("%d %s", status, text)
	}
	token := node.Token(t)
	for _, c := range []struct {
		path, body string
		status     int
		want       string
	}{
		{"", "<html>", 422, `"findings":[{"code":"unknown_format","severity":"error"`},
		{"?sha256=" + bread, string(images["lamp"]), 422, `"code":"sha256"`},
		{"?dry_run=true", string(images["lamp"]), 200, `"items":[{"id":"`},
		{"", string(images["lamp"]), 200, `"note":"carefully"`},
		{"", strings.Repeat("x", 33<<20), 413, `"code":"too_large"`},
		{"?sha=1", "x", 400, `"code":"bad_request"`},
	} {
		if status, text := node.ask(t, token, http.MethodPost, "/v1/firmware"+c.path, c.body); status != c.status || !strings.Contains(text, c.want) {
			t.Errorf("POST /v1/firmware%s: %d %s; want %d %s", c.path, status, text, c.status, c.want)
		}
	}
	if after := node.must(t, "", "firmware", "--json"); after != before {
		t.Errorf("images %s; before %s", after, before)
	}

	audited := func(times int) {
		t.Helper()
		node.Await(t, "the audit has what was added, the refused deletion, and the deletion", 30*time.Second, func() bool {
			return strings.Count(node.must(t, "", "audit", "--json"), bread) >= times
		})
	}
	audited(2) // a kill loses the last half second

	// A node that is killed has its images; one whose file is damaged or lost serves the right bytes.
	node.Kill(t)
	node.Run(t)
	path := filepath.Join(node.Dir, "firmware", bread)
	for _, damage := range []func() error{
		func() error { return nil },
		func() error { return os.WriteFile(path, images["bread"][:1000], 0o600) },
		func() error { return os.Remove(path) },
	} {
		if err := damage(); err != nil {
			t.Fatal(err)
		}
		var content bytes.Buffer
		if _, err := node.Download(t.Context(), &content, nil, "firmware", bread, "file"); err != nil || !bytes.Equal(content.Bytes(), images["bread"]) {
			t.Errorf("%d bytes, error %v", content.Len(), err)
		}
	}
	node.must(t, "deleted", "firmware", "remove", "--yes", "--force", bread[:12])
	if entries, err := os.ReadDir(filepath.Dir(path)); err != nil || len(entries) != 2 {
		t.Errorf("%v, error %v", entries, err)
	}
	audited(3)
}

// image is a stored image.
func (n *Node) image(t testing.TB, id string) api.FirmwareImage {
	t.Helper()
	x, err := apiclient.Get[api.FirmwareImage](t.Context(), n.Client, nil, "firmware", id)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// imageOf is the id of the only image for a board.
func (n *Node) imageOf(t testing.TB, board string) string {
	t.Helper()
	list, err := apiclient.Get[api.List[api.FirmwareImage]](t.Context(), n.Client, apiclient.Query{"board": board}, "firmware")
	if err != nil || len(list.Items) != 1 {
		t.Fatalf("%+v, %v", list, err)
	}
	return list.Items[0].ID
}
