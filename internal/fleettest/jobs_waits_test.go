package fleettest

import (
	"encoding/json"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
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
			list, err := apiclient.Collect(apiclient.List[api.Task](t.Context(), asked.Client, nil, "devices", device, "tasks"))
			return err == nil && len(list) == 1 && list[0].Reason == reason
		})
	}

	done := func(job string) {
		t.Helper()
		if j := asked.awaitJob(t, job, "done"); j.Counts.OK != 1 {
			t.Errorf("%+v", j.Counts)
		}
	}

	// The holder writes a connection a moment after it has it.
	asked.Await(t, "the connection is in the database", time.Minute, func() bool {
		return c.DB.Count(t, "SELECT count(*) FROM presence WHERE device = $1 AND online", device) == 1
	})
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

// A device that answers no MCP gets the restart that waits for it when it connects: this is why one restarts it.
func TestRestartOfASilentDevice(t *testing.T) {
	t.Parallel()
	node := programs.Start(t)
	const device = "02:eb:00:00:00:00"
	simulate := func() *Simulation {
		return programs.Simulate(t, node.Info.OTA, "--devices", "1", "--mac-base", device, "--transport", "mqtt", "--fault", "silent")
	}
	state := func(want string) {
		t.Helper()
		node.Await(t, "the device is "+want, time.Minute, func() bool {
			d, err := node.Device(t.Context(), device)
			return err == nil && d.State == want
		})
	}
	sim := simulate()
	state("online")
	sim.Report(t)
	state("offline")
	job, err := node.CreateJob(t.Context(), api.NewJob{JobSpec: api.JobSpec{Devices: []string{device}, Action: api.JobAction{Restart: &api.JobRestart{When: "now"}}}}, "")
	if err != nil {
		t.Fatal(err)
	}
	simulate()
	if j := node.awaitJob(t, job.ID, "done"); j.Counts.OK != 1 {
		t.Errorf("%+v", j.Counts)
	}
}
