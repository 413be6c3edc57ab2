package webhooks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/counters"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/egress"
	"fleetd/internal/tasks"
	"fleetd/internal/timescale"
)

var (
	turnEvery  = timescale.Of(3 * time.Second)
	leaseLasts = timescale.Of(15 * time.Second)
	// scanEvery is the interval between looks for devices that have been offline for long enough.
	scanEvery = timescale.Of(10 * time.Second)
	// saveEvery is how often positions are saved while events are left out.
	saveEvery = timescale.Of(10 * time.Second)
	// recordPause is the pause between two records of deliveries, so that one transaction has many.
	recordPause = 100 * time.Millisecond
	// retryFirst and retryMost limit the pause after a failed attempt.
	retryFirst = timescale.Of(10 * time.Millisecond)
	retryMost  = timescale.Of(time.Minute)
	// followPause is the pause after the event streams were not available.
	followPause = timescale.Of(2 * time.Second)
	// stopTime limits the writes with which a node that stops ends its leases.
	stopTime = 2 * time.Second
)

const (
	// sealPurpose separates sealed secrets from other sealed values.
	sealPurpose = "webhook"
	// dueKept is how long after its time the absence of a device is still reported.
	dueKept = 24 * time.Hour
	dueMost = 100 // devices of one page
	// maxFlight are the deliveries that are on their way to one receiver at once.
	maxFlight = 16
	// maxWindow and maxWindowBytes limit what is in memory of one webhook.
	maxWindow      = 512
	maxWindowBytes = 256 << 10
	// seenLate is how long after a device's last sign of life it is usually known that it is offline: looks begin so long
	// before the end of the last one. Every scanAllEvery one begins at the oldest absence that counts.
	seenLate     = 10 * time.Minute
	scanAllEvery = 10 * time.Minute
	// A webhook is disabled when its receiver has accepted nothing for disableAfter, nor any of disableAttempts by this
	// process: the fleet itself may have been away, and its clock may have been wrong.
	disableAfter    = 72 * time.Hour
	disableAttempts = 20 // in some 8 minutes
	// pruneEvery is how often absences that are not reported any more are deleted.
	pruneEvery = time.Hour
)

// Fleet is what a Manager uses of the core.
type Fleet interface {
	Permit(ctx context.Context, principal access.Principal, scope access.Scope, id devices.ID) error
	PermitEvent(ctx context.Context, principal access.Principal, e *devices.StreamEvent) error
	Keys() *access.Registry
	NoteChange(principal access.Principal, action string, id devices.ID, detail string, err error)
}

// Events reads and publishes events, as events.Bus does.
type Events interface {
	Follow(ctx context.Context, q devices.EventQuery, deliver func(devices.StreamEvent) error) error
	Publish(e devices.Event)
}

// Options of a Manager.
type Options struct {
	Store    Store
	Fleet    Fleet
	Events   Events
	Mint     *credential.Mint
	Allow    *egress.Allow
	Instance string // of this process, unlike that of any other
	// Open accepts the creator of a fleet without tokens (--api-auth none).
	Open    bool
	Version string
	Log     *slog.Logger
}

// Manager delivers the webhooks whose lease this process has, and shows and changes all. It is safe for concurrent use.
type Manager struct {
	opt    Options
	sender *sender
	reader *reader
	poke   chan struct{} // capacity 1: something was changed
	dirty  chan struct{} // capacity 1: there is a delivery to record
	// unrecorded is set while the database does not accept records.
	unrecorded atomic.Bool
	saving     sync.Mutex // held while statuses are saved, so that none is overwritten by an older one
	stop       context.CancelFunc
	done       sync.WaitGroup

	mu      sync.Mutex
	workers map[string]*worker

	// Deliveries counts attempts by result: delivered, failed.
	Deliveries counters.Map[string]
	// Time is the time of attempts.
	Time counters.Histogram
}

// Results of attempts.
const (
	resultDelivered = "delivered"
	resultFailed    = "failed"
)

// New returns a running Manager.
func New(opt Options) *Manager {
	m := &Manager{opt: opt, sender: newSender(opt.Allow, opt.Version), poke: make(chan struct{}, 1), dirty: make(chan struct{}, 1), workers: map[string]*worker{}}
	for _, result := range []string{resultDelivered, resultFailed} {
		m.Deliveries.Add(result, 0) // otherwise an alert on its increase would miss the first one
	}
	ctx, stop := context.WithCancel(context.Background())
	m.stop = stop
	m.reader = &reader{m: m, started: make(chan struct{}, 1)}
	m.done.Go(func() { m.run(ctx) })
	m.done.Go(func() { m.reader.run(ctx) })
	m.done.Go(func() { m.recordAll(ctx) })
	return m
}

