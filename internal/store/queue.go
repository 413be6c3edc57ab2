package store

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"fleetd/internal/devices"
)

// Bounds of the queue.
const (
	// GroupRows is the most rows of one table that are committed together.
	GroupRows = 500
	// Linger is how long the first row of a group waits for others. When a fleet
	// returns, a device's `online` and `ready` rows come about this far apart,
	// so that most of them become one.
	Linger = 25 * time.Millisecond
	// MaxHistoryQueue is how many history entries may wait; more are dropped
	// and counted. The rows of other tables are bounded by their devices.
	MaxHistoryQueue = 100_000
	// MaxLists is how many lists may wait to be noted as used.
	MaxLists = 1_000
)

// deviceRow is a device with its labels encoded, since the caller's map may
// change while the row waits.
type deviceRow struct {
	devices.Device
	labels string
}

// mergeDevice is what the table would hold after older, then newer.
func mergeDevice(older, newer deviceRow) deviceRow {
	out := newer
	if out.KeepNewer(&older.Device) {
		out.labels = older.labels
	}
	if newer.FirstSeen.IsZero() || !older.FirstSeen.IsZero() && older.FirstSeen.Before(newer.FirstSeen) {
		out.FirstSeen = older.FirstSeen
	}
	return out
}

// mergePresence is the one with the higher fence.
func mergePresence(older, newer devices.Presence) devices.Presence {
	if before(&older, &newer) {
		return newer
	}
	return older
}

// historyRow is a history entry with its catalog and who wants to know.
type historyRow struct {
	devices.HistoryEntry
	text      devices.CatalogText
	committed func()
}

// latest holds the newest row per device, first come first out.
type latest[T any] struct {
	order []devices.ID // may name devices that were removed
	rows  map[devices.ID]T
	merge func(older, newer T) T
}

func (l *latest[T]) put(id devices.ID, row T) {
	if older, ok := l.rows[id]; ok {
		row = l.merge(older, row)
	} else {
		l.order = append(l.order, id)
	}
	l.rows[id] = row
}

// putBack returns a row that was taken out: what came since is newer.
func (l *latest[T]) putBack(id devices.ID, row T) {
	if newer, ok := l.rows[id]; ok {
		l.rows[id] = l.merge(row, newer)
		return
	}
	l.put(id, row)
}

// take removes and returns up to n rows.
func (l *latest[T]) take(n int) []T {
	var out []T
	i := 0
	for ; i < len(l.order) && len(out) < n; i++ {
		if row, ok := l.rows[l.order[i]]; ok {
			out = append(out, row)
			delete(l.rows, l.order[i])
		}
	}
	l.order = l.order[i:]
	return out
}

// group is what is committed together.
type group struct {
	devices    []deviceRow
	presence   []devices.Presence
	history    []historyRow
	exceptions []devices.Exception
	lists      []devices.CatalogText // in use by a device, without an entry
}

func (g *group) rows() int {
	return len(g.devices) + len(g.presence) + len(g.history) + len(g.exceptions) + len(g.lists)
}

// split halves a group of at least two rows.
func (g *group) split() (a, b group) {
	n := g.rows() / 2
	a.devices, b.devices, n = halve(g.devices, n)
	a.presence, b.presence, n = halve(g.presence, n)
	a.history, b.history, n = halve(g.history, n)
	a.exceptions, b.exceptions, n = halve(g.exceptions, n)
	a.lists, b.lists, _ = halve(g.lists, n)
	return a, b
}

// halve cuts rows behind the n-th and says how much of n is left.
func halve[T any](rows []T, n int) (head, tail []T, left int) {
	cut := min(n, len(rows))
	return rows[:cut], rows[cut:], n - cut
}

// join appends the rows of another group.
func (g *group) join(other group) {
	g.devices = append(slices.Clip(g.devices), other.devices...)
	g.presence = append(slices.Clip(g.presence), other.presence...)
	g.history = append(slices.Clip(g.history), other.history...)
	g.exceptions = append(slices.Clip(g.exceptions), other.exceptions...)
	g.lists = append(slices.Clip(g.lists), other.lists...)
}

// cut removes and returns the rows of one device; exceptions stay.
func (g *group) cut(id devices.ID) (out group) {
	g.devices, out.devices = part(g.devices, func(r deviceRow) bool { return r.ID == id })
	g.presence, out.presence = part(g.presence, func(r devices.Presence) bool { return r.Device == id })
	g.history, out.history = part(g.history, func(r historyRow) bool { return r.Device == id })
	return out
}

