package restapi

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/audit"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
	"fleetd/internal/selector"
)

const lamp = devices.ID("aa:bb:cc:dd:ee:01")

// key makes an API key and returns its token.
func (f *testFleet) key(t testing.TB, name, scopes, selector string, tools ...string) string {
	t.Helper()
	s, d := devicetest.Rights(t, scopes, selector)
	_, token, err := f.service.CreateKey(t.Context(), access.Principal{Caller: access.Admin, Via: access.ViaREST}, fleet.NewKeyParams{Name: name, Scopes: s, Devices: d, Tools: tools})
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// as is the header of a request with another token.
func as(token string) []string { return []string{"Authorization", "Bearer " + token} }

// label gives a device labels.
func (f *testFleet) label(t testing.TB, id devices.ID, labels map[string]string) {
	t.Helper()
	if err := f.service.Edit(t.Context(), devicetest.Admin, id, 0, fleet.Edit{Labels: devicetest.Labels(labels)}); err != nil {
		t.Fatal(err)
	}
}

// audited are the entries of a kind.
func (f *testFleet) audited(kind audit.Kind) []audit.Entry {
	var out []audit.Entry
	for _, e := range f.ports.Recorded() {
		if e.Kind == kind {
			out = append(out, e)
		}
	}
	return out
}

// Every operation of the document names one scope, refuses keys with all other
// scopes, and lets a key with that one in. The caller itself is shown to every
// key.
func TestEveryOperationTakesItsScope(t *testing.T) {
	f := newFleet(t, func(o *Options) { o.Authenticate = func(string, string, string) error { return nil } })
	f.connect(t, robot, devicetest.NewScript())
	var doc spec
	f.do(t, "GET", "/openapi.json", "").json(t, &doc)
	with, without := map[string]string{}, map[string]string{}
	for _, scope := range access.AllScopes().Names() {
		with[scope] = f.key(t, "with "+strings.ReplaceAll(scope, ":", "-"), scope, "")
		others := slices.DeleteFunc(access.AllScopes().Names(), func(s string) bool {
			return s == scope || s == string(access.ScopeAdmin) || s == string(access.ScopeUser) && scope == string(access.ScopeCall) ||
				s == string(access.ScopeJobs) && scope == string(access.ScopeJobsRead) || s == string(access.ScopeFirmware) && scope == string(access.ScopeFirmwareRead)
		})
		without[scope] = f.key(t, "without "+strings.ReplaceAll(scope, ":", "-"), strings.Join(others, " "), "")
	}
	var public, anyone []string
	for path, item := range doc.Paths {
		for method, op := range item {
			method = strings.ToUpper(method)
			if op.Security != nil && len(op.Security) == 0 {
				public = append(public, method+" "+path)
				continue
			}
			if len(op.Security) == 1 && len(op.Security[0]["token"]) == 0 {
				anyone = append(anyone, method+" "+path)
				continue
			}
			// security: R1
			if len(op.Security) != 1 || len(op.Security[0]["token"]) != 1 {
				t.Errorf("%s %s has no scope: %v", method, path, op.Security)
				continue
			}
			scope := op.Security[0]["token"][0]
			target := strings.NewReplacer("{device}", string(robot), "{tool}", "self.get_device_status", "{sha256}", strings.Repeat("0", 64),
				"{id}", "p1", "{key}", "nobody", "{version}", "1", "{serial}", "x").Replace(path)
			body := ""
			switch path {
			case pathMCP:
				body = `{"method":"ping"}`
			case pathMessages:
				body = `{"type":"alert","status":"s","message":"m","emotion":"happy"}`
			}
			before := len(f.ports.Recorded())
			// security: R1
			p := f.do(t, method, target, body, as(without[scope])...).problem(t, 403, devices.CodeForbidden)
			// security: R1
			if p.Rule != access.RuleScope || !strings.Contains(p.Detail, scope) {
				t.Errorf("%s %s: %+v", method, path, p)
			}
			if entries := f.ports.Recorded()[before:]; len(entries) != 1 || entries[0].Rule != access.RuleScope || entries[0].Name == "" || entries[0].Outcome != "forbidden" {
				t.Errorf("%s %s leaves the record %+v", method, path, entries)
			}
			if path == pathEvents || strings.HasSuffix(path, "/trace") && method == http.MethodGet {
				continue // it would not end
			}
			if r := f.do(t, method, target, body, as(with[scope])...); strings.Contains(r.body, `"rule":"scope"`) || r.status == 401 {
				t.Errorf("%s %s with %s: %d %s", method, path, scope, r.status, r.body)
			}
			if method == http.MethodDelete || method == http.MethodPost {
				f.connectAgain(t)
			}
		}
	}
	slices.Sort(public)
	slices.Sort(anyone)
	// security: R1
	if want := []string{"GET /livez", "GET /metrics", "GET /readyz", "POST /v1/console/keys"}; !slices.Equal(public, want) {
		t.Errorf("public: %v", public)
	}
	// security: R1
	if want := []string{"DELETE /v1/self", "GET /v1/self", "POST /v1/console/codes"}; !slices.Equal(anyone, want) {
		t.Errorf("for every key: %v", anyone)
	}
	f.api.Handle("GET /debug/pprof/", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {}))
	f.do(t, "GET", "/debug/pprof/", "", as(without["admin"])...).problem(t, 403, devices.CodeForbidden)
	if r := f.do(t, "GET", "/debug/pprof/", "", as(with["admin"])...); r.status != 200 {
		t.Errorf("%d", r.status)
	}
}

