package storetest

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/racetest"
	"fleetd/internal/selector"
	"fleetd/internal/store"
)

func parse(t testing.TB, text string) selector.Selector {
	t.Helper()
	sel, err := selector.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return sel
}

// pages reads all pages of a list.
func pages(t testing.TB, s *store.Store, q devices.ListQuery) (rows []devices.Row) {
	t.Helper()
	for n := 0; ; n++ {
		page, err := s.List(t.Context(), q)
		if err != nil {
			t.Fatalf("%s %q: %v", q.Select, q.Text, err)
		}
		if q.Limit > 0 && len(page.Rows) > q.Limit {
			t.Fatalf("a page of %d, limit %d", len(page.Rows), q.Limit)
		}
		rows = append(rows, page.Rows...)
		if page.Next == "" {
			return rows
		}
		if page.Next == q.After || n > 10_000 {
			t.Fatalf("%s %q, sorted by %s: the list does not go on", q.Select, q.Text, q.Sort)
		}
		q.After = page.Next
	}
}

// list is the ids that a query selects.
func list(t testing.TB, s *store.Store, q devices.ListQuery) string {
	t.Helper()
	var ids []string
	for _, row := range pages(t, s, q) {
		ids = append(ids, string(row.Device.ID))
	}
	return strings.Join(ids, " ")
}

func testPaging(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	ids := []devices.ID{"a-b", "a_b", "ab", "a0", "a", "b", "a-", "a_", mac(1), mac(2), mac(3), "robot-10", "robot-9", "robot1"}
	db.add(t, ids...)
	slices.Sort(ids)
	for _, limit := range []int{1, 3, len(ids), 1000, 0} {
		var got []devices.ID
		for _, row := range pages(t, s, devices.ListQuery{Limit: limit}) {
			got = append(got, row.Device.ID)
		}
		if !slices.Equal(got, ids) {
			t.Errorf("limit %d: got %q, want %q", limit, got, ids)
		}
	}
	page, err := s.List(t.Context(), devices.ListQuery{Limit: len(ids)})
	if err != nil || page.Next != "" {
		t.Errorf("a full page that is the last: next %q, %v", page.Next, err)
	}
	page, err = s.List(t.Context(), devices.ListQuery{Limit: 1})
	if err != nil {
		t.Fatal(err)
	}
	for _, q := range []devices.ListQuery{{After: "x"}, {After: "{}"}, {After: page.Next, Sort: devices.SortName}} {
		_, err = s.List(t.Context(), q)
		mustBe(t, err, devices.ErrCursor)
	}
	if _, err := s.List(t.Context(), devices.ListQuery{Sort: "age"}); err == nil {
		t.Error("an unknown order was accepted")
	}
}

func testRows(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	var ids []devices.ID
	for i := range 700 {
		ids = append(ids, mac(i))
	}
	db.add(t, ids...)
	ask := append([]devices.ID{"nobody", "bad\x00id", mac(5), mac(3)}, ids...)
	rows, err := s.Rows(t.Context(), ask)
	if err != nil || len(rows) != len(ids) {
		t.Fatalf("%d rows, %v", len(rows), err)
	}
	for i, row := range rows {
		if row.Device.ID != ids[i] || row.Presence.Device != ids[i] {
			t.Fatalf("row %d is %+v", i, row)
		}
	}
	if rows, err := s.Rows(t.Context(), nil); err != nil || len(rows) != 0 {
		t.Errorf("%d rows of nobody, %v", len(rows), err)
	}
}

