package firmware

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/devices"
	"fleetd/internal/durable"
)

const (
	chunkSize = 128 << 10 // of the object store, and memory per transfer
	// transferTime is the time limit of writing an image to the object store, and of reading one of transferSize bytes.
	transferTime = 2 * time.Minute
	transferSize = 32 << 20
	maxPuts      = 3      // of an image that cannot be read back
	newPrefix    = "new-" // of files that are not complete
)

var (
	// unusedTime is how long files and objects of no image are kept: the row of an image comes after its bytes.
	unusedTime = time.Hour
	stepTime   = 8 * time.Second // of one step of the object store
)

// files are the bytes of the images: in the object store, which all nodes share, and on this node's disk, where they are served
// from. Names are SHA-256s, and no byte is served that was not compared with one.
type files struct {
	dir string
	js  jetstream.JetStream
	// bucket is the object store, which is created with the first image.
	bucket jetstream.ObjectStoreConfig
	turns  chan struct{} // capacity 1: see turn
}

func newFiles(dir string, js jetstream.JetStream, bucket string, replicas int) *files {
	return &files{dir: dir, js: js, turns: make(chan struct{}, 1),
		bucket: jetstream.ObjectStoreConfig{Bucket: bucket, Description: "firmware images of fleetd", Replicas: max(replicas, 1), Storage: jetstream.FileStorage}}
}

// clean removes files that were not completed, and those of images that are not stored, as a node leaves them that was killed or
// was away when somebody deleted an image.
func (f *files) clean(stored map[string]bool) error {
	entries, err := os.ReadDir(f.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		if info, no := e.Info(); no == nil && !stored[e.Name()] && time.Since(info.ModTime()) > unusedTime {
			err = errors.Join(err, os.Remove(filepath.Join(f.dir, e.Name())))
		}
	}
	return err
}

// objects returns the objects of the store by their NUIDs, which are in the subjects of their chunks.
func (f *files) objects(ctx context.Context) (map[string]*jetstream.ObjectInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, stepTime)
	defer cancel()
	objects, err := f.js.ObjectStore(ctx, f.bucket.Bucket)
	var list []*jetstream.ObjectInfo
	if err == nil {
		list, err = objects.List(ctx)
	}
	if err != nil && !isMissing(err) && !errors.Is(err, jetstream.ErrNoObjectsFound) {
		return nil, noStore(err)
	}
	byNUID := make(map[string]*jetstream.ObjectInfo, len(list))
	for _, object := range list {
		byNUID[object.NUID] = object
	}
	return byNUID, nil
}

// unused returns the objects that have belonged to no image for unusedTime, and deletes chunks that have belonged to no object for so long:
// those of an upload whose node was killed, or that another node overtook.
func (f *files) unused(ctx context.Context, stored map[string]bool, objects map[string]*jetstream.ObjectInfo) (ids []string, err error) {
	chunks := "$O." + f.bucket.Bucket + ".C."
	stream, err := f.js.Stream(ctx, "OBJ_"+f.bucket.Bucket)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, nil
	}
	var info *jetstream.StreamInfo
	if err == nil {
		info, err = stream.Info(ctx, jetstream.WithSubjectFilter(chunks+"*"))
	}
	if err != nil {
		return nil, noStore(err)
	}
	for subject := range info.State.Subjects {
		object := objects[strings.TrimPrefix(subject, chunks)]
		if object != nil && stored[object.Name] {
			continue
		}
		last, no := stream.GetLastMsgForSubject(ctx, subject)
		switch {
		case no != nil || info.TimeStamp.Sub(last.Time) < unusedTime:
			err = errors.Join(err, no)
		case object != nil:
			ids = append(ids, object.Name)
		default:
			err = errors.Join(err, stream.Purge(ctx, jetstream.WithPurgeSubject(subject)))
		}
	}
	return ids, err
}

// repair writes an image to the object store if that has lost it, as after a power cut or a move to another NATS server, and this node has it.
func (f *files) repair(ctx context.Context, id string) (put bool, err error) {
	step, cancel := context.WithTimeout(ctx, stepTime)
	defer cancel()
	objects, err := f.js.ObjectStore(step, f.bucket.Bucket)
	if err == nil {
		_, err = objects.GetInfo(step, id)
	}
	if err == nil || !isMissing(err) {
		return false, err
	}
	file, err := f.local(id)
	if err != nil { // damaged, too: who opens it learns that
		return false, nil
	}
	defer file.Close()
	return true, f.put(ctx, id, file)
}

