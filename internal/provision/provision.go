// Package provision answers the OTA check of devices. At boot the firmware contacts the OTA
// URL once (application.cc:417-509). The reply contains its transport, server address and
// credentials, or an activation code to speak while it waits for approval. Every reply
// passes Check before it is sent, because a wrong one is stored in the device's flash and can
// prevent it from booting.
package provision

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"fleetd/internal/attest"
	"fleetd/internal/clock"
	"fleetd/internal/connlimit"
	"fleetd/internal/counters"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/fleet"
	"fleetd/internal/rollout"
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
	// MQTT is the MQTT configuration for devices; nil if there is none.
	MQTT *MQTT
	// Transport is offered to devices without a setting of their own.
	Transport devices.Transport
	// Framing is websocket.version in the reply, 1 to 3.
	Framing  int
	Location *time.Location
	// RatePerMinute and Burst limit the checks from one address; 0: unlimited.
	RatePerMinute int
	Burst         int
	// NewPerMinute limits unknown devices from one address, with a burst of newBurst
	// minutes; 0: unlimited.
	NewPerMinute int
	// TrustedProxies may name the address of their client.
	TrustedProxies []netip.Prefix
	// Failures slows down wrong proofs; may be nil.
	Failures *connlimit.Failures
	// Rollouts gives devices firmware images.
	Rollouts Rollouts
	// Draining reports whether the node is stopping.
	Draining func() bool
	// Settings are checked by Diagnose.
	Settings Settings
	Log      *slog.Logger
}

// Rollouts is what a Server uses of rollout.Service.
type Rollouts interface {
	Check(ctx context.Context, c *rollout.Check) *rollout.Offer
	Open(ctx context.Context, token string, address netip.Addr) (*rollout.Download, error)
}

// MQTT is the MQTT configuration for devices. It may be changed until the server is served.
type MQTT struct {
	Endpoint  string // host:port; TLS if and only if the port is 8883 (esp_mqtt.cc:27-32)
	Keepalive int    // seconds
}

// Server serves the OTA check and activation. It is safe for concurrent use.
type Server struct {
	opt        Options
	limits     connlimit.Rates // of all requests
	newDevices connlimit.Rates // of unknown devices
	joining    connlimit.Places

	// Replies counts replies by kind: member, waiting, refused, bad_request, rate_limited,
	// too_many_new, unavailable, unsafe.
	Replies counters.Map[string]
}

// New returns a Server.
func New(opt Options) *Server {
	s := &Server{opt: opt, joining: make(connlimit.Places, maxJoining)}
	s.Replies.Add(unsafeReply, 0) // otherwise an alert on its increase would miss the first one
	return s
}

// Register registers the routes. The variants select a transport for devices with that OTA
// URL; the firmware appends `activate` to its URL.
func (s *Server) Register(mux *http.ServeMux) {
	mux.HandleFunc("GET "+PathFirmware+"{token}", s.download)
	for path, pinned := range map[string]devices.Transport{PathOTA: devices.TransportNone, PathOTAWS: devices.TransportWebSocket, PathOTAMQTT: devices.TransportMQTT} {
		check := func(w http.ResponseWriter, r *http.Request) { s.check(w, r, pinned) }
		if pinned == devices.TransportMQTT && s.opt.MQTT == nil {
			check = func(w http.ResponseWriter, _ *http.Request) {
				s.refuse(w, unavailable, http.StatusServiceUnavailable, errors.New("this node does not serve MQTT; use "+PathOTA))
			}
		}
		for _, at := range []string{path + "{$}", strings.TrimSuffix(path, "/")} { // the mux would redirect, which the firmware does not follow
			mux.HandleFunc("POST "+at, check)
			mux.HandleFunc("GET "+at, check)
		}
		mux.HandleFunc("POST "+path+"activate", s.activate)
	}
}

// transport returns the transport for a device: that of its OTA URL, else the operator's
// setting for it, else the node's default.
func (s *Server) transport(pinned, preferred devices.Transport) devices.Transport {
	for _, t := range []devices.Transport{pinned, preferred, s.opt.Transport} {
		if t == devices.TransportWebSocket || t == devices.TransportMQTT && s.opt.MQTT != nil {
			return t
		}
	}
	return devices.TransportWebSocket
}