func testFilters(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	save := func(id devices.ID, admission devices.Admission, name, board, firmware string, online bool, transport devices.Transport) {
		db.Add(t, devices.Device{ID: id, Admission: admission, Name: name, Labels: map[string]string{"room": name}, Facts: devices.Facts{Board: board, Firmware: firmware}})
		if transport != "" {
			s.SavePresence(devices.Presence{Device: id, Epoch: 1, Online: online, Transport: transport, LastSeen: time.Now()})
		}
	}
	save("a", devices.AdmissionMember, "Küche", "Bread-Compact", "2.4.2", true, devices.TransportMQTT)
	save("b", devices.AdmissionMember, "100%_sure", "box", "2.4.2", true, devices.TransportWebSocket)
	save("c", devices.AdmissionMember, "ÖLRAUM", "box", "2.4.1", false, devices.TransportMQTT)
	save("d", devices.AdmissionMember, "", "box", "2.4.1", false, "")
	save("e", devices.AdmissionRevoked, "客厅", "bread", "1.9", false, "")
	settle(t, s)
	for _, test := range []struct{ text, sel, want string }{
		{"", "", "a b c d e"},
		{"", "state=online", "a b"},
		{"", "state=offline", "c d e"},
		{"", "state in (online,offline)", "a b c d e"},
		{"", "state=pending", ""},
		{"", "state in (online,contested)", "a b"},
		{"", "transport=mqtt", "a"},
		{"", "!transport", "c d e"},
		{"", "board=box", "b c d"},
		{"", "firmware=2.4.2,board=box", "b"},
		{"", "firmware<2.4.2", "c d e"},
		{"", "name=Küche", "a"},
		{"", "name=küche", ""},
		{"", "device in (a,c,x)", "a c"},
		{"", "device in (a,c,x),state=offline", "c"},
		{"", "device!=a,board!=box", "e"},
		{"", `room="100%*"`, "b"},
		{"", `room="*[*"`, ""},
		{"", `room="*%_*"`, "b"},
		{"", "room=\"\"", "d"},
		{"", "room!=\"\"", "a b c e"},
		{"", "room", "a b c d e"},
		{"", "!other", "a b c d e"},
		{"küche", "", "a"},
		{"ölraum", "", "c"},
		{"ÖLR", "", "c"},
		{"bread", "", "a e"},
		{"%", "", "b"},
		{"_", "", "b"},
		{"厅", "", "e"},
		{"|", "", ""},
		{"x\x00", "", ""},
		{"K", "state=online,transport=mqtt", "a"},
		{"a", "board=box", "c"},
	} {
		for _, limit := range []int{0, 1, 2} {
			if got := list(t, s, devices.ListQuery{Select: parse(t, test.sel), Text: test.text, Limit: limit}); got != test.want {
				t.Errorf("%q %q, limit %d: got %q, want %q", test.sel, test.text, limit, got, test.want)
			}
		}
	}
	for sort, want := range map[devices.Sort]string{devices.SortName: "d b a c e", devices.SortOfflineSince: "d e c"} {
		if got := list(t, s, devices.ListQuery{Sort: sort, Limit: 2}); got != want {
			t.Errorf("sorted by %s: %q, want %q", sort, got, want)
		}
	}
	if got := list(t, s, devices.ListQuery{Sort: devices.SortName, Select: parse(t, "device in (a,c,d)"), Limit: 2}); got != "d a c" {
		t.Errorf("some by name: %q", got)
	}
	for from, want := range map[time.Time]string{time.Now().Add(-1000 * day): "", time.Now().Add(1000 * day): "c"} {
		if got := list(t, s, devices.ListQuery{Select: parse(t, "seen>1h").At(from)}); got != want {
			t.Errorf("seen more than an hour before %s: %q, want %q", from, got, want)
		}
	}
	// What FromMap accepts and Parse does not.
	for _, labels := range []map[string]string{{"room": "a\x00"}, {"x\"y": "z"}, {"\x00": ""}} {
		if got := list(t, s, devices.ListQuery{Select: selector.FromMap(labels)}); got != "" {
			t.Errorf("%q: got %q", labels, got)
		}
	}
}

