package node

import (
	"context"
	"encoding/json"
	"maps"

	"fleetd/internal/devices"
)

// questionStreams is the kind of the question which limits another node asks for.
const questionStreams = "streams"

// openStreams lets this node create and change the streams of the fleet, to which it belongs.
func (n *node) openStreams() {
	own := n.events.Limits()
	maps.Copy(own, n.vision.Limits())
	n.cluster.OnGather(questionStreams, func(context.Context, []byte) ([]byte, error) { return json.Marshal(own) })
	n.events.Open(n.streamLimits)
	n.vision.OpenStore(n.streamLimits)
}

// streamLimits is devices.OthersLimits.
func (n *node) streamLimits(ctx context.Context) (map[string]devices.StreamLimits, bool) {
	answers, missing := n.cluster.Gather(ctx, questionStreams, []byte("null"), n.nodeNames())
	largest := map[string]devices.StreamLimits{}
	complete := len(missing) == 0
	for _, answer := range answers {
		var theirs map[string]devices.StreamLimits
		if json.Unmarshal(answer, &theirs) != nil {
			complete = false
			continue
		}
		for name, limits := range theirs {
			largest[name] = largest[name].Max(limits)
		}
	}
	return largest, complete
}
