package vision

import "fleetd/internal/counters"

// Metrics adds the metrics of uploads and explanations.
func (s *Server) Metrics(r *counters.Registry) {
	counters.ByKey(r.Counter("uploads_total", "Photo uploads: `stored`, or the reason of the refusal: `bad_request`, `unauthorized`, `too_large`, `not_jpeg`, `too_many` (wrong tokens from this address), `used`, `slow`, `broken`, `busy`, `unavailable`.", "outcome"), &s.Uploads)
	counters.Value(r.Counter("upload_bytes_total", "Bytes of stored photos."), s.Bytes.Load)
	counters.Value(r.Gauge("uploads_in_progress", "Photo uploads in progress."), s.InProgress.Load)
	counters.ByKey(r.Counter("explanations_total", "Questions about photos: `explained`, or the reason: `none` (no service responds), `late` (25 s were over), `busy` (16 in progress and 64 waiting), "+
		"`failed` (refused, or an unusable response; see the log), `gone` (the device disconnected).", "outcome"), &s.Explanations)
	r.Histogram("explain_seconds", "Time that devices waited for explanations of their photos, including failed ones.", &s.ExplainTime)
	counters.Value(r.Gauge("explanations_in_progress", "Photos being explained."), s.Explaining.Load)
}
