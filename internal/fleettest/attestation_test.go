package fleettest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A device whose hardware the operator listed comes in without anybody's
// approval; one with a wrong key waits, is reported, and can be approved.
func TestAttestedActivation(t *testing.T) {
	t.Parallel()
	node := programs.Start(t, "--admission", "approve")
	const serial = "SN0123456789ABCDEF0123456789ABCD"
	key := strings.Repeat("5a", 32)
	file := filepath.Join(t.TempDir(), "keys.csv")
	if err := os.WriteFile(file, []byte("serial,key\n"+serial+","+key+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, errs, status := node.Command(t, "chips", "import", file); status != 0 {
		t.Fatalf("import: %s %s", out, errs)
	}
	programs.Simulate(t, node.Info.OTA, "--devices", "1", "--transport", "mqtt", "--profile", "fw-2.1", "--time-scale", "0.1", "--mac-base", "02:f1:ee:00:00:01",
		"--serial", serial, "--efuse-key", strings.Repeat("5b", 32))
	forger := "02:f1:ee:00:00:01"
	node.Await(t, "the forger is reported", 20*time.Second, func() bool {
		d, err := node.Device(t.Context(), forger)
		return err == nil && d.State == "contested"
	})
	programs.Simulate(t, node.Info.OTA, "--devices", "1", "--transport", "mqtt", "--profile", "fw-2.1", "--time-scale", "0.1", "--mac-base", "02:f1:ee:00:00:02",
		"--serial", serial, "--efuse-key", key)
	node.AwaitReady(t, 1)
	if d, err := node.Device(t.Context(), "02:f1:ee:00:00:02"); err != nil || d.State != "online" {
		t.Errorf("%+v, %v", d.State, err)
	}
	if out, _, _ := node.Command(t, "devices", "--state", "contested"); !strings.Contains(out, forger) || strings.Contains(out, "02:f1:ee:00:00:02") {
		t.Errorf("contested devices:\n%s", out)
	}
	if out, _, _ := node.Command(t, "doctor"); !strings.Contains(out, "contested device ids: 1") {
		t.Errorf("doctor:\n%s", out)
	}
	if out, _, _ := node.Command(t, "chips", "list"); !strings.Contains(out, serial+"  02:f1:ee:00:00:02") || strings.Contains(out, key) {
		t.Errorf("keys:\n%s", out)
	}
	if strings.Contains(node.Log.String(), key) {
		t.Error("the key is in the log")
	}
	if node.Metric(t, "fleetd_attestation_proofs_total", `outcome="admitted"`) != 1 || node.Metric(t, "fleetd_contested_total", `reason="wrong_proof"`) < 1 {
		t.Error("not counted")
	}
}