// connectAgain brings the robot back if an operation sent it away.
func (f *testFleet) connectAgain(t testing.TB) {
	if v, err := f.service.Get(t.Context(), robot); err != nil || !v.Presence.Online {
		if _, err := f.service.Approve(t.Context(), devicetest.Admin, string(robot), ""); err != nil {
			return
		}
		f.connect(t, robot, devicetest.NewScript())
	}
}

// A key for some devices sees these, and cannot tell others from none.
func TestSelectorHidesOtherDevices(t *testing.T) {
	for _, selected := range []string{"room=lab", "room!=hall", "room in (lab,attic)", "!floor,room=l*"} {
		t.Run(selected, func(t *testing.T) { selectorHidesOtherDevices(t, selected) })
	}
}

func selectorHidesOtherDevices(t *testing.T, selected string) {
	f := newFleet(t)
	f.connect(t, robot, devicetest.NewScript())
	f.connect(t, lamp, devicetest.NewScript())
	f.label(t, robot, map[string]string{"room": "lab"})
	f.label(t, lamp, map[string]string{"room": "hall"})
	f.photos.photos = []devices.Photo{{ID: "p3", Device: lamp, Bytes: 2, Kind: "camera"}, {ID: "p2", Device: robot, Bytes: 2, Kind: "camera"}, {ID: "p1", Device: lamp, Bytes: 2, Kind: "camera"}}
	f.photos.jpeg = []byte{1, 2}
	token := f.key(t, "lab", "devices:read devices:write photos:read tools:call events:read", selected)
	const unknown = "aa:bb:cc:dd:ee:99"
	for _, tc := range []struct{ method, path, body string }{
		{"GET", "/v1/devices/%s", ""}, {"PATCH", "/v1/devices/%s", `{"name":"x"}`}, {"DELETE", "/v1/devices/%s", ""}, {"POST", "/v1/devices/%s/approve", ""},
		{"POST", "/v1/devices/%s/revoke", ""}, {"GET", "/v1/devices/%s/tools", ""}, {"GET", "/v1/devices/%s/catalogs", ""}, {"POST", "/v1/devices/%s/tools/refresh", ""},
		{"POST", "/v1/devices/%s/tools/self.get_device_status/call", `{}`}, {"POST", "/v1/devices/%s/mcp", `{"method":"ping"}`},
		{"POST", "/v1/devices/%s/messages", `{"type":"alert","status":"s","message":"m","emotion":"happy"}`}, {"GET", "/v1/events?device=%s", ""}, {"GET", "/v1/photos?device=%s", ""},
	} {
		// security: R1
		other := f.do(t, tc.method, fmt.Sprintf(tc.path, lamp), tc.body, as(token)...).problem(t, 403, devices.CodeForbidden)
		// security: R1
		none := f.do(t, tc.method, fmt.Sprintf(tc.path, unknown), tc.body, as(token)...).problem(t, 403, devices.CodeForbidden)
		other.Call, none.Call = "", "" // each its own
		// security: R1
		if other.Rule != access.RuleDevices || fmt.Sprint(other) != fmt.Sprint(none) {
			t.Errorf("%s %s: %+v and %+v", tc.method, tc.path, other, none)
		}
	}
	for _, path := range []string{"/v1/photos/p1", "/v1/photos/none"} {
		f.do(t, "GET", path, "", as(token)...).problem(t, 403, devices.CodeForbidden)
		f.do(t, "DELETE", path, "", as(token)...).problem(t, 403, devices.CodeForbidden)
	}
	f.do(t, "POST", "/v1/devices/123456/approve", "", as(token)...).problem(t, 403, devices.CodeForbidden)

	var list struct {
		Items []struct{ ID string }
		Next  string `json:"next_cursor"`
	}
	f.do(t, "GET", "/v1/devices", "", as(token)...).json(t, &list)
	// security: R1
	if len(list.Items) != 1 || list.Items[0].ID != string(robot) || list.Next != "" {
		t.Errorf("%+v", list)
	}
	f.do(t, "GET", "/v1/photos?limit=1", "", as(token)...).json(t, &list)
	// security: R1
	if len(list.Items) != 1 || list.Items[0].ID != "p2" || list.Next == "" {
		t.Errorf("%+v", list)
	}
	f.do(t, "GET", "/v1/photos?limit=1&cursor="+list.Next, "", as(token)...).json(t, &list)
	// security: R1
	if len(list.Items) != 0 {
		t.Errorf("%+v", list)
	}
	if r := f.do(t, "GET", "/v1/photos/p2", "", as(token)...); r.status != 200 {
		t.Errorf("%d %s", r.status, r.body)
	}
	if r := f.do(t, "GET", "/v1/devices/"+string(robot), "", as(token)...); r.status != 200 {
		t.Errorf("%d %s", r.status, r.body)
	}
	if r := f.do(t, "DELETE", "/v1/photos/p2", "", as(token)...); r.status != 204 {
		t.Errorf("%d %s", r.status, r.body)
	}
}

