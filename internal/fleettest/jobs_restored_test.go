package fleettest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"fleetd/internal/store"
)

// A database that is put back by other tools repeats nothing: the node knows from its note that tasks began since, halts what is
// open, and says so.
func TestDatabaseRestoredByOtherTools(t *testing.T) {
	t.Parallel()
	node := programs.Start(t)
	programs.Simulate(t, node.Info.OTA, "--devices", "1")
	node.AwaitReady(t, 1)
	node.AwaitStored(t)
	run := func(args ...string) string {
		t.Helper()
		out, errs, status := node.Command(t, append([]string{"jobs", "run", "device=*", volume, "volume=40", "--yes"}, args...)...)
		if status != 0 {
			t.Fatalf("%d %s %s", status, out, errs)
		}
		return strings.Fields(out)[1]
	}
	schedule := run("--cron", "0 7 1 1 *")
	run("--watch")
	node.Stop(t)
	file := filepath.Join(node.Dir, store.FileName)
	dump, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	node.Run(t)
	node.AwaitReady(t, 1)
	run("--watch") // a task begins after the dump
	if j := node.awaitJob(t, schedule, "scheduled"); j.NextAt.IsZero() {
		t.Errorf("%+v", j)
	}
	node.Stop(t)
	for _, suffix := range []string{"-wal", "-shm"} {
		if err := os.Remove(file + suffix); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(file, dump, 0o600); err != nil {
		t.Fatal(err)
	}
	node.Run(t)
	// security: K43
	if j := node.awaitJob(t, schedule, "halted"); j.Reason != "restored" || !j.NextAt.IsZero() {
		t.Errorf("%+v", j)
	}
	if log := node.Log.String(); !strings.Contains(log, "has begun fewer tasks of jobs than this node knows") {
		t.Errorf("the log does not say so: %s", tail(log, 3000))
	}
	node.Stop(t)
	node.Run(t)
	node.Await(t, "the next start warns", time.Minute, func() bool {
		return strings.Contains(node.Log.String(), "jobs are halted since the database was restored")
	})
	if _, errs, status := node.Command(t, "jobs", "resume", schedule); status != 0 {
		t.Errorf("%d %s", status, errs)
	}
	if j := node.awaitJob(t, schedule, "scheduled"); j.NextAt.IsZero() {
		t.Errorf("resumed: %+v", j)
	}
}
