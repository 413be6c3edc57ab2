package wsdevice_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/gorilla/websocket"

	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devicetest"
)

// Over WebSocket, too, a rotated device is admitted with its old token until it uses the
// new one.
func TestRotatedToken(t *testing.T) {
	b := open(t)
	const id = devices.ID("aa:bb:cc:dd:ee:ff")
	if _, err := b.service.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: "c"}); err != nil {
		t.Fatal(err)
	}
	attempt := func(generation int64) int {
		t.Helper()
		ws, answer, err := websocket.DefaultDialer.Dial(b.url, b.header(id, "c", generation))
		if err != nil {
			return answer.StatusCode
		}
		defer ws.Close()
		if err := ws.WriteMessage(websocket.TextMessage, []byte(`{"type":"hello","version":1,"transport":"websocket","audio_params":{"format":"opus","sample_rate":16000,"channels":1,"frame_duration":60}}`)); err != nil {
			t.Fatal(err)
		}
		if _, _, err := ws.ReadMessage(); err != nil { // the server's hello shows that it was admitted
			t.Fatalf("generation %d: %v", generation, err)
		}
		return http.StatusOK
	}
	if err := b.service.Rotate(t.Context(), devicetest.Admin, id, time.Hour); err != nil {
		t.Fatal(err)
	}
	for i, step := range []struct {
		generation int64
		want       int
	}{{0, 200}, {2, 401}, {0, 200}, {1, 200}, {0, 401}, {1, 200}} {
		if got := attempt(step.generation); got != step.want {
			t.Errorf("step %d, generation %d: %d, want %d", i, step.generation, got, step.want)
		}
	}
}
