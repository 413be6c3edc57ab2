package fleettest

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/eclipse/paho.mqtt.golang/packets"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/store/storetest"
)

// balancer is HAProxy with the file that operators get, before nodes of a test.
type balancer struct {
	*apiclient.Client
	token      string
	ota, stats string
}

const balancerFile = "../../deploy/haproxy/haproxy.cfg"

// haproxy finds the program.
func haproxy(t testing.TB) string {
	t.Helper()
	for _, name := range []string{"haproxy", "/usr/sbin/haproxy"} { // of a user without sbin
		if program, err := exec.LookPath(name); err == nil {
			return program
		}
	}
	t.Skip(storetest.NotRun + "no haproxy on this machine")
	return ""
}

// addresses are where a balancer listens.
type addresses struct{ device, mqtt, api, stats string }

func balancerAddresses(t testing.TB) addresses {
	return addresses{freePort(t), freePort(t), freePort(t), freePort(t)}
}

// balance runs HAProxy before three nodes until the test ends.
func balance(t *testing.T, at addresses, nodes []*Node) balancer {
	t.Helper()
	program := haproxy(t)
	env := append(os.Environ(), "MAXCONN=1000", "LISTEN_DEVICE="+at.device, "LISTEN_MQTT="+at.mqtt, "LISTEN_API="+at.api, "LISTEN_STATS="+at.stats)
	for i, n := range nodes {
		for name, flag := range map[string]string{"DEVICE": "--device-listen", "MQTT": "--mqtt-listen", "API": "--api-listen"} {
			env = append(env, fmt.Sprintf("NODE_%d_%s=%s", i+1, name, n.Setting(flag)))
		}
	}
	check := exec.Command(program, "-c", "-f", balancerFile)
	check.Env = env
	if out, err := check.CombinedOutput(); err != nil || strings.Contains(string(out), "WARNING") {
		t.Fatalf("haproxy -c: %v\n%s", err, out)
	}
	log := &Output{}
	process := exec.Command(program, "-db", "-f", balancerFile)
	process.Env, process.Stdout, process.Stderr = env, log, log
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = process.Process.Kill()
		_ = process.Wait() // killed
		if t.Failed() {
			t.Logf("log of haproxy:\n%s", tail(log.String(), 4000))
		}
	})
	token, err := os.ReadFile(filepath.Join(nodes[0].Dir, "admin-token"))
	if err != nil {
		t.Fatal(err)
	}
	client, err := apiclient.New("http://"+at.api, strings.TrimSpace(string(token)))
	if err != nil {
		t.Fatal(err)
	}
	b := balancer{client, strings.TrimSpace(string(token)), "http://" + at.device + "/xiaozhi/ota/", "http://" + at.stats + "/;csv"}
	nodes[0].Await(t, "the balancer sees its nodes", 10*time.Second, func() bool { return b.up() == backends*len(nodes) })
	return b
}

// backends of the file: device, websocket, mqtt, mcp and api.
const backends = 5

// hostsStay opens sessions of MCP hosts through the balancer: each request of
// one finds the node that has it.
func hostsStay(t *testing.T, b balancer, at addresses) {
	t.Helper()
	on := map[string]int{}
	for range 9 {
		client := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, nil)
		session, err := client.Connect(t.Context(), &mcp.StreamableClientTransport{Endpoint: "http://" + at.api + "/mcp",
			HTTPClient: &http.Client{Transport: withToken{b.token}}}, &mcp.ClientSessionOptions{ProtocolVersion: "2025-06-18"})
		if err != nil {
			t.Errorf("a host through the balancer: %v", err)
			continue
		}
		defer session.Close()
		for range 5 {
			if _, err := session.ListTools(t.Context(), nil); err != nil {
				t.Errorf("session %s: %v", session.ID(), err)
			}
		}
		node, _, _ := strings.Cut(session.ID(), ".")
		on[node]++
	}
	if len(on) < 2 {
		t.Errorf("all sessions are on one node: %v", on)
	}
}

// up counts servers that get connections, in all backends.
func (b balancer) up() (up int) {
	response, err := http.Get(b.stats)
	if err != nil {
		return 0
	}
	defer func() { _ = response.Body.Close() }()
	rows, err := csv.NewReader(response.Body).ReadAll()
	if err != nil {
		return 0
	}
	const server, status = 1, 17 // columns
	for _, row := range rows {
		if strings.HasPrefix(row[server], "node-") && strings.HasPrefix(row[status], "UP") {
			up++
		}
	}
	return up
}

// online are the devices that are ready, by node.
func (b balancer) online(t testing.TB) (total int, byNode map[string][]api.Device) {
	t.Helper()
	byNode = map[string][]api.Device{}
	list, err := apiclient.Collect(b.Devices(t.Context(), nil))
	if err != nil {
		return 0, nil
	}
	for _, d := range list {
		if d.State == "online" && d.MCP.CatalogState == "ready" {
			total++
			byNode[d.Node] = append(byNode[d.Node], d)
		}
	}
	return total, byNode
}

