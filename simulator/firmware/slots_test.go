package firmware

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"fleetd/internal/espimage"
)

// rollout is a fake server that offers one image in its OTA answers for as long as offer says so.
type rollout struct {
	*fakeServer
	checks []string // elf_sha256 of each check
	gets   int
}

// newRollout offers the image under a version; serve answers the requests for it.
func newRollout(t *testing.T, version string, offer func(n int, body string) bool, serve func(w http.ResponseWriter)) *rollout {
	t.Helper()
	r := &rollout{fakeServer: newFakeServer(t)}
	plain := r.ota
	r.ota = func(n int, body []byte) (int, string) {
		status, text := plain(n, body)
		_, after, _ := strings.Cut(string(body), `"elf_sha256":"`)
		r.mu.Lock()
		r.checks = append(r.checks, after[:64])
		r.mu.Unlock()
		if offer(n, string(body)) {
			text = strings.TrimSuffix(text, "}") + `,"firmware":{"version":"` + version + `","url":"` + r.base + `/image","force":1}}`
		}
		return status, text
	}
	r.image = func(w http.ResponseWriter) {
		r.mu.Lock()
		r.gets++
		r.mu.Unlock()
		serve(w)
	}
	return r
}

// seen returns the checks and downloads so far.
func (r *rollout) seen() (checks []string, gets int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append(checks, r.checks...), r.gets
}

func whole(image []byte) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) {
		w.Header().Set("Content-Length", strconv.Itoa(len(image)))
		_, _ = w.Write(image)
	}
}

func once(n int, _ string) bool { return n == 1 }

func TestUpgradeBootsUnderTheNewVersion(t *testing.T) {
	p := named(t, "fw-2.4")
	s := newRollout(t, "2.5.0", once, whole(p.Image("2.5.0", "http://h/ota/")))
	f := startFleet(t, s.fakeServer)
	s.acceptHello("a")
	r := eventually(t, f, "upgraded", inState(StateConnected))
	if checks, gets := s.seen(); gets != 1 || len(checks) != 2 || checks[0] == checks[1] || checks[1] != p.program("2.5.0").elf {
		t.Errorf("checks %q, %d downloads", checks, gets)
	}
	if r.Firmware != "2.5.0" || r.Upgrades != 1 || r.Reboots != 1 || r.Image != "valid" || r.DownloadBytes == 0 {
		t.Errorf("report %+v", r)
	}
}

