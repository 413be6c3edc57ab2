package mcpserver

import "fleetd/internal/counters"

// Metrics adds the counters of MCP hosts.
func (s *Stats) Metrics(r *counters.Registry) {
	counters.ByKey(r.Counter("mcp_requests_total", "Requests of MCP hosts, by method; unknown methods count as `other`.", "method"), &s.Requests)
	counters.ByKey(r.Counter("mcp_calls_total", "Tool calls of MCP hosts: `ok`, `tool_error`, `asked` (a person must confirm), `failed_of_many`, or the code of the refusal.", "outcome"), &s.Calls)
	counters.ByKey(r.Counter("mcp_refused_total", "Requests to the MCP paths that were not served: `host`, `origin`, `unauthorized`, `too_many` (wrong tokens from this address), `forbidden`, `not_found`, `session_of_another`, `stream_open`, "+
		"`sessions` (1,000 on a node), `sessions_of_key` (100), `requests_of_key` (200), `calls_of_key` (200), `rate_of_key` (searches and large bodies), `body` (incomplete), `draining`.", "reason"), &s.Refused)
	counters.ByKey(r.Counter("mcp_notifications_total", "Notifications to MCP hosts: `tools`, `resource`.", "kind"), &s.Notified)
	counters.Value(r.Gauge("mcp_sessions", "MCP sessions open on this node."), s.Sessions.Load)
	counters.Value(r.Counter("mcp_sessions_evicted_total", "Idle MCP sessions that were ended so that their key could open another."), s.Evicted.Load)
	counters.Value(r.Counter("mcp_searches_refused_total", "Searches by words that were refused because the fleet has more than 100,000 devices, which are not indexed."), s.Unindexed.Load)
	counters.Value(r.Gauge("mcp_requests_in_progress", "MCP requests in progress, including open streams."), s.Streams.Load)
	counters.Value(r.Gauge("mcp_replay_bytes", "Memory for messages of interrupted streams, at most 64 MiB."), s.ReplayBytes.Load)
	counters.Value(r.Counter("mcp_replay_dropped_total", "Messages of streams that were not kept, or dropped for newer ones."), s.ReplayDropped.Load)
	counters.Value(r.Counter("mcp_schemas_replaced_total", "Tool schemas of devices that were replaced because hosts could not read them."), s.Replaced.Load)
}
