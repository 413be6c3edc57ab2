package fleettest

import (
	"fmt"
	"io"
	"net"
	"net/url"
	"testing"
	"time"

	"github.com/eclipse/paho.mqtt.golang/packets"

	"fleetd/internal/devicetest/client"
)

// Behind a TCP proxy that names its clients, limits per address are those of the
// client, on the device port and over MQTT; without its header a trusted peer is out.
func TestProxyProtocol(t *testing.T) {
	t.Parallel()
	node := programs.Start(t, "--connections-per-address", "2", "--proxy-protocol", "on", "--trusted-proxies", "127.0.0.0/8", "--mqtt-listen", freePort(t))
	device, err := url.Parse(node.Info.Device)
	if err != nil {
		t.Fatal(err)
	}
	dial := func(address, source string) net.Conn {
		t.Helper()
		c := client.DialRaw(t, address)
		if source != "" {
			if _, err := fmt.Fprintf(c, "PROXY TCP4 %s 192.0.2.1 40000 8000\r\n", source); err != nil {
				t.Fatal(err)
			}
		}
		_ = c.SetReadDeadline(time.Now().Add(4 * time.Second))
		return c
	}
	// ask sends a request, and returns the status; empty if the connection is closed.
	ask := func(c net.Conn) string {
		if _, err := fmt.Fprintf(c, "GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			return ""
		}
		line := make([]byte, len("HTTP/1.1 200"))
		if _, err := io.ReadFull(c, line); err != nil {
			return ""
		}
		return string(line[9:])
	}
	for i, want := range []string{"200", "200", ""} { // connections stay open
		// security: D19
		if got := ask(dial(device.Host, "203.0.113.1")); got != want {
			t.Errorf("connection %d of one client: %q, want %q", i+1, got, want)
		}
	}
	if got := ask(dial(device.Host, "203.0.113.2")); got != "200" {
		t.Errorf("another client behind the proxy is kept out: %q", got)
	}
	// security: D19
	if got := ask(dial(device.Host, "")); got != "" {
		t.Errorf("a trusted peer without a header is answered %q", got)
	}
	connect := packets.NewControlPacket(packets.Connect).(*packets.ConnectPacket)
	connect.ProtocolName, connect.ProtocolVersion, connect.CleanSession, connect.ClientIdentifier = "MQTT", 4, true, "020000000001"
	for client, answered := range map[string]bool{"203.0.113.3": true, "": false} {
		c := dial(node.Setting("--mqtt-listen"), client)
		_ = connect.Write(c) // an error shows at the read
		answer, err := packets.ReadPacket(c)
		if _, ok := answer.(*packets.ConnackPacket); ok != answered {
			t.Errorf("MQTT from %q: %v, %v", client, answer, err)
		}
	}
	if n := node.Metric(t, "fleetd_connections_refused_total", `reason="no_proxy_header"`); n != 2 {
		t.Errorf("%v connections without a header are counted", n)
	}
}
