package browser

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"testing"

	"fleetd/internal/fleettest"
)

// before runs a server in front of a node: a proxy, which answers itself what the test wants to be different. answer
// returns whether it did.
func before(t *testing.T, n *fleettest.Node, answer func(http.ResponseWriter, *http.Request) bool) *httptest.Server {
	t.Helper()
	node, err := url.Parse(n.Info.API)
	if err != nil {
		t.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(node)
	proxy.FlushInterval = -1 // events pass at once
	proxy.ErrorHandler = func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) }
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !answer(w, r) {
			proxy.ServeHTTP(w, r)
		}
	}))
	t.Cleanup(func() {
		front.CloseClientConnections() // streams of tabs that are closing
		front.Close()
	})
	return front
}

// respond answers with a value as JSON.
func respond(t *testing.T, w http.ResponseWriter, status int, value any) bool {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if err := json.NewEncoder(w).Encode(value); err != nil {
		t.Logf("an answer of the test: %v", err) // the browser is gone
	}
	return true
}
