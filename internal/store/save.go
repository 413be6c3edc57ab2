package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	"fleetd/internal/devices"
)

// forgetTimeout bounds Forget where its caller does not.
const forgetTimeout = 5 * time.Second

// SaveDevice queues the row. Labels are read before it returns.
func (s *Store) SaveDevice(d devices.Device) {
	if !s.acceptable(d.ID, "devices") {
		return
	}
	row := deviceRow{Device: d, labels: encodeLabels(d.Labels)}
	row.Labels = nil
	s.queue.putDevice(row)
}

// SavePresence queues the row.
func (s *Store) SavePresence(p devices.Presence) {
	if s.acceptable(p.Device, "presence") {
		s.queue.putPresence(p)
	}
}

// SaveCatalog queues a history entry with the text of its catalog; committed
// may be nil. Beyond the port's promise, committed is not called for an entry
// that Forget removed or that the database refused either.
func (s *Store) SaveCatalog(e devices.HistoryEntry, text devices.CatalogText, committed func()) (queued bool) {
	return s.acceptable(e.Device, "catalog_history") && s.queue.putHistory(historyRow{HistoryEntry: e, text: text, committed: committed})
}

// KeepCatalog has a list noted as used, and written again if it was deleted
// meanwhile, about once in keepEvery however often it is called.
func (s *Store) KeepCatalog(text devices.CatalogText) {
	if text.Tools != nil && !s.kept.isFresh(text.Hash, s.now()) {
		s.queue.putList(text)
	}
}

// SaveException queues the exception.
func (s *Store) SaveException(e devices.Exception) {
	if s.acceptable(e.Device, "credential_exceptions") {
		s.queue.putException(e)
	}
}

// Written waits until what was saved of a device's row and exceptions is
// committed. While the database is away it fails at once.
func (s *Store) Written(ctx context.Context, id devices.ID) error {
	if err := s.health.Load().err; err != nil {
		return err
	}
	return s.queue.awaitWritten(ctx, id)
}

// acceptable refuses an id that one of the databases would refuse or change.
// ParseID makes no such ids: it is a fault of ours, and must not stop others.
func (s *Store) acceptable(id devices.ID, table string) bool {
	if id != "" && isText(string(id)) {
		return true
	}
	s.stats.BadRows.Add(1)
	s.log.Error("a row has no usable device id; it is dropped", "table", table, "device", id)
	return false
}

// Forget removes the device, its presence and its history, rows that still
// wait included. It is carried out by the writer, between two groups. With an
// error nothing waiting is lost, and the rows in the database are either all
// there or all gone.
func (s *Store) Forget(ctx context.Context, id devices.ID) error {
	if err := s.health.Load().err; err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, forgetTimeout)
	defer cancel()
	f := &forget{ctx: ctx, id: id, done: make(chan error, 1)}
	if !s.queue.putForget(f) {
		return fmt.Errorf("%w: the node stops", devices.ErrDatabase)
	}
	select {
	case err := <-f.done:
		return err
	case <-ctx.Done():
		return s.useError(ctx, "forgetting "+string(id), ctx.Err())
	}
}

// forget carries an order out. rest is what the writer could not commit yet.
func (w *writer) forget(ctx context.Context, f *forget, rest *group) {
	s := w.store
	if err := s.health.Load().err; err != nil {
		f.done <- err
		return
	}
	both, cancel := context.WithCancel(f.ctx)
	defer cancel()
	defer context.AfterFunc(ctx, cancel)()

	inFlight := rest.cut(f.id)
	s.queue.settle(&inFlight)
	waiting := s.queue.cut(f.id)
	err := w.deleteDevice(both, f.id)
	if err != nil {
		s.queue.putBack(waiting)
		s.queue.putBack(inFlight)
		err = s.useError(both, "forgetting "+string(f.id), err)
	}
	f.done <- err
}

// deleteDevice removes the rows of a device, in the order in which groups
// write tables.
func (w *writer) deleteDevice(ctx context.Context, id devices.ID) error {
	tx, err := w.store.backend.write.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	for _, text := range []string{
		`DELETE FROM devices WHERE device = $1`,
		`DELETE FROM presence WHERE device = $1`,
		`DELETE FROM catalog_history WHERE device = $1`,
	} {
		if _, err := tx.ExecContext(ctx, text, string(id)); err != nil {
			return errors.Join(err, tx.Rollback())
		}
	}
	return tx.Commit()
}