// Close ends the deliveries and the leases, so that other nodes continue at once.
func (m *Manager) Close() {
	m.stop()
	m.done.Wait()
	m.sender.close()
}

// Metrics adds the metrics of webhooks.
func (m *Manager) Metrics(r *counters.Registry) {
	counters.ByKey(r.Counter("webhook_deliveries_total", "Attempts of this node to deliver to webhooks: `delivered`, `failed`.", "result"), &m.Deliveries)
	r.Histogram("webhook_delivery_seconds", "Time of one attempt, at most 10 s.", &m.Time)
	count := func(failing bool) func() int {
		return func() (n int) {
			m.mu.Lock()
			defer m.mu.Unlock()
			for _, w := range m.workers {
				if !failing || w.isFailing() {
					n++
				}
			}
			return n
		}
	}
	counters.Value(r.Gauge("webhooks", "Webhooks that this node delivers."), count(false))
	counters.Value(r.Gauge("webhooks_failing", "Webhooks of this node whose last attempt failed."), count(true))
}

func (m *Manager) run(ctx context.Context) {
	ticker := time.NewTicker(turnEvery)
	defer ticker.Stop()
	for {
		m.turn(ctx)
		select {
		case <-ctx.Done():
			m.endAll()
			limited, cancel := context.WithTimeout(context.Background(), stopTime)
			defer cancel()
			if err := m.opt.Store.Release(limited, m.opt.Instance); err != nil {
				m.opt.Log.Debug("webhooks: the leases end by themselves", "error", err)
			}
			return
		case <-m.poke:
		case <-ticker.C:
		}
	}
}

// turn starts, keeps and ends the workers of this process. While the database is away workers end with their leases.
func (m *Manager) turn(ctx context.Context) {
	hooks, err := m.opt.Store.List(ctx)
	if err == nil {
		m.follow(ctx, hooks)
	}
	var over []*worker
	m.mu.Lock()
	for id, w := range m.workers {
		if time.Now().After(w.leased) {
			over = append(over, w)
			delete(m.workers, id)
		}
	}
	m.mu.Unlock()
	m.endWorkers(over)
}

// follow makes the workers those of the hooks whose lease this process can have.
func (m *Manager) follow(ctx context.Context, hooks []Hook) {
	left := map[string]bool{}
	for _, h := range hooks {
		m.mu.Lock()
		w := m.workers[h.ID]
		m.mu.Unlock()
		if m.stopped(&h) != "" || !h.DisabledAt.IsZero() || w != nil && (w.hook.Version != h.Version || w.ctx.Err() != nil) {
			continue
		}
		begun := time.Now()
		mine, err := m.opt.Store.Lease(ctx, h.ID, m.opt.Instance, h.Version, leaseLasts)
		switch {
		case err != nil:
			left[h.ID] = w != nil // until the lease ends
		case mine && w != nil:
			w.leased, left[h.ID] = begun.Add(leaseLasts), true
		case mine:
			m.begin(ctx, h.ID, begun)
			left[h.ID] = true
		}
	}
	m.mu.Lock()
	var gone []*worker
	for id, w := range m.workers {
		if !left[id] {
			gone = append(gone, w)
			delete(m.workers, id)
		}
	}
	m.mu.Unlock()
	for _, w := range gone {
		if w.ctx.Err() == nil { // one that ended by itself is started again by the next turn, not at once
			tasks.Signal(m.poke) // with its new settings, if it was changed
		}
	}
	m.endWorkers(gone)
}

// begin starts a worker with what the row has now that this process has its lease.
func (m *Manager) begin(ctx context.Context, id string, leased time.Time) {
	h, err := m.opt.Store.Get(ctx, id)
	if err != nil {
		return // the next turn tries again
	}
	w, err := newWorker(m, h)
	if err != nil {
		m.opt.Log.Error("a webhook cannot be delivered: its secret was sealed with another --secret; set a new one", "webhook", id)
		return
	}
	w.leased = leased.Add(leaseLasts)
	m.mu.Lock()
	m.workers[id] = w
	m.mu.Unlock()
	w.start()
}

func (m *Manager) endAll() {
	m.mu.Lock()
	all := slices.Collect(maps.Values(m.workers))
	m.workers = map[string]*worker{}
	m.mu.Unlock()
	m.endWorkers(all)
}

// endWorkers ends workers and records what they have delivered.
func (m *Manager) endWorkers(workers []*worker) {
	for _, w := range workers {
		w.cancel()
	}
	for _, w := range workers {
		w.end()
	}
	ctx, cancel := context.WithTimeout(context.Background(), stopTime)
	defer cancel()
	if err := m.save(ctx, workers, true); err != nil {
		m.opt.Log.Debug("webhooks: the last deliveries are not recorded, and will be repeated", "error", err)
	}
}

