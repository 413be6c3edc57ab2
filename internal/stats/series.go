package stats

import (
	"os"
	"runtime"
	"runtime/metrics"
	"slices"
	"strconv"
	"strings"

	"fleetd/internal/counters"
	"fleetd/internal/devices"
)

// Sizes of a sample. New panics if the table of series has others.
const (
	numCounts     = 31
	numGauges     = 6
	numHistograms = 3
	numBuckets    = len(counters.Bounds) + 1
	numSummed     = numCounts + numHistograms*numBuckets // the counts, and then the buckets of the histograms
)

// source is a metric of the node that is sampled.
type source struct {
	name   string // of the series
	label  string // what its values are; empty: there is one series
	values []string
	metric string // in the registry of the node
	// valueOf returns which of the values a sample of the metric counts as; nil: its first label, or the
	// only series.
	valueOf func(label string) string
}

// otherValue is the last value of a label whose values are not all known.
const otherValue = "other"

func closeReasons() []string { return append(devices.Texts(devices.CloseReasons), otherValue) }

// callOutcome groups the outcomes of calls.
func callOutcome(outcome string) string {
	switch outcome {
	case "ok", "tool_error":
		return outcome
	case string(devices.CodeDeviceTimeout):
		return "timeout"
	}
	return "refused"
}

// Series of a node. The wire form between nodes has their names, so that nodes of two versions can be
// added up.
var (
	counted = []source{
		{name: "connects", metric: "device_connects_total"},
		{name: "closes", label: "reason", values: closeReasons(), metric: "device_disconnects_total"},
		{name: "calls", label: "outcome", values: []string{"ok", "tool_error", "timeout", "refused"}, metric: "calls_total", valueOf: callOutcome},
		{name: "ota_checks", label: "kind", values: []string{"member", "waiting", "refused", "bad_request", "rate_limited", "too_many_new", "unavailable", "unsafe"}, metric: "ota_checks_total"},
		{name: "events_dropped", metric: "events_dropped_total"},
		{name: "slow_readers", metric: "slow_clients_total"},
		{name: "gc_cycles", metric: metricGC},
	}
	gauged = []source{
		{name: "online", label: "transport", values: []string{string(devices.TransportWebSocket), string(devices.TransportMQTT)}, metric: "devices"},
		{name: "calls_in_flight", metric: "calls_in_flight"},
		{name: "calls_waiting", metric: "calls_waiting"},
		{name: "memory", metric: metricMemory},
		{name: "goroutines", metric: metricGoroutines},
	}
	timed = []source{
		{name: "hello", metric: "hello_seconds"},
		{name: "handshake", metric: "handshake_seconds"},
		{name: "call", metric: "call_seconds"},
	}
)

// Metrics of the process, which the registry of the node does not have.
const (
	metricMemory     = "process memory, KiB"
	metricGoroutines = "process goroutines"
	metricGC         = "process gc cycles"
)

func processMetrics() *counters.Registry {
	r := &counters.Registry{}
	counters.Value(r.Gauge(metricMemory, ""), func() int64 { return residentBytes() >> 10 })
	counters.Value(r.Gauge(metricGoroutines, ""), runtime.NumGoroutine)
	counters.Value(r.Counter(metricGC, ""), func() uint64 { return readRuntime("/gc/cycles/total:gc-cycles") })
	return r
}

// residentBytes returns the memory of the process; where the system does not report it, what the Go runtime
// has of it.
func residentBytes() int64 {
	if text, err := os.ReadFile("/proc/self/statm"); err == nil {
		if fields := strings.Fields(string(text)); len(fields) > 1 {
			if pages, err := strconv.ParseInt(fields[1], 10, 64); err == nil {
				return pages * int64(os.Getpagesize())
			}
		}
	}
	return int64(readRuntime("/memory/classes/total:bytes") - readRuntime("/memory/classes/heap/released:bytes"))
}

func readRuntime(name string) uint64 {
	sample := []metrics.Sample{{Name: name}}
	metrics.Read(sample)
	if sample[0].Value.Kind() != metrics.KindUint64 {
		return 0
	}
	return sample[0].Value.Uint64()
}

// key is the name of one series in the wire form.
func (s source) key(i int) string {
	if s.label == "" {
		return s.name
	}
	return s.name + "/" + s.values[i]
}

func (s source) width() int { return max(len(s.values), 1) }

// index returns which series of the source a sample with this label counts for; -1 for none.
func (s source) index(labels []string) int {
	if s.label == "" {
		return 0
	}
	value := ""
	if len(labels) > 0 {
		value = labels[0]
	}
	if s.valueOf != nil {
		value = s.valueOf(value)
	}
	if i := slices.Index(s.values, value); i >= 0 {
		return i
	}
	return slices.Index(s.values, otherValue)
}

// probe reads the metric of a source.
type probe struct {
	source
	metric *counters.Metric
}

// probesOf looks the metrics of sources up; a source whose metric is absent stays zero.
func probesOf(sources []source, registries ...*counters.Registry) (probes []probe) {
	for _, s := range sources {
		p := probe{source: s}
		for _, r := range registries {
			if i := slices.IndexFunc(r.Metrics(), func(m *counters.Metric) bool { return m.Name == s.metric }); i >= 0 {
				p.metric = r.Metrics()[i]
			}
		}
		probes = append(probes, p)
	}
	return probes
}

// read writes the values of all series of the probes, in order.
func read(probes []probe, values []uint64) {
	clear(values)
	at := 0
	for _, p := range probes {
		if p.metric != nil {
			p.metric.Collect(func(value float64, labels ...string) {
				if i := p.index(labels); i >= 0 && value > 0 {
					values[at+i] += uint64(value)
				}
			})
		}
		at += p.width()
	}
}

// readTimes writes the buckets of all histograms of the probes.
func readTimes(probes []probe, values []uint64) {
	clear(values)
	for i, p := range probes {
		if p.metric == nil {
			continue
		}
		buckets := values[i*numBuckets : (i+1)*numBuckets]
		for _, h := range p.metric.Histograms {
			total, _, cumulative := h.Snapshot()
			below := uint64(0)
			for b, bound := range counters.Bounds {
				buckets[b] += cumulative[bound.Seconds()] - below
				below = cumulative[bound.Seconds()]
			}
			buckets[numBuckets-1] += total - below
		}
	}
}
