package fleet

import (
	"fleetd/internal/counters"
	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/devices/session"
)

// Metrics registers the metrics of the core: registry, sessions, calls and conversations.
func (s *Service) Metrics(r *counters.Registry) {
	s.registryMetrics(r)
	s.sessionMetrics(r)
	s.callMetrics(r)
	s.speechMetrics(r)
}

func (s *Service) registryMetrics(r *counters.Registry) {
	g := s.Registry()
	counters.Value(r.Gauge("members", "Members of the fleet, revoked ones included, as this node has them."), g.Members)
	counters.Value(r.Gauge("registry_revision", "Revision of the last change that this node has applied."), func() int64 { return g.Position().Revision })
	reads := r.Counter("registry_reads_total", "Reads of the registry from the database: `changes` that were not received over NATS, or the `whole` registry.", "what")
	counters.Value(reads, g.Stats.Reads.Load, "changes")
	counters.Value(reads, g.Stats.Snapshots.Load, "whole")
	counters.Value(r.Counter("registry_restored_total", "How often the registry's history went backwards, as after a restore of the database."), g.Stats.Restored.Load)
	joins := r.Counter("joins_refused_total", "Devices that could not become members: `members_limit` reached, or the `database` did not answer in time.", "reason")
	counters.Value(joins, g.Stats.FullJoins.Load, "members_limit")
	counters.Value(joins, g.Stats.LateJoins.Load, "database")
	counters.Value(r.Gauge("revocations_waiting", "Revocations that are in force but not in the database yet."), func() int { return len(g.PendingRevocations()) })
}

func (s *Service) sessionMetrics(r *counters.Registry) {
	st := s.Stats()
	r.Gauge("devices", "Connected devices by transport and MCP state.", "transport", "mcp_state").Read(func(emit counters.Emit) {
		st.States.Each(func(k session.State, n int64) { emit(float64(n), string(k.Transport), string(k.MCP)) })
	})
	counters.ByKey(r.Counter("device_connects_total", "Sessions accepted.", "transport"), &st.Connects)
	r.Counter("device_disconnects_total", "Sessions that ended, by reason, and WebSocket connections that ended without one.", "reason").Read(func(emit counters.Emit) {
		for _, reason := range devices.CloseReasons {
			emit(float64(st.Closed.Get(reason)), string(reason))
		}
	})
	counters.Value(r.Gauge("devices_contested", "Device ids that are contested now, as this node has them."), s.Contested)
	counters.ByKey(r.Counter("contested_total", "Connections and proofs refused because the device id is contested: `fight`, `wrong_proof`, `other_device`, `other_serial`.", "reason"), &st.Contested)
	r.Histogram("hello_seconds", "Time to the server's hello: from the upgrade request, over MQTT from the device's hello.", &st.HelloTime)
	r.Histogram("handshake_seconds", "Time from the start of the MCP handshake to the verified tool list.", &st.HandshakeTime)
	counters.Value(r.Gauge("handshakes", "MCP handshakes in progress."), st.Handshakes.Load)
	r.Counter("envelope_deviations_total", "Departures from JSON-RPC or MCP, see [protocol.md](../protocol.md#deviations); after 256 combinations, further versions count as `other`.", "kind", "firmware").Read(func(emit counters.Emit) {
		st.Deviations.Each(func(k session.DeviationKey, n int64) { emit(float64(n), string(k.Kind), k.Firmware) })
	})
	counters.Value(r.Counter("bad_messages_total", "Messages of devices that could not be parsed."), st.BadMessages.Load)
	notifications := r.Counter("notifications_total", "Notifications and other messages of devices: `published`, `over_rate` (dropped).", "verdict")
	counters.Value(notifications, st.Notified.Load, "published")
	counters.Value(notifications, st.NotifyDrops.Load, "over_rate")
	lists := r.Counter("catalog_lists_total", "Tool lists read: `hit` (known list), `new`.", "result")
	counters.Value(lists, st.CatalogHits.Load, "hit")
	counters.Value(lists, st.CatalogNew.Load, "new")
	counters.Value(r.Gauge("catalog_memory_bytes", "Memory of the tool lists, at most `--catalog-memory`."), func() int64 { _, bytes := s.CatalogUsage(); return bytes })
	over := r.Counter("catalogs_over_limit_total", "Tool lists that reached a limit: `evicted` from memory, `refused` for lack of memory, `not_recorded` (the device changes its tools too often).", "result")
	counters.Value(over, st.CatalogsEvicted.Load, "evicted")
	counters.Value(over, st.CatalogsRefused.Load, "refused")
	counters.Value(over, st.Unrecorded.Load, "not_recorded")
}

func (s *Service) callMetrics(r *counters.Registry) {
	st := s.Stats()
	r.Histogram("call_seconds", "Tool calls on this node's devices, waiting included.", &st.CallTime)
	r.Counter("calls_total", "Tool calls on this node's devices, by the way in that they came, with those of jobs: `ok`, `tool_error` (the tool failed on the device), or the code of the error.", "outcome", "via").Read(func(emit counters.Emit) {
		st.Calls.Each(func(k dispatch.CallKey, n int64) { emit(float64(n), k.Outcome, string(k.Via)) })
	})
	counters.Value(r.Gauge("calls_in_flight", "Tool calls running on devices."), st.InFlight.Load)
	counters.Value(r.Gauge("calls_waiting", "Tool calls that wait for a slot of their device."), st.Waiting.Load)
	counters.Value(r.Counter("calls_late_answers_total", "Answers that arrived after their caller's deadline and were recorded."), st.LateAnswers.Load)
	counters.Value(r.Counter("calls_shared_total", "Calls of read-only tools that were answered with the result of another call."), st.SharedCalls.Load)
	counters.Value(r.Counter("requests_over_share_total", "Requests to devices, over NATS, REST or MCP, refused because their caller had as many in progress as its share allows."), s.Limiter().OverShare.Load)
}

func (s *Service) speechMetrics(r *counters.Registry) {
	st := s.Stats()
	packets := r.Counter("audio_packets_total", "Audio packets of conversations: `received` from devices, `sent` to them.", "verdict")
	counters.Value(packets, st.AudioFrames.Load, "received")
	counters.Value(packets, st.AudioSent.Load, "sent")
	counters.ByKey(r.Counter("audio_dropped_total", "Audio packets dropped: `no_channel`, `not_published`, `full`, `aborted`, `refused`, `unsent`; see [voice.md](../voice.md#when-is-a-frame-lost).", "reason"), &st.AudioDrops)
	counters.Value(r.Gauge("conversations", "Open conversations."), st.Conversations.Load)
	counters.Value(r.Counter("udp_silent_channels_total", "UDP channels on which no packet arrived for 10 s."), st.SilentChannels.Load)
	counters.Value(r.Counter("messages_dropped_total", "Messages of a conversation dropped because the device had no connection."), st.MessageDrops.Load)
}
