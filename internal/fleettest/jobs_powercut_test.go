package fleettest

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"
)

// Case 2: the power of a node on SQLite is cut while tasks run. What devices executed is in the database, so that it
// is not executed again, and every job that was answered is there.
func TestPowerCutsOfJobs(t *testing.T) {
	long(t)
	for n, kind := range []string{"ext4", "xfs"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			d := newDisk(t, kind)
			node := &Node{Dir: filepath.Join(d.mount, "node"), programs: programs}
			node.Run(t)
			var ids []string
			for i := range 50 {
				ids = append(ids, fmt.Sprintf("02:cb:00:00:%02x:%02x", n, i))
			}
			sim := programs.Simulate(t, node.Info.OTA, "--devices", fmt.Sprint(len(ids)), "--mac-base", ids[0], "--fault", "late-reply", "--late", "20ms", "--reconnect", "300ms", "--time-scale", "0.05")
			a := newJobAccount(uint64(n), []*Node{node}, ids)
			for cut := range 10 {
				node.AwaitReady(t, len(ids))
				for range 4 {
					a.create(t, nil)
				}
				time.Sleep(time.Duration(20*cut) * time.Millisecond) // each cut meets the tasks at another moment
				d.cut(t, node, []uint32{flushLog, loseAll}[cut%2])
				node.Run(t)
			}
			a.settle(t, 2*time.Minute)
			outcomes := a.judge(t, sim.Report(t))
			node.Stop(t)
			if outcomes["unknown"] == 0 || outcomes["ok"] == 0 {
				t.Errorf("no cut met a task that ran: %v", outcomes)
			}
			t.Log(outcomes)
		})
	}
}
