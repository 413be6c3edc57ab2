package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"fleetd/internal/access"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/devices/session"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
	"fleetd/internal/jsontest"
	"fleetd/internal/natstest"
)

const id = devices.ID("02:00:00:00:00:01")

// testFleet is two nodes on one real NATS server.
type testFleet struct {
	mint         *credential.Mint
	client       *nats.Conn
	holder, far  *Link
	holding, fwd *fleet.Service
	ports        *devicetest.Ports
}

func newFleet(t *testing.T) *testFleet {
	t.Helper()
	return newFleetWith(t, fleet.Config{CallsPerDevice: 1, Handshakes: 4})
}

func newFleetWith(t *testing.T, cfg fleet.Config) *testFleet {
	t.Helper()
	s := startNATS(t, server.ClusterOpts{})
	return newFleetOn(t, cfg, s, s)
}

// startNATS starts a server.
func startNATS(t *testing.T, cluster server.ClusterOpts, routes ...*url.URL) *server.Server {
	t.Helper()
	return natstest.Start(t, server.Options{Cluster: cluster, Routes: routes})
}

// newFleetOn returns two nodes, each on one of two servers.
func newFleetOn(t *testing.T, cfg fleet.Config, holder, far *server.Server) *testFleet {
	t.Helper()
	connect := func(s *server.Server) *nats.Conn {
		nc, err := nats.Connect(s.ClientURL(), nats.NoEcho())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		return nc
	}
	f := &testFleet{client: connect(holder)}
	var err error
	if f.mint, err = credential.New([]byte("a secret for tests only")); err != nil {
		t.Fatal(err)
	}
	f.ports = devicetest.New() // one database for both
	node := func(name string, s *server.Server) (*Link, *fleet.Service) {
		log := slog.New(slog.DiscardHandler)
		conn := connect(s)
		link := New(Options{Conn: conn, Prefix: "test.v1", Node: name, Mint: f.mint, IsConnected: conn.IsConnected, Log: log})
		cfg.Node, cfg.IsNodeAlive = name, func(string) bool { return true }
		peers := link.Peers()
		ports := f.ports.FleetPorts()
		ports.Directory, ports.Router, ports.Peers = link, link, peers
		service := fleet.New(cfg, ports)
		if err := errors.Join(link.Attach(service), peers.Follow(service.Registry()), service.Registry().Start(t.Context())); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { service.Close(); link.Close() })
		return link, service
	}
	f.holder, f.holding = node("holder", holder)
	// A node announces its nonce once when it starts. Its server drops the announcement as long as it does not know
	// the subscriptions of the other server.
	devicetest.Eventually(t, "the second server has the subscriptions of the first node", func() bool {
		return far.GlobalAccount().SubscriptionInterest(f.holder.nodeSubject(verbNews, "far"))
	})
	f.far, f.fwd = node("far", far)
	devicetest.Eventually(t, "the nodes know each other", func() bool { return f.far.peers.has(f.holder.nonce) && f.holder.peers.has(f.far.nonce) })
	if err := errors.Join(f.holder.opt.Conn.Flush(), f.far.opt.Conn.Flush()); err != nil {
		t.Fatal(err)
	}
	return f
}

// script is a connection that answers at once.
type script struct {
	*devicetest.Script
	session *session.Session

	mu   sync.Mutex
	got  []string // messages and audio, as they came
	made time.Time
}

// age is how long the connection has existed.
func (c *script) age() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.made.IsZero() {
		c.made = time.Now()
	}
	return time.Since(c.made)
}

func (c *script) note(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.got = append(c.got, what)
}

func (c *script) received() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.got)
}

func (c *script) SendControl(msg []byte) error {
	if !bytes.Contains(msg, []byte(`"type":"mcp"`)) {
		c.note(string(msg))
		return nil
	}
	if answer := c.Answer(msg); answer != "" {
		_ = c.session.HandleControl([]byte(answer)) // some tests send invalid answers
	}
	return nil
}
func (c *script) Close(devices.CloseReason) {}

func (f *testFleet) connect(t *testing.T, s *devicetest.Script) *session.Session {
	t.Helper()
	return f.dial(t, s).session
}

