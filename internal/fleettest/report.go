package fleettest

import (
	"encoding/json"
	"os/exec"
	"testing"

	"fleetd/simulator/firmware"
)

// Report is the simulator's report.
type Report = firmware.Report

// MQTTAttack is the report of `simulator --attack mqtt`.
type MQTTAttack struct {
	Login  bool `json:"login"` // with credentials of a device
	Probes []struct {
		Name    string `json:"name"`
		CONNACK *int   `json:"connack"`
		Closed  bool   `json:"closed"`
		Error   string `json:"error"`
	} `json:"probes"`
}

// Attack runs the simulator as an enemy until it is done, and returns its
// report, a UDPAttack or an MQTTAttack.
func Attack[T any](t testing.TB, p Programs, args ...string) (report T) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), p.Simulator, append([]string{"--report", "json"}, args...)...).Output()
	if err != nil {
		t.Errorf("attack %v: %v", args, err)
		return report
	}
	if err := json.Unmarshal(out, &report); err != nil {
		t.Errorf("attack %v: %v\n%s", args, err, tail(string(out), 500))
	}
	return report
}
