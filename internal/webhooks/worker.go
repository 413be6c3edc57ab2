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

// worker delivers one webhook while this process has its lease. Events come from the reader of the node, or from a reader
// of its own while the webhook is behind. They are in the window until they are delivered; events of one device, and of one
// job, are delivered one after the other.
type worker struct {
	m      *Manager
	hook   Hook
	key    []byte
	leased time.Time // when the lease ends; of Manager.run
	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup
	moved  chan struct{} // capacity 1: for follow, when there is room or the worker has left the reader of the node
	probe  chan struct{} // capacity 1: held by the only attempt while the receiver seems to be down

	mu       sync.Mutex             // protects all below
	status   Status                 // but for its position
	position devices.EventPosition  // of the last event before the window
	read     devices.EventPosition  // of the last event in or before the window
	shared   bool                   // the reader of the node has the worker
	window   []*delivery            // events that were taken, from the first one that is not delivered
	size     int                    // bytes of the window
	lanes    map[string][]*delivery // of each device and job what is not delivered, in order
	ready    []*delivery            // first of their lanes, that nobody sends
	senders  int
	failures int       // attempts since the last one that was successful
	failing  time.Time // when the first of them began
	changes  int       // counts changes of the status
	urgent   int       // the last change that is not merely the position after an event that was left out
	saved    int       // changes that the database has

	who      *access.Caller // the creator, and
	selected *access.Caller // the same for the devices of the webhook; nil: as who
}

// delivery is an event, or the absence of a device, that is to be delivered.
type delivery struct {
	kind  devices.EventKind
	lane  string
	data  json.RawMessage
	after devices.EventPosition // of the webhook, when this one and all before it are delivered
	done  bool
	// event is set if the rights to it have not been judged yet, because the labels of its device are not in memory.
	event *devices.StreamEvent
	// absence is set if this is about a device that has been offline for long, or about its return. finished is called when it
	// is delivered.
	absence  *OfflineDevice
	returned bool
	finished func()
}

var (
	errStopped = errors.New("the webhook has stopped")
	errFull    = errors.New("the window is full")
	errJoined  = errors.New("the reader of the node has the webhook")
	errBug     = errors.New("internal error of fleetd (a bug); see the log of the node")
)

func newWorker(m *Manager, h Hook) (*worker, error) {
	key, err := m.opt.Mint.Open(sealPurpose, h.ID, h.Sealed)
	if err != nil {
		return nil, err
	}
	w := &worker{m: m, hook: h, key: key, status: h.Status, lanes: map[string][]*delivery{}, moved: make(chan struct{}, 1), probe: make(chan struct{}, 1)}
	if h.Position != "" {
		if w.position, err = devices.ParseEventPosition(h.Position); err != nil {
			return nil, err
		}
	}
	w.read = w.position
	w.ctx, w.cancel = context.WithCancel(context.Background())
	return w, nil
}

func (w *worker) start() {
	if w.hook.OfflineFor > 0 {
		w.run(w.scan)
	}
	if w.hook.OfflineFor == 0 || len(w.hook.Types) > 1 {
		w.run(w.follow)
	}
}

// run starts a task of the worker. A bug in one ends the worker, which the next turn replaces.
func (w *worker) run(task func()) {
	w.tasks.Go(func() {
		defer tasks.Contain(w.m.opt.Log, w.broke)
		task()
	})
}

func (w *worker) broke() {
	w.fail(time.Now(), errBug)
	w.cancel()
}

// end stops the worker and waits for it.
func (w *worker) end() {
	w.has(func() bool { w.cancel(); return true }) // launchLocked starts nothing afterwards
	w.tasks.Wait()
}

func (w *worker) isFailing() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.failures > 0
}

