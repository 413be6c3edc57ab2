package node

import (
	"runtime"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"fleetd/internal/attest"
	"fleetd/internal/audit"
	"fleetd/internal/cluster"
	"fleetd/internal/counters"
	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/devices/speech"
	"fleetd/internal/events"
	"fleetd/internal/fleet"
	"fleetd/internal/lobby"
	"fleetd/internal/mcpserver"
	"fleetd/internal/provision"
	"fleetd/internal/store"
	"fleetd/internal/upstream"
	"fleetd/internal/vision"
	"fleetd/internal/wsdevice"
)

// collector turns the counters of every part into Prometheus metrics when
// asked; no part knows the library. Labels never hold device ids.
type collector struct {
	version, node string
	service       *fleet.Service
	front         *wsdevice.Front
	provision     *provision.Server
	attest        *attest.List
	events        *events.Bus
	cluster       *cluster.Link
	store         *store.Store
	vision        *vision.Server
	bus           *bus
	mqtt          *mqttSide
	gate, apiGate *lobby.Gate
	floods        *lobby.Floods
	guarded       map[string]*lobby.Guarded
	proxied       map[string]*lobby.Proxied
	failures      map[string]*lobby.Failures
	certificate   *certificate // nil without TLS
	// apiCertificate is nil without TLS on the API.
	apiCertificate *certificate
	audit          *audit.Log
	policy         *policyFile // nil without --policy-file
	upstream       *upstream.Bridge
	members        *members // nil where no other node can be
	mcp            *mcpserver.Stats
}

// metric is one description; made once.
type metric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
}

func newMetric(kind prometheus.ValueType, name, help string, labels ...string) metric {
	return metric{prometheus.NewDesc("fleetd_"+name, help, labels, nil), kind}
}

func counter(name, help string, labels ...string) metric {
	return newMetric(prometheus.CounterValue, name, help, labels...)
}

func gauge(name, help string, labels ...string) metric {
	return newMetric(prometheus.GaugeValue, name, help, labels...)
}

