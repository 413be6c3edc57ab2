package counters

import (
	"fmt"
	"slices"
)

// Kind is the Prometheus type of a metric.
type Kind string

// Kinds.
const (
	KindCounter   Kind = "counter"
	KindGauge     Kind = "gauge"
	KindHistogram Kind = "histogram"
)

// Emit receives one sample with the values of the metric's labels, in their order.
type Emit func(value float64, labels ...string)

// Metric is one metric: its description, and the sources of its samples.
type Metric struct {
	Name   string // without the prefix fleetd_
	Help   string // Markdown, with the values of closed labels
	Kind   Kind
	Labels []string

	reads      []func(Emit)
	Histograms []*Histogram
}

// Registry is the list of a node's metrics. Parts register theirs while the node starts; it is not safe for
// concurrent use.
type Registry struct{ metrics []*Metric }

// Metrics returns all metrics in the order of registration.
func (r *Registry) Metrics() []*Metric { return r.metrics }

// Counter registers a counter. For an existing name it returns the existing metric, so that several parts can
// share one.
func (r *Registry) Counter(name, help string, labels ...string) *Metric {
	return r.add(KindCounter, name, help, labels)
}

// Gauge registers a gauge.
func (r *Registry) Gauge(name, help string, labels ...string) *Metric {
	return r.add(KindGauge, name, help, labels)
}

// Histogram registers a histogram of durations in seconds.
func (r *Registry) Histogram(name, help string, h *Histogram) {
	m := r.add(KindHistogram, name, help, nil)
	m.Histograms = append(m.Histograms, h)
}

func (r *Registry) add(kind Kind, name, help string, labels []string) *Metric {
	if i := slices.IndexFunc(r.metrics, func(m *Metric) bool { return m.Name == name }); i >= 0 {
		if m := r.metrics[i]; m.Kind != kind || !slices.Equal(m.Labels, labels) || m.Help != help {
			panic(fmt.Sprintf("metric %s is registered twice with different properties", name)) // a bug, found by any test that starts a node
		}
		return r.metrics[i]
	}
	m := &Metric{Name: name, Help: help, Kind: kind, Labels: labels}
	r.metrics = append(r.metrics, m)
	return m
}

// Read adds a source of samples, which is called at each scrape.
func (m *Metric) Read(read func(Emit)) { m.reads = append(m.reads, read) }

// Collect reads all samples.
func (m *Metric) Collect(emit Emit) {
	for _, read := range m.reads {
		read(emit)
	}
}

// Value adds the sample that load returns, under these label values.
func Value[N int | int32 | int64 | uint64 | float64](m *Metric, load func() N, labels ...string) {
	m.Read(func(emit Emit) { emit(float64(load()), labels...) })
}

// Bool adds a sample that is 1 while is reports true, else 0.
func Bool(m *Metric, is func() bool) {
	Value(m, func() int {
		if is() {
			return 1
		}
		return 0
	})
}

// ByKey adds one sample for each key of c; the key is the only label.
func ByKey[K ~string](m *Metric, c *Map[K]) {
	m.Read(func(emit Emit) { c.Each(func(key K, n int64) { emit(float64(n), string(key)) }) })
}
