package restapi

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
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
)

// fakeArchive keeps versions and blocks in memory.
type fakeArchive struct {
	mu       sync.Mutex
	versions []access.Policy // oldest first
	blocks   []audit.Block   // in the order of runs
	asked    int             // for blocks
	err      error
}

func (a *fakeArchive) PolicyVersion(_ context.Context, version int64) (access.Policy, error) {
	for _, p := range a.versions {
		if p.Version == version {
			return p, a.err
		}
	}
	return access.Policy{}, a.err
}

func (a *fakeArchive) PolicyVersions(_ context.Context, before int64, limit int) (out []access.Policy, err error) {
	for _, p := range slices.Backward(a.versions) {
		if before == 0 || p.Version < before {
			out = append(out, p)
		}
	}
	return out[:min(len(out), limit)], a.err
}

func (a *fakeArchive) AuditBlocks(_ context.Context, q audit.Query) (out []audit.Block, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.asked++
	all := slices.SortedFunc(slices.Values(a.blocks), func(x, y audit.Block) int {
		return cmp.Or(y.LastAt.Compare(x.LastAt), cmp.Compare(y.Run, x.Run), cmp.Compare(y.FirstSeq, x.FirstSeq))
	})
	for _, b := range all {
		p := q.Before
		after := p.LastAt.IsZero() || cmp.Or(b.LastAt.Compare(p.LastAt), cmp.Compare(b.Run, p.Run), cmp.Compare(b.FirstSeq, p.FirstSeq)) <= 0
		if after && (q.Since.IsZero() || !b.LastAt.Before(q.Since)) && (q.Until.IsZero() || !b.FirstAt.After(q.Until)) {
			out = append(out, b)
		}
	}
	return out[:min(len(out), q.Limit)], a.err
}

func (a *fakeArchive) AuditRuns(_ context.Context, q audit.Query) (out []audit.Block, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, b := range a.blocks {
		if cmp.Or(cmp.Compare(b.Run, q.Before.Run), cmp.Compare(b.FirstSeq, q.Before.FirstSeq)) > 0 && (q.Since.IsZero() || !b.LastAt.Before(q.Since)) {
			out = append(out, b)
		}
	}
	return out[:min(len(out), q.Limit)], a.err
}

// SaveAuditBlock implements audit.Store.
func (a *fakeArchive) SaveAuditBlock(_ context.Context, b *audit.Block) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.blocks = append(a.blocks, *b)
	return nil
}

var auditDay = time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)

// fill writes blocks of ten entries, a minute apart; every 100th is a refusal.
func (a *fakeArchive) fill(blocks int, key []byte) {
	var previous audit.Hash
	for i := range blocks {
		at := auditDay.Add(time.Duration(i) * time.Minute)
		b := audit.Block{Run: "r1", Node: "n-1", FirstSeq: int64(10*i + 1), LastSeq: int64(10*i + 10), FirstAt: at, LastAt: at.Add(9 * time.Second), Previous: previous}
		for seq := b.FirstSeq; seq <= b.LastSeq; seq++ {
			outcome := "ok"
			if seq%100 == 0 {
				outcome = "forbidden"
			}
			action := "t"
			if seq%50 == 7 {
				action = "self.reboot"
			}
			b.Entries = fmt.Appendf(b.Entries, `{"seq":%d,"at":%q,"kind":"call","action":%q,"device":"aa:bb:cc:dd:ee:%02x","key":"k%d","outcome":%q}`+"\n",
				seq, at.Add(time.Duration(seq-b.FirstSeq)*time.Second).Format(time.RFC3339Nano), action, seq%2, seq%3, outcome)
		}
		b.Hash = b.Sum(key)
		previous = b.Hash
		a.blocks = append(a.blocks, b)
	}
}

type auditPageBody struct {
	Items []audit.Line
	Next  string `json:"next_cursor"`
}