var (
	buildInfo      = gauge("build_info", "1, with the version as labels.", "version", "node", "goversion")
	sessions       = gauge("devices", "Connected devices by transport and MCP state.", "transport", "mcp_state")
	connects       = counter("device_connects_total", "Sessions accepted.", "transport")
	disconnects    = counter("device_disconnects_total", "Connections ended, by reason; those without a session included.", "reason")
	refusals       = counter("device_refusals_total", "Upgrade requests refused, by HTTP status.", "status")
	connections    = gauge("device_connections", "Connections to the devices' ports.")
	connectionsMax = gauge("device_connections_limit", "How many there may be, by the open-file limit; 0: no limit.")
	slowClients    = counter("slow_clients_total", "Requests whose body came too slowly, and answers that were not taken in time, by flag of the listener.", "listener", "what")
	apiConns       = gauge("api_connections", "Connections to the API and the gateway's API.")
	apiConnsMax    = gauge("api_connections_limit", "How many there may be, by the open-file limit; 0: no limit.")
	floodRefusals  = counter("flood_refusals_total", "Devices closed for flooding that came back too soon.")
	notAdmitted    = counter("connections_refused_total", "Connections closed at once, by flag of the listener and reason.", "listener", "reason")
	loginFailures  = counter("login_failures_total", "Wrong credentials, by flag of the listener and what became of the answer.", "listener", "result")
	certExpiry     = gauge("certificate_expiry_timestamp_seconds", "When a certificate expires, in seconds since 1970.", "listener")
	certReloads    = counter("certificate_reloads_total", "Changed certificate files, by whether they loaded.", "result", "listener")
	checks         = counter("ota_checks_total", "OTA checks answered, by kind of answer.", "kind")
	proofs         = counter("attestation_proofs_total", "Activation requests of devices that wait, by what became of their proof.", "outcome")
	contested      = gauge("devices_contested", "Device ids that are contested now, as this node sees it.")
	disputes       = counter("contested_total", "Connections and proofs refused because the device id is contested, by reason.", "reason")
	helloSeconds   = newMetric(0, "hello_seconds", "From the upgrade request, or the MQTT hello, to the server hello.")
	listSeconds    = newMetric(0, "handshake_seconds", "From the start of the MCP handshake to the verified tool list.")
	callSeconds    = newMetric(0, "call_seconds", "Tool calls on this node's devices, waiting included.")
	calls          = counter("calls_total", "Tool calls on this node's devices, by outcome.", "outcome")
	callQueue      = gauge("calls_waiting", "Tool calls waiting for a device's slot.")
	callsRunning   = gauge("calls_in_flight", "Tool calls on a device.")
	handshakes     = gauge("handshakes", "MCP handshakes in progress.")
	deviations     = counter("envelope_deviations_total", "Departures from JSON-RPC or MCP, by kind and firmware version.", "kind", "firmware")
	badMessages    = counter("bad_messages_total", "Device messages refused as unusable.")
	audioPackets   = counter("audio_packets_total", "Audio packets by verdict.", "verdict")
	audioDrops     = counter("audio_dropped_total", "Audio packets that went no further, by reason.", "reason")
	conversations  = gauge("conversations", "Open audio channels.")
	silentChannels = counter("udp_silent_channels_total", "UDP channels that opened and stayed silent.")
	messageDrops   = counter("messages_dropped_total", "Messages of a conversation that found no connection.")
	notifications  = counter("notifications_total", "Notifications and messages of devices, by verdict.", "verdict")
	lists          = counter("catalog_lists_total", "Tool lists read, by whether their hash was known.", "result")
	catalogMemory  = gauge("catalog_memory_bytes", "What the tool lists in memory take.")
	catalogsOver   = counter("catalogs_over_limit_total", "Tool lists that met a limit, by what became of them.", "result")
	databasePruned = counter("database_pruned_total", "Rows deleted for their age or number, by table.", "table")
	published      = counter("events_published_total", "Events handed to NATS, by kind.", "kind")
	eventDrops     = counter("events_dropped_total", "Events dropped, by reason.", "reason")
	eventQueue     = gauge("event_queue", "Events waiting for the publisher.")
	requests       = counter("nats_requests_total", "Requests served over NATS, by verb.", "verb")
	requestErrors  = counter("nats_requests_refused_total", "Requests over NATS answered with a problem, by code.", "code")
	overShare      = counter("requests_over_share_total", "Requests to devices refused because their caller had as many in progress as were left for others.")
	hopsLost       = counter("hops_lost_total", "Requests to other nodes that were not even accepted.")
	claimsLost     = counter("claims_lost_total", "Claims and news that NATS did not take.")
	naps           = counter("naps_total", "Times this process did not run for 3 s or longer.")
	requestBytes   = gauge("nats_backlog_bytes", "Requests over NATS that wait to be served, in bytes.")
	natsErrors     = counter("nats_errors_total", "Asynchronous errors of the NATS connection.")
	natsUp         = gauge("nats_connected", "Whether NATS answers.")
	databaseUp     = gauge("database_connected", "Whether the database answers.")
	databaseWrites = counter("database_writes_total", "Rows written, by table.", "table")
	databaseGroups = counter("database_groups_total", "Groups of rows committed.")
	databaseErrors = counter("database_errors_total", "Failed groups and lost rows, by kind.", "kind")
	databaseQueue  = gauge("database_queue", "Rows waiting to be written, by table.", "table")
	databaseBytes  = gauge("database_queue_bytes", "Tool lists and history entries waiting to be written, in bytes.")
	uploads        = counter("uploads_total", "Photo uploads, by outcome.", "outcome")
	uploadBytes    = counter("upload_bytes_total", "Bytes of photos stored.")
	uploadsRunning = gauge("uploads_in_progress", "Photo uploads in progress.")
	explanations   = counter("explanations_total", "Questions about photos, by outcome.", "outcome")
	explaining     = gauge("explanations_in_progress", "Photos being explained.")
	explainSeconds = newMetric(0, "explain_seconds", "What devices waited for explanations of their photos, failed ones included.")
	nodesAlive     = gauge("nodes", "Nodes of the fleet that this node knows to live, itself included.")
	nodesLost      = counter("nodes_lost_total", "Nodes that stood still until this node declared them lost; every other node counts them too.")
	callsLate      = counter("calls_late_answers_total", "Answers that came after their caller's time and were handed to who waited for them.")
	callsShared    = counter("calls_shared_total", "Calls of tools that only read which were answered with another's answer.")
	auditEntries   = counter("audit_entries_total", "Entries of the audit, by what became of them.", "result")
	auditWaiting   = gauge("audit_waiting_bytes", "Bytes of the audit that are not in the database yet.")
	auditFailures  = counter("audit_failures_total", "Failed attempts to write to the audit.")
	policyReloads  = counter("policy_reloads_total", "Changed policy files, by whether they came into force.", "result")
	knownDevices   = gauge("members", "Devices that the fleet knows.")
	revision       = gauge("registry_revision", "The last change of the registry that is in force on this node.")
	registryReads  = counter("registry_reads_total", "Reads of the registry from the database, by what was read.", "what")
	registryBack   = counter("registry_restored_total", "Times that the registry's history went backwards, as after a restore.")
	joinsRefused   = counter("joins_refused_total", "Devices that could not become members, by reason.", "reason")
	revokesWaiting = gauge("revocations_waiting", "Revocations that are in force and not in the database yet.")
	databaseHits   = counter("catalog_hits_total", "History entries whose tool list was stored already.")
	databaseStale  = counter("presence_stale_total", "Presence rows that a newer session had overtaken.")
)

