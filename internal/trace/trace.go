// Package trace shows the messages between a device and the node that holds it, and what is
// recorded of it, while somebody reads that.
//
// A trace is a lease that its reader renews on all nodes; so it survives the device's
// reconnects and changes of node. The node that holds the device publishes entries on NATS,
// from where the reader's node takes them. Without a trace, a message costs one atomic load.
package trace

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/counters"
	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
	"fleetd/internal/timescale"
)

// Question is the kind of the messages to other nodes.
const Question = "trace"

// Limits of traces.
const (
	// MaxTraces is how many there are at once in the fleet; each node has all of them. Keys have shares of it (access.Share).
	MaxTraces = 30
	// MaxTime is the longest that one lasts.
	MaxTime = 24 * time.Hour
	// MaxPayload is how many bytes of a message an entry has.
	MaxPayload = 1 << 10
	// entryRate and entryBurst bound the entries of one trace, in a second and at once; maxQueue
	// those that wait to be published. An entry has 2 KiB at most.
	entryRate, entryBurst = 200, 1000
	maxQueue              = 512
	// maxEnded is how many traces a node remembers to be over.
	maxEnded = 1000
)

var (
	// leaseTime is how long a trace goes on without a reader.
	leaseTime = timescale.Of(30 * time.Second)
	// renewTime is how often a reader renews it.
	renewTime = leaseTime / 3
)

// Options of a Tracer.
type Options struct {
	Node string
	// Nodes returns the names of the live nodes, this one included.
	Nodes  func() []string
	Gather devices.Gather
	// Publish sends an entry to the readers of a device on all nodes.
	Publish func(device devices.ID, entry []byte) error
	// Subscribe calls deliver with the entries of a device, from one goroutine, until stop
	// is called. Entries that deliver is too slow for are lost.
	Subscribe func(device devices.ID, deliver func(entry []byte)) (stop func(), err error)
	// Holder tells whose key started a trace.
	Holder func(key string) access.Holder
	Log    *slog.Logger
}

// lease is a trace on the wire between nodes.
type lease struct {
	ID      string        `json:"id"`
	Device  devices.ID    `json:"device"`
	Owner   string        `json:"owner,omitempty"` // id of the key that started it
	Payload bool          `json:"payload,omitempty"`
	Until   time.Time     `json:"-"`    // by this node's clocks
	Left    time.Duration `json:"left"` // until then: nodes send each other no times, since their clocks differ
	Ended   bool          `json:"ended,omitempty"`
	Renewed bool          `json:"renewed,omitempty"` // it runs already, so that its share was judged
}

// over returns the message that ends the trace.
func (l lease) over() lease {
	l.Ended = true
	return l
}

// verdict is the answer of a node to a trace, on the wire.
type verdict struct {
	// Over: it was ended, or replaced. Full: there are MaxTraces others, or as many of its owner as its share is.
	Over bool `json:"over,omitempty"`
	Full bool `json:"full,omitempty"`
}

func (l lease) wire(missing []string) api.Trace {
	if missing == nil {
		missing = []string{}
	}
	return api.Trace{ID: l.ID, Device: string(l.Device), Payload: l.Payload, ExpiresAt: api.At(l.Until), Missing: missing}
}

// Tracer has the traces of the fleet. It is safe for concurrent use.
type Tracer struct {
	opt Options

	mu sync.Mutex
	// active is replaced as a whole; nil while there are none.
	active atomic.Pointer[map[devices.ID]*target]
	// ended are traces that were ended or replaced before their time, which is kept: a reader that renews one does not
	// begin it again.
	ended  map[string]time.Time
	closed bool
	tasks  sync.WaitGroup

	// Entries counts entries published, Dropped those that were too many.
	Entries, Dropped atomic.Uint64
}

// target is a traced device.
type target struct {
	lease   lease
	rate    *rate.Limiter
	queue   chan []byte
	end     chan struct{}
	dropped atomic.Uint64 // since the last entry
	ends    time.Time     // of the lease
	readers int           // on this node: with one, a lease that was renewed too late goes on
	timer   *time.Timer
}

// New returns a Tracer; Close stops it.
func New(opt Options) *Tracer {
	return &Tracer{opt: opt, ended: map[string]time.Time{}}
}

// Metrics registers the tracer's metrics.
func (t *Tracer) Metrics(r *counters.Registry) {
	counters.Value(r.Gauge("traces", "Traces of devices that are running in the fleet, by the leases on this node."), func() int64 { return int64(len(t.targets())) })
	counters.Value(r.Counter("trace_entries_total", "Entries of traces that this node published."), t.Entries.Load)
	counters.Value(r.Counter("trace_dropped_total", "Entries of traces left out because a device had more than 200 a second."), t.Dropped.Load)
}

func (t *Tracer) targets() map[devices.ID]*target {
	if m := t.active.Load(); m != nil {
		return *m
	}
	return nil
}

