package restapi

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/audit"
	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devicetest"
	"fleetd/internal/racetest"
)

// ids are the devices of all pages.
func (f *testFleet) ids(t testing.TB, query string, headers ...string) (ids []string) {
	t.Helper()
	for cursor := ""; ; {
		var page struct {
			Items []struct{ ID string }
			Next  string `json:"next_cursor"`
		}
		f.do(t, "GET", "/v1/devices?limit=2&"+query+"&cursor="+url.QueryEscape(cursor), "", headers...).json(t, &page)
		for _, d := range page.Items {
			ids = append(ids, d.ID)
		}
		if cursor = page.Next; cursor == "" {
			return ids
		}
	}
}

func (f *testFleet) put(id devices.ID, board, firmware string, labels map[string]string) {
	f.ports.SaveDevice(devices.Device{ID: id, Name: "name of " + string(id), Labels: labels, Facts: devices.Facts{Board: board, Firmware: firmware, CheckedAt: time.Now()}})
}

func newSelectFleet(t testing.TB) *testFleet {
	f := newFleet(t)
	f.put("a", "esp-box", "2.4.1", map[string]string{"room": "lab", "floor": "1"})
	f.put("b", "esp-box", "2.4.2", map[string]string{"room": "hall"})
	f.put("c", "bread*", "2.10", map[string]string{"room": "lab", "state": "x=y"})
	f.put("d", "bread-x", "", nil)
	f.connect(t, "e", devicetest.NewScript())
	devicetest.Eventually(t, "the rows have what the device reported", func() bool { // its session has that before
		d, n, _, _ := f.ports.Of("e")
		return d.Firmware != "" && n.MCP == devices.MCPReady && n.Catalog != devices.Hash{}
	})
	return f
}

func TestSelect(t *testing.T) {
	f := newSelectFleet(t)
	lab := f.key(t, "lab", "devices:read devices:write", "room=lab")
	for _, tc := range []struct{ query, token, want string }{
		{"", "", "a b c d e"},
		{"select=room=lab", "", "a c"},
		{"select=room=lab,firmware<2.5", "", "a"},
		{"select=!room", "", "d e"},
		{"select=state=online", "", "e"},
		{"select=device in (a,d)", "", "a d"},
		{"select=tool=self.audio*", "", "e"},
		{"select=room=lab&board=bread*", "", "c"}, // literal: no glob
		{"board=bread*", "", "c"},
		{"label=room", "", "a b c"},
		{"label=room=hall", "", "b"},
		{"label=state=x=y", "", "c"}, // a label, not the field
		{"state=offline&label=room=lab", "", "a c"},
		{"state=pending", "", ""},
		{"firmware=2.4.1", "", "a"},
		{"transport=websocket", "", "e"},
		{"q=OX", "", "a b"},
		{"q=name of b", "", "b"},
		{"sort=id", "", "a b c d e"},
		{"", lab, "a c"},
		{"select=room!=lab", lab, ""},
		{"select=floor", lab, "a"},
	} {
		var headers []string
		if tc.token != "" {
			headers = as(tc.token)
		}
		values := url.Values{}
		for pair := range strings.SplitSeq(tc.query, "&") {
			if name, value, ok := strings.Cut(pair, "="); ok {
				values.Set(name, value)
			}
		}
		if got := f.ids(t, values.Encode(), headers...); strings.Join(got, " ") != tc.want {
			t.Errorf("%s: %v, want %s", tc.query, got, tc.want)
		}
	}
	for query, want := range map[string]string{
		"select=room%3Dlab,":                 "column 10: expected a field",
		"select=state%3Don":                  "column 7: expected one of online, offline, pending, contested",
		"label=a%20b":                        "label must be KEY or KEY=VALUE",
		"sort=age":                           "sort",
		"cursor=x":                           "begin again without cursor",
		"sort=last_seen&cursor=eyJpIjoiYSJ9": "begin again without cursor",
		"selct=a":                            "selct",
	} {
		if p := f.do(t, "GET", "/v1/devices?"+query, "").problem(t, 400, devices.CodeBadRequest); !strings.Contains(p.Detail, want) {
			t.Errorf("%s: %s", query, p.Detail)
		}
	}
}

