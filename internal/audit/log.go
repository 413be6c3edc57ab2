package audit

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Bounds of what waits to be written.
const (
	flushEvery  = 500 * time.Millisecond // what a kill may cost
	maxGroup    = 1000                   // entries of one block
	maxGroupLen = 512 << 10              // bytes of one block
	// MaxWaiting bounds the bytes that wait for a database that is away. Beyond
	// it entries are dropped, and leave a gap that shows.
	MaxWaiting = 64 << 20

	firstRetry = 250 * time.Millisecond
	lastRetry  = 5 * time.Second
)

// Store takes blocks. Writing one twice is no error.
type Store interface {
	SaveAuditBlock(ctx context.Context, b *Block) error
}

// Options of a Log. All are required but Key, Since and Spill.
type Options struct {
	Node, Version string
	// Key hashes the blocks, and Since is when the fleet began to write with it;
	// without them anybody who can write rows can make valid ones.
	Key   []byte
	Since time.Time
	Store Store
	Log   *slog.Logger
	// Spill takes, when the log is closed, what the store would not.
	Spill func([]Block) error
}

// Log writes the record of one run of a node. It is safe for concurrent use.
type Log struct {
	opt   Options
	limit int // MaxWaiting, less in tests
	run   string
	wake  chan struct{} // a group is full
	stop  chan struct{}
	done  chan struct{}

	mu      sync.Mutex
	seq     int64
	open    Block
	entries int     // in open
	full    []Block // oldest first
	waiting int     // bytes, of all that is not written
	gap     int64   // dropped since the last entry
	strays  strays
	closed  bool

	previous Hash // these two are the writer's, and then those of Close
	failing  bool

	// Written and Dropped count entries, Failed attempts to write a block.
	Written, Dropped, Failed atomic.Int64
}

// New starts a Log, whose first entry says so.
func New(opt Options) *Log {
	l := &Log{opt: opt, limit: MaxWaiting, run: newRun(opt.Since), wake: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{})}
	l.Record(Entry{At: time.Now(), Kind: KindRun, Action: "start", Outcome: "ok", Detail: "fleetd " + opt.Version})
	go l.write()
	return l
}

// Run names this run.
func (l *Log) Run() string { return l.run }

// Waiting is the number of bytes that are not written yet.
func (l *Log) Waiting() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.waiting
}

// Record takes an entry. It never waits for the database.
func (l *Log) Record(e Entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		l.Dropped.Add(1) // its own end is the last a record tells
		return
	}
	if e.isStray() && !l.strays.admit(&e, e.At) {
		return
	}
	l.appendLocked(&e)
}

func (l *Log) appendLocked(e *Entry) {
	if l.waiting >= l.limit {
		l.seq++ // so that what is missing can be counted
		l.gap++
		l.Dropped.Add(1)
		return
	}
	if l.gap > 0 {
		gap := Entry{At: e.At, Kind: KindRun, Action: "gap", Outcome: "dropped", Count: l.gap, Detail: "these entries found no room: the database did not take those before them"}
		l.gap = 0
		l.lineLocked(&gap)
	}
	l.lineLocked(e)
}

func (l *Log) lineLocked(e *Entry) {
	l.seq++
	b := &l.open
	if l.entries == 0 {
		b.FirstSeq, b.FirstAt, b.LastAt = l.seq, e.At, e.At
	}
	b.LastSeq = l.seq
	if e.At.Before(b.FirstAt) {
		b.FirstAt = e.At
	}
	if e.At.After(b.LastAt) {
		b.LastAt = e.At
	}
	before := len(b.Entries)
	b.Entries = appendLine(b.Entries, l.seq, e)
	l.waiting += len(b.Entries) - before
	l.entries++
	if l.entries >= maxGroup || len(b.Entries) >= maxGroupLen {
		l.sealLocked()
		select {
		case l.wake <- struct{}{}:
		default: // it is awake
		}
	}
}

// sealLocked ends the open group.
func (l *Log) sealLocked() {
	if l.entries == 0 {
		return
	}
	size := len(l.open.Entries)
	l.full = append(l.full, l.open)
	// The next group is likely about as long: without room from the start it
	// would be copied as it grows.
	l.open, l.entries = Block{Entries: make([]byte, 0, size+size/8)}, 0
}

// write stores groups until the log is closed.
func (l *Log) write() {
	defer close(l.done)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() { // a write that hangs must not outlast the log
		select {
		case <-l.stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	ticker := time.NewTicker(flushEvery)
	defer ticker.Stop()
	retry := firstRetry
	for {
		select {
		case <-l.stop:
			return
		case <-l.wake:
		case now := <-ticker.C:
			l.sweep(now)
		}
		for l.writeNext(ctx) != nil {
			select {
			case <-l.stop:
				return
			case <-time.After(retry):
				retry = min(2*retry, lastRetry)
			}
		}
		retry = firstRetry
	}
}

// sweep ends the open group, and counts whom it turned away too often.
func (l *Log) sweep(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.strays.due(now) {
		l.appendLocked(&e)
	}
	l.sealLocked()
}

// writeNext stores all full groups, one after another.
func (l *Log) writeNext(ctx context.Context) error {
	for {
		l.mu.Lock()
		if len(l.full) == 0 {
			l.mu.Unlock()
			return nil
		}
		block := l.full[0]
		l.mu.Unlock()
		l.chain(&block)
		if err := l.opt.Store.SaveAuditBlock(ctx, &block); err != nil {
			l.Failed.Add(1)
			if ctx.Err() == nil && !l.failing {
				l.failing = true
				l.opt.Log.Warn("the audit cannot be written; it is kept in memory and tried again", "error", err)
			}
			return err
		}
		l.failing = false
		l.mu.Lock()
		l.previous = block.Hash
		l.full = slices.Delete(l.full, 0, 1)
		l.waiting -= len(block.Entries)
		l.mu.Unlock()
		l.Written.Add(int64(block.count()))
	}
}

// chain hangs a block behind the one before.
func (l *Log) chain(b *Block) {
	b.Run, b.Node, b.Previous = l.run, l.opt.Node, l.previous
	b.FirstAt, b.LastAt = b.FirstAt.UTC().Truncate(time.Microsecond), b.LastAt.UTC().Truncate(time.Microsecond)
	b.Hash = b.Sum(l.opt.Key)
}

// Close writes what waits, and that the node stopped. Nothing may be recorded
// behind it. What the store does not take until ctx ends goes to Spill.
func (l *Log) Close(ctx context.Context) error {
	close(l.stop)
	<-l.done
	l.mu.Lock()
	for _, e := range l.strays.due(time.Time{}) {
		l.appendLocked(&e)
	}
	stop := Entry{At: time.Now(), Kind: KindRun, Action: "stop", Outcome: "ok"}
	if l.gap > 0 {
		stop.Count = l.gap // there is always room for the last line
		stop.Detail = "entries before this one found no room"
	}
	l.lineLocked(&stop)
	l.sealLocked()
	l.closed = true
	l.mu.Unlock()
	retry := firstRetry
	for {
		err := l.writeNext(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return l.spill(err)
		case <-time.After(retry):
			retry = min(2*retry, lastRetry)
		}
	}
}

func (l *Log) spill(cause error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	lines := 0
	for i := range l.full {
		l.chain(&l.full[i])
		l.previous = l.full[i].Hash
		lines += l.full[i].count()
	}
	if l.opt.Spill != nil {
		err := l.opt.Spill(l.full)
		if err == nil {
			return nil
		}
		cause = err
	}
	return fmt.Errorf("%d entries of the audit are lost: %w", lines, cause)
}
