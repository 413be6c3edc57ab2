package records

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"fleetd/internal/devices"
	"fleetd/internal/store/database"
)

const (
	// listTime is after how long a page is ended, full or not.
	listTime = 50 * time.Millisecond
	// maxListed is how many devices one page looks at, and maxSearchedTexts if all
	// it does is to search their texts.
	maxListed        = 20_000
	maxSearchedTexts = 50_000
	// Sizes of windows. A search looks at its devices in one pass over an index.
	firstSearch    = 1_024
	leastWindow    = 128
	maxFirst       = 4_096
	maxFirstSorted = 512
	streamWindow   = 2_000
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
func (s *Records) List(ctx context.Context, q devices.ListQuery) (devices.Page, error) {
	begin := time.Now()
	q.Sort = cmp.Or(q.Sort, devices.SortID)
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
	ctx, cancel, err := s.host.BeginRead(ctx)
	if err != nil {
		return devices.Page{}, err
	}
	defer cancel()
	page, err := s.page(ctx, q, after, begin)
	if err != nil {
		return devices.Page{}, s.host.UseError(ctx, "listing devices", err)
	}
	return page, nil
}

func (s *Records) page(ctx context.Context, q devices.ListQuery, after cursor, begin time.Time) (page devices.Page, err error) {
	p, err := s.planOf(ctx, q)
	if err != nil || p.none {
		return page, err
	}
	n, err := s.firstWindow(ctx, p)
	if err != nil {
		return page, err
	}
	most := maxListed
	if p.search {
		most = maxSearchedTexts
	}
	for listed, found := 0, 0; ; {
		room := q.Limit - len(page.Rows) + 1
		if listed > 0 {
			room = 1 << bits.Len(uint(room-1)) // one of few, as n
		}
		w, err := s.window(ctx, p, after, n, room)
		if err != nil {
			return page, err
		}
		listed += w.looked
		found += len(w.rows)
		s.ListedIDs.Add(int64(w.looked))
		page.Rows = slices.Grow(page.Rows, min(len(w.rows), q.Limit-len(page.Rows)))
		for i := range w.rows {
			r := &w.rows[i]
			if r.selected && len(page.Rows) == q.Limit {
				page.Next = after.String()
				return page, nil
			}
			if after = r.at; r.selected {
				page.Rows = append(page.Rows, r.Row)
			}
		}
		if !w.cut {
			if after = w.last; w.end {
				return page, nil
			}
		}
		took := time.Since(begin)
		if len(page.Rows) == q.Limit || listed >= most || took >= listTime {
			page.Next = after.String()
			return page, nil
		}
		if len(w.rows) == 0 {
			skipped, none, err := s.skip(ctx, p, &after)
			if err != nil || none {
				return page, err
			}
			if skipped {
				continue
			}
		}
		// As many as are needed, and as there is time for, by what those before gave
		// and took.
		n = min(4*n, max(leastWindow, int(0.8*float64(listed)*float64(listTime-took)/float64(took))))
		if found > 0 {
			n = min(n, max(leastWindow, (q.Limit-len(page.Rows))*listed/found*5/4))
		}
		n = min(windowSize(n), most-listed)
	}
}

// firstWindow is how many devices a page looks at first: about as many as fill it,
// as far as the counts that are kept tell.
func (s *Records) firstWindow(ctx context.Context, p *plan) (int, error) {
	full := p.query.Limit + 1
	switch {
	case p.search:
		return firstSearch, nil
	case len(p.conditions) == 0:
		return full, nil
	}
	all, err := s.size(ctx, allDevices, maxCounted)
	if err != nil {
		return 0, err
	}
	known, part := 0, 1.0
	for _, src := range p.others {
		switch {
		case p.source != nil && p.source.table == "presence" && src.table == "presence": // as good as one in the other, such as transport and state
			known++
		case src.isKept() && all > 0:
			n, err := s.size(ctx, src, maxCounted)
			if err != nil {
				return 0, err
			}
			known++
			part *= float64(n) / float64(all)
		}
	}
	if known < len(p.conditions) {
		part = min(part, 4.0/7)
	}
	most := maxFirst
	if p.query.Sort != devices.SortID { // its devices are all over the table
		most = maxFirstSorted
	}
	return windowSize(min(int(float64(full)/max(part, 0.001)*1.1), max(most, full))), nil
}

// windowSize rounds up to one of few sizes: each is a statement of its own, which
// Postgres has to plan.
func windowSize(n int) int {
	if n <= leastWindow {
		return (max(n, 1) + 15) / 16 * 16
	}
	size := leastWindow
	for size < n {
		if size&(size-1) == 0 {
			size += size / 2
		} else {
			size += size / 3
		}
	}
	return size
}

// skip moves to the next device that can match: no term matches one before the first that its own
// source has. none means that no device can match.
func (s *Records) skip(ctx context.Context, p *plan, after *cursor) (skipped, none bool, err error) {
	if p.query.Sort != devices.SortID {
		return false, false, nil
	}
	begin := *after
	for _, src := range p.others {
		var q query
		q.add("SELECT device FROM (")
		other := plan{source: src}
		other.addSource(&q, s.db.Postgres(), "device > ?", []any{string(after.ID)}, " LIMIT 1")
		q.add(") i ORDER BY device LIMIT 1")
		var id string
		err := s.db.Read.QueryRowContext(ctx, q.text.String(), q.args...).Scan(&id)
		if errors.Is(err, sql.ErrNoRows) {
			return false, true, nil
		}
		if err != nil {
			return false, false, err
		}
		// The next window starts after an id that is a little smaller.
		_, size := utf8.DecodeLastRuneInString(id)
		after.ID = max(after.ID, devices.ID(id[:len(id)-size]))
	}
	return *after != begin, false, nil
}

// window is the result of one statement.
type window struct {
	rows   []placed // rows of devices that meet the conditions, in order
	last   cursor   // of the examined devices
	looked int
	cut    bool // more devices meet the conditions
	end    bool // there are no more devices
}

// placed is a row with its position in the list.
type placed struct {
	devices.Row
	at       cursor
	selected bool
}

// window examines the next n devices of the source, and reads the rows of at most room devices that
// meet the conditions.
func (s *Records) window(ctx context.Context, p *plan, after cursor, n, room int) (window, error) {
	o := orders[p.query.Sort]
	var with query
	with.add("WITH w AS MATERIALIZED (")
	p.addWindow(&with, s.db.Postgres(), o, after, n)
	with.add("), e AS (SELECT (SELECT count(*) FROM w) AS n, device, k FROM w ORDER BY k DESC, device DESC LIMIT 1) ")
	q := query{args: slices.Clip(with.args)}
	q.add(with.text.String() + "SELECT e.n, e.device, e.k, ")
	p.addRows(&q, s, room)
	q.add(" CROSS JOIN e")
	w := window{last: cursor{Sort: after.Sort}}
	key := func(c *cursor) any {
		if o.number {
			return &c.Number
		}
		return &c.Text
	}
	var err error
	at := cursor{Sort: after.Sort}
	row := newRowScan(&w.looked, &w.last.ID, key(&w.last), key(&at))
	w.rows, err = database.CollectAbout(ctx, s.db.Read, min(n, room), func(scan func(...any) error) (r placed, err error) {
		r.Row, err = row.next(scan)
		r.at = at
		r.at.ID = r.Device.ID
		return r, err
	}, q.text.String(), q.args...)
	if err == nil && len(w.rows) == 0 && len(p.conditions) > 0 {
		// Rows may have changed since: the end of the window is valid as long as none of them meets
		// the conditions.
		var meets bool
		end := query{args: slices.Clip(with.args)}
		end.add(with.text.String() + "SELECT n, device, k, EXISTS (SELECT 1 FROM w")
		p.addConditions(&end, s, " WHERE ")
		end.add(") FROM e")
		switch err = s.db.Read.QueryRowContext(ctx, end.text.String(), end.args...).Scan(&w.looked, &w.last.ID, key(&w.last), &meets); {
		case errors.Is(err, sql.ErrNoRows):
			err = nil
		case err == nil && meets:
			return s.window(ctx, p, after, n, room)
		}
	}
	if err != nil {
		return w, err
	}
	w.cut, w.end = len(w.rows) == room, w.looked < n
	slices.SortFunc(w.rows, func(a, b placed) int { return a.at.Compare(b.at) })
	return w, s.choose(ctx, p, w.rows)
}

// addRows appends the columns at and rowColumns of the first room devices of w that meet the
// conditions, and their tables. A row of presence, or else of devices, that a condition reads is
// not read twice.
func (p *plan) addRows(q *query, s *Records, room int) {
	kept := "w"
	for _, c := range p.conditions {
		switch {
		case c.presence:
			kept = "p"
		case c.devices && kept == "w":
			kept = "d"
		}
	}
	columns := kept + ".*"
	if kept == "w" {
		columns = "w.device"
	}
	q.add(kept + ".at, " + rowColumns + " FROM (SELECT w.k AS at, " + columns + " FROM w")
	p.addConditions(q, s, " WHERE ")
	q.add(" ORDER BY w.k, w.device LIMIT " + strconv.Itoa(room) + ") " + kept)
	for _, table := range []string{"devices", "presence"} {
		if alias := table[:1]; alias != kept {
			q.add(lookUp(s.db.Postgres(), table, alias, kept+".device"))
		}
	}
}

// choose marks the rows that the query selects.
func (s *Records) choose(ctx context.Context, p *plan, rows []placed) error {
	var tools map[string][]string
	if p.needsTools {
		var hashes []string
		for i := range rows {
			if hash := rows[i].Presence.Catalog.String(); hash != "" && !slices.Contains(hashes, hash) {
				hashes = append(hashes, hash)
			}
		}
		var err error
		var complete bool
		if tools, complete, err = s.readTools(ctx, hashes, time.Now().Add(database.ReadTimeout)); err == nil && !complete {
			err = fmt.Errorf("reading tool lists took longer than %v; try again", database.ReadTimeout)
		}
		if err != nil {
			return err
		}
	}
	for i := range rows {
		r := &rows[i]
		d := selectable(&r.Row, tools)
		r.selected = p.query.Select.Match(&d, p.now) && (p.text == "" || r.Device.HasText(p.text)) &&
			(p.query.Sort == devices.SortID || p.query.Sort == devices.SortName || !d.Online)
	}
	return nil
}

// addWindow appends the query of the next n ids of the source, with the sort value as k.
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
		condition, arg := database.IDSet(postgres, "device", "?", p.ids)
		q.add("SELECT device FROM devices WHERE "+condition+" AND "+where, append([]any{arg}, args...)...)
		return
	case p.source == nil:
		q.add("SELECT device FROM devices WHERE "+where+order+limit, args...)
		return
	case p.source.without != nil:
		q.add("SELECT device FROM "+p.source.table+" WHERE "+where, args...)
		for _, a := range p.source.without.arms {
			q.add(" EXCEPT SELECT device FROM "+p.source.without.table+" WHERE "+a.where+" AND "+where, append(slices.Clone(a.args), args...)...)
		}
		q.add(order + limit)
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
func (p *plan) addConditions(q *query, s *Records, where string) {
	postgres := s.db.Postgres()
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

// lookUp joins a table row by row, by the device. Otherwise Postgres may scan the whole table, and
// SQLite may start with it.
func lookUp(postgres bool, table, alias, device string) string {
	if postgres {
		return " CROSS JOIN LATERAL (SELECT * FROM " + table + " x WHERE x.device = " + device + " OFFSET 0) " + alias
	}
	return " CROSS JOIN " + table + " " + alias + " ON " + alias + ".device = " + device
}
