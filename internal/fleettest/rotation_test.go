package fleettest

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"fleetd/internal/apiclient"
	"fleetd/internal/credential"
	"fleetd/internal/devicetest"
	"fleetd/simulator/firmware"
)

const rotationSecret = "a secret for tests only"

// A fleet gets new credentials without anybody touching it: devices go on with
// what they have, also over a restart of the node, until they boot; then the old
// credentials are not valid.
func TestRotationWithoutTouchingFirmware(t *testing.T) {
	t.Parallel()
	node := programs.Start(t, "--secret", rotationSecret)
	const count = 4
	mint, err := credential.New([]byte(rotationSecret))
	if err != nil {
		t.Fatal(err)
	}
	programs.Simulate(t, node.Info.OTA, "--devices", "4", "--transport", "mqtt", "--profile", "fw-2.1", "--time-scale", "0.05", "--reconnect", "200ms")
	node.AwaitReady(t, count)
	if out, errs, status := node.Command(t, "devices", "rotate", "--all", "--grace", "24h"); status != 0 || !strings.Contains(out, "generation 1") {
		t.Fatalf("%s %s", out, errs)
	}
	if _, errs, status := node.Command(t, "devices", "rotate", "--all"); status != 2 || !strings.Contains(errs, "rotated already") {
		t.Errorf("a second time: %d %s", status, errs)
	}
	node.Stop(t)
	node.Run(t)
	node.AwaitReady(t, count) // with what they had
	device := node.List(t)[0]
	if device.Credentials.Generation != 1 || time.Until(device.Credentials.PreviousUntil.Time) < 23*time.Hour {
		t.Errorf("%+v", device.Credentials)
	}
	old := login{firmware.Login{Endpoint: node.Setting("--mqtt-listen"), ClientID: token(device.ID), Username: credential.MQTTUser(device.ClientID), Password: mint.DeviceToken(device.ID, device.ClientID, 0)}}
	node.reboot(t, device.ID)
	if d, err := old.connect(devicetest.NewScript()); err == nil {
		d.Close()
		// security: D3
		t.Error("old credentials are good after the device came with new ones")
	}
	for _, other := range node.List(t) {
		if other.ID != device.ID && other.Credentials.PreviousUntil.IsZero() {
			t.Errorf("%s did not boot: %+v", other.ID, other.Credentials)
		}
	}
	if out, errs, status := node.Command(t, "devices", "rotate", device.ID, "--grace", "1h"); status != 0 || !strings.Contains(out, "generation 2") {
		t.Fatalf("%s %s", out, errs)
	}
	node.reboot(t, device.ID)
}

// reboot restarts a device and waits until it has used its new credentials.
func (n *Node) reboot(t *testing.T, id string) {
	t.Helper()
	before, err := n.Device(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.Call(t.Context(), id, "self.reboot", apiclient.CallRequest{Arguments: json.RawMessage(`{}`)}); err != nil {
		t.Fatal(err)
	}
	n.Await(t, "the device is back with new credentials", 30*time.Second, func() bool {
		d, err := n.Device(t.Context(), id)
		return err == nil && d.State == "online" && d.SessionID != before.SessionID && d.Credentials.PreviousUntil.IsZero()
	})
}
