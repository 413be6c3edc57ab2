package events

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/devices"
)

// Times of Erase.
const (
	eraseTime = 30 * time.Second
	eraseWait = 2 * time.Second // for events in the queue
	eraseLook = 10 * time.Millisecond
)

// Erase deletes the stored events of a device, including those that are still queued here.
func (b *Bus) Erase(ctx context.Context, device devices.ID) error {
	ctx, cancel := context.WithTimeout(ctx, eraseTime)
	defer cancel()
	for end := time.Now().Add(eraseWait); time.Now().Before(end) && ctx.Err() == nil && b.waiting() > 0; {
		time.Sleep(eraseLook)
	}
	var errs []error
	for which, s := range b.streams {
		stream, err := s.js.Stream(ctx, s.cfg.Name)
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			continue
		}
		if err == nil {
			err = stream.Purge(ctx, jetstream.WithPurgeSubject(b.opt.Prefix+".devices."+device.Token()+".>"))
		}
		if err == nil && devices.EventStream(which) == devices.JobsStream {
			err = b.eraseTasks(ctx, stream, device)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("delete events of %s from %s: %w", device, s.cfg.Name, err))
		}
	}
	return errors.Join(errs...)
}

// eraseTasks deletes the events of a device's tasks one by one: their subjects do not contain the device.
func (b *Bus) eraseTasks(ctx context.Context, stream jetstream.Stream, device devices.ID) error {
	state := stream.CachedInfo().State
	if state.Msgs == 0 {
		return nil
	}
	var errs []error
	_, _, err := b.between(ctx, stream, devices.JobsStream, devices.EventQuery{Device: device}, state.FirstSeq, state.LastSeq+1, math.MaxInt, func(e *devices.StreamEvent) bool {
		err := stream.DeleteMsg(ctx, e.ID[devices.JobsStream])
		if err != nil && !errors.Is(err, jetstream.ErrMsgNotFound) {
			errs = append(errs, err)
		}
		return false
	})
	return errors.Join(append(errs, err)...)
}

// waiting returns the number of events that no stream has confirmed.
func (b *Bus) waiting() int {
	n := len(b.queue)
	for _, s := range b.streams {
		n += s.js.PublishAsyncPending()
	}
	return n
}
