package mqttdevice_test

import (
	"bufio"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/eclipse/paho.mqtt.golang/packets"

	"fleetd/internal/connlimit"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

// A device that sends without end is closed when its grace is over, whatever it sends,
// and is blocked for a while.
func TestFloods(t *testing.T) {
	const grace = time.Second
	b := newBench(t)
	b.options.Floods = connlimit.NewFloods(grace)
	b.listen(t)
	publish := func(text string) []byte {
		topic := "device-server"
		body := append([]byte{0, byte(len(topic))}, topic+text...)
		return append([]byte{packets.Publish << 4, byte(len(body))}, body...)
	}
	for i, c := range []struct {
		name  string
		frame []byte
	}{
		{"notifications", publish(`{"type":"mcp","payload":{"jsonrpc":"2.0","method":"notifications/x"}}`)},
		{"messages", publish(`{"type":"listen","state":"start"}`)},
		{"pings", []byte{packets.Pingreq << 4, 0}},
		{"subscriptions", []byte{packets.Subscribe<<4 | 2, 6, 0, 1, 0, 1, 'x', 0}},
	} {
		t.Run(c.name, func(t *testing.T) {
			id := devices.ID("02:00:00:00:02:0" + string(rune('0'+i)))
			dial := func() (conn net.Conn, code byte) {
				t.Helper()
				conn, err := net.Dial("tcp", b.address)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := conn.Write(b.login(id, "c1").Connect()); err != nil {
					t.Fatal(err)
				}
				answer, err := packets.ReadPacket(conn)
				if err != nil {
					t.Fatal(err)
				}
				return conn, answer.(*packets.ConnackPacket).ReturnCode
			}
			conn, code := dial()
			defer func() { _ = conn.Close() }()
			if code != packets.Accepted {
				t.Fatalf("CONNACK %d", code)
			}
			go func() { // reads responses
				for {
					if _, err := packets.ReadPacket(conn); err != nil {
						return
					}
				}
			}()
			begun := time.Now()
			w := bufio.NewWriter(conn)
			_ = conn.SetWriteDeadline(begun.Add(20 * grace))
			var err error
			for err == nil && time.Since(begun) < 10*grace {
				_, err = w.Write(c.frame)
			}
			// security: D17
			if took := time.Since(begun); err == nil || took < grace {
				t.Errorf("the flood ended after %v: %v", took, err)
			}
			devicetest.Eventually(t, "it counts as a flood", func() bool {
				for _, e := range b.Seen(devices.EventOffline) {
					if e.Device == id && strings.Contains(string(e.Fields), string(devices.CloseFlooding)) {
						return true
					}
				}
				return false
			})
			// security: D17
			again, code := dial()
			defer func() { _ = again.Close() }()
			if code != packets.ErrRefusedServerUnavailable {
				t.Errorf("it can reconnect at once: CONNACK %d", code)
			}
		})
	}
}
