package upstream

import "fleetd/internal/counters"

// Metrics adds the metrics of the voice server of `--voice-upstream`.
func (b *Bridge) Metrics(r *counters.Registry) {
	counters.ByKey(r.Counter("upstream_connections_total", "Connections to the voice server, by outcome.", "outcome"), &b.Connections)
	counters.ByKey(r.Counter("upstream_bad_messages_total", "Unusable messages of the voice server, by kind.", "kind"), &b.BadMessages)
	counters.ByKey(r.Counter("upstream_frames_total", "Audio frames to and from the voice server.", "direction"), &b.Frames)
	counters.ByKey(r.Counter("upstream_dropped_total", "Frames and messages that were dropped, by reason.", "reason"), &b.Dropped)
	counters.ByKey(r.Counter("upstream_mcp_requests_total", "MCP requests of the voice server: `ok`, or the code of the error.", "outcome"), &b.Requests)
}