// part separates the rows that match from those that do not.
func part[T any](rows []T, match func(T) bool) (rest, out []T) {
	if !slices.ContainsFunc(rows, match) {
		return rows, nil
	}
	for _, row := range rows {
		if match(row) {
			out = append(out, row)
		} else {
			rest = append(rest, row)
		}
	}
	return rest, out
}

// forget is an order to delete a device, carried out by the writer, so that
// no row that was saved before can come back behind it.
type forget struct {
	ctx  context.Context // of the caller, for the length of one call
	id   devices.ID
	done chan error // capacity 1
}

// queue is what waits for the writer. All methods may be called from any
// goroutine.
type queue struct {
	stats *Stats
	wake  chan struct{} // capacity 1: look again

	mu         sync.Mutex
	devices    latest[deviceRow]
	presence   latest[devices.Presence]
	history    []historyRow
	exceptions []devices.Exception
	lists      map[devices.Hash]devices.CatalogText
	forgets    []*forget
	inFlight   int           // history entries taken and neither committed nor dropped
	takes      int           // groups taken
	written    int           // of them, committed or dropped
	turned     chan struct{} // closed when written grows, or the queue closes
	closing    bool          // write what is here, then end
	closed     bool          // nothing is taken any more
}

func newQueue(stats *Stats) *queue {
	return &queue{
		stats:    stats,
		wake:     make(chan struct{}, 1),
		devices:  latest[deviceRow]{rows: map[devices.ID]deviceRow{}, merge: mergeDevice},
		presence: latest[devices.Presence]{rows: map[devices.ID]devices.Presence{}, merge: mergePresence},
		lists:    map[devices.Hash]devices.CatalogText{},
		turned:   make(chan struct{}),
	}
}

// update runs change under the lock and wakes the writer where that matters:
// at the first row, at a whole group, at an order.
func (q *queue) update(change func() (urgent bool)) {
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		q.stats.Late.Add(1)
		return
	}
	rows, most := q.size()
	urgent := change()
	rowsNow, mostNow := q.size()
	q.mu.Unlock()
	if urgent || rows == 0 && rowsNow > 0 || most < GroupRows && mostNow >= GroupRows {
		q.signal()
	}
}

func (q *queue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// size returns how many rows wait, and how many for the fullest table; it sets
// the gauges. The caller holds the lock.
func (q *queue) size() (all, most int) {
	d, p, h, e := len(q.devices.rows), len(q.presence.rows), len(q.history), len(q.exceptions)
	q.stats.DevicesWaiting.Store(int64(d))
	q.stats.PresenceWaiting.Store(int64(p))
	q.stats.HistoryWaiting.Store(int64(h + q.inFlight))
	q.stats.ExceptionsWaiting.Store(int64(e))
	return d + p + h + e + len(q.lists), max(d, p, h, e)
}

func (q *queue) putDevice(row deviceRow) {
	q.update(func() bool { q.devices.put(row.ID, row); return false })
}

func (q *queue) putPresence(p devices.Presence) {
	q.update(func() bool { q.presence.put(p.Device, p); return false })
}

func (q *queue) putException(e devices.Exception) {
	q.update(func() bool { q.exceptions = append(q.exceptions, e); return false })
}

// putList queues a list to be noted as used; while MaxLists wait, one more is
// left to the next device that has it.
func (q *queue) putList(text devices.CatalogText) {
	q.update(func() bool {
		if len(q.lists) < MaxLists {
			q.lists[text.Hash] = text
		}
		return false
	})
}

func (q *queue) putHistory(row historyRow) {
	q.update(func() bool {
		if len(q.history)+q.inFlight >= MaxHistoryQueue {
			q.stats.DroppedHistory.Add(1)
			return false
		}
		q.history = append(q.history, row)
		return false
	})
}

// putForget queues the order; false if the store is closed.
func (q *queue) putForget(f *forget) bool {
	taken := false
	q.update(func() bool { q.forgets, taken = append(q.forgets, f), true; return true })
	return taken
}

// close lets the writer write what is here and then end.
func (q *queue) close() { q.update(func() bool { q.closing = true; return true }) }

// settle says that n history entries were committed or dropped.
func (q *queue) settle(n int) {
	q.mu.Lock()
	q.inFlight -= n
	q.size()
	q.mu.Unlock()
}

// wait returns once a group or an order is due; false if none will come any
// more or the context ended.
func (q *queue) wait(ctx context.Context) bool {
	var linger <-chan time.Time
	for {
		q.mu.Lock()
		rows, most := q.size()
		orders, closing := len(q.forgets), q.closing
		q.mu.Unlock()
		switch {
		case orders > 0 || most >= GroupRows || closing && rows > 0:
			return true
		case closing:
			return false
		case rows > 0 && linger == nil:
			timer := time.NewTimer(Linger)
			defer timer.Stop()
			linger = timer.C
		}
		select {
		case <-q.wake:
		case <-linger:
			return true
		case <-ctx.Done():
			return false
		}
	}
}

// take removes up to one group.
func (q *queue) take() (g group) {
	q.mu.Lock()
	defer q.mu.Unlock()
	g.devices = q.devices.take(GroupRows)
	g.presence = q.presence.take(GroupRows)
	g.history, q.history = cutHead(q.history)
	q.inFlight += len(g.history)
	g.exceptions, q.exceptions = cutHead(q.exceptions)
	g.lists = q.takeLists()
	q.size()
	q.takes++
	return g
}

// finish says that nothing of what was taken waits to be committed.
func (q *queue) finish() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.written != q.takes {
		q.written = q.takes
		q.turnLocked()
	}
}

