package mcpserver

import (
	"fleetd/internal/counters"
	"sync/atomic"
)

// Stats contains the counters of the server.
type Stats struct {
	// Requests counts by method, Calls tool calls by outcome, Refused requests
	// that were not served by reason, Notified notifications by kind.
	Requests, Calls, Refused, Notified counters.Map[string]
	// Sessions is the number of open sessions, Streams that of requests in progress.
	Sessions, Streams atomic.Int64
	// Evicted counts idle sessions that were ended for new ones of their key.
	Evicted atomic.Uint64
	// Unindexed counts searches in a fleet that is too large for an index.
	Unindexed atomic.Uint64
	// ReplayBytes is the size of the messages kept for interrupted streams;
	// ReplayDropped counts messages that were dropped.
	ReplayBytes   atomic.Int64
	ReplayDropped atomic.Uint64
	// Replaced counts tool schemas of devices that hosts could not read.
	Replaced atomic.Uint64
}

// counted are the methods with a counter of their own; clients may send any.
var counted = map[string]bool{"initialize": true, "ping": true, "server/discover": true, "tools/list": true, "tools/call": true,
	"resources/list": true, "resources/templates/list": true, "resources/read": true, "resources/subscribe": true, "resources/unsubscribe": true,
	"subscriptions/listen": true, "prompts/list": true, "prompts/get": true, "completion/complete": true}

func (s *Stats) request(method string) {
	if !counted[method] {
		method = "other"
	}
	s.Requests.Add(method, 1)
}
