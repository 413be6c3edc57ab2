package fleettest

import (
	"encoding/json"
	"testing"
	"time"

	"fleetd/internal/api"
)

// A task that waits for the node that holds its device has that reason on every other node: whether that node
// does not answer, or does not reach the database; also after it was declared lost.
func TestTasksWaitForTheHolder(t *testing.T) {
	t.Parallel()
	c := programs.StartCluster(t, ClusterOptions{Nodes: 2, Seed: 28})
	const base = "02:ec:00:00:00:"
	programs.Simulate(t, c.OTA, "--devices", "6", "--mac-base", base+"00", "--seed", "1")
	c.AwaitReady(t, 6, time.Minute)
	awaitAcquainted(t, c.Nodes)
	asked := c.Nodes[0]
	device := c.heldBy(t, 1, base, 1)[0]
	create := func() (job string) {
		t.Helper()
		j, err := asked.CreateJob(t.Context(), api.NewJob{JobSpec: api.JobSpec{Devices: []string{device},
			Action: api.JobAction{Call: &api.JobCall{Tool: volume, Arguments: json.RawMessage(`{"volume":9}`)}}}}, "")
		if err != nil {
			t.Fatal(err)
		}
		return j.ID
	}
	waits := func(reason string) {
		t.Helper()
		asked.Await(t, "the task waits for the "+reason, 20*time.Second, func() bool {
			list, err := asked.Queue(t.Context(), device)
			return err == nil && len(list) == 1 && list[0].Reason == reason
		})
	}

	done := func(job string) {
		t.Helper()
		if j := asked.awaitJob(t, job, "done"); j.Counts.OK != 1 {
			t.Errorf("%+v", j.Counts)
		}
	}

	c.SQL[1].Break(0, Cut)
	job := create()
	waits("database")
	asked.Await(t, "the node is declared lost", time.Minute, func() bool {
		return c.DB.Count(t, "SELECT count(*) FROM presence WHERE device = $1 AND reason = 'node_lost'", device) == 1
	})
	waits("database")
	c.SQL[1].Break(0, None)
	done(job)

	asked.Await(t, "the device counts as connected again", time.Minute, func() bool {
		return c.DB.Count(t, "SELECT count(*) FROM presence WHERE device = $1 AND online", device) == 1
	})
	// A process that is stopped could leave a transaction open, for which everyone waits.
	c.SQL[1].Break(0, Cut)
	c.NATS[1].Break(0, Cut)
	job = create()
	waits("node")
	c.Mend()
	done(job)
}
