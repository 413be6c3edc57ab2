// Package provision answers the first question of every device: where to go.
// At boot the firmware asks the OTA address once (application.cc:417-509); the
// reply carries its transport, address and credentials, or, while it waits for
// approval, a code to speak. Every reply passes Check before it is sent,
// because a wrong one is stored in the device's flash and can keep it from
// ever booting again.
package provision

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"fleetd/internal/attest"
	"fleetd/internal/counters"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devices/session"
	"fleetd/internal/fleet"
	"fleetd/internal/lobby"
)

// Paths of the device side.
const (
	PathOTA       = "/xiaozhi/ota/"
	PathOTAWS     = "/xiaozhi/ota/ws/"
	PathOTAMQTT   = "/xiaozhi/ota/mqtt/"
	PathWebSocket = "/xiaozhi/v1/"
)

// Options of a Server.
type Options struct {
	Service *fleet.Service
	Mint    *credential.Mint
	Attest  *attest.List
	// PublicURL is the http or https base under which devices reach this node.
	PublicURL string
	// MQTT is what devices are told of the MQTT side; nil if there is none.
	MQTT *MQTT
	// Transport is what a device is offered that has no setting of its own.
	Transport devices.Transport
	// Framing is websocket.version in the reply, 1 to 3.
	Framing  int
	Location *time.Location
	// RatePerMinute and Burst bound the checks from one address; 0 is no limit.
	RatePerMinute int
	Burst         int
	// NewPerMinute bounds the unknown devices that come from one address, newBurst
	// times as many at once; 0 is no limit.
	NewPerMinute int
	// TrustedProxies are believed about the address behind them.
	TrustedProxies []netip.Prefix
	// Failures slows down wrong proofs; nil does not.
	Failures *lobby.Failures
	// Settings are judged by Diagnose.
	Settings Settings
	Log      *slog.Logger
}

// MQTT is what devices are told of the MQTT side. It may be written until the
// server is served.
type MQTT struct {
	Endpoint  string // host:port; TLS if and only if the port is 8883 (esp_mqtt.cc:27-32)
	Keepalive int    // seconds
}

// Server serves the OTA check and activation. It is safe for concurrent use.
type Server struct {
	opt    Options
	limits limits // of all requests
	fresh  limits // of unknown devices

	// Replies counts answers by kind: member, waiting, bad_request,
	// rate_limited, too_many_new, unavailable, unsafe.
	Replies counters.Map[string]
}

// New returns a Server.
func New(opt Options) *Server {
	s := &Server{opt: opt}
	s.Replies.Add(unsafeReply, 0) // or an alert on its increase would miss the first one
	s.limits.byAddr, s.fresh.byAddr = map[netip.Addr]*rate.Limiter{}, map[netip.Addr]*rate.Limiter{}
	return s
}

// Register adds the routes. The variants pin a transport for devices
// configured with that address; the firmware appends `activate` to whichever
// it has.
func (s *Server) Register(mux *http.ServeMux) {
	for path, pinned := range map[string]devices.Transport{PathOTA: devices.TransportNone, PathOTAWS: devices.TransportWebSocket, PathOTAMQTT: devices.TransportMQTT} {
		check := func(w http.ResponseWriter, r *http.Request) { s.check(w, r, pinned) }
		if pinned == devices.TransportMQTT && s.opt.MQTT == nil {
			check = func(w http.ResponseWriter, _ *http.Request) {
				s.refuse(w, "unavailable", http.StatusServiceUnavailable, errors.New("this node does not serve MQTT; use "+PathOTA))
			}
		}
		mux.HandleFunc("POST "+path+"{$}", check)
		mux.HandleFunc("GET "+path+"{$}", check)
		mux.HandleFunc("POST "+path+"activate", s.activate)
	}
}

// transport decides what a device is offered: what its address pins, else what
// the operator set for it, else the node's default.
func (s *Server) transport(pinned, preferred devices.Transport) devices.Transport {
	for _, t := range []devices.Transport{pinned, preferred, s.opt.Transport} {
		if t == devices.TransportWebSocket || t == devices.TransportMQTT && s.opt.MQTT != nil {
			return t
		}
	}
	return devices.TransportWebSocket
}

