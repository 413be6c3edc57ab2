package events

import (
	"context"
	"errors"
	"fleetd/internal/counters"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	maxPending   = 2_048           // unacknowledged events of one stream
	ackTimeout   = 5 * time.Second // after which an event counts as lost
	stallWait    = 500 * time.Millisecond
	setupTimeout = 5 * time.Second
	// limitsEvery bounds how often limits that differ are changed: nodes with
	// different flags would otherwise take turns at every look.
	limitsEvery = time.Minute
)

// stream is one JetStream stream: made, looked after, and published to.
//
// It never stops publishing. While acknowledgements are missing, events go out
// without asking for one, so that subscribers have them, and the stream as
// soon as it is back.
type stream struct {
	cfg     jetstream.StreamConfig
	conn    *nats.Conn
	js      jetstream.JetStream // has the pending acknowledgements of this stream alone
	dropped *counters.Map[string]
	log     *slog.Logger
	wake    func() // requests a look at the stream

	stalled atomic.Bool  // nothing was acknowledged while maxPending events waited
	good    atomic.Int64 // last sign that events are kept, in Unix nanoseconds
	unkept  atomic.Bool  // events published since then were not acknowledged

	mu        sync.Mutex
	fault     error // of the last look
	last      *jetstream.StreamInfo
	doubted   bool          // unkept at the last look
	corrected time.Time     // when limits were last changed
	replaced  chan struct{} // closed when the stream is another one: sequences begin anew
}

func newStream(cfg jetstream.StreamConfig, opt Options, dropped *counters.Map[string], wake func()) (*stream, error) {
	s := &stream{cfg: cfg, conn: opt.Conn, dropped: dropped, log: opt.Log.With("stream", cfg.Name), wake: wake, replaced: make(chan struct{})}
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
	s.dropped.Add(DropNoAck, 1) // the stream may keep it, unconfirmed
	return s.conn.PublishMsg(msg)
}

// kept notes a sign that the stream keeps events.
func (s *stream) kept() {
	s.good.Store(time.Now().UnixNano())
	s.stalled.Store(false)
	if s.unkept.Load() {
		s.unkept.Store(false)
	}
}

// lost notes what became of an event that was not acknowledged.
func (s *stream) lost(err error) {
	switch {
	case errors.Is(err, nats.ErrDisconnected):
		s.dropped.Add(DropAway, 1)
		return // the stream has no part in it
	case errors.Is(err, jetstream.ErrNoStreamResponse):
		s.dropped.Add(DropNoStream, 1)
	case errors.Is(err, jetstream.ErrAsyncPublishTimeout):
		s.dropped.Add(DropNoAck, 1)
	default:
		s.dropped.Add(DropStream, 1)
	}
	// The event is as old as the timeout at most: a younger sign that the
	// stream keeps events makes this one void.
	if time.Since(time.Unix(0, s.good.Load())) > ackTimeout {
		s.unkept.Store(true)
	}
	s.wake()
}

// ready returns why events of this stream are not kept, and what to do.
func (s *stream) ready() error {
	s.mu.Lock()
	fault := s.fault
	s.mu.Unlock()
	if fault == nil && s.unkept.Load() {
		return fmt.Errorf("stream %s does not confirm that it keeps events: see the log of the NATS server; "+
			"after a full disk, free space and restart the NATS server", s.cfg.Name)
	}
	return fault
}

// look makes the stream if it is missing, and brings it in line with this
// node's settings. It fails if events cannot be kept.
func (s *stream) look(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, setupTimeout)
	defer cancel()
	current, err := s.js.Stream(ctx, s.cfg.Name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		if current, err = s.js.CreateStream(ctx, s.cfg); err == nil {
			s.log.Info("event stream made")
		}
	}
	if err == nil {
		err = s.align(ctx, current.CachedInfo().Config)
	}
	if ctx.Err() != nil && errors.Is(context.Cause(ctx), context.Canceled) {
		return nil // this node stops
	}
	if err != nil {
		err = s.explain(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if (err == nil) != (s.fault == nil) || err != nil && err.Error() != s.fault.Error() {
		if err != nil {
			s.log.Warn("events are not kept", "error", err)
		} else {
			s.log.Info("events can be kept again")
		}
	}
	if s.fault = err; err == nil {
		s.compare(current.CachedInfo())
	}
	return err
}

// align changes what differs from this node's settings, and leaves alone what
// fleetd has no setting for, such as placement and compression.
func (s *stream) align(ctx context.Context, cfg jetstream.StreamConfig) error {
	narrow := !sameSubjects(cfg.Subjects, s.cfg.Subjects)
	limits := cfg.MaxAge != s.cfg.MaxAge || cfg.MaxBytes != s.cfg.MaxBytes || cfg.Replicas != s.cfg.Replicas ||
		cfg.Duplicates != s.cfg.Duplicates || cfg.Discard != s.cfg.Discard
	if !narrow && (!limits || time.Since(s.corrected) < limitsEvery) {
		return nil
	}
	s.corrected = time.Now()
	cfg.Subjects, cfg.MaxAge, cfg.MaxBytes, cfg.Replicas = s.cfg.Subjects, s.cfg.MaxAge, s.cfg.MaxBytes, s.cfg.Replicas
	cfg.Duplicates, cfg.Discard, cfg.Description = s.cfg.Duplicates, s.cfg.Discard, s.cfg.Description
	_, err := s.js.UpdateStream(ctx, cfg)
	switch {
	case err == nil:
		s.log.Info("event stream changed to this node's settings; give all nodes the same")
	case !narrow:
		s.log.Warn("event stream keeps other limits than this node's settings", "error", err)
		err = nil // events are kept nevertheless
	}
	return err
}

func sameSubjects(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

// compare draws conclusions from two looks: whether it is still the same
// stream, and whether any node's events were kept since. The lock is held.
func (s *stream) compare(now *jetstream.StreamInfo) {
	before := s.last
	s.last = now
	switch {
	case before == nil:
		s.kept() // what was lost before there was a stream does not count
	case !now.Created.Equal(before.Created) || now.State.LastSeq < before.State.LastSeq:
		close(s.replaced)
		s.replaced = make(chan struct{})
		s.kept()
	case s.doubted && now.State.LastSeq > before.State.LastSeq:
		s.kept() // if only those of other nodes
	}
	s.doubted = s.unkept.Load()
}

// replacement returns a channel that is closed when the stream is another one.
func (s *stream) replacement() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.replaced
}

// explain has what is wrong and what to do, for people.
func (s *stream) explain(err error) error {
	switch {
	case errors.Is(err, jetstream.ErrJetStreamNotEnabled), errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount):
		return errors.New("NATS has no JetStream, or not for this account: enable it; if it is enabled, see the log of the NATS server and its disk")
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, nats.ErrTimeout), errors.Is(err, nats.ErrNoResponders):
		return fmt.Errorf("JetStream does not answer for stream %s: see the log of the NATS server", s.cfg.Name)
	}
	return fmt.Errorf("stream %s cannot be made: %w; see the log of the NATS server and its disk", s.cfg.Name, err)
}
