// Package webhookstore keeps webhooks in the database. It implements webhooks.Store. On Postgres a process has the lease of a
// webhook, and only that one writes the status. SQLite is used by one process, which needs no leases.
package webhookstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/store/database"
	"fleetd/internal/webhooks"
)

// Store implements webhooks.Store. It is safe for concurrent use.
type Store struct {
	host database.Host
	db   *database.DB

	leases       database.Watch
	transactions database.Transactions
}

var _ webhooks.Store = (*Store)(nil)

// New returns a Store in a database.
func New(host database.Host) *Store {
	db := host.Database()
	return &Store{host: host, db: db, transactions: database.Transactions{Host: host, Pool: db.Write, Limit: database.ReadTimeout}}
}

const columns = `id, owner, owner_name, url, types, devices, offline_for, sealed, created_at, version, position, gap, delivered, delivered_at, failing_since, last_error, disabled_at`

func scan(scan func(...any) error) (h webhooks.Hook, err error) {
	var types string
	var offlineFor, created, delivered, failing, disabled int64
	if err := scan(&h.ID, &h.Owner, &h.OwnerName, &h.URL, &types, &h.Select, &offlineFor, &h.Sealed, &created, &h.Version,
		&h.Position, &h.Gap, &h.Delivered, &delivered, &failing, &h.LastError, &disabled); err != nil {
		return h, err
	}
	h.OfflineFor, h.CreatedAt = time.Duration(offlineFor)*time.Microsecond, clock.Instant(created)
	h.DeliveredAt, h.FailingSince, h.DisabledAt = clock.Instant(delivered), clock.Instant(failing), clock.Instant(disabled)
	return h, json.Unmarshal([]byte(types), &h.Types)
}

// settings are the values of what people set, in the order of the columns.
func settings(h webhooks.Hook) ([]any, error) {
	types, err := json.Marshal(h.Types)
	return []any{h.ID, h.Owner, database.Clean(h.OwnerName), database.Clean(h.URL), string(types), database.Clean(h.Select), h.OfflineFor.Microseconds(), h.Sealed,
		clock.Micros(h.CreatedAt), h.Version}, err
}

// List implements webhooks.Store.
func (s *Store) List(ctx context.Context) ([]webhooks.Hook, error) {
	return database.Read(ctx, s.host, "reading webhooks", scan, `SELECT `+columns+` FROM webhooks ORDER BY id`)
}

// Get implements webhooks.Store.
func (s *Store) Get(ctx context.Context, id string) (webhooks.Hook, error) {
	hook, found, err := database.One(ctx, s.host, "reading webhooks", scan, `SELECT `+columns+` FROM webhooks WHERE id = $1`, database.Clean(id))
	if err == nil && !found {
		err = devices.ErrNotFound
	}
	return hook, err
}

// Create implements webhooks.Store.
func (s *Store) Create(ctx context.Context, h webhooks.Hook, permit func(held map[string]int64) error) error {
	args, err := settings(h)
	if err != nil {
		return err
	}
	return s.transactions.Run(ctx, "creating a webhook", func(ctx context.Context, tx *sql.Tx) error {
		if s.db.Postgres() { // on SQLite the transaction has the whole database
			if _, err := tx.ExecContext(ctx, `LOCK TABLE webhooks IN SHARE ROW EXCLUSIVE MODE`); err != nil {
				return err
			}
		}
		held := map[string]int64{}
		_, err := database.Collect(ctx, tx, func(scan func(...any) error) (none struct{}, err error) {
			var owner string
			var n int64
			err = scan(&owner, &n)
			held[owner] = n
			return none, err
		}, `SELECT owner, count(*) FROM webhooks GROUP BY owner`)
		if err != nil {
			return err
		}
		if err := permit(held); err != nil {
			return database.Rule(err)
		}
		_, err = tx.ExecContext(ctx, `INSERT INTO webhooks (`+columns+`, instance, beat) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, '', '', 0, 0, 0, '', 0, '', 0)`, args...)
		return err
	})
}

// Update implements webhooks.Store.
func (s *Store) Update(ctx context.Context, h webhooks.Hook) error {
	args, err := settings(h)
	if err != nil {
		return err
	}
	return s.transactions.One(ctx, "changing a webhook", webhooks.ErrStale, `UPDATE webhooks SET url = $3, types = $4, devices = $5, offline_for = $6, sealed = $7, version = version + 1,
 failing_since = CASE WHEN $8 = 0 AND disabled_at <> 0 THEN 0 ELSE failing_since END, disabled_at = $8 WHERE id = $1 AND version = $2`,
		h.ID, h.Version, args[3], args[4], args[5], args[6], args[7], clock.Micros(h.DisabledAt))
}

// Reseal implements webhooks.Store.
func (s *Store) Reseal(ctx context.Context, id, old, sealed string) error {
	err := s.transactions.One(ctx, "resealing the secret of a webhook", webhooks.ErrStale, `UPDATE webhooks SET sealed = $3 WHERE id = $1 AND sealed = $2`, id, old, sealed)
	if errors.Is(err, webhooks.ErrStale) { // it has a new one
		return nil
	}
	return err
}

