// Package node builds one fleetd node from its configuration, in dependency
// order, and stops it in reverse.
package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime/pprof"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/attest"
	"fleetd/internal/audit"
	"fleetd/internal/clock"
	"fleetd/internal/cluster"
	"fleetd/internal/cluster/lease"
	"fleetd/internal/config"
	"fleetd/internal/connlimit"
	"fleetd/internal/credential"
	"fleetd/internal/datadir"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
	"fleetd/internal/events"
	"fleetd/internal/explain"
	"fleetd/internal/firmware"
	"fleetd/internal/fleet"
	"fleetd/internal/mcpserver"
	"fleetd/internal/oauth"
	"fleetd/internal/provision"
	"fleetd/internal/recorder"
	"fleetd/internal/store"
	"fleetd/internal/store/database"
	"fleetd/internal/store/ledger"
	"fleetd/internal/tasks"
	"fleetd/internal/trace"
	"fleetd/internal/upstream"
	"fleetd/internal/vision"
	"fleetd/internal/webhooks"
	"fleetd/internal/wsdevice"
)

// Time limits of starting and stopping.
const (
	openTimeout   = 10 * time.Second
	callGrace     = 10 * time.Second // for calls in progress
	answerGrace   = time.Second      // for the responses of cancelled calls
	deviceAnswer  = vision.UploadTime + vision.ExplainTime + 15*time.Second
	storeGrace    = 10 * time.Second
	stopLimit     = 30 * time.Second // beyond the drain window; then the process exits with an error
	refreshEvery  = 5 * time.Second  // between attempts to read registry changes
	joinTries     = 24               // checks that nobody answers, two minutes of them; then who subscribes there is not a node
	refreshLimit  = time.Minute
	maxHandshakes = 256 // tool lists read at the same time
	maxReconnects = 20  // burst per device, then one a second
	devicesWanted = 20_000
)

// Run runs one node until ctx ends, then drains it. It returns an error if the node cannot
// start, or did not stop in time.
func Run(ctx context.Context, cfg *config.Config) error {
	n := &node{cfg: cfg, started: clock.Now(), serveErr: make(chan error, 4), ready: make(chan struct{}, 1), rotations: make(chan struct{}, 1), limited: map[string]*connlimit.Listener{}, proxyListeners: map[string]*connlimit.ProxyListener{}, resumed: make(chan struct{}, 1)}
	n.logging()
	var release func()
	n.hangups, release = catchHangups()
	defer release()
	err := n.start(ctx)
	if err == nil {
		n.whileRunning(n.reload)
		n.announce()
		select {
		case <-ctx.Done():
			n.log.Info("stopping")
		case err = <-n.serveErr:
		}
	}
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		n.stop()
	}()
	select {
	case <-stopped:
		return err
	case <-time.After(stopLimit + cfg.DrainWindow):
		_ = pprof.Lookup("goroutine").WriteTo(os.Stderr, 1) // shows what blocks
		return errors.Join(err, fmt.Errorf("the node did not stop within %v; its goroutines are listed above", stopLimit+cfg.DrainWindow))
	}
}

