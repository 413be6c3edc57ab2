package provision

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
)

// Settings are checked by Diagnose besides the reply.
type Settings struct {
	DeviceListen string // actual address of the listener
	PublicHost   string // as given, empty if chosen by the node
	Proxied      bool   // devices use a configured URL, which may be that of a proxy
	PortMoved    bool   // the default port was in use
	TLSHere      bool
	MQTTMoved    bool   // the default MQTT port was in use
	UDPMoved     bool   // the default UDP port was in use
	UDP          string // host:port for the audio of devices
	Open         bool   // --device-auth none
	InContainer  bool
	// ExplainerError returns why photos cannot be explained now; nil if no explainer is
	// configured.
	ExplainerError func(context.Context) error
	// StorageError returns why events or photos are not stored now; may be nil.
	StorageError func() error
}

// explainerTimeout is how long a diagnosis waits for the explainer.
const explainerTimeout = 3 * time.Second

// exampleID is a locally administered address, which no real device has.
const exampleID devices.ID = "02:00:00:00:00:00"

// Diagnose returns the reply that a device would receive, and every setting that would
// disconnect it. It changes nothing.
func (s *Server) Diagnose(id devices.ID) devices.Diagnosis {
	d := devices.Diagnosis{OTAURL: s.opt.PublicURL + PathOTA, Device: id, Status: http.StatusOK, Findings: []devices.Finding{}, Probe: s.newProbe()}
	add := func(severity devices.Severity, setting, format string, args ...any) {
		d.Findings = append(d.Findings, devices.Finding{Severity: severity, Setting: setting, Message: fmt.Sprintf(format, args...)})
	}
	if id == "" { // the reply to a new device
		id = exampleID
	}
	welcome := s.opt.Service.Preview(id)
	clientID := s.opt.Service.ClientOf(context.Background(), id)
	reply := s.reply(id, clientID, welcome, devices.TransportNone, clock.Now())
	body, err := reply.encode()
	if d.Reply = body; err != nil {
		d.Status = http.StatusInternalServerError
		add(devices.SeverityError, "--public-host", "%v", err)
	}
	if !welcome.Admitted {
		add(devices.SeverityWarning, "--admission", "the device waits for approval; run `fleetd devices approve %s` or use the code that it speaks", id)
	}
	if r := s.opt.Service.Registry(); r.Members() > r.Limit()/10*9 {
		add(devices.SeverityWarning, "--members-limit", "the fleet has %d devices and the limit is %d, above which new ones are refused; remove some devices, or raise the limit", r.Members(), r.Limit())
	}
	s.diagnoseHost(add)
	if s.opt.Settings.PortMoved {
		add(devices.SeverityWarning, "--device-listen", "the default port was in use, so devices are directed to %s; set --device-listen to choose the port", s.opt.Settings.DeviceListen)
	}
	if strings.HasPrefix(s.opt.PublicURL, "https") {
		add(devices.SeverityInfo, "--public-device-url", "devices accept certificates of public authorities only; with a private or self-signed one they fail without a message")
	} else if s.opt.Settings.TLSHere {
		add(devices.SeverityError, "--public-device-url", "the listener uses TLS but devices are directed to an http URL; set an https URL")
	}
	if s.opt.MQTT != nil {
		s.diagnoseMQTT(add)
	}
	if s.opt.Settings.Open {
		add(devices.SeverityWarning, "--device-auth", "any device may connect without credentials; meant for a lab")
	}
	if n := s.Replies.Get(tooManyNew); n > 0 {
		add(devices.SeverityWarning, "--new-members-per-address", "OTA checks of unknown devices refused since the start because too many were from one address: %d; raise the limit, or set it to 0, while a large site is being installed", n)
	}
	if n := s.opt.Service.Contested(); n > 0 {
		add(devices.SeverityWarning, "devices", "contested device ids: %d; `fleetd devices --state contested` lists them, docs/devices.md explains them", n)
	}
	if s.opt.Settings.ExplainerError != nil {
		ctx, cancel := context.WithTimeout(context.Background(), explainerTimeout)
		defer cancel()
		if err := s.opt.Settings.ExplainerError(ctx); err != nil {
			add(devices.SeverityWarning, "--vision-url", "photos are stored but not explained: %v", err)
		}
	}
	if s.opt.Settings.StorageError != nil {
		if err := s.opt.Settings.StorageError(); err != nil {
			add(devices.SeverityWarning, "--nats", "events or photos are not stored: %v", err)
		}
	}
	if year := clock.Now().Year(); year < 2025 {
		add(devices.SeverityError, "clock", "the clock of this machine is set to the year %d; devices set their clock from it", year)
	}
	return d
}