// A key with audit:read sees calls of others, as far as its devices and tools go, and no addresses.
func TestAuditOfKeys(t *testing.T) {
	f := newFleet(t)
	for id, room := range map[devices.ID]string{"aa:bb:cc:dd:ee:01": "lab", "aa:bb:cc:dd:ee:00": "hall"} {
		f.ports.Put(devices.Member{ID: id, Labels: map[string]string{"room": room}})
	}
	f.archive.fill(20, f.api.opt.Mint.AuditKey())
	at := auditDay.Add(time.Hour)
	f.archive.blocks = append(f.archive.blocks, audit.Block{Run: "r2", Node: "n-1", FirstSeq: 1, LastSeq: 4, FirstAt: at, LastAt: at, Entries: []byte(`{"seq":1,"at":"2026-03-01T01:00:00Z","kind":"policy","action":"change","outcome":"ok"}
{"seq":2,"at":"2026-03-01T01:00:00Z","kind":"key","action":"create","outcome":"ok"}
{"seq":3,"at":"2026-03-01T01:00:00Z","kind":"call","action":"self.reboot","device":"forgotten","key":"k1","outcome":"ok"}
{"seq":4,"at":"2026-03-01T01:00:00Z","kind":"call","action":"t","device":"aa:bb:cc:dd:ee:01","key":"k1","from":"192.0.2.7","outcome":"ok"}
`)})
	read := func(token string) (list []audit.Line, body string) {
		t.Helper()
		r := f.do(t, "GET", "/v1/audit?limit=1000", "", "Authorization", "Bearer "+token)
		var page auditPageBody
		r.json(t, &page)
		return page.Items, r.body
	}
	// security: H30
	if list, body := read(f.key(t, "auditor", "devices:read audit:read", "room=lab", "t")); len(list) != 101-4 || strings.Contains(body, "ee:00") || strings.Contains(body, "192.0.2.7") || strings.Contains(body, "self.reboot") {
		t.Errorf("%d entries: %.600s", len(list), body)
	}
	// security: H30
	if list, body := read(f.key(t, "all", "audit:read", "")); len(list) != 202 || strings.Contains(body, `"kind":"key"`) || strings.Contains(body, `"kind":"policy"`) {
		t.Errorf("%d entries: %.600s", len(list), body)
	}
	// security: H30
	if r := f.do(t, "GET", "/v1/audit", "", "Authorization", "Bearer "+f.key(t, "reader", "devices:read events:read", "")); r.status != 403 {
		t.Errorf("%+v", r)
	}
	// security: H30
	if r := f.do(t, "GET", "/v1/audit/export", "", "Authorization", "Bearer "+f.key(t, "an exporter", "audit:read", "")); r.status != 403 {
		t.Errorf("%+v", r)
	}
}

func TestAuditList(t *testing.T) {
	f := newFleet(t)
	f.archive.fill(200, f.api.opt.Mint.AuditKey())
	for _, tc := range []struct {
		query       string
		limit, want int
		match       func(audit.Line) bool
	}{
		{"", 7, 2000, func(audit.Line) bool { return true }},
		{"&action=self.reboot", 3, 40, func(l audit.Line) bool { return l.Action == "self.reboot" }},
		{"&outcome=forbidden", 3, 20, func(l audit.Line) bool { return l.Outcome == "forbidden" }},
		{"&device=AABBCCDDEE01", 100, 1000, func(l audit.Line) bool { return l.Device == "aa:bb:cc:dd:ee:01" }},
		{"&key=k2&kind=call", 1000, 667, func(l audit.Line) bool { return l.Key == "k2" }},
		{"&kind=policy", 10, 0, nil},
		{"&since=2026-03-01T00:10:05Z&until=2026-03-01T00:11:04Z", 4, 10, func(l audit.Line) bool { return l.Seq >= 106 && l.Seq <= 115 }},
	} {
		var got []audit.Line
		pages := 0
		for cursor := ""; ; {
			var page auditPageBody
			f.archive.asked = 0
			f.do(t, "GET", fmt.Sprintf("/v1/audit?limit=%d&cursor=%s%s", tc.limit, cursor, tc.query), "").json(t, &page)
			if f.archive.asked > audit.MaxWalked/audit.WalkPage || len(page.Items) > tc.limit {
				t.Fatalf("%s: %d looks, %d items", tc.query, f.archive.asked, len(page.Items))
			}
			got = append(got, page.Items...)
			if cursor = page.Next; cursor == "" {
				break
			}
			if pages++; pages > 3000 {
				t.Fatal("the pages do not end")
			}
		}
		if len(got) != tc.want || !slices.IsSortedFunc(got, func(a, b audit.Line) int { return cmp.Compare(b.Seq, a.Seq) }) {
			t.Errorf("%s: %d entries, want %d", tc.query, len(got), tc.want)
		}
		for _, line := range got {
			if !tc.match(line) || line.Run != "r1" || line.Node != "n-1" {
				t.Errorf("%s: %+v", tc.query, line)
			}
		}
	}
	f.do(t, "GET", "/v1/audit?cursor=eA", "").problem(t, 400, devices.CodeBadRequest)
	f.do(t, "GET", "/v1/audit?since=yesterday", "").problem(t, 400, devices.CodeBadRequest)
	f.archive.err = devices.ErrDatabase
	f.do(t, "GET", "/v1/audit", "").problem(t, 503, devices.CodeUnavailable)
	f.do(t, "GET", "/v1/audit/export", "").problem(t, 503, devices.CodeUnavailable)
}