// Start begins a trace as the key owner. It ends after this time at the latest, and leaseTime after Follow returned. replaces is
// the id of the device's trace that it ends, as Get returned it: the caller has seen whose that is. Errors are *devices.Error.
func (t *Tracer) Start(ctx context.Context, device devices.ID, replaces, owner string, payload bool, lasts time.Duration) (api.Trace, error) {
	if lasts < time.Second || lasts > MaxTime {
		return api.Trace{}, devices.Errorf(devices.CodeBadRequest, "a trace lasts from 1s to %v", MaxTime)
	}
	l := lease{ID: strings.ToLower(rand.Text()[:16]), Device: device, Owner: owner, Payload: payload, Until: time.Now().Add(lasts)}
	t.mu.Lock()
	if x := t.targets()[device]; x != nil && x.lease.ID != replaces {
		t.mu.Unlock()
		return api.Trace{}, devices.Errorf(devices.CodeConflict, "another trace of the device was started at the same moment; read that one, or try again to replace it")
	}
	answer := t.applyLocked(l)
	t.mu.Unlock()
	var missing []string
	if !answer.Full {
		answer, missing = t.share(ctx, l)
	}
	if answer.Full {
		t.end(ctx, l)
		return api.Trace{}, devices.LimitReached("traces", MaxTraces)
	}
	return l.wire(missing), nil
}

// Get returns the trace of a device, and the id of the key that started it.
func (t *Tracer) Get(device devices.ID) (running api.Trace, owner string, ok bool) {
	x := t.targets()[device]
	if x == nil {
		return api.Trace{}, "", false
	}
	return x.lease.wire(nil), x.lease.Owner, true
}

// End ends a trace that Get returned; false if it is over.
func (t *Tracer) End(ctx context.Context, running api.Trace) bool {
	x := t.targets()[devices.ID(running.Device)]
	if x == nil || x.lease.ID != running.ID {
		return false
	}
	t.end(ctx, x.lease)
	return true
}

func (t *Tracer) end(ctx context.Context, l lease) {
	t.apply(l.over())
	t.share(ctx, l.over())
}

// Follow delivers the entries of a trace that Get returned, and keeps it running, until ctx or the trace ends, or
// deliver fails, whose error it returns. It delivers nothing of another trace of the device, which may show more.
func (t *Tracer) Follow(ctx context.Context, running api.Trace, deliver func(entry []byte) error) error {
	device := devices.ID(running.Device)
	x := t.begin(device, running.ID)
	if x == nil {
		return devices.Errorf(devices.CodeNotFound, "the device is not traced; start a trace with POST")
	}
	defer t.leave(x)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	failed := make(chan error, 1)
	stop, err := t.opt.Subscribe(device, func(entry []byte) {
		if id, _ := jsonspan.String(jsonspan.Member(entry, "trace")); id != running.ID {
			return
		}
		if err := deliver(entry); err != nil {
			select {
			case failed <- err:
			default: // the first one is enough
			}
		}
	})
	if err != nil {
		return devices.Errorf(devices.CodeUnavailable, "entries of traces come over NATS, which cannot be reached: %v", err)
	}
	defer stop()
	renew := time.NewTicker(renewTime)
	defer renew.Stop()
	for {
		if t.targets()[device] != x {
			return nil
		}
		if t.opt.Holder(x.lease.Owner).Ended {
			t.end(ctx, x.lease)
			return nil
		}
		t.apply(x.lease)
		renewed := x.lease
		renewed.Renewed = true
		if answer, _ := t.share(ctx, renewed); answer.Over {
			t.apply(x.lease.over())
			return nil
		}
		select {
		case <-x.end:
		case <-renew.C:
		case err := <-failed:
			return err
		case <-ctx.Done():
			return nil
		}
	}
}

// begin counts a reader of a trace, which it returns; nil if that is over.
func (t *Tracer) begin(device devices.ID, id string) *target {
	t.mu.Lock()
	defer t.mu.Unlock()
	x := t.targets()[device]
	if x == nil || x.lease.ID != id {
		return nil
	}
	x.readers++
	return x
}

func (t *Tracer) leave(x *target) {
	t.mu.Lock()
	defer t.mu.Unlock()
	x.readers--
}

// share sends a trace to the other nodes. It returns their answers, all together, and those that did not answer.
func (t *Tracer) share(ctx context.Context, l lease) (all verdict, missing []string) {
	l.Left = time.Until(l.Until)
	question, err := json.Marshal(l)
	if err != nil {
		t.opt.Log.Error("a trace cannot be encoded", "error", err)
		return verdict{}, nil
	}
	answers, missing := t.opt.Gather(ctx, Question, question, t.opt.Nodes())
	for node, data := range answers {
		var one verdict
		if err := json.Unmarshal(data, &one); err != nil {
			t.opt.Log.Warn("a node's answer to a trace cannot be read", "node", node, "error", err)
		}
		all.Over, all.Full = all.Over || one.Over, all.Full || one.Full
	}
	return all, missing
}