// node is one running node. Its parts are in the order in which they start.
type node struct {
	cfg     *config.Config
	started time.Time
	level   slog.LevelVar
	log     *slog.Logger

	dir            *datadir.Dir
	mint           *credential.Mint
	rotations      chan struct{} // capacity 1: the fleet's secrets may have changed
	bus            *bus
	events         *events.Bus
	store          *store.Store
	ledger         *ledger.Ledger
	listeners      *listeners
	deviceLimiter  *connlimit.Limiter
	floods         *connlimit.Floods
	work           *connlimit.Work
	apiLimiter     *connlimit.Limiter
	limited        map[string]*connlimit.Listener      // by flag
	proxyListeners map[string]*connlimit.ProxyListener // of them, those behind proxies that name their clients
	failures       map[string]*connlimit.Failures
	deviceNet      net.Listener
	apiNet         net.Listener
	publicURL      string

	recorder    *recorder.Recorder // nil with --recorder-memory 0
	tracer      *trace.Tracer
	restored    restored
	explain     *explain.Explainer
	audit       *audit.Log
	policy      *policyFile // nil without --policy-file
	cluster     *cluster.Link
	vision      *vision.Server
	upstream    *upstream.Bridge // nil without --voice-upstream
	service     *fleet.Service
	front       *wsdevice.Front
	mqtt        *mqttSide
	attest      *attest.List
	provision   *provision.Server
	device      *http.Server
	api         *http.Server
	mcp         *mcpserver.Server
	oauth       *oauth.Server // nil: hosts use API keys alone
	certificate *certificate  // nil without TLS
	// apiCertificate is nil without TLS on the API.
	apiCertificate *certificate
	hangups        chan os.Signal
	reloadables    []*reloadable

	ready    chan struct{} // the database became usable
	serveErr chan error
	resumed  chan struct{} // the process did not run for a while
	joining  sync.Mutex
	joined   bool // the other nodes, if any, are of this fleet
	// unanswered counts how often in a row others did not answer whether they are.
	unanswered atomic.Int32
	jobs       *jobsSide
	webhooks   *webhooks.Manager
	firmware   *firmware.Manager
	leases     *lease.Nodes // nil where no other node can be: the database is a file
	stops      []func()     // in starting order, run in reverse
	draining   atomic.Bool  // the node is stopping
	stopBegan  time.Time    // set before draining
	endOnce    sync.Once    // the devices' sessions
}

func (n *node) logging() {
	// config has checked the name
	_ = n.level.UnmarshalText([]byte(n.cfg.LogLevel))
	options := &slog.HandlerOptions{Level: &n.level, ReplaceAttr: redactAttr}
	var handler slog.Handler = slog.NewJSONHandler(os.Stderr, options)
	if n.cfg.LogFormat == "text" {
		handler = slog.NewTextHandler(os.Stderr, options)
	}
	n.log = slog.New(handler).With("node", n.cfg.Node)
}

// redactAttr replaces the values of attributes whose names are those of secrets.
func redactAttr(_ []string, a slog.Attr) slog.Attr {
	if audit.IsSecret(a.Key) {
		a.Value = slog.StringValue(audit.Redacted)
	}
	return a
}

// onStop adds a step that runs after all parts that were started later have stopped.
func (n *node) onStop(step func()) { n.stops = append(n.stops, step) }

// windowLeft is what is left of the drain window of a node that is stopping.
func (n *node) windowLeft() time.Duration {
	return max(0, n.cfg.DrainWindow-time.Since(n.stopBegan))
}

func (n *node) stop() {
	n.stopBegan = time.Now()
	n.draining.Store(true)
	for i := len(n.stops) - 1; i >= 0; i-- {
		n.stops[i]()
	}
}

// start starts the parts: data directory, NATS, database, ports, core, front ends, and last
// the API.
func (n *node) start(ctx context.Context) error {
	var err error
	if n.dir, err = datadir.Open(n.cfg.DataDir); err != nil {
		return err
	}
	n.onStop(n.dir.Close)
	secret, err := n.dir.Secret(n.cfg.Secret)
	if err != nil {
		return err
	}
	if n.mint, err = credential.New([]byte(secret)); err != nil {
		return fmt.Errorf("--secret: %w", err)
	}
	if n.bus, err = openBus(n.cfg, n.dir, n.mint, n.log); err != nil {
		return err
	}
	n.onStop(n.bus.close)
	if err := n.openEvents(); err != nil {
		return err
	}
	if err := n.openStore(ctx); err != nil {
		return err
	}
	if err := n.listen(ctx); err != nil {
		return err
	}
	if err := n.startCore(ctx); err != nil {
		return err
	}
	if err := n.startFrontEnds(ctx); err != nil {
		return err
	}
	if err := n.startGatewayAPI(); err != nil {
		return err
	}
	return n.startAPI()
}