// Describe sends no descriptions: which label values exist is known only when
// collecting, and this registry has one such collector.
func (c *collector) Describe(chan<- *prometheus.Desc) {}

// Collect reads every counter.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	put := func(m metric, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(m.desc, m.kind, value, labels...)
	}
	histogram := func(m metric, h *counters.Histogram) {
		count, sum, buckets := h.Snapshot()
		ch <- prometheus.MustNewConstHistogram(m.desc, count, sum, buckets)
	}
	put(buildInfo, 1, c.version, c.node, runtime.Version())
	r := c.service.Registry()
	put(knownDevices, float64(r.Members()))
	put(revision, float64(r.Position().Revision))
	put(registryReads, float64(r.Stats.Reads.Load()), "changes")
	put(registryReads, float64(r.Stats.Snapshots.Load()), "whole")
	put(registryBack, float64(r.Stats.Restored.Load()))
	put(joinsRefused, float64(r.Stats.FullJoins.Load()), "members_limit")
	put(joinsRefused, float64(r.Stats.LateJoins.Load()), "database")
	put(revokesWaiting, float64(len(r.Revocations())))
	s := c.service.Stats()
	s.States.Each(func(k session.State, n int64) { put(sessions, float64(n), string(k.Transport), string(k.MCP)) })
	s.Connects.Each(func(transport devices.Transport, n int64) { put(connects, float64(n), string(transport)) })
	for _, reason := range devices.CloseReasons {
		put(disconnects, float64(s.Closed.Get(reason)), string(reason))
	}
	c.front.Refused.Each(func(status int, n int64) { put(refusals, float64(n), strconv.Itoa(status)) })
	c.provision.Replies.Each(func(kind string, n int64) { put(checks, float64(n), kind) })
	c.attest.Proofs.Each(func(outcome string, n int64) { put(proofs, float64(n), outcome) })
	put(contested, float64(c.service.Contested()))
	s.Contested.Each(func(reason devices.Dispute, n int64) { put(disputes, float64(n), string(reason)) })
	histogram(helloSeconds, &s.HelloTime)
	histogram(listSeconds, &s.HandshakeTime)
	histogram(callSeconds, &s.CallTime)
	s.Calls.Each(func(outcome string, n int64) { put(calls, float64(n), outcome) })
	put(callQueue, float64(s.Waiting.Load()))
	put(callsRunning, float64(s.InFlight.Load()))
	put(handshakes, float64(s.Handshakes.Load()))
	s.Deviations.Each(func(k session.DeviationKey, n int64) { put(deviations, float64(n), string(k.Kind), k.Firmware) })
	put(badMessages, float64(s.BadMessages.Load()))
	put(audioPackets, float64(s.AudioFrames.Load()), "received")
	put(audioPackets, float64(s.AudioSent.Load()), "sent")
	s.AudioDrops.Each(func(reason speech.AudioDrop, n int64) { put(audioDrops, float64(n), string(reason)) })
	put(conversations, float64(s.Conversations.Load()))
	put(silentChannels, float64(s.SilentChannels.Load()))
	put(messageDrops, float64(s.MessageDrops.Load()))
	put(notifications, float64(s.Notified.Load()), "published")
	put(notifications, float64(s.NotifyDrops.Load()), "over_rate")
	put(lists, float64(s.CatalogHits.Load()), "hit")
	put(lists, float64(s.CatalogNew.Load()), "new")
	_, bytes := c.service.CatalogUsage()
	put(catalogMemory, float64(bytes))
	put(catalogsOver, float64(s.CatalogsEvicted.Load()), "evicted")
	put(catalogsOver, float64(s.CatalogsRefused.Load()), "refused")
	put(catalogsOver, float64(s.Unrecorded.Load()), "not_recorded")
	open, most := c.gate.Open()
	put(connections, float64(open))
	put(connectionsMax, float64(most))
	open, most = c.apiGate.Open()
	put(apiConns, float64(open))
	put(apiConnsMax, float64(most))
	put(floodRefusals, float64(c.floods.Refused.Load()))
	for flag, l := range c.proxied {
		put(notAdmitted, float64(l.Refused.Load()), flag, "no_proxy_header")
	}
	for flag, l := range c.guarded {
		put(notAdmitted, float64(l.Full.Load()), flag, "descriptors")
		put(notAdmitted, float64(l.Crowded.Load()), flag, "address")
		put(slowClients, float64(l.Late.Load()), flag, "body")
		put(slowClients, float64(l.Slow.Load()), flag, "answer")
	}
	for flag, f := range c.failures {
		put(loginFailures, float64(f.Answered.Load()), flag, "answered")
		put(loginFailures, float64(f.Delayed.Load()), flag, "delayed")
		put(loginFailures, float64(f.Refused.Load()), flag, "refused")
	}
	for listener, certificate := range map[string]*certificate{"device": c.certificate, "api": c.apiCertificate} {
		if certificate != nil {
			put(certExpiry, float64(certificate.expires().Unix()), listener)
			put(certReloads, float64(certificate.reloads.Load()), "loaded", listener)
			put(certReloads, float64(certificate.failures.Load()), "failed", listener)
		}
	}
	put(callsShared, float64(s.SharedCalls.Load()))
	put(callsLate, float64(s.LateAnswers.Load()))
	put(auditEntries, float64(c.audit.Written.Load()), "written")
	put(auditEntries, float64(c.audit.Dropped.Load()), "dropped")
	put(auditWaiting, float64(c.audit.Waiting()))
	put(auditFailures, float64(c.audit.Failed.Load()))
	if c.policy != nil {
		put(policyReloads, float64(c.policy.reloads.Load()), "loaded")
		put(policyReloads, float64(c.policy.failures.Load()), "failed")
	}
	c.collectParts(put)
	histogram(explainSeconds, &c.vision.ExplainTime)
	c.mqtt.collect(put, histogram)
	alive, lost := 1, int64(0)
	if c.members != nil {
		alive, lost = len(c.members.nodes()), c.members.lost.Load()
	}
	put(nodesAlive, float64(alive))
	put(nodesLost, float64(lost))
	collectUpstream(c.upstream, put)
	collectMCP(c.mcp, put)
}