// recordAll records what the workers have done, in one transaction for all: deliveries at once, positions after events
// that were left out from time to time.
func (m *Manager) recordAll(ctx context.Context) {
	ticker := time.NewTicker(saveEvery)
	defer ticker.Stop()
	for {
		all := m.unrecorded.Load()
		select {
		case <-ctx.Done():
			return
		case <-m.dirty:
		case <-ticker.C:
			all = true
		}
		m.mu.Lock()
		workers := slices.Collect(maps.Values(m.workers))
		m.mu.Unlock()
		limited, cancel := context.WithTimeout(ctx, stopTime)
		err := m.save(limited, workers, all)
		cancel()
		switch held := m.unrecorded.Swap(err != nil); {
		case err != nil:
			tasks.Signal(m.dirty) // again
		case held:
			for _, w := range workers {
				w.launch()
			}
		}
		if !clock.Sleep(ctx, recordPause) {
			return
		}
	}
}

// save writes the status of workers that has changed, with all also if that can wait. It ends those whose lease another process has.
func (m *Manager) save(ctx context.Context, workers []*worker, all bool) error {
	m.saving.Lock()
	defer m.saving.Unlock()
	statuses, changes := map[string]Status{}, map[*worker]int{}
	for _, w := range workers {
		if status, n := w.unsaved(all); n > 0 {
			statuses[w.hook.ID], changes[w] = status, n
		}
	}
	if len(statuses) == 0 {
		return nil
	}
	stale, err := m.opt.Store.Save(ctx, m.opt.Instance, statuses)
	if err != nil {
		return err
	}
	for w, n := range changes {
		if slices.Contains(stale, w.hook.ID) {
			w.cancel()
			continue
		}
		w.wasSaved(n)
		if status := statuses[w.hook.ID]; !status.DisabledAt.IsZero() {
			m.publishDisabled(&w.hook, &status)
		}
	}
	return nil
}

// publishDisabled publishes that a webhook was disabled, after that was committed.
func (m *Manager) publishDisabled(h *Hook, s *Status) {
	m.opt.Log.Error("a webhook was disabled: its receiver has accepted nothing for three days", "webhook", h.ID, "error", s.LastError)
	text, err := json.Marshal(struct {
		FailingSince time.Time `json:"failing_since"`
		LastError    string    `json:"last_error"`
		Owner        string    `json:"owner"`
		CreatedBy    string    `json:"created_by"`
	}{s.FailingSince.UTC(), s.LastError, h.Owner, h.OwnerName})
	if err != nil {
		return // a time of a year that JSON does not have
	}
	m.opt.Events.Publish(devices.Event{Kind: devices.EventWebhookDisabled, Webhook: h.ID, Seq: h.Version, Time: s.DisabledAt,
		MsgID: fmt.Sprintf("%s-disabled-%d", h.ID, s.DisabledAt.UnixMicro()), Fields: text[1 : len(text)-1]})
}

// creator returns who a webhook acts as.
func (m *Manager) creator(h *Hook) (*access.Caller, error) {
	return m.opt.Fleet.Keys().Acting(h.Owner, m.opt.Open, clock.Now())
}

// holder returns what the shares need to know of the owner of webhooks.
func (m *Manager) holder(owner string) access.Holder {
	who, err := m.creator(&Hook{Owner: owner})
	return access.Holder{Admin: err == nil && who.Scopes.Has(access.ScopeAdmin), Ended: err != nil}
}

// stopped returns why a webhook is not delivered; empty if it is.
func (m *Manager) stopped(h *Hook) string {
	who, err := m.creator(h)
	switch {
	case errors.Is(err, access.ErrRevoked):
		return "the key " + h.OwnerName + " that created it was revoked"
	case errors.Is(err, access.ErrExpired):
		return "the key " + h.OwnerName + " that created it has expired"
	case err != nil:
		return "the key " + h.OwnerName + " that created it does not exist any more"
	case !who.Scopes.Has(access.ScopeEvents):
		return "the key " + h.OwnerName + " that created it does not have the scope events:read"
	}
	return ""
}

// Reseal seals secrets with the newest secret of the fleet that are sealed with an older one, and returns how many.
func (m *Manager) Reseal(ctx context.Context) (changed int, err error) {
	hooks, err := m.opt.Store.List(ctx)
	if err != nil {
		return 0, err
	}
	for _, h := range hooks {
		sealed, old, err := m.opt.Mint.Reseal(sealPurpose, h.ID, h.Sealed)
		switch {
		case err != nil:
			m.opt.Log.Error("the secret of a webhook cannot be opened: it was sealed with another --secret; set a new one", "webhook", h.ID)
			continue
		case !old:
			continue
		}
		if err := m.opt.Store.Reseal(ctx, h.ID, h.Sealed, sealed); err != nil {
			return changed, err
		}
		changed++
	}
	return changed, nil
}
