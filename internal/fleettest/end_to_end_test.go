package fleettest

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"fleetd/internal/apiclient"
	"fleetd/internal/racetest"
)

var programs Programs

func TestMain(m *testing.M) {
	flag.Parse() // for testing.Short
	// Under nohup this process ignores SIGHUP, and a child process inherits that. A signal with a handler has its default
	// action in a child process again.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	dir, err := os.MkdirTemp("", "fleettest")
	if err == nil {
		programs, err = Build(dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// hashOf is the name of a tool list.
func hashOf(items []json.RawMessage) string {
	sum := sha256.Sum256([]byte("[" + string(bytes.Join(raws(items), []byte(","))) + "]"))
	return hex.EncodeToString(sum[:])
}

func raws(items []json.RawMessage) [][]byte {
	out := make([][]byte, len(items))
	for i := range items {
		out[i] = items[i]
	}
	return out
}

// A fleet of four firmware generations: boot, connect, list, call,
// photograph, notify, and agree with the node about all of it.
func TestFleetEndToEnd(t *testing.T) {
	t.Parallel()
	fleet := racetest.Size(48, 16)
	node := programs.Start(t)
	sim := programs.Simulate(t, node.Info.OTA, "--transport", "websocket", "--devices", fmt.Sprint(fleet), "--profile", "fw-1.9,fw-2.1,fw-2.4,robot", "--notify", "3s", "--seed", "7")
	node.AwaitReady(t, fleet)
	list := node.List(t)
	var wg sync.WaitGroup
	var mu sync.Mutex
	photos := map[string][]byte{} // photo id to JPEG
	for _, d := range list {
		wg.Go(func() {
			for i := range 3 {
				r, err := node.Call(t.Context(), d.ID, volume, apiclient.CallRequest{Arguments: json.RawMessage(fmt.Sprintf(`{"volume":%d}`, i*10))})
				if err != nil || r.IsError {
					t.Errorf("%s: %+v, %v", d.ID, r, err)
				}
			}
			tools, err := node.Tools(t.Context(), d.ID, false)
			if err != nil || !strings.Contains(fmt.Sprintf("%s", tools.Items), `"self.camera.take_photo"`) {
				return // it has no camera; the count below reports whether too many had none
			}
			r, err := node.Call(t.Context(), d.ID, "self.camera.take_photo", apiclient.CallRequest{Arguments: json.RawMessage(`{"question":"what \"is\" it?"}`)})
			if err != nil || r.IsError || len(r.Content) != 1 {
				t.Errorf("%s photo: %+v, %v", d.ID, r, err)
				return
			}
			var answer struct {
				Success bool
				Photo   string
			}
			if err := json.Unmarshal([]byte(r.Content[0].Text), &answer); err != nil || !answer.Success {
				t.Errorf("%s photo: %s", d.ID, r.Content[0].Text)
				return
			}
			var jpeg bytes.Buffer
			if _, err := node.Photo(t.Context(), answer.Photo, &jpeg); err != nil {
				t.Errorf("%s photo %s: %v", d.ID, answer.Photo, err)
			}
			mu.Lock()
			defer mu.Unlock()
			photos[answer.Photo] = jpeg.Bytes()
		})
	}
	wg.Wait()
	type known struct{ full, public string }
	lists := map[string]known{}
	for _, d := range list {
		all, err := node.Tools(t.Context(), d.ID, true)
		public, err2 := node.Tools(t.Context(), d.ID, false)
		if err != nil || err2 != nil || all.State != "ready" || all.Catalog != d.MCP.Catalog || all.Partial {
			t.Errorf("%s: %+v, %v, %v", d.ID, all.State, err, err2)
		}
		lists[d.ID] = known{hashOf(all.Items), hashOf(public.Items)}
	}

	report := sim.Report(t)
	if report.Totals.DuplicateCallIDs != 0 || report.Totals.Crashes != 0 {
		t.Errorf("totals %+v", report.Totals)
	}
	taken := 0
	for _, d := range report.Devices {
		if got := lists[d.ID]; got.full != d.CatalogSHA256 || got.public != d.CatalogPublicSHA256 {
			t.Errorf("%s (%s): lists %v, the device has %s and %s", d.ID, d.Profile, got, d.CatalogSHA256, d.CatalogPublicSHA256)
		}
		executed := 0
		for _, c := range d.Calls {
			if c.Tool == volume {
				executed++
			}
		}
		if executed != 3 {
			t.Errorf("%s executed %d volume calls, want 3", d.ID, executed)
		}
		for _, p := range d.Photos {
			var answer struct{ Photo string }
			if err := json.Unmarshal([]byte(p.Answer), &answer); err != nil || p.Status != 200 {
				t.Errorf("%s photo: %d %s", d.ID, p.Status, p.Answer)
				continue
			}
			sum := sha256.Sum256(photos[answer.Photo])
			if hex.EncodeToString(sum[:]) != p.SHA256 {
				t.Errorf("%s: photo %s came back with %d bytes, not as the %d sent", d.ID, answer.Photo, len(photos[answer.Photo]), p.Bytes)
			}
			taken++
		}
	}
	if taken != fleet/2 { // of the profiles fw-1.9 and fw-2.4
		t.Errorf("%d photos, want %d", taken, fleet/2)
	}
	node.Await(t, "all devices are offline and keep their tools", 20*time.Second, func() bool {
		for _, d := range node.List(t) {
			if d.State != "offline" || d.MCP.CatalogState != "stale" {
				return false
			}
		}
		return true
	})
}

// Approval, revocation and forgetting as an operator does them, against
// devices that boot like firmware.
func TestAdmission(t *testing.T) {
	t.Parallel()
	node := programs.Start(t, "--admission", "approve")
	programs.Simulate(t, node.Info.OTA, "--devices", "1", "--profile", "fw-2.4", "--wake", "1s", "--time-scale", "0.1")
	const id = "02:f1:ee:00:00:00"
	node.Await(t, "the device waits", 20*time.Second, func() bool {
		d, err := node.Device(t.Context(), id)
		return err == nil && d.State == "pending"
	})
	if out, errs, status := node.Command(t, "devices", "approve", id); status != 0 {
		t.Fatalf("approve: %s %s", out, errs)
	}
	node.AwaitReady(t, 1)
	if out, _, status := node.Command(t, "call", id, volume, "volume=33"); status != 0 || strings.TrimSpace(out) != "true" {
		t.Errorf("call: %d %s", status, out)
	}
	if _, errs, status := node.Command(t, "call", id, volume, "volume=300"); status != 2 || !strings.Contains(errs, "volume") {
		t.Errorf("refused call: %d %s", status, errs)
	}
	if _, errs, status := node.Command(t, "devices", "revoke", id); status != 0 {
		t.Errorf("revoke: %s", errs)
	}
	node.Await(t, "the device is out", 20*time.Second, func() bool {
		d, err := node.Device(t.Context(), id)
		return err == nil && d.State != "online"
	})
	if _, _, status := node.Command(t, "call", id, volume, "volume=33"); status != 2 {
		t.Errorf("call of a revoked device: %d", status)
	}
	if _, errs, status := node.Command(t, "devices", "forget", id, "--yes"); status != 0 {
		t.Errorf("forget: %s", errs)
	}
	if _, err := node.Device(t.Context(), id); problemCode(err) != "device_unknown" {
		t.Errorf("a forgotten device: %v", err)
	}
}

// kill -9 in the middle of a fleet: what was announced is stored, the fleet
// comes back, and no caller hangs.
func TestKillAndReturn(t *testing.T) {
	t.Parallel()
	fleet := racetest.Size(150, 50) // callers use the ids of the first 50
	node := programs.Start(t)
	sim := programs.Simulate(t, node.Info.OTA, "--devices", fmt.Sprint(fleet), "--profile", "fw-2.4,robot", "--seed", "3", "--reconnect", "300ms")
	node.AwaitReady(t, fleet)
	node.AwaitStored(t)
	var hashes []string
	for _, d := range node.List(t) {
		hashes = append(hashes, d.ID+d.MCP.Catalog)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(20 * time.Millisecond):
				}
				begun := time.Now()
				id := fmt.Sprintf("02:f1:ee:00:00:%02x", i*7)
				_, err := node.Call(t.Context(), id, volume, apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":1}`), Timeout: 5 * time.Second})
				if took := time.Since(begun); took > 10*time.Second {
					t.Errorf("a caller hung for %v: %v", took, err)
				}
			}
		})
	}
	node.Kill(t)
	sim.Freeze(t) // so that the node shows what is stored, and not what devices announce anew
	node.Run(t)
	var after []string
	for _, d := range node.List(t) {
		after = append(after, d.ID+d.MCP.Catalog)
	}
	if strings.Join(hashes, " ") != strings.Join(after, " ") {
		t.Errorf("catalogs before the kill and after the restart differ:\n%v\n%v", hashes, after)
	}
	sim.Thaw(t)
	node.AwaitReady(t, fleet)
	close(stop)
	wg.Wait()
	if r := sim.Report(t); r.Totals.DuplicateCallIDs != 0 {
		t.Errorf("%d calls executed twice", r.Totals.DuplicateCallIDs)
	}
}