func TestFleetCounts(t *testing.T) {
	f := newSelectFleet(t)
	if _, err := f.service.CheckIn(t.Context(), admission.CheckIn{Device: "waits", ClientID: "w"}); err != nil {
		t.Fatal(err)
	}
	lab := f.key(t, "lab", "devices:read", "room=lab")
	for _, tc := range []struct{ query, token, want string }{
		{"", "", `{"total":5,"as_of":?,"state":{"contested":0,"offline":4,"online":1,"pending":1},"offline_reason":{"":4},"transport":{"websocket":1},` +
			`"board":{"bread*":1,"bread-compact-wifi":1,"bread-x":1,"esp-box":2},"firmware":{"":1,"2.10":1,"2.4.1":1,"2.4.2":2},"node":{"n-test":1},"mcp_state":{"":4,"ready":1}}`},
		{"?select=room%3Dhall", "", `{"total":1,"as_of":?,"state":{"contested":0,"offline":1,"pending":0},"offline_reason":{"":1},"transport":{},` +
			`"board":{"esp-box":1},"firmware":{"2.4.2":1},"node":{},"mcp_state":{"":1}}`},
		{"", lab, `{"total":2,"as_of":?,"state":{"contested":0,"offline":2,"pending":0},"offline_reason":{"":2},"transport":{},` +
			`"board":{"bread*":1,"esp-box":1},"firmware":{"2.10":1,"2.4.1":1},"node":{},"mcp_state":{"":2}}`},
	} {
		var headers []string
		if tc.token != "" {
			headers = as(tc.token)
		}
		r := f.do(t, "GET", "/v1/fleet"+tc.query, "", headers...)
		var at struct {
			AsOf time.Time `json:"as_of"`
		}
		r.json(t, &at)
		if got := strings.Replace(strings.TrimSpace(r.body), `"`+at.AsOf.Format("2006-01-02T15:04:05.000Z")+`"`, "?", 1); got != tc.want || time.Since(at.AsOf) > time.Minute {
			t.Errorf("%s: %s", tc.query, got)
		}
	}
	f.do(t, "GET", "/v1/fleet?select=%2C", "").problem(t, 400, devices.CodeBadRequest)
	counts := newFleetCounts(devices.Counts{Dimensions: map[string]devices.Dimension{"board": {Top: []devices.ValueCount{{Value: "x", N: 3}, {Value: "other", N: 2}}, Other: 4}}})
	if counts.Board["other"] != 6 || counts.Board["x"] != 3 {
		t.Errorf("%v", counts.Board)
	}
}

func TestEditMany(t *testing.T) {
	f := newSelectFleet(t)
	path := func(sel string) string { return "/v1/devices?select=" + url.QueryEscape(sel) }
	lab := f.key(t, "lab", "devices:write", "room=lab")
	for _, tc := range []struct{ sel, body, token, want string }{
		{"room", `{"labels":{"floor":"2"}}`, "", `{"matched":3,"changed":3}`},
		{"room", `{"labels":{"floor":"2"}}`, "", `{"matched":3,"changed":0}`},
		{"board=esp-box", `{"labels":{"floor":null,"new":""},"transport_wanted":"mqtt"}`, "", `{"matched":2,"changed":2}`},
		{"device=*", `{"labels":{"mine":"x"}}`, lab, `{"matched":2,"changed":2}`},
		{"room=none", `{"labels":{"mine":"x"}}`, "", `{"matched":0,"changed":0}`},
	} {
		headers := as(f.token)
		if tc.token != "" {
			headers = as(tc.token)
		}
		if r := f.do(t, "PATCH", path(tc.sel), tc.body, headers...); r.status != 200 || strings.TrimSpace(r.body) != tc.want {
			t.Errorf("%s %s: %d %s", tc.sel, tc.body, r.status, r.body)
		}
	}
	if m, _ := f.ports.Ledger.Member("a"); fmt.Sprint(m.Labels) != "map[mine:x new: room:lab]" || m.Prefer != devices.TransportMQTT {
		t.Errorf("%+v", m)
	}
	if m, _ := f.ports.Ledger.Member("b"); m.Labels["mine"] != "" {
		t.Errorf("a key changed a device that it is not for: %+v", m)
	}
	entries := f.audited(audit.KindDevice)
	if e := entries[2]; e.Detail != "select board=esp-box: labels floor-,new=, transport_wanted: 2 matched, 2 changed" || e.Device != "" {
		t.Errorf("%+v", e)
	}
	for _, tc := range []struct{ path, body, want string }{
		{"/v1/devices", `{"labels":{"a":"b"}}`, "select is missing"},
		{path(" "), `{"labels":{"a":"b"}}`, "select is missing"},
		{path("room="), `{"labels":{"a":"b"}}`, "column 6"},
		{path("room"), `{}`, "changes nothing"},
		{path("room"), `{"name":"x"}`, "name"},
		{path("room"), `{"labels":{"a b":"x"}}`, `label "a b"`},
		{path("room"), `{"labels":{"a":7}}`, "string"},
		{path("room"), `{"transport_wanted":"tcp"}`, "transport_wanted"},
		{path("room"), `{"labels":null}`, "labels must be an object"},
	} {
		if p := f.do(t, "PATCH", tc.path, tc.body).problem(t, 400, devices.CodeBadRequest); !strings.Contains(p.Detail, tc.want) {
			t.Errorf("%s %s: %s", tc.path, tc.body, p.Detail)
		}
	}
}

