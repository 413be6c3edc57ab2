// Package ledger keeps the log of decisions and the state folded from it, in
// transactions of its own beside the journal's.
//
// One goroutine commits. What waits when it has ended a transaction goes into
// the next one, so that a group is as large as the database is slow. Lists that
// are longer than maxGroup/4 are cut in batches of about bulkTime each; what else
// waits goes between them.
//
// A transaction takes its locks in this order, as that of the journal does, so
// that none can deadlock: rows of devices, then of their credentials, each sorted
// by id; the rotation of the fleet; rows of presence, then of labels, each sorted
// by id; fleet_counts, sorted by key; the revision. The statement that takes the revision writes the changes, and the
// rows of devices, since they contain it.
package ledger

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/store/database"
)

const (
	// maxGroup is the most decisions of one transaction, those of long lists
	// excepted.
	maxGroup = 200
	// maxWhole is the longest list that is made in one transaction.
	maxWhole = 50
	// About how long a batch of a longer list may take: others wait. On Postgres
	// each transaction waits for the disk and for a dozen answers, however long
	// it is.
	bulkTime         = 10 * time.Millisecond
	bulkTimePostgres = 25 * time.Millisecond
	minBatch         = 16
	maxBatch         = 1000
	// groupTimeout bounds one transaction.
	groupTimeout = 15 * time.Second
	// attempts is how often a transaction is tried that fails through no fault
	// of its rows, such as a deadlock with somebody beside fleetd.
	attempts = 5
)

// Ledger implements registry.Ledger. Close it before the store.
type Ledger struct {
	host  database.Host
	db    *database.DB
	log   *slog.Logger
	now   func() time.Time
	batch int // decisions of the next batch of a long list; the committer's own
	// bulkTime is that of the database.
	bulkTime time.Duration
	late     atomic.Pointer[func([]devices.Change)]

	mu     sync.Mutex
	short  []*request // at most maxWhole decisions each
	long   []*request
	closed bool

	wake chan struct{} // capacity 1
	stop context.CancelFunc
	done chan struct{}
}

// Late implements registry.Ledger.
func (l *Ledger) Late(take func([]devices.Change)) { l.late.Store(&take) }

// Option changes a ledger.
type Option func(*Ledger)

// Clock gives the ledger another clock than time.Now.
func Clock(now func() time.Time) Option { return func(l *Ledger) { l.now = now } }

// New starts a ledger.
func New(host database.Host, log *slog.Logger, options ...Option) *Ledger {
	ctx, stop := context.WithCancel(context.Background())
	l := &Ledger{host: host, db: host.Database(), log: log, now: time.Now, bulkTime: bulkTime, batch: 4 * minBatch, wake: make(chan struct{}, 1), stop: stop, done: make(chan struct{})}
	if l.db.Postgres() {
		l.bulkTime = bulkTimePostgres
	}
	for _, option := range options {
		option(l)
	}
	go l.run(ctx)
	return l
}

// Close ends the committer after the transaction that it is in. What waits
// fails with devices.ErrDatabase.
func (l *Ledger) Close() {
	l.stop()
	<-l.done
}

// request is what one caller waits for.
type request struct {
	ctx      context.Context
	list     []devices.Decision
	outcomes []devices.Outcome
	made     int // of the list: committed or refused
	// run is a transaction of its own kind, instead of list, and changes are those
	// that it has committed; nil if there can be none.
	run     func(ctx context.Context, t *transaction) error
	changes func() []devices.Change
	done    chan error // capacity 1

	mu    sync.Mutex
	begun bool // a transaction with it has begun
	gone  bool // its caller has left
	ended bool
}

// begin tells whether the request may be made: its caller is still there.
func (r *request) begin() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.gone || r.ctx.Err() != nil {
		r.gone = true
		return false
	}
	r.begun = true
	return true
}

// leave tells whether anything of the request may have been made. One that has
// ended is not left: done has its outcome.
func (r *request) leave() (begun, ended bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.gone = !r.ended
	return r.begun, r.ended
}

// end gives the request's outcome to its caller; false if that has left.
func (r *request) end(err error) (there bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = true
	r.done <- err
	return !r.gone
}

// end ends a request that has begun. Changes that its caller does not get are
// handed over.
func (l *Ledger) end(r *request, err error) {
	if there := r.end(err); there && err == nil {
		return
	}
	var list []devices.Change
	switch {
	case r.changes != nil:
		list = r.changes()
	case r.run == nil:
		for i := range r.outcomes {
			if made := r.outcomes[i].Changes; len(made) > 0 && made[0].Revision < pending { // else not committed
				list = append(list, made...)
			}
		}
	}
	if take := l.late.Load(); take != nil && len(list) > 0 {
		(*take)(list)
	}
}

var errStopped = fmt.Errorf("%w: the node stops", devices.ErrDatabase)