// refuse answers with a status that makes the firmware try again later: only
// 200 is read as a reply (ota.cc:103-107).
func (s *Server) refuse(w http.ResponseWriter, kind string, status int, err error) {
	s.Replies.Add(kind, 1)
	if status == http.StatusServiceUnavailable || status == http.StatusTooManyRequests {
		w.Header().Set("Retry-After", "10")
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	body, _ := json.Marshal(struct { // two strings always marshal
		Error string `json:"error"`
	}{err.Error()})
	_, _ = w.Write(body) // the device is gone if this fails
}

func (s *Server) check(w http.ResponseWriter, r *http.Request, pinned devices.Transport) {
	if !s.limits.allow(s.address(r), s.opt.RatePerMinute, s.opt.Burst) {
		s.refuse(w, "rate_limited", http.StatusTooManyRequests, errors.New("too many checks from this address; try again"))
		return
	}
	c, err := parseRequest(r)
	if err != nil {
		if r.Method == http.MethodGet && r.Header.Get("Device-Id") == "" {
			s.greet(w, pinned)
			return
		}
		s.refuse(w, "bad_request", http.StatusBadRequest, err)
		return
	}
	c.From, c.Offer = s.address(r), s.transport(pinned, devices.TransportNone)
	if !s.opt.Service.Knows(c.Device) && !s.fresh.allow(c.From, s.opt.NewPerMinute, newBurst*s.opt.NewPerMinute) {
		s.refuse(w, tooManyNew, http.StatusServiceUnavailable, errors.New("too many new devices from this address; try again"))
		return
	}
	welcome, err := s.opt.Service.CheckIn(r.Context(), c)
	if err != nil {
		e := devices.AsError(err)
		status := http.StatusBadRequest
		kind := "bad_request"
		if e.Code == devices.CodeUnavailable {
			status, kind = http.StatusServiceUnavailable, "unavailable"
		}
		s.refuse(w, kind, status, e)
		return
	}
	body, err := s.reply(c.Device, c.ClientID, welcome, pinned, time.Now()).encode()
	if err != nil {
		s.opt.Log.Error("OTA reply refused by its checker; run `fleetd doctor`", "device", c.Device, "error", err)
		s.refuse(w, unsafeReply, http.StatusInternalServerError, errors.New("this node's settings make no safe reply; see its log"))
		return
	}
	kind := "member"
	if !welcome.Admitted {
		kind = "waiting"
	}
	s.Replies.Add(kind, 1)
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(body) // the device asks again if this fails
}

// greet answers a person who opens the address in a browser.
func (s *Server) greet(w http.ResponseWriter, pinned devices.Transport) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	where := s.webSocketURL()
	if s.transport(pinned, devices.TransportNone) == devices.TransportMQTT {
		where = "MQTT at " + s.opt.MQTT.Endpoint
	}
	_, _ = fmt.Fprintf(w, "fleetd is here. Devices ask this address (POST) and are sent to %s.\n", where)
}

func (s *Server) webSocketURL() string {
	return "ws" + strings.TrimPrefix(s.opt.PublicURL, "http") + PathWebSocket
}

func (s *Server) reply(id devices.ID, clientID string, welcome admission.Welcome, pinned devices.Transport, now time.Time) reply {
	_, offset := now.In(s.opt.Location).Zone()
	r := reply{ServerTime: serverTime{Timestamp: now.UnixMilli(), TimeZone: s.opt.Location.String(), TimezoneOffset: offset / 60}}
	token := ""
	if welcome.Admitted {
		token = s.opt.Mint.DeviceToken(string(id), clientID, welcome.Generation)
	} else {
		r.Activation = &activation{Message: "Approve this device with the code " + welcome.Code, Code: welcome.Code,
			Challenge: welcome.Challenge, TimeoutMS: int(admission.CodeLife / time.Millisecond)}
	}
	// Also while waiting: without a section the device falls back to what its
	// flash still holds (application.cc:502-509).
	if s.transport(pinned, welcome.Prefer) == devices.TransportWebSocket {
		r.WebSocket = &webSocket{URL: s.webSocketURL(), Token: token, Version: s.opt.Framing}
		return r
	}
	r.MQTT = &mqtt{Endpoint: s.opt.MQTT.Endpoint, ClientID: id.Token(), Password: token, PublishTopic: devices.TopicUp(id),
		SubscribeTopic: devices.TopicDown(id), Keepalive: s.opt.MQTT.Keepalive}
	if token != "" {
		r.MQTT.Username = credential.MQTTUser(clientID)
	}
	return r
}

