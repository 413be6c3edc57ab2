package recorder

import "fleetd/internal/counters"

// Metrics registers the recorder's metrics.
func (r *Recorder) Metrics(m *counters.Registry) {
	counters.Value(m.Gauge("recorder_bytes", "Memory that the recorder has taken, at most --recorder-memory."), r.Memory.Load)
	counters.Value(m.Counter("recorder_records_total", "Records of what happened to devices and of calls."), r.Records.Load)
	over := m.Counter("recorder_over_rate_total", "Records beyond the rate of their device: `combined` with an earlier one and counted in it, or `dropped`, which only calls are.", "what")
	counters.Value(over, r.Combined.Load, "combined")
	counters.Value(over, r.Dropped.Load, "dropped")
}
