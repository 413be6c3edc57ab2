package database

import (
	"context"
	"database/sql"
	"time"

	"fleetd/internal/tasks"
)

// Checkpoints of SQLite copy pages from its log into the file. By default a connection does that
// within COMMIT, and its caller and all later ones wait. Here another connection does it, beside
// the writers.
const (
	// checkpointPages is the number of pages in the log from which they are copied.
	checkpointPages = 2_000
	// restartPages is the number of pages from which the log is restarted, after all of it was
	// copied: meanwhile nobody may write.
	restartPages = 6_000
	// checkpointEvery is the shortest time between two checkpoints.
	checkpointEvery = 100 * time.Millisecond
	// autoCheckpoint is the number of pages from which a COMMIT does it nevertheless.
	autoCheckpoint = "&_pragma=wal_autocheckpoint(40000)"
)

// checkpointer copies the log of SQLite after writes.
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

// written records a write.
func (c *checkpointer) written() {
	tasks.Signal(c.wake)
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

// checkpoint copies the log if it is long. It ignores errors, such as a full disk: writers will
// report them.
func (c *checkpointer) checkpoint(ctx context.Context) {
	pages, copied, err := c.pragma(ctx, "NOOP")
	if err != nil || pages-copied < checkpointPages {
		return
	}
	if pages, _, err = c.pragma(ctx, "PASSIVE"); err != nil || pages < restartPages {
		return
	}
	// Little was written meanwhile. Once all of it is copied, the log restarts.
	if _, _, err = c.pragma(ctx, "PASSIVE"); err != nil {
		return
	}
	select {
	case c.turn <- struct{}{}:
		defer func() { <-c.turn }()
		_, _, _ = c.pragma(ctx, "PASSIVE") // the next one retries
	case <-ctx.Done():
	}
}

// pragma returns the number of pages in the log, and how many of them are in the file.
func (c *checkpointer) pragma(ctx context.Context, mode string) (pages, copied int, err error) {
	var busy int
	err = c.db.QueryRowContext(ctx, "PRAGMA wal_checkpoint("+mode+")").Scan(&busy, &pages, &copied)
	return pages, copied, err
}