// Pages of a key for some devices are whole, wherever those of others lie.
func TestPagesUnderASelector(t *testing.T) {
	f := newFleet(t)
	var want []string
	for i := range 30 {
		d := devices.Device{ID: devices.ID(fmt.Sprintf("02:00:00:00:00:%02x", i)), Admission: devices.AdmissionMember, Labels: map[string]string{"room": "hall"}}
		if i%3 == 0 {
			d.Labels = map[string]string{"room": "lab"}
			want = append(want, string(d.ID))
		}
		f.ports.SaveDevice(d)
	}
	moved := devices.ID("02:00:00:00:00:06")
	f.label(t, moved, map[string]string{"room": "hall"})
	want = slices.DeleteFunc(want, func(id string) bool { return id == string(moved) })
	token := f.key(t, "lab", "devices:read", "room=lab")
	var got []string
	for cursor := ""; ; {
		var page struct {
			Items []struct{ ID string }
			Next  string `json:"next_cursor"`
		}
		f.do(t, "GET", "/v1/devices?limit=2&cursor="+cursor, "", as(token)...).json(t, &page)
		for _, d := range page.Items {
			got = append(got, d.ID)
		}
		if cursor = page.Next; cursor == "" {
			break
		}
	}
	// security: R1
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// What is done to devices is in the audit, with the caller.
func TestChangesAreAudited(t *testing.T) {
	f := newFleet(t)
	f.connect(t, robot, devicetest.NewScript())
	f.photos.photos = []devices.Photo{{ID: "p1", Device: robot, Kind: "camera"}}
	token := f.key(t, "clerk", "devices:write", "")
	for _, tc := range []struct{ method, path, body, action, detail string }{
		{"PATCH", "/v1/devices/" + string(robot), `{"name":"x","labels":{"room":"lab"}}`, "edit", "name, labels room=lab"},
		{"POST", "/v1/devices/" + string(robot) + "/revoke", "", "revoke", ""},
		{"POST", "/v1/devices/" + string(robot) + "/approve", "", "approve", ""},
		{"DELETE", "/v1/photos/p1", "", "delete_photo", "p1"},
		{"DELETE", "/v1/devices/" + string(robot), "", "forget", ""},
	} {
		f.do(t, tc.method, tc.path, tc.body, as(token)...)
		entries := f.audited(audit.KindDevice)
		if len(entries) == 0 {
			t.Fatalf("%s leaves no record", tc.action)
		}
		e := entries[len(entries)-1]
		if e.Action != tc.action || e.Detail != tc.detail || e.Device != string(robot) || e.Name != "clerk" || e.Outcome != "ok" || e.Via != "rest" || e.From == "" {
			t.Errorf("%+v", e)
		}
	}
	f.do(t, "POST", "/v1/devices/"+string(robot)+"/revoke", "", as(token)...).problem(t, 404, devices.CodeDeviceUnknown)
	if entries := f.audited(audit.KindDevice); entries[len(entries)-1].Outcome != "device_unknown" {
		t.Errorf("%+v", entries[len(entries)-1])
	}
	f.do(t, "GET", "/v1/devices", "", as("fld_guess")...).problem(t, 401, devices.CodeUnauthorized)
	if entries := f.audited(audit.KindRefusal); len(entries) != 1 || entries[0].Key != "" || entries[0].Action != "GET /v1/devices" || entries[0].Outcome != "unauthorized" {
		t.Errorf("%+v", entries)
	}
}

// A stream carries events of the key's devices alone, and ends with the key.
func TestEventsUnderAKey(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.connect(t, robot, devicetest.NewScript())
	f.connect(t, lamp, devicetest.NewScript())
	f.label(t, robot, map[string]string{"room": "lab"})
	f.events.queue = make(chan devices.StreamEvent, 8)
	admin := f.token
	for name, end := range map[string]func(){
		"revoked": func() { f.do(t, "DELETE", "/v1/keys/lab-revoked", "", as(admin)...) },
		"expired": func() {},
	} {
		s, _ := access.ParseScopes([]string{"events:read"})
		params := fleet.NewKeyParams{Name: "lab-" + name, Scopes: s, Devices: selector.FromMap(map[string]string{"room": "lab"})}
		if name == "expired" {
			params.Expires = time.Now().Add(2 * time.Second)
		}
		_, token, err := f.service.CreateKey(t.Context(), access.Principal{Caller: access.Admin}, params)
		if err != nil {
			t.Fatal(err)
		}
		f.token = token
		for _, id := range []devices.ID{lamp, robot} {
			f.events.queue <- devices.StreamEvent{ID: devices.EventPosition{1}, Kind: devices.EventOnline, Device: id, Data: []byte(`{"device":"` + string(id) + `"}`)}
		}
		lines, _ := f.follow(t, t.Context(), "")
		var seen []string
		for lines.Scan() {
			if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
				seen = append(seen, data)
				break
			}
		}
		end()
		begun := time.Now()
		for lines.Scan() {
			if strings.HasPrefix(lines.Text(), "data: ") {
				seen = append(seen, lines.Text())
			}
		}
		// security: R3
		if took := time.Since(begun); name == "revoked" && took > time.Second || took > 3*time.Second {
			t.Errorf("%s: the stream went on for %v", name, took)
		}
		// security: R3
		if len(seen) != 1 || !strings.Contains(seen[0], string(robot)) {
			t.Errorf("%s: %v", name, seen)
		}
	}
}

