package events

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/devices"
)

// open starts to read the streams that q needs after q.After, and returns a Gap for each stream whose
// next events were deleted.
func (f *follower) open(ctx context.Context, q devices.EventQuery) (gaps []devices.StreamEvent, err error) {
	ctx, cancel := context.WithTimeout(ctx, setupTimeout)
	defer cancel()
	defer func() {
		for _, s := range f.sources {
			if err != nil && s.messages != nil {
				s.messages.Stop()
			}
			if err != nil && s.consumer != nil {
				f.bus.end(s.stream, s.consumer)
			}
		}
	}()
	for which, kept := range f.bus.streams {
		if !f.bus.mayHave(kept, q) {
			continue
		}
		s := &source{which: devices.EventStream(which), taken: make(chan struct{}, 1), replaced: kept.replacement()}
		if s.stream, err = kept.js.Stream(ctx, kept.cfg.Name); err != nil {
			return nil, err
		}
		f.sources = append(f.sources, s)
	}
	for _, s := range f.sources {
		cfg := jetstream.OrderedConsumerConfig{FilterSubjects: f.bus.filter(s.which, q), InactiveThreshold: time.Minute}
		gap, err := f.resume(ctx, s, q, &cfg)
		if err != nil {
			return nil, err
		}
		if gap != nil {
			gaps = append(gaps, *gap)
		}
		if s.consumer, err = s.stream.OrderedConsumer(ctx, cfg); err != nil {
			return nil, err
		}
		s.backlog = s.consumer.CachedInfo().NumPending > 0
		if cfg.OptStartTime != nil && !s.backlog { // all that the stream has is older
			f.at[s.which] = s.stream.CachedInfo().State.LastSeq
		}
		if s.messages, err = s.consumer.Messages(jetstream.PullMaxMessages(64)); err != nil {
			return nil, err
		}
	}
	return gaps, nil
}

// mayHave reports whether a stream may have events that q selects.
func (b *Bus) mayHave(s *stream, q devices.EventQuery) bool {
	return (q.Kind == "" || b.streamOf(q.Kind) == s) && !(q.NoJobs && s == b.streams[devices.JobsStream])
}

// resume decides where to start in one stream.
func (f *follower) resume(ctx context.Context, s *source, q devices.EventQuery, cfg *jetstream.OrderedConsumerConfig) (*devices.StreamEvent, error) {
	state := s.stream.CachedInfo().State
	begin := max(s.stream.CachedInfo().Config.FirstSeq, 1)
	first, seq := max(state.FirstSeq, begin), q.After[s.which]
	cfg.DeliverPolicy = jetstream.DeliverByStartSequencePolicy
	fresh := q.After == devices.EventPosition{}
	switch {
	case fresh && q.FromStart:
		seq = begin - 1
	case fresh && !q.Since.IsZero():
		cfg.DeliverPolicy, cfg.OptStartTime = jetstream.DeliverByStartTimePolicy, &q.Since
		return nil, nil
	case fresh: // new events only
		seq = state.LastSeq
	case seq == 0: // the position is in another stream
		at, err := f.timeOf(ctx, q.After)
		if err != nil {
			return nil, err
		}
		if !at.IsZero() && (state.Msgs == 0 || !at.Before(state.FirstTime)) {
			at = at.Add(1)
			cfg.DeliverPolicy, cfg.OptStartTime = jetstream.DeliverByStartTimePolicy, &at
			return nil, nil
		}
		seq = begin - 1
	case seq > state.LastSeq: // of a stream that was lost
		return f.gap(s, cfg, begin, first-1), nil
	}
	if seq+1 < first {
		return f.gap(s, cfg, seq+1, first-1), nil
	}
	f.at[s.which], cfg.OptStartSeq = seq, seq+1
	return nil, nil
}

// gap starts at the first existing event.
func (f *follower) gap(s *source, cfg *jetstream.OrderedConsumerConfig, from, to uint64) *devices.StreamEvent {
	f.at[s.which], cfg.OptStartSeq = to, to+1
	return &devices.StreamEvent{Gap: true, ID: f.at, Stream: s.which, Data: json.RawMessage(fmt.Sprintf(`{"stream":%q,"from":%d,"to":%d}`, s.which, from, to))}
}

// timeOf returns the time of the newest event of a position, zero if the events were deleted.
func (f *follower) timeOf(ctx context.Context, p devices.EventPosition) (at time.Time, err error) {
	for which, seq := range p {
		if seq == 0 {
			continue
		}
		stream, err := f.bus.streams[which].js.Stream(ctx, f.bus.streams[which].cfg.Name)
		if err != nil {
			return at, err
		}
		msg, err := stream.GetMsg(ctx, seq)
		switch {
		case errors.Is(err, jetstream.ErrMsgNotFound):
		case err != nil:
			return at, err
		case msg.Time.After(at):
			at = msg.Time
		}
	}
	return at, nil
}
