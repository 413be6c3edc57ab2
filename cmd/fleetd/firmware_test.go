package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"fleetd/internal/api"
	"fleetd/internal/espimage/imagetest"
)

func TestFirmwareInspect(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, content []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	image := imagetest.Build{Chip: 9, Literals: imagetest.Literals("bread-compact-wifi")}.Image()
	fit, flash := write("xiaozhi.bin", image), write("merged-binary.bin", imagetest.Merged(image))
	release := write("v2.4.2_bread-compact-wifi.zip", imagetest.Zip(t, map[string][]byte{"merged-binary.bin": imagetest.Merged(image)}))
	broken := write("broken.bin", image[:200])
	f := newAPI(t, nil) // it needs no node
	got := f.run("firmware", "inspect", fit, flash, release)
	for _, want := range []string{fit + ": 1 image, fit\n", "Firmware  xiaozhi 2.4.2\n", "Board     bread-compact-wifi\n", "Chip      esp32s3, revision 1.0 to 1.99\n", "Flash     16 MiB\n",
		"OTA URL   https://api.example.com/xiaozhi/ota/\n", "(cut out of the content of a flash)", "ota_0 1 MiB, ota_1 1 MiB, assets 1 MiB", "File      merged-binary.bin\n", "2026-11-03T13:02:11Z with ESP-IDF v5.5.1"} {
		if got.code != exitOK || !strings.Contains(got.stdout, want) {
			t.Errorf("%q is not in %+v", want, got)
		}
	}
	got = f.run("firmware", "inspect", "--json", fit, broken)
	lines := strings.Split(strings.TrimSpace(got.stdout), "\n")
	var good, bad api.FirmwareFile
	if got.code != exitRefused || len(lines) != 2 || json.Unmarshal([]byte(lines[0]), &good) != nil || json.Unmarshal([]byte(lines[1]), &bad) != nil {
		t.Fatalf("%+v", got)
	}
	if len(good.Images) != 1 || len(good.Images[0].ID) != 64 || good.Images[0].Boards[0] != "bread-compact-wifi" || len(good.Images[0].Findings) != 0 {
		t.Errorf("%+v", good)
	}
	if len(bad.Images) != 0 || len(bad.Findings) != 1 || bad.Findings[0].Code != "truncated" || bad.Findings[0].Severity != "error" {
		t.Errorf("%+v", bad)
	}
	if got := f.run("firmware", "inspect", broken); got.code != exitRefused || !strings.Contains(got.stdout, "Fault") || !strings.Contains(got.stderr, "1 file must not be given to devices") {
		t.Errorf("%+v", got)
	}
	large := write("large.bin", imagetest.Build{Segments: [][]byte{make([]byte, 33<<20)}}.Image())
	for limit, want := range map[string]int{"32MiB": exitRefused, "34MiB": exitOK, "34": exitFailed, "much": exitFailed} {
		if got := f.run("firmware", "inspect", "--firmware-limit", limit, large); got.code != want {
			t.Errorf("--firmware-limit %s: %+v", limit, got)
		}
	}
	prerelease := write("rc.bin", imagetest.Build{Version: "2.5.0-rc1"}.Image())
	if got := f.run("firmware", "inspect", prerelease); got.code != exitOK || strings.Count(got.stdout, "Warning") != 3 {
		t.Errorf("%+v", got)
	}
	for _, missing := range []string{filepath.Join(dir, "none.bin"), dir} {
		if got := f.run("firmware", "inspect", missing); got.code != exitFailed || got.stderr == "" {
			t.Errorf("%s: %+v", missing, got)
		}
	}
}
