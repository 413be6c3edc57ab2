package database

import (
	"context"
	"database/sql"
	"time"
)

// Checkpoints of SQLite copy pages from its log into the file. A connection that
// commits would do it every so often, within COMMIT, while its caller and everybody
// after it wait. Here another connection does it beside the writers.
const (
	// checkpointPages is from how many pages in the log on they are copied.
	checkpointPages = 2_000
	// restartPages is from how many pages on the log is to begin again, which it
	// does when all of it was copied: nobody may write meanwhile.
	restartPages = 6_000
	// checkpointEvery is the least time between two checkpoints.
	checkpointEvery = 100 * time.Millisecond
	// autoCheckpoint is from how many pages on a COMMIT does it nevertheless.
	autoCheckpoint = "&_pragma=wal_autocheckpoint(40000)"
)

// checkpointer copies the log of SQLite when somebody has written.
type checkpointer struct {
	db   *sql.DB // one connection
	turn chan struct{}
	wake chan struct{} // capacity 1
	stop context.CancelFunc
	done chan struct{}
}

func startCheckpointer(db *sql.DB, turn chan struct{}) *checkpointer {
	ctx, stop := context.WithCancel(context.Background())
	c := &checkpointer{db: db, turn: turn, wake: make(chan struct{}, 1), stop: stop, done: make(chan struct{})}
	go c.run(ctx)
	return c
}

// written notes that somebody has written.
func (c *checkpointer) written() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

func (c *checkpointer) close() error {
	c.stop()
	<-c.done
	return c.db.Close()
}

func (c *checkpointer) run(ctx context.Context) {
	defer close(c.done)
	pause := time.NewTimer(checkpointEvery)
	defer pause.Stop()
	for {
		select {
		case <-c.wake:
		case <-ctx.Done():
			return
		}
		c.checkpoint(ctx)
		pause.Reset(checkpointEvery)
		select {
		case <-pause.C:
		case <-ctx.Done():
			return
		}
	}
}

// checkpoint copies what is in the log, if that is much. An error, such as that the
// disk is full, is left to those who write.
func (c *checkpointer) checkpoint(ctx context.Context) {
	pages, copied, err := c.pragma(ctx, "NOOP")
	if err != nil || pages-copied < checkpointPages {
		return
	}
	if pages, _, err = c.pragma(ctx, "PASSIVE"); err != nil || pages < restartPages {
		return
	}
	// What was written meanwhile is little. With all of it copied, the log begins
	// again.
	if _, _, err = c.pragma(ctx, "PASSIVE"); err != nil {
		return
	}
	select {
	case c.turn <- struct{}{}:
		defer func() { <-c.turn }()
		_, _, _ = c.pragma(ctx, "PASSIVE") // the next one tries again
	case <-ctx.Done():
	}
}

// pragma returns how many pages are in the log, and how many of them are in the
// file, too.
func (c *checkpointer) pragma(ctx context.Context, mode string) (pages, copied int, err error) {
	var busy int
	err = c.db.QueryRowContext(ctx, "PRAGMA wal_checkpoint("+mode+")").Scan(&busy, &pages, &copied)
	return pages, copied, err
}