// What fails leaves the running image; only before v1.8.0 does the device restart.
func TestUpgradesThatFail(t *testing.T) {
	image := named(t, "fw-2.4").Image("2.5.0", "http://h/ota/")
	flipped := bytes.Clone(image)
	flipped[len(flipped)-40] ^= 1
	newer := bytes.Clone(image)
	newer[15] = 3 // the chips of the simulator have revision 0.2
	sum := sha256.Sum256(newer[:len(newer)-sha256.Size])
	copy(newer[len(newer)-sha256.Size:], sum[:])
	status := func(code int) func(http.ResponseWriter) {
		return func(w http.ResponseWriter) { w.WriteHeader(code) }
	}
	for name, c := range map[string]struct {
		profile, fault string
		serve          func(http.ResponseWriter)
		problem        string
		restarts       bool
	}{
		"not found":         {"fw-2.4", "", status(404), "Unexpected status code: 404", false},
		"not found, v1.7":   {"fw-1.7", "", status(404), "Unexpected status code: 404", true},
		"redirect":          {"fw-2.4", "", status(302), "Unexpected status code: 302", false},
		"chunked":           {"fw-2.4", "", func(w http.ResponseWriter) { _, _ = w.Write(image[:10]); w.(http.Flusher).Flush() }, "without Content-Length", false},
		"flipped bit":       {"fw-2.4", "", whole(flipped), "wrong checksum", false},
		"a newer chip":      {"fw-2.4", "", whole(newer), "chip revision", false},
		"a page":            {"fw-2.4", "", whole([]byte(strings.Repeat("<html>", 2000))), "first byte", false},
		"cut":               {"fw-2.4", "cut-download", whole(image), "broke off", false},
		"rejected":          {"fw-2.4", "reject-image", whole(image), "refused", false},
		"ends early":        {"fw-2.4", "", func(w http.ResponseWriter) { w.Header().Set("Content-Length", "9000"); _, _ = w.Write(image) }, "unexpected EOF", false},
		"same version, 1.9": {"fw-1.9", "", whole(named(t, "fw-1.9").Image("1.9.4", "")), "the version that runs", false},
		"too large":         {"fw-2.4", "", whole(append(bytes.Clone(image), make([]byte, 0x3F0000)...)), "slot is full", false},
		"small first read": {"fw-2.1", "", func(w http.ResponseWriter) {
			w.Header().Set("Content-Length", strconv.Itoa(len(image)))
			_, _ = w.Write(image[:100])
			w.(http.Flusher).Flush()
			time.Sleep(50 * time.Millisecond) // so that the device reads the piece alone
			_, _ = w.Write(image[100:])
		}, "no handle", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newRollout(t, "2.5.0", once, c.serve)
			f := startFleet(t, s.fakeServer, "--profile", c.profile, "--fault", c.fault)
			// The problem is forgotten with the next good check, so it is seen in time or in the count alone.
			s.accept()
			r := f.devices[0].Report()
			if r.UpgradesFailed != 1 || r.Upgrades != 0 || r.Firmware != named(t, c.profile).Version() || (r.Reboots == 1) != c.restarts {
				t.Errorf("%+v", r)
			}
			if !c.restarts && !strings.Contains(r.Error, c.problem) {
				t.Errorf("problem %q, want %q", r.Error, c.problem)
			}
		})
	}
}

// An image that crashes before its check is rolled back, and flashed again for as long as it is offered.
func TestCrashBeforeTheCheck(t *testing.T) {
	s := newRollout(t, "2.5.0", func(n int, _ string) bool { return n <= 3 }, whole(named(t, "fw-2.4").Image("2.5.0", "")))
	f := startFleet(t, s.fakeServer, "--fault", "crash-boot")
	s.acceptHello("a")
	r := eventually(t, f, "back at the old image", inState(StateConnected))
	checks, gets := s.seen()
	if r.Rollbacks != 3 || r.Upgrades != 3 || r.Crashes != 3 || r.Firmware != "2.4.2" || gets != 3 || len(checks) != 4 {
		t.Errorf("%d checks, %d downloads, %+v", len(checks), gets, r)
	}
	for _, elf := range checks {
		if elf != r.ELF {
			t.Errorf("a check of %s, which never ran that far", elf)
		}
	}
}

// One that crashes after its check is confirmed; each crash is a check, and only another image ends it.
func TestCrashAfterTheCheck(t *testing.T) {
	p := named(t, "fw-2.4")
	later, before := p.Image("2.5.0", ""), p.Image("2.4.2", "")
	image := &later
	s := newRollout(t, "2.5.0", func(n int, _ string) bool {
		if n == 4 {
			image = &before
		}
		return n == 1 || n == 4
	}, func(w http.ResponseWriter) { whole(*image)(w) })
	f := startFleet(t, s.fakeServer, "--fault", "crash-later")
	s.acceptHello("a")
	r := eventually(t, f, "cured", inState(StateConnected))
	checks, _ := s.seen()
	if elf := p.program("2.5.0").elf; len(checks) != 5 || checks[1] != elf || checks[2] != elf || checks[3] != elf || checks[4] != checks[0] || r.Rollbacks != 0 || r.Crashes != 2 {
		t.Errorf("checks %q, %+v", checks, r)
	}
}