// randomFleet makes devices of few values, so that random selectors hit some.
func randomFleet(t *testing.T, db Database, s *store.Store, n int) *rand.Rand {
	t.Helper()
	random := rand.New(rand.NewPCG(3, 4))
	pick := func(names ...string) string { return names[random.IntN(len(names))] }
	var list []devices.Device
	var presence []devices.Presence
	for i := range n {
		d := devices.Device{ID: mac(i * 7), Name: pick("", "Lamp", "lamp 1", "Küche", "a*b[c]_%"), Labels: map[string]string{}, FirstSeen: time.Now().Add(-48 * time.Hour), Facts: devices.Facts{
			Board: pick("", "box", "Box-2", "bread"), Chip: pick("", "esp32", "esp32s3"), Firmware: pick("", "1.9", "2.4", "2.4.0", "2.10.1", "dev"), ELF: pick("", "ab", "cd")}}
		for _, key := range []string{"room", "floor", "x-1"} {
			if random.IntN(2) == 0 {
				d.Labels[key] = pick("", "1", "lab", "Lab", "lab-2", "a b")
			}
		}
		list = append(list, d)
		if random.IntN(5) == 0 {
			continue
		}
		p := devices.Presence{Device: d.ID, Epoch: 1, Online: random.IntN(2) == 0, Node: pick("n-1", "n-2", "m"), Transport: devices.Transport(pick("mqtt", "websocket")),
			LastSeen: time.Now().Add(-time.Duration(random.IntN(72)) * time.Hour)}
		if !p.Online {
			p.Reason = pick("lost", "drain", "superseded")
		}
		if random.IntN(3) > 0 {
			tools := pick(`[{"name":"light.on"},{"name":"light.off"}]`, `[{"name":"speak"}]`, `[]`)
			p.Catalog = catalogOf(tools).Hash
			s.KeepCatalog(catalogOf(tools))
		}
		presence = append(presence, p)
	}
	db.Add(t, list...)
	for _, p := range presence {
		s.SavePresence(p)
	}
	settle(t, s)
	return random
}

// randomSelector makes the text of one to four terms.
func randomSelector(random *rand.Rand) string {
	pick := func(names ...string) string { return names[random.IntN(len(names))] }
	values := map[string][]string{
		"device": {string(mac(0)), string(mac(7)), string(mac(70)), "02:*", "*:0*", "nobody"}, "name": {"Lamp", "lamp*", "*k*", `"a\*b[c]_%"`, `"a\*b[*"`, `"*_%"`, `""`},
		"board": {"box", "Box-2", "b*", "*ea*", "none"}, "chip": {"esp32", "esp*", `""`}, "firmware": {"2.4", "2.*", "dev", "1.9"}, "elf": {"ab", "*d"},
		"transport": {"mqtt", "websocket"}, "state": {"online", "offline", "pending", "contested"}, "node": {"n-1", "n-*", "m"}, "reason": {"lost", "d*", "never_connected"},
		"tool": {"light.on", "light.*", "speak", "*", "none"}, "room": {"lab", "Lab", "lab*", `""`, `"a b"`, "*a*"}, "floor": {"1", "*"}, "x-1": {"lab-2", "l*2"}, "nolabel": {"1"},
	}
	var terms []string
	for range 1 + random.IntN(4) {
		name := pick("device", "name", "board", "chip", "firmware", "elf", "transport", "state", "node", "reason", "tool", "room", "floor", "x-1", "nolabel", "seen", "firmware<", "room", "state")
		value := func() string { return pick(values[name]...) }
		switch {
		case name == "seen":
			terms = append(terms, pick("seen>1h", "seen<24h", "seen>2d", "seen<30m", "seen", "!seen"))
		case name == "firmware<":
			terms = append(terms, "firmware"+pick("<", "<=", ">", ">=")+pick("2.4", "2.4.0", "2.9", "1"))
		default:
			terms = append(terms, pick(name+"="+value(), name+"="+value(), name+"!="+value(), name, "!"+name,
				name+" in ("+value()+","+value()+")", name+" not in ("+value()+","+value()+")"))
		}
	}
	return strings.Join(terms, ",")
}

