package store

import (
	"cmp"
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"slices"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/store/database"
)

// OnImage sets a function that is called with each check that showed another image than the last one, after it was committed. It
// runs on the writer's goroutine and must not block.
func OnImage(changed func(devices.ImageChange)) Option {
	return func(s *Store) { s.onImage = changed }
}

// imageRow is a row of device_images to insert, or to replace with other details.
type imageRow struct {
	devices.DeviceImage
	device devices.ID
}

// hashOf identifies what a check says of the image and the hardware.
func hashOf(c *devices.Check) string {
	sum := sha256.New()
	sum.Write([]byte(c.ELF))
	sum.Write([]byte{0})
	sum.Write([]byte(c.Details))
	return hex.EncodeToString(sum.Sum(nil)[:8])
}

// imageNews is a check that says what is not in the newest row of device_images, as the device reported it.
type imageNews struct {
	devices.Check
	first bool       // no check was stored before
	list  *[]factRow // list and row locate the check's row
	row   int
}

// noteImage sets the hash of what a check reported of the device's image, and reports whether that is news. A check that says what
// the last one said costs the hash alone.
func (f *factRow) noteImage() (news bool) {
	if f.ELF == "" || f.Details == "" {
		return false
	}
	before := f.imageHash
	f.imageHash, f.imageChecks = hashOf(&f.Check), 2
	return f.imageHash != before
}

// note keeps changes for a repeated attempt.
func (g *group) note(changes []devices.ImageChange) {
	g.changes = nil
	for _, c := range changes {
		if g.changes == nil {
			g.changes = make(map[devices.ID]devices.ImageChange, len(changes))
		}
		g.changes[c.Device] = c
	}
}

// mergeImages compares news with the newest rows of these devices, whose rows in devices are locked. It adds rows and changes.
func (m *mergeResult) mergeImages(ctx context.Context, tx *sql.Tx, postgres bool, news []imageNews) error {
	newest, err := newestImages(ctx, tx, postgres, news)
	if err != nil {
		return err
	}
	rolled, err := rollouts(ctx, tx, postgres, news, newest)
	if err != nil {
		return err
	}
	for i := range news {
		c := &news[i]
		old, there := newest[c.Device]
		image := devices.DeviceImage{Seq: old.Seq, ELF: c.ELF, Version: c.Firmware, Board: c.Board, Details: c.Details}
		if old.ELF != c.ELF {
			(*c.list)[c.row].imageChecks = 1
			image.Seq, image.At = old.Seq+1, c.CheckedAt
			if there {
				image.Cause = causeOf(rolled[c.Device], old.ELF, c)
				m.changes = append(m.changes, devices.ImageChange{Device: c.Device, From: old, To: image})
			}
		}
		m.images = append(m.images, imageRow{image, c.Device})
	}
	return nil
}

// rollout is what a firmware task of a device was to change.
type rollout struct {
	before, target string
	endedAt        int64 // microseconds; 0: it is open
	corrected      bool  // by a check that shows its image
}

// causeOf returns why a device shows another image than from. A task is the cause while it is open, and at the check that ends it, which is
// written later. What happens after that, somebody else has done, unless the check corrects the task.
func causeOf(tasks []rollout, from string, c *imageNews) devices.ImageCause {
	cause := devices.CauseForeign
	for _, t := range tasks {
		switch open := t.endedAt == 0 || t.endedAt >= clock.Micros(c.CheckedAt.Add(-clockSlack)); {
		case t.target == c.ELF && (open || t.corrected):
			return devices.CauseJob
		case t.target == from && t.before == c.ELF && open:
			cause = devices.CauseRolledBack
		}
	}
	return cause
}

// rollouts returns the firmware tasks of the devices that show another image than before.
func rollouts(ctx context.Context, tx *sql.Tx, postgres bool, news []imageNews, newest map[devices.ID]devices.DeviceImage) (map[devices.ID][]rollout, error) {
	var ids []string
	for i := range news {
		if old, there := newest[news[i].Device]; there && old.ELF != news[i].ELF {
			ids = append(ids, string(news[i].Device))
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	condition, arg := database.IDSet(postgres, "t.device", "$1", ids)
	tasks := make(map[devices.ID][]rollout, len(ids))
	_, err := database.Collect(ctx, tx, func(scan func(...any) error) (none struct{}, err error) {
		var id devices.ID
		var r rollout
		err = scan(&id, &r.before, &r.target, &r.endedAt, &r.corrected)
		tasks[id] = append(tasks[id], r)
		return none, err
	}, `SELECT t.device, t.elf_before, t.elf_target, t.ended_at, t.outcome = 'unknown' OR t.outcome = 'failed' AND t.code IN ('lost', 'rolled_back', 'image_refused', 'download', 'not_fetched', 'no_check')
 FROM tasks t WHERE t.elf_target <> '' AND `+condition, arg) // corrected: as in jobs.Step.Correct
	return tasks, err
}

// newestImages returns the newest row of each of these devices that has one.
func newestImages(ctx context.Context, tx *sql.Tx, postgres bool, news []imageNews) (map[devices.ID]devices.DeviceImage, error) {
	var ids []string
	for i := range news {
		if !news[i].first {
			ids = append(ids, string(news[i].Device))
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	condition, arg := database.IDSet(postgres, "i.device", "$1", ids)
	newest := make(map[devices.ID]devices.DeviceImage, len(ids))
	_, err := database.Collect(ctx, tx, func(scan func(...any) error) (none struct{}, err error) {
		var id devices.ID
		var image devices.DeviceImage
		err = scan(&id, &image.Seq, &image.ELF, &image.Version)
		newest[id] = image
		return none, err
	}, `SELECT i.device, i.seq, i.elf_sha256, i.version FROM device_images i
 WHERE `+condition+` AND NOT EXISTS (SELECT 1 FROM device_images n WHERE n.device = i.device AND n.seq > i.seq)`, arg)
	return newest, err
}

// writeImages writes the rows, and deletes those beyond devices.MaxImages.
func (w *writer) writeImages(ctx context.Context, tx *sql.Tx, m *mergeResult) error {
	if _, err := w.texts.images.write(ctx, tx, w.store.backend, m.images); err != nil {
		return err
	}
	for i := range m.images {
		if r := &m.images[i]; r.Seq > devices.MaxImages {
			if _, err := tx.ExecContext(ctx, `DELETE FROM device_images WHERE device = $1 AND seq <= $2`, string(r.device), r.Seq-devices.MaxImages); err != nil {
				return err
			}
		}
	}
	return nil
}

func newImageStatement() statement[imageRow] {
	columns := slices.Concat(database.Text("device"), database.Bigint("seq"), database.Text("elf_sha256", "version", "board", "details", "cause"), database.Bigint("at"))
	return statement[imageRow]{
		Rows: database.Rows{Table: "device_images", Columns: columns,
			Conflict: "(device, seq) DO UPDATE SET version = excluded.version, board = excluded.board, details = excluded.details"},
		values: func(r *imageRow) []any {
			return []any{string(r.device), r.Seq, r.ELF, r.Version, r.Board, r.Details, string(r.Cause), clock.Micros(r.At)}
		},
		compare: func(a, b imageRow) int { return cmp.Compare(a.device, b.device) },
	}
}
