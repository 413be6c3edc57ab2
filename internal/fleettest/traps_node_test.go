package fleettest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/apiclient"
	"fleetd/internal/devicetest"
	"fleetd/internal/store/storetest"
)

// shapes are JSON, nearly JSON and no JSON, as a program at the other end may
// one day send them.
func shapes() []string {
	s := []string{"", " ", "null", "true", "0", "-1", "1e999", `""`, `"text"`, "[]", "{}", "[[]]", "[null]", "{", "}", "[", `{"`, `{"a"`, `{"a":`, "\x00", "\xff\xfe", "\ufeff{}",
		`{"":""}`, `{"type":{}}`, `{"type":null}`, `{"type":["mcp"]}`, `{"type":"mcp","payload":{"id":{}}}`, strings.Repeat("[", 20_000), strings.Repeat(`{"a":`, 5_000),
		`{"type":"` + strings.Repeat("x", 9_000) + `"}`, `{"a":1}{"b":2}`, `{"a":1,"a":2}`}
	for _, member := range []string{"tool", "arguments", "timeout", "method", "params", "payload", "type", "state", "session_id", "message", "status", "emotion", "id", "result", "error"} {
		for _, value := range []string{"null", "1", "1.5e300", `"x"`, `"\ud800"`, "[]", "{}", `[{"a":[]}]`, "true"} {
			s = append(s, fmt.Sprintf(`{"type":"tts","tool":"self.get_device_status","state":"start",%q:%s}`, member, value))
		}
	}
	return s
}

// No shape of JSON from any side ends the node or any other device's session.
func TestTrap07AnyShapeOfJSON(t *testing.T) {
	t.Parallel()
	const id, odd, oddWS, bystander = "02:00:00:00:07:01", "02:00:00:00:07:02", "02:00:00:00:07:03", "02:00:00:00:07:04"
	api, upstream := freePort(t), freePort(t)
	server := chatAt(t, upstream)
	node := programs.Start(t, natsFlag, natsAnyPort, "--gateway-api-listen", api, "--gateway-signature-key", gatewayKey, "--voice-upstream", "ws://"+upstream+"/")
	bus := attach(t, node)
	kept := boot(t, node.Info.OTA, bystander).dial(t, devicetest.NewScript())
	target := boot(t, node.Info.OTA, id).dial(t, devicetest.NewScript())
	node.AwaitReady(t, 2)
	target.hello(t)
	x := await(t, "the chat server's connection", server.opened)
	all := shapes()

	for _, shape := range all { // the chat server, before its hello and after
		x.say(t, shape)
	}
	x.say(t, `{"type":"hello","session_id":"theirs"}`)
	for i, shape := range all {
		x.say(t, shape)
		if i%10 == 0 {
			x.play(t, []byte(shape))
		}
	}
	for _, verb := range []string{"call", "send", "audio", "rpc", "nothing", ""} { // services
		for _, shape := range all {
			subject := strings.TrimSuffix("fleetd.v1.cmd."+token(id)+"."+verb, ".")
			if err := bus.PublishMsg(&nats.Msg{Subject: subject, Data: []byte(shape), Header: nats.Header{"Fleetd-Token": {bus.token}}, Reply: "nobody"}); err != nil {
				t.Fatal(err)
			}
		}
	}
	post := func(url, authorization, body string) {
		t.Helper()
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		request.Header = http.Header{"Authorization": {"Bearer " + authorization}, "Content-Type": {"application/json"}, "Device-Id": {odd}, "Client-Id": {clientOf(odd)}}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatalf("%s: %.80q: %v", url, body, err)
		}
		_, _ = io.Copy(io.Discard, response.Body) // read so that the connection can be used again
		_ = response.Body.Close()
		if response.StatusCode == http.StatusInternalServerError && !strings.Contains(url, api) { // the gateway's status for everything
			t.Errorf("%s: %.80q: %d", url, body, response.StatusCode)
		}
	}
	for _, shape := range all { // callers and booting devices
		post(node.Info.API+"/v1/devices/"+id+"/tools/self.get_device_status/call", bus.token, shape)
		post(node.Info.API+"/v1/devices/"+id+"/mcp", bus.token, shape)
		post(node.Info.API+"/v1/devices/"+id+"/messages", bus.token, shape)
		post("http://"+api+"/api/commands/x@@@"+strings.ReplaceAll(id, ":", "_")+"@@@x", bus.token, shape)
		post("http://"+api+"/api/devices/status", bus.token, shape)
		post(node.Info.OTA, "", shape)
		post(node.Info.OTA+"activate", "", shape)
	}
	// Devices themselves, until they are thrown out.
	answers := devicetest.NewScript()
	var n atomic.Int32
	answers.Other = func(devicetest.Request) string { return `"result":` + all[int(n.Add(1))%len(all)] }
	d := boot(t, node.Info.OTA, odd).dial(t, answers)
	reply, _ := checkIn(t, node.Info.OTA+"ws/", oddWS, "{}")
	ws := dialSocket(t, reply.WebSocket.URL, oddWS, reply.WebSocket.Token, answers)
	for _, shape := range all {
		for _, text := range []string{shape, `{"type":"mcp","payload":` + shape + `}`,
			`{"type":"mcp","payload":{"jsonrpc":"2.0","id":1,"result":` + shape + `}}`, `{"type":"hello","transport":"udp","audio_params":` + shape + `}`} {
			_ = d.Send(text) // it may have been thrown out
			_ = ws.Send(text)
		}
	}
	for _, device := range []string{id, bystander} {
		// security: D11
		if r, err := node.Call(t.Context(), device, volume, apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":3}`), Timeout: 10 * time.Second}); err != nil || r.IsError {
			t.Errorf("%s: %+v, %v", device, r, err)
		}
	}
	for _, metric := range []string{"fleetd_bad_messages_total", "fleetd_upstream_bad_messages_total", "fleetd_nats_requests_refused_total"} {
		if n := node.Metric(t, metric); n < 20 {
			t.Errorf("%s is %.0f: the shapes did not arrive", metric, n)
		}
	}
	for _, d := range []*device{kept, target} {
		select {
		case <-d.Gone():
			// security: D11
			t.Error("a healthy device was thrown out")
		default:
		}
	}
	select {
	case <-node.ended:
		// security: D11
		t.Error("the node ended")
	default: // and its log is looked at when it stops
	}
}

