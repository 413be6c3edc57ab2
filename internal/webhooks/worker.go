package webhooks

import (
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/selector"
	"fleetd/internal/tasks"
)

// worker delivers one webhook while this process has its lease.
type worker struct {
	m      *Manager
	hook   Hook
	key    []byte
	leased time.Time // when the lease ends; of Manager.run
	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	mu       sync.Mutex // protects all below, and is held while the status is saved
	status   Status
	failures int
	retryAt  time.Time
	saved    time.Time
}

var (
	errNotDelivered = errors.New("not delivered")
	errStopped      = errors.New("the webhook has stopped")
	errBug          = errors.New("internal error of fleetd (a bug); see the log of the node")
)

func newWorker(m *Manager, h Hook) (*worker, error) {
	key, err := m.opt.Mint.Open(sealPurpose, h.ID, h.Sealed)
	if err != nil {
		return nil, err
	}
	w := &worker{m: m, hook: h, key: key, status: h.Status, saved: time.Now()}
	w.ctx, w.cancel = context.WithCancel(context.Background())
	return w, nil
}

func (w *worker) start() {
	run := func(task func()) {
		w.tasks.Go(func() {
			defer w.cancel() // a worker with an ended task is replaced: see Manager.follow
			defer tasks.Contain(w.m.opt.Log, func() { _ = w.fail(time.Now(), errBug) })
			task()
		})
	}
	if w.hook.OfflineFor > 0 {
		run(w.scan)
	}
	if w.hook.OfflineFor == 0 || len(w.hook.Types) > 1 {
		run(w.follow)
	}
}

// end stops the worker and waits for it.
func (w *worker) end() {
	w.cancel()
	w.tasks.Wait()
}

func (w *worker) isFailing() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.failures > 0
}

// follow delivers events of the streams until the worker ends. A failed delivery ends the reading, so that nothing of
// the stream waits in memory; it begins again at the same event.
func (w *worker) follow() {
	for {
		pause := followPause
		if w.wait() != nil {
			return
		}
		q, err := w.query()
		if err == nil {
			err = w.m.opt.Events.Follow(w.ctx, q, w.event)
		}
		switch {
		case w.ctx.Err() != nil:
			w.save(0)
			return
		case errors.Is(err, errNotDelivered):
			pause = 0 // wait has the pause
		case errors.Is(err, ErrStale), errors.Is(err, errStopped):
			return // the next turn ends the worker
		}
		select {
		case <-w.ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// query returns what to read of the streams.
func (w *worker) query() (q devices.EventQuery, err error) {
	w.mu.Lock()
	position := w.status.Position
	w.mu.Unlock()
	if q.Since = w.hook.CreatedAt; position != "" {
		q.After, err = devices.ParseEventPosition(position)
	}
	q.NoJobs = !slices.ContainsFunc(w.hook.Types, func(kind devices.EventKind) bool {
		return slices.Contains(devices.StoredKinds(devices.JobsStream), kind)
	})
	// Of all kinds, also for one type: the position follows the stream, which may delete all that the webhook has
	// seen without deleting anything that it wants.
	return q, err
}

// wait waits for the time of the next attempt.
func (w *worker) wait() error {
	w.mu.Lock()
	pause := time.Until(w.retryAt)
	w.mu.Unlock()
	select {
	case <-w.ctx.Done():
		return w.ctx.Err()
	case <-time.After(max(pause, 0)):
		return nil
	}
}

// event delivers one event, or leaves it out.
func (w *worker) event(e devices.StreamEvent) error {
	if e.Gap {
		return w.gap(e)
	}
	wanted, err := w.wants(&e)
	if err != nil {
		return err
	}
	if !wanted || e.Kind == devices.EventOffline && w.hook.OfflineFor > 0 {
		w.mu.Lock()
		w.status.Position = e.ID.String()
		w.mu.Unlock()
		return w.save(saveEvery)
	}
	if err := w.deliver(e.Kind, e.Data); err != nil {
		return err
	}
	w.mu.Lock()
	w.status.Position = e.ID.String()
	w.mu.Unlock()
	return w.save(0)
}

// missing are the events of a stream that were deleted before they were delivered, from one sequence to another.
type missing struct {
	Stream string `json:"stream"`
	From   uint64 `json:"from"`
	To     uint64 `json:"to"`
}

// gap notes that events were deleted before they were delivered, for the next delivery. There is one range of each stream.
func (w *worker) gap(e devices.StreamEvent) error {
	w.mu.Lock()
	var gaps []missing
	if w.status.Gap != "" {
		_ = json.Unmarshal([]byte(w.status.Gap), &gaps) // written here
	}
	var further missing
	err := json.Unmarshal(e.Data, &further)
	if at := slices.IndexFunc(gaps, func(g missing) bool { return g.Stream == further.Stream }); at >= 0 {
		gaps[at].From, gaps[at].To = min(gaps[at].From, further.From), max(gaps[at].To, further.To)
	} else {
		gaps = append(gaps, further)
	}
	text, encodeErr := json.Marshal(gaps)
	if err = errors.Join(err, encodeErr); err == nil {
		w.status.Gap, w.status.Position = string(text), e.ID.String()
	}
	w.mu.Unlock()
	w.m.opt.Log.Warn("events were deleted before they were delivered to a webhook", "webhook", w.hook.ID, "range", string(e.Data))
	return errors.Join(err, w.save(0))
}

// wants reports whether an event is for this webhook, as of the rights of its creator now. What the creator may not read
// is taken out of it.
func (w *worker) wants(e *devices.StreamEvent) (bool, error) {
	if w.m.stopped(&w.hook) != "" {
		return false, errStopped
	}
	if !slices.Contains(w.hook.Types, e.Kind) {
		return false, nil
	}
	who, err := w.m.creator(&w.hook)
	if err != nil {
		return false, errStopped
	}
	refused := func(err error) (bool, error) {
		if err != nil && devices.AsError(err).Code == devices.CodeUnavailable { // the labels of the device
			return false, err
		}
		return err == nil, nil
	}
	ok, err := refused(w.m.opt.Fleet.PermitEvent(w.ctx, access.Principal{Caller: who}, e))
	if !ok || err != nil || w.hook.Select == "" || e.Device == "" {
		return ok, err
	}
	sel, err := selector.Parse(w.hook.Select)
	if err != nil {
		return false, nil // of a newer version
	}
	selected := access.NewCaller(who.Key, who.Name, who.Scopes, sel, nil)
	return refused(w.m.opt.Fleet.Permit(w.ctx, access.Principal{Caller: selected}, access.ScopeEvents, e.Device))
}

// deliver makes one attempt. After one that failed it returns errNotDelivered, and wait waits.
func (w *worker) deliver(kind devices.EventKind, data json.RawMessage) error {
	w.mu.Lock()
	gap := w.status.Gap
	w.mu.Unlock()
	begun := time.Now()
	_, err := w.m.sender.send(w.ctx, w.hook.URL, w.key, messageID(w.hook.ID, kind, data), message{Type: kind, Timestamp: begun.UTC().Truncate(time.Millisecond),
		Webhook: w.hook.ID, Gap: json.RawMessage(gap), Data: data})
	if w.ctx.Err() != nil {
		return w.ctx.Err()
	}
	w.m.Time.Observe(time.Since(begun))
	if err == nil {
		w.m.Deliveries.Add(resultDelivered, 1)
		w.mu.Lock()
		defer w.mu.Unlock()
		w.failures, w.retryAt = 0, time.Time{}
		if w.status.Gap == gap {
			w.status.Gap = ""
		}
		w.status.Delivered, w.status.DeliveredAt, w.status.FailingSince = w.status.Delivered+1, begun, time.Time{}
		return nil
	}
	w.m.Deliveries.Add(resultFailed, 1)
	return w.fail(begun, err)
}

// fail records a failure that began at a time. It returns errNotDelivered, and wait waits.
func (w *worker) fail(begun time.Time, err error) error {
	w.mu.Lock()
	if w.failures == 0 && w.status.FailingSince.IsZero() {
		w.status.FailingSince = begun
	}
	w.status.LastError = err.Error()
	pause := min(retryFirst<<min(w.failures, 10), retryMost)
	w.failures++
	w.retryAt = time.Now().Add(pause/2 + rand.N(pause/2+1))
	first := w.failures == 1
	w.mu.Unlock()
	if first {
		w.m.opt.Log.Warn("a delivery to a webhook failed; trying again", "webhook", w.hook.ID, "error", err)
	}
	return errors.Join(errNotDelivered, w.save(0))
}

// save writes the status unless it was written less than a time ago.
func (w *worker) save(ago time.Duration) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Since(w.saved) < ago {
		return nil
	}
	ctx, cancel := w.lasting()
	defer cancel()
	err := w.m.opt.Store.Save(ctx, w.hook.ID, w.m.opt.Instance, w.status)
	if err == nil {
		w.saved = time.Now()
	}
	return err
}

// lasting returns a context for writing what was delivered, also when the worker has ended.
func (w *worker) lasting() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(w.ctx), stopTime)
}

