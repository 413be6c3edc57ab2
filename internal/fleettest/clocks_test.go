package fleettest

import (
	"fmt"
	"testing"
	"time"

	"fleetd/internal/api"
)

// The clocks of two nodes and of the database are stepped by an hour, forwards and back, under three nodes with devices and jobs.
// No connection ends for that; a rate and a soak go on as if no clock was stepped, whoever has the turn of the jobs; no task is
// lost, made twice or unknown.
func TestSteppedClocks(t *testing.T) {
	long(t)
	t.Parallel()
	const count = 12
	c := programs.StartCluster(t, ClusterOptions{Seed: 33, Stepped: true})
	var ids []string
	for i := range count {
		ids = append(ids, fmt.Sprintf("02:be:00:00:00:%02x", i))
	}
	sim := programs.Simulate(t, c.OTA, "--transport", "mqtt", "--devices", fmt.Sprint(count), "--mac-base", ids[0])
	c.AwaitReady(t, count, time.Minute)
	closed := func() (n float64) {
		for _, node := range c.Nodes {
			n += node.Metric(t, "fleetd_device_disconnects_total")
		}
		return n
	}
	before := closed()

	a := newJobAccount(33, c.Nodes, ids)
	begun := time.Now()
	paced := a.create(t, func(j *api.NewJob) { j.Pace = &api.JobPace{Rate: "1/s", Concurrency: 5} })
	soaked := a.create(t, func(j *api.NewJob) {
		j.Stages = []api.JobStage{{OK: api.Amount{Number: 2}, Soak: "10s"}, {OK: api.Amount{Percent: 100}}}
	})
	for _, by := range []time.Duration{-time.Hour, time.Hour, -time.Hour, 0} {
		c.StepDatabase(by)
		c.Nodes[0].StepClock(t, by)
		c.Nodes[1].StepClock(t, -by)
		time.Sleep(3 * time.Second)
	}
	c.StepDatabase(-time.Hour)
	for _, id := range []string{paced, soaked} {
		if j := c.Nodes[2].awaitJob(t, id, "done"); j.Counts.OK != count {
			t.Errorf("%+v", j.Counts)
		}
	}
	if took := time.Since(begun); took < 9*time.Second {
		t.Errorf("a rate of one a second and a soak of ten seconds were over after %v", took)
	}
	if ended := closed() - before; ended != 0 {
		t.Errorf("%v connections ended", ended)
	}
	// The turn of the jobs goes to another node though the clock was set back under it.
	holder := func() int {
		for i := range c.Nodes {
			if c.DB.Count(t, "SELECT count(*) FROM fleet f JOIN nodes n ON f.value LIKE '% ' || n.instance WHERE f.key = 'jobs_turn' AND n.node = $1", fmt.Sprint("node-", i)) == 1 {
				return i
			}
		}
		return -1
	}()
	if holder < 0 {
		t.Fatal("nobody has the turn of the jobs")
	}
	c.Nodes[holder].Kill(t)
	c.StepDatabase(-2 * time.Hour)
	a.nodes = append(append([]*Node{}, c.Nodes[:holder]...), c.Nodes[holder+1:]...)
	last := a.create(t, func(j *api.NewJob) {
		j.Stages = []api.JobStage{{OK: api.Amount{Number: 1}, Soak: "1s"}, {OK: api.Amount{Percent: 100}}}
	})
	if j := a.nodes[0].awaitJob(t, last, "done"); j.Counts.OK != count {
		t.Errorf("after its holder was killed: %+v", j.Counts)
	}
	if r := sim.Report(t); r.Totals.MarkersRepeated != 0 || r.Totals.CallsTotal != 3*count {
		t.Errorf("%v, %d repeated, %d calls", r.Totals.Markers, r.Totals.MarkersRepeated, r.Totals.CallsTotal)
	}
}
