package vision

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"fleetd/internal/connlimit"
)

// Clients that try upload tokens get a delayed 429; a valid token is accepted at once, and
// an expired one does not count.
func TestWrongTokensAreSlowedDown(t *testing.T) {
	t.Parallel()
	c := newTestServer(t, func(o *Options) { o.Failures = connlimit.NewFailures(nil) })
	body := cameraBody("q", picture(t, 64))
	upload := func(token string) (result, time.Duration) {
		begun := time.Now()
		r := c.camera(t, robot, strings.NewReader(body), "Authorization", "Bearer "+token)
		return r, time.Since(begun)
	}
	expired := c.mint.UploadToken(string(robot), time.Now().Add(-time.Hour))
	for range 2 * connlimit.FailureBurst {
		if r, _ := upload(expired); r.status != http.StatusUnauthorized {
			t.Fatalf("expired: %d", r.status)
		}
	}
	for range connlimit.FailureBurst {
		if r, took := upload("guess"); r.status != http.StatusUnauthorized || took > connlimit.FailureDelay/2 {
			t.Fatalf("%d after %v", r.status, took)
		}
	}
	// security: D7
	if r, took := upload("guess"); r.status != http.StatusTooManyRequests || took < connlimit.FailureDelay || c.vision.Uploads.Get(reasonTooMany) != 1 {
		t.Errorf("above the limit: %d after %v", r.status, took)
	}
	if r := c.screen(t, c.url+PathSnapshot+"guess", strings.NewReader("")); r.status != http.StatusTooManyRequests {
		t.Errorf("a single-use URL: %d", r.status)
	}
	// security: D7
	c.camera(t, robot, strings.NewReader(body)).must(t)
}
