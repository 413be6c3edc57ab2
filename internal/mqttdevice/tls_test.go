package mqttdevice_test

import (
	"crypto/tls"
	"net"
	"net/http/httptest"
	"testing"
	"time"

	paho "github.com/eclipse/paho.mqtt.golang"

	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/mqttdevice"
)

// The front end also serves TLS, while another peer never finishes its handshake.
func TestOverTLS(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.front = mqttdevice.New(b.options)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	web := httptest.NewTLSServer(nil) // for its certificate
	served := make(chan struct{})
	secure := tls.NewListener(l, &tls.Config{Certificates: web.TLS.Certificates})
	go func() {
		defer close(served)
		b.front.Serve(secure)
	}()
	t.Cleanup(func() {
		web.Close()
		_ = l.Close()
		<-served
		b.service.Close()
		b.front.Close()
	})
	b.address = l.Addr().String()
	stuck := b.raw(t)
	stuck.Send([]byte{0x16, 3, 1})
	client := paho.NewClient(paho.NewClientOptions().AddBroker("ssl://" + b.address).SetClientID(id.Token()).
		SetUsername(credential.MQTTUser("c1")).SetPassword(b.mint.DeviceToken(string(id), "c1", 0)).
		SetTLSConfig(&tls.Config{InsecureSkipVerify: true}).SetProtocolVersion(4).SetAutoReconnect(false))
	if token := client.Connect(); !token.WaitTimeout(10*time.Second) || token.Error() != nil {
		t.Fatalf("not connected: %v", token.Error())
	}
	defer client.Disconnect(0)
	if token := client.Publish(devices.TopicUp(id), 0, false, `{"type":"listen","state":"start"}`); !token.WaitTimeout(5*time.Second) || token.Error() != nil {
		t.Fatal(token.Error())
	}
	devicetest.Eventually(t, "its message arrives", func() bool { return len(b.Seen(devices.EventMessage)) == 1 })
	stuck.Ended(mqttdevice.ConnectTimeout + 3*time.Second)
}
