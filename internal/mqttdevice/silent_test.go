package mqttdevice_test

import (
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/eclipse/paho.mqtt.golang/packets"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

// Connections that have sent no CONNECT give way to newcomers, those of the address
// with the most of them first: silence keeps nobody out.
func TestSilentConnectionsGiveWay(t *testing.T) {
	b := ground(t)
	b.unknown = 50
	b.listen(t)
	from := func(host string) net.Conn {
		t.Helper()
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(host)}}
		conn, err := dialer.Dial("tcp", b.address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
	slow := from("127.0.0.8") // a device whose CONNECT is on its way
	for i := range 150 {
		conn := from(fmt.Sprintf("127.0.0.%d", 2+i%5))
		if i%2 == 0 {
			_, _ = conn.Write([]byte{packets.Connect << 4, 60, 0, 4}) // may be closed already
		}
	}
	devicetest.Eventually(t, "all places are taken", func() bool { _, waiting := b.front.Connected(); return waiting >= int(b.unknown) })
	for i := range 40 {
		id := devices.ID(fmt.Sprintf("02:00:00:00:03:%02x", i))
		conn := from("127.0.0.9")
		if i == 39 {
			conn = slow
		}
		l := b.login(id, "c1")
		if _, err := conn.Write(l.packet(t)); err != nil {
			t.Fatal(err)
		}
		_ = conn.SetReadDeadline(time.Now().Add(4 * time.Second)) // less than ConnectTimeout frees places by itself
		answer, err := packets.ReadPacket(conn)
		// security: D18
		if err != nil || answer.(*packets.ConnackPacket).ReturnCode != packets.Accepted {
			t.Errorf("newcomer %d: %v, %v", i, answer, err)
		}
	}
}
