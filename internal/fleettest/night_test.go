package fleettest

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"fleetd/internal/apiclient"
)

// nightTime is how long the database is away in TestNight: NIGHT, such as 10m.
func nightTime(t *testing.T) time.Duration {
	text := os.Getenv("NIGHT")
	if text == "" {
		return 20 * time.Second
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("NIGHT is %q, want a duration such as 10m", text)
	}
	return d
}

// A night of 200 devices on three nodes: a node is killed, the database is away, ten devices have a fault, some lose
// their power, one is revoked. In the morning each question of an operator is answered by one command.
//
// NIGHT=10m go test -v -run TestNight ./internal/fleettest prints the commands and their answers.
func TestNight(t *testing.T) {
	long(t)
	t.Parallel()
	const well, silent, off, all = 183, 10, 7, 200
	c := programs.StartCluster(t, ClusterOptions{Seed: 30})
	base := func(group string) string { return "02:c1:" + group + ":00:00:00" }
	simulate := func(group string, count int, args ...string) *Simulation {
		return programs.Simulate(t, c.OTA, append([]string{"--transport", "mqtt", "--devices", fmt.Sprint(count), "--mac-base", base(group), "--ramp", "100/s", "--reconnect", "1s"}, args...)...)
	}
	simulate("01", well-1)
	slow := simulate("02", 1, "--fault", "late-reply", "--late", "3s")
	powerless := simulate("04", off)
	c.AwaitReady(t, well+off, time.Minute)
	simulate("03", silent, "--fault", "silent")
	evening := c.Nodes[0]
	evening.Await(t, "all are connected", time.Minute, func() bool { return c.Held(t) == all })

	// The night.
	_, err := evening.Call(t.Context(), base("02"), volume, apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":9}`), Timeout: time.Second})
	call := problemCall(err)
	// The device answers late. What was recorded of that would be lost with its node, so another one is killed.
	evening.Await(t, "the late answer is recorded", time.Minute, func() bool {
		why, err := evening.ExplainCall(t.Context(), call)
		return err == nil && why.Cause == "answered_late"
	})
	killed, other := c.Nodes[2], c.Nodes[1]
	if len(c.heldBy(t, 2, base("02"), 0)) > 0 {
		killed, other = other, killed
	}
	killed.Kill(t)
	evening.Await(t, "the devices of the killed node are elsewhere", 2*time.Minute, func() bool {
		return evening.Metric(t, "fleetd_devices")+other.Metric(t, "fleetd_devices") == all
	})
	c.BreakSQL(Cut)
	time.Sleep(nightTime(t) / 2) // without the database
	powerless.Report(t)
	time.Sleep(nightTime(t) / 2)
	c.BreakSQL(None)
	evening.Await(t, "the database is back", time.Minute, func() bool {
		_, _, status := evening.Command(t, "devices", "revoke", base("02"))
		return status == 0
	})
	slow.Report(t)
	killed.Run(t)

	// The morning.
	morning := killed
	ask := func(question string, status int, contains []string, command ...string) {
		t.Helper()
		var out, errs string
		got := -1
		holds := func() bool {
			if got != status {
				return false
			}
			for _, text := range contains {
				if !strings.Contains(out, text) {
					return false
				}
			}
			return true
		}
		for deadline := time.Now().Add(time.Minute); !holds() && time.Now().Before(deadline); time.Sleep(500 * time.Millisecond) {
			out, errs, got = morning.Command(t, command...)
		}
		t.Logf("%s\n$ fleetd %s\n%s%s(status %d)", question, strings.Join(command, " "), out, errs, got)
		if !holds() {
			t.Errorf("%s: status %d, want %d, with %q", question, got, status, contains)
		}
	}
	ask("What is offline, and why?", 3, []string{"gone", "revoked"}, "explain", "--offline")
	if out, _, _ := morning.Command(t, "explain", "--offline"); strings.Contains(out, "unknown") {
		t.Errorf("a device is offline for an unknown cause:\n%s", out)
	}
	ask("Why is this device offline?", 3, []string{"gone", "Evidence"}, "explain", base("04"))
	ask("Why does this one, which is connected, do nothing?", 3, []string{"mcp_silent"}, "explain", base("03"))
	ask("Why did this call fail?", 3, []string{"answered_late"}, "explain", call)
	ask("What did this device do in the night?", 0, []string{"connected"}, "log", base("01"))
	ask("How many are connected, and how many of them do not work?", 0, []string{fmt.Sprint(all - off - 1), fmt.Sprint(silent)}, "fleet")
	ask("When were devices lost?", 0, []string{"ONLINE"}, "fleet", "--since", "1h")
	ask("Which nodes are there, and since when?", 0, []string{"node-0", "node-1", "node-2"}, "nodes")
	ask("Who revoked that device?", 0, []string{"revoke", "admin"}, "audit", "--device", base("02"), "--kind", "device")
	ask("Which calls were made?", 0, []string{volume}, "audit", "--kind", "call")
	ask("Which calls failed?", 0, []string{"device_timeout"}, "audit", "--kind", "call", "--outcome", "device_timeout")
	ask("Which devices have been away longest?", 0, []string{base("04")}, "devices", "--state", "offline", "--sort", "offline_since")
}
