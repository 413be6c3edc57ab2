package devicetest

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/devices/registry/registrytest"
	"fleetd/internal/selector"
)

// ledger removes what else is stored of a device with the device.
type ledger struct {
	*registrytest.Ledger
	p *Ports
}

// Decide implements registry.Ledger.
func (l *ledger) Decide(ctx context.Context, list []devices.Decision) ([]devices.Outcome, error) {
	outcomes, err := l.Ledger.Decide(ctx, list)
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	for _, o := range outcomes {
		if o.Before.Known() && !o.After.Known() {
			id := o.Before.ID
			delete(l.p.facts, id)
			delete(l.p.Presences, id)
			l.p.Entries = slices.DeleteFunc(l.p.Entries, func(e devices.HistoryEntry) bool { return e.Device == id })
		}
	}
	return outcomes, err
}

// Put has another node decide that a device is like this, as an import does: all
// but its reported values and its revision. What cores are there hear of it.
func (p *Ports) Put(m devices.Member) {
	if m.Admission == "" {
		m.Admission = devices.AdmissionMember
	}
	l := ledger{p.Ledger, p}
	outcomes, err := l.Decide(context.Background(), []devices.Decision{{ID: rand.Text(), Device: m.ID, Who: "another node", Import: true, Decide: func(now *devices.Member) error {
		m.Generation, m.Previous, m.PreviousUntil, m.Reason = now.Generation, now.Previous, now.PreviousUntil, now.Reason
		*now = m
		return nil
	}}})
	if err != nil {
		panic(err)
	}
	p.mu.Lock()
	services := slices.Clone(p.services)
	p.mu.Unlock()
	for _, s := range services {
		s.Registry().Offer(outcomes[0].Changes)
	}
}

// SaveDevice is Put for a row, with what the device reported.
func (p *Ports) SaveDevice(d devices.Device) {
	m := d.Member()
	p.Put(m)
	if !d.CheckedAt.IsZero() || d.Board != "" || d.Firmware != "" || d.ELF != "" {
		p.SaveFacts(devices.Check{Device: d.ID, Facts: d.Facts})
	}
}

// Devices are the rows of all devices that are known.
func (p *Ports) Devices() map[devices.ID]devices.Device {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := map[devices.ID]devices.Device{}
	for id, m := range p.Ledger.Members() {
		if m.Known() {
			all[id] = p.rowLocked(m).Device
		}
	}
	return all
}

// rowLocked is a device with what is stored of it.
func (p *Ports) rowLocked(m devices.Member) devices.Row {
	d := registrytest.Device(m)
	if f, ok := p.facts[m.ID]; ok {
		f.Serial = d.Serial // which the ledger has
		d.Facts = f
	}
	return devices.Row{Device: d, Presence: p.Presences[m.ID]}
}

// Find implements fleet.Records.
func (p *Ports) Find(ctx context.Context, id devices.ID) (devices.Row, error) {
	rows, err := p.Rows(ctx, []devices.ID{id})
	if err == nil && len(rows) == 0 {
		err = devices.ErrNotFound
	}
	if err != nil {
		return devices.Row{}, err
	}
	return rows[0], nil
}