func TestAuditExportAndVerify(t *testing.T) {
	f := newFleet(t)
	f.archive.fill(100, f.api.opt.Mint.AuditKey())
	r := f.do(t, "GET", "/v1/audit/export", "")
	if r.status != 200 || r.header.Get("Content-Type") != "application/jsonl" {
		t.Fatalf("%d %v", r.status, r.header)
	}
	v := audit.Verifier{Key: f.api.opt.Mint.AuditKey()}
	if err := audit.ReadExport(strings.NewReader(r.body), func(b *audit.Block) error { v.Add(b); return nil }); err != nil {
		t.Fatal(err)
	}
	if report := v.Report(); !report.Intact || report.Entries != 1000 || report.Runs != 1 {
		t.Errorf("%+v", report)
	}
	f.do(t, "GET", "/v1/audit/export?since=x", "").problem(t, 400, devices.CodeBadRequest)
	var report api.AuditReport
	f.do(t, "GET", "/v1/audit/verify", "").json(t, &report)
	if !report.Intact || report.Blocks != 100 {
		t.Errorf("%+v", report)
	}
	f.archive.blocks = slices.Delete(f.archive.blocks, 50, 51)
	f.do(t, "GET", "/v1/audit/verify", "").json(t, &report)
	// security: R4
	if report.Intact || len(report.Faults) != 1 || !strings.Contains(report.Faults[0], "501 to 510") {
		t.Errorf("%+v", report)
	}
}

func TestKeys(t *testing.T) {
	f := newFleet(t)
	body := `{"name":"lab","scopes":["tools:call","devices:read"],"devices":{"room":"lab"},"tools":["*get_*"],"expires":"2099-01-01T00:00:00Z"}`
	r := f.do(t, "POST", "/v1/keys", body)
	var made struct{ ID, State, Token string }
	if err := json.Unmarshal([]byte(r.body), &made); r.status != 201 || err != nil || made.Token == "" || made.State != "valid" || made.ID == "" {
		t.Fatalf("%d %s", r.status, r.body)
	}
	if r := f.do(t, "GET", "/v1/devices", "", as(made.Token)...); r.status != 200 {
		t.Errorf("%d %s", r.status, r.body)
	}
	for _, bad := range []string{body, `{"name":"x","scopes":[]}`, `{"name":"x","scopes":["all"]}`, `{"scopes":["admin"]}`, `{"name":"x","scopes":["admin"],"tools":["a"]}`,
		`{"name":"x","scopes":["admin"],"expires":"2001-01-01T00:00:00Z"}`, `{"name":"admin","scopes":["admin"]}`} {
		f.do(t, "POST", "/v1/keys", bad).problem(t, 400, devices.CodeBadRequest)
	}
	for i := range 4 {
		f.key(t, fmt.Sprint("more ", i), "admin", "")
	}
	var names []string
	for cursor := ""; ; {
		r := f.do(t, "GET", "/v1/keys?limit=2&cursor="+cursor, "")
		// security: K1
		if strings.Contains(r.body, made.Token) || strings.Contains(r.body, "hash") {
			t.Errorf("the list shows what is secret: %s", r.body)
		}
		var page api.List[struct{ Name, State string }]
		r.json(t, &page)
		for _, k := range page.Items {
			names = append(names, k.Name+" "+k.State)
		}
		if cursor = page.NextCursor; cursor == "" {
			break
		}
	}
	if !slices.Equal(names, []string{"lab valid", "more 0 valid", "more 1 valid", "more 2 valid", "more 3 valid"}) {
		t.Errorf("%v", names)
	}
	if r := f.do(t, "DELETE", "/v1/keys/lab", ""); r.status != 204 {
		t.Errorf("%d %s", r.status, r.body)
	}
	f.do(t, "GET", "/v1/devices", "", as(made.Token)...).problem(t, 401, devices.CodeUnauthorized)
	f.do(t, "DELETE", "/v1/keys/nobody", "").problem(t, 404, devices.CodeNotFound)
	if r := f.do(t, "POST", "/v1/keys", body); r.status != 201 { // a name is free again
		t.Errorf("%d %s", r.status, r.body)
	}
	entries := f.audited(audit.KindKey)
	if len(entries) < 3 || strings.Contains(fmt.Sprint(entries), made.Token) {
		t.Errorf("%+v", entries)
	}
}