func (q *queue) turnLocked() {
	close(q.turned)
	q.turned = make(chan struct{})
}

// awaitWritten waits until the row and exceptions of a device that wait now are
// committed, and fails if the queue closes before, or with the context.
func (q *queue) awaitWritten(ctx context.Context, id devices.ID) error {
	taken, last := false, 0
	for {
		q.mu.Lock()
		_, waits := q.devices.rows[id]
		waits = waits || slices.ContainsFunc(q.exceptions, func(e devices.Exception) bool { return e.Device == id })
		if !taken && !waits { // it is in one of these groups, if not written long ago
			taken, last = true, q.takes
		}
		done, closed, turned := taken && q.written >= last, q.closed, q.turned
		q.mu.Unlock()
		switch {
		case done:
			return nil
		case closed:
			return fmt.Errorf("%w: the node stops", devices.ErrDatabase)
		}
		select {
		case <-turned:
		case <-ctx.Done():
			return fmt.Errorf("%w: not written yet: %w", devices.ErrDatabase, ctx.Err())
		}
	}
}

// takeLists removes all lists; the caller holds the lock.
func (q *queue) takeLists() []devices.CatalogText {
	if len(q.lists) == 0 {
		return nil
	}
	out := slices.Collect(maps.Values(q.lists))
	clear(q.lists)
	return out
}

// cutHead splits off up to GroupRows elements. What is left must not keep them
// alive: an entry holds on to whatever its callback needs.
func cutHead[R any](rows []R) (head, rest []R) {
	n := min(GroupRows, len(rows))
	head = slices.Clone(rows[:n])
	if n == len(rows) {
		return head, nil
	}
	clear(rows[:n])
	return head, rows[n:]
}

func (q *queue) hasForgets() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.forgets) > 0
}

// takeForgets removes all orders.
func (q *queue) takeForgets() []*forget {
	q.mu.Lock()
	defer q.mu.Unlock()
	out := q.forgets
	q.forgets = nil
	return out
}

// cut removes and returns the waiting rows of one device; exceptions stay.
func (q *queue) cut(id devices.ID) (out group) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if row, ok := q.devices.rows[id]; ok {
		out.devices = []deviceRow{row}
		delete(q.devices.rows, id)
	}
	if row, ok := q.presence.rows[id]; ok {
		out.presence = []devices.Presence{row}
		delete(q.presence.rows, id)
	}
	q.history, out.history = part(q.history, func(r historyRow) bool { return r.Device == id })
	q.size()
	return out
}

// putBack returns rows that were cut; they are older than what came since.
func (q *queue) putBack(g group) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, row := range g.devices {
		q.devices.putBack(row.ID, row)
	}
	for _, row := range g.presence {
		q.presence.putBack(row.Device, row)
	}
	q.history = append(slices.Clip(g.history), q.history...)
	q.size()
}

// end refuses everything from now on and returns what never was written.
func (q *queue) end() (g group, orders []*forget) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	g.devices = q.devices.take(len(q.devices.rows))
	g.presence = q.presence.take(len(q.presence.rows))
	g.history, g.exceptions, orders = q.history, q.exceptions, q.forgets
	q.history, q.exceptions, q.forgets = nil, nil, nil
	q.inFlight = 0
	clear(q.lists) // a note, not a row: nothing is lost with it
	q.size()
	q.turnLocked()
	return g, orders
}
