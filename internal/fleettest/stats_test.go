package fleettest

import (
	"slices"
	"strings"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

// newest returns the last figure of a series that is there, summed over its values.
func newest(s api.Stats, name string) (sum float64, found bool) {
	for _, series := range s.Series {
		if series.Name != name {
			continue
		}
		for _, p := range slices.Backward(series.Points) {
			if p != nil {
				sum, found = sum+*p, true
				break
			}
		}
	}
	return sum, found
}

// Any node has the figures of all: those of devices of three nodes add up, calls on another node count, a node that is
// killed is named as missing, and one that starts again is marked and has what came after.
func TestStatsOfThreeNodes(t *testing.T) {
	t.Parallel()
	c := programs.StartCluster(t, ClusterOptions{Nodes: 3})
	programs.Simulate(t, c.OTA, "--devices", "9")
	c.AwaitReady(t, 9, time.Minute)
	asked := c.Nodes[0]
	stats := func() api.Stats {
		t.Helper()
		s, err := apiclient.Get[api.Stats](t.Context(), asked.Client, apiclient.Query{"since": time.Now().Add(-10 * time.Minute).UTC().Format(time.RFC3339)}, "stats")
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	for _, d := range asked.List(t) {
		if _, err := asked.Volume(t, d.ID, 10*time.Second); err != nil {
			t.Fatal(err)
		}
	}
	var s api.Stats
	asked.Await(t, "all calls are in the figures", 30*time.Second, func() bool {
		s = stats()
		calls, _ := newest(s, "calls")
		p99, measured := newest(s, "call_p99")
		return calls > 0 && measured && p99 > 0 && p99 < 10 &&
			len(s.Nodes) == 3 && len(s.NodesMissing) == 0 && len(s.Starts) == 3 // a node that computes may miss one answer
	})
	asked.Await(t, "a step in which all nine were online", time.Minute, func() bool { // on three nodes
		online, _ := newest(stats(), "online")
		return online == 9
	})

	killed := c.Nodes[2]
	name := killed.Info.Node
	killed.Kill(t)
	if s = stats(); !slices.Equal(s.NodesMissing, []string{name}) || len(s.Nodes) != 2 {
		t.Errorf("killed %s: nodes %v, missing %v", name, s.Nodes, s.NodesMissing)
	}
	out, errs, status := asked.Command(t, "fleet", "--since", "10m")
	if status != 0 || !strings.Contains(errs, "no answer from: "+name) || !strings.Contains(out, "CALL_P99") {
		t.Errorf("status %d: %s\n%s", status, errs, out)
	}
	killed.Run(t)
	asked.Await(t, "the node answers again", 30*time.Second, func() bool { s = stats(); return len(s.Nodes) == 3 && len(s.NodesMissing) == 0 })
}