func (c *collector) collectParts(put func(metric, float64, ...string)) {
	c.events.Published.Each(func(kind devices.EventKind, n int64) { put(published, float64(n), string(kind)) })
	c.events.Dropped.Each(func(reason string, n int64) { put(eventDrops, float64(n), reason) })
	put(eventQueue, float64(c.events.Depth()))
	c.cluster.Requests.Each(func(verb string, n int64) { put(requests, float64(n), verb) })
	c.cluster.Refused.Each(func(code devices.Code, n int64) { put(requestErrors, float64(n), string(code)) })
	put(overShare, float64(c.service.Places().OverShare.Load()))
	put(hopsLost, float64(c.cluster.HopsLost.Load()))
	put(claimsLost, float64(c.cluster.ClaimsLost.Load()))
	put(naps, float64(c.cluster.Naps.Load()))
	put(requestBytes, float64(c.cluster.Waiting.Load()))
	put(natsErrors, float64(c.bus.lost.Load()))
	put(natsUp, truth(c.bus.up.Load()))
	put(databaseUp, truth(c.store.Ready() == nil))
	c.vision.Uploads.Each(func(outcome string, n int64) { put(uploads, float64(n), outcome) })
	put(uploadBytes, float64(c.vision.Bytes.Load()))
	put(uploadsRunning, float64(c.vision.InProgress.Load()))
	c.vision.Explanations.Each(func(outcome string, n int64) { put(explanations, float64(n), outcome) })
	put(explaining, float64(c.vision.Explaining.Load()))
	db := c.store.Stats()
	put(databaseWrites, float64(db.DeviceRows.Load()), "devices")
	put(databaseWrites, float64(db.PresenceRows.Load()), "presence")
	put(databaseWrites, float64(db.HistoryRows.Load()), "catalog_history")
	put(databaseWrites, float64(db.CatalogWrites.Load()), "catalogs")
	put(databasePruned, float64(db.PrunedHistory.Load()), "catalog_history")
	put(databasePruned, float64(db.PrunedCatalogs.Load()), "catalogs")
	put(databasePruned, float64(db.PrunedAudit.Load()), "audit_blocks")
	put(databaseWrites, float64(db.AuditBlocks.Load()), "audit_blocks")
	put(databaseHits, float64(db.CatalogHits.Load()))
	put(databaseStale, float64(db.StalePresence.Load()))
	put(databaseGroups, float64(db.Groups.Load()))
	put(databaseErrors, float64(db.Retries.Load()), "retried_group")
	put(databaseErrors, float64(db.BadRows.Load()), "bad_row")
	put(databaseErrors, float64(db.DroppedHistory.Load()), "dropped_history")
	put(databaseErrors, float64(db.DroppedBytes.Load()), "dropped_bytes")
	put(databaseBytes, float64(db.QueueBytes.Load()))
	put(databaseErrors, float64(db.Late.Load()), "after_close")
	put(databaseQueue, float64(db.DevicesWaiting.Load()), "devices")
	put(databaseQueue, float64(db.PresenceWaiting.Load()), "presence")
	put(databaseQueue, float64(db.HistoryWaiting.Load()), "catalog_history")
}

func truth(is bool) float64 {
	if is {
		return 1
	}
	return 0
}
