package fleettest

import (
	"fmt"
	"testing"
	"time"
)

// Three nodes are restarted one after the other, as a deploy does it, under
// calls and conversations: no answer is wrong, nobody hangs, and what fails is
// answered with 409 or 503.
func TestRollingRestart(t *testing.T) { // alone: what a machine is too busy for in the drain window is cut off
	long(t)
	const idle, talking = 100, 50
	c := programs.StartCluster(t, ClusterOptions{Seed: 7, Args: []string{"--drain-window", "4s"}})
	come := []string{"--transport", "mqtt", "--reconnect", "500ms", "--reconnect-jitter", "500ms", "--time-scale", "0.1", "--quiet"}
	s := &storm{Cluster: c, t: t, checking: "a rolling restart"}
	s.sims = []*Simulation{
		programs.Simulate(t, c.OTA, append(come, "--devices", fmt.Sprint(idle), "--mac-base", "02:e0:00:00:00:00", "--seed", "7")...),
		programs.Simulate(t, c.OTA, append(come, "--devices", fmt.Sprint(talking), "--mac-base", "02:e1:00:00:00:00", "--seed", "8",
			"--talk", "--utterance", "3s", "--talk-for", "3s", "--wake", "1s")...),
	}
	for i := range idle {
		s.ids = append(s.ids, fmt.Sprintf("02:e0:00:00:00:%02x", i))
	}
	for i := range talking {
		s.ids = append(s.ids, fmt.Sprintf("02:e1:00:00:00:%02x", i))
	}
	c.AwaitReady(t, len(s.ids), time.Minute)
	conversations := func() (open float64) {
		for _, n := range c.Nodes {
			open += n.Metric(t, "fleetd_conversations")
		}
		return open
	}
	c.Nodes[0].Await(t, "the devices talk", 20*time.Second, func() bool { return conversations() >= talking*3/4 })
	begun := time.Now()
	s.load = c.StartLoad(t, s.ids, LoadOptions{Seed: 7, Callers: 26, Pause: 90 * time.Millisecond, Timeout: 10 * time.Second})
	for i, n := range c.Nodes {
		up := s.load.Down(i)               // the load balancer sends nothing more here
		time.Sleep(100 * time.Millisecond) // requests that are on their way arrive
		stopping := time.Now()
		n.Stop(t)
		t.Logf("node-%d stopped in %v", i, time.Since(stopping).Round(time.Millisecond))
		n.Run(t)
		up()
		c.AwaitReady(t, len(s.ids), 30*time.Second)
	}
	lasted := time.Since(begun)
	if !s.rest(20 * time.Second) {
		t.Error("the fleet does not come to rest")
	}
	s.load.Stop()
	outcomes := s.load.Outcomes()
	total := 0
	for outcome, n := range outcomes {
		total += n
		switch outcome {
		case "ok", "device_offline", "superseded", "unavailable":
		default:
			s.violated("%d calls ended as %s", n, outcome)
		}
	}
	t.Logf("%d calls in %v, %.0f/s: %v", total, lasted.Round(time.Second), float64(total)/lasted.Seconds(), outcomes)
	if outcomes["ok"] < total*8/10 {
		s.violated("only %d of %d calls succeeded", outcomes["ok"], total)
	}
	s.agree()
	s.account()
	for _, v := range s.violations {
		t.Error(v)
	}
}
