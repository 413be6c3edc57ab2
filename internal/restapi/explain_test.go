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

func (noEvents) Recent(context.Context, devices.EventQuery, int, func(*devices.StreamEvent) bool) ([]devices.StreamEvent, error) {
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
		"/v1/devices/" + near + "/log":          http.StatusOK,
		"/v1/devices/" + far + "/explain":       http.StatusNotFound,
		"/v1/devices/" + far + "/log":           http.StatusNotFound,
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
	log := "/v1/devices/" + near + "/log?kind=connect.refused"
	if got := get(log, reader).body; strings.Contains(got, remote.String()) || !strings.Contains(got, "wrong_token") {
		t.Errorf("with events:read: %s", got)
	}
	if got := get(log, editor).body; !strings.Contains(got, remote.String()) {
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

// A key sees of the calls that others made how they ended, and neither the text of a refusal, which may name a key and its
// limits, nor what was called. An administrator and the key itself see all.
func TestLogOfCallsOfOthers(t *testing.T) {
	f := newFleet(t)
	const device = "02:00:00:00:00:01"
	f.put(device, "board", "2.4.2", map[string]string{"room": "lab"})
	reader := f.key(t, "reader", "events:read", "room=lab")
	refused := devices.CallStep{Call: "othersothersothe", Device: device, Key: "another", Tool: "self.secret.open", At: time.Now(), Outcome: "tool_denied", Rule: "night",
		Detail: "the key kitchen may call self.light.* only", Took: time.Second}
	own := refused
	own.Call, own.Key, own.Tool, own.Detail = "ownownownownowno", f.keyID(t, "reader"), "self.own.open", "the key reader may call self.light.* only"
	for _, c := range []devices.CallStep{refused, own} {
		f.recorder.Call(c)
	}
	for _, path := range []string{"/v1/devices/" + device + "/log", "/v1/devices/" + device + "/explain"} {
		got := f.do(t, http.MethodGet, path, "", as(reader)...).body
		for _, text := range []string{"kitchen", "self.secret.open", "othersothersothe", "night"} {
			if strings.Contains(got, text) {
				t.Errorf("%s shows %q of the call of another key: %s", path, text, got)
			}
		}
		if strings.Count(got, "tool_denied") != 2 || !strings.Contains(got, "self.own.open") {
			t.Errorf("%s: %s", path, got)
		}
		if got := f.do(t, http.MethodGet, path, "", as(f.token)...).body; !strings.Contains(got, "self.secret.open") {
			t.Errorf("%s for an administrator: %s", path, got)
		}
	}
}

// The pages of a log have each record once, whatever the times of the records are, and its former path redirects.
func TestLogIsPaged(t *testing.T) {
	f := newFleet(t)
	const device = "02:00:00:00:00:01"
	f.put(device, "board", "2.4.2", nil)
	at := time.Now()
	for n := range 60 {
		f.recorder.Step(devices.Step{Kind: devices.StepCheck, Device: device, Text: fmt.Sprint("check ", n), Proven: n%2 == 0})
		f.recorder.Call(devices.CallStep{Call: "aaaaaaaaaaaaaaaa", Device: device, Key: "k", Tool: fmt.Sprint("tool ", n), At: at, Outcome: "ok", Holder: true})
	}
	for _, limit := range []int{1, 7, 100, 1000} {
		seen, cursor, pages := map[string]int{}, "", 0
		last := time.Now().Add(time.Hour)
		for first := true; first || cursor != ""; first = false {
			r := f.do(t, http.MethodGet, fmt.Sprintf("/v1/devices/%s/log?limit=%d&cursor=%s", device, limit, cursor), "")
			var page api.Log
			r.json(t, &page)
			for _, x := range page.Items {
				seen[x.Tool+x.Text]++
				if x.At.After(last) {
					t.Errorf("a record of %v comes after one of %v", x.At, last)
				}
				last = x.At.Time
			}
			if pages++; len(page.Items) > limit || pages > 150 {
				t.Fatalf("%d records in page %d of %d", len(page.Items), pages, limit)
			}
			cursor = page.NextCursor
		}
		for what, n := range seen {
			if n != 1 {
				t.Errorf("limit %d: %s is there %d times", limit, what, n)
			}
		}
		if len(seen) != 120 {
			t.Errorf("limit %d: %d records of 120", limit, len(seen))
		}
	}
	if r := f.do(t, http.MethodGet, "/v1/devices/"+device+"/log?before=1h", ""); !strings.Contains(r.body, `"items":[]`) {
		t.Errorf("an hour ago: %s", r.body)
	}
	for _, query := range []string{"cursor=x", "cursor=eA", "before=x", "before=-1h", "limit=0", "kind=x"} {
		f.do(t, http.MethodGet, "/v1/devices/"+device+"/log?"+query, "").problem(t, 400, devices.CodeBadRequest)
	}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, f.url+"/v1/devices/"+device+"/recording?kind=call&limit=7", nil)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Authorization", "Bearer "+f.token)
	answer, err := http.DefaultTransport.RoundTrip(request)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }()
	if to := answer.Header.Get("Location"); answer.StatusCode != http.StatusPermanentRedirect || to != "/v1/devices/"+device+"/log?kind=call&limit=7" {
		t.Errorf("the former path answers %d to %s", answer.StatusCode, to)
	}
}

// Each record of an unknown device is on one page, the newest first.
func TestRefusalsArePaged(t *testing.T) {
	f := newFleet(t)
	for n := range 20 {
		f.recorder.Step(devices.Step{Kind: devices.StepRefused, Device: devices.ID(fmt.Sprint("stranger-", n)), Cause: devices.CauseUnknownDevice, Unknown: true})
	}
	var seen []string
	for cursor, pages := "", 0; pages == 0 || cursor != ""; pages++ {
		var page api.Log
		f.do(t, http.MethodGet, "/v1/refusals?limit=7&cursor="+cursor, "").json(t, &page)
		if len(page.Items) > 7 || pages > 3 {
			t.Fatalf("%d records in page %d", len(page.Items), pages)
		}
		for _, r := range page.Items {
			seen = append(seen, r.Device)
		}
		cursor = page.NextCursor
	}
	if len(seen) != 20 || seen[0] != "stranger-19" || seen[7] != "stranger-12" || seen[19] != "stranger-0" {
		t.Errorf("%q", seen)
	}
}
