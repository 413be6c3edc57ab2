package provision

import "fleetd/internal/counters"

// Metrics adds the counters of OTA checks.
func (s *Server) Metrics(r *counters.Registry) {
	counters.ByKey(r.Counter("ota_checks_total", "OTA checks: `member`, `waiting`, `refused`, `bad_request`, `rate_limited`, `too_many_new`, `unavailable`, `unsafe`.", "kind"), &s.Replies)
}
