// Package ledger stores the log of changes and the resulting state, in transactions separate from
// those of the store's writer.
//
// One goroutine commits. Requests that arrive during a transaction are combined in the next one, so
// groups grow with the latency of the database. Lists longer than maxWhole are split into batches
// of about bulkTime each; other requests run between them.
//
// A transaction takes its locks in the same order as the store's writer, so that they cannot
// deadlock: rows of devices, then of their credentials, each sorted by id; the rotation of the
// fleet; rows of presence, then of labels, each sorted by id; fleet_counts, sorted by key; the
// revision. The statement that takes the revision also writes the changes and the rows of devices,
// since they contain it.
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
	"fleetd/internal/tasks"
)

const (
	// maxGroup is how many decisions one transaction has, except those of long lists.
	maxGroup = 200
	// maxWhole is the longest list that is made in one transaction.
	maxWhole = 50
	// Target durations of a batch of a longer list, for which others wait. On Postgres each
	// transaction waits for the disk and for a dozen round trips, however long it is.
	bulkTime         = 10 * time.Millisecond
	bulkTimePostgres = 25 * time.Millisecond
	minBatch         = 16
	maxBatch         = 1000
	// groupTimeout limits one transaction.
	groupTimeout = 15 * time.Second
)

// Ledger implements registry.Ledger. Close it before the store.
type Ledger struct {
	host  database.Host
	db    *database.DB
	log   *slog.Logger
	now   func() time.Time
	batch int // decisions of the next batch of a long list; used only by the committer
	// bulkTime depends on the database.
	bulkTime time.Duration
	late     atomic.Pointer[func([]devices.Change)]

	transactions database.Transactions

	mu     sync.Mutex
	short  []*request // at most maxWhole decisions each
	long   []*request
	closed bool

	wake chan struct{} // capacity 1
	stop context.CancelFunc
	done chan struct{}
}

// OnLateChanges implements registry.Ledger.
func (l *Ledger) OnLateChanges(take func([]devices.Change)) { l.late.Store(&take) }

// Option is an option of New.
type Option func(*Ledger)

// Clock sets the clock in place of time.Now.
func Clock(now func() time.Time) Option { return func(l *Ledger) { l.now = now } }

// New starts a Ledger.
func New(host database.Host, log *slog.Logger, options ...Option) *Ledger {
	ctx, stop := context.WithCancel(context.Background())
	l := &Ledger{host: host, db: host.Database(), log: log, now: time.Now, transactions: database.Transactions{Host: host, Pool: host.Database().Ledger, Limit: groupTimeout},
		bulkTime: bulkTime, batch: 4 * minBatch, wake: make(chan struct{}, 1), stop: stop, done: make(chan struct{})}
	if l.db.Postgres() {
		l.bulkTime = bulkTimePostgres
	}
	for _, option := range options {
		option(l)
	}
	go l.run(ctx)
	return l
}

// Close stops the committer after the current transaction. Queued requests fail with
// devices.ErrDatabase.
func (l *Ledger) Close() {
	l.stop()
	<-l.done
}

// request is the request of one caller.
type request struct {
	ctx      context.Context
	list     []devices.Decision
	outcomes []devices.Outcome
	made     int // number of decisions committed or refused
	// run is a transaction of another kind, in place of list; changes are those that it
	// committed; nil if there can be none.
	run     func(ctx context.Context, t *transaction) error
	changes func() []devices.Change
	done    chan error // capacity 1

	mu    sync.Mutex
	begun bool // a transaction with it has begun
	gone  bool // its caller has left
	ended bool
}

// begin marks the request as begun; it reports false if its caller has left.
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

// leave marks that the caller has left. begun reports whether anything may have been committed;
// ended whether the request has ended, so that done has its outcome.
func (r *request) leave() (begun, ended bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.gone = !r.ended
	return r.begun, r.ended
}

// end sends the request's outcome to its caller; it reports false if the caller has left.
func (r *request) end(err error) (there bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = true
	r.done <- err
	return !r.gone
}

// end ends a begun request. Changes that its caller does not receive are passed to the function of
// OnLateChanges.
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

var errStopped = fmt.Errorf("%w: the node is stopping", devices.ErrDatabase)

// Decide implements registry.Ledger. A list of more than maxWhole decisions is made in several
// transactions: with an error, the first part of the list may have been committed.
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
	tasks.Signal(l.wake)
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

// refuse refuses all later requests.
func (l *Ledger) refuse() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for _, r := range append(l.short, l.long...) {
		r.end(errStopped)
	}
	l.short, l.long = nil, nil
}

// next makes queued requests: a group of short ones, then a batch of a long one. It reports whether
// there were any.
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

// take removes the next group, and the next long request. A request with another kind of
// transaction is a group of its own.
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

// part is decisions of one request, with space for their outcomes.
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

// decideBatch makes the next decisions of a long request. Long requests are made one after the
// other, so that an interrupted import has written the start of its file.
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

// adapt sets the size of the next batch based on the duration of this one.
func (l *Ledger) adapt(decisions int, took time.Duration) {
	fits := int(float64(decisions) * float64(l.bulkTime) / float64(max(took, time.Microsecond)))
	if decisions < l.batch { // a short last batch is not representative
		fits = min(fits, l.batch)
	}
	l.batch = min(max(fits, l.batch/2, minBatch), 2*l.batch, maxBatch)
}

// decide makes decisions in one transaction. If the database refuses one of their rows, it halves
// them until only that decision fails.
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
		a[0].outcomes[0] = devices.Outcome{Err: fmt.Errorf("the database refuses the decision about %s: %s", a[0].list[0].Device, database.OneLine(refused.err))}
		return nil
	}
	if err := l.decide(ctx, a); err != nil {
		return err
	}
	return l.decide(ctx, b)
}

// halve splits decisions into two parts; the second is empty if there is only one.
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

// runOne runs another kind of transaction.
func (l *Ledger) runOne(ctx context.Context, r *request) {
	if !r.begin() {
		r.end(r.ctx.Err())
		return
	}
	err := l.transact(ctx, "writing a decision", r.run)
	if refused, ok := errors.AsType[*refusedError](err); ok {
		err = fmt.Errorf("the database refuses the decision: %s", database.OneLine(refused.err))
	}
	l.end(r, err)
}

// do queues another kind of transaction and waits for it.
func (l *Ledger) do(ctx context.Context, run func(ctx context.Context, t *transaction) error) error {
	return l.wait(ctx, &request{ctx: ctx, run: run})
}

// refusedError is the database's refusal of a row.
type refusedError struct{ err error }

func (e *refusedError) Error() string { return e.err.Error() }

// transact runs a transaction and commits it. Errors are as of database.Transactions, and *refusedError for the database's
// refusal of a row.
func (l *Ledger) transact(ctx context.Context, doing string, run func(ctx context.Context, t *transaction) error) error {
	var t *transaction
	var last error
	err := l.transactions.Run(ctx, doing, func(ctx context.Context, tx *sql.Tx) error {
		t = &transaction{Ledger: l, tx: tx}
		last = run(ctx, t)
		return last
	})
	switch {
	case err == nil && last == nil && t.committed != nil:
		t.committed()
	case errors.Is(err, devices.ErrDatabase) && last != nil && database.FaultOf(last) == database.FaultRow:
		return &refusedError{last}
	}
	return err
}

// newLineage returns a random name for a history.
func newLineage() string { return rand.Text() }
