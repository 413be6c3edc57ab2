package fleettest

import (
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"fleetd/internal/devicetest/client"
)

// limited is the program under an open-file limit.
func (p Programs) limited(t *testing.T, files int) Programs {
	t.Helper()
	script := filepath.Join(t.TempDir(), "limited")
	text := fmt.Sprintf("#!/bin/sh\nulimit -n %d\nexec %s \"$@\"\n", files, p.Fleetd)
	if err := os.WriteFile(script, []byte(text), 0o700); err != nil {
		t.Fatal(err)
	}
	p.Fleetd = script
	return p
}

// fill opens as many connections to an address of the node, and returns how
// many of them are not closed when the node has let in or refused each.
func (n *Node) fill(t *testing.T, address string, connections int) (open int) {
	t.Helper()
	var closed atomic.Int64
	decided := func() float64 {
		return n.Metric(t, "fleetd_device_connections") + n.Metric(t, "fleetd_connections_refused_total")
	}
	before, refused := decided(), n.Metric(t, "fleetd_connections_refused_total")
	for range connections {
		c := client.DialRaw(t, address)
		go func() {
			if _, err := c.Read(make([]byte, 1)); err == io.EOF {
				closed.Add(1)
			}
		}()
	}
	n.Await(t, "the node has decided on each connection", 10*time.Second, func() bool {
		return decided() >= before+float64(connections) && n.Metric(t, "fleetd_connections_refused_total") == refused+float64(closed.Load())
	})
	return connections - int(closed.Load())
}

// Somebody opens connections to the devices' ports until no descriptor is
// left for devices: the API, the database and the devices that are in do not
// notice.
func TestDescriptorsAreLeftForTheAPI(t *testing.T) {
	t.Parallel()
	const files, forDevices = 300, 150 // half, where 200 are too many to keep
	node := programs.limited(t, files).Start(t)
	programs.Simulate(t, node.Info.OTA, "--transport", "mqtt", "--devices", "5", "--seed", "3")
	node.AwaitReady(t, 5)
	if open := node.fill(t, node.Setting("--mqtt-listen"), 100); open != 100 {
		t.Fatalf("%d silent connections are open, want 100", open)
	}
	device := strings.TrimPrefix(node.Info.Device, "http://")
	if open := node.fill(t, device, files); open < forDevices-100-10 || open > forDevices-100 {
		t.Errorf("%d connections to the device port are open beside 105 others", open)
	}
	if n := node.Metric(t, "fleetd_connections_refused_total", `listener="device-listen"`, `reason="descriptors"`); n == 0 {
		t.Error("nothing was counted")
	}
	if n := node.Metric(t, "fleetd_device_connections_limit"); n != forDevices {
		t.Errorf("the limit is %v", n)
	}
	for range 20 { // each request on a connection of its own
		client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		response, err := client.Get(node.Info.API + "/readyz")
		if err != nil || response.StatusCode != http.StatusOK {
			t.Fatalf("the API is locked out: %v, %v", response, err)
		}
		_ = response.Body.Close()
	}
	if ready := node.Ready(t); ready != 5 {
		t.Errorf("%d of 5 devices are still there", ready)
	}
}

// One address has its share of silent connections on each of the devices'
// ports, and devices that are in are not counted, over either transport.
func TestSharePerAddress(t *testing.T) {
	t.Parallel()
	const share = 10
	node := programs.Start(t, "--connections-per-address", fmt.Sprint(share))
	programs.Simulate(t, node.Info.OTA, "--transport", "mqtt", "--devices", "12", "--ramp", "5", "--seed", "4")
	node.AwaitReady(t, 12)
	devices := 12
	// A WebSocket device connects once, and four at a time cannot reach the share, however slow the machine is.
	for _, base := range []string{"02:aa:00:00:00:00", "02:bb:00:00:00:00", "02:cc:00:00:00:00"} {
		programs.Simulate(t, node.Info.OTA, "--transport", "websocket", "--devices", "4", "--seed", "5", "--mac-base", base)
		devices += 4
		node.AwaitReady(t, devices)
	}
	device := strings.TrimPrefix(node.Info.Device, "http://")
	if open := node.fill(t, device, 50); open > share || open < share-3 { // the simulator keeps some of its own open
		t.Errorf("%d silent connections of one address are open, want %d", open, share)
	}
	if n := node.Metric(t, "fleetd_connections_refused_total", `reason="address"`); n == 0 {
		t.Error("nothing was counted")
	}
	if ready := node.Ready(t); ready != devices {
		t.Errorf("%d of %d devices are still there", ready, devices)
	}
}

// Behind a trusted proxy the share is that of the address it names.
func TestSharePerForwardedAddress(t *testing.T) {
	t.Parallel()
	node := programs.Start(t, "--connections-per-address", "2", "--trusted-proxies", "127.0.0.0/8")
	device, err := url.Parse(node.Info.Device)
	if err != nil {
		t.Fatal(err)
	}
	// ask sends a request, and returns the first line of the answer. With "Expect: 100-continue" that comes
	// when the node has let it in and waits for the body, which never comes.
	ask := func(source, expect, body string) string {
		c := client.DialRaw(t, device.Host)
		if _, err := fmt.Fprintf(c, "POST /xiaozhi/ota/ HTTP/1.1\r\nHost: x\r\nDevice-Id: 02:00:00:00:00:01\r\nContent-Length: 10\r\nX-Forwarded-For: %s\r\n%s\r\n%s", source, expect, body); err != nil {
			t.Fatal(err)
		}
		_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
		line := make([]byte, len("HTTP/1.1 200"))
		if _, err := io.ReadFull(c, line); err != nil {
			t.Fatal(err)
		}
		return string(line)
	}
	wait := func(source string) string { return ask(source, "Expect: 100-continue\r\n", "") }
	whole := func(source string) string { return ask(source, "", `{"a":"bc"}`) }
	for i, want := range []string{"100", "100", "503"} {
		if got := wait("203.0.113.1"); got != "HTTP/1.1 "+want {
			t.Errorf("request %d of one address at once: %s, want %s", i+1, got, want)
		}
	}
	if got := whole("203.0.113.2"); got != "HTTP/1.1 200" {
		t.Errorf("another address that comes through the proxy is kept out: %s", got)
	}
	for range 10 { // many of the proxy's own
		if got := wait(""); got != "HTTP/1.1 100" {
			t.Errorf("the proxy itself has a share: %s", got)
		}
	}
}