// activate tells a waiting device whether it is admitted now: 200 done, 202
// ask again (ota.cc:421-492). What its hardware signed may admit it; a device
// without a serial number, or one that is not listed, waits for its code.
func (s *Server) activate(w http.ResponseWriter, r *http.Request) {
	id, err := devices.ParseID(r.Header.Get("Device-Id"))
	if err != nil {
		s.refuse(w, "bad_request", http.StatusBadRequest, fmt.Errorf("header Device-Id: %w", err))
		return
	}
	if !s.limits.allow(s.address(r), s.opt.RatePerMinute, s.opt.Burst) {
		s.refuse(w, "rate_limited", http.StatusTooManyRequests, errors.New("too many requests from this address; try again"))
		return
	}
	clientID := r.Header.Get("Client-Id")
	if !s.opt.Service.Activated(id, clientID) {
		switch outcome := s.opt.Attest.Prove(r.Context(), s.opt.Service, id, clientID, r.Body); {
		case outcome == attest.OutcomeAdmitted:
		case outcome == attest.OutcomeWrong && s.opt.Failures.FailedRequest(r):
			s.refuse(w, "rate_limited", http.StatusTooManyRequests, errors.New("too many wrong proofs from this address; try again later"))
			return
		default:
			w.WriteHeader(http.StatusAccepted)
			return
		}
	}
	_, _ = w.Write([]byte("success")) // the device asks again if this fails
}

// address is whose limit a request counts for: one host has a whole IPv6 /64.
func (s *Server) address(r *http.Request) netip.Addr {
	return lobby.HostOf(lobby.ClientAddress(r, s.opt.TrustedProxies))
}

// unsafeReply is the kind of answer that is held back, because it would harm devices.
const unsafeReply = "unsafe"

// tooManyNew is the kind of answer to an unknown device that is one too many.
const tooManyNew = "too_many_new"

// newBurst is how many minutes' worth of new devices one address may bring at
// once: a site that is installed.
const newBurst = 10

// maxAddresses bounds the limiters kept; beyond it those go that have used the
// least, an eighth of them at least.
const maxAddresses = 20_000

type limits struct {
	mu     sync.Mutex
	byAddr map[netip.Addr]*rate.Limiter
}

