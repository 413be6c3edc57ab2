//go:build !race

// The race detector allocates, so this budget is held without it.

package restapi

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

// TestCallAllocations holds the call path to its budget: what routing, decoding
// and answering cost beside the core's own work, which is measured apart.
func TestCallAllocations(t *testing.T) {
	f := newFleet(t)
	f.connect(t, robot, devicetest.NewScript())
	const body = `{"arguments":{"volume":50},"timeout":"10s"}`
	reader := strings.NewReader(body)
	r := httptest.NewRequest("POST", volumePath, nil)
	r.Body, r.ContentLength = readCloser{reader}, int64(len(body))
	r.Header.Set("Authorization", "Bearer "+f.token)
	w := &quiet{header: http.Header{}}
	whole := testing.AllocsPerRun(500, func() {
		reader.Reset(body)
		f.api.ServeHTTP(w, r)
	})
	if w.status != 0 || w.bytes == 0 {
		t.Fatalf("status %d, %d bytes", w.status, w.bytes)
	}
	core := testing.AllocsPerRun(500, func() {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if _, err := f.service.CallTool(ctx, devices.ToolCall{Principal: devicetest.Admin, Device: robot, Tool: "self.audio_speaker.set_volume",
			Arguments: json.RawMessage(`{"volume":50}`)}); err != nil {
			t.Error(err)
		}
	})
	t.Logf("%.0f allocations, %.0f of them the core's", whole, core)
	if ours := whole - core; ours > 10 {
		t.Errorf("%.0f allocations are ours, want at most 10", ours)
	}
}