// Which devices a key is for is a text, or an object with labels.
func TestKeySelectors(t *testing.T) {
	f := newFleet(t)
	for i, c := range []struct{ given, shown string }{
		{`{"room":"lab","board":"x"}`, `{"board":"x","room":"lab"}`}, {`"label.board=x, room=lab"`, `{"board":"x","room":"lab"}`}, {`"room in (lab,hall),!retired"`, `"!retired,room in (hall,lab)"`},
		{`{}`, `{}`}, {`""`, `{}`}, {`"room=l*"`, `"room=l*"`}, {`{"room":"l*"}`, `{"room":"l*"}`}, {`{"owner":"<a>&b"}`, `{"owner":"<a>&b"}`},
	} {
		r := f.do(t, "POST", "/v1/keys", fmt.Sprintf(`{"name":"key %d","scopes":["devices:read"],"devices":%s}`, i, c.given))
		if !strings.Contains(r.body, `"devices":`+c.shown+`,`) || r.status != 201 {
			t.Errorf("%s: %d %s", c.given, r.status, r.body)
		}
	}
	for given, want := range map[string]string{
		`"room="`:             `column 6: expected a value`,
		`"room=lab,state=up"`: `column 16: expected one of online, offline, pending, contested`,
		`"board=x"`:           `only device and labels may be used in API keys and policy: board is reported by the device itself`,
		`"room,seen>2h"`:      `seen changes with the connection`,
		`{"living room":"x"}`: `a label of 1 to 63 characters`,
		`["room"]`:            `devices`,
		`{"room":7}`:          `devices`,
	} {
		p := f.do(t, "POST", "/v1/keys", fmt.Sprintf(`{"name":"x","scopes":["devices:read"],"devices":%s}`, given)).problem(t, 400, devices.CodeBadRequest)
		if !strings.Contains(p.Detail, want) {
			t.Errorf("%s: %s, want %s", given, p.Detail, want)
		}
	}
	for given, want := range map[string]string{`"room="`: `rule 1 ("a"): devices: selector "room=", column 6`, `"tool=x"`: `rule 1 ("a"): devices: only device and labels`} {
		p := f.do(t, "PUT", "/v1/policy?base_version=0", fmt.Sprintf(`{"rules":[{"name":"a","action":"deny","devices":%s}]}`, given)).problem(t, 400, devices.CodeBadRequest)
		if !strings.Contains(p.Detail, want) {
			t.Errorf("%s: %s, want %s", given, p.Detail, want)
		}
	}
	r := f.do(t, "PUT", "/v1/policy?base_version=0", `{"rules":[{"name":"a","action":"deny","devices":"room!=lab"},{"name":"b","action":"deny","devices":{"room":"lab"}}]}`)
	if r.status != 200 || !strings.Contains(r.body, `"devices":"room!=lab"`) || !strings.Contains(r.body, `"devices":{"room":"lab"}`) {
		t.Errorf("%d %s", r.status, r.body)
	}
	if doc := f.do(t, "GET", "/openapi.json", "").body; strings.Count(doc, `"oneOf":[{"description":"Terms joined by commas`) != 7 { // Key, CreatedKey, NewKey, Self, Rule, Read, NewConsoleCode
		t.Errorf("%d schemas of a selector", strings.Count(doc, `"oneOf":[{"description":"Terms joined by commas`))
	}
}