// get requests a path of the devices' address.
func get(t testing.TB, url string, header http.Header) (status int, body string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), "GET", url, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header = header
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	content, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(content)
}

// Three nodes behind the balancer of deploy/haproxy: devices know one address,
// audio goes to the node that holds its device, the database may be away, and
// a node that stops or dies leaves its devices to the others.
func TestBalancedFleet(t *testing.T) {
	long(t)
	t.Parallel()
	haproxy(t)
	db := storetest.Postgres(t)
	url, prefix, _, _ := natsServer(t)
	database := storetest.NewProxy(t, db.Address(t))
	database.Start()
	at := balancerAddresses(t)
	var nodes []*Node
	for i := range 3 {
		nodes = append(nodes, programs.Start(t, "--database", db.Via(t, database.Address()), "--nats", url, "--nats-prefix", prefix,
			"--secret", "one fleet, one secret", "--node", fmt.Sprintf("node-%d", i+1), "--drain-window", "3s", "--trusted-proxies", "127.0.0.1", "--proxy-protocol", "on",
			"--photo-limit", "64MiB", "--event-limit", "64MiB", "--notification-limit", "64MiB", "--public-device-url", "http://"+at.device, "--public-mqtt", at.mqtt))
	}
	fleet := balance(t, at, nodes)
	const each, all = 9, 18
	overMQTT := programs.Simulate(t, fleet.ota, "--devices", fmt.Sprint(each), "--talk", "--wake", "6s", "--utterance", "1s", "--reconnect", "1s", "--seed", "1")
	overWebSocket := programs.Simulate(t, fleet.ota, "--transport", "websocket", "--devices", fmt.Sprint(each), "--mac-base", "02:aa:00:00:00:00", "--wake", "2s", "--seed", "2")
	allReady := func() bool {
		total, _ := fleet.online(t)
		return total == all
	}
	nodes[0].Await(t, "the fleet is ready", 30*time.Second, allReady)
	for _, n := range nodes {
		name := n.Setting("--node")
		n.Await(t, name+" holds devices of both transports", 10*time.Second, func() bool { // rows may be on their way
			_, byNode := fleet.online(t)
			count := map[string]int{}
			for _, d := range byNode[name] {
				count[d.Transport]++
			}
			return count["mqtt"] > 0 && count["websocket"] > 0
		})
		n.Await(t, "audio reaches the node that holds the device", 20*time.Second, func() bool { return n.Metric(t, "fleetd_udp_packets_total", `"accepted"`) > 20 })
		if lost := n.Metric(t, "fleetd_udp_packets_total", `"unknown_ssrc"`); lost != 0 {
			t.Errorf("%s got %v packets of other nodes' devices", name, lost)
		}
	}
	called := func(what string) {
		t.Helper()
		_, byNode := fleet.online(t)
		for name, devices := range byNode {
			for _, d := range devices {
				r, err := fleet.Call(t.Context(), d.ID, volume, apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":9}`), Timeout: 5 * time.Second})
				if err != nil || r.IsError || r.Node != name {
					t.Errorf("%s: a call for %s on %s: %+v, %v", what, d.ID, name, r, err)
				}
			}
		}
	}
	called("all well")
	hostsStay(t, fleet, at)
	if status, body := get(t, "http://"+at.device+"/readyz", nil); status != http.StatusNotFound {
		t.Errorf("a path that is not the devices': %d %s", status, body)
	}

	member, err := nodes[1].Device(t.Context(), "02:f1:ee:00:00:01")
	if err != nil {
		t.Fatal(err)
	}

	// The database goes away for longer than it takes the balancer to give a server up.
	database.Stop()
	nodes[0].Await(t, "the API side reports it", 20*time.Second, func() bool {
		status, _ := get(t, nodes[0].Info.API+"/readyz", nil)
		return status == http.StatusServiceUnavailable
	})
	time.Sleep(6 * time.Second)
	if up := fleet.up(); up != backends*len(nodes) {
		t.Errorf("without the database %d servers of %d are up", up, backends*len(nodes))
	}
	for range 6 {
		if status, body := get(t, fleet.ota, http.Header{"Device-Id": {member.ID}, "Client-Id": {member.ClientID}}); status != http.StatusOK || !strings.Contains(body, at.mqtt) {
			t.Errorf("a member's OTA check without the database: %d %s", status, body)
		}
		if status, body := get(t, fleet.ota, http.Header{"Device-Id": {"02:dd:00:00:00:00"}, "Client-Id": {"new"}}); status != http.StatusServiceUnavailable {
			t.Errorf("the OTA check of an unknown device without the database: %d %s", status, body)
		}
		if r, err := fleet.Call(t.Context(), "02:f1:ee:00:00:01", volume, apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":9}`), Timeout: 5 * time.Second}); err != nil || r.IsError {
			t.Errorf("a call without the database: %+v, %v", r, err)
		}
	}
	database.Start()
	nodes[0].Await(t, "the database is back", 20*time.Second, allReady)

	// A node that stops lets its devices go; one that dies loses them.
	_ = nodes[1].process.Process.Signal(syscall.SIGTERM)
	nodes[0].Await(t, "the devices of the stopping node are elsewhere", 30*time.Second, func() bool {
		total, byNode := fleet.online(t)
		return total == all && len(byNode["node-2"]) == 0
	})
	called("one node stopped")
	nodes[0].Kill(t)
	nodes[2].Await(t, "the devices of the dead node are elsewhere", 30*time.Second, func() bool {
		total, byNode := fleet.online(t)
		return total == all && len(byNode["node-3"]) == all
	})
	called("one node left")
	nodes[2].Await(t, "the balancer has given the others up", 10*time.Second, func() bool { return fleet.up() == backends })
	for _, s := range []*Simulation{overMQTT, overWebSocket} {
		r := s.Report(t)
		if r.Totals.Crashes != 0 || r.Totals.DuplicateCallIDs != 0 {
			t.Errorf("%+v", r.Totals)
		}
		// A node that stops does not answer new devices, so that the balancer sends them elsewhere at once.
		if refused := r.Totals.CONNACKCodes["3"]; refused != 0 {
			t.Errorf("%d connections were sent away for 10 seconds", refused)
		}
	}
}

// Through the balancer each device has an OTA limit of its own, which nothing
// it writes changes.
func TestBalancerTellsAddresses(t *testing.T) {
	t.Parallel()
	at := balancerAddresses(t)
	haproxy(t)
	node := programs.Start(t, "--trusted-proxies", "127.0.0.1", "--proxy-protocol", "on", "--ota-rate", "1", "--ota-burst", "2", "--public-device-url", "http://"+at.device)
	fleet := balance(t, at, []*Node{node, node, node})
	ask := func(source, claimed string) int {
		t.Helper()
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}}
		client := http.Client{Transport: &http.Transport{DialContext: dialer.DialContext, DisableKeepAlives: true}}
		r, err := http.NewRequestWithContext(t.Context(), "GET", fleet.ota, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header = http.Header{"Device-Id": {"02:dd:00:00:00:00"}, "Client-Id": {"c"}, "X-Forwarded-For": {claimed}}
		response, err := client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		_ = response.Body.Close() // the status is enough
		return response.StatusCode
	}
	for i, want := range []int{200, 200, 429} {
		if got := ask("127.0.0.8", fmt.Sprintf("198.51.100.%d", i)); got != want {
			t.Errorf("check %d of one device: %d, want %d", i, got, want)
		}
	}
	if got := ask("127.0.0.9", "198.51.100.0"); got != 200 {
		t.Errorf("another device: %d", got)
	}
	// Over MQTT, too.
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP("127.0.0.77")}}
	c, err := dialer.DialContext(t.Context(), "tcp", at.mqtt)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	connect := packets.NewControlPacket(packets.Connect).(*packets.ConnectPacket)
	connect.ProtocolName, connect.ProtocolVersion, connect.CleanSession, connect.ClientIdentifier = "MQTT", 4, true, "020000000001"
	if err := connect.Write(c); err != nil {
		t.Fatal(err)
	}
	node.Await(t, "the node's log has the address of the device", 10*time.Second, func() bool { return strings.Contains(node.Log.String(), "127.0.0.77") })
}

