package fleet

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/selector"
)

// List describes one page of devices. What the database finds is shown, and
// selected once more, with what this node knows better. Devices that wait and
// never were members are in no table: they come with lists in order of ids. A page
// may be short, or empty, and have a next one; the last has none.
func (s *Service) List(ctx context.Context, q devices.ListQuery) (views []devices.View, next string, err error) {
	after, err := devices.ParseCursor(q.After, q.Sort)
	if err != nil {
		return nil, "", devices.Errorf(devices.CodeBadRequest, "%v", err)
	}
	l := s.lister(ctx, q)
	var between []placed
	if q.Sort == "" || q.Sort == devices.SortID {
		between = l.waiting()
	}
	page := devices.Page{}
	online, offline := q.Select.AllowsState(string(devices.StateOnline)), q.Select.AllowsState(string(devices.StateOffline))
	var rows []devices.Row
	if online != offline || !online { // else the database finds all of them
		if rows, err = l.inMemory(); err != nil {
			return nil, "", err
		}
	}
	if online || offline {
		page, err = s.ports.Records.List(ctx, q)
		for _, row := range rows {
			between = append(between, placed{s.view(row), l.placeOf(&row)})
		}
	} else {
		page = l.cut(rows, after)
	}
	if errors.Is(err, devices.ErrCursor) {
		return nil, "", devices.Errorf(devices.CodeBadRequest, "%v", err)
	}
	if err != nil {
		return nil, "", err
	}
	for _, row := range page.Rows {
		l.add(placed{s.view(row), l.placeOf(&row)})
	}
	return l.merge(between, after, page.Next)
}

// lister makes one page.
type lister struct {
	s        *Service
	ctx      context.Context
	q        devices.ListQuery
	now      time.Time
	catalogs map[devices.Hash]*catalog.Catalog
	views    []placed
	listed   map[devices.ID]bool
	waits    map[devices.ID]devices.View // those that wait for approval
}

func (s *Service) lister(ctx context.Context, q devices.ListQuery) *lister {
	return &lister{s: s, ctx: ctx, q: q, now: time.Now(), catalogs: map[devices.Hash]*catalog.Catalog{}, listed: map[devices.ID]bool{}}
}

// placed is a device with its place in the list.
type placed struct {
	devices.View
	at devices.Cursor
}

// add takes a device into the page if it is selected as it is now.
func (l *lister) add(v placed) {
	d := selectable(&v.View, l.catalog)
	if !l.listed[v.Device.ID] && l.q.Select.Match(&d, l.now) {
		l.listed[v.Device.ID] = true
		v.Credentials = l.s.Credentials(v.Device.ID)
		l.views = append(l.views, v)
	}
}

// catalog is a tool list, each looked up once.
func (l *lister) catalog(h devices.Hash) *catalog.Catalog {
	if h == (devices.Hash{}) || !l.q.Select.Needs(selector.FieldTool) {
		return nil
	}
	cat, seen := l.catalogs[h]
	if !seen {
		cat, _ = l.s.Catalog(l.ctx, h) // without its tools none is selected by them
		l.catalogs[h] = cat
	}
	return cat
}

// selectable is the device as selectors see it.
func selectable(v *devices.View, list func(devices.Hash) *catalog.Catalog) selector.Device {
	d, p := &v.Device, &v.Presence
	out := selector.Device{ID: string(d.ID), Name: d.Name, Board: d.Board, Chip: d.Chip, Firmware: d.Firmware, ELF: d.ELF, State: string(v.State),
		Labels: d.Labels, Online: p.Online, Transport: string(p.Transport), Node: p.Node, Reason: p.Reason, LastSeen: p.LastSeen}
	if cat := list(p.Catalog); cat != nil {
		out.HasTool = func(match func(string) bool) bool {
			return slices.ContainsFunc(cat.Tools, func(t catalog.Tool) bool { return match(t.Name) })
		}
	}
	return out
}

// allWaiting are the devices under whose id a client waits, read once.
func (l *lister) allWaiting() map[devices.ID]devices.View {
	if l.waits == nil {
		l.waits = l.s.AllWaiting(l.now)
	}
	return l.waits
}

// waiting are the devices that wait for approval and never were members.
func (l *lister) waiting() []placed {
	var out []placed
	if l.q.Members {
		return nil
	}
	for id, v := range l.allWaiting() {
		if !l.s.registry.Standing(id, "").Known {
			v := l.s.marked(v)
			if v.Device.HasText(strings.ToLower(l.q.Text)) {
				out = append(out, placed{v, devices.Cursor{Sort: devices.SortID, ID: id}})
			}
		}
	}
	return out
}