// Labels of one device are merged, as those of a selection; null removes one.
func TestLabelsMerge(t *testing.T) {
	f := newFleet(t)
	f.put("a", "", "", nil)
	for _, tc := range []struct{ body, want string }{
		{`{"labels":{"room":"lab","old":"x"}}`, `"labels":{"old":"x","room":"lab"}`},
		{`{"labels":{"floor":"1","old":null}}`, `"labels":{"floor":"1","room":"lab"}`},
		{`{"labels":{"floor":"2"}}`, `"labels":{"floor":"2","room":"lab"}`},
		{`{"labels":{"none":null}}`, `"labels":{"floor":"2","room":"lab"}`},
		{`{"labels":{}}`, `"labels":{"floor":"2","room":"lab"}`},
		{`{"labels":{"floor":null,"room":null}}`, `"labels":{}`},
	} {
		if r := f.do(t, "PATCH", "/v1/devices/a", tc.body); r.status != 200 || !strings.Contains(r.body, tc.want) {
			t.Errorf("%s: %d %s", tc.body, r.status, r.body)
		}
	}
	f.do(t, "PATCH", "/v1/devices/a", `{"labels":null}`).problem(t, 400, devices.CodeBadRequest)
}

// An edit that was made is answered as made, though the device cannot be read at
// once afterwards.
func TestEditWhileRowsAreSlow(t *testing.T) {
	f := newFleet(t)
	f.put("a", "", "", nil)
	f.ports.SlowRows(time.Minute)
	time.AfterFunc(time.Second, func() { f.ports.SlowRows(0) })
	if r := f.do(t, "PATCH", "/v1/devices/a", `{"name":"lamp"}`); r.status != 200 || !strings.Contains(r.body, `"name":"lamp"`) {
		t.Errorf("%d %s", r.status, r.body)
	}
}

// A change for the revision that was read is refused once another was made.
func TestIfMatch(t *testing.T) {
	f := newFleet(t)
	f.put("a", "", "", nil)
	tag := f.do(t, "GET", "/v1/devices/a", "").header.Get("ETag")
	r := f.do(t, "PATCH", "/v1/devices/a", `{"name":"x"}`, "If-Match", tag)
	var d struct{ Revision int64 }
	r.json(t, &d)
	if next := r.header.Get("ETag"); next == tag || next != fmt.Sprintf(`"%d"`, d.Revision) {
		t.Errorf("%s after %s, revision %d", next, tag, d.Revision)
	}
	f.do(t, "PATCH", "/v1/devices/a", `{"name":"y"}`, "If-Match", tag).problem(t, 412, devices.CodeStale)
	f.do(t, "DELETE", "/v1/devices/a", "", "If-Match", tag).problem(t, 412, devices.CodeStale)
	for _, other := range []string{`"0"`, "x", `"1", "2"`, "-1", `W/"1"`} {
		f.do(t, "PATCH", "/v1/devices/a", `{"name":"y"}`, "If-Match", other).problem(t, 412, devices.CodeStale)
	}
	for _, good := range []string{"*", r.header.Get("ETag"), ""} {
		if r := f.do(t, "PATCH", "/v1/devices/a", `{"name":"x"}`, "If-Match", good); r.status != 200 {
			t.Errorf("%s: %d %s", good, r.status, r.body)
		}
	}
	if r := f.do(t, "DELETE", "/v1/devices/a", "", "If-Match", r.header.Get("ETag")); r.status != 204 {
		t.Errorf("%d %s", r.status, r.body)
	}
}

