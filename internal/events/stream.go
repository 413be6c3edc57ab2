package events

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/clock"
	"fleetd/internal/counters"
	"fleetd/internal/devices"
)

const (
	maxPending   = 2_048           // unacknowledged events of one stream
	ackTimeout   = 5 * time.Second // after which an event counts as lost
	stallWait    = 500 * time.Millisecond
	setupTimeout = 5 * time.Second
	// limitsEvery is how often the other nodes are asked for their limits, while those of the stream differ from this
	// node's settings.
	limitsEvery = time.Minute
)

// stream is one JetStream stream: it is created, checked, and published to.
//
// It never stops publishing. While acknowledgements are missing, events are sent without requesting one,
// so that subscribers receive them, and the stream as soon as it is back.
type stream struct {
	cfg     jetstream.StreamConfig
	root    string // which its subjects begin with
	conn    *nats.Conn
	js      jetstream.JetStream // has only the pending acknowledgements of this stream
	dropped *counters.Map[string]
	log     *slog.Logger
	wake    func() // requests a check of the stream

	firstSequence func() uint64 // Options.FirstSequence
	window        time.Duration // of duplicates, at most

	stalled atomic.Bool  // maxPending events wait, and none was acknowledged
	good    atomic.Int64 // last confirmation that events are stored, as clock.Reading
	unkept  atomic.Bool  // events published since then were not acknowledged

	mu       sync.Mutex
	fault    error // result of the last check
	last     *jetstream.StreamInfo
	doubted  bool          // unkept at the last check
	asked    time.Time     // when the other nodes were last asked for their limits
	replaced chan struct{} // closed when the stream is another one: sequences start again
}

// limitsOf returns the limits of a stream.
func limitsOf(cfg *jetstream.StreamConfig) devices.StreamLimits {
	return devices.StreamLimits{MaxAge: cfg.MaxAge, MaxBytes: cfg.MaxBytes, Replicas: cfg.Replicas}
}

func newStream(cfg jetstream.StreamConfig, opt Options, dropped *counters.Map[string], wake func()) (*stream, error) {
	s := &stream{cfg: cfg, root: opt.Prefix + ".", conn: opt.Conn, dropped: dropped, log: opt.Log.With("stream", cfg.Name), wake: wake, firstSequence: opt.FirstSequence, window: cfg.Duplicates, fault: errNotOpen, replaced: make(chan struct{})}
	s.cfg.Duplicates = min(s.window, cfg.MaxAge)
	var err error
	s.js, err = jetstream.New(opt.Conn, jetstream.WithPublishAsyncMaxPending(maxPending), jetstream.WithPublishAsyncTimeout(ackTimeout),
		jetstream.WithPublishAsyncAckHandler(func(jetstream.JetStream, *nats.Msg, *jetstream.PubAck) { s.kept() }),
		jetstream.WithPublishAsyncErrHandler(func(_ jetstream.JetStream, _ *nats.Msg, err error) { s.lost(err) }))
	return s, err
}

// publish sends one event.
func (s *stream) publish(msg *nats.Msg) error {
	if !s.stalled.Load() || s.js.PublishAsyncPending() < maxPending {
		_, err := s.js.PublishMsgAsync(msg, jetstream.WithStallWait(stallWait))
		if !errors.Is(err, jetstream.ErrTooManyStalledMsgs) {
			return err
		}
		s.stalled.Store(true)
	}
	s.dropped.Add(DropNoAck, 1) // the stream may store it, unconfirmed
	return s.conn.PublishMsg(msg)
}

// kept records a confirmation that the stream stores events.
func (s *stream) kept() {
	s.good.Store(clock.Reading(time.Now()))
	s.stalled.Store(false)
	if s.unkept.Load() {
		s.unkept.Store(false)
	}
}

// lost records the outcome of an event that was not acknowledged.
func (s *stream) lost(err error) {
	switch {
	case errors.Is(err, nats.ErrDisconnected):
		s.dropped.Add(DropAway, 1)
		return // the stream is not the cause
	case errors.Is(err, jetstream.ErrNoStreamResponse):
		s.dropped.Add(DropNoStream, 1)
	case errors.Is(err, jetstream.ErrAsyncPublishTimeout):
		s.dropped.Add(DropNoAck, 1)
	default:
		s.dropped.Add(DropStream, 1)
	}
	// The event is at most as old as the timeout: a newer confirmation supersedes it.
	if clock.Reading(time.Now())-s.good.Load() > int64(ackTimeout) {
		s.unkept.Store(true)
	}
	s.wake()
}

// ready returns why events of this stream are not stored, and what to do.
func (s *stream) ready() error {
	s.mu.Lock()
	fault := s.fault
	s.mu.Unlock()
	if fault == nil && s.unkept.Load() {
		return fmt.Errorf("stream %s does not confirm that it stores events: see the log of the NATS server; "+
			"after a full disk, free space and restart the NATS server", s.cfg.Name)
	}
	return fault
}

// errNotOpen is why a node that has not been accepted stores no events.
var errNotOpen = errors.New("this node has not found out yet whether it belongs to the fleet of these streams: the database must accept it, and the other nodes must answer")