// create returns a file for an image whose name is not known yet. discard removes it, unless it was renamed.
func (f *files) create() (file *os.File, discard func(), err error) {
	if err := durable.MkdirAll(f.dir); err != nil {
		return nil, nil, noDisk(err)
	}
	if file, err = os.CreateTemp(f.dir, newPrefix+"*"); err != nil { // mode 0600
		return nil, nil, noDisk(err)
	}
	return file, func() {
		_ = file.Close()
		_ = os.Remove(file.Name()) // clean removes it if this fails
	}, nil
}

// keep gives a complete file its name.
func (f *files) keep(file *os.File, id string) error {
	if err := file.Sync(); err != nil {
		return noDisk(err)
	}
	if err := durable.Rename(file.Name(), filepath.Join(f.dir, id)); err != nil {
		return noDisk(err)
	}
	return nil
}

func noDisk(err error) error {
	return &devices.Error{Code: devices.CodeUnavailable, Part: "disk", Detail: "this node cannot write the image to its data directory (" + cause(err).Error() + "); free space there, or fix its permissions"}
}

// cause is an error without the path, which callers need not know.
func cause(err error) error {
	if path, ok := errors.AsType[*fs.PathError](err); ok {
		return path.Err
	}
	return err
}

func noStore(err error) error {
	return &devices.Error{Code: devices.CodeUnavailable, Part: "nats", Detail: "the object store of the images does not answer: " + err.Error()}
}

