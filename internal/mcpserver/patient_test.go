package mcpserver

import (
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

func TestStreamsShowSignsOfLife(t *testing.T) {
	w := httptest.NewRecorder()
	p := newPatient(w)
	now := time.Now()
	if p.due(now.Add(time.Hour)) {
		t.Error("what is no stream is to beat")
	}
	p.Header().Set("Content-Type", "text/event-stream")
	if _, err := p.Write([]byte("data: x\n\n")); err != nil {
		t.Fatal(err)
	}
	if p.due(now.Add(heartbeat/2)) || !p.due(now.Add(2*heartbeat)) {
		t.Error("it beats at the wrong time")
	}
	p.beat()
	if got := w.Body.String(); !strings.HasSuffix(got, "\n\n:\n\n") || w.Header().Get("X-Accel-Buffering") != "no" {
		t.Errorf("%q", got)
	}
	p.end()
	if _, err := p.Write(nil); err == nil || p.due(now.Add(time.Hour)) {
		t.Error("it goes on after its end")
	}
}
