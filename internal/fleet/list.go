package fleet

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/selector"
)

// List returns one page of devices. The rows of the database are combined with the
// state in memory, and matched against the selector once more. Pending devices that
// were never members are in no table: lists in order of ids include them. A page may
// be short or empty although more follow; the last page has no next.
func (s *Service) List(ctx context.Context, q devices.ListQuery) (views []devices.View, next string, err error) {
	after, err := devices.ParseCursor(q.After, q.Sort)
	if err != nil {
		return nil, "", devices.Errorf(devices.CodeBadRequest, "%v", err)
	}
	l := s.lister(ctx, q)
	var extra []listItem
	if q.Sort == "" || q.Sort == devices.SortID {
		extra = l.pendingDevices()
	}
	page := devices.Page{}
	online, offline := q.Select.AllowsState(string(devices.StateOnline)), q.Select.AllowsState(string(devices.StateOffline))
	var rows []devices.Row
	if online != offline || !online { // else the query returns all of them
		if rows, err = l.rowsWithMemoryState(); err != nil {
			return nil, "", err
		}
	}
	if online || offline {
		page, err = s.ports.Records.List(ctx, q)
		for _, row := range rows {
			extra = append(extra, listItem{s.view(row), l.cursorOf(&row)})
		}
	} else {
		page = l.pageOf(rows, after)
	}
	if errors.Is(err, devices.ErrCursor) {
		return nil, "", devices.Errorf(devices.CodeBadRequest, "%v", err)
	}
	if err != nil {
		return nil, "", err
	}
	l.views, l.at = make([]devices.View, 0, len(page.Rows)+len(extra)), make([]devices.Cursor, 0, len(page.Rows)+len(extra))
	for i := range page.Rows {
		row := &page.Rows[i]
		l.add(listItem{s.view(*row), l.cursorOf(row)})
	}
	return l.merge(extra, after, page.Next)
}

// lister collects one page.
type lister struct {
	s        *Service
	ctx      context.Context
	q        devices.ListQuery
	now      time.Time
	catalogs map[devices.Hash]*catalog.Catalog
	views    []devices.View
	at       []devices.Cursor // of views
	listed   map[devices.ID]bool
	pending  map[devices.ID]devices.View // clients that are pending
}

func (s *Service) lister(ctx context.Context, q devices.ListQuery) *lister {
	return &lister{s: s, ctx: ctx, q: q, now: clock.Now(), catalogs: map[devices.Hash]*catalog.Catalog{}, listed: map[devices.ID]bool{}}
}

// listItem is a device with its position in the list.
type listItem struct {
	devices.View
	at devices.Cursor
}

// add adds a device to the page if its current state matches.
func (l *lister) add(v listItem) {
	d := selectable(&v.View, l.catalog)
	if !l.listed[v.Device.ID] && l.q.Select.Match(&d, l.now) {
		l.listed[v.Device.ID] = true
		v.Credentials = l.s.Credentials(v.Device.ID)
		l.views, l.at = append(l.views, v.View), append(l.at, v.at)
	}
}

// catalog returns a tool list; each is looked up once.
func (l *lister) catalog(h devices.Hash) *catalog.Catalog {
	if h == (devices.Hash{}) || !l.q.Select.Needs(selector.FieldTool) {
		return nil
	}
	cat, seen := l.catalogs[h]
	if !seen {
		cat, _ = l.s.Catalog(l.ctx, h) // without its tools the device matches no tool selector
		l.catalogs[h] = cat
	}
	return cat
}

// selectable returns the device as selectors see it.
func selectable(v *devices.View, list func(devices.Hash) *catalog.Catalog) selector.Device {
	out := devices.Selectable(&v.Device, &v.Presence)
	out.State, out.Pending = string(v.State), len(v.Pending) > 0
	if cat := list(v.Presence.Catalog); cat != nil {
		out.HasTool = func(match func(string) bool) bool {
			return slices.ContainsFunc(cat.Tools, func(t catalog.Tool) bool { return match(t.Name) })
		}
	}
	return out
}

// allPending returns the devices with a pending client, read once.
func (l *lister) allPending() map[devices.ID]devices.View {
	if l.pending == nil {
		l.pending = l.s.AllPending(time.Now())
	}
	return l.pending
}