const answerEvery = 20 * time.Millisecond

// answersDuring counts the node's answers to requests that need no service while act runs, at most one each answerEvery.
// A busy machine delays act and the answers alike: their number does not depend on its speed.
func (n *Node) answersDuring(t testing.TB, act func()) (answers int) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	counted := make(chan int, 1)
	go func() {
		answers := 0
		defer func() { counted <- answers }()
		tick := time.NewTicker(answerEvery)
		defer tick.Stop()
		for ctx.Err() == nil {
			request, err := http.NewRequestWithContext(ctx, http.MethodGet, n.Info.API+"/livez", nil)
			if err != nil {
				t.Error(err)
				return
			}
			response, err := http.DefaultClient.Do(request)
			if err == nil {
				_ = response.Body.Close() // its status is enough
				answers++
			} else if ctx.Err() == nil {
				t.Errorf("the node does not answer: %v", err)
				return
			}
			select {
			case <-ctx.Done():
			case <-tick.C:
			}
		}
	}()
	act()
	stop()
	return <-counted
}

// With the database and NATS away a device is greeted, and called, as always.
func TestTrap09HelloWithoutServices(t *testing.T) {
	t.Parallel()
	const overMQTT, overWS = "02:00:00:00:09:11", "02:00:00:00:09:12"
	db := storetest.Postgres(t)
	url, prefix, _, _ := natsServer(t)
	sql, bus := storetest.NewProxy(t, db.Address(t)), storetest.NewProxy(t, strings.TrimPrefix(url, "nats://"))
	sql.Start()
	bus.Start()
	node := programs.Start(t, "--database", db.Via(t, sql.Address()), "--nats", "nats://"+bus.Address(), "--nats-prefix", prefix)
	login := boot(t, node.Info.OTA, overMQTT)
	login.dial(t, devicetest.NewScript()).Close()
	reply, _ := checkIn(t, node.Info.OTA+"ws/", overWS, "{}")
	devicetest.Eventually(t, "the rows are there", func() bool { return db.Count(t, "SELECT count(*) FROM devices") == 2 })
	sql.Stop()
	bus.Stop()
	const second = time.Second / answerEvery
	quick := func(what string, act func()) {
		t.Helper()
		if answers := node.answersDuring(t, act); answers > int(second) {
			t.Errorf("%s took as long as %d answers to other requests, one each %v", what, answers, answerEvery)
		}
	}
	for round := range 2 { // at once, and when the outage is known
		var d *device
		quick("MQTT CONNECT", func() { d = login.dial(t, devicetest.NewScript()) })
		quick("hello over MQTT", func() { d.hello(t) })
		quick("another hello", func() { d.hello(t) })
		quick("hello over WebSocket", func() {
			s := dialSocket(t, reply.WebSocket.URL, overWS, reply.WebSocket.Token, devicetest.NewScript())
			await(t, "the server's hello", s.hellos)
		})
		quick("OTA check", func() { boot(t, node.Info.OTA, overMQTT) })
		quick("OTA check of a new device", func() {
			if reply, status := checkInOnce(t, node.Info.OTA, fmt.Sprintf("02:00:00:00:09:2%d", round), "{}"); status != http.StatusServiceUnavailable {
				t.Errorf("the OTA check of an unknown device without the database: %d %s", status, reply.raw)
			}
		})
		for _, id := range []string{overMQTT, overWS} {
			quick("call", func() {
				if r, err := node.Call(t.Context(), id, volume, apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":3}`)}); err != nil || r.IsError {
					t.Errorf("%s: %+v, %v", id, r, err)
				}
			})
		}
		node.Await(t, "the outage is known", 20*time.Second, func() bool {
			response, err := http.Get(node.Info.API + "/readyz")
			if err != nil {
				return false
			}
			defer func() { _ = response.Body.Close() }()
			text, err := io.ReadAll(response.Body)
			return err == nil && strings.Contains(string(text), "database") && strings.Contains(string(text), "nats")
		})
	}
	sql.Start()
	bus.Start()
}

