package store

import (
	"context"
	"fmt"
	"math"
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

// mergeException is the one that the table would keep: the higher generation,
// then the later change.
func mergeException(older, newer devices.Exception) devices.Exception {
	if older.Generation > newer.Generation || older.Generation == newer.Generation && older.ChangedAt.After(newer.ChangedAt) {
		return older
	}
	return newer
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
	exceptions latest[devices.Exception]
	lists      map[devices.Hash]devices.CatalogText
	forgets    []*forget
	inFlight   int           // history entries taken and neither committed nor dropped
	weight     weight        // of history and lists, those in flight included
	takes      int           // groups taken
	written    int           // of them, committed or dropped
	turned     chan struct{} // closed when written grows, or the queue closes
	closing    bool          // write what is here, then end
	closed     bool          // nothing is taken any more
}

func newQueue(stats *Stats) *queue {
	return &queue{
		stats:      stats,
		wake:       make(chan struct{}, 1),
		devices:    latest[deviceRow]{rows: map[devices.ID]deviceRow{}, merge: mergeDevice, text: func(r *deviceRow) int { return len(r.labels) }},
		presence:   latest[devices.Presence]{rows: map[devices.ID]devices.Presence{}, merge: mergePresence},
		exceptions: latest[devices.Exception]{rows: map[devices.ID]devices.Exception{}, merge: mergeException},
		lists:      map[devices.Hash]devices.CatalogText{},
		turned:     make(chan struct{}),
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
	rows, full := q.size()
	urgent := change()
	rowsNow, fullNow := q.size()
	q.mu.Unlock()
	if urgent || rows == 0 && rowsNow > 0 || !full && fullNow {
		q.signal()
	}
}

func (q *queue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// size returns how many rows wait, and whether they make a whole group; it sets
// the gauges. The caller holds the lock.
func (q *queue) size() (all int, full bool) {
	d, p, h, e := len(q.devices.rows), len(q.presence.rows), len(q.history), len(q.exceptions.rows)
	q.stats.DevicesWaiting.Store(int64(d))
	q.stats.PresenceWaiting.Store(int64(p))
	q.stats.HistoryWaiting.Store(int64(h + q.inFlight))
	q.stats.ExceptionsWaiting.Store(int64(e))
	q.stats.QueueBytes.Store(int64(q.weight.bytes))
	return d + p + h + e + len(q.lists), max(d, p, h, e) >= GroupRows || q.weight.bytes >= GroupBytes
}

func (q *queue) putDevice(row deviceRow) {
	q.update(func() bool { q.devices.put(row.ID, row); return false })
}

func (q *queue) putPresence(p devices.Presence) {
	q.update(func() bool { q.presence.put(p.Device, p); return false })
}

func (q *queue) putException(e devices.Exception) {
	q.update(func() bool { q.exceptions.put(e.Device, e); return false })
}

// putList queues a list to be noted as used; one for which there is no room is
// left to the next device that has it.
func (q *queue) putList(text devices.CatalogText) {
	q.update(func() bool {
		_, waits := q.lists[text.Hash]
		if !waits && len(q.lists) < MaxLists && q.weight.bytes+q.weight.cost(rowBytes, text.Hash, text.Tools) <= MaxQueueBytes {
			text.Tools = q.weight.add(rowBytes, text.Hash, text.Tools)
			q.lists[text.Hash] = text
		}
		return false
	})
}

// putHistory queues an entry; false if there is no room for it.
func (q *queue) putHistory(row historyRow) (queued bool) {
	q.update(func() bool {
		switch {
		case len(q.history)+q.inFlight >= MaxHistoryQueue:
			q.stats.DroppedHistory.Add(1)
		case q.weight.bytes+q.weight.cost(row.bytes(), row.Catalog, row.text.Tools) > MaxQueueBytes:
			q.stats.DroppedBytes.Add(1)
		default:
			row.text.Tools = q.weight.add(row.bytes(), row.Catalog, row.text.Tools)
			q.history = append(q.history, row)
			queued = true
		}
		return false
	})
	return queued
}

// putForget queues the order; false if the store is closed.
func (q *queue) putForget(f *forget) bool {
	taken := false
	q.update(func() bool { q.forgets, taken = append(q.forgets, f), true; return true })
	return taken
}

// close lets the writer write what is here and then end.
func (q *queue) close() { q.update(func() bool { q.closing = true; return true }) }

// settle says that what was taken of these rows was committed or dropped.
func (q *queue) settle(g *group) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.inFlight -= len(g.history)
	q.lighten(g)
	q.size()
}

// lighten takes the rows' weight off; the caller holds the lock.
func (q *queue) lighten(g *group) {
	for own, list := range g.weighed() {
		q.weight.remove(own, list.Hash, list.Tools)
	}
}

// wait returns once a group or an order is due; false if none will come any
// more or the context ended.
func (q *queue) wait(ctx context.Context) bool {
	var linger <-chan time.Time
	for {
		q.mu.Lock()
		rows, full := q.size()
		orders, closing := len(q.forgets), q.closing
		q.mu.Unlock()
		switch {
		case orders > 0 || rows > 0 && (full || closing):
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
	g.devices = q.devices.take(GroupRows, GroupBytes)
	g.presence = q.presence.take(GroupRows, GroupBytes)
	g.exceptions = q.exceptions.take(GroupRows, GroupBytes)
	var taken weight
	g.history = q.takeHistory(&taken)
	g.lists = q.takeLists(&taken)
	q.inFlight += len(g.history)
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
		_, row := q.devices.rows[id]
		_, exception := q.exceptions.rows[id]
		if !taken && !row && !exception { // it is in one of these groups, if not written long ago
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

// takeHistory removes entries from the front until the group has all the bytes
// that it may. What is left must not keep them alive: an entry holds on to
// whatever its callback needs. The caller holds the lock.
func (q *queue) takeHistory(taken *weight) []historyRow {
	n := 0
	for ; n < min(GroupRows, len(q.history)) && taken.bytes < GroupBytes; n++ {
		row := &q.history[n]
		taken.add(row.bytes(), row.Catalog, row.text.Tools)
	}
	head := slices.Clone(q.history[:n])
	clear(q.history[:n])
	if q.history = q.history[n:]; len(q.history) == 0 {
		q.history = nil
	}
	return head
}

// takeLists is takeHistory for lists.
func (q *queue) takeLists(taken *weight) (out []devices.CatalogText) {
	for h, list := range q.lists {
		if taken.bytes >= GroupBytes {
			break
		}
		taken.add(rowBytes, h, list.Tools)
		out = append(out, list)
		delete(q.lists, h)
	}
	return out
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
	q.lighten(&out)
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
	for i := range g.history {
		row := &g.history[i]
		row.text.Tools = q.weight.add(row.bytes(), row.Catalog, row.text.Tools)
	}
	q.history = append(slices.Clip(g.history), q.history...)
	q.size()
}

// end refuses everything from now on and returns what never was written.
func (q *queue) end() (g group, orders []*forget) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	g.devices = q.devices.take(len(q.devices.rows), math.MaxInt)
	g.presence = q.presence.take(len(q.presence.rows), math.MaxInt)
	g.exceptions = q.exceptions.take(len(q.exceptions.rows), math.MaxInt)
	g.history, orders = q.history, q.forgets
	q.history, q.forgets = nil, nil
	q.inFlight, q.weight = 0, weight{}
	clear(q.lists) // a note, not a row: nothing is lost with it
	q.size()
	q.turnLocked()
	return g, orders
}