// diagnoseMQTT checks the MQTT endpoint; the port alone decides whether a device uses TLS
// (esp_mqtt.cc:27-32).
func (s *Server) diagnoseMQTT(add func(devices.Severity, string, string, ...any)) {
	host, port, _ := strings.Cut(s.opt.MQTT.Endpoint, ":")
	secure := port == "" || port == "8883"
	switch {
	case secure && !s.opt.Settings.TLSHere:
		add(devices.SeverityWarning, "--public-mqtt", "devices use TLS at %s because of its port; the server there needs a certificate of a public authority", s.opt.MQTT.Endpoint)
	case !secure && s.opt.Settings.TLSHere:
		add(devices.SeverityError, "--mqtt-tls-listen", "devices are directed to %s, but use TLS only at port 8883", s.opt.MQTT.Endpoint)
	}
	ip, err := netip.ParseAddr(host)
	if err == nil && s.opt.Settings.TLSHere {
		add(devices.SeverityError, "--public-host", "devices are directed to the address %s for MQTT over TLS, which the certificate does not contain; set the host name in the certificate", host)
	}
	if host == "localhost" || err == nil && ip.IsLoopback() {
		add(devices.SeverityError, "--public-mqtt", "devices are directed to %s for MQTT, which is the device itself; set an address that devices can reach", host)
	}
	if s.opt.Settings.MQTTMoved {
		add(devices.SeverityWarning, "--mqtt-listen", "the default port was in use, so devices are directed to %s; set --mqtt-listen to choose the port", s.opt.MQTT.Endpoint)
	}
	if s.opt.Settings.UDPMoved {
		add(devices.SeverityWarning, "--udp-listen", "the default port was in use, so devices send audio to %s; set --udp-listen to choose the port", s.opt.Settings.UDP)
	}
	if s.opt.Settings.InContainer && s.opt.Settings.UDP != "" {
		add(devices.SeverityInfo, "--udp-listen", "devices send audio to UDP %s; publish that port with /udp, otherwise conversations have no audio", s.opt.Settings.UDP)
	}
}

func (s *Server) diagnoseHost(add func(devices.Severity, string, string, ...any)) {
	// If devices are connected, such as simulated ones on this machine, the address works for some of them.
	unreachable := devices.SeverityError
	s.opt.Service.Sessions(func(*session.Session) { unreachable = devices.SeverityWarning })
	host := strings.TrimPrefix(strings.TrimPrefix(s.opt.PublicURL, "https://"), "http://")
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	ip, err := netip.ParseAddr(host)
	switch {
	case host == "localhost" || err == nil && ip.IsLoopback():
		add(unreachable, "--public-host", "devices are directed to %s, which is the device itself; set this machine's address in their network", host)
	case err == nil && s.opt.Settings.InContainer && s.opt.Settings.PublicHost == "" && !s.opt.Settings.Proxied:
		add(unreachable, "--public-host", "devices are directed to %s, the address of this container; set the host's address", host)
	case err == nil && ip.IsLinkLocalUnicast():
		add(devices.SeverityWarning, "--public-host", "%s is a link-local address; it can change and is not routed", host)
	}
	listen, _, err := net.SplitHostPort(s.opt.Settings.DeviceListen)
	bound, parseErr := netip.ParseAddr(listen)
	switch {
	case err != nil || parseErr != nil || !bound.IsLoopback():
	case s.opt.Settings.Proxied:
		add(devices.SeverityInfo, "--device-listen", "the listener is bound to %s; devices reach it only through the proxy at %s", listen, s.opt.PublicURL)
	default:
		add(unreachable, "--device-listen", "the listener is bound to %s; devices on other machines cannot reach it; set --device-listen to another address, or --public-device-url to the URL of a proxy", listen)
	}
}