// An answer may be as large as firmware can send it, and larger.
func TestTrap14LargeAnswers(t *testing.T) {
	t.Parallel()
	node := programs.Start(t)
	robots := map[string]string{"mqtt": "02:00:00:00:14:01", "websocket": "02:00:00:00:14:02"}
	for transport, id := range robots {
		programs.Simulate(t, node.Info.OTA, "--transport", transport, "--devices", "1", "--profile", "robot", "--mac-base", id)
	}
	node.AwaitReady(t, 2)
	for transport, id := range robots {
		v, err := node.Device(t.Context(), id)
		if err != nil || v.Transport != transport || v.MCP.Tools < 50 || v.MCP.Partial { // on pages of 8,000 bytes
			t.Errorf("%s: %+v, %v", transport, v, err)
		}
		for _, size := range []int{8_192, 64_000} {
			out, errs, status := node.Command(t, "call", id, "self.test.large", fmt.Sprintf("bytes=%d", size))
			if text := strings.TrimSpace(out); status != 0 || len(text) < size {
				t.Errorf("%s: %d bytes: status %d, %d bytes, %s", transport, size, status, len(text), errs)
			}
		}
	}
	// Beyond what firmware can do: taken to a point, and no farther.
	const id = "02:00:00:00:14:03"
	size := 200_000
	script := devicetest.NewScript()
	script.Call = func(string, json.RawMessage) string {
		return `"result":{"content":[{"type":"text","text":"` + strings.Repeat("x", size) + `"}],"isError":false}`
	}
	d := boot(t, node.Info.OTA, id).dial(t, script)
	node.AwaitReady(t, 3)
	r, err := node.Call(t.Context(), id, volume, apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":3}`)})
	if err != nil || len(r.Content) != 1 || len(r.Content[0].Text) != size {
		t.Errorf("%d bytes: %d content items, %v", size, len(r.Content), err)
	}
	size = 1 << 20
	if _, err := node.Call(t.Context(), id, volume, apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":3}`)}); problemCode(err) != "connection_lost" {
		t.Errorf("%d bytes: %v", size, err)
	}
	await(t, "the device is thrown out", d.Gone())
	node.Await(t, "it alone was thrown out, as too large", 10*time.Second, func() bool {
		return node.Metric(t, "fleetd_device_disconnects_total", `reason="too_large"`) == 1 && node.Ready(t) == 2
	})
}

var (
	endpoint = regexp.MustCompile(`^[a-z0-9.-]+:[0-9]{1,5}$`)
	version  = regexp.MustCompile(`^[0-9]+(\.[0-9]+)*$`)
)

// No setting and no device makes an OTA reply that a device could not survive.
func TestTrap15OTAReplies(t *testing.T) {
	t.Parallel()
	for name, flags := range map[string][]string{
		"default":     nil,
		"WebSocket":   {"--transport", "websocket"},
		"approval":    {"--admission", "approve"},
		"given names": {"--public-mqtt", "mqtt.example.org", "--public-device-url", "https://devices.example.org", "--mqtt-keepalive", "3600"},
		"MQTT off":    {"--mqtt", "off"},
	} {
		t.Run(name, func(t *testing.T) {
			node := programs.Start(t, flags...)
			ota := "http://" + node.Setting("--device-listen") + "/xiaozhi/ota/"
			for i, body := range []string{`{"version":2,"application":{"version":"2.4.2"},"board":{"ssid":"home"}}`, `{"version":2,"application":{"version":"v2.4-dirty"},"board":{"ssid":"my "home""}}`,
				"", "null", "[1]", `{"application":{"version":"` + strings.Repeat("9", 3000) + `"},"board":{"name":"` + strings.Repeat("x", 5000) + `"}}`} {
				id := fmt.Sprintf("02:00:00:00:15:%02x", i)
				for _, variant := range []string{"", "ws/"} {
					r, status := checkIn(t, ota+variant, id, body)
					again, _ := checkIn(t, ota+variant, id, body)
					if status != http.StatusOK {
						t.Errorf("%.40q: %d %s", body, status, r.raw)
						continue
					}
					if (r.MQTT != nil) == (r.WebSocket != nil) || strings.Count(r.raw, `"mqtt"`)+strings.Count(r.raw, `"websocket"`) != 1 {
						t.Errorf("%.40q: not one transport: %s", body, r.raw)
					}
					if m := r.MQTT; m != nil && (!endpoint.MatchString(m.Endpoint) && m.Endpoint != "mqtt.example.org" || m.Keepalive <= 0 || *again.MQTT != *m) {
						t.Errorf("%.40q: MQTT section %+v, then %+v", body, m, again.MQTT)
					}
					if w := r.WebSocket; w != nil && (!strings.HasPrefix(w.URL, "ws") || strings.Contains(w.URL, "[") || *again.WebSocket != *w) {
						t.Errorf("%.40q: WebSocket section %+v, then %+v", body, w, again.WebSocket)
					}
					if f := r.Firmware; f != nil && (!version.MatchString(f.Version) || string(f.Force) != "" && string(f.Force) != "0" && string(f.Force) != "1") {
						t.Errorf("%.40q: firmware section %+v", body, f)
					}
					if (r.Activation != nil) != (name == "approval") || len(r.raw) > 6<<10 || !strings.Contains(r.raw, `"server_time":{"timestamp":`) {
						t.Errorf("%.40q: %s", body, r.raw)
					}
				}
			}
		})
	}
	for _, flags := range [][]string{{"--public-mqtt", "mqtt://h:1883"}, {"--public-mqtt", "tcp://h"}, {"--public-mqtt", "[::1]:1883"},
		{"--public-mqtt", "h:1883:1"}, {"--public-host", "::1"}, {"--public-host", "http://h"},
		{"--public-udp", "[::1]:8884"}, {"--public-device-url", "http://[::1]:8000"}} {
		out, err := exec.CommandContext(t.Context(), programs.Fleetd, append([]string{"serve", "--data-dir", t.TempDir(), "--device-listen", "127.0.0.1:0", "--api-listen", "127.0.0.1:0",
			"--mqtt-listen", "127.0.0.1:0", "--udp-listen", "127.0.0.1:0"}, flags...)...).CombinedOutput()
		if err == nil || !strings.Contains(string(out), flags[0]) || strings.Count(strings.TrimSpace(string(out)), "\n") > 2 {
			t.Errorf("%v: %v\n%s", flags, err, out)
		}
	}
}
