package vision

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/tasks"
)

// Timing of the index.
const (
	indexTime   = 3 * time.Second // for the row of one photo, before the response to its device
	indexAgain  = 15 * time.Second
	expireEvery = 10 * time.Minute
	indexBatch  = 500 // photos in memory while the index is filled
)

// addToIndex adds a photo to the index. If the database is unreachable, Keep adds it later.
func (s *Server) addToIndex(ctx context.Context, p devices.Photo) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), indexTime)
	defer cancel()
	if err := s.opt.Index.Add(ctx, p); err != nil {
		tasks.Signal(s.missing)
	}
}

// Keep adds stored photos that are missing in the index, from a time
// without the database, and removes those that have aged out, until ctx ends.
func (s *Server) Keep(ctx context.Context) {
	tasks.Signal(s.missing)
	expire := time.NewTicker(expireEvery)
	defer expire.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-expire.C:
			_, _ = s.opt.Index.Expire(ctx, s.expired()) // tried again later; pages leave these photos out
			s.bucket.forget()                           // the nodes may ask for other limits now
			continue
		case <-s.missing:
		}
		if s.fill(ctx) == nil {
			continue
		}
		select { // the database or NATS is unreachable
		case <-ctx.Done():
			return
		case <-time.After(indexAgain):
			tasks.Signal(s.missing)
		}
	}
}

// expired returns the id before which photos have aged out. The id of a snapshot is older
// than the photo.
func (s *Server) expired() string { return idAt(clock.Now().Add(-s.opt.Retention - SnapshotLife)) }

// fill adds every stored photo to the index, and removes entries older than the oldest
// photo.
func (s *Server) fill(ctx context.Context) error {
	o, err := s.bucket.store(ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var batch []devices.Photo
	flush := func() {
		if err == nil && len(batch) > 0 {
			err = s.opt.Index.Add(ctx, batch...)
		}
		if batch = batch[:0]; err != nil {
			cancel()
		}
	}
	oldest := idAt(clock.Now())
	scanErr := s.bucket.scan(ctx, o, func(info *jetstream.ObjectInfo) {
		oldest = min(oldest, info.Name)
		if batch = append(batch, photoOf(info)); len(batch) == indexBatch {
			flush()
		}
	})
	flush()
	if err = errors.Join(err, scanErr); err == nil {
		_, err = s.opt.Index.Expire(ctx, oldest) // removed to make room for a lower limit
	}
	return err
}
