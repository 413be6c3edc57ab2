package mqttdevice_test

import (
	"crypto/rand"
	"log/slog"
	"net"
	"testing"
	"time"

	"go.uber.org/goleak"

	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
	"fleetd/internal/mqttdevice"
	"fleetd/internal/udpaudio"
	"fleetd/simulator/firmware"
)

const id = devices.ID("02:00:00:00:00:01")

// paho sleeps between two attempts to connect, even after Disconnect.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/eclipse/paho%2emqtt%2egolang.(*client).Connect.func1"))
}

// bench is a front end with a real listener and a real UDP socket.
type bench struct {
	*devicetest.Ports
	service *fleet.Service
	mint    *credential.Mint
	gateway *credential.Gateway
	front   *mqttdevice.Front
	options mqttdevice.Options
	address string
	reads   *devicetest.Deadlines
	unknown int32 // SetMaxUnknown; 0: the default
}

func open(t *testing.T) *bench {
	t.Helper()
	b := newBench(t)
	b.listen(t)
	return b
}

func (b *bench) listen(t *testing.T) {
	t.Helper()
	b.front = mqttdevice.New(b.options)
	if b.unknown > 0 {
		b.front.SetMaxUnknown(b.unknown)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b.reads = &devicetest.Deadlines{Listener: l}
	served := make(chan struct{})
	go func() {
		defer close(served)
		b.front.Serve(b.reads)
	}()
	b.address = l.Addr().String()
	t.Cleanup(func() {
		_ = l.Close()
		<-served
		b.service.Close()
		b.front.Close()
	})
}

// newBench returns what the tests of both sources need.
func newBench(t *testing.T) *bench { return newBenchWith(t, fleet.Config{}) }

func newBenchWith(t *testing.T, cfg fleet.Config) *bench {
	t.Helper()
	mint, err := credential.New([]byte("a secret for tests only"))
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	udp, err := udpaudio.Listen("127.0.0.1:0", log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(udp.Close)
	b := &bench{Ports: devicetest.New(), mint: mint}
	if b.gateway, err = credential.NewGateway("Gq7Tz9mKfleet"); err != nil {
		t.Fatal(err)
	}
	b.service = b.Service(t, cfg)
	b.options = mqttdevice.Options{Service: b.service, Mint: mint, Gateway: b.gateway, UDP: udp, Server: "127.0.0.1", Port: udp.Addr().Port(), Log: log}
	return b
}

func (b *bench) login(id devices.ID, client string) firmware.Login {
	return firmware.Login{ClientID: id.Token(), Username: credential.MQTTUser(client), Password: b.mint.DeviceToken(string(id), client, 0), Keepalive: 30}
}

func (b *bench) dial(t testing.TB, id devices.ID, client string) devicetest.Device {
	t.Helper()
	d, err := connect("tcp://"+b.address, b.login(id, client), id, false)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestFrontEndSuiteOwnListener(t *testing.T) {
	t.Parallel()
	devicetest.Run(t, func(t *testing.T) devicetest.Frontend {
		b := open(t)
		return devicetest.Frontend{Service: b.service, Ports: b.Ports, Dial: b.dial, Hello: hello, Lacks: map[string]string{
			devicetest.OneHello:   "each hello opens a new conversation",
			devicetest.PushToTalk: "the conversation ends without the connection, and an idle device has none"}}
	})
}

// clientID returns an id that no other test run uses at the same broker.
func clientID() string { return "fleetd-test-" + rand.Text() }

func TestFrontEndSuiteExternalBroker(t *testing.T) {
	t.Parallel()
	address := "tcp://" + devicetest.Broker(t)
	devicetest.Run(t, func(t *testing.T) devicetest.Frontend {
		b := newBench(t)
		b.become(t, id, "c1") // devices contact the OTA URL first
		b.become(t, "02:00:00:00:00:02", "other")
		source, err := mqttdevice.NewBroker(b.options, address, clientID(), time.Second)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			b.service.Close()
			source.Close()
		})
		devicetest.Eventually(t, "the broker is connected", source.Up)
		return devicetest.Frontend{Service: b.service, Ports: b.Ports, Hello: hello,
			Dial: func(t testing.TB, id devices.ID, client string) devicetest.Device {
				d, err := connect(address, b.login(id, client), id, true)
				if err != nil {
					t.Fatal(err)
				}
				if err := d.Publish("fleetd/"+id.Token()+"/connected", nil); err != nil { // as the broker would
					t.Fatal(err)
				}
				return d
			},
			Lacks: map[string]string{
				devicetest.OneHello:      "each hello opens a new conversation",
				devicetest.PushToTalk:    "the conversation ends without the connection, and an idle device has none",
				devicetest.NewestWins:    "the session does not depend on the device's connection to the broker",
				devicetest.CallsEnd:      "a broker without events does not report that a device has disconnected",
				devicetest.OnlineOffline: "the end is detected by a probe, so the reason differs",
			}}
	})
}

// become makes the device a member, as its OTA check does.
func (b *bench) become(t *testing.T, id devices.ID, client string) {
	t.Helper()
	if _, err := b.service.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: client}); err != nil {
		t.Fatal(err)
	}
}

// A device that disconnects silently is detected by its silence and a probe; one that
// the broker reports as disconnected ends at once.
func TestBrokerProbes(t *testing.T) {
	t.Parallel()
	address := "tcp://" + devicetest.Broker(t)
	b := newBench(t)
	b.become(t, id, "c1")
	source, err := mqttdevice.NewBroker(b.options, address, clientID(), time.Second)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.service.Close(); source.Close() })
	devicetest.Eventually(t, "the broker is connected", source.Up)
	for _, reported := range []bool{false, true} {
		d, err := connect(address, b.login(id, "c1"), id, true)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Send(`{"type":"noop"}`); err != nil {
			t.Fatal(err)
		}
		devicetest.Eventually(t, "the first message opens a session", func() bool {
			v, err := b.service.Get(t.Context(), id)
			return err == nil && v.State == devices.StateOnline
		})
		if reported {
			if err := d.Publish("fleetd/"+id.Token()+"/disconnected", nil); err != nil {
				t.Fatal(err)
			}
		}
		d.Close()
		devicetest.Eventually(t, "the session ends", func() bool {
			v, err := b.service.Get(t.Context(), id)
			return err == nil && v.State == devices.StateOffline
		})
	}
	// The session is removed a moment before the event is sent.
	devicetest.Eventually(t, "both offline events are sent", func() bool { return len(b.Seen(devices.EventOffline)) == 2 })
	reasons := b.Seen(devices.EventOffline)
	if string(reasons[0].Fields) != `"reason":"dead"` || string(reasons[1].Fields) != `"reason":"gone"` {
		t.Errorf("offline events %+v", reasons)
	}
	unknown, err := connect(address, firmware.Login{ClientID: "unknown"}, "02:00:00:00:00:77", false)
	if err != nil {
		t.Fatal(err)
	}
	defer unknown.Close()
	if err := unknown.Send(hello); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "an unknown device is refused", func() bool { return source.Stats().Connacks.Get("refused") > 0 })
}
