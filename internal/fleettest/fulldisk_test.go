package fleettest

import (
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"fleetd/internal/store/storetest"
)

// A node starts while its disk is full, as it goes on when the disk becomes full: known devices can connect.
func TestStartOnAFullDisk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if out, err := exec.Command("mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", dir).CombinedOutput(); err != nil {
		t.Skipf("%sa file system in memory cannot be mounted here, which needs root: %v, %s", storetest.NotRun, err, out)
	}
	t.Cleanup(func() { _ = exec.Command("umount", "-l", dir).Run() }) // after the node, which is stopped first
	n := &Node{Dir: filepath.Join(dir, "data"), programs: programs}
	n.launch(t)
	t.Cleanup(func() { n.Stop(t) })
	n.awaitStart(t)
	programs.Simulate(t, n.Info.OTA, "--devices", "1", "--transport", "mqtt", "--seed", "3", "--reconnect", "300ms")
	n.AwaitReady(t, 1)
	n.Stop(t)

	fill, err := os.Create(filepath.Join(dir, "fill"))
	if err != nil {
		t.Fatal(err)
	}
	for size := 1 << 20; size > 0; {
		if _, err := fill.Write(make([]byte, size)); err != nil {
			size /= 2
		}
	}
	if err := fill.Close(); err != nil {
		t.Fatal(err)
	}
	n.launch(t)
	n.Await(t, "the node serves on a full disk", 20*time.Second, func() bool {
		answer, err := http.Get(n.Info.API + "/livez")
		if err != nil {
			return false
		}
		_ = answer.Body.Close()
		return answer.StatusCode == http.StatusOK
	})
	n.Await(t, "the device is back", 20*time.Second, func() bool { return n.Metric(t, "fleetd_devices") == 1 })
}