// What is known of a device's connection once it is gone.
func TestOffline(t *testing.T) {
	f := newFleet(t)
	l := f.connect(t, robot, devicetest.NewScript())
	before := time.Now()
	type view struct {
		State, Admission string
		Reason           string     `json:"offline_reason"`
		Since            *time.Time `json:"offline_since"`
		Seen             time.Time  `json:"last_seen"`
	}
	var v view
	f.do(t, "GET", devicePath, "").json(t, &v)
	if v.State != "online" || v.Reason != "" || v.Since != nil || v.Seen.Before(before.Truncate(time.Millisecond)) || v.Admission != "member" {
		t.Errorf("%+v", v)
	}
	l.session.Close(devices.CloseIdle)
	f.do(t, "GET", devicePath, "").json(t, &v)
	if v.State != "offline" || v.Reason != "idle" || v.Since == nil {
		t.Errorf("%+v", v)
	}
	if r := f.do(t, "POST", devicePath+"/revoke", ""); r.status != 204 {
		t.Errorf("%d", r.status)
	}
	f.do(t, "GET", devicePath, "").json(t, &v)
	if v.State != "offline" || v.Admission != "revoked" {
		t.Errorf("%+v", v)
	}
}

// Revoking is in force without the database; everything else waits for it.
func TestRevokeWithoutDatabase(t *testing.T) {
	f := newFleet(t)
	f.put("a", "", "", nil)
	token := f.key(t, "clerk", "devices:read", "")
	f.ports.SetAway(true)
	const want = `{"recorded":false,"nodes":["n-test"]}`
	for _, tc := range []struct{ method, path string }{{"POST", "/v1/devices/a/revoke"}, {"DELETE", "/v1/keys/clerk"}} {
		if r := f.do(t, tc.method, tc.path, ""); r.status != http.StatusAccepted || strings.TrimSpace(r.body) != want || r.header.Get("Content-Type") != "application/json" {
			t.Errorf("%s: %d %s", tc.path, r.status, r.body)
		}
	}
	f.do(t, "GET", "/v1/devices/a", "", as(token)...).problem(t, 401, devices.CodeUnauthorized)
	if f.service.IsMember("a") {
		t.Error("still a member")
	}
	for _, tc := range []struct{ method, path, body string }{
		{"PATCH", "/v1/devices/a", `{"name":"x"}`}, {"DELETE", "/v1/devices/a", ""}, {"PATCH", "/v1/devices?select=device%3Da", `{"labels":{"a":"b"}}`},
		{"POST", "/v1/devices/a/approve", ""}, {"POST", "/v1/devices/import", "id\nb\n"}, {"GET", "/v1/devices/export", ""}, {"GET", "/v1/fleet", ""},
		{"POST", "/v1/keys", `{"name":"x","scopes":["admin"]}`},
	} {
		r := f.do(t, tc.method, tc.path, tc.body)
		if p := r.problem(t, 503, devices.CodeUnavailable); p.Part != "database" || r.header.Get("Retry-After") != "1" {
			t.Errorf("%s %s: %+v", tc.method, tc.path, p)
		}
	}
	f.ports.Back(t, f.service)
	devicetest.Eventually(t, "the revocation is recorded", func() bool {
		m, _ := f.ports.Ledger.Member("a")
		return m.Admission == devices.AdmissionRevoked && !slices.ContainsFunc(f.service.Keys().Keys(), func(k access.Key) bool { return f.ports.Ledger.Keys()[k.ID].Revoked.IsZero() })
	})
}

