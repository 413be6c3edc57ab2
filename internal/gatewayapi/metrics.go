package gatewayapi

import "fleetd/internal/counters"

// Metrics adds those of the gateway API.
func (s *Server) Metrics(r *counters.Registry) {
	r.Counter("gateway_requests_total", "Requests of the gateway API, by route and outcome.", "route", "code").Read(func(emit counters.Emit) {
		s.Requests.Each(func(k RequestKey, n int64) { emit(float64(n), string(k.Route), string(k.Code)) })
	})
}
