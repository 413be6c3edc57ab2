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
)

// readTime bounds what the object store may take for one answer.
const readTime = 15 * time.Second

// errAway is what readers get while the store does not answer.
func errAway(err error) error {
	return &devices.Error{Code: devices.CodeUnavailable, Part: "nats", Detail: "the photo store does not answer: " + err.Error()}
}

// readError words an error of the store; a photo that is not there is
// CodeNotFound.
func readError(id string, err error) error {
	if errors.Is(err, jetstream.ErrObjectNotFound) {
		return &devices.Error{Code: devices.CodeNotFound, Detail: "no photo " + id + " is stored"}
	}
	return errAway(err)
}

// Ready returns why photos are not kept, and what to do.
func (s *Server) Ready() error {
	if fault := s.bucket.fault.Load(); fault != nil {
		return *fault
	}
	return nil
}

// List returns at most limit photos, newest first, of one device or of all if
// device is empty; before is the id behind which the page starts, empty for
// the newest. more tells whether others follow.
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

// openedPhoto is a photo that is read, in one of the places for that.
type openedPhoto struct {
	*bytes.Reader
	close func()
}

// Close gives the place back.
func (p openedPhoto) Close() error {
	p.close()
	return nil
}

// Open returns a photo and its JPEG. It was read to its end and agrees with
// its digest. MaxReading are open at once, since each is in memory as long as
// its reader takes; others wait.
func (s *Server) Open(ctx context.Context, id string) (photo devices.Photo, content io.ReadCloser, err error) {
	ctx, cancel := context.WithTimeout(ctx, readTime)
	defer cancel()
	select {
	case s.reading <- struct{}{}:
	case <-ctx.Done():
		return devices.Photo{}, nil, &devices.Error{Code: devices.CodeUnavailable, Part: "photos", Detail: "too many photos are being read; try again"}
	}
	leave := sync.OnceFunc(func() { <-s.reading })
	defer func() {
		if err != nil {
			leave()
		}
	}()
	o, info, err := s.find(ctx, id)
	if err != nil {
		return devices.Photo{}, nil, err
	}
	jpeg, err := o.objects.GetBytes(ctx, id)
	if err != nil {
		return devices.Photo{}, nil, readError(id, err)
	}
	return photoOf(info), openedPhoto{bytes.NewReader(jpeg), leave}, nil
}

// content is the JPEG of a photo, for the explainer.
func (s *Server) content(ctx context.Context, id string) ([]byte, error) {
	o, err := s.bucket.store(ctx)
	if err != nil {
		return nil, errAway(err)
	}
	content, err := o.objects.GetBytes(ctx, id)
	if err != nil {
		return nil, readError(id, err)
	}
	return content, nil
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
		return readError(id, err)
	}
	return s.opt.Index.Remove(ctx, id)
}

func (s *Server) find(ctx context.Context, id string) (*opened, *jetstream.ObjectInfo, error) {
	if !isPhotoID(id) {
		return nil, nil, readError(id, jetstream.ErrObjectNotFound)
	}
	o, err := s.bucket.store(ctx)
	if err != nil {
		return nil, nil, errAway(err)
	}
	info, err := o.objects.GetInfo(ctx, id)
	if errors.Is(err, jetstream.ErrObjectNotFound) {
		_ = s.opt.Index.Remove(ctx, id) // it may be left over; else it ages out
	}
	if err != nil {
		return nil, nil, readError(id, err)
	}
	return o, info, nil
}
