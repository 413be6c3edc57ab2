package events

import "fleetd/internal/counters"

// Metrics registers the metrics of the publisher.
func (b *Bus) Metrics(r *counters.Registry) {
	counters.ByKey(r.Counter("events_published_total", "Events handed to NATS, by kind.", "kind"), &b.Published)
	counters.ByKey(r.Counter("events_dropped_total", "Events and audio lost: `queue_full`, `nats_away`, `stream_refused`, `too_large`, `audio_queue_full`; and events that subscribers have but that may not be kept: "+
		"`ack_timeout` (the stream did not confirm them within 5 s), `no_stream` (no stream took them).", "reason"), &b.Dropped)
	counters.Value(r.Gauge("event_queue", "Events waiting, at most 16,384 (notifications fill half of that only), and at most 8,192 packets and messages."), b.Depth)
}
