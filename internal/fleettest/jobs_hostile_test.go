package fleettest

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

// The hostile cases of jobs, and their tests:
//
//	 1  killed between the commit and the bytes, or before the answer   TestHoldersThatDie, TestCallLater, TestJobsAndKills
//	 1b frozen there, past its lease                                    TestHoldersThatDie
//	 2  power cut on SQLite right after a call                          TestPowerCutsOfJobs, store/database: commits reach the disk
//	 3  database lost before the outcome is recorded, then killed       TestHoldersThatDie
//	 3b connection cut inside COMMIT                                    storetest: a commit whose outcome is unknown; a transaction that is killed
//	 4  no database while tasks are due                                 TestJobsWithoutTheDatabase
//	 5  a device that comes and goes, with a queue                      TestQueueOfAFlappingDevice; storetest: a device that another node takes meanwhile
//	 6  two nodes hold a device                                         TestTwoHoldersOfADevice; storetest: two nodes that hold the same devices
//	 7  one key on three nodes                                          TestJobOverNATS; jobs/manager: TestSameKeyAtOnce; storetest: a key creates one job
//	 8  cancel and begin at once                                        storetest: begin and cancel at once
//	 9  rights, policy, label, device or tool gone before the beginning TestRightsAtTheBeginning
//	10  a restored backup                                               TestRestoreHaltsJobs
//	11  a late answer                                                   TestHoldersThatDie; storetest: a late answer replaces unknown
//	12  rounds while a device is away, missed ones, DST, clocks         TestMinuteJob, TestClocksOfJobs; jobs: TestRounds, TestSchedule
//	13  a job over 50,000 devices, a thousand open jobs                 TestJobOfManyDevices
//	14  a paused job is first in the queue                              storetest: who is not due holds nobody up
//	15  concurrency over three nodes, one of them frozen                TestConcurrencyOverNodes; storetest: limits hold over three stores
//	16  failures at once on three nodes                                 TestFailuresAtOnce; storetest: nothing begins after the stop rule
//	17  advance, resume, timer and halt at once                         storetest: three nodes at work; random work keeps the counters true

// heldBy returns devices of a simulation that a node holds.
func (c *Cluster) heldBy(t *testing.T, node int, base string, want int) (ids []string) {
	t.Helper()
	c.Nodes[1].Await(t, fmt.Sprintf("node-%d holds %d of %s", node, want, base), 30*time.Second, func() bool {
		ids = nil
		list, err := apiclient.Collect(c.Nodes[1].Devices(t.Context(), nil))
		for _, d := range list {
			if err == nil && d.ID[:len(base)] == base && d.Node == fmt.Sprint("node-", node) && d.State == "online" && d.MCP.CatalogState == "ready" {
				ids = append(ids, d.ID)
			}
		}
		return len(ids) >= want
	})
	return ids
}

// slowCommits makes the commits that begin tasks take a second, until the returned function is called, and
// waits for one.
func (c *Cluster) slowCommits(t *testing.T) (awaitCommit, end func()) {
	c.DB.Exec(t, `CREATE OR REPLACE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(1); RETURN NULL; END $$`)
	c.DB.Exec(t, `CREATE CONSTRAINT TRIGGER slow AFTER UPDATE ON jobs DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.running > OLD.running) EXECUTE FUNCTION slow()`)
	awaitCommit = func() {
		for deadline := time.Now().Add(10 * time.Second); c.DB.Count(t, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'`) == 0; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("no task begins")
			}
		}
	}
	return awaitCommit, func() { c.DB.Exec(t, `DROP TRIGGER slow ON jobs`) }
}