func TestChanges(t *testing.T) {
	f := newFleet(t)
	f.put("a", "", "", map[string]string{"room": "lab"})
	f.put("b", "", "", nil)
	f.do(t, "PATCH", "/v1/devices/a", `{"name":"x","labels":{"room":"lab","floor":"1"}}`)
	clerk, lab := f.key(t, "clerk", "devices:read", ""), f.key(t, "lab", "devices:read", "room=lab")
	f.do(t, "PATCH", "/v1/devices/b", `{"name":"y"}`, as(f.key(t, "writer", "devices:write", ""))...)
	f.do(t, "PUT", "/v1/policy?base_version=0", `{"rules":[{"name":"quiet","action":"deny"}]}`)
	f.do(t, "DELETE", "/v1/devices/b", "")
	log := func(path, token string) (out []string) {
		t.Helper()
		for cursor := ""; ; {
			var page struct {
				Items []struct {
					Revision            int64
					Device, Aspect, Who string
					Value               json.RawMessage
					At                  time.Time
				}
				Next string `json:"next_cursor"`
			}
			f.do(t, "GET", path+"&limit=2&cursor="+cursor, "", as(token)...).json(t, &page)
			for _, c := range page.Items {
				if c.Who == "" || time.Since(c.At) > time.Minute {
					t.Errorf("%+v", c)
				}
				out = append(out, fmt.Sprintf("%d %s %s", c.Revision, c.Device, c.Aspect))
				if c.Device == "" && (bytes.Contains(c.Value, []byte("hash")) || bytes.Contains(c.Value, []byte("quiet"))) {
					t.Errorf("%s shows %s", c.Aspect, c.Value)
				}
			}
			if cursor = page.Next; cursor == "" {
				return out
			}
		}
	}
	for _, tc := range []struct{ path, token, want string }{
		{"/v1/changes?", clerk, "1 a import, 2 b import, 3 a name, 4 a label:floor, 5  key, 6  key, 7  key, 8 b name, 9  policy, 10 b admission, 11 b generation"},
		{"/v1/changes?after=7", clerk, "8 b name, 9  policy, 10 b admission, 11 b generation"},
		{"/v1/changes?since=2026-01-01T00:00:00Z", lab, "1 a import, 3 a name, 4 a label:floor"},
		{"/v1/changes?since=2099-01-01T00:00:00Z", clerk, ""},
		{"/v1/devices/a/changes?", lab, "4 a label:floor, 3 a name, 1 a import"},
		{"/v1/devices/b/changes?", clerk, "11 b generation, 10 b admission, 8 b name, 2 b import"},
	} {
		if got := strings.Join(log(tc.path, tc.token), ", "); got != tc.want {
			t.Errorf("%s: %s, want %s", tc.path, got, tc.want)
		}
	}
	f.do(t, "GET", "/v1/devices/b/changes", "", as(lab)...).problem(t, 403, devices.CodeForbidden)
	f.do(t, "GET", "/v1/devices/nobody/changes", "").problem(t, 404, devices.CodeDeviceUnknown)
	f.do(t, "GET", "/v1/changes?since=yesterday", "").problem(t, 400, devices.CodeBadRequest)
	f.do(t, "GET", "/v1/changes?cursor=x", "").problem(t, 400, devices.CodeBadRequest)
}

