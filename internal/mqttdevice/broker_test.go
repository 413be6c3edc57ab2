package mqttdevice_test

import (
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/eclipse/paho.mqtt.golang/packets"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/mqttdevice"
)

// fakeBroker answers CONNECT and SUBSCRIBE with these codes, and nothing else.
func fakeBroker(t *testing.T, connack, suback byte) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var conns sync.WaitGroup
	t.Cleanup(func() { _ = l.Close(); conns.Wait() })
	conns.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			conns.Go(func() {
				defer func() { _ = c.Close() }()
				for {
					p, err := packets.ReadPacket(c)
					if err != nil {
						return
					}
					switch p := p.(type) {
					case *packets.ConnectPacket:
						_, _ = c.Write([]byte{0x20, 2, 0, connack})
					case *packets.SubscribePacket:
						answer := packets.NewControlPacket(packets.Suback).(*packets.SubackPacket)
						answer.MessageID, answer.ReturnCodes = p.MessageID, []byte{0, suback, 0}
						_ = answer.Write(c)
					}
				}
			})
		}
	})
	return "tcp://fleetd:secret@" + l.Addr().String()
}

// A login that the broker refuses makes the start fail with an error that does not
// contain the password; an unreachable broker does not.
func TestBrokerRefusesLogin(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for _, code := range []byte{packets.ErrRefusedBadUsernameOrPassword, packets.ErrRefusedNotAuthorised, packets.ErrRefusedIDRejected} {
		source, err := mqttdevice.NewBroker(b.options, fakeBroker(t, code, 0), clientID(), time.Minute)
		if err == nil || strings.Contains(err.Error(), "secret") || !strings.Contains(err.Error(), "refuses fleetd's login") {
			t.Errorf("code %d: %v", code, err)
		}
		if source != nil {
			source.Close()
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
	source, err := mqttdevice.NewBroker(b.options, "tcp://"+l.Addr().String(), clientID(), time.Minute)
	if err != nil {
		t.Fatalf("unreachable broker: %v", err)
	}
	defer source.Close()
	if source.Up() {
		t.Error("an unreachable broker counts as connected")
	}
}

// A broker that refuses the subscription does not count as connected.
func TestBrokerRefusesSubscription(t *testing.T) {
	for code, up := range map[byte]bool{0: true, 0x80: false} {
		b := newBench(t)
		log := &lines{}
		b.options.Log = log.logger()
		source, err := mqttdevice.NewBroker(b.options, fakeBroker(t, 0, code), clientID(), time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(source.Close)
		devicetest.Eventually(t, "the subscription is answered", func() bool { return source.Up() == up && (up || strings.Contains(log.String(), "docs/howto/emqx.md")) })
	}
}

// A device that reconnects to the broker gets a new session, and a device whose
// credentials were revoked is refused on the connection that it still has.
func TestBrokerReportsConnections(t *testing.T) {
	address := "tcp://" + devicetest.Broker(t)
	b := newBench(t)
	b.become(t, id, "c1")
	source, err := mqttdevice.NewBroker(b.options, address, clientID(), time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.service.Close(); source.Close() })
	devicetest.Eventually(t, "the broker is connected", source.Up)
	login := b.login(id, "c1")
	if err := source.Authenticate(login.ClientID, login.Username, login.Password); err != nil {
		t.Fatal(err)
	}
	if source.Authenticate(login.ClientID, login.Username, "wrong") == nil {
		t.Error("a wrong password is allowed")
	}
	d, err := connect(address, login, id, true)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	script := devicetest.NewScript()
	go func() {
		for {
			text, err := d.Receive()
			if err != nil {
				return
			}
			if answer := script.Answer([]byte(text)); answer != "" && d.Send(answer) != nil {
				return
			}
		}
	}()
	initialized := func() (n int) {
		for _, r := range script.Received() {
			if r.Method == "initialize" {
				n++
			}
		}
		return n
	}
	session := func() string {
		v, err := b.service.Get(t.Context(), id)
		if err != nil || v.State != devices.StateOnline || v.CatalogState != devices.CatalogReady {
			return ""
		}
		return v.Presence.Session
	}
	connected := func() {
		t.Helper()
		if err := d.Publish("fleetd/"+id.Token()+"/connected", nil); err != nil {
			t.Fatal(err)
		}
	}
	connected()
	devicetest.Eventually(t, "it is ready", func() bool { return session() != "" })
	first := session()
	connected()
	devicetest.Eventually(t, "it is ready again, in a session of its own", func() bool { s := session(); return s != "" && s != first && initialized() == 2 })
	if _, err := b.service.Revoke(t.Context(), devicetest.Admin, id); err != nil {
		t.Fatal(err)
	}
	if _, err := b.service.Approve(t.Context(), devicetest.Admin, string(id), ""); err != nil {
		t.Fatal(err)
	}
	refused := source.Stats().Connacks.Get("refused")
	if err := d.Send(`{"type":"noop"}`); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "its old connection is refused", func() bool { return source.Stats().Connacks.Get("refused") > refused })
	renewed := b.mint.DeviceToken(string(id), "c1", 1)
	if err := source.Authenticate(login.ClientID, login.Username, renewed); err != nil {
		t.Fatal(err)
	}
	if err := d.Send(`{"type":"noop"}`); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "with new credentials it is ready", func() bool { return session() != "" })
}
