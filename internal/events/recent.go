package events

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/devices"
)

const (
	recentWindow = 256    // sequences in the first window; each further window is eight times as large
	recentScan   = 20_000 // events read for one answer at most
	recentBatch  = 500    // events of one request
	recentIdle   = 5 * time.Second
)

// Recent returns the last stored events that q selects and keep accepts, at most limit, oldest first. keep may
// change an event. It reads growing windows backwards, so that it reads about as much as it returns while events are
// frequent. It returns CodeUnavailable if NATS does not answer.
func (b *Bus) Recent(ctx context.Context, q devices.EventQuery, limit int, keep func(*devices.StreamEvent) bool) ([]devices.StreamEvent, error) {
	ctx, cancel := context.WithTimeout(ctx, setupTimeout)
	defer cancel()
	if !b.opt.Conn.IsConnected() {
		return nil, unavailable(errors.New("not connected"))
	}
	var found []past
	for which, s := range b.streams {
		if !b.mayHave(s, q) {
			continue
		}
		part, err := b.recent(ctx, devices.EventStream(which), q, limit, keep)
		if err != nil {
			return nil, unavailable(err)
		}
		found = append(found, part...)
	}
	slices.SortStableFunc(found, func(a, b past) int { return a.at.Compare(b.at) })
	found = found[max(0, len(found)-limit):]
	events := make([]devices.StreamEvent, len(found))
	for i, e := range found {
		events[i] = e.StreamEvent
	}
	return events, nil
}

// past is a stored event with its time of storage.
type past struct {
	devices.StreamEvent
	at time.Time
}

// recent is Recent for one stream.
func (b *Bus) recent(ctx context.Context, which devices.EventStream, q devices.EventQuery, limit int, keep func(*devices.StreamEvent) bool) ([]past, error) {
	kept := b.streams[which]
	stream, err := kept.js.Stream(ctx, kept.cfg.Name)
	if err != nil {
		return nil, err
	}
	state := stream.CachedInfo().State
	var found []past
	end, scanned := state.LastSeq+1, 0
	for window := uint64(recentWindow); end > state.FirstSeq && state.Msgs > 0 && len(found) < limit && scanned < recentScan; window *= 8 {
		begin := max(end-min(window, end), state.FirstSeq, 1)
		part, read, err := b.between(ctx, stream, which, q, begin, end, recentScan-scanned, keep)
		if err != nil {
			return nil, err
		}
		scanned += read
		found = append(part, found...)
		end = begin
	}
	return found[max(0, len(found)-limit):], nil
}

// between reads the events of [begin, end).
func (b *Bus) between(ctx context.Context, stream jetstream.Stream, which devices.EventStream, q devices.EventQuery, begin, end uint64, most int, keep func(*devices.StreamEvent) bool) (found []past, read int, err error) {
	consumer, err := stream.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{FilterSubjects: b.filter(which, q),
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: begin, InactiveThreshold: recentIdle})
	if err != nil {
		return nil, 0, err
	}
	defer b.end(stream, consumer)
	for read < most {
		batch, err := consumer.FetchNoWait(recentBatch)
		if err != nil {
			return nil, read, err
		}
		got := 0
		for msg := range batch.Messages() {
			got++
			msg, err := placed(msg)
			if err != nil {
				return nil, read, err
			}
			if msg.seq >= end {
				return found, read, batch.Error()
			}
			e := past{b.read(msg), msg.at}
			e.ID[which], e.Stream = msg.seq, which
			if selects(q, &e.StreamEvent) && keep(&e.StreamEvent) {
				e.Data = slices.Clone(e.Data)
				found = append(found, e)
			}
		}
		read += got
		if err := batch.Error(); err != nil {
			return nil, read, err
		}
		if got == 0 || ctx.Err() != nil {
			return found, read, ctx.Err()
		}
	}
	return found, read, nil
}
