package node

import (
	"time"

	"fleetd/internal/explain"
)

// startExplain answers the questions of other nodes about the records of this one.
func (n *node) startExplain() {
	opt := explain.Options{Devices: n.service, Events: n.events, Node: n.cfg.Node, Gather: n.cluster.Gather, Nodes: n.nodeNames, Compute: n.work.Computing.Enter,
		Keepalive: time.Duration(n.cfg.MQTTKeepalive) * time.Second}
	if n.recorder != nil {
		opt.Records = n.recorder
	}
	n.explain = explain.New(opt)
	n.cluster.OnGather(explain.Question, n.explain.Answer)
}
