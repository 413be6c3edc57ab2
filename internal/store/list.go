package store

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"fleetd/internal/devices"
)

const (
	// listTime is after how long a page is ended, full or not.
	listTime = 50 * time.Millisecond
	// maxListed is how many devices one page looks at, and maxSearchedTexts if all
	// it does is to search their texts.
	maxListed        = 20_000
	maxSearchedTexts = 50_000
	// Sizes of windows.
	firstSearch  = 1_000
	leastWindow  = 100
	streamWindow = 2_000
)

type cursor = devices.Cursor

// order is what a list is sorted by.
type order struct {
	table, column string
	where         string // which devices it has
	number        bool
}

var orders = map[devices.Sort]order{
	devices.SortID:           {},
	devices.SortName:         {table: "devices", column: "name_folded", where: "TRUE"},
	devices.SortLastSeen:     {table: "presence", column: "last_seen", where: "NOT online", number: true},
	devices.SortOfflineSince: {table: "presence", column: "offline_since", where: "NOT online", number: true},
}

// key is the value of the order in a cursor.
func (o order) key(c cursor) any {
	if o.number {
		return c.Number
	}
	return c.Text
}

// List returns one page of the devices that a query selects, as they are stored:
// what is live is for the caller to lay over it. States that are not stored,
// pending and contested, select nothing. The work is bounded, see
// devices.Page.
func (s *Store) List(ctx context.Context, q devices.ListQuery) (devices.Page, error) {
	begin := time.Now()
	if q.Sort == "" {
		q.Sort = devices.SortID
	}
	if _, ok := orders[q.Sort]; !ok {
		return devices.Page{}, fmt.Errorf("cannot sort by %q: use id, name, last_seen or offline_since", q.Sort)
	}
	if q.Limit < 1 || q.Limit > MaxPage {
		q.Limit = MaxPage
	}
	after, err := devices.ParseCursor(q.After, q.Sort)
	if err != nil {
		return devices.Page{}, err
	}
	ctx, cancel, err := s.reading(ctx)
	if err != nil {
		return devices.Page{}, err
	}
	defer cancel()
	page, err := s.page(ctx, q, after, begin)
	if err != nil {
		return devices.Page{}, s.useError(ctx, "listing devices", err)
	}
	return page, nil
}

func (s *Store) page(ctx context.Context, q devices.ListQuery, after cursor, begin time.Time) (page devices.Page, err error) {
	p, err := s.planOf(ctx, q)
	if err != nil || p.none {
		return page, err
	}
	n := q.Limit + 1
	switch {
	case p.search:
		n = firstSearch
	case len(p.conditions) > 0:
		n = max(leastWindow, q.Limit*7/4)
	}
	most := maxListed
	if p.search {
		most = maxSearchedTexts
	}
	for listed := 0; ; {
		w, err := s.window(ctx, p, after, n)
		if err != nil {
			return page, err
		}
		listed += w.looked
		s.stats.ListedIDs.Add(int64(w.looked))
		for len(w.found) > 0 {
			some := min(len(w.found), max(q.Limit-len(page.Rows), leastWindow), MaxRows)
			rows, err := s.selected(ctx, p, w.found[:some])
			if err != nil {
				return page, err
			}
			room := q.Limit - len(page.Rows)
			for _, r := range rows[:min(room, len(rows))] {
				page.Rows = append(page.Rows, r.Row)
				after = r.at
			}
			if len(rows) <= room {
				after = w.found[some-1]
			}
			w.found = w.found[some:]
			if len(rows) > room || len(w.found) > 0 && (len(rows) == room || time.Since(begin) > listTime) {
				page.Next = after.String()
				return page, nil
			}
		}
		if w.end {
			return page, nil
		}
		after = w.last
		took := time.Since(begin)
		if len(page.Rows) == q.Limit || listed >= most || took >= listTime {
			page.Next = after.String()
			return page, nil
		}
		// As many as are needed, and as there is time for, by what those before gave
		// and took.
		n = min(4*n, max(leastWindow, int(0.8*float64(listed)*float64(listTime-took)/float64(took))))
		if found := len(page.Rows); found > 0 {
			n = min(n, max(leastWindow, (q.Limit-found)*listed/found*5/4))
		}
		n = min(n, most-listed)
	}
}