func (l *limits) allow(addr netip.Addr, perMinute, burst int) bool {
	if perMinute == 0 {
		return true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	limiter := l.byAddr[addr]
	if limiter == nil {
		if len(l.byAddr) >= maxAddresses {
			l.evictLocked(time.Now())
		}
		limiter = rate.NewLimiter(rate.Limit(float64(perMinute)/60), max(burst, 1))
		l.byAddr[addr] = limiter
	}
	return limiter.Allow()
}

// evictLocked makes room. An address whose burst has grown back is as one that is
// not known; of others those go that have most of it left, so that many addresses
// that ask once do not free one that asks too often.
func (l *limits) evictLocked(now time.Time) {
	maps.DeleteFunc(l.byAddr, func(_ netip.Addr, limiter *rate.Limiter) bool {
		return limiter.TokensAt(now) >= float64(limiter.Burst())
	})
	most := maxAddresses * 7 / 8
	if len(l.byAddr) <= most {
		return
	}
	addrs := slices.SortedFunc(maps.Keys(l.byAddr), func(a, b netip.Addr) int {
		return cmp.Compare(l.byAddr[b].TokensAt(now), l.byAddr[a].TokensAt(now))
	})
	for _, addr := range addrs[:len(addrs)-most] {
		delete(l.byAddr, addr)
	}
}

// Settings are what Diagnose judges beside the reply itself.
type Settings struct {
	DeviceListen string // the address the listener really has
	PublicHost   string // as given, empty if chosen by the node
	Proxied      bool   // devices are told a URL that was given, behind which a proxy may be
	PortMoved    bool   // the default port was taken
	TLSHere      bool
	MQTTMoved    bool   // the default MQTT port was taken
	UDPMoved     bool   // the default UDP port was taken
	UDP          string // host:port that devices are told for audio
	Open         bool   // --device-auth none
	InContainer  bool
	// Explainer tells why photos cannot be explained now; nil where nobody is
	// to.
	Explainer func(context.Context) error
	// Kept tells why events or photos are not kept now; nil is not asked.
	Kept func() error
}

// explainerPatience is how long a diagnosis waits for the explainer.
const explainerPatience = 3 * time.Second

// exampleID is a locally administered address, which no device has.
const exampleID devices.ID = "02:00:00:00:00:00"

// Diagnose shows the world as the device sees it: the reply it would get, and
// every setting that would strand it. It changes nothing.
func (s *Server) Diagnose(id devices.ID) devices.Diagnosis {
	d := devices.Diagnosis{OTAURL: s.opt.PublicURL + PathOTA, Device: id, Status: http.StatusOK, Findings: []devices.Finding{}}
	add := func(severity devices.Severity, setting, format string, args ...any) {
		d.Findings = append(d.Findings, devices.Finding{Severity: severity, Setting: setting, Message: fmt.Sprintf(format, args...)})
	}
	if id == "" { // the reply to a device like any other
		id = exampleID
	}
	welcome := s.opt.Service.Welcome(id)
	clientID := s.opt.Service.ClientOf(context.Background(), id)
	reply := s.reply(id, clientID, welcome, devices.TransportNone, time.Now())
	body, err := reply.encode()
	if d.Reply = body; err != nil {
		d.Status = http.StatusInternalServerError
		add(devices.SeverityError, "--public-host", "%v", err)
	}
	if !welcome.Admitted {
		add(devices.SeverityWarning, "--admission", "the device waits for approval; run `fleetd devices approve %s` or use the code it speaks", id)
	}
	if r := s.opt.Service.Registry(); r.Members() > r.Limit()/10*9 {
		add(devices.SeverityWarning, "--members-limit", "the fleet knows %d devices and may know %d; above that, new ones are refused: forget some, or raise it", r.Members(), r.Limit())
	}
	s.diagnoseHost(add)
	if s.opt.Settings.PortMoved {
		add(devices.SeverityWarning, "--device-listen", "the default port was taken, devices are told %s; give --device-listen to choose the port yourself", s.opt.Settings.DeviceListen)
	}
	if strings.HasPrefix(s.opt.PublicURL, "https") {
		add(devices.SeverityInfo, "--public-device-url", "devices check certificates against public authorities; a private or self-signed one makes them fail silently")
	} else if s.opt.Settings.TLSHere {
		add(devices.SeverityError, "--public-device-url", "the listener speaks TLS but devices are told http; give an https URL")
	}
	if s.opt.MQTT != nil {
		s.diagnoseMQTT(add)
	}
	if s.opt.Settings.Open {
		add(devices.SeverityWarning, "--device-auth", "any device may connect without credentials; meant for a lab")
	}
	if n := s.Replies.Get(tooManyNew); n > 0 {
		add(devices.SeverityWarning, "--new-members-per-address", "OTA checks of unknown devices refused since the start because too many came from one address: %d; raise it, or give 0, while a large site is installed", n)
	}
	if n := s.opt.Service.Contested(); n > 0 {
		add(devices.SeverityWarning, "devices", "contested device ids: %d; `fleetd devices --state contested` lists them, docs/devices.md says what that means", n)
	}
	if s.opt.Settings.Explainer != nil {
		ctx, cancel := context.WithTimeout(context.Background(), explainerPatience)
		defer cancel()
		if err := s.opt.Settings.Explainer(ctx); err != nil {
			add(devices.SeverityWarning, "--vision-url", "photos are stored but not explained: %v", err)
		}
	}
	if s.opt.Settings.Kept != nil {
		if err := s.opt.Settings.Kept(); err != nil {
			add(devices.SeverityWarning, "--nats", "events or photos are not kept: %v", err)
		}
	}
	if year := time.Now().Year(); year < 2025 {
		add(devices.SeverityError, "clock", "this machine's clock says %d; devices take their time from it", year)
	}
	return d
}

// diagnoseMQTT knows that the port alone decides whether a device uses TLS
// (esp_mqtt.cc:27-32).
func (s *Server) diagnoseMQTT(add func(devices.Severity, string, string, ...any)) {
	host, port, _ := strings.Cut(s.opt.MQTT.Endpoint, ":")
	secure := port == "" || port == "8883"
	switch {
	case secure && !s.opt.Settings.TLSHere:
		add(devices.SeverityWarning, "--public-mqtt", "devices use TLS at %s because of its port; whatever answers there needs a certificate of a public authority", s.opt.MQTT.Endpoint)
	case !secure && s.opt.Settings.TLSHere:
		add(devices.SeverityError, "--mqtt-tls-listen", "devices are told %s and use TLS at port 8883 alone", s.opt.MQTT.Endpoint)
	}
	ip, err := netip.ParseAddr(host)
	if err == nil && s.opt.Settings.TLSHere {
		add(devices.SeverityError, "--public-host", "devices are told the address %s for MQTT over TLS, which the certificate cannot name; give the name that it has", host)
	}
	if host == "localhost" || err == nil && ip.IsLoopback() {
		add(devices.SeverityError, "--public-mqtt", "devices are told %s for MQTT, which is themselves", host)
	}
	if s.opt.Settings.MQTTMoved {
		add(devices.SeverityWarning, "--mqtt-listen", "the default port was taken, devices are told %s; give --mqtt-listen to choose the port yourself", s.opt.MQTT.Endpoint)
	}
	if s.opt.Settings.UDPMoved {
		add(devices.SeverityWarning, "--udp-listen", "the default port was taken, devices are told %s for audio; give --udp-listen to choose the port yourself", s.opt.Settings.UDP)
	}
	if s.opt.Settings.InContainer && s.opt.Settings.UDP != "" {
		add(devices.SeverityInfo, "--udp-listen", "audio goes to UDP %s: publish that port with /udp, or conversations stay silent", s.opt.Settings.UDP)
	}
}

func (s *Server) diagnoseHost(add func(devices.Severity, string, string, ...any)) {
	// Where devices are connected, as simulated ones on this machine are, the address cannot strand them all.
	unreachable := devices.SeverityError
	s.opt.Service.Sessions(func(*session.Session) { unreachable = devices.SeverityWarning })
	host := strings.TrimPrefix(strings.TrimPrefix(s.opt.PublicURL, "https://"), "http://")
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	ip, err := netip.ParseAddr(host)
	switch {
	case host == "localhost" || err == nil && ip.IsLoopback():
		add(unreachable, "--public-host", "devices are told %s, which is themselves; give this machine's address in their network", host)
	case err == nil && s.opt.Settings.InContainer && s.opt.Settings.PublicHost == "" && !s.opt.Settings.Proxied:
		add(unreachable, "--public-host", "devices are told %s, the address of this container; give the host's address", host)
	case err == nil && ip.IsLinkLocalUnicast():
		add(devices.SeverityWarning, "--public-host", "%s is a link-local address; it changes and does not cross routers", host)
	}
	listen, _, err := net.SplitHostPort(s.opt.Settings.DeviceListen)
	bound, parseErr := netip.ParseAddr(listen)
	switch {
	case err != nil || parseErr != nil || !bound.IsLoopback():
	case s.opt.Settings.Proxied:
		add(devices.SeverityInfo, "--device-listen", "the listener is bound to %s: devices reach it through the proxy at %s alone", listen, s.opt.PublicURL)
	default:
		add(unreachable, "--device-listen", "the listener is bound to %s; devices on other machines cannot reach it: give --device-listen another address, or --public-device-url that of a proxy in front", listen)
	}
}
