package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"fleetd/internal/devices"
)

const (
	// groupTimeout bounds one transaction, so that a server which vanished
	// without a word does not hold the writer.
	groupTimeout = 15 * time.Second
	// Pauses between attempts at a group that fails through no fault of a row.
	minBackoff = 20 * time.Millisecond
	maxBackoff = 5 * time.Second
)

// writer is the one goroutine that writes. Its fields belong to it, atomics
// and lost excepted; lost may be read once it has ended.
type writer struct {
	store      *Store
	tables     *tables
	statements map[statementKey]*sql.Stmt
	args       []any
	lost       int

	stuck atomic.Pointer[error] // why the last attempt failed; nil after a success
}

// statementKey names a prepared INSERT.
type statementKey struct {
	table string
	rows  int
}

// step is one statement of a transaction with its values.
type step struct {
	stmt     *sql.Stmt
	args     []any
	affected *int64
}

// run writes until the queue is closed and empty, or ctx ends.
func (w *writer) run(ctx context.Context) {
	defer close(w.store.writerDone)
	q := w.store.queue
	var rest group // taken from the queue, not committed yet
	pause := minBackoff
	for ctx.Err() == nil {
		if rest.rows() == 0 {
			if q.finish(); !q.wait(ctx) {
				break
			}
		}
		for _, f := range q.takeForgets() {
			w.forget(ctx, f, &rest)
		}
		if rest.rows() == 0 {
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
		// Even if the database looks usable again at once: the watcher's
		// connection may work where the writer's does not.
		timer := time.NewTimer(pause)
		w.idle(ctx, nil, timer.C)
		timer.Stop()
		pause = min(2*pause, maxBackoff)
	}
	left, orders := q.end()
	w.lost = rest.rows() + left.rows()
	for _, f := range orders {
		f.done <- fmt.Errorf("%w: the node stops", devices.ErrDatabase)
	}
}

// idle waits for either channel. An order to forget ends it too, since its
// caller waits.
func (w *writer) idle(ctx context.Context, changed <-chan struct{}, timer <-chan time.Time) {
	for {
		select {
		case <-changed:
			return
		case <-timer:
			return
		case <-ctx.Done():
			return
		case <-w.store.queue.wake:
			if w.store.queue.hasForgets() {
				return
			}
		}
	}
}

// commit writes a group. A row that the database refuses is dropped. It
// returns what is not written because of an error that is no row's fault.
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

// failed takes note of an attempt that has to be repeated.
func (w *writer) failed(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	w.store.stats.Retries.Add(1)
	wrapped := fmt.Errorf("%w: writing: %s", devices.ErrDatabase, oneLine(err))
	if w.stuck.Swap(&wrapped) == nil {
		w.store.log.Warn("database write failed; rows are kept and tried again", "error", err)
	}
	if faultOf(err) == faultLost {
		w.store.suspect(err)
	}
}

// drop gives up the one row of g.
func (w *writer) drop(g *group, err error) {
	table, device := "", devices.ID("")
	switch {
	case len(g.devices) > 0:
		table, device = w.tables.devices.name, g.devices[0].ID
	case len(g.presence) > 0:
		table, device = w.tables.presence.name, g.presence[0].Device
	case len(g.history) > 0:
		table, device = w.tables.history.name, g.history[0].Device
	case len(g.exceptions) > 0:
		table, device = w.tables.exceptions.name, g.exceptions[0].Device
	default:
		table = w.tables.catalogs.name
	}
	w.store.queue.settle(g)
	w.store.stats.BadRows.Add(1)
	w.store.log.Error("the database refuses a row; it is dropped", "table", table, "device", device, "error", err)
}

// try writes a group in one transaction and reports it. refused means that the
// values of a row are at fault, which only a statement that carries some can say.
func (w *writer) try(ctx context.Context, g *group) (refused bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, groupTimeout)
	defer cancel()
	var presence, catalogs int64
	now := w.store.now()
	lists := w.dueCatalogs(g, now)
	steps, err := w.plan(ctx, g, lists, now, &presence, &catalogs)
	defer func() { clear(w.args) }()
	if err != nil {
		return false, err
	}
	tx, err := w.store.backend.write.BeginTx(ctx, nil)
	if err != nil {
		return false, err
	}
	for _, step := range steps {
		if err := step.run(ctx, tx); err != nil {
			// A connection that is gone as well tells more than err does.
			if again := tx.Rollback(); again != nil && !errors.Is(again, sql.ErrTxDone) {
				return false, errors.Join(err, again)
			}
			return faultOf(err) == faultRow, err
		}
	}
	if err := tx.Commit(); err != nil {
		return false, err
	}
	w.store.kept.note(lists, now)
	w.committed(g, presence, catalogs)
	if presence < int64(len(g.presence)) {
		w.outranked(ctx, g.presence)
	}
	return false, nil
}

