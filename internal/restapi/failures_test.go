package restapi

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"fleetd/internal/connlimit"
)

// A client that guesses tokens is answered late and with 429; the right token is served at
// once, from the same address, and a request without a token is not a guess.
func TestWrongTokensAreSlowedDown(t *testing.T) {
	t.Parallel()
	f := newFleet(t, func(o *Options) { o.Failures = connlimit.NewFailures(nil) })
	ask := func(authorization string) (response, time.Duration) {
		begun := time.Now()
		r := f.do(t, http.MethodGet, "/v1/nodes", "", "Authorization", authorization)
		return r, time.Since(begun)
	}
	for range connlimit.FailureBurst {
		if r, took := ask("Bearer guess"); r.status != http.StatusUnauthorized || took > connlimit.FailureDelay/2 {
			t.Fatalf("%d after %v", r.status, took)
		}
	}
	late := make(chan struct{})
	go func() {
		defer close(late)
		// security: D7
		if r, took := ask("Bearer guess"); r.status != http.StatusTooManyRequests || took < connlimit.FailureDelay || !strings.Contains(r.body, `"code":"rate_limited"`) {
			t.Errorf("one too many: %d %s after %v", r.status, r.body, took)
		}
	}()
	// security: D7
	if r, took := ask("Bearer " + f.token); r.status != http.StatusOK || took > connlimit.FailureDelay/2 {
		t.Errorf("the right one: %d after %v", r.status, took)
	}
	if r, took := ask(""); r.status != http.StatusUnauthorized || took > connlimit.FailureDelay/2 {
		t.Errorf("none: %d after %v", r.status, took)
	}
	<-late
}
