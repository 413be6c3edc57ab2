package store

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/store/database"
)

const (
	// groupTimeout limits one transaction, so that a server that stopped responding does not
	// block the writer.
	groupTimeout = 15 * time.Second
	// Pauses between attempts at a group that fails without a faulty row.
	minBackoff = 20 * time.Millisecond
	maxBackoff = 5 * time.Second
)

// writer is the goroutine that writes the queue. Only it uses its fields, except atomics and
// lost; lost may be read after it has ended.
type writer struct {
	store *Store
	texts *statements
	lost  int

	stuck atomic.Pointer[error] // error of the last attempt; nil after a success
}

// run writes until the queue is closed and empty, or ctx ends.
func (w *writer) run(ctx context.Context) {
	defer close(w.store.writerDone)
	q := w.store.queue
	var rest group // taken from the queue, not committed yet
	pause := minBackoff
	for ctx.Err() == nil {
		if rest.rows() == 0 {
			if !q.wait(ctx) {
				break
			}
			rest = q.take()
		}
		if rest.rows() == 0 {
			continue
		}
		if h := w.store.health.Load(); h.err != nil {
			w.idle(ctx, h.changed, nil)
			continue
		}
		var err error
		if rest, err = w.commit(ctx, rest); err == nil {
			pause = minBackoff
			continue
		}
		// Pause even if the check finds the database usable: its connection may work while the
		// writer's does not.
		timer := time.NewTimer(pause)
		w.idle(ctx, nil, timer.C)
		timer.Stop()
		pause = min(2*pause, maxBackoff)
	}
	left := q.end()
	w.lost = rest.rows() + left.rows()
}

// idle waits for either channel.
func (w *writer) idle(ctx context.Context, changed <-chan struct{}, timer <-chan time.Time) {
	select {
	case <-changed:
	case <-timer:
	case <-ctx.Done():
	}
}

// commit writes a group. A row that the database refuses is dropped. It returns the rows that
// were not written because of another error.
func (w *writer) commit(ctx context.Context, g group) (rest group, err error) {
	refused, err := w.try(ctx, &g)
	switch {
	case err == nil:
		return group{}, nil
	case !refused:
		w.failed(ctx, err)
		return g, err
	case g.rows() == 1:
		w.drop(&g, err)
		return group{}, nil
	}
	a, b := g.split()
	if rest, err = w.commit(ctx, a); err != nil {
		rest.join(b)
		return rest, err
	}
	return w.commit(ctx, b)
}

// failed records a failed attempt that will be repeated.
func (w *writer) failed(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	w.store.stats.Retries.Add(1)
	wrapped := fmt.Errorf("%w: writing: %s", devices.ErrDatabase, database.OneLine(err))
	if w.stuck.Swap(&wrapped) == nil {
		w.store.log.Warn("database write failed; the rows are kept and the write is repeated", "error", err)
	}
	if database.FaultOf(err) == database.FaultLost {
		w.store.suspect(err)
	}
}

// drop drops the only row of g.
func (w *writer) drop(g *group, err error) {
	table, device := "", devices.ID("")
	switch {
	case len(g.facts) > 0:
		table, device = "devices", g.facts[0].Device
	case len(g.presence) > 0:
		table, device = "presence", g.presence[0].Device
	case len(g.history) > 0:
		table, device = "catalog_history", g.history[0].Device
	default:
		table = "catalogs"
	}
	w.store.queue.settle(g)
	w.store.stats.BadRows.Add(1)
	w.store.log.Error("the database refuses a row; it is dropped", "table", table, "device", device, "error", err)
}

// try writes a group in one transaction and records the result. refused means that the values
// of a row caused the error, which only a statement with values can report.
func (w *writer) try(ctx context.Context, g *group) (refused bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, groupTimeout)
	defer cancel()
	now := w.store.now()
	lists := w.dueCatalogs(g, now)
	if err := w.prepareGroup(ctx, g, lists); err != nil {
		return false, err
	}
	m, catalogs, refused, err := w.transaction(ctx, g, lists, now)
	if err != nil {
		return refused, err
	}
	w.store.kept.note(lists, now)
	w.committed(g, &m, catalogs)
	for _, p := range m.newer {
		w.store.onOutranked(p)
	}
	for _, c := range m.changes {
		w.store.onImage(c)
	}
	return false, nil
}

func (w *writer) transaction(ctx context.Context, g *group, lists []devices.CatalogText, now time.Time) (m mergeResult, catalogs int64, refused bool, err error) {
	_, err = w.store.backend.Attempt(ctx, w.store.backend.Write, func(ctx context.Context, tx *sql.Tx) (err error) {
		if m, err = w.merge(ctx, tx, g); err == nil {
			g.note(m.changes)
			catalogs, err = w.execute(ctx, tx, g, &m, lists, now)
		}
		refused = err != nil && database.FaultOf(err) == database.FaultRow
		return err
	})
	return m, catalogs, refused, err
}

