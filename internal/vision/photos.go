package vision

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"strings"
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

// List returns at most limit photos, newest first, of one device or of all if
// device is empty; before is the id behind which the page starts, empty for
// the newest. more tells whether others follow.
func (s *Server) List(ctx context.Context, device devices.ID, before string, limit int) (photos []devices.Photo, more bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, readTime)
	defer cancel()
	o, err := s.bucket.store(ctx)
	if err != nil {
		return nil, false, errAway(err)
	}
	newest := newestPhotos{limit: limit + 1}
	err = s.bucket.scan(ctx, o, func(info *jetstream.ObjectInfo) {
		if (device == "" || info.Metadata[metaDevice] == string(device)) && (before == "" || info.Name < before) {
			newest.add(photoOf(info))
		}
	})
	if err != nil {
		return nil, false, errAway(err)
	}
	photos = newest.sorted()
	return photos[:min(len(photos), limit)], len(photos) > limit, nil
}

// newestPhotos keeps the newest of many, in memory for twice as many as asked
// for.
type newestPhotos struct {
	limit  int
	photos []devices.Photo
}

func (n *newestPhotos) add(p devices.Photo) {
	n.photos = append(n.photos, p)
	if len(n.photos) >= 2*n.limit {
		n.photos = n.sorted()
	}
}

func (n *newestPhotos) sorted() []devices.Photo {
	slices.SortFunc(n.photos, func(a, b devices.Photo) int { return strings.Compare(b.ID, a.ID) })
	return n.photos[:min(len(n.photos), n.limit)]
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
	return nil
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
	if err != nil {
		return nil, nil, readError(id, err)
	}
	return o, info, nil
}