func (f *testFleet) dial(t *testing.T, s *devicetest.Script) *script {
	t.Helper()
	c := &script{Script: s}
	session, err := f.holding.Accept(devices.Identity{Device: id, ClientID: "c", Transport: devices.TransportWebSocket}, c)
	if err != nil {
		t.Fatal(err)
	}
	c.session = session
	session.StartMCP(devices.FeaturesMCP)
	devicetest.Eventually(t, "tools are ready", func() bool {
		v, err := f.holding.Get(t.Context(), id)
		return err == nil && v.CatalogState == devices.CatalogReady
	})
	if err := f.holder.opt.Conn.Flush(); err != nil {
		t.Fatal(err)
	}
	return c
}

func code(err error) devices.Code {
	if err == nil {
		return ""
	}
	return devices.AsError(err).Code
}

// Every outcome is the same on the holder and one hop away.
func TestRoutedAnswersEqualLocalOnes(t *testing.T) {
	f := newFleet(t)
	s := devicetest.NewScript()
	answers := map[string]string{"fails": `"error":{"message":"a \"quoted\" reason"}`, "unknown": `"error":{"message":"Unknown tool: x"}`,
		"odd": `"result":{}`, "errs": `"result":{"content":[{"type":"text","text":"no"}],"isError":true}`}
	s.Tools = `[` + devicetest.Volume + `,{"name":"fails"},{"name":"unknown"},{"name":"odd"},{"name":"errs"},{"name":"silent"},{"name":"self.reboot"}]`
	s.Call = func(tool string, _ json.RawMessage) string {
		if tool == "silent" {
			return ""
		}
		if rest, ok := answers[tool]; ok {
			return rest
		}
		return devicetest.True
	}
	f.connect(t, s)
	for _, c := range []struct{ tool, args string }{{"self.audio_speaker.set_volume", `{"volume":5}`}, {"self.audio_speaker.set_volume", `{"volume":500}`},
		{"nope", `{}`}, {"fails", `{}`}, {"odd", `{}`}, {"errs", `{}`}, {"silent", `{}`}, {"unknown", `{}`}} {
		timeout := 5 * time.Second
		if c.tool == "silent" {
			timeout = 200 * time.Millisecond
		}
		run := func(s *fleet.Service) (devices.ToolResult, error) {
			ctx, cancel := context.WithTimeout(t.Context(), timeout)
			defer cancel()
			return s.CallTool(ctx, devices.ToolCall{Device: id, Tool: c.tool, Arguments: json.RawMessage(c.args), Principal: devicetest.Admin})
		}
		local, localErr := run(f.holding)
		routed, routedErr := run(f.fwd)
		if string(local.Content) != string(routed.Content) || local.IsError != routed.IsError || local.Outcome != routed.Outcome || code(localErr) != code(routedErr) {
			t.Errorf("%s: local %s %v %v, routed %s %v %v", c.tool, local.Content, local.IsError, localErr, routed.Content, routed.IsError, routedErr)
		}
		if localErr != nil {
			l, r := devices.AsError(localErr), devices.AsError(routedErr)
			if l.Sent != r.Sent || l.Outcome != r.Outcome || len(l.Faults) != len(r.Faults) {
				t.Errorf("%s: local %+v, routed %+v", c.tool, l, r)
			}
		} else if routed.Node != "holder" {
			t.Errorf("%s: answered by %q", c.tool, routed.Node)
		}
	}
	rpc, err := f.fwd.CallRPC(t.Context(), devices.RPCCall{Principal: devicetest.Admin, Device: id, Method: "ping"})
	if err != nil || string(rpc.Error) != `{"code":-32000,"message":"Method not implemented: ping"}` {
		t.Errorf("%s, %v", rpc.Error, err)
	}
}