// committed updates counters and memory, and calls the callbacks after a commit.
func (w *writer) committed(g *group, m *mergeResult, catalogs int64) {
	stats := &w.store.stats
	stats.Groups.Add(1)
	stats.DeviceRows.Add(int64(len(m.facts) + len(m.image)))
	stats.PresenceRows.Add(int64(len(m.session) + len(m.presence)))
	stats.StalePresence.Add(int64(m.stale))
	stats.UnknownDevices.Add(int64(m.unknown))
	stats.HistoryRows.Add(int64(len(g.history)))
	stats.CatalogWrites.Add(catalogs)
	stats.CatalogHits.Add(max(0, int64(len(g.history))-catalogs))
	if stuck := w.stuck.Swap(nil); stuck != nil {
		w.store.log.Info("database writes work again", "after", *stuck)
	}
	w.store.queue.settle(g)
	for _, row := range g.history {
		if row.committed != nil {
			row.committed()
		}
	}
}

// dueCatalogs returns the lists of this group that must be written or marked as used, each once.
func (w *writer) dueCatalogs(g *group, now time.Time) []devices.CatalogText {
	var due []devices.CatalogText
	var seen map[devices.Hash]struct{}
	add := func(h devices.Hash, text devices.CatalogText) {
		if _, twice := seen[h]; twice || text.Tools == nil || w.store.kept.isFresh(h, now) {
			return
		}
		if seen == nil {
			seen = map[devices.Hash]struct{}{}
		}
		seen[h] = struct{}{}
		text.Hash = h
		due = append(due, text)
	}
	for _, row := range g.history {
		add(row.Catalog, row.text)
	}
	for _, text := range g.lists {
		add(text.Hash, text)
	}
	return due
}

// prepareGroup prepares all statements that a group may need before a transaction occupies the
// only connection.
func (w *writer) prepareGroup(ctx context.Context, g *group, lists []devices.CatalogText) error {
	t := w.texts
	for _, s := range []struct {
		rows *database.Rows
		n    int
	}{{&t.facts.Rows, len(g.facts)}, {&t.image.Rows, len(g.facts)}, {&t.images.Rows, len(g.facts)}, {&t.seen.Rows, len(g.facts)}, {&t.session.Rows, len(g.presence)}, {&t.presence.Rows, len(g.presence)},
		{&t.catalogs.Rows, len(lists)}, {&t.history.Rows, len(g.history)}} {
		if err := s.rows.Prepare(ctx, w.store.backend, s.n); err != nil {
			return err
		}
	}
	return nil
}

// execute runs the statements of a group, and returns how many lists are new.
func (w *writer) execute(ctx context.Context, tx *sql.Tx, g *group, m *mergeResult, lists []devices.CatalogText, now time.Time) (catalogs int64, err error) {
	t, db := w.texts, w.store.backend
	_, err = t.facts.write(ctx, tx, db, m.facts)
	if err == nil {
		_, err = t.image.write(ctx, tx, db, m.image)
	}
	if err == nil {
		err = w.writeImages(ctx, tx, m)
	}
	if err == nil {
		_, err = t.session.write(ctx, tx, db, m.session)
	}
	if err == nil {
		_, err = t.presence.write(ctx, tx, db, m.presence)
	}
	if err == nil {
		_, err = t.seen.write(ctx, tx, db, m.seen)
	}
	slices.SortFunc(lists, t.catalogs.compare)
	if err == nil {
		catalogs, err = w.keepLists(ctx, tx, lists, now)
	}
	if err == nil {
		_, err = t.history.write(ctx, tx, db, g.history)
	}
	if err == nil {
		err = m.counts.Write(ctx, tx, db)
	}
	return catalogs, err
}

// keepLists marks lists as used, or adds them, and returns how many are new. The rows stay locked
// until the commit, so that no node can delete a list between its use and the commit of the
// entry that refers to it. Both statements of a list run before those of the next one in key
// order: an insert waits for a transaction that changes the row, which must not wait for a list
// that was added here.
func (w *writer) keepLists(ctx context.Context, tx *sql.Tx, lists []devices.CatalogText, now time.Time) (added int64, err error) {
	for i := 0; i < len(lists) && err == nil; i++ {
		var n int64
		n, err = database.Exec(ctx, tx, `UPDATE catalogs SET used_at = $1 WHERE sha256 = $2 AND used_at < $1`, clock.Micros(now), lists[i].Hash.String())
		if err == nil && n == 0 {
			n, err = w.texts.catalogs.write(ctx, tx, w.store.backend, lists[i:i+1])
			added += n
		}
	}
	return added, err
}