// A client that guesses tokens through the balancer is slowed down by its address,
// which is what the audit has, whatever it writes.
func TestBalancerTellsWhoGuesses(t *testing.T) {
	t.Parallel()
	at := balancerAddresses(t)
	haproxy(t)
	node := programs.Start(t, "--trusted-proxies", "127.0.0.0/8", "--proxy-protocol", "on")
	balance(t, at, []*Node{node, node, node})
	guess := func(source string, i int) int {
		t.Helper()
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}}
		client := http.Client{Transport: &http.Transport{DialContext: dialer.DialContext, DisableKeepAlives: true}}
		r, err := http.NewRequestWithContext(t.Context(), "GET", "http://"+at.api+"/v1/devices", nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header = http.Header{"Authorization": {"Bearer guess-" + fmt.Sprint(i)}, "X-Forwarded-For": {fmt.Sprintf("198.51.100.%d", i)}}
		response, err := client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		_ = response.Body.Close() // the status is enough
		return response.StatusCode
	}
	for i := range 20 {
		if got := guess("127.0.0.8", i); got != http.StatusUnauthorized {
			t.Fatalf("guess %d: %d", i, got)
		}
	}
	// security: N34
	if got := guess("127.0.0.8", 20); got != http.StatusTooManyRequests {
		t.Errorf("one guess too many: %d", got)
	}
	if got := guess("127.0.0.9", 0); got != http.StatusUnauthorized {
		t.Errorf("somebody else: %d", got)
	}
	from := map[string]bool{}
	node.Await(t, "the guesses are in the audit", 10*time.Second, func() bool {
		for e, err := range apiclient.List[api.AuditEntry](t.Context(), node.Client, nil, "audit") {
			if err != nil {
				t.Fatal(err)
			}
			from[e.From] = true
		}
		return from["127.0.0.8"]
	})
	for addr := range from {
		// security: N34
		if strings.HasPrefix(addr, "198.51.100.") {
			t.Errorf("the audit has %s, which the client wrote", addr)
		}
	}
}
