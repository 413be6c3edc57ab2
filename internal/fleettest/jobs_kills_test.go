package fleettest

import (
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"
)

// Nodes are killed one after the other while jobs run: 20 times, or FLEETD_TEST_KILLS, while at least
// 20,000 tasks run. Every attempt is executed at most once, every task ends, the counters of the
// jobs are those of their tasks, and what is unknown is not repeated unless the job is repeatable.
func TestJobsAndKills(t *testing.T) {
	long(t)
	t.Parallel()
	kills := 20
	if text := os.Getenv("FLEETD_TEST_KILLS"); text != "" {
		var err error
		if kills, err = strconv.Atoi(text); err != nil {
			t.Fatalf("FLEETD_TEST_KILLS: %v", err)
		}
	}
	c := programs.StartCluster(t, ClusterOptions{Seed: 16})
	var ids []string
	for i := range 250 {
		ids = append(ids, fmt.Sprintf("02:ab:00:00:00:%02x", i))
	}
	sim := programs.Simulate(t, c.OTA, "--transport", "mqtt", "--devices", fmt.Sprint(len(ids)), "--mac-base", ids[0], "--reconnect", "300ms", "--reconnect-jitter", "500ms", "--time-scale", "0.05",
		"--fault", "late-reply", "--late", "200ms") // so that a kill meets calls that run
	c.AwaitReady(t, len(ids), time.Minute)
	a := newJobAccount(16, c.Nodes, ids)
	begun := time.Now()
	a.killNodes(t, kills, min(5*time.Second, 10*time.Minute/time.Duration(max(kills, 1))), 20_000) // 200 take less than 20 minutes
	a.settle(t, 2*time.Minute)
	took := time.Since(begun)
	report := sim.Report(t)
	outcomes := a.judge(t, report)
	if outcomes["ok"] == 0 || report.Totals.Crashes != 0 {
		t.Errorf("%d crashes", report.Totals.Crashes)
	}
	t.Logf("%d kills in %v, %d jobs, %d tasks: %v; %d calls executed", kills, took.Round(time.Second), len(a.all), a.tasks, outcomes, report.Totals.CallsTotal)
}