// refuse responds with a status that makes the firmware try again later: it parses only
// a response with 200 (ota.cc:103-107).
func (s *Server) refuse(w http.ResponseWriter, kind string, status int, err error) {
	s.Replies.Add(kind, 1)
	if status == http.StatusServiceUnavailable || status == http.StatusTooManyRequests {
		w.Header().Set("Retry-After", "10")
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	body, _ := json.Marshal(struct { // cannot fail for a string
		Error string `json:"error"`
	}{err.Error()})
	_, _ = w.Write(body) // fails only if the device has disconnected
}

func (s *Server) check(w http.ResponseWriter, r *http.Request, pinned devices.Transport) {
	step := devices.Step{Kind: devices.StepCheck, Remote: connlimit.ClientAddress(r, s.opt.TrustedProxies)}
	step.Device, _ = devices.ParseID(r.Header.Get("Device-Id")) // without one nothing is recorded
	s.answerCheck(w, r, pinned, &step)
	s.opt.Service.NoteStep(step)
}

// answerCheck answers an OTA check, and completes its step.
func (s *Server) answerCheck(w http.ResponseWriter, r *http.Request, pinned devices.Transport, step *devices.Step) {
	if !s.limits.Allow(s.address(r), s.opt.RatePerMinute, s.opt.Burst) {
		step.Cause = devices.CauseRateLimited
		s.refuse(w, "rate_limited", http.StatusTooManyRequests, errors.New("too many checks from this address; try again"))
		return
	}
	c, err := parseRequest(r)
	if err != nil {
		if r.Method == http.MethodGet && r.Header.Get("Device-Id") == "" {
			s.greet(w, pinned)
			return
		}
		step.Cause, step.Text = devices.CauseBadRequest, err.Error()
		s.refuse(w, "bad_request", http.StatusBadRequest, err)
		return
	}
	step.Device = c.Device
	c.Address = connlimit.ClientAddress(r, s.opt.TrustedProxies)
	c.From, c.Offer = connlimit.AddressKey(c.Address), s.transport(pinned, devices.TransportNone)
	if !s.opt.Service.IsKnown(c.Device) {
		if !s.newDevices.Allow(c.From, s.opt.NewPerMinute, newBurst*s.opt.NewPerMinute) {
			step.Cause = devices.CauseTooManyNew
			s.refuse(w, tooManyNew, http.StatusServiceUnavailable, errors.New("too many new devices from this address; try again"))
			return
		}
		leave, err := s.enter(r.Context())
		if err != nil {
			step.Cause, step.Text = devices.StepCause(unavailable), err.Error()
			s.refuse(w, unavailable, http.StatusServiceUnavailable, err)
			return
		}
		defer leave()
	}
	step.Image = c.ELF[:min(len(c.ELF), devices.ImageDigits)]
	begun := clock.Now()
	welcome, err := s.opt.Service.CheckIn(r.Context(), c)
	if err != nil {
		e := devices.AsError(err)
		status := http.StatusBadRequest
		kind := "bad_request"
		if e.Code == devices.CodeUnavailable {
			status, kind = http.StatusServiceUnavailable, unavailable
		}
		step.Cause, step.Text = devices.StepCause(kind), e.Detail
		s.refuse(w, kind, status, e)
		return
	}
	answer := s.reply(c.Device, c.ClientID, welcome, pinned, clock.Now())
	if welcome.Admitted && c.ClientID != "" { // else anybody could have sent it
		s.addOffer(r.Context(), &answer, &c, begun)
	}
	body, err := answer.encode()
	if err != nil {
		s.opt.Log.Error("the OTA reply failed its safety check; run `fleetd doctor`", "device", c.Device, "error", err)
		step.Cause, step.Text = devices.CauseUnsafe, err.Error()
		s.refuse(w, unsafeReply, http.StatusInternalServerError, errors.New("this node's settings do not give a safe reply; see its log"))
		return
	}
	kind := "member"
	step.Generation, step.Proven = welcome.Generation, welcome.Admitted
	if step.Cause, step.Text = devices.CauseOffersWebSocket, s.webSocketURL(); answer.MQTT != nil {
		step.Cause, step.Text = devices.CauseOffersMQTT, answer.MQTT.Endpoint
	}
	switch {
	case welcome.Refused:
		kind, step.Cause, step.Text = "refused", devices.CauseRefusedClient, ""
	case !welcome.Admitted:
		kind, step.Cause = "waiting", devices.CausePending
	}
	s.Replies.Add(kind, 1)
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(body) // the device repeats the check if this fails
}

// known returns the address of a device, or none if it is that of a trusted proxy, which did not name the device's.
func (s *Server) known(addr netip.Addr) netip.Addr {
	if connlimit.InNetworks(addr, s.opt.TrustedProxies) {
		return netip.Addr{}
	}
	return addr
}

// addOffer tells the rollout of a check, and adds the image that it offers to the reply.
func (s *Server) addOffer(ctx context.Context, answer *reply, c *admission.CheckIn, begun time.Time) {
	offer := s.opt.Rollouts.Check(ctx, &rollout.Check{Device: c.Device, Facts: c.Facts, Details: c.Details, Address: s.known(c.Address), Begun: begun,
		WebSocket: answer.WebSocket != nil, Activation: answer.Activation != nil})
	if offer == nil {
		return
	}
	answer.Firmware = &image{Version: offer.Version, URL: s.opt.PublicURL + PathFirmware + offer.Token + "." + s.opt.Mint.Code(codeOffer+offer.Token, clock.Now().Add(offerTime))}
	if offer.Force {
		answer.Firmware.Force = 1
	}
	if _, err := answer.encode(); err != nil { // the device connects without it
		s.opt.Log.Error("an offer of firmware failed its safety check and was left out", "device", c.Device, "error", err)
		answer.Firmware = nil
	}
}

// greet responds to a browser.
func (s *Server) greet(w http.ResponseWriter, pinned devices.Transport) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	where := s.webSocketURL()
	if s.transport(pinned, devices.TransportNone) == devices.TransportMQTT {
		where = "MQTT at " + s.opt.MQTT.Endpoint
	}
	_, _ = fmt.Fprintf(w, "This is fleetd. Devices POST to this URL and are directed to %s.\n", where)
}