// Cases 1, 1b and 3: the holder of a device is killed or frozen between the commit that begins a task and the bytes,
// between the bytes and the answer, and between the answer and its record. Each task is unknown, or what its
// late answer was, and happens at most once.
func TestHoldersThatDie(t *testing.T) {
	long(t)
	t.Parallel()
	c := programs.StartCluster(t, ClusterOptions{Nodes: 2, Seed: 21})
	const base, count, late = "02:aa:00:00:00:", 12, 2 * time.Second
	sim := programs.Simulate(t, c.OTA, "--devices", fmt.Sprint(count), "--mac-base", base+"00", "--reconnect", "300ms", "--time-scale", "0.05", "--fault", "late-reply", "--late", late.String())
	a := newJobAccount(21, c.Nodes[1:], nil)
	// calls returns one job that waits for its answer, and the id of its device.
	calls := func(id string) (job string) {
		job = a.create(t, func(j *api.NewJob) { j.Devices = []string{id} })
		c.Nodes[1].Await(t, "the call is sent", 10*time.Second, func() bool {
			return c.DB.Count(t, "SELECT count(*) FROM tasks WHERE job = $1 AND state = 'running'", job) == 1
		})
		time.Sleep(200 * time.Millisecond) // the row is there before the bytes reach the device
		return job
	}
	ends := func(job string, outcomes ...string) {
		t.Helper()
		c.Nodes[1].Await(t, "the task has ended", 40*time.Second, func() bool {
			j, err := a.job(t.Context(), job)
			return err == nil && !j.EndedAt.IsZero()
		})
		if row := a.rows(t, job)[0]; !slices.Contains(outcomes, row.Outcome) || row.Attempt != 1 {
			t.Errorf("%+v, want %v", row, outcomes)
		}
	}
	executed := map[string]int{} // by job

	gather := func() []string { // at the node that dies
		c.MQTT.Break(1, Cut)
		defer c.MQTT.Break(1, None)
		return c.heldBy(t, 0, base, count)
	}
	for _, frozen := range []bool{false, true} {
		ids := gather()
		sent := calls(ids[0])
		awaitCommit, end := c.slowCommits(t)
		committed := a.create(t, func(j *api.NewJob) { j.Devices = []string{ids[1]} })
		awaitCommit()
		if frozen {
			c.Nodes[0].Freeze(t)
		} else {
			c.Nodes[0].Kill(t)
		}
		end()
		ends(committed, "unknown")
		ends(sent, "unknown")
		if frozen {
			c.Nodes[0].Thaw(t)
		} else {
			c.Nodes[0].Run(t)
		}
		executed[sent], executed[committed] = 1, 0
	}

	sent := calls(gather()[0])
	c.SQL[0].Break(0, Cut)
	time.Sleep(late + 300*time.Millisecond) // the device has answered
	if state := c.DB.Count(t, "SELECT count(*) FROM tasks WHERE job = $1 AND state = 'running'", sent); state != 1 {
		t.Errorf("the outcome is recorded without the database")
	}
	c.Nodes[0].Kill(t)
	c.SQL[0].Break(0, None)
	c.Nodes[0].Run(t)
	ends(sent, "unknown")
	executed[sent] = 1

	c.AwaitReady(t, count, time.Minute)
	var all []string
	for i := range count {
		all = append(all, fmt.Sprintf("%s%02x", base, i))
	}
	ends(a.create(t, func(j *api.NewJob) { j.Devices = all }), "ok")
	report := sim.Report(t)
	outcomes := a.judge(t, report)
	for job, want := range executed {
		if got := int(report.Totals.Markers[a.all[job]]); got != want {
			t.Errorf("job %s was executed %d times, want %d", job, got, want)
		}
	}
	t.Log(outcomes)
}

