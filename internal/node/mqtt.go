package node

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/connlimit"
	"fleetd/internal/counters"
	"fleetd/internal/credential"
	"fleetd/internal/gatewayapi"
	"fleetd/internal/mqttdevice"
	"fleetd/internal/provision"
	"fleetd/internal/udpaudio"
)

// mqttSide serves MQTT devices: by a listener or an external broker, and the audio socket.
type mqttSide struct {
	front     *mqttdevice.Front
	listeners []net.Listener // of front
	broker    *mqttdevice.Broker
	audio     *udpaudio.Table
	otaConfig provision.MQTT // the MQTT part of the OTA reply
	udp       string         // host:port to which devices send audio
	gateway   *credential.Gateway
	// authenticate checks clients of an external broker; nil without one.
	authenticate func(clientID, username, password string) error
	gatewayAPI   *gatewayapi.Server
}

// metrics adds the metrics of the parts that run.
func (m *mqttSide) metrics(r *counters.Registry) {
	if m.front != nil {
		m.front.Metrics(r)
	}
	if m.broker != nil {
		m.broker.Metrics(r)
	}
	if m.audio != nil {
		m.audio.Stats().Metrics(r)
	}
	if m.gatewayAPI != nil {
		m.gatewayAPI.Metrics(r)
	}
}

// startMQTT starts the MQTT side, unless it is off.
func (n *node) startMQTT() error {
	m := &mqttSide{}
	if n.cfg.GatewaySignatureKey != "" {
		var err error
		if m.gateway, err = credential.NewGateway(n.cfg.GatewaySignatureKey); err != nil {
			return fmt.Errorf("--gateway-signature-key: %w", err)
		}
	}
	n.mqtt = m
	if n.cfg.MQTT == "off" {
		return nil
	}
	var err error
	if m.audio, err = n.listeners.openAudio(n.cfg.UDPListen); err != nil {
		return err
	}
	n.onStop(m.audio.Close)
	server, port, err := n.audioAddress()
	if err != nil {
		return err
	}
	options := mqttdevice.Options{Service: n.service, Mint: n.mint, Gateway: m.gateway, Failures: n.failures["mqtt-listen"], Open: n.cfg.DeviceAuth == "none",
		Floods: n.floods, UDP: m.audio, Server: server, Port: port, Log: n.log}
	m.udp = net.JoinHostPort(server, strconv.Itoa(int(port)))
	if n.cfg.MQTT == "embedded" {
		err = n.openMQTT(m, options)
	} else {
		err = n.joinBroker(m, options)
	}
	if err != nil {
		return err
	}
	m.otaConfig.Keepalive = n.cfg.MQTTKeepalive
	return n.listeners.save()
}

// audioAddress returns the address to which devices send audio.
func (n *node) audioAddress() (server string, port uint16, err error) {
	if n.cfg.PublicUDP == "" {
		return publicHost(n.cfg.PublicHost), n.mqtt.audio.Addr().Port(), nil
	}
	server, text, err := net.SplitHostPort(n.cfg.PublicUDP)
	if err != nil {
		return "", 0, fmt.Errorf("--public-udp: %w", err)
	}
	number, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return "", 0, fmt.Errorf("--public-udp: %w", err)
	}
	return server, uint16(number), nil
}

