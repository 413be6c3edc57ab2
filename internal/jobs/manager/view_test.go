package manager

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/jobs"
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

// A job says what it does, by the name that the filter of lists takes, and where, beside what it was given.
func TestJobSaysWhatItDoesAndWhere(t *testing.T) {
	j := jobs.Job{State: jobs.Done, Action: "call", Spec: api.JobSpec{Select: "room=lab", Action: api.JobAction{Call: &api.JobCall{Tool: "self.a"}}}}
	text, err := json.Marshal(jobView(&j))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`,"action":"call","select":"room=lab",`, `"spec":{"action":{"call":{"tool":"self.a"}},"select":"room=lab"}`} {
		if !strings.Contains(string(text), want) {
			t.Errorf("%s has no %s", text, want)
		}
	}
}
