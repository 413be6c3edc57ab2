package vision

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/devices"
)

// Timing of the index.
const (
	indexTime   = 3 * time.Second // for the row of one photo, before its device is answered
	indexAgain  = 15 * time.Second
	expireEvery = 10 * time.Minute
	indexBatch  = 500 // photos that are in memory while the index is filled
)

// note puts a photo into the index. If the database is away Keep finds the photo
// later: it is stored.
func (s *Server) note(ctx context.Context, p devices.Photo) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), indexTime)
	defer cancel()
	if err := s.opt.Index.Add(ctx, p); err != nil {
		s.lack()
	}
}

// lack requests that the index be filled.
func (s *Server) lack() {
	select {
	case s.missing <- struct{}{}:
	default: // it will be
	}
}

// Keep fills the index with photos that are not in it, of an older version or
// from a time without the database, and removes those that have aged out, until
// ctx ends.
func (s *Server) Keep(ctx context.Context) {
	s.lack()
	expire := time.NewTicker(expireEvery)
	defer expire.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-expire.C:
			_, _ = s.opt.Index.Expire(ctx, s.expired()) // tried again later; a page leaves them out
			continue
		case <-s.missing:
		}
		if s.fill(ctx) == nil {
			continue
		}
		select { // the database or NATS is away
		case <-ctx.Done():
			return
		case <-time.After(indexAgain):
			s.lack()
		}
	}
}

// expired is the id before which photos have aged out. The id of a snapshot is
// older than what it shows.
func (s *Server) expired() string { return idAt(time.Now().Add(-s.opt.Retention - SnapshotLife)) }

// fill puts every stored photo into the index, and takes those out that are older
// than any.
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
	oldest := idAt(time.Now())
	scanErr := s.bucket.scan(ctx, o, func(info *jetstream.ObjectInfo) {
		oldest = min(oldest, info.Name)
		if batch = append(batch, photoOf(info)); len(batch) == indexBatch {
			flush()
		}
	})
	flush()
	if err = errors.Join(err, scanErr); err == nil {
		_, err = s.opt.Index.Expire(ctx, oldest) // what made room for a lower limit
	}
	return err
}
