package node

import (
	"net/http"

	"fleetd/internal/access"
	"fleetd/internal/mcpserver"
)

// startMCP builds the server for hosts of language models.
func (n *node) startMCP() {
	n.mcp = mcpserver.New(mcpserver.Options{Service: n.service, Events: n.events, Photos: n.vision, Hosts: n.cfg.MCPHosts, Origins: n.cfg.MCPOrigins,
		Failures: n.failures["api-listen"],
		Door:     &access.Door{Keys: n.service.Keys(), IsAdmin: n.mint.IsAdmin, Open: n.cfg.APIAuth == "none"},
		Node:     n.cfg.Node, Version: n.cfg.Version, Draining: n.draining.get, Fixtures: n.cfg.ConformanceFixtures, Log: n.log})
}

// withMCP gives MCP its paths; it admits its callers itself.
func (n *node) withMCP(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if mcpserver.Takes(r.URL.Path) {
			n.mcp.ServeHTTP(w, r)
			return
		}
		next.ServeHTTP(w, r)
	})
}

var (
	mcpRequests = counter("mcp_requests_total", "MCP requests, by method.", "method")
	mcpCalls    = counter("mcp_calls_total", "Tool calls over MCP, by outcome.", "outcome")
	mcpRefused  = counter("mcp_refused_total", "Requests to the MCP paths that were not served, by reason.", "reason")
	mcpNotified = counter("mcp_notifications_total", "Notifications to MCP hosts, by kind.", "kind")
	mcpSessions = gauge("mcp_sessions", "MCP sessions open on this node.")
	mcpEvicted  = counter("mcp_sessions_evicted_total", "Idle MCP sessions that were ended to make room for others of their key.")
	mcpLarge    = counter("mcp_searches_refused_total", "Searches by words that were refused, since the fleet has more devices than are indexed.")
	mcpStreams  = gauge("mcp_requests_in_progress", "MCP requests being answered, open streams included.")
	mcpReplay   = gauge("mcp_replay_bytes", "Memory of messages kept for streams that break off.")
	mcpForgot   = counter("mcp_replay_dropped_total", "Messages that were not kept, or had to make room.")
	mcpReplaced = counter("mcp_schemas_replaced_total", "Tool schemas of devices that are not shown to hosts as they are.")
)

func collectMCP(s *mcpserver.Stats, put func(metric, float64, ...string)) {
	s.Requests.Each(func(method string, n int64) { put(mcpRequests, float64(n), method) })
	s.Calls.Each(func(outcome string, n int64) { put(mcpCalls, float64(n), outcome) })
	s.Refused.Each(func(reason string, n int64) { put(mcpRefused, float64(n), reason) })
	s.Notified.Each(func(kind string, n int64) { put(mcpNotified, float64(n), kind) })
	put(mcpSessions, float64(s.Sessions.Load()))
	put(mcpEvicted, float64(s.Evicted.Load()))
	put(mcpLarge, float64(s.Unindexed.Load()))
	put(mcpStreams, float64(s.Streams.Load()))
	put(mcpReplay, float64(s.ReplayBytes.Load()))
	put(mcpForgot, float64(s.ReplayDropped.Load()))
	put(mcpReplaced, float64(s.Replaced.Load()))
}