func (n *node) openStore(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	var err error
	n.store, err = store.Open(ctx, n.cfg.Database, n.cfg.DataDir, n.log, store.OnReady(func() {
		tasks.Signal(n.ready)
	}), store.OnStaleWrite(func(p devices.Presence) { n.service.OnStaleWrite(p) }), store.OnImage(n.imageChanged)) // rows come from the core, so it exists
	if err != nil {
		return fmt.Errorf("--database: %w", err)
	}
	n.onStop(func() {
		ctx, cancel := context.WithTimeout(context.Background(), storeGrace)
		defer cancel()
		if err := n.store.Close(ctx); err != nil {
			n.log.Error("the last rows could not be written to the database", "error", err)
		}
	})
	n.ledger = ledger.New(n.store, n.log, ledger.Clock(clock.Now))
	n.onStop(n.ledger.Close)
	if err := n.store.Fingerprint(ctx, n.mint.Fingerprint()); err != nil && !errors.Is(err, devices.ErrDatabase) {
		return fmt.Errorf("--secret: %w", err)
	}
	return nil
}

// imageChanged publishes that a device runs another image, and tells the rollout.
func (n *node) imageChanged(c devices.ImageChange) {
	n.service.Publish(c.Event())
	if n.jobs != nil {
		n.jobs.rollout.Changed(c)
	}
}

// listen opens the ports, which determines the addresses for devices.
func (n *node) listen(ctx context.Context) error {
	fresh, err := n.isFresh(ctx)
	if err != nil {
		return err
	}
	if n.listeners, err = newListeners(n.cfg, n.dir, n.log, fresh); err != nil {
		return err
	}
	n.failures = map[string]*connlimit.Failures{}
	for _, flag := range []string{"device-listen", "mqtt-listen", "gateway-api-listen", "api-listen"} {
		n.failures[flag] = connlimit.NewFailures(n.cfg.TrustedProxies)
	}
	n.floods = connlimit.NewFloods(n.cfg.FloodGrace)
	n.work = connlimit.NewWork()
	n.deviceLimiter = connlimit.NewLimiter(deviceFiles(openFiles()), n.cfg.ConnectionsPerAddress, n.cfg.TrustedProxies)
	if n.deviceNet, err = n.openLimited("device-listen", n.cfg.DeviceListen); err != nil {
		return err
	}
	n.onStop(func() { _ = n.deviceNet.Close() }) // the servers close them first
	most := apiFiles(openFiles())
	n.apiLimiter = connlimit.NewLimiter(most, most/2, n.cfg.TrustedProxies)
	if n.cfg.APITLSCert != "" {
		if n.apiCertificate, err = n.newCertificate("--api-tls-cert, --api-tls-key", n.cfg.APITLSCert, n.cfg.APITLSKey); err != nil {
			return err
		}
	}
	if n.apiNet, err = n.openAPI("api-listen", n.cfg.APIListen); err != nil {
		return err
	}
	n.onStop(func() { _ = n.apiNet.Close() })
	if n.publicURL = n.cfg.PublicDeviceURL; n.publicURL == "" {
		scheme := "http"
		if n.cfg.DeviceTLSCert != "" {
			scheme = "https"
		}
		n.publicURL = fmt.Sprintf("%s://%s:%d", scheme, publicHost(n.cfg.PublicHost), port(n.deviceNet))
	}
	return n.listeners.save()
}