// Decide implements registry.Ledger. A list of more than maxWhole decisions is
// made in several transactions: with an error, those from the beginning up to
// some place in the list may have been made.
func (l *Ledger) Decide(ctx context.Context, list []devices.Decision) ([]devices.Outcome, error) {
	if len(list) == 0 {
		return nil, nil
	}
	r := &request{ctx: ctx, list: list, outcomes: make([]devices.Outcome, len(list))}
	if err := l.wait(ctx, r); err != nil {
		return nil, err
	}
	return r.outcomes, nil
}

// wait queues a request and waits for its end.
func (l *Ledger) wait(ctx context.Context, r *request) error {
	if err := l.host.Usable(); err != nil {
		return err
	}
	r.done = make(chan error, 1)
	l.mu.Lock()
	switch {
	case l.closed:
		l.mu.Unlock()
		return errStopped
	case len(r.list) > maxWhole:
		l.long = append(l.long, r)
	default:
		l.short = append(l.short, r)
	}
	l.mu.Unlock()
	select {
	case l.wake <- struct{}{}:
	default:
	}
	select {
	case err := <-r.done:
		return err
	case <-ctx.Done():
	}
	begun, ended := r.leave()
	switch {
	case ended:
		return <-r.done
	case begun:
		return fmt.Errorf("%w: %w: %w", devices.ErrDatabase, devices.ErrUncertain, ctx.Err())
	}
	return l.host.UseError(ctx, "waiting for the turn to write", ctx.Err())
}

// run commits until the ledger is closed.
func (l *Ledger) run(ctx context.Context) {
	defer close(l.done)
	for {
		for l.next(ctx) && ctx.Err() == nil {
		}
		select {
		case <-l.wake:
		case <-ctx.Done():
			l.refuse()
			return
		}
	}
}

// refuse refuses everything from now on.
func (l *Ledger) refuse() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for _, r := range append(l.short, l.long...) {
		r.end(errStopped)
	}
	l.short, l.long = nil, nil
}

// next makes what waits: a group of short requests, then a batch of a long one.
// It reports whether there was anything.
func (l *Ledger) next(ctx context.Context) (any bool) {
	group, long := l.take()
	if len(group) == 1 && group[0].run != nil {
		l.runOne(ctx, group[0])
	} else if len(group) > 0 {
		l.decideGroup(ctx, group)
	}
	if long != nil {
		l.decideBatch(ctx, long)
	}
	return len(group) > 0 || long != nil
}

// take removes the next group, and the long request whose turn it is. A request
// with a transaction of its own is a group of its own.
func (l *Ledger) take() (group []*request, long *request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n, decisions := 0, 0
	for ; n < len(l.short); n++ {
		r := l.short[n]
		if n > 0 && (r.run != nil || decisions+len(r.list) > maxGroup) {
			break
		}
		decisions += len(r.list)
		group = append(group, r)
		if r.run != nil {
			n++
			break
		}
	}
	if l.short = l.short[n:]; len(l.short) == 0 {
		l.short = nil
	}
	if len(l.long) > 0 {
		long, l.long = l.long[0], l.long[1:]
	}
	return group, long
}

// part is decisions of one request, with room for their outcomes.
type part struct {
	list     []devices.Decision
	outcomes []devices.Outcome
}

// decideGroup makes requests in one transaction.
func (l *Ledger) decideGroup(ctx context.Context, group []*request) {
	var parts []part
	var made []*request
	for _, r := range group {
		if r.begin() {
			made = append(made, r)
			parts = append(parts, part{r.list, r.outcomes})
		} else {
			r.end(r.ctx.Err())
		}
	}
	err := l.decide(ctx, parts)
	for _, r := range made {
		l.end(r, err)
	}
}

// decideBatch makes the next decisions of a long request. Long requests are made
// one after the other, so that an import which gives the next while one is made
// leaves the beginning of its file when it breaks off.
func (l *Ledger) decideBatch(ctx context.Context, r *request) {
	if !r.begin() {
		l.end(r, r.ctx.Err())
		return
	}
	to := min(len(r.list), r.made+l.batch)
	began := time.Now()
	if err := l.decide(ctx, []part{{r.list[r.made:to], r.outcomes[r.made:to]}}); err != nil {
		l.end(r, err)
		return
	}
	l.adapt(to-r.made, time.Since(began))
	if r.made = to; to == len(r.list) {
		l.end(r, nil)
		return
	}
	l.mu.Lock()
	l.long = slices.Insert(l.long, 0, r)
	l.mu.Unlock()
}

// adapt chooses the size of the next batch by how long this one took.
func (l *Ledger) adapt(decisions int, took time.Duration) {
	fits := int(float64(decisions) * float64(l.bulkTime) / float64(max(took, time.Microsecond)))
	if decisions < l.batch { // the end of a list says little
		fits = min(fits, l.batch)
	}
	l.batch = min(max(fits, l.batch/2, minBatch), 2*l.batch, maxBatch)
}

