package restapi

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/explain"
	"fleetd/internal/recorder"
)

// noEvents is an event stream without events.
type noEvents struct{}

func (noEvents) Recent(context.Context, devices.EventQuery, int, func(devices.StreamEvent) bool) ([]devices.StreamEvent, error) {
	return nil, nil
}

// explainer returns an explainer of the fleet over one node's records.
func (f *testFleet) explainer() *explain.Explainer {
	f.recorder = recorder.New("n", recorder.MinMemory)
	return explain.New(explain.Options{Devices: f.service, Records: f.recorder, Events: noEvents{}, Node: "n", Nodes: func() []string { return []string{"n", "away"} },
		Gather: func(context.Context, string, []byte, []string) (map[string][]byte, []string) {
			return nil, []string{"away"}
		}})
}

// keyID returns the id of a key.
func (f *testFleet) keyID(t testing.TB, name string) string {
	t.Helper()
	for _, k := range f.service.Keys().Keys() {
		if k.Name == name {
			return k.ID
		}
	}
	t.Fatal("no key " + name)
	return ""
}

// A key sees records, causes and calls of its own devices alone, and addresses only with
// the scope for changes.
func TestExplainWithinLimits(t *testing.T) {
	f := newFleet(t)
	const near, far = "02:00:00:00:00:01", "02:00:00:00:00:02"
	remote := netip.MustParseAddr("192.0.2.44")
	for _, id := range []devices.ID{near, far} {
		f.put(id, "board", "2.4.2", map[string]string{"room": "room-" + string(id[len(id)-1])})
		f.recorder.Step(devices.Step{Kind: devices.StepRefused, Device: id, Cause: devices.CauseWrongToken, Remote: remote})
	}
	reader, editor := f.key(t, "reader", "events:read", "room=room-1"), f.key(t, "editor", "events:read devices:write", "room=room-1")
	own := f.keyID(t, "reader")
	f.recorder.Call(devices.CallStep{Call: "nearnearnearnear", Device: near, Key: own, Tool: "t", At: time.Now(), Outcome: "device_timeout", Sent: true, Holder: true})
	f.recorder.Call(devices.CallStep{Call: "otherotherother2", Device: near, Key: "another", Tool: "t", At: time.Now(), Outcome: "ok", Holder: true})
	f.recorder.Call(devices.CallStep{Call: "farfarfarfarfarf", Device: far, Key: own, Tool: "t", At: time.Now(), Outcome: "ok", Holder: true})
	get := func(path, token string) response { return f.do(t, http.MethodGet, path, "", as(token)...) }

	for path, want := range map[string]int{
		"/v1/devices/" + near + "/explain":      http.StatusOK,
		"/v1/devices/" + near + "/recording":    http.StatusOK,
		"/v1/devices/" + far + "/explain":       http.StatusNotFound,
		"/v1/devices/" + far + "/recording":     http.StatusNotFound,
		"/v1/devices/02:00:00:00:00:99/explain": http.StatusNotFound,
		"/v1/calls/nearnearnearnear":            http.StatusOK,
		"/v1/calls/nearnearnearnear/explain":    http.StatusOK,
		"/v1/calls/otherotherother2":            http.StatusNotFound,
		"/v1/calls/otherotherother2/explain":    http.StatusNotFound,
		"/v1/calls/farfarfarfarfarf":            http.StatusNotFound,
		"/v1/calls/unknownunknown22":            http.StatusNotFound,
		"/v1/refusals":                          http.StatusForbidden,
	} {
		if got := get(path, reader); got.status != want || got.status == http.StatusOK && strings.Contains(got.body, far) {
			t.Errorf("%s: %d %s, want %d", path, got.status, got.body, want)
		}
	}
	recording := "/v1/devices/" + near + "/recording?kind=connect.refused"
	if got := get(recording, reader).body; strings.Contains(got, remote.String()) || !strings.Contains(got, "wrong_token") {
		t.Errorf("with events:read: %s", got)
	}
	if got := get(recording, editor).body; !strings.Contains(got, remote.String()) {
		t.Errorf("with devices:write: %s", got)
	}
	for path, want := range map[string]string{"/v1/calls/otherotherother2/explain": `"cause":"well"`, "/v1/devices/" + near + "/explain": `"cause":"wrong_token"`,
		"/v1/calls/nearnearnearnear/explain": `"cause":"sent_no_answer"`, "/v1/devices/02:00:00:00:00:99/explain": `"cause":"never_seen"`, "/v1/refusals": `"items":[]`} {
		if got := get(path, f.token).body; !strings.Contains(got, want) || !strings.Contains(got, `"missing":["away"]`) {
			t.Errorf("%s: %s", path, got)
		}
	}
}

// The devices that are offline are explained by page, under a limited key those that it
// covers.
func TestExplainOffline(t *testing.T) {
	f := newFleet(t)
	const many = 2500
	for n := range many {
		id := devices.ID(fmt.Sprintf("02:00:00:00:%02x:%02x", n>>8, n&255))
		f.ports.Put(devices.Member{ID: id, Admission: devices.AdmissionMember, Labels: map[string]string{"room": fmt.Sprint("room-", n%5)}})
		if n%5 == 1 {
			f.recorder.Step(devices.Step{Kind: devices.StepRefused, Device: id, Cause: devices.CauseWrongToken})
		}
	}
	f.connect(t, robot, devicetest.NewScript())
	reader := f.key(t, "reader", "events:read", "room=room-1")
	for _, c := range []struct{ query, token, want string }{
		{"", f.token, "never_seen 2000, wrong_token 500"},
		{"select=room%3Droom-2", f.token, "never_seen 500"},
		{"", reader, "wrong_token 500"},
		{"select=room%3Droom-2", reader, ""},
	} {
		counts, cursor, pages := map[string]int{}, "", 0
		for first := true; first || cursor != ""; first = false {
			got := f.do(t, http.MethodGet, "/v1/explain?limit=1000&"+c.query+"&cursor="+cursor, "", as(c.token)...)
			var page api.OfflineCauses
			if err := json.Unmarshal([]byte(got.body), &page); err != nil || got.status != http.StatusOK || page.Explained > 1000 || !slices.Equal(page.Missing, []string{"away"}) && page.Explained > 0 {
				t.Fatalf("%q: %d %.300s", c.query, got.status, got.body)
			}
			for _, g := range page.Groups {
				counts[g.Cause] += g.Count
			}
			cursor = page.NextCursor
			pages++
		}
		var parts []string
		for _, cause := range slices.Sorted(maps.Keys(counts)) {
			parts = append(parts, fmt.Sprint(cause, " ", counts[cause]))
		}
		if got := strings.Join(parts, ", "); got != c.want || pages > 4 {
			t.Errorf("%q: %s in %d pages, want %s", c.query, got, pages, c.want)
		}
	}
	for query, want := range map[string]int{"select=%21%21": http.StatusBadRequest, "cursor=x": http.StatusBadRequest, "limit=1001": http.StatusBadRequest} {
		if got := f.do(t, http.MethodGet, "/v1/explain?"+query, "", as(f.token)...); got.status != want && got.status != http.StatusUnprocessableEntity {
			t.Errorf("%s: %d %s", query, got.status, got.body)
		}
	}
}
