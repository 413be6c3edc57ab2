package vision

import (
	"bytes"
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/devices"
	"fleetd/internal/tasks"
)

// readTime is the time limit of one read of the object store.
const readTime = 15 * time.Second

// errTooManyRead refuses to read a photo beside as many as are being read.
var errTooManyRead = &devices.Error{Code: devices.CodeUnavailable, Part: "photos", Detail: "too many photos are being read; try again"}

// errStoreUnavailable returns the error while the store is unreachable.
func errStoreUnavailable(err error) error {
	return &devices.Error{Code: devices.CodeUnavailable, Part: "nats", Detail: "the photo store does not answer: " + err.Error()}
}

// photoError converts an error of the store; an unknown photo is CodeNotFound.
func photoError(id string, err error) error {
	if errors.Is(err, jetstream.ErrObjectNotFound) {
		return &devices.Error{Code: devices.CodeNotFound, Detail: "no photo " + id + " is stored"}
	}
	return errStoreUnavailable(err)
}

// OpenStore lets the node create the object store and update it to the settings of the nodes: it belongs to their fleet.
func (s *Server) OpenStore(others devices.OthersLimits) {
	s.bucket.others.Store(&others)
	tasks.Signal(s.missing)
}

// Limits returns the limits that this node asks for, by name of the stream.
func (s *Server) Limits() map[string]devices.StreamLimits {
	return map[string]devices.StreamLimits{s.bucket.streamName(): s.bucket.limits()}
}

// Ready returns why photos cannot be stored, with advice; nil if they can.
func (s *Server) Ready() error {
	if fault := s.bucket.lastError.Load(); fault != nil {
		return *fault
	}
	return nil
}

// List returns at most limit photos, newest first, of one device, or of all if device is
// empty. before is the id after which the page starts, empty for the newest. more reports
// whether further photos follow.
func (s *Server) List(ctx context.Context, device devices.ID, before string, limit int) (photos []devices.Photo, more bool, err error) {
	photos, err = s.opt.Index.Page(ctx, device, before, s.expired(), limit+1)
	if err != nil {
		return nil, false, err
	}
	return photos[:min(len(photos), limit)], len(photos) > limit, nil
}

// DeleteAll removes every photo of a device.
func (s *Server) DeleteAll(ctx context.Context, device devices.ID) (deleted int, err error) {
	for {
		photos, err := s.opt.Index.Page(ctx, device, "", "", indexBatch)
		if err != nil || len(photos) == 0 {
			return deleted, err
		}
		for _, p := range photos {
			if err := s.Delete(ctx, p.ID); err != nil && devices.AsError(err).Code != devices.CodeNotFound {
				return deleted, err
			}
			deleted++
		}
	}
}

// openedPhoto is a photo that is being read; it occupies a slot.
type openedPhoto struct {
	*bytes.Reader
	close func()
}

// Close frees the slot.
func (p openedPhoto) Close() error {
	p.close()
	return nil
}

// Open returns a photo and its JPEG, which was read completely and matches its digest. At
// most MaxReading photos are open at a time, because each is in memory, and MaxPerReader of one reader, an API key;
// others wait.
func (s *Server) Open(ctx context.Context, reader, id string) (photo devices.Photo, content io.ReadCloser, err error) {
	ctx, cancel := context.WithTimeout(ctx, readTime)
	defer cancel()
	leave, err := s.beginReading(ctx, reader)
	if err != nil {
		return devices.Photo{}, nil, err
	}
	defer func() {
		if err != nil {
			leave()
		}
	}()
	o, info, err := s.find(ctx, id)
	if err != nil {
		return devices.Photo{}, nil, err
	}
	jpeg, err := s.fetch(ctx, o, id)
	if err != nil {
		return devices.Photo{}, nil, err
	}
	return photoOf(info), openedPhoto{bytes.NewReader(jpeg), leave}, nil
}

// readerPlaces are the places of one reader.
type readerPlaces struct {
	taken chan struct{}
	users int // that have one or wait for it; changed with the lock of Server.readers
}

// beginReading waits for a place of the reader, and then for one of all. leave may be called any number of times.
func (s *Server) beginReading(ctx context.Context, reader string) (leave func(), err error) {
	s.readersLock.Lock()
	own := s.readers[reader]
	if own == nil {
		own = &readerPlaces{taken: make(chan struct{}, MaxPerReader)}
		s.readers[reader] = own
	}
	own.users++
	s.readersLock.Unlock()
	gone := func() {
		s.readersLock.Lock()
		defer s.readersLock.Unlock()
		if own.users--; own.users == 0 {
			delete(s.readers, reader)
		}
	}
	for i, places := range []chan struct{}{own.taken, s.reading} {
		select {
		case places <- struct{}{}:
		case <-ctx.Done():
			if i > 0 {
				<-own.taken
			}
			gone()
			return nil, errTooManyRead
		}
	}
	return sync.OnceFunc(func() {
		<-s.reading
		<-own.taken
		gone()
	}), nil
}

// content returns the JPEG of a photo, for the explainer.
func (s *Server) content(ctx context.Context, id string) ([]byte, error) {
	o, err := s.bucket.store(ctx)
	if err != nil {
		return nil, errStoreUnavailable(err)
	}
	return s.fetch(ctx, o, id)
}

// fetch reads a photo from the store. At most MaxFetching are read in one moment: with an embedded server the
// node computes and copies for each of them.
func (s *Server) fetch(ctx context.Context, o *openStore, id string) ([]byte, error) {
	leave, err := s.fetching.Enter(ctx)
	if err != nil {
		return nil, errTooManyRead
	}
	defer leave()
	jpeg, err := o.objects.GetBytes(ctx, id)
	if err != nil {
		return nil, photoError(id, err)
	}
	return jpeg, nil
}

// Delete removes a photo.
func (s *Server) Delete(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, readTime)
	defer cancel()
	o, _, err := s.find(ctx, id)
	if err != nil {
		return err
	}
	if err := o.objects.Delete(ctx, id); err != nil {
		return photoError(id, err)
	}
	return s.opt.Index.Remove(ctx, id)
}

func (s *Server) find(ctx context.Context, id string) (*openStore, *jetstream.ObjectInfo, error) {
	if !isPhotoID(id) {
		return nil, nil, photoError(id, jetstream.ErrObjectNotFound)
	}
	o, err := s.bucket.store(ctx)
	if err != nil {
		return nil, nil, errStoreUnavailable(err)
	}
	info, err := o.objects.GetInfo(ctx, id)
	if errors.Is(err, jetstream.ErrObjectNotFound) {
		_ = s.opt.Index.Remove(ctx, id) // its entry may be left over; if this fails, it ages out
	}
	if err != nil {
		return nil, nil, photoError(id, err)
	}
	return o, info, nil
}
