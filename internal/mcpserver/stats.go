package mcpserver

import (
	"fleetd/internal/counters"
	"sync/atomic"
)

// Stats counts what passes.
type Stats struct {
	// Requests counts by method, Calls tool calls by outcome, Refused requests
	// that were not served by reason, Notified notifications by kind.
	Requests, Calls, Refused, Notified counters.Map[string]
	// Sessions are open now, Streams are requests being answered.
	Sessions, Streams atomic.Int64
	// Evicted counts sessions that made room for others of their key.
	Evicted atomic.Uint64
	// Unindexed counts searches by words in a fleet that has too many devices for an index.
	Unindexed atomic.Uint64
	// ReplayBytes is what is kept for streams that break off; ReplayDropped
	// counts messages that had to make room.
	ReplayBytes   atomic.Int64
	ReplayDropped atomic.Uint64
	// Replaced counts schemas and Unnamed tools of devices that no host could use.
	Replaced atomic.Uint64
}

// counted are the methods with a counter of their own; a client may send any.
var counted = map[string]bool{"initialize": true, "ping": true, "server/discover": true, "tools/list": true, "tools/call": true,
	"resources/list": true, "resources/templates/list": true, "resources/read": true, "resources/subscribe": true, "resources/unsubscribe": true,
	"subscriptions/listen": true, "prompts/list": true, "prompts/get": true, "completion/complete": true}

func (s *Stats) request(method string) {
	if !counted[method] {
		method = "other"
	}
	s.Requests.Add(method, 1)
}
