package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
	"fleetd/internal/selector"
)

// wireMessage is one message between nodes of version 1 of the wire format, in
// testdata/wire/v1. Those files never change: nodes of two versions run side by
// side during every rolling restart. A message may gain members; it may not lose or
// change existing ones.
type wireMessage struct {
	Subject string              `json:"subject,omitempty"`
	Header  map[string][]string `json:"header,omitempty"`
	Body    string              `json:"body"` // to the byte, since it is signed
}

const wireDir = "testdata/wire/v1"

func readWire(t *testing.T, name string) wireMessage {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(wireDir, name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	var m wireMessage
	if err := json.Unmarshal(text, &m); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return m
}

func (m wireMessage) nats() *nats.Msg {
	return &nats.Msg{Subject: m.Subject, Header: m.Header, Data: []byte(m.Body)}
}

var (
	wireTime = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	wireKey  = access.Key{ID: "abcdefgh", Name: "lab agent", Hash: strings.Repeat("ab", 32), Scopes: wireScopes, Devices: selector.FromMap(map[string]string{"room": "lab"}), Tools: []string{"*get_*"},
		Created: wireTime, Expires: wireTime.Add(time.Hour), Revoked: wireTime.Add(time.Minute)}
	wireScopes, _ = access.ParseScopes([]string{"devices:read", "tools:call"})
	wireBy        = access.Principal{Caller: access.NewCaller("abcdefgh", "lab agent", wireScopes, selector.FromMap(map[string]string{"room": "lab"}), []string{"*set_*"}), Via: access.ViaREST, From: "192.0.2.7:4711"}
	wireSpoken    = devices.PendingClient{Device: id, ClientID: "11111111-2222-4333-8444-555555555555", Code: "123456", Challenge: "c"}
)

var (
	wireChanges = []devices.Change{{Revision: 7, ID: "CHANGE7", Device: id, Aspect: devices.AspectName, Value: json.RawMessage(`"lamp"`), Who: "abcdefgh", At: wireTime},
		{Revision: 8, ID: "CHANGE8", Aspect: devices.AspectRotation, Value: json.RawMessage("null"), Who: "abcdefgh", At: wireTime}}
	wireRevocation = registry.Revocation{ID: "REVOKED", Device: id, Who: "abcdefgh", At: wireTime}
	wirePosition   = devices.Position{Lineage: "LINEAGE", Revision: 7, ID: "CHANGE7"}
)

// wireSends are all messages that a node sends to other nodes on its own, or as the
// request of a hop.
var wireSends = map[string]func(ctx context.Context, l *Link){
	"claim-connect": func(_ context.Context, l *Link) {
		l.Claim(devices.Claim{Device: id, Kind: devices.ClaimConnect, Node: "far", Epoch: 1795262400000000})
	},
	"claim-reassert": func(_ context.Context, l *Link) {
		l.Claim(devices.Claim{Device: id, Kind: devices.ClaimReassert, Node: "far", Epoch: 1795262400000001})
	},
	"claim-answer": func(_ context.Context, l *Link) {
		l.Claim(devices.Claim{Device: id, Kind: devices.ClaimAnswer, Node: "far", Epoch: 1795262400000002, Conversation: "abcdefghijklmnop-3"})
	},
	"news-spoken": func(_ context.Context, l *Link) { l.PublishNews(devices.News{Pending: &wireSpoken}) },
	"hop-call-key": func(ctx context.Context, l *Link) {
		_, _ = l.Forward(ctx, devices.ToolCall{Principal: wireBy, Device: id, Tool: "self.audio_speaker.set_volume", Arguments: json.RawMessage(`{"volume":5}`), Confirmation: "CONFIRMED"})
	},
	"news-disputed": func(_ context.Context, l *Link) {
		l.PublishNews(devices.News{Dispute: &devices.DisputeNews{Device: id, Reason: devices.DisputeProof}})
	},
	"claim-generation": func(_ context.Context, l *Link) {
		l.Claim(devices.Claim{Device: id, Kind: devices.ClaimConnect, Node: "far", Epoch: 1795262400000003, Generation: 2})
	},
	"hop-call": func(ctx context.Context, l *Link) {
		_, _ = l.Forward(ctx, devices.ToolCall{Device: id, Tool: "self.audio_speaker.set_volume", Arguments: json.RawMessage(`{"volume":5}`), Principal: devicetest.Admin})
	},
	"hop-rpc": func(ctx context.Context, l *Link) {
		_, _ = l.ForwardRPC(ctx, devices.RPCCall{Device: id, Method: "tools/list", Params: json.RawMessage(`{"cursor":""}`), Principal: devicetest.Admin})
	},
	"changes":     func(_ context.Context, l *Link) { l.Peers().Publish(wireChanges) },
	"revoke":      func(ctx context.Context, l *Link) { l.Peers().Revoke(ctx, wireRevocation) },
	"ask":         func(ctx context.Context, l *Link) { l.Peers().Query(ctx, wirePosition) },
	"hop-view":    func(ctx context.Context, l *Link) { _, _ = l.Query(ctx, id, devices.QueryView) },
	"hop-refresh": func(ctx context.Context, l *Link) { _, _ = l.Query(ctx, id, devices.QueryRefresh) },
	"hop-send": func(ctx context.Context, l *Link) {
		_ = l.ForwardMessage(ctx, devices.Message{Device: id, Body: json.RawMessage(`{"type":"alert","status":"Note","message":"hi","emotion":"happy"}`), Principal: devicetest.Admin})
	},
}

// Messages of this version contain everything that version 1 of the wire format contains.
func TestWireSent(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	messages, err := f.client.SubscribeSync("test.v1.>")
	if err != nil {
		t.Fatal(err)
	}
	if err := f.client.Flush(); err != nil {
		t.Fatal(err)
	}
	for _, name := range slices.Sorted(maps.Keys(wireSends)) {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		wireSends[name](ctx, f.far) // a hop fails: no node answers
		cancel()
		got, err := messages.NextMsg(5 * time.Second)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		want := readWire(t, name)
		if got.Subject != want.Subject {
			t.Errorf("%s: subject %s, want %s", name, got.Subject, want.Subject)
		}
		for header := range want.Header {
			if !slices.Equal(got.Header[header], want.Header[header]) {
				t.Errorf("%s: header %s is %q, want %q", name, header, got.Header[header], want.Header[header])
			}
		}
		has(t, name, got.Data, []byte(want.Body), "timeout")
	}
}

// has checks that got contains every member of want, at every level.
func has(t *testing.T, path string, got, want json.RawMessage, but string) {
	t.Helper()
	var members, all map[string]json.RawMessage
	if json.Unmarshal(want, &members) != nil {
		var a, b any
		if json.Unmarshal(want, &a) != nil || json.Unmarshal(got, &b) != nil || !reflect.DeepEqual(a, b) {
			t.Errorf("%s is %s, want %s", path, got, want)
		}
		return
	}
	if err := json.Unmarshal(got, &all); err != nil {
		t.Errorf("%s is %s, want an object", path, got)
		return
	}
	for name, value := range members {
		if name != but {
			has(t, path+"."+name, all[name], value, but)
		}
	}
}

// members checks that an object has all members of another, whatever their values.
func members(t *testing.T, got []byte, want string) {
	t.Helper()
	var has, all map[string]json.RawMessage
	if err := errors.Join(json.Unmarshal([]byte(want), &all), json.Unmarshal(got, &has)); err != nil {
		t.Fatal(err)
	}
	for name := range all {
		if _, ok := has[name]; !ok {
			t.Errorf("%s has no %q", got, name)
		}
	}
}

// newReceiver returns a fleet whose node receives the recorded messages of another.
func newReceiver(t *testing.T) *testFleet {
	t.Helper()
	f := newFleet(t)
	f.connect(t, devicetest.NewScript())
	labels := map[string]*string{"room": new("lab")} // which one caller is limited to
	if err := f.holding.Edit(t.Context(), devicetest.Admin, id, 0, fleet.Edit{Labels: labels}); err != nil {
		t.Fatal(err)
	}
	return f
}

// Messages of version 1 of the wire format are accepted, also with members that it
// does not have yet.
func TestWireReceived(t *testing.T) {
	for _, more := range []string{"", `,"added_later":{"a":[1]}`} {
		f := newReceiver(t)
		sent := 0
		extended := func(name string) *nats.Msg {
			m := readWire(t, name).nats()
			m.Data = append(m.Data[:len(m.Data)-1:len(m.Data)-1], more+"}"...)
			sent++
			from := "recorded." + strconv.Itoa(sent)
			verb, device := strings.Split(name, "-")[1], id // a stamp has the nonce of its receiver: TestStampOnTheWire has its form
			switch {
			case strings.HasPrefix(name, "claim-"):
				verb = verbClaim
			case strings.HasPrefix(name, "news-"):
				verb, device = verbNews, ""
			}
			if m.Header == nil {
				m.Header = nats.Header{}
			}
			m.Header.Set(HeaderStamp, f.far.stamp(device, verb, f.holder.nonce, from, m.Header.Get(HeaderCaller), m.Data))
			return m
		}
		for _, name := range []string{"hop-call", "hop-call-key", "hop-rpc", "hop-send", "hop-view", "hop-refresh"} {
			answer, err := f.client.RequestMsg(extended(name), 5*time.Second)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if p, ok := devices.ParseProblem(answer.Data); ok {
				t.Errorf("%s%s is refused: %+v", name, more, p)
			}
			if name == "hop-view" {
				members(t, answer.Data, readWire(t, "answer-holding").Body)
			}
		}
		for _, name := range []string{"claim-reassert", "claim-answer", "claim-connect"} {
			f.holder.onClaim(extended(name))
		}
		for _, name := range []string{"news-spoken", "news-disputed"} {
			f.holder.onNews(extended(name))
		}
		if n := f.holder.Refused.Get(devices.CodeUnauthorized); n != 0 {
			t.Errorf("%d messages were refused as forged", n)
		}
		if claims, news := f.holder.Requests.Get(verbClaim), f.holder.Requests.Get(verbNews); claims < 3 || news < 2 {
			t.Errorf("%d claims and %d news were accepted", claims, news)
		}
		if v, err := f.holding.Get(t.Context(), id); err != nil || v.State != devices.StateContested || len(v.Pending) != 1 || v.Pending[0].ClientID != wireSpoken.ClientID {
			t.Errorf("after the news: %+v, %v", v, err)
		}
	}
}

// Messages about the registry of version 1 are parsed.
func TestWireRegistry(t *testing.T) {
	for name, want := range map[string]registryMessage{
		"changes": {Changes: wireChanges},
		"revoke":  {Revocation: &wireRevocation},
		"ask":     {At: &wirePosition},
	} {
		var got registryMessage
		want.Node = "far"
		if err := json.Unmarshal([]byte(readWire(t, name).Body), &got); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
}

// The answers of a hop in version 1.
func TestWireAnswers(t *testing.T) {
	answer := func(name string) []byte { return []byte(readWire(t, name).Body) }
	r, ok := devices.ParseResult(answer("answer-result"))
	if !ok || string(r.Content) != `[{"type":"text","text":"true"}]` || !r.IsError || r.Outcome != "restarting" || r.Duration != 1500*time.Microsecond || r.Node != "near" {
		t.Errorf("result %+v, %t", r, ok)
	}
	has(t, "answer-result", r.AppendResult(nil), answer("answer-result"), "")
	p, ok := devices.ParseProblem(answer("answer-problem"))
	if !ok || p.Code != devices.CodeInvalidArguments || len(p.Faults) != 1 || p.Faults[0].Pointer != "/volume" || !p.Sent || p.Outcome != "unknown" || p.Part != "node" {
		t.Errorf("problem %+v, %t", p, ok)
	}
	has(t, "answer-problem", p.Problem().JSON(), answer("answer-problem"), "")
	has(t, "answer-accepted", acceptedReply, answer("answer-accepted"), "")
	has(t, "answer-sent", okReply, answer("answer-sent"), "")
}

// The holder uses the id that the call got from the node that received it.
func TestCallIDOnAHop(t *testing.T) {
	l := &Link{ctx: t.Context()}
	sent := command{Call: "k5tq2mwaaaaaaaac", Tool: "t", Arguments: json.RawMessage(`{"a":1}`), Timeout: "5s"}
	got, _, cancel, err := l.parse(sent.append(nil))
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if !reflect.DeepEqual(got, sent) {
		t.Errorf("%+v arrived as %+v", sent, got)
	}
}
