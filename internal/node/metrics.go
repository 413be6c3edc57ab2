package node

import (
	"runtime"

	"github.com/prometheus/client_golang/prometheus"

	"fleetd/internal/counters"
	"fleetd/internal/store"
)

// collector exports the metrics of a registry to Prometheus, so that other packages do not
// import the library. Labels never contain device ids.
type collector struct {
	metrics []*counters.Metric
	descs   []*prometheus.Desc
}

func newCollector(r *counters.Registry) *collector {
	c := &collector{metrics: r.Metrics()}
	for _, m := range c.metrics {
		c.descs = append(c.descs, prometheus.NewDesc("fleetd_"+m.Name, m.Help, m.Labels, nil))
	}
	return c
}

// Describe sends no descriptions: the values of labels are known only when collecting, and
// the registry has only one of these collectors.
func (c *collector) Describe(chan<- *prometheus.Desc) {}

// Collect reads every counter.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	for i, m := range c.metrics {
		kind := prometheus.CounterValue
		if m.Kind == counters.KindGauge {
			kind = prometheus.GaugeValue
		}
		m.Collect(func(value float64, labels ...string) {
			ch <- prometheus.MustNewConstMetric(c.descs[i], kind, value, labels...)
		})
		for _, h := range m.Histograms {
			count, sum, buckets := h.Snapshot()
			ch <- prometheus.MustNewConstHistogram(c.descs[i], count, sum, buckets)
		}
	}
}

// metrics returns the metrics of all parts that run.
func (n *node) metrics() *counters.Registry {
	r := &counters.Registry{}
	r.Gauge("build_info", "1, with the version as labels.", "version", "node", "goversion").Read(func(emit counters.Emit) {
		emit(1, n.cfg.Version, n.cfg.Node, runtime.Version())
	})
	n.service.Metrics(r)
	if n.recorder != nil {
		n.recorder.Metrics(r)
	}
	n.explain.Metrics(r)
	n.tracer.Metrics(r)
	n.front.Metrics(r)
	n.provision.Metrics(r)
	n.attest.Metrics(r)
	n.mqtt.metrics(r)
	n.vision.Metrics(r)
	if n.upstream != nil {
		n.upstream.Metrics(r)
	}
	n.mcp.Stats().Metrics(r)
	n.deviceLimiter.Metrics(r, "device", "Connections to the devices' ports")
	n.apiLimiter.Metrics(r, "api", "Connections to the API and the gateway's API")
	for flag, l := range n.limited {
		l.Metrics(r, flag)
	}
	for flag, l := range n.proxyListeners {
		l.Metrics(r, flag)
	}
	for flag, f := range n.failures {
		f.Metrics(r, flag)
	}
	n.floods.Metrics(r)
	n.work.Metrics(r)
	for listener, c := range map[string]*certificate{"device": n.certificate, "api": n.apiCertificate} {
		if c != nil {
			c.metrics(r, listener)
		}
	}
	n.audit.Metrics(r)
	if n.policy != nil {
		n.policy.metrics(r)
	}
	n.events.Metrics(r)
	n.cluster.Metrics(r)
	n.leases.Metrics(r)
	n.jobs.metrics(r)
	n.webhooks.Metrics(r)
	n.bus.metrics(r)
	databaseMetrics(r, n.store)
	return r
}

func databaseMetrics(r *counters.Registry, store *store.Store) {
	counters.Bool(r.Gauge("database_connected", "Whether the database is reachable."), func() bool { return store.Ready() == nil })
	s := store.Stats()
	writes := r.Counter("database_writes_total", "Rows written, by table.", "table")
	counters.Value(writes, s.DeviceRows.Load, "devices")
	counters.Value(writes, s.PresenceRows.Load, "presence")
	counters.Value(writes, s.HistoryRows.Load, "catalog_history")
	counters.Value(writes, s.CatalogWrites.Load, "catalogs")
	counters.Value(writes, s.AuditBlocks.Load, "audit_blocks")
	pruned := r.Counter("database_pruned_total", "Rows deleted for their age or number: `catalog_history`, `catalogs`, `audit_blocks`.", "table")
	counters.Value(pruned, s.PrunedHistory.Load, "catalog_history")
	counters.Value(pruned, s.PrunedCatalogs.Load, "catalogs")
	counters.Value(pruned, s.PrunedAudit.Load, "audit_blocks")
	counters.Value(r.Counter("catalog_hits_total", "History entries whose tool list was stored already."), s.CatalogHits.Load)
	counters.Value(r.Counter("presence_stale_total", "Presence rows that changed nothing because a newer connection had written its own."), s.StalePresence.Load)
	counters.Value(r.Counter("database_groups_total", "Groups of rows committed."), s.Groups.Load)
	errors := r.Counter("database_errors_total", "`retried_group` (tried again), and lost rows: `bad_row`, `dropped_history` (100,000 history entries waited), `dropped_bytes` (64 MiB of tool lists and history waited), `after_close`.", "kind")
	counters.Value(errors, s.Retries.Load, "retried_group")
	counters.Value(errors, s.BadRows.Load, "bad_row")
	counters.Value(errors, s.DroppedHistory.Load, "dropped_history")
	counters.Value(errors, s.DroppedBytes.Load, "dropped_bytes")
	counters.Value(errors, s.Late.Load, "after_close")
	queue := r.Gauge("database_queue", "Rows waiting to be written, by table.", "table")
	counters.Value(queue, s.DevicesWaiting.Load, "devices")
	counters.Value(queue, s.PresenceWaiting.Load, "presence")
	counters.Value(queue, s.HistoryWaiting.Load, "catalog_history")
	counters.Value(r.Gauge("database_queue_bytes", "Tool lists and history entries waiting to be written, at most 64 MiB; a list counts once, however many devices have it."), s.QueueBytes.Load)
}
