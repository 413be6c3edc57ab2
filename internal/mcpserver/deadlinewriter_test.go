package mcpserver

import (
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

func TestHeartbeats(t *testing.T) {
	w := httptest.NewRecorder()
	p := newDeadlineWriter(w)
	now := time.Now()
	if p.heartbeatDue(now.Add(time.Hour)) {
		t.Error("a heartbeat is due for a response that is not a stream")
	}
	p.Header().Set("Content-Type", "text/event-stream")
	if _, err := p.Write([]byte("data: x\n\n")); err != nil {
		t.Fatal(err)
	}
	if p.heartbeatDue(now.Add(heartbeat/2)) || !p.heartbeatDue(now.Add(2*heartbeat)) {
		t.Error("heartbeats are due at the wrong time")
	}
	p.writeHeartbeat()
	if got := w.Body.String(); !strings.HasSuffix(got, "\n\n:\n\n") || w.Header().Get("X-Accel-Buffering") != "no" {
		t.Errorf("%q", got)
	}
	p.end()
	if _, err := p.Write(nil); err == nil || p.heartbeatDue(now.Add(time.Hour)) {
		t.Error("it writes after its end")
	}
}