// testSelectors: what SQL finds is what memory selects of all rows, over all
// pages, in every order; and what is counted.
func testSelectors(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	random := randomFleet(t, db, s, 150)
	all := pages(t, s, devices.ListQuery{})
	if len(all) != 150 {
		t.Fatalf("%d devices", len(all))
	}
	type tool struct{ Name string }
	catalogs := map[devices.Hash][]tool{}
	toolsOf := func(catalog devices.Hash) []tool {
		if list, ok := catalogs[catalog]; ok {
			return list
		}
		text, err := s.Catalog(t.Context(), catalog)
		if err != nil {
			t.Fatal(err)
		}
		var list []tool
		if err := json.Unmarshal(text.Tools, &list); err != nil {
			t.Fatal(err)
		}
		catalogs[catalog] = list
		return list
	}
	matches := func(q devices.ListQuery, row *devices.Row, now time.Time) bool {
		p := &row.Presence
		x := devices.Selectable(&row.Device, p)
		if p.Catalog != (devices.Hash{}) {
			tools := toolsOf(p.Catalog)
			x.HasTool = func(match func(string) bool) bool {
				return slices.ContainsFunc(tools, func(x tool) bool { return match(x.Name) })
			}
		}
		text := strings.ToLower(q.Text)
		return q.Select.Match(&x, now) && (strings.Contains(string(row.Device.ID), text) || strings.Contains(strings.ToLower(row.Device.Name), text) || strings.Contains(strings.ToLower(row.Device.Board), text)) &&
			(q.Sort != devices.SortLastSeen && q.Sort != devices.SortOfflineSince || !p.Online)
	}
	for n := range racetest.Size(400, 100) {
		text := randomSelector(random)
		q := devices.ListQuery{Select: parse(t, text), Limit: 1 + random.IntN(60)}
		if random.IntN(4) == 0 {
			q.Text = []string{"lamp", "02:", "K", "box", "%", "nothing"}[random.IntN(6)]
		}
		q.Sort = []devices.Sort{devices.SortID, devices.SortID, devices.SortName, devices.SortLastSeen, devices.SortOfflineSince}[random.IntN(5)]
		var want []devices.Row
		now := time.Now()
		for i := range all {
			if matches(q, &all[i], now) {
				want = append(want, all[i])
			}
		}
		slices.SortStableFunc(want, func(a, b devices.Row) int {
			switch q.Sort {
			case devices.SortName:
				return strings.Compare(strings.ToLower(a.Device.Name), strings.ToLower(b.Device.Name))
			case devices.SortLastSeen:
				return a.Presence.LastSeen.Compare(b.Presence.LastSeen)
			case devices.SortOfflineSince:
				return a.Presence.OfflineSince.Compare(b.Presence.OfflineSince)
			}
			return 0
		})
		ids := func(rows []devices.Row) string {
			var list []string
			for _, row := range rows {
				list = append(list, string(row.Device.ID))
			}
			return strings.Join(list, " ")
		}
		if got := list(t, s, q); got != ids(want) {
			t.Fatalf("%d: %q, text %q, sorted by %s, limit %d:\ngot  %s\nwant %s", n, text, q.Text, q.Sort, q.Limit, got, ids(want))
		}
		if q.Sort != devices.SortID {
			continue
		}
		counts, err := s.CountsOf(t.Context(), q)
		if err != nil {
			t.Fatalf("counts of %q: %v", text, err)
		}
		boards := map[string]int64{}
		for i := range want {
			boards[want[i].Device.Board]++
		}
		if counts.Total != int64(len(want)) || len(counts.Dimensions["board"].Top) != len(boards) {
			t.Errorf("%q, text %q: %+v, want %d, %v", text, q.Text, counts, len(want), boards)
		}
		for _, c := range counts.Dimensions["board"].Top {
			if boards[c.Value] != c.N {
				t.Errorf("%q, text %q: %d of board %q, want %d", text, q.Text, c.N, c.Value, boards[c.Value])
			}
		}
	}
}