// Of 10,000 lines three have a fault: each is named, and nothing is taken. Without
// them all are there, and an export gives them back.
func TestImportOfManyLines(t *testing.T) {
	manyLines := racetest.Size(10_000, 1000)
	dir := t.TempDir()
	f := newFleet(t, func(o *Options) { o.Dir = dir })
	lines := []string{"id,name,label.room,label.floor,client_id"}
	for i := range manyLines {
		lines = append(lines, fmt.Sprintf("02:00:00:00:%02x:%02x,=unit %d,lab,%d,client-%d", i>>8, i&255, i, i%7, i))
	}
	faulty := slices.Clone(lines)
	faulty[234] = strings.Replace(lines[234], "lab", strings.Repeat("x", 257), 1)
	faulty[500] = lines[17]
	faulty[manyLines-1] = "no id," + strings.Join(strings.Split(lines[manyLines-1], ",")[1:], ",")
	p := f.do(t, "POST", "/v1/devices/import", strings.Join(faulty, "\n"), "Content-Type", "text/csv").problem(t, 422, devices.CodeInvalidArguments)
	column := int64(len(strings.Join(strings.Split(lines[234], ",")[:2], ",")) + 2)
	want := []api.LineFault{{Line: 235, Column: column, Detail: "label room has 257 bytes, at most 256 are allowed"},
		{Line: 501, Column: 1, Detail: "02:00:00:00:00:10 is on line 18 already"},
		{Line: int64(manyLines), Column: 1, Detail: `id must be a MAC address or 1 to 64 of [a-z0-9_-], not "no id"`}}
	if !slices.Equal(p.Faults, want) || p.Refused != 3 || p.Detail != "the file has faults on 3 rows; nothing of it was imported" {
		t.Errorf("%+v", p)
	}
	if n := f.service.Registry().Members(); n != 0 {
		t.Fatalf("%d devices of a file that was refused", n)
	}
	var report api.ImportReport
	body := strings.Join(lines, "\n")
	f.do(t, "POST", "/v1/devices/import", body, "Content-Type", "text/csv").json(t, &report)
	if report.Rows != int64(manyLines) || report.Created != int64(manyLines) || report.Refused != 0 || f.service.Registry().Members() != manyLines {
		t.Errorf("%+v, %d members", report, f.service.Registry().Members())
	}
	f.do(t, "POST", "/v1/devices/import", body).json(t, &report)
	if report.Rows != int64(manyLines) || report.Unchanged != int64(manyLines) || report.Created+report.Changed != 0 {
		t.Errorf("the same file again: %+v", report)
	}
	for format, kind := range map[string]string{"csv": "text/csv; charset=utf-8", "ndjson": "application/x-ndjson"} {
		r := f.do(t, "GET", "/v1/devices/export?secrets=true&format="+format, "")
		if r.status != 200 || r.header.Get("Content-Type") != kind || strings.Count(r.body, "\n") != map[string]int{"csv": manyLines + 1, "ndjson": manyLines}[format] {
			t.Fatalf("%d %v", r.status, r.header)
		}
		if format == "csv" && !strings.Contains(r.body, "\n02:00:00:00:00:10,'=unit 16,,,client-16,member,2,lab,offline,") {
			t.Errorf("%.500s", r.body)
		}
		f.do(t, "POST", "/v1/devices/import", r.body).json(t, &report)
		if report.Rows != int64(manyLines) || report.Unchanged != int64(manyLines) {
			t.Errorf("%s of the export imported: %+v", format, report)
		}
		other := newFleet(t)
		other.do(t, "POST", "/v1/devices/import", r.body).json(t, &report)
		if report.Created != int64(manyLines) {
			t.Errorf("%+v", report)
		}
		for _, id := range []devices.ID{"02:00:00:00:00:00", devices.ID(fmt.Sprintf("02:00:00:00:%02x:%02x", (manyLines-1)>>8, (manyLines-1)&255))} {
			mine, _ := f.ports.Ledger.Member(id)
			theirs, _ := other.ports.Ledger.Member(id)
			if mine.Name != theirs.Name || fmt.Sprint(mine.Labels) != fmt.Sprint(theirs.Labels) || mine.ClientID != theirs.ClientID || mine.ClientID == "" {
				t.Errorf("%+v is %+v elsewhere", mine, theirs)
			}
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("%v, %v", left, err)
	}
	if entries := f.audited(audit.KindDevice); len(entries) != 4 || entries[0].Action != "import" || entries[0].Detail != fmt.Sprintf("%d rows: %d created, 0 changed, 0 unchanged, 0 refused", manyLines, manyLines) {
		t.Errorf("%+v", entries[:1])
	}
}

// A file that drips in takes no import away from others, and ends with its time.
func TestDrippingImport(t *testing.T) {
	f := newFleet(t, func(o *Options) { o.Dir = t.TempDir() })
	for range maxReceived - 1 {
		c, err := net.Dial("tcp", strings.TrimPrefix(f.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		if _, err := fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %s\r\nContent-Type: text/csv\r\nContent-Length: 30000\r\n\r\nid\n", pathImport, f.token); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 200 { // the others are being received by then
		// security: N39
		if r := f.do(t, "POST", pathImport, fmt.Sprintf("id\n02:00:00:00:00:%02x\n", i), "Content-Type", "text/csv"); r.status != http.StatusOK {
			t.Fatalf("import %d: %d %s", i, r.status, r.body)
		}
	}
	// security: N39
	if allowed := filePace.Grace + time.Duration(30000/filePace.Rate)*time.Second; allowed > 2*time.Minute {
		t.Errorf("a file of 30,000 bytes may take %v", allowed)
	}
}

// A key has a share of the places in which files are received, and its import ends with it.
func TestSharesOfImports(t *testing.T) {
	f := newFleet(t, func(o *Options) { o.Dir = t.TempDir() })
	tokens := []string{f.key(t, "one", "devices:write", ""), f.key(t, "two", "devices:write", ""), f.key(t, "three", "devices:write", "")}
	drip := func(token string) *net.TCPConn {
		t.Helper()
		dialled, err := net.Dial("tcp", strings.TrimPrefix(f.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		c := dialled.(*net.TCPConn)
		t.Cleanup(func() { _ = c.Close() })
		if _, err := fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %s\r\nContent-Type: text/csv\r\nContent-Length: 30000\r\n\r\nid\n", pathImport, token); err != nil {
			t.Fatal(err)
		}
		return c
	}
	places := func() int64 {
		f.api.receiving.mu.Lock()
		defer f.api.receiving.mu.Unlock()
		n := int64(0)
		for _, held := range f.api.receiving.held {
			n += held
		}
		return n
	}
	first := drip(tokens[0])
	devicetest.Eventually(t, "the first key's file is received", func() bool { return places() == 1 })
	send := func(token string) response {
		return f.do(t, "POST", pathImport, "id\n", append(as(token), "Content-Type", "text/csv")...)
	}
	// security: N39
	send(tokens[0]).problem(t, 409, devices.CodeLimitReached)
	drip(tokens[1])
	devicetest.Eventually(t, "the second key's file is received", func() bool { return places() == 2 })
	// security: N39
	send(tokens[2]).problem(t, 409, devices.CodeLimitReached)
	// security: N39
	if r := send(f.token); r.status != http.StatusOK {
		t.Errorf("the administrator: %d %s", r.status, r.body)
	}
	if r := f.do(t, "DELETE", "/v1/keys/one", ""); r.status/100 != 2 {
		t.Fatalf("%d %s", r.status, r.body)
	}
	// security: N39
	if r := send(tokens[2]); r.status != http.StatusOK {
		t.Errorf("when the first key has ended: %d %s", r.status, r.body)
	}
	_, err := fmt.Fprint(first, "02:00:00:00:00:01\n")
	if err := errors.Join(err, first.CloseWrite()); err != nil { // an answer waits for the body here, unlike in a node
		t.Fatal(err)
	}
	answer, err := http.ReadResponse(bufio.NewReader(first), nil)
	// security: N39
	if err != nil || answer.StatusCode != http.StatusUnauthorized {
		t.Errorf("the import of a key that has ended: %v, %v", answer, err)
	}
	_ = answer.Body.Close()
}

func TestImportRules(t *testing.T) {
	f := newFleet(t)
	f.ports.Put(devices.Member{ID: "member", ClientID: "c1", Name: "old", Labels: map[string]string{"room": "lab", "floor": "1"}})
	f.ports.Put(devices.Member{ID: "open", Labels: map[string]string{"room": "hall"}})
	f.ports.Put(devices.Member{ID: "gone", Admission: devices.AdmissionRevoked, ClientID: "c2"})
	lab := f.key(t, "lab", "devices:write", "room=lab")
	one := f.key(t, "one", "devices:write", "device in (member,new1)")
	for _, tc := range []struct {
		name, query, body, token string
		status                   int
		want                     string
	}{
		{"merge", "", "id,label.floor,label.new,name\nmember,\\null,x,\n", "", 200, `{"rows":1,"created":0,"changed":1,"unchanged":0,"first_clients":0,"refused":0,"faults":[]}`},
		{"first client", "", `{"id":"open"}` + "\n" + `{"id":"fresh"}`, "", 200, `{"rows":2,"created":1,"changed":0,"unchanged":1,"first_clients":2,"refused":0,"faults":[]}`},
		{"other client", "", "id,client_id\nmember,c9\ngone,\n", "", 422, `"faults":[{"line":2,"column":1,"detail":"the device has another admitted client; import it with replace_client to replace that client"},{"line":3,"column":1,"detail":"the device was revoked;`},
		{"no client", "", `{"id":"member","client_id":null}`, "", 422, `the device has another admitted client`},
		{"partial", "?partial=true", "id,client_id\nmember,c9\nfresh,c5\n", "", 200, `"changed":1,"unchanged":0,"first_clients":0,"refused":1,"faults":[{"line":2,`},
		{"replace", "?replace_client=true", "id,client_id\nmember,c9\ngone,\n", "", 200, `"changed":2,"unchanged":0,"first_clients":0,"refused":0`},
		{"replaced", "?replace_client=true&partial=false", "id,client_id\nmember,c9\ngone,\n", "", 200, `"changed":0,"unchanged":2`},
		{"key by label", "", "id,name\nmember,a\nopen,b\nnew,c\n", lab, 422, `"detail":"the key does not cover this device, or the fleet does not have it; a key that is limited by labels cannot create devices"},{"line":4,"column":1,"detail":"the key does not cover this device, or the fleet does not have it; a key that is limited by labels cannot create devices"}]`},
		{"its own", "", "id,name\nmember,a\n", lab, 200, `"changed":1`},
		{"key by id", "", "id\nnew1\nnew2\n", one, 422, `"faults":[{"line":3,"column":1,"detail":"the key does not cover this device"}]`},
		{"header, partial", "?partial=true", "id,nmae\na,b\n", "", 422, `unknown column \"nmae\"`},
		{"no rows", "", "id\n", "", 200, `{"rows":0,`},
		{"parameter", "?replace=true", "id\n", "", 400, `query.replace: unknown query parameter; /docs lists`},
		{"value", "?partial=yes", "id\n", "", 400, "query.partial: invalid boolean"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			headers := []string{"Content-Type", "application/x-www-form-urlencoded"} // as curl sends it
			if tc.token != "" {
				headers = append(headers, as(tc.token)...)
			}
			if r := f.do(t, "POST", "/v1/devices/import"+tc.query, tc.body, headers...); r.status != tc.status || !strings.Contains(r.body, tc.want) {
				t.Errorf("%d %s", r.status, r.body)
			}
		})
	}
	member, _ := f.ports.Ledger.Member("member")
	if fmt.Sprint(member.Labels) != "map[new:x room:lab]" || member.Name != "a" || member.ClientID != "c9" || member.Generation != 1 || member.Reason != "imported" {
		t.Errorf("%+v", member)
	}
	if gone, _ := f.ports.Ledger.Member("gone"); gone.Admission != devices.AdmissionMember || gone.ClientID != "c2" || gone.Generation == 0 {
		t.Errorf("%+v", gone)
	}
	if _, known := f.ports.Ledger.Member("new1"); known {
		t.Error("a row of a refused file was taken")
	}
	for _, c := range f.ports.Ledger.Log(0) {
		if c.Device != "" && c.Aspect != devices.AspectImport {
			t.Errorf("%+v", c)
		}
	}
}

// The first client that comes with the id of an imported member is admitted, also
// under approve.
func TestFirstClientOfAnImport(t *testing.T) {
	f := newFleet(t)
	f.do(t, "POST", "/v1/devices/import", "id\nfresh\n")
	if welcome, err := f.service.CheckIn(t.Context(), admission.CheckIn{Device: "fresh", ClientID: "first"}); err != nil || !welcome.Admitted {
		t.Errorf("%+v, %v", welcome, err)
	}
	if welcome, err := f.service.CheckIn(t.Context(), admission.CheckIn{Device: "fresh", ClientID: "second"}); err != nil || welcome.Admitted {
		t.Errorf("%+v, %v", welcome, err)
	}
}

func TestExportSelects(t *testing.T) {
	f := newSelectFleet(t)
	if _, err := f.service.CheckIn(t.Context(), admission.CheckIn{Device: "waits", ClientID: "w"}); err != nil {
		t.Fatal(err)
	}
	lab := f.key(t, "lab", "devices:read", "room=lab")
	for _, tc := range []struct{ query, token, want string }{
		{"", f.token, "a b c d e"}, {"?select=board%3Desp*", f.token, "a b"}, {"", lab, "a c"}, {"?select=floor", lab, "a"}, {"?select=nothing", lab, ""},
	} {
		var got []string
		for line := range strings.Lines(f.do(t, "GET", "/v1/devices/export"+tc.query, "", as(tc.token)...).body) {
			if id, _, _ := strings.Cut(line, ","); id != "id" {
				got = append(got, id)
			}
		}
		if strings.Join(got, " ") != tc.want {
			t.Errorf("%s: %v", tc.query, got)
		}
	}
	for _, query := range []string{"?format=xml", "?select=,", "?selct=a"} {
		f.do(t, "GET", "/v1/devices/export"+query, "").problem(t, 400, devices.CodeBadRequest)
	}
}
