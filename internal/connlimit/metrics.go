package connlimit

import "fleetd/internal/counters"

// Metrics adds the connections of the limiter, under a name such as "device".
func (g *Limiter) Metrics(r *counters.Registry, name, what string) {
	counters.Value(r.Gauge(name+"_connections", what+"."), func() int64 { open, _ := g.Open(); return open })
	counters.Value(r.Gauge(name+"_connections_limit", what+": the maximum, from the open-file limit; 0: unlimited."), func() int64 { _, most := g.Open(); return most })
}

func refusedConnections(r *counters.Registry) *counters.Metric {
	return r.Counter("connections_refused_total", "Connections closed at once, by flag of the listener: `address` (its share is used up), `descriptors`, `no_proxy_header` (a trusted proxy sent none); see [limits](../limits.md).", "listener", "reason")
}

// Metrics adds the counters of a listener, by its flag.
func (l *Listener) Metrics(r *counters.Registry, flag string) {
	refused := refusedConnections(r)
	counters.Value(refused, l.Full.Load, flag, "descriptors")
	counters.Value(refused, l.OverShare.Load, flag, "address")
	slow := r.Counter("slow_clients_total", "Connections closed, by flag of the listener: a `body` arrived too slowly, or an `answer` was not read in time.", "listener", "what")
	counters.Value(slow, l.Late.Load, flag, "body")
	counters.Value(slow, l.Slow.Load, flag, "answer")
}

// Metrics adds the counters of a listener for proxies, by its flag.
func (p *ProxyListener) Metrics(r *counters.Registry, flag string) {
	counters.Value(refusedConnections(r), p.Refused.Load, flag, "no_proxy_header")
}

// Metrics adds failed logins at a listener, by its flag.
func (f *Failures) Metrics(r *counters.Registry, flag string) {
	failures := r.Counter("login_failures_total", "Wrong credentials, by flag of the listener: `answered` at once, `delayed`, or `refused` because too many answers were delayed; see [limits](../limits.md).", "listener", "result")
	counters.Value(failures, f.Answered.Load, flag, "answered")
	counters.Value(failures, f.Delayed.Load, flag, "delayed")
	counters.Value(failures, f.Refused.Load, flag, "refused")
}

// Metrics adds the counters of devices that were closed for flooding.
func (f *Floods) Metrics(r *counters.Registry) {
	counters.Value(r.Counter("flood_refusals_total", "Devices closed for flooding (`fleetd_device_disconnects_total{reason=\"flooding\"}`) that reconnected while blocked."), f.Refused.Load)
}

// Metrics adds requests of callers over their rate.
func (w *Work) Metrics(r *counters.Registry) {
	held := r.Counter("api_requests_over_rate_total", "Requests to the API whose caller made more than it may: they `waited`, or were `refused` because they would have waited too long; see [limits](../limits.md).", "result")
	counters.Value(held, w.Waited.Load, "waited")
	counters.Value(held, w.Refused.Load, "refused")
	counters.Value(r.Counter("api_streams_refused_total", "Streams of events and traces that were refused because their key has as many open at this node as it may; see [limits](../limits.md)."), w.Streams.Load)
}