// testBounds: whatever is asked for, one request looks at a bounded number of
// devices, and goes on where it ended.
func testBounds(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	f := Fleet{Devices: 60_000, Online: 50}
	f.Fill(t, db)
	for _, test := range []struct {
		q    devices.ListQuery
		most int64 // devices one page may look at
	}{
		{devices.ListQuery{}, 101},
		{devices.ListQuery{Select: parse(t, "site=site-3")}, 101},
		{devices.ListQuery{Select: parse(t, "board in (board-1,board-2)")}, 101},
		{devices.ListQuery{Select: parse(t, "board=*-1")}, 101},
		{devices.ListQuery{Select: parse(t, "state=online,transport=mqtt")}, 2_000},
		{devices.ListQuery{Select: parse(t, "chip=none")}, 20_000},
		{devices.ListQuery{Select: parse(t, "name=none*")}, 20_000},
		{devices.ListQuery{Select: parse(t, "state=online,reason=x")}, 20_000},
		{devices.ListQuery{Text: "nothing"}, 50_000},
		{devices.ListQuery{Text: "nothing", Select: parse(t, "state=online")}, 50_000},
		{devices.ListQuery{Sort: devices.SortName, Select: parse(t, "chip=none")}, 20_000},
		{devices.ListQuery{Sort: devices.SortLastSeen, Select: parse(t, "site=site-3")}, 20_000},
	} {
		test.q.Limit = 100
		total := 0
		for n := 0; ; n++ {
			before := s.ListedIDs.Load()
			page, err := s.List(t.Context(), test.q)
			if err != nil {
				t.Fatal(err)
			}
			if looked := s.ListedIDs.Load() - before; looked > test.most {
				t.Errorf("%s %q: a page looked at %d devices, want at most %d", test.q.Select, test.q.Text, looked, test.most)
			}
			total += len(page.Rows)
			if page.Next == "" || n == 4 {
				break
			}
			test.q.After = page.Next
		}
	}
	if db.Postgres {
		testPlans(t, db, s)
	}
}

