package fleettest

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/devicetest"
	"fleetd/internal/racetest"
)

// MQTT devices can be called as soon as they are connected; most never send a hello.
func TestToolCallWithoutHello(t *testing.T) {
	t.Parallel()
	const fleet = 4
	node := programs.Start(t)
	sim := programs.Simulate(t, node.Info.OTA, "--devices", fmt.Sprint(fleet), "--profile", "fw-2.4,fw-1.9,robot", "--seed", "11")
	node.AwaitReady(t, fleet)
	for i, d := range node.List(t) {
		if out, errs, status := node.Command(t, "call", d.ID, volume, fmt.Sprintf("volume=%d", i)); status != 0 || strings.TrimSpace(out) != "true" {
			t.Errorf("%s: status %d, %s %s", d.ID, status, out, errs)
		}
		if d.Transport != "mqtt" || d.Audio.Open {
			t.Errorf("%s: transport %s, audio %+v", d.ID, d.Transport, d.Audio)
		}
	}
	r := sim.Report(t)
	if r.Totals.Hellos != 0 || r.Totals.CallsTotal != fleet || r.Totals.Transports["mqtt"] != fleet || r.Totals.Crashes != 0 {
		t.Errorf("totals %+v", r.Totals)
	}
}

// A node is killed and restarted on its ports: all devices reconnect, none is
// refused, and conversations start without delay meanwhile.
func TestFleetReturnsAfterRestart(t *testing.T) {
	fleet := setting(t, "FLEETD_TEST_RETURN", racetest.Size(1500, 300))
	const talkers = 20
	node := programs.Start(t)
	come := []string{"--transport", "mqtt", "--reconnect", "1s", "--reconnect-jitter", "4s", "--quiet"}
	idle := programs.Simulate(t, node.Info.OTA, append(come, "--devices", fmt.Sprint(fleet))...)
	talking := programs.Simulate(t, node.Info.OTA, append(come, "--devices", fmt.Sprint(talkers), "--mac-base", "02:7a:00:00:00:00",
		"--talk", "--utterance", "600ms", "--talk-for", "600ms", "--wake", "3s", "--time-scale", "0.05")...)
	ready := func() bool {
		return node.Metric(t, "fleetd_devices", `transport="mqtt"`, `mcp_state="ready"`) == float64(fleet+talkers)
	}
	node.Await(t, "the fleet is connected", 2*time.Minute, ready)
	node.AwaitStored(t)
	node.Kill(t)
	down := time.Now()
	node.Run(t)
	up := time.Now()
	node.Await(t, "the fleet is back", time.Minute, ready)
	t.Logf("down for %v, the fleet of %d ready %v later", up.Sub(down).Round(time.Millisecond), fleet+talkers, time.Since(up).Round(time.Millisecond))
	node.Await(t, "the fleet is connected", time.Minute, func() bool { return node.Metric(t, "fleetd_hello_seconds_count") > talkers })
	for name, sim := range map[string]*Simulation{"idle": idle, "talking": talking} {
		r := sim.Report(t).Totals
		t.Logf("%s: CONNACK codes %v, %d reconnects, waited %+v ms, %d hellos in %+v ms", name, r.CONNACKCodes, r.MQTTReconnects, r.ReconnectWait, r.ServerHellos, r.HelloMS)
		for code, n := range r.CONNACKCodes {
			if code != "0" {
				t.Errorf("%s: %d CONNECTs were answered with code %s", name, n, code)
			}
		}
		count := map[string]int{"idle": fleet, "talking": talkers}[name]
		if int(r.MQTTReconnects) < count || r.ReconnectWait.Max > 15_000 {
			t.Errorf("%s: %d of %d came back, the last after %.0f ms", name, r.MQTTReconnects, count, r.ReconnectWait.Max)
		}
		if name == "talking" && (r.ServerHellos < 2*talkers || r.HelloMS.P99 > 1000) {
			t.Errorf("%s: %d hellos, p99 %.0f ms", name, r.ServerHellos, r.HelloMS.P99)
		}
	}
	if n := node.Metric(t, "fleetd_mqtt_connects_total", `code="3"`); n != 0 {
		t.Errorf("the node refused %.0f devices", n)
	}
}