// startCore starts the core with its ports, and reads the registry.
func (n *node) startCore(ctx context.Context) error {
	if err := n.readPolicy(); err != nil {
		return err
	}
	n.startAudit()
	var isAlive func(string) bool
	if n.shared() {
		n.leases = lease.New(lease.Options{Node: n.cfg.Node, Lifetime: lease.Lifetime, Version: n.cfg.Version, Started: n.started, Database: n.store, Devices: n.deviceCount, API: n.apiURL,
			Refresh: n.refresh, IsConnected: n.bus.up.Load, Log: n.log})
		isAlive = n.leases.Has
	}
	n.cluster = cluster.New(cluster.Options{Conn: n.bus.conn, Prefix: n.cfg.NATSPrefix, Mint: n.mint, Node: n.cfg.Node, SingleNode: !n.shared(),
		Open: n.cfg.APIAuth == "none", IsConnected: n.bus.up.Load, OnResume: n.wake, Log: n.log})
	n.onStop(n.cluster.Close)
	if err := n.openVision(); err != nil {
		return err
	}
	voice, err := n.openUpstream()
	if err != nil {
		return err
	}
	var peers registry.Peers
	var others *cluster.Peers
	if n.shared() {
		others = n.cluster.Peers()
		peers = others
	}
	n.startTracer()
	var steps devices.Recorder
	if n.cfg.RecorderMemory > 0 {
		n.recorder = recorder.New(n.cfg.Node, n.cfg.RecorderMemory)
		steps = n.tracer.Recorder(n.recorder)
	}
	n.service = fleet.New(
		fleet.Config{Node: n.cfg.Node, Version: n.cfg.Version, CallsPerDevice: n.cfg.CallsPerDevice,
			Approve: n.cfg.Admission == "approve", Handshakes: maxHandshakes, CatalogMemory: n.cfg.CatalogMemory, Reconnects: maxReconnects, IsNodeAlive: isAlive, PolicyFixed: n.policy != nil,
			Offer: n.offer(), Dir: n.cfg.DataDir, Fleet: n.mint.Fingerprint(), RosterKey: n.mint.RosterKey(), Members: n.cfg.MembersLimit, OnRotation: n.rotated, OnRestored: n.restored.set},
		fleet.Ports{Records: n.store, Catalogs: n.store, Ledger: n.ledger, Changes: n.ledger, Codes: n.ledger, Grants: n.ledger, Publisher: n.events, Directory: n.cluster, Router: n.cluster, Peers: peers,
			Audio: n.events, Voice: voice, Vision: n.vision, Audit: n.audit, Recorder: steps, Tracer: n.tracer, Log: n.log})
	n.service.Keys().SetAdmin(n.mint.AdminToken)
	n.onStop(n.service.Close)
	if n.bus.logins != nil {
		n.whileRunning(func(ctx context.Context) { n.bus.logins.watch(ctx, n.service.Keys()) })
	}
	if n.policy != nil {
		n.policy.attach(n.service, n.audit)
	}
	if n.upstream != nil {
		n.upstream.Attach(n.service)
	}
	n.vision.Attach(n.service)
	if err := n.cluster.Attach(n.service); err != nil {
		return err
	}
	if err := n.join(ctx); err != nil {
		return err
	}
	if others != nil {
		if err := others.Follow(n.service.Registry()); err != nil {
			return err
		}
	}
	if err := n.service.Registry().Start(ctx); err != nil {
		return err
	}
	if err := n.startFirmware(); err != nil {
		return err
	}
	if err := n.startJobs(); err != nil {
		return err
	}
	if err := n.startWebhooks(); err != nil {
		return err
	}
	keep, stop := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() { n.keep(keep) })
	done.Go(func() { n.prune(keep) })
	done.Go(func() { n.rejoins(keep) })
	if n.leases != nil {
		done.Go(func() { n.leases.Run(keep, n.service) })
	}
	n.onStop(func() {
		stop()
		done.Wait()
	})
	return nil
}

// isFresh reports whether the data directory contains no device: only then a default
// port that is taken may move.
func (n *node) isFresh(ctx context.Context) (bool, error) {
	if _, err := os.Stat(n.dir.File(registry.SnapshotFile)); !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	if n.store.Ready() != nil {
		return true, nil
	}
	page, err := n.store.List(ctx, devices.ListQuery{Limit: 1})
	return err == nil && len(page.Rows) == 0, nil
}

// offer returns the transport for devices without a setting of their own.
func (n *node) offer() devices.Transport {
	if n.cfg.MQTT == "off" {
		return devices.TransportWebSocket
	}
	return devices.Transport(n.cfg.Transport)
}

