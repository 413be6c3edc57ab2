package node

import (
	"bytes"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"fleetd/internal/attest"
	"fleetd/internal/audit"
	"fleetd/internal/cluster"
	"fleetd/internal/config"
	"fleetd/internal/connlimit"
	"fleetd/internal/counters"
	"fleetd/internal/events"
	"fleetd/internal/explain"
	"fleetd/internal/fleet"
	"fleetd/internal/gatewayapi"
	"fleetd/internal/goldentest"
	"fleetd/internal/jobs/runner"
	"fleetd/internal/mcpserver"
	"fleetd/internal/mqttdevice"
	"fleetd/internal/provision"
	"fleetd/internal/recorder"
	"fleetd/internal/store"
	"fleetd/internal/trace"
	"fleetd/internal/udpaudio"
	"fleetd/internal/upstream"
	"fleetd/internal/vision"
	"fleetd/internal/webhooks"
	"fleetd/internal/wsdevice"
)

// everyMetric are the metrics of a node with all of its optional parts.
func everyMetric(t *testing.T) []*counters.Metric {
	t.Helper()
	service := fleet.New(fleet.Config{Node: "n", Dir: t.TempDir()}, fleet.Ports{Log: slog.New(slog.DiscardHandler)})
	t.Cleanup(service.Close)
	limiter := connlimit.NewLimiter(0, 0, nil)
	side := &jobsSide{}
	side.runner.Store(&runner.Runner{})
	n := &node{cfg: &config.Config{}, service: service, front: &wsdevice.Front{}, provision: &provision.Server{}, attest: &attest.List{}, vision: &vision.Server{},
		upstream: &upstream.Bridge{}, mcp: &mcpserver.Server{}, deviceLimiter: limiter, apiLimiter: limiter, limited: map[string]*connlimit.Listener{"": {}},
		proxyListeners: map[string]*connlimit.ProxyListener{"": {}}, failures: map[string]*connlimit.Failures{"": {}}, floods: &connlimit.Floods{}, work: &connlimit.Work{}, certificate: &certificate{},
		audit: &audit.Log{}, policy: &policyFile{}, events: &events.Bus{}, cluster: &cluster.Link{}, bus: &bus{}, store: &store.Store{},
		jobs: side, webhooks: &webhooks.Manager{}, recorder: &recorder.Recorder{}, explain: &explain.Explainer{}, tracer: &trace.Tracer{},
		mqtt: &mqttSide{front: &mqttdevice.Front{}, broker: &mqttdevice.Broker{}, audio: &udpaudio.Table{}, gatewayAPI: &gatewayapi.Server{}}}
	metrics := n.metrics().Metrics()
	if len(metrics) < 90 {
		t.Fatalf("%d metrics found", len(metrics))
	}
	return metrics
}

// docs/reference/metrics.md is what the program has.
func TestReference(t *testing.T) {
	metrics := slices.SortedFunc(slices.Values(everyMetric(t)), func(a, b *counters.Metric) int { return strings.Compare(a.Name, b.Name) })
	var b bytes.Buffer
	b.WriteString("# Metrics\n\nGenerated from the program by `make reference`; do not edit.\n\n" +
		"`/metrics` on the API port, Prometheus text format, without a token. No label contains a device id. Besides these there are the usual `go_*` and `process_*`.\n" +
		"Dashboard and alerts: [monitoring](../howto/monitoring.md#alerts-and-dashboard).\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n")
	for _, m := range metrics {
		labels := ""
		if len(m.Labels) > 0 {
			labels = "`" + strings.Join(m.Labels, "`, `") + "`"
		}
		fmt.Fprintf(&b, "| `fleetd_%s` | %s | %s | %s |\n", m.Name, m.Kind, labels, strings.ReplaceAll(m.Help, "|", `\|`))
	}
	goldentest.Compare(t, "../../docs/reference/metrics.md", b.Bytes())
}