// Delete implements webhooks.Store.
func (s *Store) Delete(ctx context.Context, id string, version int64) error {
	return s.transactions.Run(ctx, "deleting a webhook", func(ctx context.Context, tx *sql.Tx) error {
		n, err := database.Exec(ctx, tx, `DELETE FROM webhooks WHERE id = $1 AND (version = $2 OR $2 = 0)`, database.Clean(id), version)
		switch {
		case err == nil && n == 0 && version != 0:
			return database.Rule(webhooks.ErrStale)
		case err == nil && n == 0:
			return database.Rule(devices.ErrNotFound)
		}
		if err == nil {
			_, err = tx.ExecContext(ctx, `DELETE FROM webhook_offline WHERE webhook = $1`, id)
		}
		return err
	})
}

// Lease implements webhooks.Store.
func (s *Store) Lease(ctx context.Context, id, instance string, version int64, lasts time.Duration) (bool, error) {
	if !s.db.Postgres() {
		return true, nil
	}
	now := time.Now()
	holder, beat, err := s.holder(ctx, id)
	if err != nil || holder != "" && holder != instance && !s.leases.HasStopped(id, fmt.Sprint(holder, " ", beat), now, lasts) {
		return false, err
	}
	err = s.transactions.One(ctx, "taking the lease of a webhook", webhooks.ErrStale,
		`UPDATE webhooks SET instance = $2, beat = beat + 1 WHERE id = $1 AND version = $3 AND instance = $4 AND beat = $5`, id, instance, version, holder, beat)
	if errors.Is(err, webhooks.ErrStale) {
		return false, nil
	}
	return err == nil, err
}

// holder returns who has the lease of a webhook; empty: nobody, or it was deleted.
func (s *Store) holder(ctx context.Context, id string) (instance string, beat int64, err error) {
	_, err = database.Read(ctx, s.host, "reading who has the lease of a webhook", func(scan func(...any) error) (none struct{}, err error) {
		return none, scan(&instance, &beat)
	}, `SELECT instance, beat FROM webhooks WHERE id = $1`, id)
	return instance, beat, err
}

// Release implements webhooks.Store.
func (s *Store) Release(ctx context.Context, instance string) error {
	if !s.db.Postgres() {
		return nil
	}
	return s.transactions.Exec(ctx, "ending the leases of webhooks", `UPDATE webhooks SET instance = '' WHERE instance = $1`, instance)
}

// Save implements webhooks.Store.
func (s *Store) Save(ctx context.Context, instance string, statuses map[string]webhooks.Status) (stale []string, err error) {
	err = s.transactions.Run(ctx, "writing the status of webhooks", func(ctx context.Context, tx *sql.Tx) error {
		for _, id := range slices.Sorted(maps.Keys(statuses)) { // two processes lock rows in one order
			status := statuses[id]
			n, err := database.Exec(ctx, tx, `UPDATE webhooks SET position = $3, gap = $4, delivered = $5, delivered_at = $6, failing_since = $7, last_error = $8, disabled_at = $10 WHERE id = $1 AND (instance = $2 OR $9)`,
				id, instance, status.Position, status.Gap, status.Delivered, clock.Micros(status.DeliveredAt), clock.Micros(status.FailingSince), database.Clean(status.LastError), !s.db.Postgres(), clock.Micros(status.DisabledAt))
			if err != nil {
				return err
			}
			if n == 0 {
				stale = append(stale, id)
			}
		}
		return nil
	})
	return stale, err
}

// Absent implements webhooks.Store. A page takes the same time whether its devices were reported or not.
func (s *Store) Absent(ctx context.Context, id string, after webhooks.OfflineDevice, before time.Time, limit int) ([]webhooks.OfflineDevice, error) {
	return database.Read(ctx, s.host, "reading which devices are offline", func(scan func(...any) error) (d webhooks.OfflineDevice, err error) {
		var since int64
		err = scan(&d.Device, &since, &d.Reason, &d.Reported)
		d.Since = clock.Instant(since)
		return d, err
	}, `SELECT p.device, p.offline_since, p.reason, w.since IS NOT NULL
 FROM (SELECT device, offline_since, reason FROM presence WHERE NOT online AND (offline_since, device) > ($2, $3) AND offline_since <= $4 ORDER BY offline_since, device LIMIT $5) p
 LEFT JOIN webhook_offline w ON w.webhook = $1 AND w.device = p.device AND w.since = p.offline_since ORDER BY p.offline_since, p.device`,
		id, clock.Micros(after.Since), string(after.Device), clock.Micros(before), int64(limit))
}

// Report implements webhooks.Store.
func (s *Store) Report(ctx context.Context, id string, d webhooks.OfflineDevice, ended bool) error {
	return s.transactions.Exec(ctx, "recording a webhook's delivery",
		`INSERT INTO webhook_offline (webhook, device, since, ended) VALUES ($1, $2, $3, $4) ON CONFLICT (webhook, device) DO UPDATE SET since = excluded.since, ended = excluded.ended`,
		id, string(d.Device), clock.Micros(d.Since), ended)
}

// Reported implements webhooks.Store.
func (s *Store) Reported(ctx context.Context, id string, device devices.ID) (since time.Time, err error) {
	micros, _, err := database.One(ctx, s.host, "reading which absences a webhook has", database.Scalar[int64],
		`SELECT since FROM webhook_offline WHERE webhook = $1 AND device = $2 AND NOT ended`, id, string(device))
	return clock.Instant(micros), err
}

// Prune implements webhooks.Store.
func (s *Store) Prune(ctx context.Context, id string, before time.Time) error {
	return s.transactions.Exec(ctx, "deleting old deliveries of a webhook", `DELETE FROM webhook_offline WHERE webhook = $1 AND since < $2`, id, clock.Micros(before))
}