// follow takes events until the worker ends: from the reader of the node, and from the streams while the worker is behind
// that reader.
func (w *worker) follow() {
	defer w.cancel()
	defer w.m.reader.leave(w)
	for {
		for w.has(func() bool { return w.shared || len(w.window) > maxWindow/2 || w.size > maxWindowBytes/2 }) {
			select {
			case <-w.ctx.Done():
				return
			case <-w.moved:
			}
		}
		if w.m.reader.join(w) {
			continue
		}
		q := devices.EventQuery{Since: w.hook.CreatedAt}
		w.has(func() bool { q.After = w.read; return true })
		err := w.m.opt.Events.Follow(w.ctx, q, w.catchUp)
		switch {
		case w.ctx.Err() != nil:
			return
		case errors.Is(err, errJoined), errors.Is(err, errFull):
			continue
		}
		if !clock.Sleep(w.ctx, followPause) {
			return
		}
	}
}

// has returns a condition of what the lock protects.
func (w *worker) has(condition func() bool) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return condition()
}

// catchUp takes an event that the worker reads itself, until the reader of the node can have it.
func (w *worker) catchUp(e devices.StreamEvent) error {
	var before devices.EventPosition
	w.has(func() bool { before = w.read; return true })
	if err := w.take(&e, before); err != nil {
		return err
	}
	if w.m.reader.join(w) {
		return errJoined
	}
	return nil
}