// Case 6: NATS does not reach a node, whose devices have left without a word and are connected to another: both hold
// them, and each task runs on one.
func TestTwoHoldersOfADevice(t *testing.T) {
	long(t)
	t.Parallel()
	c := programs.StartCluster(t, ClusterOptions{Nodes: 2, Seed: 22})
	const count = 20
	var ids []string
	for i := range count {
		ids = append(ids, fmt.Sprintf("02:ac:00:00:00:%02x", i))
	}
	sim := programs.Simulate(t, c.OTA, "--transport", "mqtt", "--devices", fmt.Sprint(count), "--mac-base", ids[0], "--reconnect", "200ms", "--time-scale", "0.5")
	c.AwaitReady(t, count, time.Minute)
	c.NATS[0].Break(0, Stalled)
	c.MQTT.Desert(0)
	c.Nodes[1].Await(t, "both hold some devices", 10*time.Second, func() bool { return c.Held(t) > count })
	a := newJobAccount(22, c.Nodes, ids)
	for range 5 {
		a.create(t, func(j *api.NewJob) { j.Action.Call.Timeout = "2s" })
	}
	both := c.Held(t) - count
	time.Sleep(3 * time.Second) // longer than a call may take
	c.NATS[0].Break(0, None)
	a.settle(t, time.Minute)
	outcomes := a.judge(t, sim.Report(t))
	if both <= 0 || outcomes["ok"] == 0 {
		t.Errorf("%d devices had two holders: %v", both, outcomes)
	}
	t.Logf("%d devices had two holders: %v", both, outcomes)
}

// Case 5: a device comes and goes on two nodes while 50 calls wait for it. Their order is kept, none is lost, and none
// is made twice.
func TestQueueOfAFlappingDevice(t *testing.T) {
	long(t)
	t.Parallel()
	const calls, id = 50, "02:ad:00:00:00:00"
	c := programs.StartCluster(t, ClusterOptions{Nodes: 2, Seed: 23})
	sim := programs.Simulate(t, c.OTA, "--transport", "mqtt", "--devices", "1", "--mac-base", id, "--fault", "late-reply", "--late", "50ms", "--reconnect", "1s", "--time-scale", "0.2")
	c.Nodes[0].AwaitReady(t, 1)
	a := newJobAccount(23, c.Nodes, []string{id})
	for range calls {
		a.create(t, nil)
	}
	// Each connection lasts for two calls and part of another, however long a call takes.
	ok := func() int { return c.DB.Count(t, "SELECT count(*) FROM tasks WHERE outcome = 'ok'") }
	for open := calls; open > 0; {
		enough := ok() + 2
		c.Nodes[0].Await(t, "two more calls are made", time.Minute, func() bool {
			open = a.resume(t.Context())
			return open == 0 || ok() >= enough
		})
		for i := range c.Nodes {
			c.MQTT.Break(i, Cut)
			c.MQTT.Break(i, None)
		}
	}
	report := sim.Report(t)
	outcomes := a.judge(t, report)
	if n := c.DB.Count(t, "SELECT count(*) FROM tasks a JOIN tasks b ON b.seq > a.seq AND b.begun_at < a.begun_at"); n != 0 {
		t.Errorf("%d pairs of calls in another order", n)
	}
	if outcomes["ok"]+outcomes["unknown"] != calls || outcomes["ok"] < calls/2 {
		t.Errorf("outcomes %v", outcomes)
	}
	t.Logf("%d connections: %v", report.Totals.Connects, outcomes)
}