// window is what one statement finds.
type window struct {
	found  []cursor // in order
	last   cursor   // of those that were looked at
	looked int
	end    bool // no device follows
}

// window looks at the next n devices of the source.
func (s *Store) window(ctx context.Context, p *plan, after cursor, n int) (w window, err error) {
	o := orders[p.query.Sort]
	if p.ids != nil && p.query.Sort == devices.SortID {
		for _, id := range p.ids {
			if id > string(after.ID) {
				w.found = append(w.found, cursor{Sort: after.Sort, ID: devices.ID(id)})
			}
		}
		w.looked, w.end = len(w.found), true
		return w, nil
	}
	var q query
	q.add("WITH w AS MATERIALIZED (")
	p.addWindow(&q, s.backend.Postgres(), o, after, n)
	q.add(")")
	if len(p.conditions) == 0 {
		q.add(" SELECT w.device, w.k, 1 FROM w")
	} else {
		q.add(" SELECT device, k, 0 FROM (SELECT w.device, w.k FROM w")
		p.addConditions(&q, s, " WHERE ")
		q.add(") m UNION ALL SELECT device, k, n FROM (SELECT device, k, (SELECT count(*) FROM w) AS n FROM w ORDER BY k DESC, device DESC LIMIT 1) e")
	}
	rows, err := s.backend.Read.QueryContext(ctx, q.text.String(), q.args...)
	if err != nil {
		return w, err
	}
	defer rows.Close()
	for rows.Next() {
		c := cursor{Sort: after.Sort}
		var looked int
		key := any(&c.Text)
		if o.number {
			key = &c.Number
		}
		if err := rows.Scan(&c.ID, key, &looked); err != nil {
			return w, err
		}
		if len(p.conditions) == 0 {
			w.looked++
			w.found = append(w.found, c)
		} else if looked == 0 {
			w.found = append(w.found, c)
		} else {
			w.last, w.looked = c, looked
		}
	}
	slices.SortFunc(w.found, func(a, b cursor) int {
		return cmp.Or(cmp.Compare(a.Text, b.Text), cmp.Compare(a.Number, b.Number), cmp.Compare(a.ID, b.ID))
	})
	if len(p.conditions) == 0 && len(w.found) > 0 {
		w.last = w.found[len(w.found)-1]
	}
	w.end = w.looked < n
	return w, rows.Err()
}

// addWindow appends the query of the next n ids of the source, with the value of
// the order as k.
func (p *plan) addWindow(q *query, postgres bool, o order, after cursor, n int) {
	limit := " LIMIT " + strconv.Itoa(n) // not an argument: Postgres plans with it
	switch {
	case o.table == "" && p.search:
		index := ""
		if !postgres {
			index = " INDEXED BY devices_search"
		}
		q.add("SELECT device, '' AS k, search FROM devices"+index+" WHERE device > ? ORDER BY device"+limit, string(after.ID))
	case o.table == "":
		q.add("SELECT device, '' AS k FROM (")
		p.addSource(q, postgres, "device > ?", []any{string(after.ID)}, limit)
		q.add(") i ORDER BY device" + limit)
	case p.source == nil && p.ids == nil:
		q.add("SELECT device, "+o.column+" AS k FROM "+o.table+" WHERE "+o.where+" AND ("+o.column+", device) > (?, ?) ORDER BY "+o.column+", device"+limit,
			o.key(after), string(after.ID))
	default: // few devices: all of them are sorted
		q.add("SELECT i.device, o." + o.column + " AS k FROM (")
		p.addSource(q, postgres, "TRUE", nil, "")
		q.add(") i")
		q.add(lookUp(postgres, o.table, "o", "i.device"))
		q.add(" WHERE "+strings.Replace(o.where, "online", "o.online", 1)+" AND (o."+o.column+", i.device) > (?, ?) ORDER BY o."+o.column+", i.device"+limit,
			o.key(after), string(after.ID))
	}
}

