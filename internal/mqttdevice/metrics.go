package mqttdevice

import "fleetd/internal/counters"

func (s *Stats) metrics(r *counters.Registry) {
	counters.ByKey(r.Counter("mqtt_connects_total", "MQTT connections by CONNACK code; `no_connect` if none was sent, `not_accepted` if the socket failed, `refused` for devices of an external broker.", "code"), &s.Connacks)
	drops := r.Counter("mqtt_dropped_total", "MQTT messages dropped: `foreign_topic`, `hello_rate`, `broker` (an external broker did not accept them).", "reason")
	counters.Value(drops, s.ForeignTopics.Load, "foreign_topic")
	counters.Value(drops, s.HelloDrops.Load, "hello_rate")
	counters.Value(drops, s.Unpublished.Load, "broker")
}

// Metrics adds the metrics of the listener.
func (f *Front) Metrics(r *counters.Registry) {
	f.stats.metrics(r)
	r.Histogram("mqtt_connect_seconds", "Time from an MQTT connection to its CONNACK, including the wait.", &f.connectTime)
	counters.Value(r.Gauge("mqtt_connections_waiting", "MQTT connections that are not admitted yet, at most 4,096."), func() int { _, waiting := f.Connected(); return waiting })
}

// Metrics adds the metrics of an external broker.
func (b *Broker) Metrics(r *counters.Registry) {
	b.stats.metrics(r)
	counters.Bool(r.Gauge("mqtt_broker_connected", "Whether the external MQTT broker is connected; absent without one."), b.Up)
}