// Rows implements fleet.Records.
func (p *Ports) Rows(ctx context.Context, ids []devices.ID) (rows []devices.Row, err error) {
	p.mu.Lock()
	takes := p.rowTime
	p.mu.Unlock()
	if takes > 0 {
		select {
		case <-time.After(takes):
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", devices.ErrDatabase, ctx.Err())
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.failure(); err != nil {
		return nil, err
	}
	for _, id := range ids {
		if m, known := p.Ledger.Member(id); known {
			rows = append(rows, p.rowLocked(m))
		}
	}
	return rows, nil
}

// List implements fleet.Records, in order of ids or names.
func (p *Ports) List(_ context.Context, q devices.ListQuery) (devices.Page, error) {
	after, err := devices.ParseCursor(q.After, q.Sort)
	if err != nil {
		return devices.Page{}, err
	}
	rows, err := p.selected(q)
	place := func(r *devices.Row) devices.Cursor {
		c := devices.Cursor{Sort: cmp.Or(q.Sort, devices.SortID), ID: r.Device.ID}
		if q.Sort == devices.SortName {
			c.Text = strings.ToLower(r.Device.Name)
		}
		return c
	}
	slices.SortFunc(rows, func(a, b devices.Row) int { return place(&a).Compare(place(&b)) })
	rows = slices.DeleteFunc(rows, func(r devices.Row) bool { return place(&r).Compare(after) <= 0 })
	if err != nil || len(rows) <= q.Limit {
		return devices.Page{Rows: rows}, err
	}
	rows = rows[:q.Limit]
	return devices.Page{Rows: rows, Next: place(&rows[len(rows)-1]).String()}, nil
}

// selected are the rows that a query selects.
func (p *Ports) selected(q devices.ListQuery) (rows []devices.Row, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.failure(); err != nil {
		return nil, err
	}
	text := strings.ToLower(q.Text)
	now := time.Now()
	for _, m := range p.Ledger.Members() {
		row := p.rowLocked(m)
		d := p.selectableLocked(&row)
		if m.Known() && q.Select.Match(&d, now) && strings.Contains(strings.ToLower(d.ID+"\x00"+d.Name+"\x00"+d.Board), text) {
			rows = append(rows, row)
		}
	}
	return rows, nil
}

// selectableLocked is a row as selectors see it.
func (p *Ports) selectableLocked(row *devices.Row) selector.Device {
	d, n := &row.Device, &row.Presence
	out := devices.Selectable(d, n)
	text, ok := p.Texts[n.Catalog]
	if !ok {
		return out
	}
	out.HasTool = func(match func(string) bool) bool {
		cat := p.lists[text.Hash]
		if cat == nil {
			var err error
			if cat, err = catalog.New(text.Tools); err != nil {
				return false
			}
			p.lists[text.Hash] = cat
		}
		return slices.ContainsFunc(cat.Tools, func(t catalog.Tool) bool { return match(t.Name) })
	}
	return out
}

// Counts implements fleet.Records.
func (p *Ports) Counts(ctx context.Context) (devices.Counts, error) {
	return p.CountsOf(ctx, devices.ListQuery{})
}

// CountsOf implements fleet.Records.
func (p *Ports) CountsOf(_ context.Context, q devices.ListQuery) (devices.Counts, error) {
	rows, err := p.selected(q)
	if err != nil {
		return devices.Counts{}, err
	}
	values := map[string]map[string]int64{}
	count := func(dimension, value string) {
		if values[dimension] == nil {
			values[dimension] = map[string]int64{}
		}
		values[dimension][value]++
	}
	for _, row := range rows {
		d, n := row.Device, row.Presence
		if n.Online {
			count("state", string(devices.StateOnline))
			count("transport", string(n.Transport))
			count("node", n.Node)
		} else {
			count("state", string(devices.StateOffline))
			count("offline_reason", n.Reason)
		}
		if d.Admission == devices.AdmissionRevoked {
			count("state", string(devices.AdmissionRevoked))
		}
		count("board", d.Board)
		count("firmware", d.Firmware)
		count("mcp_state", string(n.MCP))
	}
	out := devices.Counts{Total: int64(len(rows)), Dimensions: map[string]devices.Dimension{}, AsOf: time.Now()}
	for dimension, counted := range values {
		var top []devices.ValueCount
		for _, value := range slices.Sorted(maps.Keys(counted)) {
			top = append(top, devices.ValueCount{Value: value, N: counted[value]})
		}
		slices.SortStableFunc(top, func(a, b devices.ValueCount) int { return cmp.Compare(b.N, a.N) })
		out.Dimensions[dimension] = devices.Dimension{Top: top}
	}
	return out, nil
}

// CatalogsOf implements fleet.Records.
func (p *Ports) CatalogsOf(_ context.Context, sel selector.Selector) (list []devices.CatalogCount, err error) {
	rows, err := p.selected(devices.ListQuery{Select: sel})
	counts := map[devices.Hash]int64{}
	for _, row := range rows {
		if h := row.Presence.Catalog; h != (devices.Hash{}) {
			counts[h]++
		}
	}
	for h, n := range counts {
		list = append(list, devices.CatalogCount{Catalog: h, N: n})
	}
	slices.SortFunc(list, func(a, b devices.CatalogCount) int { return bytes.Compare(a.Catalog[:], b.Catalog[:]) })
	return list, err
}

// SaveFacts implements fleet.Records.
func (p *Ports) SaveFacts(f devices.Check) {
	p.mu.Lock()
	defer p.mu.Unlock()
	stored := p.facts[f.Device].CheckedAt
	if _, known := p.Ledger.Member(f.Device); !known || f.CheckedAt.Before(stored) && !stored.After(time.Now()) {
		return
	}
	if f.Serial != "" {
		p.Ledger.Reported(f.Device, f.Serial)
	}
	p.facts[f.Device] = f.Over(p.facts[f.Device])
}

// SavePresence implements fleet.Records, including the comparison of epochs: OnStaleWrite
// is called with the stored row if an online row is refused.
func (p *Ports) SavePresence(n devices.Presence) {
	if stored, refused := p.savePresence(n); refused && n.Online {
		p.mu.Lock()
		services := slices.Clone(p.services)
		p.mu.Unlock()
		for _, s := range services {
			s.OnStaleWrite(stored)
		}
	}
}

func (p *Ports) savePresence(n devices.Presence) (stored devices.Presence, refused bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	old := p.Presences[n.Device]
	if _, known := p.Ledger.Member(n.Device); !known {
		return devices.Presence{}, false
	}
	if old.Epoch > n.Epoch || old.Epoch == n.Epoch && old.Seq >= n.Seq {
		return old, true
	}
	if n.KeepCatalog {
		n.Catalog, n.Partial, n.Tools = old.Catalog, old.Partial, old.Tools
	}
	n.KeepCatalog = false
	n.Generation = max(n.Generation, old.Generation) // a queued row of older credentials may come late
	if !n.Online {
		n.OfflineSince = n.LastSeen
	}
	p.Presences[n.Device] = n
	p.Ledger.Connected(n.Device)
	return devices.Presence{}, false
}

// Catalog implements catalog.Catalogs.
func (p *Ports) Catalog(_ context.Context, h devices.Hash) (devices.CatalogText, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if text, ok := p.Texts[h]; ok {
		return text, p.failure()
	}
	return devices.CatalogText{}, devices.ErrNotFound
}

// History implements catalog.Catalogs.
func (p *Ports) History(_ context.Context, id devices.ID, _ devices.Epoch, _ int64, limit int) ([]devices.HistoryEntry, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var found []devices.HistoryEntry
	for _, e := range slices.Backward(p.Entries) {
		if e.Device == id && len(found) < limit {
			found = append(found, e)
		}
	}
	return found, p.failure()
}

// KeepCatalog implements catalog.Catalogs.
func (p *Ports) KeepCatalog(text devices.CatalogText) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.Texts[text.Hash] = text
}

// SaveCatalog implements catalog.Catalogs and commits at once.
func (p *Ports) SaveCatalog(e devices.HistoryEntry, text devices.CatalogText, committed func()) (queued bool) {
	p.mu.Lock()
	if p.Full {
		p.mu.Unlock()
		return false
	}
	p.Entries = append(p.Entries, e)
	p.Texts[text.Hash] = text
	p.mu.Unlock()
	committed()
	return true
}
