package fleettest

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/nats-io/nats.go"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

const status = "self.get_device_status"

// interfaces are the ways to call a tool with an API key. Each returns the code
// and rule of a refusal, and `ok` for an answer.
type interfaces struct {
	node    *Node
	gateway string // host:port
	bus     *nats.Conn
	token   string
}

func (d *interfaces) all() map[string]func(t *testing.T, device, tool, arguments string) (code, rule string) {
	return map[string]func(t *testing.T, device, tool, arguments string) (code, rule string){
		"rest": d.rest, "raw": d.raw, "nats": d.nats, "gateway": d.console, "cli": d.cli, "mcp": d.mcp}
}

func outcomeOf(t *testing.T, body []byte) (code, rule string) {
	t.Helper()
	var p struct{ Code, Rule string }
	if err := json.Unmarshal(body, &p); err != nil {
		t.Fatalf("%v in %q", err, body)
	}
	if p.Code == "" {
		return "ok", ""
	}
	return p.Code, p.Rule
}

func (d *interfaces) post(t *testing.T, url, body string) (*http.Response, []byte) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+d.token)
	r.Header.Set("Content-Type", "application/json")
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	content, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer, content
}

func (d *interfaces) rest(t *testing.T, device, tool, arguments string) (code, rule string) {
	_, body := d.post(t, d.node.Info.API+"/v1/devices/"+device+"/tools/"+tool+"/call", `{"arguments":`+arguments+`}`)
	return outcomeOf(t, body)
}

func (d *interfaces) raw(t *testing.T, device, tool, arguments string) (code, rule string) {
	_, body := d.post(t, d.node.Info.API+"/v1/devices/"+device+"/mcp", fmt.Sprintf(`{"method":"tools/call","params":{"name":%q,"arguments":%s}}`, tool, arguments))
	return outcomeOf(t, body)
}

