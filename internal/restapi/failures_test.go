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
	failures := connlimit.NewFailures(nil)
	f := newFleet(t, func(o *Options) { o.Failures = failures })
	ask := func(authorization string) response {
		return f.do(t, http.MethodGet, "/v1/nodes", "", "Authorization", authorization)
	}
	for range connlimit.FailureBurst {
		if r := ask("Bearer guess"); r.status != http.StatusUnauthorized {
			t.Fatalf("a guess within the burst: %d", r.status)
		}
	}
	late := make(chan struct{})
	go func() {
		defer close(late)
		begun := time.Now()
		// security: D7
		if r, took := ask("Bearer guess"), time.Since(begun); r.status != http.StatusTooManyRequests || took < connlimit.FailureDelay || !strings.Contains(r.body, `"code":"rate_limited"`) {
			t.Errorf("one too many: %d %s after %v", r.status, r.body, took)
		}
	}()
	// security: D7
	if r := ask("Bearer " + f.token); r.status != http.StatusOK {
		t.Errorf("the right one: %d", r.status)
	}
	if r := ask(""); r.status != http.StatusUnauthorized {
		t.Errorf("none: %d", r.status)
	}
	<-late
	if at, late, refused := failures.Answered.Load(), failures.Delayed.Load(), failures.Refused.Load(); at != connlimit.FailureBurst || late != 1 || refused != 0 {
		t.Errorf("%d failures were answered at once, %d late, %d refused; want only the last guess late", at, late, refused)
	}
}
