package store

import (
	"context"
	"math"
	"sync"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/store/database"
)

// Limits of marking and deleting lists.
const (
	// keepEvery is how often a node marks a list as in use. A list whose mark is older than
	// MinCatalogAge therefore cannot be used by a writer, even if the clocks of two nodes
	// differ by the rest of that time.
	keepEvery = time.Hour
	// MinCatalogAge is the smallest Retention.Catalogs.
	MinCatalogAge = 24 * time.Hour
	// PruneEvery is the shortest time between two runs of Prune on one database, over all
	// nodes.
	PruneEvery = time.Hour
	// maxKept is how many marks a store remembers. When the memory is full it is emptied: that
	// costs one needless statement for each list.
	maxKept = 100_000
	// prunePage is how many devices, or lists, one statement examines.
	prunePage = 500
	// PruneDevices is of how many devices one run of Prune examines the history; the next one goes on after them.
	PruneDevices = 50_000
	// pruneRows is how many rows one statement deletes: the writer waits for it.
	pruneRows = 500
)

// kept remembers which lists were marked as used, and when. It is safe for concurrent use; the
// zero value is ready to use.
type kept struct {
	mu sync.RWMutex
	at map[devices.Hash]time.Time
}

// isFresh reports whether the list was marked less than keepEvery ago.
func (k *kept) isFresh(h devices.Hash, now time.Time) bool {
	k.mu.RLock()
	defer k.mu.RUnlock()
	at, ok := k.at[h]
	return ok && now.Sub(at) < keepEvery
}