func (d *interfaces) nats(t *testing.T, device, tool, arguments string) (code, rule string) {
	m := nats.NewMsg("fleetd.v1.cmd." + strings.ReplaceAll(device, ":", "") + ".call")
	m.Header.Set("Fleetd-Token", d.token)
	m.Data = fmt.Appendf(nil, `{"tool":%q,"arguments":%s}`, tool, arguments)
	answer, err := d.bus.RequestMsg(m, 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	return outcomeOf(t, answer.Data)
}

// console has no rules: its answers have a code alone.
func (d *interfaces) console(t *testing.T, device, tool, arguments string) (code, rule string) {
	id := strings.ReplaceAll(device, ":", "_")
	answer, _ := d.post(t, "http://"+d.gateway+"/api/commands/GID@@@"+id+"@@@"+id, fmt.Sprintf(`{"type":"mcp","payload":{"method":"tools/call","params":{"name":%q,"arguments":%s}}}`, tool, arguments))
	return answer.Header.Get("X-Fleetd-Code"), ""
}

func (d *interfaces) cli(t *testing.T, device, tool, arguments string) (code, rule string) {
	_, errs, status := d.node.Command(t, "call", device, tool, "--args", arguments, "--api", d.node.Info.API, "--token", d.token)
	if status == 0 {
		return "ok", ""
	}
	if status != 2 {
		t.Errorf("fleetd call ends with %d: %s", status, errs)
	}
	last := errs[strings.LastIndex(errs, "(")+1:]
	code, rule, _ = strings.Cut(strings.TrimSuffix(strings.TrimSpace(last), ")"), ", rule ")
	return code, rule
}

// mcp is a host of a language model.
func (d *interfaces) mcp(t *testing.T, device, tool, arguments string) (code, rule string) {
	client := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, nil)
	session, err := client.Connect(t.Context(), &mcp.StreamableClientTransport{Endpoint: d.node.Info.API + "/mcp",
		HTTPClient: &http.Client{Transport: withToken{d.token}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	var answer struct {
		Error struct{ Code, Rule string }
	}
	callMCP(t, session, "call_device_tool", map[string]any{"device": device, "tool": tool, "arguments": json.RawMessage(arguments)}, &answer)
	if answer.Error.Code == "" {
		return "ok", ""
	}
	return answer.Error.Code, answer.Error.Rule
}

// A key for one room and reading tools is refused everything else, the same on
// every way in and on whichever node, and each refusal is in the audit with the
// rule that decided. Revoked on one node it is not valid on the other, at
// once, with the database away too.
func TestAKeyIsTheSameOnEveryWay(t *testing.T) {
	t.Parallel()
	c := programs.StartCluster(t, ClusterOptions{Nodes: 2, Args: []string{"--drain-window", "1s"}})
	a, b := c.Nodes[0], c.Nodes[1]
	gateway := freePort(t)
	a.Stop(t)
	a.args = append(a.args, "--gateway-api-listen", gateway, "--gateway-signature-key", gatewayKey)
	a.Run(t)
	programs.Simulate(t, c.OTA+"mqtt/", "--devices", "4", "--mac-base", "02:ac:ce:55:00:00", "--profile", "fw-2.4")
	c.AwaitReady(t, 4, 40*time.Second)
	var lab, hall string
	for i, d := range a.List(t) {
		room := map[string]*string{"room": new([]string{"lab", "hall"}[i%2])}
		if _, err := a.Patch(t.Context(), d.ID, api.DeviceEdit{Labels: room}, 0); err != nil {
			t.Fatal(err)
		}
		if i%2 == 0 {
			lab = d.ID
		} else {
			hall = d.ID
		}
	}
	create := func(name string) string {
		t.Helper()
		out, errs, status := a.Command(t, "keys", "create", "--name", name, "--scope", "tools:call,devices:read", "--devices", "room=lab", "--tools", "*get_*", "--expires", "1h")
		if status != 0 || strings.Count(out, "\n") != 1 {
			t.Fatalf("%d %s %s", status, out, errs)
		}
		return strings.TrimSpace(out)
	}
	token, spare := create("lab"), create("spare")
	bus, err := nats.Connect("nats://" + c.NATS[1].Address())
	if err != nil {
		t.Fatal(err)
	}
	defer bus.Close()
	ways := &interfaces{node: a, gateway: gateway, bus: bus, token: token}

	b.Await(t, "the other node has key and labels", 10*time.Second, func() bool {
		code, _ := (&interfaces{node: b, token: token}).rest(t, lab, status, `{}`)
		return code == "ok"
	})
	type refusal struct{ via, device, tool, code, rule string }
	var want []refusal
	for name, call := range ways.all() {
		if code, rule := call(t, lab, status, `{}`); code != "ok" {
			t.Errorf("%s: what the key is for is refused: %s %s", name, code, rule)
		}
		for _, tc := range []struct{ device, tool, arguments, code, rule string }{
			{lab, volume, `{"volume":9}`, "tool_denied", "key-tools"},
			{lab, "self.reboot", `{}`, "tool_denied", "key-tools"},
			{hall, status, `{}`, "forbidden", "key-devices"},
			{hall, volume, `{"volume":9}`, "forbidden", "key-devices"},
			{"02:ac:ce:55:ff:ff", status, `{}`, "forbidden", "key-devices"}, // there is none
		} {
			if name == "nats" && strings.HasSuffix(tc.device, "ff:ff") {
				continue // no responders, which NATS itself reports
			}
			code, rule := call(t, tc.device, tc.tool, tc.arguments)
			// security: K3 R2
			if code != tc.code || rule != tc.rule && name != "gateway" {
				t.Errorf("%s: %s of %s: %s by %q, want %s by %q", name, tc.tool, tc.device, code, rule, tc.code, tc.rule)
			}
			via := name
			if name == "cli" {
				via = "rest"
			}
			want = append(want, refusal{via, tc.device, tc.tool, tc.code, tc.rule})
		}
	}
	repeatHop(t, bus, func() {
		for _, n := range c.Nodes { // one of them has to ask the other
			if code, _ := (&interfaces{node: n, token: token}).rest(t, lab, status, `{}`); code != "ok" {
				t.Errorf("a call through each node: %s", code)
			}
		}
	})
	// What is not a call is refused alike.
	reader, err := apiclient.New(b.Info.API, token)
	if err != nil {
		t.Fatal(err)
	}
	if devices, err := apiclient.Collect(reader.Devices(t.Context(), nil)); err != nil || len(devices) != 2 {
		t.Errorf("the key sees %d devices: %v", len(devices), err)
	}
	for _, id := range []string{hall, "02:ac:ce:55:ff:ff"} {
		// security: R2
		if _, err := reader.Device(t.Context(), id); problemCode(err) != "forbidden" {
			t.Errorf("%s: %v", id, err)
		}
	}
	if _, err := reader.Revoke(t.Context(), lab); problemCode(err) != "forbidden" {
		t.Errorf("a reader revokes: %v", err)
	}

	recorded := func(key string) []api.AuditEntry {
		t.Helper()
		entries, err := apiclient.Collect(apiclient.List[api.AuditEntry](t.Context(), b.Client, apiclient.Query{"key": key}, "audit"))
		if err != nil {
			t.Fatal(err)
		}
		return entries
	}
	var missing []refusal
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(200 * time.Millisecond) {
		missing = nil
		entries := recorded("lab")
		for _, w := range want {
			i := slices.IndexFunc(entries, func(e api.AuditEntry) bool {
				return e.Kind == "call" && e.Via == w.via && e.Device == w.device && e.Action == w.tool && e.Outcome == w.code && e.Rule == w.rule
			})
			if i < 0 {
				missing = append(missing, w)
				continue
			}
			entries = slices.Delete(entries, i, i+1)
		}
		if len(missing) == 0 {
			break
		}
	}
	// security: R2
	if len(missing) > 0 {
		t.Errorf("not in the audit: %+v", missing)
	}

	revoke := func(name, token string) {
		t.Helper()
		other := &interfaces{node: b, token: token}
		if code, _ := other.rest(t, lab, status, `{}`); code != "ok" {
			t.Errorf("%s before: %s", name, code)
		}
		if _, errs, status := a.Command(t, "keys", "revoke", name); status != 0 {
			t.Fatal(errs)
		}
		revoked := time.Now()
		for {
			code, _ := other.rest(t, lab, status, `{}`)
			if code == "unauthorized" {
				break
			}
			// security: R2
			if took := time.Since(revoked); took > time.Second {
				t.Fatalf("%s is worth %s on the other node %v after it was revoked", name, code, took)
			}
		}
		t.Logf("%s: refused on the other node after %v", name, time.Since(revoked))
	}
	revoke("lab", token)
	for i, n := range c.Nodes {
		c.SQL[i].Break(0, Cut)
		n.Await(t, "the database is missed", 20*time.Second, func() bool { return n.Metric(t, "fleetd_database_connected") == 0 })
	}
	revoke("spare", spare)
	c.Mend()
	b.Await(t, "the record is whole, and has what happened meanwhile", 30*time.Second, func() bool {
		entries, err := apiclient.Collect(apiclient.List[api.AuditEntry](t.Context(), b.Client, apiclient.Query{"kind": "key"}, "audit"))
		return err == nil && slices.ContainsFunc(entries, func(e api.AuditEntry) bool { return e.Action == "revoke" && strings.HasSuffix(e.Detail, "spare") })
	})
	if stored := c.DB.Count(t, `SELECT count(*) FROM api_keys WHERE revoked_at <> 0`); stored != 2 {
		a.Await(t, "the end of the key is stored", 20*time.Second, func() bool { return c.DB.Count(t, `SELECT count(*) FROM api_keys WHERE revoked_at <> 0`) == 2 })
	}
	if out, errs, status := b.Command(t, "audit", "verify"); status != 0 {
		t.Errorf("%s %s", out, errs)
	}
	a.Stop(t)
	a.Run(t)
	var report api.AuditReport
	b.Await(t, "the third run is in the record", 10*time.Second, func() bool {
		report, err = apiclient.Get[api.AuditReport](t.Context(), b.Client, nil, "audit", "verify")
		return err == nil && report.Runs == 4
	})
	if !report.Intact || report.Dropped != 0 || report.Headless != 0 || len(report.Unended) != 2 { // those that run
		t.Errorf("%+v", report)
	}
	var problem *apiclient.Problem
	if _, err := reader.Device(t.Context(), lab); !errors.As(err, &problem) || problem.Status != 401 {
		t.Errorf("%v", err)
	}
}

// repeatHop records the request of one node to another, and sends the same again: it has
// a stamp alone, and is not valid.
func repeatHop(t *testing.T, bus *nats.Conn, ask func()) {
	t.Helper()
	received, err := bus.SubscribeSync("fleetd.v1.cmd.*.call")
	if err == nil {
		err = bus.Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
	ask()
	hop, err := received.NextMsg(5 * time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if hop.Header.Get("Fleetd-Hop-Stamp") == "" {
		t.Errorf("a hop without a stamp: %q", hop.Header)
	}
	answers, err := bus.SubscribeSync(hop.Reply)
	if err == nil {
		err = errors.Join(received.Unsubscribe(), bus.PublishMsg(hop))
	}
	if err != nil {
		t.Fatal(err)
	}
	answer, err := answers.NextMsg(5 * time.Second)
	if err != nil || !strings.Contains(string(answer.Data), `"unauthorized"`) {
		t.Errorf("what one node asked the other, repeated: %s, %v", answer.Data, err)
	}
	if err := answers.Unsubscribe(); err != nil {
		t.Fatal(err)
	}
}
