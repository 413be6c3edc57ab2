package wsdevice_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/gorilla/websocket"

	"fleetd/internal/connlimit"
	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/wsdevice"
)

// Clients that try tokens get a delayed 429; a device with a valid token is admitted at
// once from the same address.
func TestWrongTokensAreSlowedDown(t *testing.T) {
	t.Parallel()
	failures := connlimit.NewFailures(nil)
	b := open(t, func(o *wsdevice.Options) { o.Failures = failures })
	const id = devices.ID("aa:bb:cc:dd:ee:ff")
	if _, err := b.service.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: "c"}); err != nil {
		t.Fatal(err)
	}
	attempt := func(generation int64) (status int, took time.Duration) {
		t.Helper()
		begun := time.Now()
		ws, answer, err := websocket.DefaultDialer.Dial(b.url, b.header(id, "c", generation))
		if err == nil {
			_ = ws.Close()
		}
		return answer.StatusCode, time.Since(begun)
	}
	for range connlimit.FailureBurst {
		if status, took := attempt(7); status != http.StatusUnauthorized || took > connlimit.FailureDelay/2 {
			t.Fatalf("%d after %v", status, took)
		}
	}
	late := make(chan struct{})
	go func() {
		defer close(late)
		// security: D7
		if status, took := attempt(7); status != http.StatusTooManyRequests || took < connlimit.FailureDelay {
			t.Errorf("above the limit: %d after %v", status, took)
		}
	}()
	// security: D7
	if status, took := attempt(0); status != http.StatusSwitchingProtocols || took > connlimit.FailureDelay/2 {
		t.Errorf("the right token: %d after %v", status, took)
	}
	<-late
	// A device that waits for approval has no token, and does not count.
	if _, answer, err := websocket.DefaultDialer.Dial(b.url, http.Header{"Device-Id": {string(id)}}); err == nil || answer.StatusCode != http.StatusUnauthorized {
		t.Errorf("no token: %v", err)
	}
}
