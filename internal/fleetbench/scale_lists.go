package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"slices"
	"strings"
	"time"

	"fleetd/internal/devices"

	"fleetd/internal/fleetbench/load"
)

const (
	listFor    = 2 * time.Second // requests of one kind, together
	listLeast  = 200             // requests of one kind, however long they take
	listOnline = 1000            // devices that are connected meanwhile
	pageRows   = 100
	counted    = 10 // different selections that are counted
)

// request is a kind of request.
type request struct {
	name     string
	p50, p99 float64 // goals, in milliseconds
	most     int     // requests; 0: -scale-requests
	// query makes the parameters of one; nil: the request has none. next is next_cursor of the answer before.
	query func(next string) url.Values
	path  string // empty: the list of devices
}

// listed are the parts of an answer that tell how it went.
type listed struct {
	Items []json.RawMessage `json:"items"`
	Next  string            `json:"next_cursor"`
}

// lists measures requests of one caller, each kind after a few that are not counted.
func (k *known) lists(ctx context.Context, d *daemon) (out []timing, err error) {
	tools, err := load.ToolLists(false)
	if err != nil {
		return nil, err
	}
	online := min(listOnline, k.b.opt.scaleStorm)
	f, err := newFleet(ctx, d, overWebSocket, online, tools)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.close()) }()
	if err := f.bring(ctx, d, 0, online); err != nil {
		return nil, err
	}
	begun := time.Now()
	for _, r := range scaleRequests(k.b.opt.scale, online, begun) {
		t, err := k.timed(ctx, d, r)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", r.name, err)
		}
		if out = append(out, t); !t.met() {
			k.progress("%s: p50 %.1f ms, p99 %.1f ms of %d: %s", t.Name, t.P50, t.P99, t.Made, t.goalText())
		}
	}
	k.progress("%d kinds of requests in %v", len(out), time.Since(begun).Round(time.Second))
	return out, errors.Join(f.close(), d.awaitGone(ctx, time.Minute), d.awaitQuiet(ctx, time.Minute))
}

// timed makes the requests of one kind.
func (k *known) timed(ctx context.Context, d *daemon, r request) (timing, error) {
	most, warm := k.b.opt.scaleRequests, 5
	if r.most > 0 {
		most, warm = r.most, 0
	}
	path := r.path
	if path == "" {
		path = "/v1/devices"
	}
	var took []time.Duration
	rows, next := 0, ""
	begun := time.Now()
	for i := 0; i < most+warm && (time.Since(begun) < listFor || len(took) < listLeast); i++ {
		text := path
		if r.query != nil {
			text += "?" + r.query(next).Encode()
		}
		sent := time.Now()
		body, err := d.get(ctx, text)
		if err != nil {
			return timing{}, err
		}
		if i < warm {
			continue
		}
		took = append(took, time.Since(sent))
		var page listed
		if err := json.Unmarshal(body, &page); err != nil {
			return timing{}, err
		}
		rows += len(page.Items)
		next = page.Next
	}
	slices.Sort(took)
	return timing{Name: r.name, Made: len(took), Rows: float64(rows) / float64(len(took)), P50: milliseconds(load.Quantile(took, 0.5)), P99: milliseconds(load.Quantile(took, 0.99)),
		GoalP50: r.p50, GoalP99: r.p99}, nil
}

// listQuery makes the parameters of a list from pairs, without those that are empty.
func listQuery(pairs ...string) url.Values {
	v := url.Values{"limit": {fmt.Sprint(pageRows)}}
	for i := 0; i < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			v.Set(pairs[i], pairs[i+1])
		}
	}
	return v
}

// scaleRequests are all kinds of requests to a fleet of n devices, of which the first ones are online. Values and cursors
// differ between requests of a kind.
func scaleRequests(n, online int, now time.Time) []request {
	random := rand.New(rand.NewPCG(1, 2))
	out := append(singleFilters(random, online), request{name: "all", p50: 5, p99: 50, query: func(string) url.Values { return listQuery() }},
		request{name: "all, middle", p50: 5, p99: 50, query: func(string) url.Values { return listQuery("cursor", afterID(middleID(random))) }})
	out = append(out, sorted(random, n, now)...)
	value := func(format string, most int) func() string {
		return func() string { return fmt.Sprintf(format, random.IntN(most)) }
	}
	board := func() string { return "board=" + scaleBoard(random.IntN(scaleBoards)) }
	firmware := func() string { return "firmware=" + scaleVersion(random.IntN(scaleFirmware)) }
	site := value("site=site-%03d", scaleSites)
	// Of these, each request goes on where the one before ended.
	walk := func(name, text string, sel ...func() string) request {
		return request{name: name, p99: 100, query: func(next string) url.Values {
			var terms []string
			for _, term := range sel {
				terms = append(terms, term())
			}
			return listQuery("q", text, "select", strings.Join(terms, ","), "cursor", next)
		}}
	}
	fixed := func(text string) func() string { return func() string { return text } }
	out = append(out,
		walk("site=…,board=…", "", site, board), walk("board=…,firmware=…", "", board, firmware), walk("reason=…,env=production", "", fixed("reason=gone"), fixed("env=production")),
		walk("state=online,site=…", "", fixed("state=online"), site), walk("firmware<2.1.0", "", fixed("firmware<2.1.0")), walk("site!=…", "", value("site!=site-%03d", scaleSites)),
		walk("chip=none: finds nothing", "", fixed("chip=none")), walk("site=none: finds nothing", "", fixed("site=none")),
		walk("q=… rare", fmt.Sprintf("%07d", n-1)), walk("q=speaker: common", "speaker"), walk("q=nothing: finds nothing", "nothing"), walk("q=nothing, site=…", "nothing", site))
	out = append(out, request{name: "GET /v1/fleet", path: "/v1/fleet", p50: 5})
	selections := []string{"state=offline", "env=production", "firmware<2.2.0", "reason=gone", "board=" + scaleBoard(3), "site=site-007", "site in (site-001,site-002,site-003)",
		"firmware=" + scaleVersion(7), "chip=none", "site!=site-007"}
	i := 0
	return append(out, request{name: "GET /v1/fleet?select=…, each another", path: "/v1/fleet", p99: 2000, most: counted, query: func(string) url.Values {
		i++
		return url.Values{"select": {selections[(i-1)%len(selections)]}}
	}})
}