// testPlans: Postgres never reads a whole table for a page, also without
// statistics.
func testPlans(t *testing.T, db Database, s *store.Store) {
	read := func() int {
		return db.Count(t, `SELECT COALESCE(sum(seq_tup_read), 0) FROM pg_stat_user_tables WHERE relname IN ('devices', 'presence', 'device_labels')`)
	}
	before := read()
	for range 8 { // also with the plan that it keeps for any arguments
		for _, sel := range []string{"", "state=online", "state=online,site=site-3", "board=board-1,state=offline", "room=room-3,site!=site-2", "chip=esp32s3,reason=reason-1", "node in (node-1,node-2)"} {
			for _, sort := range []devices.Sort{devices.SortID, devices.SortName, devices.SortLastSeen} {
				if _, err := s.List(t.Context(), devices.ListQuery{Select: parse(t, sel), Sort: sort, Limit: 100}); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	reportReads(t, db)
	if n := read() - before; n > 0 {
		t.Errorf("%d rows were read by scans of whole tables", n)
	}
}

// reportReads waits until Postgres counts all that the store's connections have read. A connection
// reports that at its end; a later report shows that the earlier ones have arrived.
func reportReads(t *testing.T, db Database) {
	t.Helper()
	var pids string
	const connections = `FROM pg_stat_activity WHERE application_name = 'fleetd' AND datname = current_database()`
	if err := db.Raw.QueryRow(`SELECT array_agg(pid)::text ` + connections).Scan(&pids); err != nil {
		t.Fatal(err)
	}
	db.Exec(t, `SELECT pg_terminate_backend(pid) `+connections)
	devicetest.Eventually(t, "the store's connections have ended", func() bool {
		return db.Count(t, `SELECT count(*) FROM pg_stat_activity WHERE pid = ANY($1::text::int[])`, pids) == 0
	})
	db.Exec(t, `CREATE TABLE last_read AS SELECT 1 AS n`)
	last := openPostgres(t, db.URL)
	if _, err := last.Exec(`SELECT n FROM last_read`); err != nil {
		t.Fatal(err)
	}
	if err := last.Close(); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "the last read is counted", func() bool {
		return db.Count(t, `SELECT COALESCE(sum(seq_tup_read), 0) FROM pg_stat_user_tables WHERE relname = 'last_read'`) > 0
	})
}

func testCounts(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	many := racetest.Size(3_000, 800)
	f := Fleet{Devices: many, Online: 40}
	f.Fill(t, db)
	whole, err := s.Counts(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	same, err := s.CountsOf(t.Context(), devices.ListQuery{})
	if err != nil {
		t.Fatal(err)
	}
	same.AsOf = whole.AsOf
	if a, b := fmt.Sprint(whole), fmt.Sprint(same); a != b || whole.Total != int64(many) || len(whole.Dimensions["board"].Top) != 8 {
		t.Errorf("kept    %s\ncounted %s", a, b)
	}
	for i := range 300 {
		db.Add(t, devices.Device{ID: mac(i), Facts: devices.Facts{Board: fmt.Sprint("own-", i)}})
	}
	whole, err = s.Counts(t.Context())
	if d := whole.Dimensions["board"]; err != nil || len(d.Top) != 200 || d.Other != 108 || whole.Total != int64(many)+300 {
		t.Errorf("%d boards, others %d, %v", len(d.Top), d.Other, err)
	}
	db.Exec(t, `UPDATE devices SET labels = '{"all":"yes",' || substr(labels, 2) WHERE labels <> '{}'`)
	db.Exec(t, `INSERT INTO device_labels (key, value, device) SELECT 'all', 'yes', device FROM devices WHERE labels <> '{}'`)
	// Of state=offline, all=yes and what is negated those are counted that are not selected.
	for _, sel := range []string{"site!=site-3", "all!=yes", "board!=board-1", "board not in (board-1,board-2,none)", "state!=online", "state!=offline", "state in (online,offline)", "transport!=mqtt", "site=site-3", "state=online", "state=offline", "all=yes", "all in (yes,no)", "board in (board-1,board-2)", "site=site-3,state=online", "firmware>2.3"} {
		q := devices.ListQuery{Select: parse(t, sel)}
		counts, err := s.CountsOf(t.Context(), q)
		rows := pages(t, s, q)
		want := map[string]map[string]int64{}
		for _, name := range []string{"state", "offline_reason", "transport", "board", "firmware", "mcp_state"} {
			want[name] = map[string]int64{}
		}
		for _, row := range rows {
			p := &row.Presence
			if p.Online {
				want["state"]["online"]++
				want["transport"][string(p.Transport)]++
			} else {
				want["state"]["offline"]++
				want["offline_reason"][p.Reason]++
			}
			want["board"][row.Device.Board]++
			want["firmware"][row.Device.Firmware]++
			want["mcp_state"][string(p.MCP)]++
		}
		if err != nil || counts.Total != int64(len(rows)) {
			t.Errorf("%s: %d, want %d, %v", sel, counts.Total, len(rows), err)
		}
		for name, values := range want {
			got := map[string]int64{}
			for _, c := range counts.Dimensions[name].Top {
				got[c.Value] = c.N
			}
			if len(values) <= 200 && !maps.Equal(got, values) {
				t.Errorf("%s, %s: %v, want %v", sel, name, got, values)
			}
		}
	}
}

func testEach(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	Fleet{Devices: 5_000, Online: 40}.Fill(t, db)
	for _, sel := range []string{"", "state=online", "rare=rare-3", "chip=none"} {
		q := devices.ListQuery{Select: parse(t, sel), Limit: 1000}
		var got []devices.ID
		if err := s.Each(t.Context(), q, "", func(row devices.Row) error { got = append(got, row.Device.ID); return nil }); err != nil {
			t.Fatal(err)
		}
		var want []devices.ID
		for _, row := range pages(t, s, q) {
			want = append(want, row.Device.ID)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %d devices, want %d", sel, len(got), len(want))
		}
		if len(got) < 2 {
			continue
		}
		n := 0
		if err := s.Each(t.Context(), q, got[1], func(devices.Row) error { n++; return nil }); err != nil || n != len(got)-2 {
			t.Errorf("%s: %d devices after the second, %v", sel, n, err)
		}
	}
	enough := fmt.Errorf("enough")
	mustBe(t, s.Each(t.Context(), devices.ListQuery{}, "", func(devices.Row) error { return enough }), enough)
}