// openMQTT listens for devices. With a certificate they are directed to the TLS listener.
func (n *node) openMQTT(m *mqttSide, options mqttdevice.Options) error {
	deviceListener, err := n.openLimited("mqtt-listen", n.cfg.MQTTListen)
	if err != nil {
		return err
	}
	listeners := []net.Listener{deviceListener}
	if n.certificate != nil {
		overTLS, err := n.openLimited("mqtt-tls-listen", n.cfg.MQTTTLSListen)
		if err != nil {
			_ = deviceListener.Close()
			return err
		}
		deviceListener = overTLS
		listeners = append(listeners, tls.NewListener(overTLS, n.certificate.mqttConfig()))
	}
	m.otaConfig.Endpoint = endpoint(n.cfg.PublicMQTT, publicHost(n.cfg.PublicHost), portOf(deviceListener.Addr()))
	m.front = mqttdevice.New(options)
	n.onStop(func() {
		n.endSessions()
		m.front.Close()
	})
	m.listeners = listeners
	for _, l := range listeners {
		done := make(chan struct{})
		go func() {
			defer close(done)
			m.front.Serve(l)
		}()
		n.onStop(func() {
			_ = l.Close() // ends Serve; may be closed already
			<-done
		})
	}
	return nil
}

// endpoint returns the endpoint for devices: the configured one, with the port if it is
// missing.
func endpoint(given, host, port string) string {
	if given == "" {
		return net.JoinHostPort(host, port)
	}
	if strings.Contains(given, ":") {
		return given
	}
	return net.JoinHostPort(given, port)
}

// joinBroker connects to an external broker.
func (n *node) joinBroker(m *mqttSide, options mqttdevice.Options) error {
	u, err := url.Parse(n.cfg.MQTT)
	if err != nil {
		return fmt.Errorf("--mqtt: %w", err)
	}
	m.otaConfig.Endpoint = endpoint(n.cfg.PublicMQTT, u.Hostname(), u.Port())
	m.broker, err = mqttdevice.NewBroker(options, n.cfg.MQTT, "fleetd-"+n.cfg.Node, time.Duration(n.cfg.MQTTKeepalive)*time.Second)
	if err != nil {
		return fmt.Errorf("--mqtt: %w", err)
	}
	m.authenticate = m.broker.Authenticate
	n.onStop(func() {
		n.endSessions()
		m.broker.Close()
	})
	return nil
}

// endSessions lets tasks of jobs and calls in progress finish and ends the devices' sessions; the front ends
// wait for their readers afterwards. It closes the listeners first: with a load balancer, a
// closed port leads a device to another node at once, while a refusal makes it wait for 10
// seconds. A task that is cut would be unknown, and its job might halt for it: the drain window is theirs first, with
// or without another node.
func (n *node) endSessions() {
	n.endOnce.Do(func() {
		for _, l := range n.mqtt.listeners {
			_ = l.Close() // may be closed already
		}
		others := n.leases != nil && n.leases.Others(context.Background())
		ctx, cancel := context.WithTimeout(context.Background(), n.cfg.DrainWindow+callGrace)
		defer cancel()
		n.jobs.drain(n.windowLeft())
		if others {
			n.service.Drain(ctx, n.windowLeft())
		}
		n.cluster.Drain(ctx)
		n.service.Close()
	})
}

// startGatewayAPI opens the drop-in API of xiaozhi-mqtt-gateway.
func (n *node) startGatewayAPI() error {
	if n.cfg.GatewayAPIListen == "" {
		return nil
	}
	l, err := n.openAPI("gateway-api-listen", n.cfg.GatewayAPIListen)
	if err != nil {
		return err
	}
	n.mqtt.gatewayAPI = gatewayapi.New(gatewayapi.Options{Service: n.service, Gateway: n.mqtt.gateway, Timeout: n.cfg.GatewayTimeout,
		Auth: &access.Authenticator{Keys: n.service.Keys(), IsAdmin: n.mint.IsAdmin}, Failures: n.failures["gateway-api-listen"], Work: n.work, Log: n.log})
	n.serve("gateway-api-listen", &http.Server{Handler: connlimit.RespondEarly(n.mqtt.gatewayAPI, n.pace("gateway-api-listen")), ReadHeaderTimeout: 5 * time.Second,
		IdleTimeout: 60 * time.Second, MaxHeaderBytes: 8 << 10, ErrorLog: n.httpErrors(), ConnContext: connlimit.WithConn}, l)
	return nil
}