// scan delivers the absence of devices that have been offline for long enough, by what the database has of them.
func (w *worker) scan() {
	ticker := time.NewTicker(scanEvery)
	defer ticker.Stop()
	var pruned time.Time
	for {
		for w.scanOnce() == dueMost && w.ctx.Err() == nil {
		}
		if time.Since(pruned) > pruneEvery && w.m.opt.Store.Prune(w.ctx, w.hook.ID, clock.Now().Add(-w.hook.OfflineFor-2*dueKept)) == nil {
			pruned = time.Now()
		}
		select {
		case <-w.ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// scanOnce returns how many devices it was for, all of which were reported or left out.
func (w *worker) scanOnce() int {
	if w.wait() != nil {
		return 0
	}
	to := clock.Now().Add(-w.hook.OfflineFor)
	from := to.Add(-dueKept)
	if first := w.hook.CreatedAt.Add(-w.hook.OfflineFor); from.Before(first) {
		from = first
	}
	due, err := w.m.opt.Store.Due(w.ctx, w.hook.ID, from, to, dueMost)
	if err != nil {
		return 0
	}
	for _, d := range due {
		wanted, err := w.wants(&devices.StreamEvent{Kind: devices.EventOffline, Device: d.Device})
		if err == nil && wanted {
			err = w.absent(d)
		}
		if err == nil {
			ctx, cancel := w.lasting()
			err = w.m.opt.Store.Report(ctx, w.hook.ID, d)
			cancel()
		}
		if err != nil {
			return 0
		}
	}
	return len(due)
}

// absent delivers that a device has been offline for long.
func (w *worker) absent(d OfflineDevice) error {
	data, err := json.Marshal(struct {
		Device       devices.ID `json:"device"`
		OfflineSince time.Time  `json:"offline_since"`
		OfflineFor   string     `json:"offline_for"`
		Reason       string     `json:"reason"`
	}{d.Device, d.Since.UTC(), w.hook.OfflineFor.String(), d.Reason})
	if err != nil {
		return err
	}
	if err := w.deliver(devices.EventOffline, data); err != nil {
		return err
	}
	return w.save(0)
}