// An offer in the first check of an image fails; before v1.8.0 it undoes the upgrade.
func TestOfferInTheFirstCheck(t *testing.T) {
	for profile, c := range map[string]struct {
		version   string
		rollbacks uint64
	}{"fw-1.9": {"1.9.5", 0}, "fw-2.4": {"2.5.0", 0}, "fw-1.7": {"1.7.7", 1}} {
		t.Run(profile, func(t *testing.T) {
			t.Parallel()
			s := newRollout(t, "2.6.0", func(n int, _ string) bool { return n <= 2 }, whole(named(t, profile).Image(c.version, "")))
			f := startFleet(t, s.fakeServer, "--profile", profile)
			s.accept()
			if r := f.devices[0].Report(); r.Rollbacks != c.rollbacks || r.Upgrades != 1 || r.UpgradesFailed != 1 || (r.Firmware == c.version) != (c.rollbacks == 0) {
				t.Errorf("%+v", r)
			}
		})
	}
}

// A device whose checks fail goes on with an image that is not confirmed.
func TestFailedChecksConfirmNothing(t *testing.T) {
	s := newRollout(t, "2.5.0", once, whole(named(t, "fw-2.4").Image("2.5.0", "")))
	answer := s.ota
	s.ota = func(n int, body []byte) (int, string) {
		status, text := answer(n, body)
		switch {
		case n == 2:
			return 503, ""
		case n == 3:
			return 200, "<html>"
		}
		return status, text
	}
	f := startFleet(t, s.fakeServer, "--time-scale", "0.05")
	r := eventually(t, f, "not confirmed", func(r DeviceReport) bool { return r.OTAChecks >= 2 && r.Image == "pending_verify" })
	if r.Firmware != "2.5.0" {
		t.Errorf("%+v", r)
	}
	s.acceptHello("a")
	eventually(t, f, "confirmed", func(r DeviceReport) bool { return r.Image == "valid" && r.OTAChecks == 4 })
}

func TestPowerCutDuringTheDownload(t *testing.T) {
	s := newRollout(t, "2.5.0", func(n int, _ string) bool { return n <= 2 }, whole(named(t, "fw-2.4").Image("2.5.0", "")))
	f := startFleet(t, s.fakeServer, "--fault", "power-cut")
	s.acceptHello("a")
	r := eventually(t, f, "upgraded at last", inState(StateConnected))
	if r.Firmware != "2.5.0" || r.Upgrades != 1 || r.UpgradesFailed != 1 || r.Reboots != 2 {
		t.Errorf("%+v", r)
	}
}

// What the system of a device has taken and its program has not is as little as on a chip: a server takes it for what the device has.
func TestDownloadIsReadAsOnAChip(t *testing.T) {
	t.Parallel()
	const size, half, ahead = 8 << 20, 2 << 20, 96 << 10 // ahead: the buffers of both systems
	server, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = server.Close() }()
	var sent atomic.Int64
	go func() {
		c, err := server.Accept()
		if err != nil || c.(*net.TCPConn).SetWriteBuffer(4<<10) != nil {
			return
		}
		defer func() { _ = c.Close() }()
		if _, err := fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", size); err != nil {
			return
		}
		for piece := make([]byte, 1<<10); err == nil; {
			_, err = c.Write(piece)
			sent.Add(int64(len(piece)))
		}
	}()
	f := startFleet(t, newFakeServer(t))
	call, err := f.devices[0].get(t.Context(), "http://"+server.Addr().String()+"/image")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = call.close() }()
	read := 0
	err = call.pieces(func(piece []byte) error {
		if read += len(piece); read < half {
			return nil
		}
		time.Sleep(300 * time.Millisecond) // in which the server sends what it can
		return errPowerCut
	})
	if n := sent.Load() - int64(read); !errors.Is(err, errPowerCut) || n > ahead {
		t.Errorf("%v; the server has sent %d bytes more than the %d that were read", err, n, read)
	}
}