// A device is offered the transport that its address requires, else the one that
// the operator set for it, else the node's default.
func TestTransportChoice(t *testing.T) {
	t.Parallel()
	const id = "02:00:00:00:09:01"
	offered := func(t *testing.T, node *Node, variant, want string) string {
		t.Helper()
		check := checkIn
		if want == "503" { // which checkIn takes for a node that is not ready yet
			check = checkInOnce
		}
		reply, status := check(t, node.Info.OTA+variant, id, "{}")
		switch {
		case status != http.StatusOK:
			return fmt.Sprint(status)
		case reply.MQTT != nil && reply.WebSocket != nil || strings.Contains(reply.raw, `"mqtt"`) != (reply.MQTT != nil):
			return "both: " + reply.raw
		case reply.MQTT != nil:
			return "mqtt"
		case reply.WebSocket != nil:
			return "websocket"
		}
		return reply.raw
	}
	for _, c := range []struct {
		name  string
		flags []string
		// by preference of the operator; in each the plain address, /ws/, /mqtt/
		want map[string][3]string
	}{
		{"default", nil, map[string][3]string{
			"": {"mqtt", "websocket", "mqtt"}, "websocket": {"websocket", "websocket", "mqtt"}, "mqtt": {"mqtt", "websocket", "mqtt"}}},
		{"websocket", []string{"--transport", "websocket"}, map[string][3]string{
			"": {"websocket", "websocket", "mqtt"}, "websocket": {"websocket", "websocket", "mqtt"}, "mqtt": {"mqtt", "websocket", "mqtt"}}},
		{"MQTT off", []string{"--mqtt", "off"}, map[string][3]string{
			"": {"websocket", "websocket", "503"}, "websocket": {"websocket", "websocket", "503"}, "mqtt": {"websocket", "websocket", "503"}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			node := programs.Start(t, c.flags...)
			for _, prefer := range []string{"", "websocket", "mqtt"} {
				if prefer != "" {
					patched, err := node.Patch(t.Context(), id, api.DeviceEdit{TransportWanted: &prefer}, 0)
					if err != nil || patched.Applies != "next boot" {
						t.Errorf("%s: %+v, %v", prefer, patched, err)
					}
				}
				for i, variant := range []string{"", "ws/", "mqtt/"} {
					want := c.want[prefer][i]
					if got := offered(t, node, variant, want); got != want {
						t.Errorf("operator's choice %q, address %q: %s, want %s", prefer, variant, got, want)
					}
				}
			}
			conn, err := net.DialTimeout("tcp", node.Setting("--mqtt-listen"), time.Second)
			if err == nil {
				_ = conn.Close()
			}
			if on := err == nil; on != (c.name != "MQTT off") {
				t.Errorf("MQTT is served: %t", on)
			}
			if c.name == "default" { // firmware, where it is sent
				websocket := "websocket"
				programs.Simulate(t, node.Info.OTA, "--devices", "3").await(t, node, 3)
				if _, err := node.Patch(t.Context(), "02:f1:ee:00:00:01", api.DeviceEdit{TransportWanted: &websocket}, 0); err != nil {
					t.Fatal(err)
				}
				r := programs.Simulate(t, node.Info.OTA, "--devices", "3").await(t, node, 3)
				for i, d := range r.Devices {
					if want := []string{"mqtt", "websocket", "mqtt"}[i]; d.Transport != want {
						t.Errorf("%s came by %s, want %s", d.ID, d.Transport, want)
					}
				}
			}
		})
	}
}

// await waits until all simulated devices are ready, and ends them.
func (s *Simulation) await(t *testing.T, node *Node, count int) Report {
	t.Helper()
	node.AwaitReady(t, count)
	r := s.Report(t)
	node.Await(t, "they are gone", 10*time.Second, func() bool { return node.Ready(t) == 0 })
	return r
}

// Devices connected to an external broker: tools, calls and conversations.
func TestExternalBroker(t *testing.T) {
	t.Parallel()
	address := devicetest.Broker(t)
	const fleet = 4
	node := programs.Start(t, "--mqtt", "tcp://"+address, "--public-mqtt", address, natsFlag, natsAnyPort)
	programs.Echo(t, node)
	var b [3]byte
	rand.Read(b[:]) // others use the broker, too
	sim := programs.Simulate(t, node.Info.OTA, "--subscribe", "--devices", fmt.Sprint(fleet), "--profile", "fw-2.4", "--talk", "--wake", "30s",
		"--utterance", "1s", "--talk-for", "1s", "--mac-base", fmt.Sprintf("02:%02x:%02x:%02x:00:00", b[0], b[1], b[2]))
	node.AwaitReady(t, fleet)
	for _, d := range node.List(t) {
		if r, err := node.Call(t.Context(), d.ID, volume, apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":5}`)}); err != nil || r.IsError {
			t.Errorf("%s: %+v, %v", d.ID, r, err)
		}
	}
	node.Await(t, "all echoes are sent", 30*time.Second, func() bool {
		return node.Metric(t, "fleetd_conversations") == 0 && node.Metric(t, "fleetd_udp_packets_sent_total") >= fleet*16
	})
	r := sim.Report(t)
	if r.Totals.CallsTotal != fleet || r.Totals.Transports["mqtt"] != fleet || r.Totals.Crashes != 0 {
		t.Errorf("totals %+v", r.Totals)
	}
	wantEchoes(t, r)
	if node.Metric(t, "fleetd_mqtt_broker_connected") != 1 {
		t.Error("the broker does not count as connected")
	}
}