// pendingDevices returns pending devices that were never members.
func (l *lister) pendingDevices() []listItem {
	var out []listItem
	if l.q.Members {
		return nil
	}
	for id, v := range l.allPending() {
		if !l.s.registry.Status(id, "").Known {
			v := l.s.withPendingState(v)
			if v.Device.HasText(strings.ToLower(l.q.Text)) {
				out = append(out, listItem{v, devices.Cursor{Sort: devices.SortID, ID: id}})
			}
		}
	}
	return out
}

// rowsWithMemoryState returns the rows of known devices whose state is only in memory:
// those with a pending client, and contested ones.
func (l *lister) rowsWithMemoryState() ([]devices.Row, error) {
	if !l.q.Select.AllowsState(string(devices.StatePending)) && !l.q.Select.AllowsState(string(devices.StateContested)) {
		return nil, nil
	}
	ids := l.s.ContestedIDs(time.Now())
	for id := range l.allPending() {
		if l.s.registry.Status(id, "").Known {
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

// memoryPage is how many rows of these devices are read at once.
const memoryPage = 500

// pageOf returns one page of a complete list of rows.
func (l *lister) pageOf(rows []devices.Row, after devices.Cursor) devices.Page {
	rows = slices.DeleteFunc(rows, func(r devices.Row) bool {
		return l.cursorOf(&r).Compare(after) <= 0 || l.byTime() && l.s.view(r).Presence.Online
	})
	slices.SortFunc(rows, func(a, b devices.Row) int { return l.cursorOf(&a).Compare(l.cursorOf(&b)) })
	if len(rows) <= l.q.Limit {
		return devices.Page{Rows: rows}
	}
	rows = rows[:l.q.Limit]
	return devices.Page{Rows: rows, Next: l.cursorOf(&rows[len(rows)-1]).String()}
}

// cursorOf returns the position of a row in the list.
func (l *lister) cursorOf(r *devices.Row) devices.Cursor {
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

// merge adds the devices that belong on this page and that the database did not
// return.
func (l *lister) merge(extra []listItem, after devices.Cursor, next string) ([]devices.View, string, error) {
	end, err := devices.ParseCursor(next, l.q.Sort)
	if err != nil {
		return nil, "", err
	}
	for _, v := range extra {
		if v.at.Compare(after) > 0 && (next == "" || v.at.Compare(end) <= 0) && !(l.byTime() && v.Presence.Online) {
			l.add(v)
		}
	}
	if len(extra) == 0 && len(l.views) <= l.q.Limit {
		return l.views, next, nil
	}
	order := make([]int, len(l.views))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return l.at[a].Compare(l.at[b]) })
	if len(order) > l.q.Limit {
		order = order[:l.q.Limit]
		next = l.at[order[l.q.Limit-1]].String()
	}
	out := make([]devices.View, len(order))
	for i, n := range order {
		out[i] = l.views[n]
	}
	return out, next, nil
}

// byTime reports whether the list is sorted by a time that online devices do not have.
func (l *lister) byTime() bool {
	return l.q.Sort == devices.SortLastSeen || l.q.Sort == devices.SortOfflineSince
}

// eachPage is how many devices Each passes to f at a time.
const eachPage = 1000

// Each calls f with all devices that the selector matches and the caller may see, a
// page at a time, in order of their ids.
func (s *Service) Each(ctx context.Context, principal access.Principal, sel selector.Selector, f func([]devices.View) error) error {
	q := devices.ListQuery{Select: selector.And(principal.Caller.Devices, sel), Limit: eachPage, Members: principal.Caller.NeedsLabels()}
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

// Counts returns the numbers of devices by their values, of those that the selector
// matches and the caller may see. The counts of all devices are maintained; others are
// computed, and reused for countsLifetime.
func (s *Service) Counts(ctx context.Context, principal access.Principal, sel selector.Selector) (devices.Counts, error) {
	sel = selector.And(principal.Caller.Devices, sel)
	if sel.IsZero() {
		return s.ports.Records.Counts(ctx)
	}
	return s.cachedCounts(ctx, sel)
}

// Views returns those of the devices that are known, in any order, at most memoryPage at a
// time from the database.
func (s *Service) Views(ctx context.Context, ids []devices.ID) ([]devices.View, error) {
	var out []devices.View
	for part := range slices.Chunk(ids, memoryPage) {
		rows, err := s.ports.Records.Rows(ctx, part)
		if err != nil {
			return nil, err
		}
		for _, row := range rows {
			out = append(out, s.view(row))
		}
	}
	return out, nil
}