func (k *kept) note(lists []devices.CatalogText, now time.Time) {
	if len(lists) == 0 {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.at == nil || len(k.at) > maxKept {
		k.at = map[devices.Hash]time.Time{}
	}
	for _, list := range lists {
		k.at[list.Hash] = now
	}
}

func (k *kept) forget() {
	k.mu.Lock()
	defer k.mu.Unlock()
	clear(k.at)
}

// Retention is how long history and catalogs are kept.
type Retention struct {
	History   time.Duration // age at which an entry is deleted, unless it is the device's newest
	PerDevice int           // entries of one device, at least 1; the oldest are deleted
	// Catalogs is how long after its last use an unused list is deleted; at least
	// MinCatalogAge.
	Catalogs time.Duration
	// Audit is the age at which audit entries are deleted; 0: never.
	Audit time.Duration
}

// Pruned is the number of rows that one run of Prune deleted.
type Pruned struct{ History, Catalogs, Audit int }

// Prune deletes rows beyond their retention, in statements of at most pruneRows rows, each in
// its own transaction: it can be interrupted at any time, and nodes do not wait for each other.
// It does nothing if any node did it less than PruneEvery ago. Errors are those of reads; rows
// that were deleted before stay deleted.
func (s *Store) Prune(ctx context.Context, r Retention) (p Pruned, err error) {
	now := s.now()
	text, args := database.Due("pruned_at", now, PruneEvery)
	if n, err := s.change(ctx, text, args...); err != nil || n == 0 {
		return p, err
	}
	if p.History, err = s.pruneHistory(ctx, r, now); err != nil {
		return p, err
	}
	if p.Catalogs, err = s.pruneCatalogs(ctx, now.Add(-max(r.Catalogs, MinCatalogAge))); err != nil || r.Audit <= 0 {
		return p, err
	}
	p.Audit, err = s.pruneAudit(ctx, now.Add(-r.Audit))
	return p, err
}

// change runs one statement on the writer's connection and returns the number of changed rows.
func (s *Store) change(ctx context.Context, text string, args ...any) (int, error) {
	n, err := database.Change(ctx, s, s.backend.Write, "deleting what is old", text, args...)
	return int(n), err
}

// excess deletes the oldest entries of a device: those below its newest $2+1 from before $3, at
// most $4 of them.
const excess = `DELETE FROM catalog_history WHERE device = $1 AND (epoch, seq) IN (
 SELECT epoch, seq FROM catalog_history WHERE device = $1 AND at < $3 AND (epoch, seq) < (
  SELECT epoch, seq FROM catalog_history WHERE device = $1 ORDER BY epoch DESC, seq DESC LIMIT 1 OFFSET $2)
 ORDER BY epoch, seq LIMIT $4)`

// orphaned deletes at most $2 entries of an unknown device.
const deleteUnknown = `DELETE FROM catalog_history WHERE device = $1 AND (epoch, seq) IN (
 SELECT epoch, seq FROM catalog_history WHERE device = $1 AND NOT EXISTS (SELECT 1 FROM devices d WHERE d.device = $1)
 ORDER BY epoch, seq LIMIT $2)`

// tally is a summary of one device's history.
type historySummary struct {
	device         string
	entries        int64
	oldest, newest int64 // microseconds
	known          bool
}

func (s *Store) pruneHistory(ctx context.Context, r Retention, now time.Time) (deleted int, err error) {
	perDevice := int64(max(r.PerDevice, 1))
	old, late := clock.Micros(now.Add(-r.History)), clock.Micros(now.Add(-MinCatalogAge))
	after, err := database.ReadFact(ctx, s, "reading how far the history was pruned", historyPrunedKey)
	for examined := 0; err == nil && examined < PruneDevices; examined += prunePage {
		var page []historySummary
		if page, err = s.historySummaries(ctx, after); err != nil {
			break
		}
		for _, t := range page {
			var steps [][]any
			switch {
			case !t.known && t.newest < late: // an entry that was queued when the device was forgotten
				steps = append(steps, []any{deleteUnknown, t.device})
			default:
				if t.entries > perDevice {
					steps = append(steps, []any{excess, t.device, perDevice - 1, int64(math.MaxInt64)})
				}
				if t.entries > 1 && t.oldest < old {
					steps = append(steps, []any{excess, t.device, int64(0), old})
				}
			}
			for _, step := range steps {
				n, err := s.repeat(ctx, step[0].(string), append(step[1:], int64(pruneRows)))
				deleted += n
				s.stats.PrunedHistory.Add(int64(n))
				if err != nil {
					return deleted, err
				}
			}
		}
		if len(page) < prunePage {
			after = "" // the next run begins anew
			break
		}
		after = page[len(page)-1].device
	}
	if err == nil {
		_, err = s.change(ctx, database.SetFact, historyPrunedKey, after)
	}
	return deleted, err
}

// historyPrunedKey is that of the last device that a run has examined, in the table fleet.
const historyPrunedKey = "history_pruned_to"

// repeat runs a statement until it deletes less than pruneRows.
func (s *Store) repeat(ctx context.Context, text string, args []any) (all int, err error) {
	for {
		n, err := s.change(ctx, text, args...)
		all += n
		if err != nil || n < pruneRows {
			return all, err
		}
	}
}

// tallies returns the tallies of the next devices, in byte order of their ids.
func (s *Store) historySummaries(ctx context.Context, after string) ([]historySummary, error) {
	return database.Read(ctx, s, "counting the catalog history", func(scan func(...any) error) (t historySummary, err error) {
		return t, scan(&t.device, &t.entries, &t.oldest, &t.newest, &t.known)
	}, `SELECT h.device, count(*), min(h.at), max(h.at), EXISTS (SELECT 1 FROM devices d WHERE d.device = h.device)
 FROM catalog_history h WHERE h.device > $1 GROUP BY h.device ORDER BY h.device LIMIT $2`, after, int64(prunePage))
}

// pruneCatalogs deletes unused lists that were last used before this time, one row at a time. A
// writer that adds an entry for a list has marked the list as used in the same transaction, or
// less than keepEvery before. If it does so after the list was found here, the delete finds the
// row locked or newer and skips it. Checking only the entries would not be sufficient, since
// those of a running transaction are invisible.
func (s *Store) pruneCatalogs(ctx context.Context, before time.Time) (deleted int, err error) {
	for after := ""; ; {
		page, err := s.unnamed(ctx, before, after)
		if err != nil {
			return deleted, err
		}
		for _, hash := range page {
			n, err := s.change(ctx, `DELETE FROM catalogs WHERE sha256 = $1 AND used_at < $2
 AND NOT EXISTS (SELECT 1 FROM catalog_history h WHERE h.catalog COLLATE "binary" = $1)`, hash, clock.Micros(before))
			deleted += n
			s.stats.PrunedCatalogs.Add(int64(n))
			if err != nil {
				return deleted, err
			}
		}
		if len(page) < prunePage {
			return deleted, nil
		}
		after = page[len(page)-1]
	}
}

// unnamed returns the next lists that may be deleted.
func (s *Store) unnamed(ctx context.Context, before time.Time, after string) ([]string, error) {
	return database.Read(ctx, s, "looking for unused lists", database.Scalar[string], `SELECT c.sha256 FROM catalogs c WHERE c.sha256 > $1 AND c.used_at < $2
 AND NOT EXISTS (SELECT 1 FROM catalog_history h WHERE h.catalog COLLATE "binary" = c.sha256)
 AND NOT EXISTS (SELECT 1 FROM presence p WHERE p.catalog <> '' AND p.catalog COLLATE "binary" = c.sha256) ORDER BY c.sha256 LIMIT $3`, after, clock.Micros(before), int64(prunePage))
}