func TestWrongBoardAndForeignServer(t *testing.T) {
	s := newRollout(t, "2.5.0", once, nil)
	foreign := newFakeServer(t)
	image := named(t, "fw-2.4").Image("2.5.0", foreign.base+"/xiaozhi/ota/")
	s.image = func(w http.ResponseWriter) { whole(image)(w) }
	f := startFleet(t, s.fakeServer, "--fault", "wrong-board,foreign-server")
	foreign.acceptHello("a")
	r := eventually(t, f, "at the foreign server", inState(StateConnected))
	if checks, _ := s.seen(); len(checks) != 1 || r.Board != "lichuang-dev-other" {
		t.Errorf("%d checks here, %+v", len(checks), r)
	}
}

// A device that gets back the image that it had is the board again that it was.
func TestWrongBoardAndBack(t *testing.T) {
	p := named(t, "fw-2.4")
	version := "2.5.0"
	s := newRollout(t, version, func(n int, _ string) bool { return n != 2 && n < 4 }, nil) // the second check is the first one with the image
	s.image = func(w http.ResponseWriter) { whole(p.Image(version, s.base+"/xiaozhi/ota/"))(w) }
	f := startFleet(t, s.fakeServer, "--fault", "wrong-board")
	for _, board := range []string{p.board + "-other", p.board} {
		s.acceptHello("a")
		if r := eventually(t, f, "connected", inState(StateConnected)); r.Board != board {
			t.Errorf("the board is %s, want %s", r.Board, board)
		}
		version = p.Version()
		f.devices[0].reboot()
	}
}

// After a failed upgrade by tool, a wake word does nothing until a restart.
func TestFailedToolUpgrade(t *testing.T) {
	s := newRollout(t, "2.5.0", func(int, string) bool { return false }, func(w http.ResponseWriter) { w.WriteHeader(404) })
	f := startFleet(t, s.fakeServer)
	c := s.acceptHello("a")
	c.request(t, 1, "tools/call", fmt.Sprintf(`{"name":"self.upgrade_firmware","arguments":{"url":%q}}`, s.base+"/image"))
	eventually(t, f, "upgrading", inState(StateUpgrading))
	d := f.devices[0]
	d.converse()
	if r := d.Report(); r.Connects != 1 || r.State != StateUpgrading {
		t.Errorf("%+v", r)
	}
	d.reboot()
	s.acceptHello("b")
	eventually(t, f, "connected again", inState(StateConnected))
}

// The server's reader, which shares no code with the generator, finds in each file what was put in.
func TestImagesAreWhatTheyShouldBe(t *testing.T) {
	for _, p := range profiles() {
		const ota = "http://fleet.example.com:8000/xiaozhi/ota/"
		name, release, err := p.Release("2.5.0", ota)
		if err != nil {
			t.Fatal(err)
		}
		if name != "v2.5.0_"+p.board+".zip" {
			t.Errorf("the release is %q", name)
		}
		image := p.Image("2.5.0", ota)
		for kind, content := range map[string][]byte{"image": image, "merged": p.MergedBinary(image), "release": release} {
			file, err := espimage.Inspect(bytes.NewReader(content), int64(len(content)), 32<<20, nil)
			if err != nil || !file.IsFit() || len(file.Images) != 1 {
				t.Fatalf("%s %s: %v, %+v", p.name, kind, err, file)
			}
			got := file.Images[0]
			if got.Version != "2.5.0" || len(got.Boards) != 1 || got.Boards[0] != p.board || len(got.URLs) != 1 || got.URLs[0] != ota || got.Project != "xiaozhi" {
				t.Errorf("%s %s: %+v", p.name, kind, got)
			}
			if slots := len(got.Layout); (slots > 0) != (kind != "image") {
				t.Errorf("%s %s has a layout of %d partitions", p.name, kind, slots)
			}
		}
		back, err := readImage(image)
		if err != nil || back.elf != p.program("2.5.0").elf || back.board != p.board || back.ota != ota || back.compiled != p.compiled {
			t.Errorf("%s reads %+v, %v", p.name, back, err)
		}
	}
}

func FuzzReadImage(f *testing.F) {
	f.Add(profiles()[0].Image("2.5.0", "http://h/ota/"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		if p, err := readImage(raw); err == nil && len(p.elf) != 64 {
			t.Errorf("%+v", p)
		}
	})
}
