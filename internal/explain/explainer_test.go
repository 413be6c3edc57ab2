package explain

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/recorder"
	"fleetd/internal/selector"
)

const lamp devices.ID = "02:00:00:00:00:07"

var admin = access.Principal{Caller: access.Admin}

// core is a fleet of one device, and of a list of them.
type core struct {
	view   devices.View
	err    error
	list   []devices.View // in order of offline_since
	listed int            // pages
	short  int            // a page has at most so many, 0: seven
}

// List answers with short pages.
func (c *core) List(_ context.Context, q devices.ListQuery) (page []devices.View, next string, err error) {
	c.listed++
	after, err := devices.ParseCursor(q.After, q.Sort)
	if err != nil {
		return nil, "", err
	}
	for _, v := range c.list {
		at := devices.Cursor{ID: v.Device.ID}
		if q.Sort == devices.SortOfflineSince {
			at.Number = v.Presence.OfflineSince.UnixMicro()
		}
		if at.Compare(after) <= 0 || !q.Select.Match(&selector.Device{ID: string(v.Device.ID), State: string(v.State), Labels: v.Device.Labels}, now) {
			continue
		}
		if len(page) == min(q.Limit, cmp.Or(c.short, 7)) {
			return page, next, nil
		}
		page = append(page, v)
		at.Sort = cmp.Or(q.Sort, devices.SortID)
		next = at.String()
	}
	return page, "", c.err
}

func (c *core) Get(context.Context, devices.ID) (devices.View, error) { return c.view, c.err }

func (c *core) Permit(context.Context, access.Principal, access.Scope, devices.ID) error { return nil }

// stream is an event stream with one event, or one that does not answer.
type stream struct{ err error }

func (s stream) Recent(context.Context, devices.EventQuery, int, func(*devices.StreamEvent) bool) ([]devices.StreamEvent, error) {
	return []devices.StreamEvent{{Kind: devices.EventOffline, Device: lamp, Data: json.RawMessage(`{"time":"2026-03-01T10:00:00Z","node":"b","reason":"dead"}`)}}, s.err
}

// compute is a place in which an answer is computed at once.
func compute(context.Context) (leave func(), err error) { return func() {}, nil }

// pair returns the explainer of node a, which is queried, and the recorders of both nodes; node c does
// not answer, and node d answers something else.
func pair(c *core, events Events) (x *Explainer, a, b *recorder.Recorder) {
	a, b = recorder.New("a", recorder.MinMemory), recorder.New("b", recorder.MinMemory)
	other := New(Options{Devices: c, Records: b, Events: events, Node: "b", Compute: compute})
	return New(Options{Devices: c, Records: a, Events: events, Node: "a", Nodes: func() []string { return []string{"a", "b", "c", "d"} },
		Gather: func(ctx context.Context, kind string, question []byte, nodes []string) (map[string][]byte, []string) {
			answer, err := other.Answer(ctx, question)
			if err != nil || kind != Question || len(nodes) != 4 {
				panic(err)
			}
			return map[string][]byte{"b": answer, "d": []byte("{")}, []string{"c"}
		}}), a, b
}

