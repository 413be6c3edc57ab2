// Package firmwarestore keeps the rows of firmware images, and reads which images devices have and had. It implements
// firmware.Store.
package firmwarestore

import (
	"context"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/firmware"
	"fleetd/internal/store/database"
)

// Store implements firmware.Store. It is safe for concurrent use.
type Store struct {
	host database.Host
	db   *database.DB

	transactions database.Transactions
}

var _ firmware.Store = (*Store)(nil)

// New returns a Store in a database.
func New(host database.Host) *Store {
	db := host.Database()
	return &Store{host, db, database.Transactions{Host: host, Pool: db.Write, Limit: database.ReadTimeout}}
}

const columns = `sha256, elf_sha256, document, note, boards, added_by, added_at`

func scan(scan func(...any) error) (image firmware.Image, err error) {
	var sha, elf, document, boards string
	var at int64
	if err := scan(&sha, &elf, &document, &image.Note, &boards, &image.AddedBy, &at); err != nil {
		return image, err
	}
	image.AddedAt = clock.Instant(at)
	if err := json.Unmarshal([]byte(document), &image.Image); err != nil {
		return image, fmt.Errorf("image %s: %w", sha, err)
	}
	if _, err := hex.Decode(image.SHA256[:], []byte(sha)); err != nil {
		return image, fmt.Errorf("image %s: %w", sha, err)
	}
	if _, err := hex.Decode(image.ELF[:], []byte(elf)); err != nil {
		return image, fmt.Errorf("image %s: %w", sha, err)
	}
	if boards != "" {
		err = json.Unmarshal([]byte(boards), &image.ByHand)
	}
	return image, err
}

// Images implements firmware.Store.
func (s *Store) Images(ctx context.Context) ([]firmware.Image, error) {
	return database.Read(ctx, s.host, "reading firmware images", scan, `SELECT `+columns+` FROM firmware ORDER BY added_at DESC, sha256`)
}

// Add implements firmware.Store.
func (s *Store) Add(ctx context.Context, images []firmware.Image, permit func(count int, bytes int64) error) (added []firmware.Image, err error) {
	err = s.transactions.Run(ctx, "adding firmware images", func(ctx context.Context, tx *sql.Tx) error {
		added = nil
		if s.db.Postgres() { // on SQLite the transaction has the whole database
			if _, err := tx.ExecContext(ctx, `LOCK TABLE firmware IN SHARE ROW EXCLUSIVE MODE`); err != nil {
				return err
			}
		}
		var count int
		var bytes int64
		if err := tx.QueryRowContext(ctx, `SELECT count(*), COALESCE(CAST(sum(size) AS BIGINT), 0) FROM firmware`).Scan(&count, &bytes); err != nil {
			return err
		}
		if err := permit(count, bytes); err != nil {
			return database.Rule(err)
		}
		for i := range images {
			image := &images[i]
			document, err := json.Marshal(&image.Image)
			if err != nil {
				return database.Rule(fmt.Errorf("encode an image: %w", err))
			}
			n, err := database.Exec(ctx, tx, `INSERT INTO firmware (`+columns+`, size) VALUES ($1, $2, $3, $4, '', $5, $6, $7) ON CONFLICT (sha256) DO NOTHING`,
				image.ID(), image.ELFText(), database.Clean(string(document)), database.Clean(image.Note), database.Clean(image.AddedBy), clock.Micros(image.AddedAt), image.Size)
			if err != nil {
				return err
			}
			if n > 0 {
				added = append(added, *image)
			}
		}
		return nil
	})
	return added, err
}

// Edit implements firmware.Store.
func (s *Store) Edit(ctx context.Context, id string, note *string, boards *[]string) error {
	var byHand any
	if boards != nil {
		text := ""
		if len(*boards) > 0 {
			encoded, err := json.Marshal(*boards)
			if err != nil {
				return err
			}
			text = database.Clean(string(encoded))
		}
		byHand = text
	}
	var noted any
	if note != nil {
		noted = database.Clean(*note)
	}
	return s.transactions.One(ctx, "changing a firmware image", devices.ErrNotFound, `UPDATE firmware SET note = COALESCE($2, note), boards = COALESCE($3, boards) WHERE sha256 = $1`, id, noted, byHand)
}