// addSource appends the query of the ids of the source.
func (p *plan) addSource(q *query, postgres bool, where string, args []any, limit string) {
	order := " ORDER BY device"
	switch {
	case p.ids != nil:
		condition, arg := idSet(postgres, "device", "?", p.ids)
		q.add("SELECT device FROM devices WHERE "+condition+" AND "+where, append([]any{arg}, args...)...)
		return
	case p.source == nil:
		q.add("SELECT device FROM devices WHERE "+where+order+limit, args...)
		return
	case len(p.source.arms) == 1:
		order = order + limit
	case postgres:
		order += limit
	default:
		order = "" // SQLite merges the ranges
	}
	for i, a := range p.source.arms {
		if i > 0 {
			q.add(" UNION ALL ")
		}
		open, end := "", ""
		if postgres {
			open, end = "(", ")"
		}
		q.add(open+"SELECT device FROM "+p.source.table+" WHERE "+a.where+" AND "+where+order+end, append(slices.Clone(a.args), args...)...)
	}
	if order == "" && limit != "" {
		q.add(" ORDER BY device" + limit)
	}
}

// addConditions appends the tables that the conditions read, and the conditions.
func (p *plan) addConditions(q *query, s *Store, where string) {
	postgres := s.backend.Postgres()
	if slices.ContainsFunc(p.conditions, func(c condition) bool { return c.devices }) {
		q.add(lookUp(postgres, "devices", "d", "w.device"))
	}
	if slices.ContainsFunc(p.conditions, func(c condition) bool { return c.presence }) {
		q.add(lookUp(postgres, "presence", "p", "w.device"))
	}
	for _, c := range p.conditions {
		q.add(where+c.text, c.args...)
		where = " AND "
	}
}

// lookUp joins a table row by row, by the device. On Postgres nothing else would
// keep the planner from reading the whole table, and on SQLite from beginning with
// it.
func lookUp(postgres bool, table, alias, device string) string {
	if postgres {
		return " CROSS JOIN LATERAL (SELECT * FROM " + table + " x WHERE x.device = " + device + " OFFSET 0) " + alias
	}
	return " CROSS JOIN " + table + " " + alias + " ON " + alias + ".device = " + device
}

// placed is a row with its place in the list.
type placed struct {
	devices.Row
	at cursor
}

// selected reads the rows of candidates, at most MaxRows, and returns those that
// the query selects, in the order of the candidates.
func (s *Store) selected(ctx context.Context, p *plan, candidates []cursor) ([]placed, error) {
	places := make(map[devices.ID]cursor, len(candidates))
	ids := make([]string, len(candidates))
	for i, c := range candidates {
		ids[i] = string(c.ID)
		places[c.ID] = c
	}
	rows, err := s.rows(ctx, ids)
	if err != nil {
		return nil, err
	}
	var tools map[string][]string
	if p.needsTools {
		var hashes []string
		for i := range rows {
			if hash := rows[i].Presence.Catalog.String(); hash != "" && !slices.Contains(hashes, hash) {
				hashes = append(hashes, hash)
			}
		}
		if tools, _, err = s.readTools(ctx, hashes, p.now.Add(readTimeout)); err != nil {
			return nil, err
		}
	}
	out := make([]placed, 0, len(rows))
	for i := range rows {
		d := selectable(&rows[i], tools)
		if p.query.Select.Match(&d, p.now) && (p.text == "" || hasText(&rows[i].Device, p.text)) && (p.query.Sort == devices.SortID || p.query.Sort == devices.SortName || !d.Online) {
			out = append(out, placed{rows[i], places[rows[i].Device.ID]})
		}
	}
	slices.SortFunc(out, func(a, b placed) int {
		return cmp.Or(cmp.Compare(a.at.Text, b.at.Text), cmp.Compare(a.at.Number, b.at.Number), cmp.Compare(a.at.ID, b.at.ID))
	})
	return out, nil
}

// hasText tells whether a text in lower case is part of the device's id, name or
// board.
func hasText(d *devices.Device, text string) bool {
	return strings.Contains(string(d.ID), text) || strings.Contains(strings.ToLower(d.Name), text) || strings.Contains(strings.ToLower(d.Board), text)
}