// What another node recorded explains a device, with the database and the events away; the
// answer names what it lacks.
func TestExplainWithPartsAway(t *testing.T) {
	x, _, b := pair(&core{err: devices.ErrDatabase}, stream{err: errors.New("away")})
	b.Step(devices.Step{Kind: devices.StepRefused, Device: lamp, Cause: devices.CauseOldToken, Transport: devices.TransportMQTT})
	e, err := x.Device(t.Context(), admin, lamp)
	if err != nil || e.Cause != "old_generation" || e.Certain || e.State != "unknown" || len(e.Evidence) != 1 || e.Evidence[0].Node != "b" {
		t.Errorf("%+v, %v", e, err)
	}
	slices.Sort(e.Missing)
	if want := []string{"c", "d", "database", "events"}; !slices.Equal(e.Missing, want) || len(e.Reach) != 2 {
		t.Errorf("missing %v, reach %v", e.Missing, e.Reach)
	}
	if x.Explained.Get("old_generation") != 1 {
		t.Error("the cause is not counted")
	}
	// One that is connected is so by the records, though its OTA check came first.
	const other devices.ID = "02:00:00:00:00:08"
	b.Step(devices.Step{Proven: true, Kind: devices.StepCheck, Device: other, Cause: devices.CauseOffersMQTT, Transport: devices.TransportMQTT, At: time.Now().Add(-2 * time.Second)})
	b.Step(devices.Step{Proven: true, Kind: devices.StepConnected, Device: other, Transport: devices.TransportMQTT, At: time.Now().Add(-time.Second)})
	if e, err := x.Device(t.Context(), admin, other); err != nil || e.Cause != "well" || e.Certain || !strings.Contains(e.Sentence, "node b") {
		t.Errorf("a connected device: %+v, %v", e, err)
	}
}

// The records of a node that was lost are missing for its devices, also after its lease is gone and nobody asks it; not once
// it has started again.
func TestExplainAfterALostNode(t *testing.T) {
	view := offline("node_lost")
	view.Presence.Node = "lost"
	x := New(Options{Devices: &core{view: view}, Events: stream{}, Node: "a", Nodes: func() []string { return []string{"a"} },
		Gather: func(context.Context, string, []byte, []string) (map[string][]byte, []string) { return nil, nil }})
	if e, err := x.Device(t.Context(), admin, lamp); err != nil || e.Cause != "node_lost" || !slices.Equal(e.Missing, []string{"lost"}) {
		t.Errorf("%+v, %v", e, err)
	}
	view.Presence.Node = "b"
	x, _, _ = pair(&core{view: view}, stream{})
	if e, err := x.Device(t.Context(), admin, lamp); err != nil || e.Cause != "node_lost" || slices.Contains(e.Missing, "b") {
		t.Errorf("the node has started again: %+v, %v", e, err)
	}
}

// A key learns the id of the call that its own waited for only if that was its own, too.
func TestCallBehindAnotherKeys(t *testing.T) {
	x, a, _ := pair(&core{view: online()}, stream{})
	reader := access.Principal{Caller: &access.Caller{Key: "k", Name: "k", Scopes: limited(t, "events:read tools:call", "").Caller.Scopes}}
	const foreign, own = "ffffffffffffffff", "eeeeeeeeeeeeeeee"
	a.Call(devices.CallStep{Call: foreign, Device: lamp, Key: "other", Tool: "t", At: time.Now(), Outcome: "ok"})
	a.Call(devices.CallStep{Call: own, Device: lamp, Key: "k", Tool: "t", At: time.Now(), Outcome: "ok"})
	for call, ahead := range map[string]string{"aaaaaaaaaaaaaaaa": foreign, "bbbbbbbbbbbbbbbb": own, "cccccccccccccccc": "dddddddddddddddd"} {
		a.Call(devices.CallStep{Call: call, Device: lamp, Key: "k", Tool: "t", At: time.Now(), Took: 3 * time.Second, Waited: 2 * time.Second, Ahead: ahead, Outcome: "device_timeout", Holder: true, Held: "a"})
		for by, want := range map[*access.Principal]string{&admin: ahead, &reader: ""} {
			if ahead == own {
				want = own
			}
			c, err := x.Call(t.Context(), *by, call)
			if err != nil || c.Steps[0].Ahead != want {
				t.Errorf("%s shows %+v, %v", by.Key(), c.Steps, err)
			}
			if e, err := x.ExplainCall(t.Context(), *by, call); err != nil || e.Cause != "waited_behind" || strings.Contains(e.Sentence, ahead) != (want != "") {
				t.Errorf("%s: %+v, %v", by.Key(), e, err)
			}
		}
	}
}