// Delete implements firmware.Store.
func (s *Store) Delete(ctx context.Context, id string, permit func() error) error {
	return s.transactions.Run(ctx, "deleting a firmware image", func(ctx context.Context, tx *sql.Tx) error {
		rows, err := database.Collect(ctx, tx, database.Scalar[string], `SELECT sha256 FROM firmware WHERE sha256 = $1`+s.db.Lock("FOR UPDATE"), id)
		if err != nil {
			return err
		}
		if len(rows) == 0 {
			return database.Rule(devices.ErrNotFound)
		}
		if err := permit(); err != nil {
			return database.Rule(err)
		}
		_, err = tx.ExecContext(ctx, `DELETE FROM firmware WHERE sha256 = $1`, id)
		return err
	})
}

// newest is true for the newest row i of a device.
const newest = `NOT EXISTS (SELECT 1 FROM device_images n WHERE n.device = i.device AND n.seq > i.seq)`

// Running implements firmware.Store.
func (s *Store) Running(ctx context.Context, elfs []string) (map[string]int64, error) {
	slices.Sort(elfs)
	running := map[string]int64{}
	condition, arg := database.IDSet(s.db.Postgres(), "i.elf_sha256", "$1", slices.Compact(elfs))
	_, err := database.Read(ctx, s.host, "counting what devices run", func(scan func(...any) error) (none struct{}, err error) {
		var elf string
		var n int64
		err = scan(&elf, &n)
		running[elf] = n
		return none, err
	}, `SELECT i.elf_sha256, count(*) FROM device_images i WHERE `+condition+` AND `+newest+` GROUP BY i.elf_sha256`, arg)
	return running, err
}

// Former implements firmware.Store.
func (s *Store) Former(ctx context.Context, elf string) (int64, error) {
	n, _, err := database.One(ctx, s.host, "counting what devices ran", database.Scalar[int64],
		`SELECT count(*) FROM device_images p JOIN device_images i ON i.device = p.device AND i.seq = p.seq + 1
 WHERE p.elf_sha256 = $1 AND i.elf_sha256 <> $1 AND `+newest, elf)
	return n, err
}

const imageColumns = `i.seq, i.elf_sha256, i.version, i.board, i.details, i.cause, i.at, d.image_checks FROM device_images i JOIN devices d ON d.device = i.device`

func scanImage(scan func(...any) error, before ...any) (image devices.DeviceImage, err error) {
	var at, checks int64
	err = scan(append(before, &image.Seq, &image.ELF, &image.Version, &image.Board, &image.Details, &image.Cause, &at, &checks)...)
	image.At, image.SeenTwice = clock.Instant(at), checks > 1
	return image, err
}

// Newest implements firmware.Store.
func (s *Store) Newest(ctx context.Context, ids []devices.ID) (map[devices.ID]devices.DeviceImage, error) {
	out := make(map[devices.ID]devices.DeviceImage, len(ids))
	condition, arg := database.IDSet(s.db.Postgres(), "i.device", "$1", ids)
	_, err := database.Read(ctx, s.host, "reading what devices run", func(scan func(...any) error) (none struct{}, err error) {
		var id devices.ID
		image, err := scanImage(scan, &id)
		out[id] = image
		return none, err
	}, `SELECT i.device, `+imageColumns+` WHERE `+condition+` AND `+newest, arg)
	return out, err
}

// History implements firmware.Store.
func (s *Store) History(ctx context.Context, id devices.ID) ([]devices.DeviceImage, error) {
	history, err := database.Read(ctx, s.host, "reading the images of a device", func(scan func(...any) error) (devices.DeviceImage, error) { return scanImage(scan) },
		`SELECT `+imageColumns+` WHERE i.device = $1 ORDER BY i.seq DESC`, string(id))
	for i := 1; i < len(history); i++ {
		history[i].SeenTwice = false // the column is of the newest one
	}
	return history, err
}