// take puts an event into the window, or leaves it out. before is the position of the reader before the event, which may be
// behind that of the worker. It waits for nothing: a reader has many webhooks. One goroutine calls it at a time.
func (w *worker) take(e *devices.StreamEvent, before devices.EventPosition) error {
	if e.Gap {
		return w.gap(e, before)
	}
	if w.has(func() bool { return e.ID[e.Stream] <= w.read[e.Stream] }) {
		return nil
	}
	var wanted bool
	var err error
	if slices.Contains(w.hook.Types, e.Kind) && (e.Kind != devices.EventOffline || w.hook.OfflineFor == 0) {
		if wanted, err = w.wants(noWait, e); errors.Is(err, errStopped) {
			return err
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !wanted && err == nil {
		w.passLocked(e)
		return nil
	}
	if len(w.window) >= maxWindow || w.size >= maxWindowBytes {
		return errFull
	}
	d := &delivery{kind: e.Kind, lane: laneOf(e), data: slices.Clone(e.Data)}
	if err != nil {
		copied := *e
		copied.Data = d.data
		d.event = &copied
	}
	w.window, w.size = append(w.window, d), w.size+len(d.data)
	w.passLocked(e)
	w.putLocked(d)
	return nil
}

// laneOf returns within what an event keeps its order: its device or its job.
func laneOf(e *devices.StreamEvent) string {
	if e.Device != "" {
		return string(e.Device)
	}
	return e.Job
}

// passLocked moves the position past an event. A reader knows the position in a stream that has had no event since it began.
func (w *worker) passLocked(e *devices.StreamEvent) {
	w.read[e.Stream] = e.ID[e.Stream]
	for i, seq := range e.ID {
		if w.read[i] == 0 {
			w.read[i] = seq
		}
	}
	if n := len(w.window); n > 0 {
		w.window[n-1].after = w.read
	} else {
		w.position = w.read
		w.changes++
	}
}

// missing are the events of a stream that were deleted before they were delivered, from one sequence to another.
type missing struct {
	Stream string `json:"stream"`
	From   uint64 `json:"from"`
	To     uint64 `json:"to"`
}

// gap notes that events were deleted before they were read, for the next delivery. There is one range of each stream.
func (w *worker) gap(e *devices.StreamEvent, before devices.EventPosition) error {
	var further missing
	if err := json.Unmarshal(e.Data, &further); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if lost := further.From <= before[e.Stream]; !lost { // else it is a new stream, whose sequences are lower
		if further.To <= w.read[e.Stream] {
			return nil
		}
		further.From = max(further.From, w.read[e.Stream]+1)
	}
	var gaps []missing
	if w.status.Gap != "" {
		_ = json.Unmarshal([]byte(w.status.Gap), &gaps) // written here
	}
	if at := slices.IndexFunc(gaps, func(g missing) bool { return g.Stream == further.Stream }); at >= 0 {
		gaps[at].From, gaps[at].To = min(gaps[at].From, further.From), max(gaps[at].To, further.To)
	} else {
		gaps = append(gaps, further)
	}
	text, err := json.Marshal(gaps)
	if err != nil {
		return err
	}
	w.status.Gap = string(text)
	w.passLocked(e)
	w.changedLocked()
	w.m.opt.Log.Warn("events were deleted before they were delivered to a webhook", "webhook", w.hook.ID, "range", string(e.Data))
	return nil
}

// wants reports whether the webhook selects the device of an event, and its creator may see it now. What the creator may not read
// is taken out of it. An error but errStopped says that the labels of the device cannot be read.
func (w *worker) wants(ctx context.Context, e *devices.StreamEvent) (bool, error) {
	who, selected, err := w.callers()
	if err != nil {
		return false, err
	}
	refused := func(err error) (bool, error) {
		if err != nil && devices.AsError(err).Code == devices.CodeUnavailable { // the labels of the device
			return false, err
		}
		return err == nil, nil
	}
	if selected != nil && e.Device != "" {
		ok, err := refused(w.m.opt.Fleet.Permit(ctx, access.Principal{Caller: selected}, access.ScopeEvents, e.Device))
		if !ok || err != nil {
			return ok, err
		}
	}
	return refused(w.m.opt.Fleet.PermitEvent(ctx, access.Principal{Caller: who}, e))
}

// callers returns the creator as it is now, and the same for the devices that the webhook selects; nil if it selects all.
func (w *worker) callers() (who, selected *access.Caller, err error) {
	if who, err = w.m.creator(&w.hook); err != nil || !who.Scopes.Has(access.ScopeEvents) {
		return nil, nil, errStopped
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.hook.Select != "" && w.who != who {
		sel, err := selector.Parse(w.hook.Select)
		if err != nil { // the webhook is of a newer version
			return nil, nil, errStopped
		}
		w.who, w.selected = who, access.NewCaller(who.Key, who.Name, who.Scopes, sel, nil)
	}
	return who, w.selected, nil
}

func (w *worker) put(d *delivery) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.putLocked(d)
}

// putLocked appends a delivery to its lane.
func (w *worker) putLocked(d *delivery) {
	lane := append(w.lanes[d.lane], d)
	w.lanes[d.lane] = lane
	if len(lane) == 1 {
		w.ready = append(w.ready, d)
		w.launchLocked()
	}
}

// launchLocked starts senders for what is ready, as many as may be.
func (w *worker) launchLocked() {
	for w.senders < maxFlight && w.ctx.Err() == nil {
		d := w.nextLocked()
		if d == nil {
			return
		}
		w.senders++
		w.run(func() {
			for d != nil && w.send(d) {
				d = w.finish(d)
			}
		})
	}
}

// nextLocked returns what to send next, nil if there is nothing: also while deliveries cannot be recorded, since each would
// be repeated after a restart.
func (w *worker) nextLocked() *delivery {
	if len(w.ready) == 0 || w.m.unrecorded.Load() {
		return nil
	}
	d := w.ready[0]
	w.ready[0] = nil
	w.ready = w.ready[1:]
	return d
}

// finish takes a delivery out of its lane and the window, and returns the next one for its sender.
func (w *worker) finish(d *delivery) *delivery {
	w.mu.Lock()
	defer w.mu.Unlock()
	d.done = true
	if lane := w.lanes[d.lane][1:]; len(lane) > 0 {
		w.lanes[d.lane] = lane
		w.ready = append(w.ready, lane[0])
	} else {
		delete(w.lanes, d.lane)
	}
	for len(w.window) > 0 && w.window[0].done {
		w.position, w.size = w.window[0].after, w.size-len(w.window[0].data)
		w.window[0] = nil
		w.window = w.window[1:]
	}
	w.changedLocked()
	tasks.Signal(w.moved)
	if d.finished != nil {
		d.finished()
	}
	next := w.nextLocked()
	if next == nil {
		w.senders--
		return nil
	}
	w.launchLocked()
	return next
}

// leftReader makes the worker read by itself, when it has room.
func (w *worker) leftReader() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.shared = false
	tasks.Signal(w.moved)
}

// send delivers, and tries again until that is successful or turns out not to be wanted. It returns false if the worker ends
// first.
func (w *worker) send(d *delivery) bool {
	for {
		pause, err := w.attempt(d)
		if err == nil {
			return true
		}
		if !clock.Sleep(w.ctx, pause) {
			return false
		}
	}
}

// attempt makes one attempt. With an error it returns the pause until the next one.
func (w *worker) attempt(d *delivery) (pause time.Duration, err error) {
	wanted, err := w.stillWanted(d)
	if err != nil {
		return followPause, err // neither the fault of the receiver nor of the event
	}
	if wanted {
		if pause, err = w.post(d); err != nil {
			return pause, err
		}
	}
	if d.absence != nil {
		err = w.m.opt.Store.Report(w.ctx, w.hook.ID, *d.absence, !wanted || d.returned)
	}
	return followPause, err
}

// stillWanted judges what could not be judged when it was read: the rights to the event, and whether the absence was reported
// that it ends.
func (w *worker) stillWanted(d *delivery) (bool, error) {
	if d.event != nil {
		wanted, err := w.wants(w.ctx, d.event)
		if errors.Is(err, errStopped) {
			w.cancel()
		}
		if err != nil || !wanted {
			return false, err
		}
		if len(d.event.Data) > 0 {
			d.data = d.event.Data // of which wants may have taken out something
		}
		d.event = nil
	}
	if d.kind != devices.EventOnline || w.hook.OfflineFor == 0 || d.absence != nil {
		return true, nil
	}
	since, err := w.m.opt.Store.Reported(w.ctx, w.hook.ID, devices.ID(d.lane))
	if err != nil || since.IsZero() {
		return false, err
	}
	var online struct {
		Time time.Time `json:"time"`
	}
	if err := json.Unmarshal(d.data, &online); err != nil || online.Time.Before(since) {
		return false, nil
	}
	d.absence, d.returned = &OfflineDevice{Device: devices.ID(d.lane), Since: since}, true
	return true, nil
}

// post sends a delivery to the receiver. While the receiver seems to be down there is one attempt at a time.
func (w *worker) post(d *delivery) (pause time.Duration, err error) {
	if w.has(func() bool { return w.failures >= maxFlight }) {
		select {
		case <-w.ctx.Done():
			return 0, w.ctx.Err()
		case w.probe <- struct{}{}:
		}
		defer func() {
			if err != nil {
				clock.Sleep(w.ctx, pause)
				pause = 0
			}
			<-w.probe
		}()
	}
	var gap string
	w.has(func() bool { gap = w.status.Gap; return true })
	begun, at := time.Now(), clock.Now()
	_, err = w.m.sender.send(w.ctx, w.hook.URL, w.key, messageID(w.hook.ID, d.kind, d.data), message{Type: d.kind, Timestamp: at.Truncate(time.Millisecond),
		Webhook: w.hook.ID, Gap: json.RawMessage(gap), Data: d.data})
	if w.ctx.Err() != nil {
		return 0, w.ctx.Err()
	}
	w.m.Time.Observe(time.Since(begun))
	if err != nil {
		w.m.Deliveries.Add(resultFailed, 1)
		return w.fail(begun, err), err
	}
	w.m.Deliveries.Add(resultDelivered, 1)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failures = 0
	if w.status.Gap == gap {
		w.status.Gap = ""
	}
	w.status.Delivered, w.status.DeliveredAt, w.status.FailingSince = w.status.Delivered+1, at, time.Time{}
	return 0, nil
}

// fail records a failure that began at a time, and returns the pause until the next attempt. The pause is as long as the receiver has
// failed, so that one that fails now and then is tried again at once.
func (w *worker) fail(begun time.Time, err error) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.failures == 0 {
		w.failing = begun
	}
	if w.status.FailingSince.IsZero() {
		w.status.FailingSince = clock.Now()
	}
	w.status.LastError = err.Error()
	w.failures++
	w.changedLocked()
	if w.failures == 1 {
		w.m.opt.Log.Warn("a delivery to a webhook failed; trying again", "webhook", w.hook.ID, "error", err)
	}
	if now := clock.Now(); now.Sub(w.status.FailingSince) >= disableAfter && w.failures >= disableAttempts && w.status.DisabledAt.IsZero() {
		w.status.DisabledAt = now
		w.cancel()
	}
	pause := min(max(time.Since(w.failing), retryFirst), retryMost)
	return pause/2 + rand.N(pause/2+1)
}