// startFrontEnds starts the listeners for devices.
func (n *node) startFrontEnds(ctx context.Context) error {
	if n.cfg.DeviceTLSCert != "" {
		var err error
		if n.certificate, err = n.newCertificate("--device-tls-cert, --device-tls-key", n.cfg.DeviceTLSCert, n.cfg.DeviceTLSKey); err != nil {
			return err
		}
	}
	if err := n.startMQTT(); err != nil {
		return err
	}
	n.front = wsdevice.New(wsdevice.Options{Service: n.service, Mint: n.mint, Open: n.cfg.DeviceAuth == "none", Failures: n.failures["device-listen"],
		Floods: n.floods, CloseIdle: n.cfg.WebSocketIdle == "close", Log: n.log})
	n.onStop(func() {
		n.endSessions()
		n.front.Close()
	})
	location, err := time.LoadLocation(n.cfg.DeviceTimezone)
	if err != nil {
		return fmt.Errorf("--timezone: %w", err)
	}
	offered := &n.mqtt.otaConfig
	if n.cfg.MQTT == "off" {
		offered = nil
	}
	n.attest = attest.New(n.store, n.mint, n.log)
	if err := n.writeToken(); err != nil {
		return err
	}
	n.whileRunning(n.followRotation)
	n.provision = provision.New(provision.Options{Service: n.service, Mint: n.mint, Attest: n.attest, PublicURL: n.publicURL,
		MQTT: offered, Transport: devices.Transport(n.cfg.Transport), Framing: n.cfg.WebSocketVersion, Location: location, RatePerMinute: n.cfg.OTARate, Burst: n.cfg.OTABurst, NewPerMinute: n.cfg.NewMembersPerAddress,
		TrustedProxies: n.cfg.TrustedProxies, Failures: n.failures["device-listen"], Rollouts: n.jobs.rollout, Draining: n.draining.Load, Log: n.log,
		Settings: provision.Settings{DeviceListen: n.deviceNet.Addr().String(), PublicHost: n.cfg.PublicHost, Proxied: n.cfg.PublicDeviceURL != "",
			PortMoved: n.listeners.moved["device-listen"], TLSHere: n.cfg.DeviceTLSCert != "", Open: n.cfg.DeviceAuth == "none", InContainer: inContainer(),
			MQTTMoved: n.listeners.moved["mqtt-listen"], UDPMoved: n.listeners.moved["udp-listen"], UDP: n.mqtt.udp, ExplainerError: n.vision.CheckExplainer,
			StorageError: func() error { return errors.Join(n.storageError(), n.vision.Ready()) }}})
	mux := http.NewServeMux()
	n.provision.Register(mux)
	mux.Handle("GET "+provision.PathWebSocket, n.front)
	n.vision.Register(mux)
	n.health(mux)
	n.device = &http.Server{Handler: connlimit.RespondEarly(n.perAddress(n.whileServing(mux)), connlimit.BodyPace{}), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 15 * time.Second,
		WriteTimeout: deviceAnswer, IdleTimeout: 60 * time.Second, MaxHeaderBytes: 8 << 10, ErrorLog: n.httpErrors(), ConnContext: connlimit.WithConn}
	if n.certificate != nil {
		n.device.TLSConfig = n.certificate.config()
	}
	n.serve("device-listen", n.device, n.deviceNet)
	n.onStop(func() { n.jobs.rollout.Drain(n.windowLeft()) })
	return nil
}

// inContainer reports whether the node runs in a container, whose address devices cannot
// reach.
func inContainer() bool {
	for _, mark := range []string{"/.dockerenv", "/run/.containerenv"} {
		if _, err := os.Stat(mark); err == nil {
			return true
		}
	}
	return false
}

// runInfo returns the content of run.json, for client commands on this machine.
func (n *node) runInfo() datadir.RunInfo {
	place, _ := database.Location(n.cfg.Database, n.cfg.DataDir) // valid, since the store has opened it
	return datadir.RunInfo{PID: os.Getpid(), Database: place, Node: n.cfg.Node, Version: n.cfg.Version, API: n.apiURL(), APICert: n.apiCertFile(), Device: n.publicURL,
		OTA: n.publicURL + provision.PathOTA, NATS: n.bus.url, Started: n.started}
}