// Answer takes a trace from another node.
func (t *Tracer) Answer(_ context.Context, data []byte) ([]byte, error) {
	var l lease
	if err := json.Unmarshal(data, &l); err != nil {
		return nil, fmt.Errorf("read the trace: %w", err)
	}
	l.Until = time.Now().Add(l.Left)
	return json.Marshal(t.apply(l))
}

// apply begins, renews or ends a trace on this node.
func (t *Tracer) apply(l lease) verdict {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.applyLocked(l)
}

func (t *Tracer) applyLocked(l lease) verdict {
	now := time.Now()
	x := t.targets()[l.Device]
	switch {
	case t.closed:
		return verdict{}
	case l.Ended:
		t.endLocked(l, now)
		if x != nil && x.lease.ID == l.ID {
			t.removeLocked(x)
		}
		return verdict{}
	case !l.Until.After(now):
		return verdict{}
	case !t.ended[l.ID].IsZero():
		return verdict{Over: true}
	case x != nil && x.lease.ID == l.ID:
		x.ends = now.Add(leaseTime)
		return verdict{}
	case !t.fitsLocked(l):
		return verdict{Full: true}
	}
	if x != nil {
		t.endLocked(x.lease, now)
		t.removeLocked(x)
	}
	x = &target{lease: l, rate: rate.NewLimiter(entryRate, entryBurst), queue: make(chan []byte, maxQueue), end: make(chan struct{}), ends: now.Add(leaseTime)}
	next := maps.Clone(t.targets())
	if next == nil {
		next = map[devices.ID]*target{}
	}
	next[l.Device] = x
	t.active.Store(&next)
	x.timer = time.AfterFunc(min(leaseTime, time.Until(l.Until)), func() { t.expire(x) })
	t.tasks.Go(func() { t.publish(x) })
	return verdict{}
}

// fitsLocked reports whether a trace that this node does not have fits the limit and the share of its owner, without the trace
// that it replaces.
func (t *Tracer) fitsLocked(l lease) bool {
	held := map[string]int64{}
	for device, x := range t.targets() {
		switch {
		case device != l.Device:
			held[x.lease.Owner]++
		case x.lease.Owner == l.Owner: // it keeps its place
			return true
		}
	}
	if l.Renewed {
		return len(t.targets()) < MaxTraces
	}
	return access.Share(MaxTraces, held, l.Owner, t.opt.Holder) > 0
}

// endLocked notes that a trace is over, until it would have been without that. With maxEnded noted, the one goes that
// ends next.
func (t *Tracer) endLocked(l lease, now time.Time) {
	t.ended[l.ID] = l.Until
	if len(t.ended) <= maxEnded {
		return
	}
	maps.DeleteFunc(t.ended, func(_ string, until time.Time) bool { return !until.After(now) })
	if len(t.ended) > maxEnded {
		next := l.ID
		for id, until := range t.ended {
			if until.Before(t.ended[next]) {
				next = id
			}
		}
		delete(t.ended, next)
	}
}

// expire ends a trace whose lease or time is over.
func (t *Tracer) expire(x *target) {
	t.mu.Lock()
	defer t.mu.Unlock()
	left := time.Until(x.ends)
	if x.readers > 0 {
		left = max(left, renewTime)
	}
	left = min(left, time.Until(x.lease.Until))
	if t.opt.Holder(x.lease.Owner).Ended {
		left = 0
	}
	switch {
	case t.targets()[x.lease.Device] != x:
	case left > 0:
		x.timer.Reset(left)
	default:
		t.removeLocked(x)
	}
}

func (t *Tracer) removeLocked(x *target) {
	x.timer.Stop()
	close(x.end)
	next := maps.Clone(t.targets())
	delete(next, x.lease.Device)
	if len(next) == 0 {
		t.active.Store(nil)
		return
	}
	t.active.Store(&next)
}

// Close ends all traces on this node, and waits for their tasks.
func (t *Tracer) Close() {
	t.mu.Lock()
	t.closed = true
	for _, x := range t.targets() {
		t.removeLocked(x)
	}
	t.mu.Unlock()
	t.tasks.Wait()
}

// publish sends the entries of a trace until it ends.
func (t *Tracer) publish(x *target) {
	for {
		select {
		case <-x.end:
			return
		case entry := <-x.queue:
			if err := t.opt.Publish(x.lease.Device, entry); err != nil {
				t.drop(x)
				continue
			}
			t.Entries.Add(1)
		}
	}
}

func (t *Tracer) drop(x *target) {
	x.dropped.Add(1)
	t.Dropped.Add(1)
}