// decide makes decisions in one transaction. If the database refuses one of
// their rows, it halves them until that decision is alone, which fails alone.
func (l *Ledger) decide(ctx context.Context, parts []part) error {
	if len(parts) == 0 {
		return nil
	}
	err := l.transact(ctx, "deciding", func(ctx context.Context, t *transaction) error { return t.decide(ctx, parts) })
	var refused *refusedError
	if !errors.As(err, &refused) {
		return err
	}
	a, b := halve(parts)
	if len(b) == 0 {
		l.log.Error("the database refuses a decision", "device", a[0].list[0].Device, "error", refused.err)
		a[0].outcomes[0] = devices.Outcome{Err: fmt.Errorf("the database refuses what was decided of %s: %s", a[0].list[0].Device, database.OneLine(refused.err))}
		return nil
	}
	if err := l.decide(ctx, a); err != nil {
		return err
	}
	return l.decide(ctx, b)
}

// halve cuts decisions into two parts, the second empty if there is but one.
func halve(parts []part) (a, b []part) {
	all := 0
	for _, p := range parts {
		all += len(p.list)
	}
	n := (all + 1) / 2
	for _, p := range parts {
		cut := min(n, len(p.list))
		if n -= cut; cut > 0 {
			a = append(a, part{p.list[:cut], p.outcomes[:cut]})
		}
		if cut < len(p.list) {
			b = append(b, part{p.list[cut:], p.outcomes[cut:]})
		}
	}
	return a, b
}

// runOne makes a transaction of its own kind.
func (l *Ledger) runOne(ctx context.Context, r *request) {
	if !r.begin() {
		r.end(r.ctx.Err())
		return
	}
	err := l.transact(ctx, "writing a decision", r.run)
	var refused *refusedError
	if errors.As(err, &refused) {
		err = fmt.Errorf("the database refuses the decision: %s", database.OneLine(refused.err))
	}
	l.end(r, err)
}

// do queues a transaction of its own kind and waits for it.
func (l *Ledger) do(ctx context.Context, run func(ctx context.Context, t *transaction) error) error {
	return l.wait(ctx, &request{ctx: ctx, run: run})
}

// refusedError is the database's refusal of a row.
type refusedError struct{ err error }

func (e *refusedError) Error() string { return e.err.Error() }

// passError is an error of whoever decides: it is returned as it is.
type passError struct{ err error }

func (e *passError) Error() string { return e.err.Error() }

var (
	// errAgain says that another node got in between: the transaction is made
	// again and sees what that one did.
	errAgain = errors.New("another node has written the same row")
	// errNothing ends a transaction that changes nothing.
	errNothing = errors.New("nothing to write")
)

// transact runs a transaction and commits it. An error wraps
// devices.ErrDatabase, or is a *refusedError or what a *passError contains.
func (l *Ledger) transact(ctx context.Context, doing string, run func(ctx context.Context, t *transaction) error) error {
	ctx, cancel := context.WithTimeout(ctx, groupTimeout)
	defer cancel()
	for attempt := 1; ; attempt++ {
		if err := l.host.Usable(); err != nil {
			return err
		}
		unknown, err := l.attempt(ctx, run)
		var pass *passError
		switch {
		case err == nil, errors.Is(err, errNothing):
			return nil
		case errors.As(err, &pass):
			return pass.err
		case errors.Is(err, errAgain) && attempt < 10*attempts:
			continue
		case unknown:
			return fmt.Errorf("%w: %w", devices.ErrUncertain, l.host.UseError(ctx, doing, err))
		case ctx.Err() != nil:
			return l.host.UseError(ctx, doing, err)
		}
		switch class := database.FaultOf(err); {
		case class == database.FaultRow:
			return &refusedError{err}
		case class == database.FaultTransient && attempt < attempts:
			l.log.Warn("a transaction failed and is made again", "error", database.OneLine(err))
			pause := time.NewTimer(time.Duration(attempt*attempt) * 5 * time.Millisecond)
			select {
			case <-pause.C:
			case <-ctx.Done():
				pause.Stop()
			}
		default:
			return l.host.UseError(ctx, doing, err)
		}
	}
}

// attempt makes one attempt. unknown says that it may have been committed.
func (l *Ledger) attempt(ctx context.Context, run func(ctx context.Context, t *transaction) error) (unknown bool, err error) {
	release, err := l.db.Turn(ctx)
	if err != nil {
		return false, err
	}
	defer release()
	tx, err := l.db.Ledger.BeginTx(ctx, nil)
	if err != nil {
		return false, err
	}
	t := &transaction{Ledger: l, tx: tx}
	if err := run(ctx, t); err != nil {
		if again := tx.Rollback(); again != nil && !errors.Is(again, sql.ErrTxDone) {
			return false, errors.Join(err, again)
		}
		return false, err
	}
	if err := tx.Commit(); err != nil {
		return true, err
	}
	if t.committed != nil {
		t.committed()
	}
	return false, nil
}

// newLineage is a name for a history.
func newLineage() string { return rand.Text() }
