package gatewayapi

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"fleetd/internal/connlimit"
)

// Clients that try tokens get a delayed 429; a valid one is served at
// once.
func TestWrongTokensAreSlowedDown(t *testing.T) {
	t.Parallel()
	f := newFleet(t, func(o *Options) { o.Failures = connlimit.NewFailures(nil) })
	ask := func(token string) (status int, took time.Duration) {
		r := httptest.NewRequest(http.MethodPost, "/api/devices/status", http.NoBody)
		r.Header.Set("Authorization", "Bearer "+token)
		w, begun := httptest.NewRecorder(), time.Now()
		f.api.ServeHTTP(w, r)
		return w.Code, time.Since(begun)
	}
	for range connlimit.FailureBurst {
		if status, took := ask("guess"); status != http.StatusUnauthorized || took > connlimit.FailureDelay/2 {
			t.Fatalf("%d after %v", status, took)
		}
	}
	if status, took := ask("guess"); status != http.StatusTooManyRequests || took < connlimit.FailureDelay {
		t.Errorf("one too many: %d after %v", status, took)
	}
	if status, took := ask(f.mint.AdminToken()); status == http.StatusUnauthorized || status == http.StatusTooManyRequests || took > connlimit.FailureDelay/2 {
		t.Errorf("the right one: %d after %v", status, took)
	}
}
