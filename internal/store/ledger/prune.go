package ledger

import (
	"context"
	"strconv"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/store/database"
)

// Retention of changes.
const (
	// KeepChanges is how long a change is kept.
	KeepChanges = 90 * 24 * time.Hour
	// MaxChanges is how many changes are kept.
	MaxChanges = 2_000_000
	// KeepOfDevice is how many changes of a device are kept in any case.
	KeepOfDevice = 100
	// PruneEvery is the shortest time between two runs of Prune, over all nodes.
	PruneEvery = time.Hour

	pruneRows = 500 // of one statement
)

// Keys of the table fleet.
const (
	prunedAtKey = "changes_pruned_at"
	prunedToKey = "changes_pruned_to" // the revision up to which changes were examined
)

// Prune deletes changes beyond their retention, in statements of at most pruneRows rows, and
// returns how many. It does nothing if any node did it less than PruneEvery ago.
//
// It examines each change once, when it becomes too old: then the changes of its device are cut to
// KeepOfDevice, including older ones.
func (l *Ledger) Prune(ctx context.Context, now time.Time) (deleted int, err error) {
	mine := 0
	err = l.do(ctx, func(ctx context.Context, t *transaction) (err error) {
		text, args := database.Due(prunedAtKey, now, PruneEvery)
		mine, err = t.exec(ctx, text, args...)
		return err
	})
	if err != nil || mine == 0 {
		return 0, err
	}
	if err := l.pruneConsole(ctx, now); err != nil {
		return 0, err
	}
	to, err := l.pruneTo(ctx, now)
	if err != nil {
		return 0, err
	}
	from, err := l.prunedTo(ctx)
	for err == nil && from < to {
		next := min(to, from+pruneRows)
		var ids []string
		if ids, err = l.excessive(ctx, from, next); err != nil {
			break
		}
		for _, id := range ids {
			n, failed := l.cut(ctx, id, to)
			deleted += n
			if failed != nil {
				return deleted, failed
			}
		}
		from = next
		if from == to || from/pruneRows%100 == 0 {
			err = l.setPrunedTo(ctx, from)
		}
	}
	return deleted, err
}

// actsForNothing is true for keys that own no open job and no webhook: what a child has created acts with its rights after its end.
const actsForNothing = ` AND NOT EXISTS (SELECT 1 FROM jobs WHERE ended_at = 0 AND owner LIKE '%/' || api_keys.id) AND NOT EXISTS (SELECT 1 FROM webhooks WHERE owner LIKE '%/' || api_keys.id)`

// pruneConsole deletes codes that nobody used, and console keys and grants some time after their end. No
// change is written: nodes refuse what has ended, whether they have it in memory or not.
func (l *Ledger) pruneConsole(ctx context.Context, now time.Time) error {
	return l.do(ctx, func(ctx context.Context, t *transaction) error {
		codes, err := t.exec(ctx, `DELETE FROM console_codes WHERE expires_at < $1`, clock.Micros(now.Add(-PruneEvery)))
		if err != nil {
			return err
		}
		keys, err := t.exec(ctx, `DELETE FROM api_keys WHERE console_until > 0 AND console_until < $1`+actsForNothing, clock.Micros(now.Add(-access.KeepConsoleKeys)))
		if err != nil {
			return err
		}
		// Who was revoked was not used since.
		unused := clock.Micros(now.Add(-access.GrantIdle - access.KeepGrants))
		grants, err := t.exec(ctx, `DELETE FROM api_keys WHERE id IN (SELECT id FROM oauth_grants WHERE used_at < $1)`+actsForNothing, unused)
		if err != nil {
			return err
		}
		uses, err := t.exec(ctx, `DELETE FROM oauth_grants WHERE used_at < $1 AND id NOT IN (SELECT id FROM api_keys)`, unused)
		if err == nil && codes+keys+grants+uses == 0 {
			return database.Rule(nil)
		}
		return err
	})
}

// pruneTo returns the last revision that is too old.
func (l *Ledger) pruneTo(ctx context.Context, now time.Time) (int64, error) {
	head, err := l.Head(ctx)
	if err != nil {
		return 0, err
	}
	first, err := l.firstSince(ctx, now.Add(-KeepChanges))
	if err != nil {
		return 0, err
	}
	return min(max(first-1, head.Revision-MaxChanges), head.Revision-1), nil
}

func (l *Ledger) prunedTo(ctx context.Context) (revision int64, err error) {
	text, err := database.ReadFact(ctx, l.host, "reading how far changes were deleted", prunedToKey)
	revision, _ = strconv.ParseInt(text, 10, 64) // 0 if there is none, or it cannot be parsed
	return revision, err
}

func (l *Ledger) setPrunedTo(ctx context.Context, revision int64) error {
	return l.do(ctx, func(ctx context.Context, t *transaction) error {
		_, err := t.exec(ctx, database.SetFact,
			prunedToKey, strconv.FormatInt(revision, 10))
		return err
	})
}

// excessive returns the devices with changes between two revisions that have more than KeepOfDevice
// changes.
func (l *Ledger) excessive(ctx context.Context, after, to int64) ([]string, error) {
	return database.Read(ctx, l.host, "looking for old changes", database.Scalar[string],
		`SELECT p.device FROM (SELECT DISTINCT device FROM changes WHERE revision > $1 AND revision <= $2) p
 WHERE (SELECT l.revision FROM changes l WHERE l.device = p.device ORDER BY l.revision DESC LIMIT 1 OFFSET $3) IS NOT NULL`,
		after, to, int64(KeepOfDevice))
}

// cut deletes the changes of a device that are too old.
func (l *Ledger) cut(ctx context.Context, id string, to int64) (deleted int, err error) {
	for {
		n := 0
		err := l.do(ctx, func(ctx context.Context, t *transaction) (err error) {
			n, err = t.exec(ctx, `DELETE FROM changes WHERE revision IN (SELECT revision FROM changes WHERE device = $1 AND revision <= $2
 AND revision < (SELECT revision FROM changes WHERE device = $1 ORDER BY revision DESC LIMIT 1 OFFSET $3) ORDER BY revision LIMIT $4)`,
				id, to, int64(KeepOfDevice-1), int64(pruneRows))
			return err
		})
		if deleted += n; err != nil || n < pruneRows {
			return deleted, err
		}
	}
}