// A key that is limited to devices follows the jobs that it created and their tasks, not those of others, even on its devices.
func TestJobEventsUnderAKey(t *testing.T) {
	f := newFleet(t)
	f.connect(t, robot, devicetest.NewScript())
	f.connect(t, lamp, devicetest.NewScript())
	f.label(t, robot, map[string]string{"room": "lab"})
	s, _ := access.ParseScopes([]string{"events:read"})
	key, token, err := f.service.CreateKey(t.Context(), access.Principal{Caller: access.Admin}, fleet.NewKeyParams{Name: "lab", Scopes: s, Devices: selector.FromMap(map[string]string{"room": "lab"})})
	if err != nil {
		t.Fatal(err)
	}
	f.token = token
	f.events.queue = make(chan devices.StreamEvent, 8)
	for n, e := range []devices.StreamEvent{
		{Kind: devices.EventJobHalted, Owner: "admin"}, {Kind: devices.EventJobHalted}, {Kind: devices.EventTask, Device: lamp},
		{Kind: devices.EventTask, Device: robot, Owner: "admin"}, {Kind: devices.EventTask, Device: robot}, {Kind: devices.EventTask, Device: lamp, Owner: key.ID},
		{Kind: devices.EventJobHalted, Owner: key.ID}, {Kind: devices.EventTask, Device: robot, Owner: key.ID},
	} {
		e.Data = fmt.Appendf(nil, `{"n":%d}`, n)
		f.events.queue <- e
	}
	lines, _ := f.follow(t, t.Context(), "")
	var seen []string
	for len(seen) < 2 && lines.Scan() {
		if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
			seen = append(seen, data)
		}
	}
	// security: R3
	if !slices.Equal(seen, []string{`{"n":6}`, `{"n":7}`}) {
		t.Errorf("%v", seen)
	}
}

