package vision

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"fleetd/internal/lobby"
)

// Who tries upload tokens is answered late and with 429; the right one is taken
// at once, and one that has merely expired is no attempt.
func TestWrongTokensAreSlowedDown(t *testing.T) {
	t.Parallel()
	c := newCamp(t, func(o *Options) { o.Failures = lobby.NewFailures(nil) })
	body := cameraBody("q", picture(t, 64))
	upload := func(token string) (result, time.Duration) {
		begun := time.Now()
		r := c.camera(t, robot, strings.NewReader(body), "Authorization", "Bearer "+token)
		return r, time.Since(begun)
	}
	expired := c.mint.UploadToken(string(robot), time.Now().Add(-time.Hour))
	for range 2 * lobby.FailureBurst {
		if r, _ := upload(expired); r.status != http.StatusUnauthorized {
			t.Fatalf("expired: %d", r.status)
		}
	}
	for range lobby.FailureBurst {
		if r, took := upload("guess"); r.status != http.StatusUnauthorized || took > lobby.FailureDelay/2 {
			t.Fatalf("%d after %v", r.status, took)
		}
	}
	// security: D7
	if r, took := upload("guess"); r.status != http.StatusTooManyRequests || took < lobby.FailureDelay || c.vision.Uploads.Get(reasonTooMany) != 1 {
		t.Errorf("one too many: %d after %v", r.status, took)
	}
	if r := c.screen(t, c.url+PathSnapshot+"guess", strings.NewReader("")); r.status != http.StatusTooManyRequests {
		t.Errorf("an address of one use: %d", r.status)
	}
	// security: D7
	c.camera(t, robot, strings.NewReader(body)).must(t)
}
