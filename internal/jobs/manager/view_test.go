package manager

import (
	"testing"
	"time"

	"fleetd/internal/api"
)

// An estimate is not 0 if there is something to do.
func TestEstimate(t *testing.T) {
	for _, tc := range []struct {
		rate string
		n    int64
		want time.Duration
	}{{"10/s", 0, 0}, {"10/s", 2, time.Second}, {"10/s", 14, 2 * time.Second}, {"1/m", 3, 3 * time.Minute}, {"never", 3, 0}} {
		if got := estimate(&api.JobPace{Rate: tc.rate}, tc.n); got != tc.want {
			t.Errorf("%d at %s: %v, want %v", tc.n, tc.rate, got, tc.want)
		}
	}
}