// inMemory are the rows of known devices whose state no row has: another client
// waits, or they are contested.
func (l *lister) inMemory() ([]devices.Row, error) {
	if !l.q.Select.AllowsState(string(devices.StatePending)) && !l.q.Select.AllowsState(string(devices.StateContested)) {
		return nil, nil
	}
	ids := l.s.ContestedIDs(l.now)
	for id := range l.allWaiting() {
		if l.s.registry.Standing(id, "").Known {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	slices.Sort(ids)
	var rows []devices.Row
	for part := range slices.Chunk(slices.Compact(ids), memoryPage) {
		found, err := l.s.ports.Records.Rows(l.ctx, part)
		if err != nil {
			return nil, err
		}
		rows = append(rows, found...)
	}
	text := strings.ToLower(l.q.Text)
	return slices.DeleteFunc(rows, func(r devices.Row) bool { return !r.Device.HasText(text) }), nil
}

// memoryPage is how many rows of devices in a state of memory are read at once.
const memoryPage = 500

// cut makes a page of rows that are there as a whole.
func (l *lister) cut(rows []devices.Row, after devices.Cursor) devices.Page {
	rows = slices.DeleteFunc(rows, func(r devices.Row) bool {
		return l.placeOf(&r).Compare(after) <= 0 || l.byTime() && l.s.view(r).Presence.Online
	})
	slices.SortFunc(rows, func(a, b devices.Row) int { return l.placeOf(&a).Compare(l.placeOf(&b)) })
	if len(rows) <= l.q.Limit {
		return devices.Page{Rows: rows}
	}
	rows = rows[:l.q.Limit]
	return devices.Page{Rows: rows, Next: l.placeOf(&rows[len(rows)-1]).String()}
}

// placeOf is the place of a row in the list.
func (l *lister) placeOf(r *devices.Row) devices.Cursor {
	c := devices.Cursor{Sort: cmp.Or(l.q.Sort, devices.SortID), ID: r.Device.ID}
	switch {
	case l.q.Sort == devices.SortName:
		c.Text = strings.ToLower(r.Device.Name)
	case l.q.Sort == devices.SortLastSeen && !r.Presence.LastSeen.IsZero():
		c.Number = r.Presence.LastSeen.UnixMicro()
	case l.q.Sort == devices.SortOfflineSince && !r.Presence.OfflineSince.IsZero():
		c.Number = r.Presence.OfflineSince.UnixMicro()
	}
	return c
}

// merge puts the devices in between that belong on this page and that the database
// did not find.
func (l *lister) merge(between []placed, after devices.Cursor, next string) ([]devices.View, string, error) {
	end, err := devices.ParseCursor(next, l.q.Sort)
	if err != nil {
		return nil, "", err
	}
	for _, v := range between {
		if v.at.Compare(after) > 0 && (next == "" || v.at.Compare(end) <= 0) && !(l.byTime() && v.Presence.Online) {
			l.add(v)
		}
	}
	slices.SortStableFunc(l.views, func(a, b placed) int { return a.at.Compare(b.at) })
	if len(l.views) > l.q.Limit {
		l.views = l.views[:l.q.Limit]
		next = l.views[l.q.Limit-1].at.String()
	}
	out := make([]devices.View, len(l.views))
	for i := range l.views {
		out[i] = l.views[i].View
	}
	return out, next, nil
}

// byTime tells whether the list is in order of a time that online devices do not
// have.
func (l *lister) byTime() bool {
	return l.q.Sort == devices.SortLastSeen || l.q.Sort == devices.SortOfflineSince
}

// eachPage is how many devices Each passes on at a time.
const eachPage = 1000

// Each calls f with all devices that the selector selects and the caller may see,
// a page at a time, in order of their ids.
func (s *Service) Each(ctx context.Context, by access.By, sel selector.Selector, f func([]devices.View) error) error {
	q := devices.ListQuery{Select: selector.And(by.Who.Devices, sel), Limit: eachPage, Members: by.Who.NeedsLabels()}
	for {
		page, next, err := s.List(ctx, q)
		if err != nil {
			return err
		}
		if len(page) > 0 {
			if err := f(page); err != nil {
				return err
			}
		}
		if next == "" {
			return nil
		}
		q.After = next
	}
}

// Counts are the numbers of devices by their values, of those that the selector
// selects and the caller may see. Those of all devices are kept; others are
// counted, and given again for countsLife.
func (s *Service) Counts(ctx context.Context, by access.By, sel selector.Selector) (devices.Counts, error) {
	sel = selector.And(by.Who.Devices, sel)
	if sel.IsZero() {
		return s.ports.Records.Counts(ctx)
	}
	return s.countOf(ctx, sel)
}