// Every node describes the device as its holder does, and can refresh its tools.
func TestAnyNodeDescribesTheDevice(t *testing.T) {
	f := newFleet(t)
	s := devicetest.NewScript()
	s.Tools = `[` + devicetest.Volume + `]`
	f.connect(t, s)
	if _, err := f.fwd.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: "c", Facts: devices.Facts{Board: "box", Firmware: "2.4.2"}}); err != nil {
		t.Fatal(err)
	}
	local, err := f.holding.Get(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	far, err := f.fwd.Get(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	local.Presence.LastSeen, far.Presence.LastSeen, local.Presence.Seq, far.Presence.Seq = time.Time{}, time.Time{}, 0, 0
	if !reflect.DeepEqual(local.Presence, far.Presence) || local.State != far.State || local.CatalogState != far.CatalogState {
		t.Errorf("the holder reports\n%+v\nthe other node\n%+v", local, far)
	}
	s.Tools = `[` + devicetest.Volume + `,` + devicetest.Reboot + `]`
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	list, err := f.fwd.Refresh(ctx, id, true)
	if err != nil || len(list.Tools) != 2 || list.State != devices.CatalogReady {
		t.Errorf("%+v, %v", list, err)
	}
	if _, err := f.fwd.Refresh(ctx, "02:00:00:00:00:99", true); devices.AsError(err).Code != devices.CodeDeviceUnknown {
		t.Errorf("an unknown device: %v", err)
	}
}

// A device that changes its tools on another node, and back on this one, has
// all three lists in its history; one that only moves adds no entry.
func TestHistoryAcrossNodes(t *testing.T) {
	f := newFleet(t)
	list := func(service *fleet.Service, tools string) {
		t.Helper()
		s := devicetest.NewScript()
		s.Tools = `[` + tools + `]`
		c := &script{Script: s}
		session, err := service.Accept(devices.Identity{Device: id, ClientID: "c", Transport: devices.TransportWebSocket}, c)
		if err != nil {
			t.Fatal(err)
		}
		c.session = session
		session.StartMCP(devices.FeaturesMCP)
		devicetest.Eventually(t, "tools are ready", func() bool {
			v, err := service.Get(t.Context(), id)
			return err == nil && v.CatalogState == devices.CatalogReady
		})
		if err := errors.Join(f.holder.opt.Conn.Flush(), f.far.opt.Conn.Flush()); err != nil {
			t.Fatal(err)
		}
		session.Close(devices.CloseGone)
	}
	x, y := devicetest.Volume, devicetest.Volume+`,`+devicetest.Reboot
	list(f.holding, x)
	list(f.fwd, x) // moves
	list(f.fwd, y)
	list(f.holding, x)
	list(f.fwd, x) // moves
	if _, row, _, _ := f.ports.Of(id); row.Catalog == (devices.Hash{}) {
		t.Error("the row of a device that only moved names no list")
	}
	history, err := f.holding.History(t.Context(), id, 0, 0, 10)
	if err != nil || len(history) != 3 || history[0].Catalog != history[2].Catalog || history[0].Catalog == history[1].Catalog {
		t.Errorf("%+v, %v", history, err)
	}
}

func TestNobodyHoldsTheDevice(t *testing.T) {
	f := newFleet(t)
	if _, err := f.far.Forward(t.Context(), devices.ToolCall{Principal: devicetest.Admin, Device: id, Tool: "x"}); !errors.Is(err, devices.ErrNoHolder) {
		t.Errorf("before: %v", err)
	}
	session := f.connect(t, devicetest.NewScript())
	session.Close(devices.CloseGone)
	if err := f.holder.opt.Conn.Flush(); err != nil {
		t.Fatal(err)
	}
	if _, err := f.far.Forward(t.Context(), devices.ToolCall{Principal: devicetest.Admin, Device: id, Tool: "x"}); !errors.Is(err, devices.ErrNoHolder) {
		t.Errorf("after: %v", err)
	}
	for id, want := range map[devices.ID]devices.Code{id: devices.CodeDeviceOffline, "02:00:00:00:00:99": devices.CodeDeviceUnknown} {
		if _, err := f.fwd.CallTool(t.Context(), devices.ToolCall{Principal: devicetest.Admin, Device: id, Tool: "x"}); code(err) != want {
			t.Errorf("call of %s: %v", id, err)
		}
	}
}

func TestServicesNeedAToken(t *testing.T) {
	f := newFleet(t)
	f.connect(t, devicetest.NewScript())
	body := []byte(`{"tool":"self.audio_speaker.set_volume","arguments":{"volume":5},"timeout":"5s"}`)
	ask := func(verb string, header nats.Header, body []byte) string {
		msg, err := f.client.RequestMsg(&nats.Msg{Subject: "test.v1.cmd." + id.Token() + "." + verb, Header: header, Data: body}, 5*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if p, ok := devices.ParseProblem(msg.Data); ok {
			return string(p.Code)
		}
		return string(msg.Data)
	}
	admin := nats.Header{HeaderToken: {f.mint.AdminToken()}}
	f.holding.Keys().SetAccessTokens(func(string, time.Time) (grant, resource string, err error) { return "grant", "/mcp", nil })
	for _, c := range []struct {
		name, verb string
		header     nats.Header
		body, want string
	}{
		{"no token", "call", nil, string(body), "unauthorized"},
		{"wrong token", "call", nats.Header{HeaderToken: {"x"}}, string(body), "unauthorized"},
		{"token of an application", "call", nats.Header{HeaderToken: {access.AccessPrefix + "x"}}, string(body), "forbidden"},
		{"forged hop", "call", nats.Header{HeaderStamp: {"x"}}, string(body), "unauthorized"},
		{"hop for another verb", "call", nats.Header{HeaderStamp: {f.far.stamp(id, "rpc", f.holder.nonce, "_INBOX.far.1", "", body)}}, string(body), "unauthorized"},
		{"no JSON", "call", admin, "x", "bad_request"},
		{"no tool", "call", admin, "{}", "bad_request"},
		{"bad timeout", "call", admin, `{"tool":"x","timeout":"1h"}`, "bad_request"},
		{"unknown command", "paint", admin, "{}", "bad_request"},
		{"raw request of a service", "rpc", admin, `{"method":"ping"}`, "bad_request"},
		{"request of a node, sent by a service", "view", admin, "{}", "bad_request"},
		{"over the limit", "call", admin, `{"tool":"` + strings.Repeat("x", maxBody) + `"}`, "too_large"},
		{"zero timeout", "call", admin, `{"tool":"x","timeout":"0s"}`, "bad_request"},
	} {
		// security: N1
		if got := ask(c.verb, c.header, []byte(c.body)); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
	r, ok := devices.ParseResult([]byte(ask("call", admin, body)))
	if !ok || string(r.Content) != `[{"type":"text","text":"true"}]` || r.Node != "holder" {
		t.Errorf("%+v", r)
	}
}

// FuzzParse compares with encoding/json, which takes the last of duplicate members.
func FuzzParse(f *testing.F) {
	l := New(Options{})
	for _, data := range []string{`{"tool":"x","arguments":{"a":1},"timeout":"5s"}`, `{"arguments":null,"timeout":5}`, `{"method":"m","params":[1],"confirmation":"c","timeout":"1h"}`,
		`{"tool":"a","tool":5,"arguments":{},"arguments":null,"timeout":""}`, `{"timeout":"-1s"} {}`} {
		f.Add([]byte(data))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		devices.ParseResult(data) // of another node: must not panic
		devices.ParseProblem(data)
		c, _, cancel, err := l.parse(data)
		list, wrong := jsontest.ObjectMembers(data)
		var want command
		for _, member := range list {
			text, _ := member.Text()
			switch member.Key {
			case "tool":
				want.Tool = text
			case "arguments":
				if member.Value != "null" {
					want.Arguments = json.RawMessage(member.Value)
				}
			case "method":
				want.Method = text
			case "params":
				want.Params = json.RawMessage(member.Value)
			case "confirmation":
				want.Confirmation = text
			case "timeout":
				if want.Timeout = text; text == "" {
					want.Timeout = member.Value
				}
			}
		}
		timeout, badTimeout := time.ParseDuration(want.Timeout)
		good := wrong == nil && utf8.Valid(data) && (want.Timeout == "" || badTimeout == nil && timeout > 0 && timeout <= dispatch.MaxTimeout)
		if (err == nil) != good && jsontest.Depth(data) <= 64 {
			t.Fatalf("%q: %v, want %t", data, err, good)
		}
		if err != nil {
			return
		}
		cancel()
		if !reflect.DeepEqual(c, want) {
			t.Errorf("%q is %+v, want %+v", data, c, want)
		}
	})
}