// look creates the stream if it is missing, and updates it to the settings of the nodes. It fails if events
// cannot be stored.
func (s *stream) look(ctx context.Context, others devices.OthersLimits) error {
	ctx, cancel := context.WithTimeout(ctx, setupTimeout)
	defer cancel()
	current, err := s.js.Stream(ctx, s.cfg.Name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		cfg := s.cfg
		if s.firstSequence != nil {
			cfg.FirstSeq = s.firstSequence()
		}
		if current, err = s.js.CreateStream(ctx, cfg); err == nil {
			s.log.Info("event stream created")
		} else if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) { // another node was faster
			current, err = s.js.Stream(ctx, s.cfg.Name)
		}
	}
	if err == nil {
		err = s.align(ctx, current.CachedInfo().Config, others)
	}
	if ctx.Err() != nil && errors.Is(context.Cause(ctx), context.Canceled) {
		return nil // this node is stopping
	}
	if err != nil {
		err = s.explain(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err != nil && (s.fault == nil || err.Error() != s.fault.Error()):
		s.log.Warn("events are not stored", "error", err)
	case err == nil && s.fault != nil && !errors.Is(s.fault, errNotOpen):
		s.log.Info("events are stored again")
	}
	if s.fault = err; err == nil {
		s.compare(current.CachedInfo())
	}
	return err
}

// SequenceOfTime is Options.FirstSequence of a node. The first sequence of a stream is higher than any of a stream that was
// lost before, unless more than a thousand events a second went through that one. A position in the lost stream is then not
// taken for one in this stream, whose first events its reader would miss.
func SequenceOfTime() uint64 { return uint64(clock.Now().UnixMilli()) }

// align changes what differs from the settings of the nodes, except properties that fleetd has no setting for, such as
// placement and compression.
func (s *stream) align(ctx context.Context, cfg jetstream.StreamConfig, others devices.OthersLimits) error {
	narrow := !sameSubjects(cfg.Subjects, s.cfg.Subjects)
	if narrow && len(cfg.Subjects) > 0 && !strings.HasPrefix(cfg.Subjects[0], s.root) { // StreamName is the same for a.b, a_b and A.B
		return fmt.Errorf("%w: its subjects begin with %s; set a --nats-prefix that differs in more than case, dots and underscores", errForeign, cfg.Subjects[0])
	}
	differ := limitsOf(&cfg) != limitsOf(&s.cfg) || cfg.Duplicates != s.cfg.Duplicates || cfg.Discard != s.cfg.Discard
	if !narrow && (!differ || time.Since(s.asked) < limitsEvery) {
		return nil
	}
	s.asked = time.Now()
	present, duplicates := limitsOf(&cfg), cfg.Duplicates
	want := others.Agreed(ctx, cfg.Name, limitsOf(&s.cfg), present)
	window := min(s.window, want.MaxAge)
	if !narrow && want == present && duplicates == window && cfg.Discard == s.cfg.Discard {
		return nil
	}
	cfg.Subjects, cfg.MaxAge, cfg.MaxBytes, cfg.Replicas = s.cfg.Subjects, want.MaxAge, want.MaxBytes, want.Replicas
	cfg.Duplicates, cfg.Discard, cfg.Description = window, s.cfg.Discard, s.cfg.Description
	_, err := s.js.UpdateStream(ctx, cfg)
	switch {
	case err == nil:
		s.log.Info("event stream updated to the largest limits of the nodes", "max_age", want.MaxAge, "max_bytes", want.MaxBytes, "replicas", want.Replicas)
	case !narrow:
		s.log.Warn("event stream has other limits than this node's settings", "error", err)
		err = nil // events are stored nevertheless
	}
	return err
}

var errForeign = errors.New("it belongs to a fleet with another --nats-prefix")

func sameSubjects(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

// compare compares two checks: whether it is still the same stream, and whether events of any node were
// stored meanwhile. The caller holds the lock.
func (s *stream) compare(now *jetstream.StreamInfo) {
	before := s.last
	s.last = now
	switch {
	case before == nil:
		s.kept() // losses before the stream existed do not count
	case !now.Created.Equal(before.Created) || now.State.LastSeq < before.State.LastSeq:
		close(s.replaced)
		s.replaced = make(chan struct{})
		s.kept()
	case s.doubted && now.State.LastSeq > before.State.LastSeq:
		s.kept() // even if only those of other nodes
	}
	s.doubted = s.unkept.Load()
}

// replacement returns a channel that is closed when the stream is another one.
func (s *stream) replacement() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.replaced
}

// explain returns an error with the cause and what to do.
func (s *stream) explain(err error) error {
	switch {
	case errors.Is(err, jetstream.ErrJetStreamNotEnabled), errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount):
		return errors.New("JetStream is not enabled in NATS, or not for this account: enable it; if it is enabled, see the log of the NATS server and its disk")
	case errors.Is(err, errForeign):
		return fmt.Errorf("stream %s cannot be used: %w", s.cfg.Name, err)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, nats.ErrTimeout), errors.Is(err, nats.ErrNoResponders):
		return fmt.Errorf("JetStream does not answer for stream %s: see the log of the NATS server", s.cfg.Name)
	}
	return fmt.Errorf("stream %s cannot be created: %w; see the log of the NATS server and its disk", s.cfg.Name, err)
}