// run executes the statement and adds up the rows that it changed.
func (s step) run(ctx context.Context, tx *sql.Tx) error {
	result, err := tx.StmtContext(ctx, s.stmt).ExecContext(ctx, s.args...)
	if err != nil || s.affected == nil {
		return err
	}
	n, err := result.RowsAffected()
	*s.affected += n
	return err
}

// committed counts, remembers and calls back after a commit.
func (w *writer) committed(g *group, presence, catalogs int64) {
	stats := &w.store.stats
	stats.Groups.Add(1)
	stats.DeviceRows.Add(int64(len(g.devices)))
	stats.PresenceRows.Add(presence)
	stats.StalePresence.Add(int64(len(g.presence)) - presence)
	stats.HistoryRows.Add(int64(len(g.history)))
	stats.ExceptionRows.Add(int64(len(g.exceptions)))
	stats.CatalogWrites.Add(catalogs)
	stats.CatalogHits.Add(max(0, int64(len(g.history))-catalogs))
	if stuck := w.stuck.Swap(nil); stuck != nil {
		w.store.log.Info("database writes go on", "after", *stuck)
	}
	w.store.queue.settle(g)
	for _, row := range g.history {
		if row.committed != nil {
			row.committed()
		}
	}
}

// dueCatalogs are the lists of this group that have to be written, or noted as
// used, each once.
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

// plan prepares all statements of a group, before a transaction takes the only
// connection.
func (w *writer) plan(ctx context.Context, g *group, lists []devices.CatalogText, now time.Time, presence, catalogs *int64) ([]step, error) {
	w.args = w.args[:0]
	var steps []step
	var err error
	if steps, err = addSteps(ctx, w, steps, &w.tables.devices, g.devices, nil); err != nil {
		return nil, err
	}
	if steps, err = addSteps(ctx, w, steps, &w.tables.presence, g.presence, presence); err != nil {
		return nil, err
	}
	slices.SortFunc(lists, w.tables.catalogs.compare)
	if steps, err = w.addTouches(ctx, steps, lists, now); err != nil {
		return nil, err
	}
	if steps, err = addSteps(ctx, w, steps, &w.tables.catalogs, lists, catalogs); err != nil {
		return nil, err
	}
	if steps, err = addSteps(ctx, w, steps, &w.tables.history, g.history, nil); err != nil {
		return nil, err
	}
	return addSteps(ctx, w, steps, &w.tables.exceptions, g.exceptions, nil)
}

// addTouches appends the statements that note lists as used, before those that
// write the ones which are not there (any more). One row each, in key order:
// the rows stay locked until the commit, so that no node can delete a list
// between its use and the commit of the entry that names it.
func (w *writer) addTouches(ctx context.Context, steps []step, lists []devices.CatalogText, now time.Time) ([]step, error) {
	for _, list := range lists {
		stmt, err := w.prepare(ctx, statementKey{"touch", 1}, func(int) string {
			return `UPDATE catalogs SET used_at = $1 WHERE sha256 = $2 AND used_at < $1`
		})
		if err != nil {
			return nil, err
		}
		steps = append(steps, step{stmt: stmt, args: []any{micros(now), list.Hash.String()}})
	}
	return steps, nil
}

// prepare returns a statement of the writer's connection, made when first used.
func (w *writer) prepare(ctx context.Context, key statementKey, text func(rows int) string) (*sql.Stmt, error) {
	if stmt := w.statements[key]; stmt != nil {
		return stmt, nil
	}
	stmt, err := w.store.backend.write.PrepareContext(ctx, text(key.rows))
	if err == nil {
		w.statements[key] = stmt
	}
	return stmt, err
}

// addSteps appends the statements that write rows, in key order.
func addSteps[T any](ctx context.Context, w *writer, steps []step, t *table[T], rows []T, affected *int64) ([]step, error) {
	slices.SortFunc(rows, t.compare)
	for len(rows) > 0 {
		n := t.take(len(rows), w.store.backend.maxRows)
		stmt, err := w.prepare(ctx, statementKey{t.name, n}, t.text)
		if err != nil {
			return nil, err
		}
		from := len(w.args)
		for i := range rows[:n] {
			w.args = t.values(w.args, &rows[i])
		}
		steps = append(steps, step{stmt: stmt, args: w.args[from:len(w.args):len(w.args)], affected: affected})
		rows = rows[n:]
	}
	return steps, nil
}

// closeStatements gives back what was prepared. The writer has ended.
func (w *writer) closeStatements() error {
	var errs []error
	for _, stmt := range w.statements {
		errs = append(errs, stmt.Close())
	}
	return errors.Join(errs...)
}
