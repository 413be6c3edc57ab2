package storetest

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"fleetd/internal/devices"
)

// listDevices is the number of devices of BenchmarkLists unless ScaleEnvironment is set.
const listDevices = 20_000

// checkedDevices is the size of the fleet, that of make verify, in which the kinds of requests must find the rows of rowsFile.
const (
	checkedDevices = 2000
	rowsFile       = "testdata/lists-2000.json"
)

//go:embed testdata/lists-2000.json
var rowsFound []byte

// BenchmarkLists measures lists, counts and searches, each kind as a benchmark of its own: requests that start somewhere in
// the list, and have results unless their name contains "nothing". It reports the median and the 99th percentile of the
// times and the goal for the latter, and names at the end the kinds that miss it. In a fleet of checkedDevices
// devices, it fails if a kind finds other rows than it should.
func BenchmarkLists(b *testing.B, makeDatabase Maker) {
	n := listDevices
	if text := os.Getenv(ScaleEnvironment); text != "" {
		var err error
		if n, err = strconv.Atoi(text); err != nil {
			b.Fatal(err)
		}
	}
	db := makeDatabase(b)
	s := openStore(b, db.URL)
	f := Fleet{Devices: n, Online: 60}
	f.Fill(b, db)
	t := b // of the helpers below, which end the whole benchmark
	random := rand.New(rand.NewPCG(5, 6))
	wanted := map[string]int{} // rows of the requests that are not measured
	if err := json.Unmarshal(rowsFound, &wanted); err != nil {
		b.Fatal(err)
	}
	const warm = 20 // requests of each kind that are not measured
	var missed []string
	measure := func(name string, limit time.Duration, request func(i int) int) {
		b.Run(name, func(b *testing.B) {
			*random = *rand.New(rand.NewPCG(5, 6)) // the same requests whatever came before
			found := 0
			for i := range warm {
				found += request(i)
			}
			if want, known := wanted[strings.ReplaceAll(name, " ", "_")]; n == checkedDevices && (!known || found != want) {
				b.Errorf("%d rows in %d requests, want %d of %s", found, warm, want, rowsFile)
			}
			var took []time.Duration
			rows := 0
			for b.Loop() {
				begin := time.Now()
				rows += request(len(took))
				took = append(took, time.Since(begin))
			}
			slices.Sort(took)
			b.ReportMetric(ms(took[len(took)/2]), "p50-ms")
			b.ReportMetric(ms(took[len(took)*99/100]), "p99-ms")
			b.ReportMetric(ms(limit), "goal-ms")
			if took[len(took)*99/100] > limit && !slices.Contains(missed, name) {
				missed = append(missed, name)
			}
			b.ReportMetric(float64(rows)/float64(len(took)), "rows/op")
			nothing := strings.Contains(name, "nothing")
			if nothing && rows > 0 || !nothing && rows == 0 && len(took) > 20 && n >= 100_000 { // few devices have not every value
				b.Errorf("%d rows in %d requests", rows, len(took))
			}
		})
	}
	page := func(q devices.ListQuery) devices.Page {
		t.Helper()
		page, err := s.List(t.Context(), q)
		if err != nil {
			t.Fatal(err)
		}
		return page
	}
	lists := func(name string, limit time.Duration, query func() devices.ListQuery, then ...func(devices.Page)) {
		t.Helper()
		measure(name, limit, func(int) int {
			q := query()
			if q.Limit = 100; q.Sort == "" {
				q.After = devices.Cursor{Sort: devices.SortID, ID: f.ID(random.IntN(n))}.String()
			}
			rows := 0
			for {
				p := page(q)
				for _, f := range then {
					f(p)
				}
				// A machine that stalls has no time for the whole page.
				if rows += len(p.Rows); n != checkedDevices || p.Next == "" || rows == 100 {
					return rows
				}
				q.After, q.Limit = p.Next, 100-rows
			}
		})
	}
	sel := func(format string, most int) func() devices.ListQuery {
		return func() devices.ListQuery {
			text := format
			if most > 0 {
				text = fmt.Sprintf(format, random.IntN(most))
			}
			return devices.ListQuery{Select: parse(t, text)}
		}
	}
	const single, other = 50 * time.Millisecond, 100 * time.Millisecond
	lists("all", single, sel("", 0))
	for _, state := range []string{"", ",state=online", ",state=offline"} {
		lists("site=..."+state, single, sel("site=site-%d"+state, 97))
		lists("room=..."+state, single, sel("room=room-%d"+state, 997))
		lists("rare=..."+state, single, sel("rare=rare-%d"+state, n/500))
		lists("site in (3)"+state, single, func() devices.ListQuery {
			return devices.ListQuery{Select: parse(t, fmt.Sprintf("site in (site-%d,site-%d,site-%d)", random.IntN(97), random.IntN(97), random.IntN(97))+state)}
		})
		lists("board=..."+state, single, sel("board=board-%d"+state, 8))
		lists("firmware=..."+state, single, sel("firmware=2.%d.0"+state, 20))
	}
	lists("state=online", single, sel("state=online", 0))
	lists("state=offline", single, sel("state=offline", 0))
	lists("transport=mqtt", single, sel("transport=mqtt", 0))
	lists("node=...", single, sel("node=node-%d", 8))
	lists("node in (2)", single, sel("node in (node-%d,node-7)", 7))
	lists("reason=...", single, sel("reason=reason-%d", 7))
	lists("device in (2)", single, func() devices.ListQuery {
		return devices.ListQuery{Select: parse(t, fmt.Sprintf("device in (%s,%s)", f.ID(random.IntN(n)), f.ID(random.IntN(n))))}
	})

	lists("site in (90 values)", other, func() devices.ListQuery {
		text := "site in (x"
		for i := range 90 {
			text += fmt.Sprint(",site-", i)
		}
		return devices.ListQuery{Select: parse(t, text+")")}
	})
	lists("site=...,board=...", other, sel("site=site-%d,board=board-3", 97))
	lists("site=...,room=...", other, sel("site=site-%d,room=room-3", 97))
	lists("site!=...", other, sel("site!=site-%d", 97))
	lists("site=site-1*", other, sel("site=site-1*", 0))
	lists("rare=*7 (many values)", other, sel("rare=*7", 0))
	lists("rare=none* (many values, nothing)", other, sel("rare=none*", 0))
	lists("firmware<2.4.0", other, sel("firmware<2.4.0", 0))
	lists("firmware>2.4.0,state=online", other, sel("firmware>2.4.0,state=online", 0))
	lists("chip=none (nothing)", other, sel("chip=none", 0))
	lists("name=none* (nothing)", other, sel("name=none*", 0))
	lists("elf=none,state=online (nothing)", other, sel("elf=none,state=online", 0))
	lists("seen>1h", other, sel("seen>1h", 0))
	lists("device=06:0a:*", other, sel("device=06:0a:*", 0))
	lists("tool=none (nothing)", other, sel("tool=none", 0))
	text := func(q devices.ListQuery) func() devices.ListQuery { return func() devices.ListQuery { return q } }
	lists("q=eaker (everything)", other, text(devices.ListQuery{Text: "eaker"}))
	lists("q=nothing", other, text(devices.ListQuery{Text: "nothing"}))
	lists("q=9999 (few)", other, text(devices.ListQuery{Text: "9999"}))
	lists("q=nothing,state=online", other, text(devices.ListQuery{Text: "nothing", Select: parse(t, "state=online")}))
	lists("q=nothing,rare=...", other, func() devices.ListQuery {
		return devices.ListQuery{Text: "nothing", Select: parse(t, fmt.Sprint("rare=rare-", random.IntN(n/500)))}
	})
	for _, sort := range []devices.Sort{devices.SortName, devices.SortLastSeen, devices.SortOfflineSince} {
		for _, sel := range []string{"", "state=offline", "site=site-3", "board=board-3", "chip=none"} {
			next := ""
			lists(fmt.Sprintf("sort=%s %s, on and on", sort, strings.ReplaceAll(sel, "=none", "=none (nothing)")), other, func() devices.ListQuery {
				return devices.ListQuery{Sort: sort, Select: parse(t, sel), After: next}
			}, func(page devices.Page) { next = page.Next })
		}
	}
	measure("rows of 500 ids", other, func(int) int {
		ids := make([]devices.ID, 500)
		for i := range ids {
			ids[i] = f.ID(random.IntN(n))
		}
		rows, err := s.Rows(t.Context(), ids)
		if err != nil {
			t.Fatal(err)
		}
		return len(rows)
	})
	measure("find", single, func(int) int {
		if _, err := s.Find(t.Context(), f.ID(random.IntN(n))); err != nil {
			t.Fatal(err)
		}
		return 1
	})
	measure("counts of the fleet", 5*time.Millisecond, func(int) int {
		if c, err := s.Counts(t.Context()); err != nil || c.Total != int64(n) {
			t.Fatal(c.Total, err)
		}
		return 1
	})
	for _, sel := range []string{"", "state=online", "board=board-3", "site=site-3", "room=room-3", "site!=site-3", "firmware>2.4.0", "rare=*7", "chip=none", "site in (site-1,site-2,site-3,site-4,site-5,site-6,site-7,site-8,site-9,site-10,site-11,site-12)"} {
		measure("counts of "+strings.ReplaceAll(sel, "=none", "=none (nothing)"), 2*time.Second, func(int) int {
			c, err := s.CountsOf(t.Context(), devices.ListQuery{Select: parse(t, sel)})
			if err != nil {
				t.Fatal(err)
			}
			return int(c.Total)
		})
	}
	for _, sel := range []string{"", "site=site-3"} {
		measure("each of "+sel, time.Minute, func(int) (rows int) {
			if err := s.Each(t.Context(), devices.ListQuery{Select: parse(t, sel)}, "", func(devices.Row) error { rows++; return nil }); err != nil {
				t.Fatal(err)
			}
			return rows
		})
	}
	b.Logf("kinds that miss their goal: %d %q", len(missed), missed)
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
