package fleettest

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devices/session"
	"fleetd/internal/devicetest"
	"fleetd/internal/devicetest/client"
	"fleetd/internal/fleet"
	"fleetd/internal/mqttdevice"
	"fleetd/internal/udpaudio"
	"fleetd/internal/wsdevice"
	"fleetd/simulator/firmware"
)

// bench is the core with both real front ends in this process, over recorded
// ports: where a trap needs to look inside.
type bench struct {
	*devicetest.Ports
	service   *fleet.Service
	mint      *credential.Mint
	udp       *udpaudio.Table
	mqtt      string // address
	websocket string // URL
}

func open(t *testing.T) *bench {
	t.Helper()
	mint, err := credential.New([]byte("a secret for tests only"))
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	b := &bench{Ports: devicetest.New(), mint: mint}
	if b.udp, err = udpaudio.Listen("127.0.0.1:0", log); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.udp.Close)
	b.service = b.Service(t, fleet.Config{})
	mqtt := mqttdevice.New(mqttdevice.Options{Service: b.service, Mint: mint, UDP: b.udp, Server: "127.0.0.1", Port: b.udp.Addr().Port(), Log: log})
	front := wsdevice.New(wsdevice.Options{Service: b.service, Mint: mint, Log: log})
	server := httptest.NewServer(front)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var served sync.WaitGroup
	served.Go(func() { mqtt.Serve(listener) })
	t.Cleanup(func() {
		server.Close()
		_ = listener.Close()
		served.Wait()
		b.service.Close()
		mqtt.Close()
		front.Close()
	})
	b.mqtt, b.websocket = listener.Addr().String(), "ws"+strings.TrimPrefix(server.URL, "http")+"/"
	return b
}

// login makes the device a member, as its OTA check does, and returns what it
// presents.
func (b *bench) login(t testing.TB, id devices.ID) login {
	t.Helper()
	if _, err := b.service.CheckIn(context.Background(), admission.CheckIn{Device: id, ClientID: clientOf(string(id))}); err != nil {
		t.Fatal(err)
	}
	return login{firmware.Login{Endpoint: b.mqtt, ClientID: id.Token(), Username: credential.MQTTUser(clientOf(string(id))), Password: b.token(id), PublishTopic: devices.TopicUp(id), Keepalive: 30}}
}

func (b *bench) token(id devices.ID) string {
	return b.mint.DeviceToken(string(id), clientOf(string(id)), 0)
}

// device connects over MQTT and waits for its tools.
func (b *bench) device(t testing.TB, id devices.ID, script *devicetest.Script) *device {
	t.Helper()
	d := b.login(t, id).dial(t, script)
	b.ready(t, id)
	return d
}

func (b *bench) ready(t testing.TB, id devices.ID) {
	t.Helper()
	devicetest.Eventually(t, "the device's tools are ready", func() bool { return b.view(t, id).CatalogState == devices.CatalogReady })
}

func (b *bench) view(t testing.TB, id devices.ID) devices.View {
	t.Helper()
	v, err := b.service.Get(context.Background(), id)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// call calls a tool; err is that of the core.
func (b *bench) call(id devices.ID, tool, args string, timeout time.Duration) (devices.ToolResult, *devices.Error) {
	return call(b.service, id, tool, args, timeout)
}

func call(s *fleet.Service, id devices.ID, tool, args string, timeout time.Duration) (devices.ToolResult, *devices.Error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	r, err := s.CallTool(ctx, devices.ToolCall{Principal: devicetest.Admin, Device: id, Tool: tool, Arguments: json.RawMessage(args)})
	if err != nil {
		return r, devices.AsError(err)
	}
	return r, nil
}

// dialSocket connects a WebSocket device and sends a hello.
func dialSocket(t testing.TB, url, id, token string, script *devicetest.Script) *device {
	t.Helper()
	d := login{firmware.Login{URL: url, Device: id, Client: clientOf(id), Token: token, Version: 1}}.dial(t, script)
	if err := d.Send(client.HelloWebSocket); err != nil {
		t.Fatal(err)
	}
	return d
}

// pipe is a connection without a wire.
type pipe struct {
	script  *devicetest.Script
	session *session.Session
	ended   chan devices.CloseReason
	block   chan struct{} // Close waits for it, if set
}

// SendControl answers before it returns: no answer can be faster.
func (p *pipe) SendControl(msg []byte) error {
	if len(p.ended) > 0 {
		return errors.New("closed")
	}
	if answer := p.script.Answer(msg); answer != "" {
		return p.session.HandleControl([]byte(answer))
	}
	return nil
}

func (p *pipe) Close(reason devices.CloseReason) {
	if p.block != nil {
		<-p.block
	}
	select {
	case p.ended <- reason:
	default: // any number of times
	}
}

// pipeTo connects a device without a wire; its first MCP message comes with
// StartMCP.
func pipeTo(t testing.TB, s *fleet.Service, id devices.ID, script *devicetest.Script) *pipe {
	t.Helper()
	p := &pipe{script: script, ended: make(chan devices.CloseReason, 1)}
	session, err := s.Accept(devices.Identity{Device: id, ClientID: "c", Transport: devices.TransportMQTT}, p)
	if err != nil {
		t.Fatal(err)
	}
	p.session = session
	return p
}
