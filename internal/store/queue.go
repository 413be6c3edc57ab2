package store

import (
	"context"
	"slices"
	"sync"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/tasks"
)

// Limits of the queue.
const (
	// GroupRows is how many rows of one table are committed together at most.
	GroupRows = 500
	// Linger is how long the first row of a group waits for others. When a fleet reconnects,
	// a device's `online` and `ready` rows are about this far apart, so that most of them
	// are coalesced.
	Linger = 25 * time.Millisecond
	// MaxHistoryQueue is how many history entries are queued; more are dropped and counted.
	// The rows of other tables are limited by the number of devices.
	MaxHistoryQueue = 100_000
	// MaxLists is how many lists are queued to be marked as used.
	MaxLists = 1_000
)

// mergeFacts returns the later check, with a serial number if one of them has it.
func mergeFacts(older, newer devices.Check) devices.Check {
	if older.CheckedAt.After(newer.CheckedAt) {
		older, newer = newer, older
	}
	if newer.ELF == "" {
		newer.Details = older.Details
	}
	newer.Facts = newer.Over(older.Facts)
	return newer
}

// mergePresence returns the row with the higher (epoch, seq).
func mergePresence(older, newer devices.Presence) devices.Presence {
	if !before(&older, &newer) {
		return older
	}
	if newer.KeepCatalog && !older.KeepCatalog {
		newer.Catalog, newer.Partial, newer.Tools, newer.KeepCatalog = older.Catalog, older.Partial, older.Tools, false
	}
	return newer
}

// historyRow is a history entry with its catalog and its callback.
type historyRow struct {
	devices.HistoryEntry
	text      devices.CatalogText
	committed func()
}

// group is the rows of one transaction.
type group struct {
	facts    []devices.Check
	presence []devices.Presence
	history  []historyRow
	lists    []devices.CatalogText // used by a device, without a new entry
	// changes are those of an attempt whose commit may have no answer: the next attempt finds its checks in the table.
	changes map[devices.ID]devices.ImageChange
}

func (g *group) rows() int {
	return len(g.facts) + len(g.presence) + len(g.history) + len(g.lists)
}

// split divides a group of at least two rows.
func (g *group) split() (a, b group) {
	n := g.rows() / 2
	a.facts, b.facts, n = halve(g.facts, n)
	a.presence, b.presence, n = halve(g.presence, n)
	a.history, b.history, n = halve(g.history, n)
	a.lists, b.lists, _ = halve(g.lists, n)
	return a, b
}

// halve splits rows after the n-th and returns how much of n is left.
func halve[T any](rows []T, n int) (head, tail []T, left int) {
	cut := min(n, len(rows))
	return rows[:cut], rows[cut:], n - cut
}

// join appends the rows of another group.
func (g *group) join(other group) {
	g.facts = append(slices.Clip(g.facts), other.facts...)
	g.presence = append(slices.Clip(g.presence), other.presence...)
	g.history = append(slices.Clip(g.history), other.history...)
	g.lists = append(slices.Clip(g.lists), other.lists...)
}

// queue holds the rows for the writer. It is safe for concurrent use.
type queue struct {
	stats *Stats
	wake  chan struct{} // capacity 1: signals new rows

	mu       sync.Mutex
	facts    latest[devices.Check]
	presence latest[devices.Presence]
	history  []historyRow
	lists    map[devices.Hash]devices.CatalogText
	inFlight struct{ facts, presence, history int } // taken, but neither committed nor dropped
	weight   weight                                 // of history and lists, including those in flight
	closing  bool                                   // write the queued rows, then stop
	closed   bool                                   // no more rows are accepted
}

func newQueue(stats *Stats) *queue {
	return &queue{
		stats:    stats,
		wake:     make(chan struct{}, 1),
		facts:    latest[devices.Check]{rows: map[devices.ID]devices.Check{}, merge: mergeFacts},
		presence: latest[devices.Presence]{rows: map[devices.ID]devices.Presence{}, merge: mergePresence},
		lists:    map[devices.Hash]devices.CatalogText{},
	}
}

// update runs change under the lock and wakes the writer at the first row, at a full group and
// at the end.
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
		tasks.Signal(q.wake)
	}
}

// size returns the number of queued rows, and whether they are a full group; it sets the gauges.
// The caller holds the lock.
func (q *queue) size() (all int, full bool) {
	f, p, h := len(q.facts.rows), len(q.presence.rows), len(q.history)
	q.stats.DevicesWaiting.Store(int64(f + q.inFlight.facts))
	q.stats.PresenceWaiting.Store(int64(p + q.inFlight.presence))
	q.stats.HistoryWaiting.Store(int64(h + q.inFlight.history))
	q.stats.QueueBytes.Store(int64(q.weight.bytes))
	return f + p + h + len(q.lists), max(f, p, h) >= GroupRows || q.weight.bytes >= GroupBytes
}

func (q *queue) putFacts(f devices.Check) {
	q.update(func() bool { q.facts.put(f.Device, f); return false })
}

func (q *queue) putPresence(p devices.Presence) {
	q.update(func() bool { q.presence.put(p.Device, p); return false })
}

// putList queues a list to be marked as used. If there is no room it is skipped: the next device
// with the list queues it again.
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

// putHistory queues an entry; it reports false if there is no room.
func (q *queue) putHistory(row historyRow) (queued bool) {
	q.update(func() bool {
		switch {
		case len(q.history)+q.inFlight.history >= MaxHistoryQueue:
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

// close makes the writer write the queued rows and then stop.
func (q *queue) close() { q.update(func() bool { q.closing = true; return true }) }

// settle records that the rows of g were committed or dropped.
func (q *queue) settle(g *group) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.inFlight.facts -= len(g.facts)
	q.inFlight.presence -= len(g.presence)
	q.inFlight.history -= len(g.history)
	for own, list := range g.weighed() {
		q.weight.remove(own, list.Hash, list.Tools)
	}
	q.size()
}

// wait waits for the next group; it reports false if there will be none or ctx has ended.
func (q *queue) wait(ctx context.Context) bool {
	var linger <-chan time.Time
	for {
		q.mu.Lock()
		rows, full := q.size()
		closing := q.closing
		q.mu.Unlock()
		switch {
		case rows > 0 && (full || closing):
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
	g.facts = q.facts.take(GroupRows)
	g.presence = q.presence.take(GroupRows)
	var taken weight
	g.history = q.takeHistory(&taken)
	g.lists = q.takeLists(&taken)
	q.inFlight.facts += len(g.facts)
	q.inFlight.presence += len(g.presence)
	q.inFlight.history += len(g.history)
	q.size()
	return g
}

// takeHistory removes entries from the front until the group has its maximum size. It frees
// the removed entries, since their callbacks keep other memory. The caller holds the lock.
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

// end refuses all later rows and returns the unwritten ones.
func (q *queue) end() (g group) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	g.facts = q.facts.take(len(q.facts.rows))
	g.presence = q.presence.take(len(q.presence.rows))
	g.history = q.history
	q.history = nil
	q.inFlight.facts, q.inFlight.presence, q.inFlight.history, q.weight = 0, 0, 0, weight{}
	clear(q.lists) // only marks, not rows: nothing is lost
	q.size()
	return g
}