// singleFilters are the filters by one value and by some, alone and with a state, from the beginning and from the middle.
func singleFilters(random *rand.Rand, online int) (out []request) {
	middle := func() string { return middleID(random) }
	middleOnline := func() string { return load.DeviceID(online/3 + random.IntN(max(1, online/3))) }
	add := func(name string, sel, from func() string) {
		out = append(out, request{name: name, p50: 5, p99: 50, query: func(string) url.Values { return listQuery("select", sel()) }},
			request{name: name + ", middle", p50: 5, p99: 50, query: func(string) url.Values { return listQuery("select", sel(), "cursor", afterID(from())) }})
	}
	text := func(s string) func() string { return func() string { return s } }
	add("state=offline", text("state=offline"), middle)
	add("state=online", text("state=online"), middleOnline)
	add("state in (online,offline)", text("state in (online,offline)"), middle)
	for _, f := range []struct {
		field, state string
		value        func() string
		from         func() string
	}{
		{"reason", "offline", func() string { return scaleReasons[random.IntN(len(scaleReasons))] }, middle},
		{"board", "offline", func() string { return scaleBoard(random.IntN(scaleBoards)) }, middle},
		{"firmware", "offline", func() string { return scaleVersion(random.IntN(scaleFirmware)) }, middle},
		{"site", "offline", func() string { return fmt.Sprintf("site-%03d", random.IntN(scaleSites)) }, middle},
		{"env", "offline", text("production"), middle},
		{"transport", "online", text(overWebSocket), middleOnline},
		{"node", "online", text("bench"), middleOnline},
	} {
		one := func() string { return f.field + "=" + f.value() }
		others := map[string]string{"env": "test", "transport": overMQTT, "node": "node-1"}[f.field]
		some := func() string {
			if others != "" {
				return fmt.Sprintf("%s in (%s,%s)", f.field, f.value(), others)
			}
			return fmt.Sprintf("%s in (%s,%s,%s)", f.field, f.value(), f.value(), f.value())
		}
		for _, state := range []string{"", ",state=" + f.state} {
			add(f.field+"=…"+state, func() string { return one() + state }, f.from)
			add(f.field+" in (…)"+state, func() string { return some() + state }, f.from)
		}
	}
	return out
}

// sorted are lists in other orders than that of ids.
func sorted(random *rand.Rand, n int, now time.Time) (out []request) {
	seconds := func() int64 { return int64(scaleSpan*2/5 + random.IntN(scaleSpan/5)) }
	for _, sort := range []devices.Sort{devices.SortName, devices.SortLastSeen, devices.SortOfflineSince} {
		for _, sel := range []string{"", "board=" + scaleBoard(3), "site=site-003"} {
			name := "sort=" + string(sort)
			if sel != "" {
				name += ", " + sel
			}
			out = append(out, request{name: name, p99: 100, query: func(string) url.Values { return listQuery("sort", string(sort), "select", sel) }},
				request{name: name + ", middle", p99: 100, query: func(string) url.Values {
					c := devices.Cursor{Sort: sort, ID: devices.ID(middleID(random)), Number: now.Unix()*1e6 - seconds()*1e6}
					if sort == devices.SortName {
						c.Number, c.Text = 0, fmt.Sprintf("speaker %07d", n*2/5+random.IntN(max(1, n/5)))
					}
					return listQuery("sort", string(sort), "select", sel, "cursor", c.String())
				}})
		}
	}
	return out
}

// afterID is the cursor of a list in order of ids that begins after one.
func afterID(id string) string {
	return devices.Cursor{Sort: devices.SortID, ID: devices.ID(id)}.String()
}
