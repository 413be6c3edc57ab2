package node

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"maps"
	"net/http"
	"net/http/pprof"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/lobby"
	"fleetd/internal/provision"
	"fleetd/internal/restapi"
)

// parts names what is down; none means that the node is ready.
func (n *node) parts() map[string]error {
	down := map[string]error{}
	if err := n.store.Ready(); err != nil {
		down["database"] = err
	}
	if !n.bus.up.Load() {
		down["nats"] = errors.New("not connected")
	} else if err := n.kept(); err != nil {
		down["events"] = err
	}
	if err := n.vision.Ready(); err != nil {
		down["photos"] = err
	}
	if n.mqtt.broker != nil && !n.mqtt.broker.Up() {
		down["mqtt"] = errors.New("the broker is not connected")
	}
	if n.draining.get() {
		down["node"] = errors.New("stopping")
	}
	return down
}

// health adds the load balancers' routes to the devices' side. A node without
// its database or NATS still serves devices, so only stopping makes it unfit
// there; what is down is named, and no more, since anybody can ask.
func (n *node) health(mux *http.ServeMux) {
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok\n")) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		answer := struct {
			Ready bool     `json:"ready"`
			Down  []string `json:"down,omitempty"`
		}{Ready: !n.draining.get() && n.service.Registry().Ready(), Down: slices.Sorted(maps.Keys(n.parts()))}
		w.Header().Set("Content-Type", "application/json")
		if !answer.Ready {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		body, _ := json.Marshal(answer) // strings always marshal
		_, _ = w.Write(body)            // nobody to tell if the prober is gone
	})
}

// httpLog takes what net/http logs: panics are faults of ours, the rest is
// clients that came and went.
type httpLog struct{ log *slog.Logger }

func (l httpLog) Write(line []byte) (int, error) {
	if bytes.Contains(line, []byte("panic serving")) {
		l.log.Error("internal error (bug), please report it", "http", string(line))
	} else {
		l.log.Debug("http", "message", string(bytes.TrimSpace(line)))
	}
	return len(line), nil
}

// whileServing sends devices elsewhere, or away for a moment, once the node
// stops: uploads of calls in progress still come through.
func (n *node) whileServing(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if n.draining.get() && (r.URL.Path == provision.PathWebSocket || strings.HasPrefix(r.URL.Path, provision.PathOTA)) {
			w.Header().Set("Retry-After", "10")
			http.Error(w, "this node is stopping; try again", http.StatusServiceUnavailable)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// startAPI opens the people's side.
func (n *node) startAPI() error {
	n.startMCP()
	api := restapi.New(restapi.Options{Service: n.service, Mint: n.mint, AuthNone: n.cfg.APIAuth == "none", Failures: n.failures["api-listen"], Events: n.events,
		Photos: n.vision, Archive: n.store, AuditSince: n.auditSince, Attest: n.attest, Diagnoser: n.provision, Nodes: n.nodes, Ready: n.parts, Draining: n.draining.get,
		Authenticate: n.mqtt.authenticate, LogLevel: &n.level, Log: n.log, Version: n.cfg.Version})
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), &collector{
		version: n.cfg.Version, node: n.cfg.Node, service: n.service, front: n.front, provision: n.provision, attest: n.attest, events: n.events,
		cluster: n.cluster, store: n.store, vision: n.vision, bus: n.bus, mqtt: n.mqtt, gate: n.gate, apiGate: n.apiGate, floods: n.floods, guarded: n.guarded, proxied: n.proxied, failures: n.failures, certificate: n.certificate, apiCertificate: n.apiCertificate, audit: n.audit, policy: n.policy, upstream: n.upstream, members: n.members, mcp: n.mcp.Stats()})
	api.HandlePublic("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	api.Handle("GET /debug/pprof/", http.HandlerFunc(pprof.Index))
	api.Handle("GET /debug/pprof/profile", http.HandlerFunc(pprof.Profile))
	api.Handle("GET /debug/pprof/trace", http.HandlerFunc(pprof.Trace))
	// What a node needs shows only when what it needed has been given back,
	// which the runtime otherwise does at its leisure.
	api.Handle("POST /debug/free-memory", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		debug.FreeOSMemory()
		w.WriteHeader(http.StatusNoContent)
	}))
	n.api = &http.Server{Handler: lobby.AnswerFirst(n.withMCP(api), n.pace("api-listen")), ReadHeaderTimeout: 5 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10,
		ErrorLog: n.httpErrors(), ConnContext: lobby.WithConn}
	if n.apiCertificate != nil {
		n.api.TLSConfig = n.apiCertificate.config()
	}
	n.serve("api-listen", n.api, n.apiNet)
	n.onStop(n.mcp.Close) // before the listener waits for its streams
	return nil
}

func (n *node) nodes() []devices.Node {
	if n.members != nil {
		return n.members.nodes()
	}
	return []devices.Node{{Name: n.cfg.Node, Version: n.cfg.Version, Started: n.started, Devices: n.held(), API: n.apiURL()}}
}

// held is the number of devices connected here.
func (n *node) held() (held int) {
	n.service.Stats().States.Each(func(_ session.State, count int64) { held += int(count) })
	return held
}

// apiURL is where this node's API is.
func (n *node) apiURL() string {
	u := localURL(n.apiNet)
	if n.apiCertificate != nil {
		u = "https" + strings.TrimPrefix(u, "http")
	}
	return u
}

// apiCertFile is the file of the API's certificate, which commands on this machine
// compare with what the listener shows; empty without TLS.
func (n *node) apiCertFile() string {
	if n.apiCertificate == nil {
		return ""
	}
	path, err := filepath.Abs(n.cfg.APITLSCert)
	if err != nil {
		return n.cfg.APITLSCert
	}
	return path
}
