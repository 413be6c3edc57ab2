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

	"fleetd/internal/connlimit"
	"fleetd/internal/console"
	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/provision"
	"fleetd/internal/restapi"
)

// downParts returns the parts that are down, with their errors; none if the node is ready.
func (n *node) downParts() map[string]error {
	down := map[string]error{}
	if err := n.store.Ready(); err != nil {
		down["database"] = err
	}
	if !n.bus.up.Load() {
		down["nats"] = errors.New("not connected")
	} else if err := n.storageError(); err != nil {
		down["events"] = err
	}
	if err := n.vision.Ready(); err != nil {
		down["photos"] = err
	}
	if n.mqtt.broker != nil && !n.mqtt.broker.Up() {
		down["mqtt"] = errors.New("the broker is not connected")
	}
	if n.draining.Load() {
		down["node"] = errors.New("stopping")
	}
	return down
}

// health adds the routes for load balancers to the listener of devices. A node without
// its database or NATS still serves devices, so only stopping makes it unready there. The
// names of the parts that are down are included, but no more, because anyone can read them.
func (n *node) health(mux *http.ServeMux) {
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok\n")) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		answer := struct {
			Ready bool     `json:"ready"`
			Down  []string `json:"down,omitempty"`
		}{Ready: !n.draining.Load() && n.service.Registry().Ready(), Down: slices.Sorted(maps.Keys(n.downParts()))}
		w.Header().Set("Content-Type", "application/json")
		if !answer.Ready {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		body, _ := json.Marshal(answer) // cannot fail for strings
		_, _ = w.Write(body)            // fails only if the prober has disconnected
	})
}

// httpLog receives the log of net/http: panics are internal errors (bugs), the rest is
// clients that connected and disconnected.
type httpLog struct{ log *slog.Logger }

func (l httpLog) Write(line []byte) (int, error) {
	if bytes.Contains(line, []byte("panic serving")) {
		l.log.Error("internal error (bug), please report it", "http", string(line))
	} else {
		l.log.Debug("http", "message", string(bytes.TrimSpace(line)))
	}
	return len(line), nil
}

// whileServing refuses connections and OTA checks of devices once the node is stopping;
// photo uploads of calls in progress are still accepted.
func (n *node) whileServing(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if n.draining.Load() && (r.URL.Path == provision.PathWebSocket || strings.HasPrefix(r.URL.Path, provision.PathOTA)) {
			w.Header().Set("Retry-After", "10")
			http.Error(w, "this node is stopping; try again", http.StatusServiceUnavailable)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// startAPI opens the API for people and programs.
func (n *node) startAPI() error {
	n.startExplain()
	n.startMCP()
	var pages http.Handler
	if n.cfg.Console {
		pages = console.New()
	}
	metrics := n.metrics()
	api := restapi.New(restapi.Options{Console: pages, Service: n.service, Mint: n.mint, AuthNone: n.cfg.APIAuth == "none", Work: n.work, Failures: n.failures["api-listen"], Events: n.events,
		Photos: n.vision, Archive: n.store, Jobs: n.jobs.manager, Webhooks: n.webhooks, Firmware: n.firmware, MaxFirmware: n.cfg.FirmwareLimit, Stats: n.startStats(metrics), Explainer: n.explain, Tracer: n.tracer, Attest: n.attest, Diagnoser: n.provision, PublicAPIURL: n.cfg.PublicAPIURL, Nodes: n.nodes, Ready: n.downParts, Draining: n.draining.Load,
		Authenticate: n.mqtt.authenticate, LogLevel: &n.level, Log: n.log, Version: n.cfg.Version})
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), newCollector(metrics))
	api.HandlePublic("GET /metrics", newSharedAnswer(promhttp.HandlerFor(registry, promhttp.HandlerOpts{})))
	api.Handle("GET /debug/pprof/", http.HandlerFunc(pprof.Index))
	api.Handle("GET /debug/pprof/profile", http.HandlerFunc(pprof.Profile))
	api.Handle("GET /debug/pprof/trace", http.HandlerFunc(pprof.Trace))
	// The memory that a node needs can only be measured after unused memory was
	// returned, which the runtime otherwise delays.
	api.Handle("POST /debug/free-memory", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		debug.FreeOSMemory()
		w.WriteHeader(http.StatusNoContent)
	}))
	n.api = &http.Server{Handler: connlimit.RespondEarly(n.withMCP(api), n.pace("api-listen")), ReadHeaderTimeout: 5 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10,
		ErrorLog: n.httpErrors(), ConnContext: connlimit.WithConn}
	if n.apiCertificate != nil {
		n.api.TLSConfig = n.apiCertificate.config()
		n.apiNet = connlimit.LimitHandshakes(n.api, n.apiNet)
	}
	n.serve("api-listen", n.api, n.apiNet)
	if err := n.startMCPListener(api); err != nil {
		return err
	}
	n.onStop(n.mcp.Close) // before the listener waits for its streams
	return nil
}

func (n *node) nodes() []devices.Node {
	if n.leases != nil {
		return n.leases.All()
	}
	return []devices.Node{{Name: n.cfg.Node, Version: n.cfg.Version, Started: n.started, Devices: n.deviceCount(), API: n.apiURL()}}
}

// deviceCount returns the number of devices connected to this node.
func (n *node) deviceCount() (held int) {
	n.service.Stats().States.Each(func(_ session.State, count int64) { held += int(count) })
	return held
}

// apiURL returns the URL of this node's API.
func (n *node) apiURL() string {
	u := localURL(n.apiNet)
	if n.apiCertificate != nil {
		u = "https" + strings.TrimPrefix(u, "http")
	}
	return u
}

// apiCertFile returns the file of the API's certificate, with which commands on this
// machine compare that of the listener; empty without TLS.
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
