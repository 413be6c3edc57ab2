package mqttdevice_test

import (
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/eclipse/paho.mqtt.golang/packets"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/devicetest/client"
)

// Connections without a CONNECT are closed to make room for new ones, those of the address
// with the most first: silent connections do not block devices.
func TestSilentDevicesAreClosed(t *testing.T) {
	b := newBench(t)
	b.unknown = 50
	b.listen(t)
	from := func(host string) client.Raw { return client.DialRawFrom(t, b.address, net.ParseIP(host)) }
	slow := from("127.0.0.8") // a device whose CONNECT is arriving
	for i := range 150 {
		conn := from(fmt.Sprintf("127.0.0.%d", 2+i%5))
		if i%2 == 0 {
			_, _ = conn.Write([]byte{packets.Connect << 4, 60, 0, 4}) // may be closed already
		}
	}
	devicetest.Eventually(t, "the limit is reached", func() bool { _, waiting := b.front.Connected(); return waiting >= int(b.unknown) })
	for i := range 40 {
		id := devices.ID(fmt.Sprintf("02:00:00:00:03:%02x", i))
		conn := from("127.0.0.9")
		if i == 39 {
			conn = slow
		}
		l := b.login(id, "c1")
		if _, err := conn.Write(l.Connect()); err != nil {
			t.Fatal(err)
		}
		_ = conn.SetReadDeadline(time.Now().Add(4 * time.Second)) // less than ConnectTimeout, which would also free places
		answer, err := packets.ReadPacket(conn)
		// security: D18
		if err != nil || answer.(*packets.ConnackPacket).ReturnCode != packets.Accepted {
			t.Errorf("new connection %d: %v, %v", i, answer, err)
		}
	}
}
