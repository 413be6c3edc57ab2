package audit

import "fleetd/internal/counters"

// Metrics registers the metrics of the log.
func (l *Log) Metrics(r *counters.Registry) {
	entries := r.Counter("audit_entries_total", "Entries of the [audit](../access.md#the-audit): `written`, `dropped` (64 MiB waited for the database).", "result")
	counters.Value(entries, l.Written.Load, "written")
	counters.Value(entries, l.Dropped.Load, "dropped")
	counters.Value(r.Gauge("audit_waiting_bytes", "Bytes of the audit that are not in the database yet."), l.Waiting)
	counters.Value(r.Counter("audit_failures_total", "Failed attempts to write to the audit."), l.Failed.Load)
}