// Case 15: many devices boot at once on three nodes, of which one is frozen with tasks of its own: never
// more tasks run than the job permits.
func TestConcurrencyOverNodes(t *testing.T) {
	long(t)
	t.Parallel()
	const count, most = 120, 10
	c := programs.StartCluster(t, ClusterOptions{Seed: 24})
	var ids []string
	for i := range count {
		ids = append(ids, fmt.Sprintf("02:ae:00:00:00:%02x", i))
	}
	simulate := func() *Simulation {
		return programs.Simulate(t, c.OTA, "--transport", "mqtt", "--devices", fmt.Sprint(count), "--ramp", "1000/s", "--mac-base", ids[0], "--fault", "late-reply", "--late", "100ms", "--reconnect", "300ms", "--time-scale", "0.05")
	}
	first := simulate()
	c.AwaitReady(t, count, time.Minute)
	first.Report(t)
	c.AwaitReady(t, 0, time.Minute)
	a := newJobAccount(24, c.Nodes[:2], ids)
	job := a.create(t, func(j *api.NewJob) { j.Pace.Concurrency = most })
	sim := simulate()
	frozen, highest := false, 0
	for deadline := time.Now().Add(time.Minute); a.resume(t.Context()) > 0; time.Sleep(5 * time.Millisecond) {
		running := c.DB.Count(t, "SELECT count(*) FROM tasks WHERE state = 'running'")
		if highest = max(highest, running); !frozen && c.DB.Count(t, "SELECT count(*) FROM tasks WHERE state = 'running' AND node = 'node-2'") > 2 {
			frozen = true
			c.Nodes[2].Freeze(t)
			c.MQTT.Break(2, Cut)
		}
		if time.Now().After(deadline) {
			j, _ := a.job(t.Context(), job)
			t.Fatalf("%+v", j)
		}
	}
	c.MQTT.Break(2, None)
	c.Nodes[2].Thaw(t)
	outcomes := a.judge(t, sim.Report(t))
	if !frozen || highest != most || outcomes["unknown"] == 0 {
		t.Errorf("frozen %v; %d ran at once; %v", frozen, highest, outcomes)
	}
	t.Logf("%d ran at once: %v", highest, outcomes)
}

// Case 16: calls on three nodes fail at the same moment, since nothing answers in time. After the job has halted nothing begins, and
// no more devices come to harm than its stop rule and its concurrency admit.
func TestFailuresAtOnce(t *testing.T) {
	long(t)
	t.Parallel()
	const count, stop, together, rounds = 90, 4, 60, 3 // so many that no node alone has them
	c := programs.StartCluster(t, ClusterOptions{Seed: 26})
	var ids []string
	for i := range count {
		ids = append(ids, fmt.Sprintf("02:af:00:00:00:%02x", i))
	}
	sim := programs.Simulate(t, c.OTA, "--devices", fmt.Sprint(count), "--mac-base", ids[0], "--fault", "late-reply", "--late", "4s")
	c.AwaitReady(t, count, time.Minute)
	a := newJobAccount(26, c.Nodes, ids)
	nodes := 0
	for range rounds {
		job := a.create(t, func(j *api.NewJob) {
			j.Pace.Concurrency, j.Stop = together, &api.JobStop{Failed: stop}
			j.Action.Call.Timeout = "1s"
		})
		c.Nodes[0].Await(t, "the job is halted", 20*time.Second, func() bool {
			return c.DB.Count(t, "SELECT count(*) FROM jobs WHERE job = $1 AND state = 'halted'", job) == 1
		})
		const begun = "SELECT count(*) FROM tasks WHERE job = $1 AND attempt > 0"
		harmed := c.DB.Count(t, begun, job)
		if harmed < stop || harmed > stop+together {
			t.Errorf("%d devices came to harm, %d to %d may", harmed, stop, stop+together)
		}
		c.Nodes[0].Await(t, "those that ran have ended", 20*time.Second, func() bool {
			return c.DB.Count(t, "SELECT count(*) FROM tasks WHERE job = $1 AND state = 'running'", job) == 0
		})
		time.Sleep(time.Second)                             // in which a node would begin others
		if n := c.DB.Count(t, begun, job) - harmed; n > 0 { // less: given back, not sent
			t.Errorf("%d tasks began after the halt", n)
		}
		nodes = max(nodes, c.DB.Count(t, "SELECT count(DISTINCT node) FROM tasks WHERE job = $1 AND attempt > 0", job))
	}
	if nodes < 2 { // in one round a node may begin so late that the failures of another have halted the job
		t.Errorf("failures on %d nodes", nodes)
	}
	a.settle(t, 30*time.Second) // which cancels them
	outcomes := a.judge(t, sim.Report(t))
	if outcomes["ok"]+outcomes["unknown"]+outcomes["cancelled"] != rounds*count || outcomes["cancelled"] < rounds*(count-stop-together) {
		t.Errorf("outcomes %v", outcomes)
	}
	t.Log(outcomes)
}