// scan delivers the absence of devices that have been offline for long enough, by what the database has of them.
func (w *worker) scan() {
	defer w.cancel()
	ticker := time.NewTicker(scanEvery)
	defer ticker.Stop()
	var pruned, all, last time.Time
	for {
		now, before := time.Now(), clock.Now().Add(-w.hook.OfflineFor)
		from := before.Add(-dueKept)
		if first := w.hook.CreatedAt.Add(-w.hook.OfflineFor); from.Before(first) {
			from = first
		}
		full := now.Sub(all) > scanAllEvery
		if late := last.Add(-seenLate); !full && from.Before(late) {
			from = late
		}
		if w.report(from, before) {
			if last = before; full {
				all = now
			}
		}
		if now.Sub(pruned) > pruneEvery && w.m.opt.Store.Prune(w.ctx, w.hook.ID, before.Add(-2*dueKept)) == nil {
			pruned = now
		}
		select {
		case <-w.ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// report delivers the absences that began in a time and were not reported, page by page. It reports whether that was all of them.
func (w *worker) report(from, before time.Time) bool {
	after := OfflineDevice{Since: from}
	for {
		page, err := w.m.opt.Store.Absent(w.ctx, w.hook.ID, after, before, dueMost)
		if err != nil || !w.deliverAll(page) {
			return false
		}
		if len(page) < dueMost {
			return true
		}
		after = page[len(page)-1]
	}
}

// deliverAll returns when those of a page that were not reported are reported or left out; false if the worker ends before.
func (w *worker) deliverAll(page []OfflineDevice) bool {
	finished, waiting := make(chan struct{}, len(page)), 0
	for _, absence := range page {
		if absence.Reported {
			continue
		}
		d, err := w.absent(absence)
		if err != nil {
			return false
		}
		d.finished = func() { finished <- struct{}{} }
		waiting++
		w.put(d)
	}
	for range waiting {
		select {
		case <-w.ctx.Done():
			return false
		case <-finished:
		}
	}
	return true
}

// absent returns the delivery of an absence.
func (w *worker) absent(d OfflineDevice) (*delivery, error) {
	data, err := json.Marshal(struct {
		Device       devices.ID `json:"device"`
		OfflineSince time.Time  `json:"offline_since"`
		OfflineFor   string     `json:"offline_for"`
		Reason       string     `json:"reason"`
	}{d.Device, d.Since.UTC(), w.hook.OfflineFor.String(), d.Reason})
	return &delivery{kind: devices.EventOffline, lane: string(d.Device), data: data, absence: &d, event: &devices.StreamEvent{Kind: devices.EventOffline, Device: d.Device}}, err
}

// changedLocked requests that the status is recorded at once.
func (w *worker) changedLocked() {
	w.changes++
	w.urgent = w.changes
	tasks.Signal(w.m.dirty)
}

// unsaved returns the status, and how many of its changes the database does not have; none if they can wait, unless all are wanted.
func (w *worker) unsaved(all bool) (s Status, changes int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !all && w.urgent <= w.saved {
		return s, 0
	}
	s = w.status
	s.Position = w.position.String()
	return s, w.changes - w.saved
}

// wasSaved notes that the database has this many changes more.
func (w *worker) wasSaved(changes int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.saved += changes
}

// launch starts senders for what has waited until deliveries can be recorded again.
func (w *worker) launch() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.launchLocked()
}
