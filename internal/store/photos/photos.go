// Package photos keeps the index of stored photos, by device and time. The pictures are in the object
// store; after an outage of the database, rows of the index may be missing or left over until it is
// repaired.
package photos

import (
	"cmp"
	"context"
	"database/sql"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/store/database"
)

// maxRows is how many rows one transaction writes or deletes: others wait for it.
const maxRows = 500

// Index is the index of photos. It is safe for concurrent use.
type Index struct {
	host database.Host
	db   *database.DB

	transactions database.Transactions
}

// New returns an Index in a database.
func New(host database.Host) *Index {
	db := host.Database()
	return &Index{host, db, database.Transactions{Host: host, Pool: db.Write, Limit: database.ReadTimeout}}
}

var rows = database.Rows{Table: "photos", Conflict: "(id) DO NOTHING", Columns: append(append(append(
	database.Text("id", "device", "question"), database.Bigint("bytes")...), database.Text("sha256", "kind")...), database.Bigint("taken_at")...)}

// Add adds photos to the index; existing rows are not changed.
func (x *Index) Add(ctx context.Context, photos ...devices.Photo) error {
	for len(photos) > 0 {
		batch := photos[:min(len(photos), maxRows)]
		photos = photos[len(batch):]
		values := make([][]any, len(batch))
		for i, p := range batch {
			values[i] = []any{p.ID, string(p.Device), database.Clean(p.Question), p.Bytes, p.SHA256, p.Kind, clock.Micros(p.TakenAt)}
		}
		if err := x.transactions.Run(ctx, "adding photos to their index", func(ctx context.Context, tx *sql.Tx) error {
			_, err := rows.Write(ctx, tx, x.db, values)
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}

// Remove removes photos from the index.
func (x *Index) Remove(ctx context.Context, ids ...string) error {
	for len(ids) > 0 {
		batch := ids[:min(len(ids), maxRows)]
		ids = ids[len(batch):]
		condition, arg := database.IDSet(x.db.Postgres(), "id", "$1", batch)
		if err := x.transactions.Exec(ctx, "removing photos from their index", "DELETE FROM photos WHERE "+condition, arg); err != nil {
			return err
		}
	}
	return nil
}

// Page returns at most limit photos, newest first, of one device or of all if device is empty: those
// with ids below before, or the newest if that is empty, down to the id from.
func (x *Index) Page(ctx context.Context, device devices.ID, before, from string, limit int) ([]devices.Photo, error) {
	before = cmp.Or(before, "~") // above every id
	text, args := " WHERE id < $1 AND id >= $2", []any{database.Clean(before), from, limit}
	if device != "" {
		text, args = text+" AND device = $4", append(args, string(device))
	}
	return database.Read(ctx, x.host, "listing photos", scan, "SELECT id, device, question, bytes, sha256, kind, taken_at FROM photos"+text+" ORDER BY id DESC LIMIT $3", args...)
}

func scan(scan func(...any) error) (p devices.Photo, err error) {
	var taken int64
	err = scan(&p.ID, &p.Device, &p.Question, &p.Bytes, &p.SHA256, &p.Kind, &taken)
	p.TakenAt = clock.Instant(taken)
	return p, err
}

// Expire removes the photos with ids below before, and returns how many.
func (x *Index) Expire(ctx context.Context, before string) (removed int, err error) {
	for {
		n := int64(0)
		if err := x.transactions.Run(ctx, "removing old photos from their index", func(ctx context.Context, tx *sql.Tx) (err error) {
			n, err = database.Exec(ctx, tx, "DELETE FROM photos WHERE id IN (SELECT id FROM photos WHERE id < $1 ORDER BY id LIMIT $2)", before, maxRows)
			return err
		}); err != nil {
			return removed, err
		}
		if removed += int(n); n < maxRows {
			return removed, nil
		}
	}
}