// The tool of another key's call is not named to a key that may not read the call.
func TestRestartedByAnotherKeysCall(t *testing.T) {
	view := offline("gone")
	view.Presence.LastSeen = time.Now()
	x, a, _ := pair(&core{view: view}, stream{})
	a.Call(devices.CallStep{Call: "ffffffffffffffff", Device: lamp, Key: "other", Tool: "self.reboot", At: time.Now(), Outcome: "restarting"})
	reader := limited(t, "events:read tools:call", "")
	for by, want := range map[*access.Principal]bool{&admin: true, &reader: false} {
		if e, err := x.Device(t.Context(), *by, lamp); err != nil || e.Cause != "restarting" || strings.Contains(e.Sentence, "self.reboot") != want {
			t.Errorf("%s: %+v, %v", by.Key(), e, err)
		}
	}
}

// Without records, as after a restart of all nodes, the state and the events remain.
func TestExplainWithoutRecords(t *testing.T) {
	x := New(Options{Devices: &core{view: offline("dead")}, Events: stream{}, Node: "a", Nodes: func() []string { return []string{"a"} },
		Gather: func(context.Context, string, []byte, []string) (map[string][]byte, []string) { return nil, nil }})
	e, err := x.Device(t.Context(), admin, lamp)
	if err != nil || e.Cause != "dead" || len(e.Reach) != 0 || len(e.Evidence) != 1 || e.Evidence[0].Text != "dead" || e.Evidence[0].Node != "b" {
		t.Errorf("%+v, %v", e, err)
	}
	if _, err := x.Call(t.Context(), admin, "aaaaaaaaaaaaaaaa"); devices.AsError(err).Code != devices.CodeNotFound {
		t.Errorf("a call that nobody recorded: %v", err)
	}
}

// A call has the records of the node that received it and of the one that holds the device;
// one to a device that is offline has why it is.
func TestCallOverNodes(t *testing.T) {
	x, a, b := pair(&core{view: offline("dead")}, stream{})
	at := time.Now()
	const id, away = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"
	a.Call(devices.CallStep{Call: id, Device: lamp, Key: "k", Tool: "t", At: at, Took: time.Second, Outcome: "device_timeout", Sent: true, Held: "b"})
	b.Call(devices.CallStep{Call: id, Device: lamp, Key: "k", Tool: "t", At: at, Took: time.Second, Outcome: "device_timeout", Sent: true, Holder: true, Held: "b"})
	b.Call(devices.CallStep{Call: id, Device: lamp, Key: "k", Tool: "t", At: at, Took: 3 * time.Second, Outcome: "ok", Holder: true, Late: true, Held: "b"})
	a.Call(devices.CallStep{Call: away, Device: lamp, Key: "k", Tool: "t", At: at, Outcome: "device_offline"})
	c, err := x.Call(t.Context(), admin, id)
	if err != nil || len(c.Steps) != 3 || c.Device != string(lamp) || !slices.Contains(c.Missing, "c") {
		t.Errorf("%+v, %v", c, err)
	}
	if e, err := x.ExplainCall(t.Context(), admin, id); err != nil || e.Cause != "answered_late" || len(e.Evidence) != 3 || e.Well {
		t.Errorf("%+v, %v", e, err)
	}
	if e, err := x.ExplainCall(t.Context(), admin, away); err != nil || e.Cause != "device_offline" || !strings.Contains(e.Sentence, "no power") {
		t.Errorf("%+v, %v", e, err)
	}
	if r, err := x.Log(t.Context(), admin, lamp, kindCall, devices.LogPosition{}, 10); err != nil || len(r.Items) != 3 {
		t.Errorf("%d records of calls, %v", len(r.Items), err) // the first node's record has less than the holder's
	}
	if r, err := x.Log(t.Context(), admin, lamp, "", devices.LogPosition{}, 1); err != nil || len(r.Items) != 1 {
		t.Errorf("with a limit: %+v, %v", r.Items, err)
	}
	if _, err := x.Answer(t.Context(), []byte("{")); err == nil {
		t.Error("a question that is not JSON is answered")
	}
}
