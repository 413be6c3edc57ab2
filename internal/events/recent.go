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
	recentWindow = 256    // sequences looked back over first; eight times as many each further time
	recentScan   = 20_000 // events read for one answer
	recentBatch  = 500    // of one request
	recentIdle   = 5 * time.Second
)

// Recent returns the last stored events that q selects and keep accepts, at
// most limit, oldest first. It looks back in growing windows, so that it reads
// about as much as it returns while the events are frequent. It fails with
// CodeUnavailable if NATS does not answer.
func (b *Bus) Recent(ctx context.Context, q devices.EventQuery, limit int, keep func(devices.StreamEvent) bool) ([]devices.StreamEvent, error) {
	ctx, cancel := context.WithTimeout(ctx, setupTimeout)
	defer cancel()
	if !b.opt.Conn.IsConnected() {
		return nil, unavailable(errors.New("not connected"))
	}
	stream, err := b.stream.js.Stream(ctx, b.stream.cfg.Name)
	if err != nil {
		return nil, unavailable(err)
	}
	state := stream.CachedInfo().State
	var found []devices.StreamEvent
	end, scanned := state.LastSeq+1, 0
	for window := uint64(recentWindow); end > state.FirstSeq && state.Msgs > 0 && len(found) < limit && scanned < recentScan; window *= 8 {
		begin := max(end-min(window, end), state.FirstSeq, 1)
		part, read, err := b.between(ctx, stream, q, begin, end, recentScan-scanned, keep)
		if err != nil {
			return nil, unavailable(err)
		}
		scanned += read
		found = append(part, found...)
		end = begin
	}
	return found[max(0, len(found)-limit):], nil
}

// between reads the events of [begin, end).
func (b *Bus) between(ctx context.Context, stream jetstream.Stream, q devices.EventQuery, begin, end uint64, most int, keep func(devices.StreamEvent) bool) (found []devices.StreamEvent, read int, err error) {
	consumer, err := stream.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{FilterSubjects: b.filter(q),
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: begin, InactiveThreshold: recentIdle})
	if err != nil {
		return nil, 0, err
	}
	defer func() {
		if info := consumer.CachedInfo(); info != nil {
			_ = stream.DeleteConsumer(context.WithoutCancel(ctx), info.Name) // it goes by itself, but later
		}
	}()
	for read < most {
		batch, err := consumer.FetchNoWait(recentBatch)
		if err != nil {
			return nil, read, err
		}
		got := 0
		for msg := range batch.Messages() {
			got++
			meta, err := msg.Metadata()
			if err != nil {
				return nil, read, err
			}
			if meta.Sequence.Stream >= end {
				return found, read, batch.Error()
			}
			if e := b.read(msg, meta.Sequence.Stream); keep(e) {
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
