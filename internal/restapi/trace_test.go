package restapi

import (
	"bufio"
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/audit"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/trace"
)

// tracer returns a tracer of one node, whose entries stay in the process.
func (f *testFleet) tracer(t testing.TB) *trace.Tracer {
	var mu sync.Mutex
	readers := map[*int]func([]byte){}
	f.traces = trace.New(trace.Options{Node: "n", Log: slog.New(slog.DiscardHandler), Nodes: func() []string { return []string{"n"} },
		Holder: func(string) access.Holder { return access.Holder{Admin: true} },
		Gather: func(context.Context, string, []byte, []string) (map[string][]byte, []string) { return nil, nil },
		Publish: func(_ devices.ID, entry []byte) error {
			mu.Lock()
			defer mu.Unlock()
			for _, deliver := range readers {
				deliver(entry)
			}
			return nil
		},
		Subscribe: func(_ devices.ID, deliver func([]byte)) (func(), error) {
			mu.Lock()
			defer mu.Unlock()
			own := new(int)
			readers[own] = deliver
			return func() {
				mu.Lock()
				defer mu.Unlock()
				delete(readers, own)
			}, nil
		}})
	t.Cleanup(f.traces.Close)
	return f.traces
}

// A key traces devices within its limits, payloads are for administrators, and who begins, reads and ends a trace is in the audit.
func TestTraceOfADevice(t *testing.T) {
	f := newFleet(t)
	const near, far = "02:00:00:00:00:01", "02:00:00:00:00:02"
	for _, id := range []devices.ID{near, far} {
		f.put(id, "board", "2.4.2", map[string]string{"room": "room-" + string(id[len(id)-1])})
	}
	reader := f.key(t, "reader", "events:read", "room=room-1")
	own, other := "/v1/devices/"+near+"/trace", "/v1/devices/"+far+"/trace"
	f.do(t, http.MethodGet, own, "", as(reader)...).problem(t, 404, devices.CodeNotFound)
	f.do(t, http.MethodDelete, own, "", as(reader)...).problem(t, 404, devices.CodeNotFound)
	for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodDelete} {
		// security: N51
		f.do(t, method, other, "", as(reader)...).problem(t, 404, devices.CodeDeviceUnknown)
	}
	for _, method := range []string{http.MethodGet, http.MethodDelete} {
		f.do(t, method, "/v1/devices/02:00:00:00:00:99/trace", "").problem(t, 404, devices.CodeNotFound)
	}
	f.do(t, http.MethodPost, "/v1/devices/02:00:00:00:00:99/trace", "").problem(t, 404, devices.CodeDeviceUnknown)
	for _, lasts := range []string{"soon", "1ms", "25h"} {
		f.do(t, http.MethodPost, own, `{"for":"`+lasts+`"}`, as(reader)...).problem(t, 400, devices.CodeBadRequest)
	}
	// security: N51
	f.do(t, http.MethodPost, own, `{"payload":true}`, as(reader)...).problem(t, 403, devices.CodeForbidden)
	f.do(t, http.MethodPost, own, `{"payload":true}`, as(f.token)...)
	for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodDelete} {
		// security: N51
		f.do(t, method, own, "", as(reader)...).problem(t, 403, devices.CodeForbidden)
	}
	if r := f.do(t, http.MethodDelete, own, "", as(f.token)...); r.status != 204 {
		t.Errorf("%d %s", r.status, r.body)
	}
	var started api.Trace
	r := f.do(t, http.MethodPost, own, "", as(reader)...)
	if err := json.Unmarshal([]byte(r.body), &started); err != nil || r.status != 201 || started.Device != near || started.Payload || time.Until(started.ExpiresAt.Time) < 9*time.Minute {
		t.Fatalf("%d %s", r.status, r.body)
	}

	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, f.url+own, nil)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Authorization", "Bearer "+reader)
	stream, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stream.Body.Close() }()
	if kind := stream.Header.Get("Content-Type"); stream.StatusCode != 200 || !strings.HasPrefix(kind, "text/event-stream") {
		t.Fatalf("%d %s", stream.StatusCode, kind)
	}
	f.traces.Message(near, true, []byte(`{"type":"listen","state":"detect","text":"psst"}`))
	lines := bufio.NewScanner(stream.Body)
	next := func(prefix string) string {
		for lines.Scan() {
			if strings.HasPrefix(lines.Text(), prefix) {
				return lines.Text()
			}
		}
		t.Fatalf("the stream ended before %q: %v", prefix, lines.Err())
		return ""
	}
	if next("event: trace"); !strings.Contains(next("data: "), `"kind":"received","type":"listen"`) {
		t.Errorf("the entry is %s", lines.Text())
	}
	if strings.Contains(lines.Text(), "psst") {
		t.Errorf("an entry without payload has the words: %s", lines.Text())
	}
	calls := f.traces.Recorder(f.recorder)
	refused := devices.CallStep{Call: "othersothersothe", Device: near, Key: "another", Tool: "self.secret.open", Outcome: "tool_denied", Detail: "the key kitchen may call self.light.* only", At: time.Now()}
	calls.Call(refused)
	refused.Key = f.keyID(t, "reader")
	calls.Call(refused)
	if next("event: trace"); strings.Contains(next("data: "), "kitchen") || strings.Contains(lines.Text(), "secret") || strings.Contains(lines.Text(), "others") || !strings.Contains(lines.Text(), "tool_denied") {
		t.Errorf("the entry of the call of another key is %s", lines.Text())
	}
	if next("event: trace"); !strings.Contains(next("data: "), "self.secret.open") {
		t.Errorf("the entry of the reader's call is %s", lines.Text())
	}
	if r := f.do(t, http.MethodDelete, own, "", as(reader)...); r.status != 204 {
		t.Errorf("%d %s", r.status, r.body)
	}
	next("event: end")
	if lines.Scan(); !strings.HasPrefix(lines.Text(), "data: ") {
		t.Errorf("after the end: %s", lines.Text())
	}
	var actions []string
	for _, e := range f.audited(audit.KindDevice) {
		if e.Name == "reader" && e.Outcome == audit.OutcomeOK {
			actions = append(actions, string(e.Action))
		}
	}
	if got := strings.Join(actions, " "); !strings.HasPrefix(got, "trace trace_read trace_end") {
		t.Errorf("in the audit: %s", got)
	}
}