func (s *Server) webSocketURL() string {
	return "ws" + strings.TrimPrefix(s.opt.PublicURL, "http") + PathWebSocket
}

func (s *Server) reply(id devices.ID, clientID string, welcome admission.CheckInResult, pinned devices.Transport, now time.Time) reply {
	_, offset := now.In(s.opt.Location).Zone()
	r := reply{ServerTime: serverTime{Timestamp: now.UnixMilli(), TimeZone: s.opt.Location.String(), TimezoneOffset: offset / 60}}
	token := ""
	switch {
	case welcome.Admitted:
		token = s.opt.Mint.DeviceToken(string(id), clientID, welcome.Generation)
	case !welcome.Refused:
		r.Activation = &activation{Message: "Approve this device with the code " + welcome.Code, Code: welcome.Code,
			Challenge: welcome.Challenge, TimeoutMS: int(admission.CodeLifetime / time.Millisecond)}
	}
	// Also for devices that wait for approval: without a section the device uses the server
	// stored in its flash (application.cc:502-509).
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

// activate reports whether a waiting device is admitted: 200 yes, 202 not yet (ota.cc:421-492).
// A valid proof of its hardware may admit it; a device without a serial number, or with one
// that is not imported, waits for its code.
func (s *Server) activate(w http.ResponseWriter, r *http.Request) {
	id, err := devices.ParseID(r.Header.Get("Device-Id"))
	if err != nil {
		s.refuse(w, "bad_request", http.StatusBadRequest, fmt.Errorf("header Device-Id: %w", err))
		return
	}
	if !s.limits.Allow(s.address(r), s.opt.RatePerMinute, s.opt.Burst) {
		s.refuse(w, "rate_limited", http.StatusTooManyRequests, errors.New("too many requests from this address; try again"))
		return
	}
	clientID := r.Header.Get("Client-Id")
	step := devices.Step{Kind: devices.StepActivate, Device: id, Cause: devices.CauseNotYet, Remote: connlimit.ClientAddress(r, s.opt.TrustedProxies)}
	defer func() { s.opt.Service.NoteStep(step) }()
	if !s.opt.Service.IsActivated(id, clientID) {
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
	step.Cause = devices.CauseActivated
	_, _ = w.Write([]byte("success")) // the device repeats the request if this fails
}

// address returns the address whose limit applies: for IPv6, its /64 network.
func (s *Server) address(r *http.Request) netip.Addr {
	return connlimit.AddressKey(connlimit.ClientAddress(r, s.opt.TrustedProxies))
}

// unsafeReply is the kind of replies that were not sent because they failed Check.
const unsafeReply = "unsafe"

// tooManyNew is the kind of refusals of unknown devices above the limit.
const tooManyNew = "too_many_new"

// unavailable is the kind of refusals because the node cannot serve the check now.
const unavailable = "unavailable"

// maxJoining is how many unknown devices are worked on at once, so that they delay the calls of known ones by
// little, and joinWait how long the check of a further one waits.
const (
	maxJoining = 16
	joinWait   = 3 * time.Second
)

// enter waits for a place among the unknown devices that are worked on.
func (s *Server) enter(ctx context.Context) (leave func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, joinWait)
	defer cancel()
	if leave, err = s.joining.Enter(ctx); err != nil {
		return nil, errors.New("too many unknown devices at once; try again")
	}
	return leave, nil
}

// newBurst is the burst of new devices from one address, in minutes of its rate, for sites
// that are being installed.
const newBurst = 10