// A key that is limited to tools sees events of its own jobs alone, over a stream and in batches; the question of a photo is for
// keys that may read photos, and events of webhooks for the key that created it and for administrators.
func TestEventsForSomeKeys(t *testing.T) {
	for _, query := range []string{"", "?batch=100ms"} {
		for _, c := range []struct {
			scopes string
			tools  []string
			want   string
		}{
			{"events:read", []string{"self.get_*"}, `{"n":2} {"photo":"p"}`},
			{"events:read photos:read", []string{"self.get_*"}, `{"n":2} {"photo":"p","question":"who is there?"}`},
			{"events:read", nil, `{"n":1} {"n":2} {"photo":"p"}`},
			{"events:read photos:read", nil, `{"n":1} {"n":2} {"photo":"p","question":"who is there?"}`},
			{"admin", nil, `{"n":1} {"n":3} {"n":2} {"photo":"p","question":"who is there?"}`},
		} {
			f := newFleet(t)
			f.put(robot, "board", "2.4.2", nil)
			scopes, err := access.ParseScopes(strings.Fields(c.scopes))
			if err != nil {
				t.Fatal(err)
			}
			key, token, err := f.service.CreateKey(t.Context(), access.Principal{Caller: access.Admin}, fleet.NewKeyParams{Name: "key", Scopes: scopes, Tools: c.tools})
			if err != nil {
				t.Fatal(err)
			}
			f.token = token
			f.events.queue = make(chan devices.StreamEvent, 8)
			f.events.queue <- devices.StreamEvent{Kind: devices.EventJobHalted, Owner: "admin", Data: []byte(`{"n":1}`)}
			f.events.queue <- devices.StreamEvent{Kind: devices.EventWebhookDisabled, Owner: "another key", Data: []byte(`{"n":3}`)}
			f.events.queue <- devices.StreamEvent{Kind: devices.EventJobHalted, Owner: key.ID, Data: []byte(`{"n":2}`)}
			f.events.queue <- devices.StreamEvent{Kind: devices.EventPhoto, Device: robot, Data: []byte(`{"photo":"p","question":"who is there?"}`)}
			lines, _ := f.follow(t, t.Context(), query)
			var seen strings.Builder
			for !strings.Contains(seen.String(), `"photo"`) && lines.Scan() {
				seen.WriteString(lines.Text() + "\n")
			}
			at := 0
			for _, part := range strings.Fields(strings.ReplaceAll(c.want, "who is there?", "who_is_there?")) {
				part = strings.ReplaceAll(part, "who_is_there?", "who is there?")
				i := strings.Index(seen.String()[at:], part)
				// security: R3
				if i < 0 {
					t.Errorf("%s for tools %q, %s: %s is not in %s", c.scopes, c.tools, query, part, seen.String())
					break
				}
				at += i
			}
			// security: R3
			if strings.Contains(seen.String(), `{"n":1}`) != strings.Contains(c.want, `{"n":1}`) || strings.Contains(seen.String(), `{"n":3}`) != strings.Contains(c.want, `{"n":3}`) || strings.Contains(seen.String(), "who is there") != strings.Contains(c.want, "who is there") {
				t.Errorf("%s for tools %q, %s: %s", c.scopes, c.tools, query, seen.String())
			}
		}
	}
}
