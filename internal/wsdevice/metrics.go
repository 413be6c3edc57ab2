package wsdevice

import (
	"strconv"

	"fleetd/internal/counters"
)

// Metrics adds the metrics of upgrade requests.
func (f *Front) Metrics(r *counters.Registry) {
	r.Counter("device_refusals_total", "WebSocket upgrade requests refused, by HTTP status: 400, 401, 503.", "status").Read(func(emit counters.Emit) {
		f.Refused.Each(func(status int, n int64) { emit(float64(n), strconv.Itoa(status)) })
	})
}