func TestPolicy(t *testing.T) {
	f := newFleet(t)
	f.connect(t, robot, devicetest.NewScript())
	r := f.do(t, "GET", "/v1/policy", "")
	if r.status != 200 || r.header.Get("ETag") != `"0"` || strings.TrimSpace(r.body) != `{"version":0}` {
		t.Errorf("%d %s %v", r.status, r.body, r.header)
	}
	const rules = `{"rules":[{"name":"quiet","tools":["self.audio_speaker.*"],"action":"deny"}]}`
	f.do(t, "PUT", "/v1/policy", rules).problem(t, 400, devices.CodeBadRequest)
	r = f.do(t, "PUT", "/v1/policy?base_version=0", rules)
	if r.status != 200 || r.header.Get("ETag") != `"1"` || strings.Contains(r.body, "warnings") {
		t.Fatalf("%d %s", r.status, r.body)
	}
	w := f.do(t, "PUT", "/v1/policy?base_version=1", `{"rules":[{"name":"quiet","tools":["self.audio_speaker.*","self.audio_speeker.*"],"action":"deny"}],"urls":[{"tools":["self.nothing"],"prefixes":["https://a.example/"]}]}`)
	if !strings.Contains(w.body, `"warnings":["rule \"quiet\": no known tool matches \"self.audio_speeker.*\"","urls 1: no known tool matches \"self.nothing\""]`) {
		t.Errorf("a policy with misspelt tools: %s", w.body)
	}
	if r := f.do(t, "GET", "/v1/policy", ""); strings.Contains(r.body, "warnings") {
		t.Errorf("they are stored: %s", r.body)
	}
	r = f.do(t, "PUT", "/v1/policy?base_version=2", w.body) // what is answered is taken
	if r.status != 200 {
		t.Fatalf("%d %s", r.status, r.body)
	}
	f.do(t, "PUT", "/v1/policy?base_version=0", rules).problem(t, 400, devices.CodeBadRequest)
	if r := f.do(t, "PUT", "/v1/policy", rules, "If-Match", `"3"`); r.status != 200 { // what is answered is taken
		t.Errorf("%d %s", r.status, r.body)
	}
	p := f.do(t, "PUT", "/v1/policy?base_version=4", `{"rules":[{"name":"x","action":"maybe"}]}`).problem(t, 400, devices.CodeBadRequest)
	if !strings.Contains(p.Detail, "maybe") {
		t.Error(p.Detail)
	}
	f.do(t, "PUT", "/v1/policy?base_version=4", strings.Repeat(" ", BodyLimit+1)).problem(t, 413, devices.CodeTooLarge)
	if p := f.do(t, "POST", volumePath, `{"arguments":{"volume":5}}`).problem(t, 403, devices.CodeToolDenied); p.Rule != "policy:quiet" {
		t.Errorf("%+v", p)
	}

	var x access.Explanation
	f.do(t, "GET", "/v1/policy/explain?key=admin&device="+string(robot)+"&tool=self.audio_speaker.set_volume&via=mcp", "").json(t, &x)
	if x.Action != access.Deny || x.Rule != "policy:quiet" || len(x.Steps) < 8 {
		t.Errorf("%+v", x)
	}
	f.key(t, "old", "tools:call", "")
	f.do(t, "DELETE", "/v1/keys/old", "")
	f.do(t, "GET", "/v1/policy/explain?key=old&device="+string(robot)+"&tool=a", "").json(t, &x)
	if x.Action != access.Deny || x.Rule != access.RuleCaller || !strings.Contains(x.Detail, "revoked") {
		t.Errorf("%+v", x)
	}
	f.do(t, "GET", "/v1/policy/explain?key=admin&device="+string(robot)+"&tool=self.nothing", "").json(t, &x)
	if x.Action != access.Allow || !strings.Contains(x.Detail, "does not have the tool") {
		t.Errorf("a tool that is not there: %+v", x)
	}
	f.do(t, "GET", "/v1/policy/explain?key=nobody&device="+string(robot)+"&tool=a", "").problem(t, 404, devices.CodeNotFound)
	f.do(t, "GET", "/v1/policy/explain?key=admin&device=aa:bb:cc:dd:ee:99&tool=a", "").problem(t, 404, devices.CodeDeviceUnknown)
	f.do(t, "GET", "/v1/policy/explain?key=admin&device="+string(robot)+"&tool=a&arguments=[1]", "").problem(t, 400, devices.CodeBadRequest)

	for v := range 5 {
		f.archive.versions = append(f.archive.versions, access.Policy{Version: int64(v + 1), By: "me", Changed: auditDay})
	}
	var page api.List[struct {
		Version int64
		By      string
	}]
	f.do(t, "GET", "/v1/policy/versions?limit=3", "").json(t, &page)
	if len(page.Items) != 3 || page.Items[0].Version != 5 || page.Items[0].By != "me" || page.NextCursor == "" {
		t.Errorf("%+v", page)
	}
	f.do(t, "GET", "/v1/policy/versions?limit=3&cursor="+page.NextCursor, "").json(t, &page)
	if len(page.Items) != 2 || page.Items[1].Version != 1 || page.NextCursor != "" {
		t.Errorf("%+v", page)
	}
	if r := f.do(t, "GET", "/v1/policy/versions/2", ""); r.status != 200 || !strings.Contains(r.body, `"version":2`) {
		t.Errorf("%d %s", r.status, r.body)
	}
	f.do(t, "GET", "/v1/policy/versions/9", "").problem(t, 404, devices.CodeNotFound)
	if n := len(f.audited(audit.KindPolicy)); n != 5 { // four versions, and one that came too late
		t.Errorf("%d entries", n)
	}
	f.do(t, "PUT", "/v1/policy", rules, "If-Match", `"2"`).problem(t, 412, devices.CodeStale)
}
