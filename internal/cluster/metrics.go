package cluster

import "fleetd/internal/counters"

// Metrics adds those of requests over NATS and between nodes.
func (l *Link) Metrics(r *counters.Registry) {
	counters.ByKey(r.Counter("nats_requests_total", "Requests served over NATS: `call`, `send`, `audio`, `jobs`, `rpc`; and hints of other nodes, `work`.", "verb"), &l.Requests)
	counters.ByKey(r.Counter("nats_requests_refused_total", "Requests over NATS answered with a problem, by code.", "code"), &l.Refused)
	counters.Value(r.Gauge("nats_backlog_bytes", "Requests over NATS that wait to be served, in bytes; at most 64 MiB and 65,536 requests, further ones are `unavailable`."), l.Waiting.Load)
	counters.Value(r.Counter("hops_lost_total", "Requests to other nodes that were not accepted within 3 s: the node is frozen or cut off."), l.HopsLost.Load)
	counters.Value(r.Counter("claims_lost_total", "Claims, news of waiting clients and changes that NATS did not take; when it is back, claims and news are repeated, and changes are read from the database."), l.ClaimsLost.Load)
	counters.Value(r.Counter("process_stalls_total", "Times that this process did not run for 3 s or longer; requests of that time were refused."), l.Stalls.Load)
}
