package fleettest

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
)

// Counters that alerts look at are there from the start: an alert on an increase
// would miss what happens first.
func TestCountersAreThereFromTheStart(t *testing.T) {
	t.Parallel()
	node := programs.Start(t)
	_, body := get(t, node.Info.API+"/metrics", nil)
	for _, want := range []string{`fleetd_ota_checks_total{kind="unsafe"} 0`, `fleetd_events_dropped_total{reason="nats_away"} 0`, `fleetd_events_dropped_total{reason="queue_full"} 0`,
		`fleetd_events_dropped_total{reason="ack_timeout"} 0`, `fleetd_audit_entries_total{result="dropped"} 0`} {
		if !strings.Contains(body, "\n"+want+"\n") {
			t.Errorf("there is no %s", want)
		}
	}
}

// The server that explains photos is reached through the proxy of the
// environment.
func TestVisionUsesTheProxy(t *testing.T) {
	t.Parallel()
	var through atomic.Int64
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Host == "vision.example.com" {
			through.Add(1)
		}
		w.WriteHeader(http.StatusUnauthorized) // enough for a diagnosis
	}))
	t.Cleanup(proxy.Close)
	node := &Node{Dir: t.TempDir(), programs: programs, args: []string{"--vision-url", "http://vision.example.com/v1"}, env: []string{"HTTP_PROXY=" + proxy.URL, "http_proxy=" + proxy.URL}}
	node.Run(t)
	t.Cleanup(func() { node.Stop(t) })
	if _, err := node.Diagnose(t.Context(), ""); err != nil {
		t.Fatal(err)
	}
	if through.Load() == 0 {
		t.Error("the proxy was not asked")
	}
}