// open returns the file of an image, whose bytes were compared with its SHA-256. One that is missing or damaged is read from the
// object store first.
func (f *files) open(ctx context.Context, id string) (*os.File, error) {
	file, err := f.local(id)
	if err == nil {
		return file, nil
	}
	end, err := f.turn(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	if file, err = f.local(id); err == nil { // somebody else has fetched it
		return file, nil
	}
	if err := f.fetch(ctx, id); err != nil {
		return nil, err
	}
	if file, err = f.local(id); err != nil {
		return nil, noDisk(err)
	}
	return file, nil
}

// turn waits until this node may read an image from the object store, until end is called. NATS closes a connection for which more
// than 64 MiB wait, which two large images can be, and everything else of the node is on it, too.
func (f *files) turn(ctx context.Context) (end func(), err error) {
	select {
	case f.turns <- struct{}{}:
		return func() { <-f.turns }, nil
	case <-ctx.Done():
		return nil, noStore(ctx.Err())
	}
}

// local opens a file on the disk, if it has the right content.
func (f *files) local(id string) (*os.File, error) {
	file, err := os.Open(filepath.Join(f.dir, id))
	if err != nil {
		return nil, err
	}
	sum := sha256.New()
	if _, err = io.Copy(sum, file); err == nil {
		_, err = file.Seek(0, io.SeekStart)
	}
	if err == nil && hex.EncodeToString(sum.Sum(nil)) != id {
		err = errDamaged
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

var errDamaged = errors.New("the file does not have the SHA-256 of the image")

// fetch writes an image of the object store to the disk.
func (f *files) fetch(ctx context.Context, id string) error {
	file, discard, err := f.create()
	if err != nil {
		return err
	}
	defer discard()
	switch err := f.read(ctx, id, file); {
	case isLost(err):
		return &devices.Error{Code: devices.CodeUnavailable, Part: "nats", Detail: "the bytes of the image " + id[:Digits] + " are missing or damaged in the object store; add the same file again"}
	case err != nil:
		return err
	}
	return f.keep(file, id)
}

// isLost reports whether the store answers and does not have the bytes.
func isLost(err error) bool { return errors.Is(err, errDamaged) || isMissing(err) }

func isMissing(err error) bool {
	return errors.Is(err, jetstream.ErrObjectNotFound) || errors.Is(err, jetstream.ErrBucketNotFound)
}

// read copies an image of the object store to a writer, and compares it with its SHA-256. The client library's own digest is of what
// it sent, not of what arrived.
func (f *files) read(ctx context.Context, id string, to io.Writer) error {
	step, cancel := context.WithTimeout(ctx, stepTime)
	defer cancel()
	objects, err := f.js.ObjectStore(step, f.bucket.Bucket)
	var info *jetstream.ObjectInfo
	if err == nil {
		info, err = objects.GetInfo(step, id)
	}
	if err != nil {
		return f.wrap(err)
	}
	// The library reads until the deadline if the chunks are deleted meanwhile.
	limited, end := context.WithTimeout(ctx, stepTime+time.Duration(info.Size>>10)*(transferTime/(transferSize>>10)))
	defer end()
	object, err := objects.Get(limited, id)
	if err != nil {
		return f.wrap(err)
	}
	sum := sha256.New()
	from := &source{r: object}
	_, err = io.Copy(io.MultiWriter(sum, to), from)
	if from.err != nil && !errors.Is(from.err, jetstream.ErrDigestMismatch) {
		step, cancel := context.WithTimeout(ctx, stepTime)
		defer cancel()
		now, no := objects.GetInfo(step, id)
		switch {
		case no != nil:
			err = f.wrap(no)
		case now.NUID != info.NUID:
			err = errDamaged
		default:
			err = f.wrap(from.err)
		}
	} else if from.err == nil && err != nil {
		err = noDisk(err)
	} else if err != nil || hex.EncodeToString(sum.Sum(nil)) != id {
		err = errDamaged
	}
	return errors.Join(err, object.Close())
}

// wrap returns the errors of a missing object as they are, and all others as those of a store that does not answer.
func (f *files) wrap(err error) error {
	if isMissing(err) {
		return err
	}
	return noStore(err)
}

// source tells errors of a reader from those of the writer that it is copied to.
type source struct {
	r   io.Reader
	err error
}

// Read implements io.Reader.
func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		s.err = err
	}
	return n, err
}

// put writes an image to the object store, unless it is there. The client library may send a chunk again whose buffer has other bytes
// by then, and report success, and another node may replace or delete the object: it counts when it was read back.
func (f *files) put(ctx context.Context, id string, content io.ReadSeeker) error {
	end, err := f.turn(ctx)
	if err != nil {
		return err
	}
	defer end()
	for attempt := 1; ; attempt++ {
		err := f.read(ctx, id, io.Discard)
		switch {
		case !isLost(err):
			return err
		case attempt > maxPuts:
			return noStore(err)
		}
		if err := f.putOnce(ctx, id, content); err != nil {
			return err
		}
	}
}

func (f *files) putOnce(ctx context.Context, id string, content io.ReadSeeker) error {
	ctx, cancel := context.WithTimeout(ctx, transferTime)
	defer cancel()
	if _, err := content.Seek(0, io.SeekStart); err != nil {
		return noDisk(err)
	}
	objects, err := f.js.ObjectStore(ctx, f.bucket.Bucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		objects, err = f.js.CreateOrUpdateObjectStore(ctx, f.bucket)
	}
	if err == nil {
		_, err = objects.Put(ctx, jetstream.ObjectMeta{Name: id, Opts: &jetstream.ObjectMetaOptions{ChunkSize: chunkSize}}, content)
	}
	switch {
	case err == nil:
		return nil
	case isFull(err):
		return &devices.Error{Code: devices.CodeLimitReached, Detail: "the NATS server has no room for the image; delete images, or raise its limit"}
	}
	return noStore(err)
}

// Codes of JetStream for a message, or a stream, without room.
const (
	codeStoreFailed   jetstream.ErrorCode = 10077
	codeNoResources   jetstream.ErrorCode = 10023
	codeStorageExceed jetstream.ErrorCode = 10047
)

func isFull(err error) bool {
	e := (*jetstream.APIError)(nil)
	return errors.As(err, &e) && (e.ErrorCode == codeStoreFailed || e.ErrorCode == codeNoResources || e.ErrorCode == codeStorageExceed)
}

// remove deletes the bytes of an image. Tidy removes what is left if this fails.
func (f *files) remove(ctx context.Context, id string) error {
	err := os.Remove(filepath.Join(f.dir, id))
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	ctx, cancel := context.WithTimeout(ctx, stepTime)
	defer cancel()
	objects, storeErr := f.js.ObjectStore(ctx, f.bucket.Bucket)
	if storeErr == nil {
		storeErr = objects.Delete(ctx, id)
	}
	if isMissing(storeErr) {
		storeErr = nil
	}
	return errors.Join(err, storeErr)
}

// IsID reports whether text is the SHA-256 of an image, or the beginning of one that is long enough to name it.
func IsID(text string) bool {
	return len(text) >= Digits && len(text) <= 2*sha256.Size && strings.Trim(text, "0123456789abcdef") == ""
}