// A reader that leaves renews the trace no longer, so that its lease runs out.
func TestReaderOfATraceLeaves(t *testing.T) {
	f := newFleet(t)
	f.put(robot, "board", "2.4.2", nil)
	path := "/v1/devices/" + string(robot) + "/trace"
	if r := f.do(t, http.MethodPost, path, ""); r.status != http.StatusCreated {
		t.Fatalf("%d %s", r.status, r.body)
	}
	defer f.do(t, http.MethodDelete, path, "") // a reader that has not left would keep the server from closing
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, f.url+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Authorization", "Bearer "+f.token)
	stream, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	if _ = stream.Body.Close(); stream.StatusCode != http.StatusOK {
		t.Fatalf("%d", stream.StatusCode)
	}
	devicetest.Eventually(t, "the reader has left", func() bool {
		return slices.ContainsFunc(f.audited(audit.KindDevice), func(e audit.Entry) bool { return e.Action == actionTraceEnd })
	})
}

// A key without admin neither replaces nor ends the trace of an administrator, with payloads or without, and none of a device
// that is not known.
func TestTraceOfAnAdministrator(t *testing.T) {
	f := newFleet(t)
	f.put(robot, "board", "2.4.2", nil)
	reader := f.key(t, "reader", "events:read", "")
	path := "/v1/devices/" + string(robot) + "/trace"
	if r := f.do(t, http.MethodPost, path, ""); r.status != http.StatusCreated {
		t.Fatalf("%d %s", r.status, r.body)
	}
	// security: N51
	f.do(t, http.MethodPost, path, "", as(reader)...).problem(t, 403, devices.CodeForbidden)
	// security: N51
	f.do(t, http.MethodDelete, path, "", as(reader)...).problem(t, 403, devices.CodeForbidden)
	if r := f.do(t, http.MethodDelete, path, ""); r.status != 204 {
		t.Errorf("%d %s", r.status, r.body)
	}
	if r := f.do(t, http.MethodPost, path, "", as(reader)...); r.status != http.StatusCreated {
		t.Errorf("%d %s", r.status, r.body)
	}
	f.do(t, http.MethodPost, "/v1/devices/nobody/trace", "").problem(t, 404, devices.CodeDeviceUnknown)
}
