package node

import (
	"fleetd/internal/counters"
	"fleetd/internal/stats"
)

// startStats starts to sample the metrics, which must all be registered, and to answer the questions of other
// nodes for them.
func (n *node) startStats(metrics *counters.Registry) *stats.Fleet {
	recorder := stats.New(n.cfg.Node, n.started, metrics)
	n.whileRunning(recorder.Run)
	n.cluster.OnGather(stats.Question, recorder.Answer)
	return &stats.Fleet{Recorder: recorder, Gather: n.cluster.Gather, Nodes: n.nodeNames}
}
