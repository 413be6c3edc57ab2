package audit

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/tasks"
)

// Limits of unwritten entries.
const (
	flushEvery  = 500 * time.Millisecond // lost at most if the process is killed
	maxGroup    = 1000                   // entries of one block
	maxGroupLen = 512 << 10              // bytes of one block
	// MaxWaiting limits the bytes that are kept while the database is unreachable. Further entries
	// are dropped, and leave a visible gap.
	MaxWaiting = 64 << 20

	firstRetry = 250 * time.Millisecond
	lastRetry  = 5 * time.Second
)

// Store stores blocks. Writing a block twice is not an error.
type Store interface {
	SaveAuditBlock(ctx context.Context, b *Block) error
}

// Options of a Log. All are required except Key.
type Options struct {
	Node, Version string
	// Key hashes the blocks; without it anyone who can write to the database can forge valid blocks.
	Key   []byte
	Store Store
	Log   *slog.Logger
	// Spill receives, when the log is closed, the blocks that the store did not accept.
	Spill func([]Block) error
}

// Log writes the entries of one run of a node. It is safe for concurrent use.
type Log struct {
	opt   Options
	limit int // MaxWaiting; lower in tests
	run   string
	wake  chan struct{} // a group is full
	ctx   context.Context
	stop  context.CancelFunc // ends ctx, so that a blocked write does not outlast the log
	done  chan struct{}

	mu        sync.Mutex
	seq       int64
	open      Block
	entries   int     // in open
	full      []Block // oldest first
	waiting   int     // bytes of all unwritten entries
	gap       int64   // entries dropped since the last one
	anonymous anonymousLimiter
	closed    bool

	previous Hash // this and the next field belong to the writer, and then to Close
	failing  bool

	// Written and Dropped count entries; Failed counts failed attempts to write a block.
	Written, Dropped, Failed atomic.Int64
}

// New starts a Log, and records the start.
func New(opt Options) *Log {
	l := &Log{opt: opt, limit: MaxWaiting, run: strings.ToLower(rand.Text()[:16]), wake: make(chan struct{}, 1), done: make(chan struct{})}
	l.ctx, l.stop = context.WithCancel(context.Background())
	l.Record(Entry{At: clock.Now(), Kind: KindRun, Action: "start", Outcome: "ok", Detail: "fleetd " + opt.Version})
	go l.write()
	return l
}

// Run returns the name of this run.
func (l *Log) Run() string { return l.run }

// Waiting returns the number of unwritten bytes.
func (l *Log) Waiting() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.waiting
}

// Record records an entry. It never waits for the database.
func (l *Log) Record(e Entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		l.Dropped.Add(1) // nothing follows the end of the run
		return
	}
	if e.isAnonymous() && !l.anonymous.admit(&e, e.At) {
		return
	}
	l.appendLocked(&e)
}

func (l *Log) appendLocked(e *Entry) {
	if l.waiting >= l.limit {
		l.seq++ // so that missing entries can be counted
		l.gap++
		l.Dropped.Add(1)
		return
	}
	if l.gap > 0 {
		gap := Entry{At: e.At, Kind: KindRun, Action: "gap", Outcome: "dropped", Count: l.gap, Detail: "these entries were dropped: the database did not accept earlier ones, and the memory for waiting entries was full"}
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
		tasks.Signal(l.wake)
	}
}

// sealLocked ends the open group.
func (l *Log) sealLocked() {
	if l.entries == 0 {
		return
	}
	size := len(l.open.Entries)
	l.full = append(l.full, l.open)
	// Reserve space for the next group, which probably has the same length: otherwise it would be
	// copied as it grows.
	l.open, l.entries = Block{Entries: make([]byte, 0, size+size/8)}, 0
}

// write stores groups until the log is closed.
func (l *Log) write() {
	defer close(l.done)
	ticker := time.NewTicker(flushEvery)
	defer ticker.Stop()
	for {
		select {
		case <-l.ctx.Done():
			return
		case <-l.wake:
		case now := <-ticker.C:
			l.sweep(now)
		}
		if l.writeAll(l.ctx) != nil {
			return
		}
	}
}

// sweep ends the open group, and records the counts of refusals that were not written.
func (l *Log) sweep(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.anonymous.due(now) {
		l.appendLocked(&e)
	}
	l.sealLocked()
}

// writeAll stores all full groups in order. It fails only if ctx ends, and repeats a write until then.
func (l *Log) writeAll(ctx context.Context) error {
	for retry := firstRetry; ; {
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
				l.opt.Log.Warn("the audit log cannot be written; entries are kept in memory and the write is repeated", "error", err)
			}
			if !clock.Sleep(ctx, retry) {
				return err
			}
			retry = min(2*retry, lastRetry)
			continue
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

// chain sets the hash of the previous block.
func (l *Log) chain(b *Block) {
	b.Run, b.Node, b.Previous = l.run, l.opt.Node, l.previous
	b.FirstAt, b.LastAt = b.FirstAt.UTC().Truncate(time.Microsecond), b.LastAt.UTC().Truncate(time.Microsecond)
	b.Hash = b.Sum(l.opt.Key)
}

// Close writes the remaining entries and the stop of the node. No entry may be recorded after it. Blocks
// that the store does not accept before ctx ends go to Spill.
func (l *Log) Close(ctx context.Context) error {
	l.stop()
	<-l.done
	l.mu.Lock()
	for _, e := range l.anonymous.due(time.Time{}) {
		l.appendLocked(&e)
	}
	stop := Entry{At: clock.Now(), Kind: KindRun, Action: "stop", Outcome: "ok"}
	if l.gap > 0 {
		stop.Count = l.gap // there is always room for the last line
		stop.Detail = "entries before this one were dropped: the memory for waiting entries was full"
	}
	l.lineLocked(&stop)
	l.sealLocked()
	l.closed = true
	l.mu.Unlock()
	if l.writeAll(ctx) != nil {
		return l.spill()
	}
	return nil
}

func (l *Log) spill() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	lines := 0
	for i := range l.full {
		l.chain(&l.full[i])
		l.previous = l.full[i].Hash
		lines += l.full[i].count()
	}
	if err := l.opt.Spill(l.full); err != nil {
		return fmt.Errorf("%d entries of the audit log are lost: %w", lines, err)
	}
	return nil
}
