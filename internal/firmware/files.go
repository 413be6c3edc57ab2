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
	// transferTime is the time limit of writing an image to the object store and reading it back.
	transferTime = 2 * time.Minute
	stepTime     = 8 * time.Second // of one step of the object store
	newPrefix    = "new-"          // of files that are not complete
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
		if !stored[e.Name()] {
			err = errors.Join(err, os.Remove(filepath.Join(f.dir, e.Name())))
		}
	}
	return err
}

// repair writes files to the object store that it has lost, as after a power cut or a move to another NATS server, and returns how many.
func (f *files) repair(ctx context.Context) (repaired int, err error) {
	entries, err := os.ReadDir(f.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	for _, e := range entries {
		if id := e.Name(); err == nil && IsID(id) && ctx.Err() == nil {
			var put bool
			put, err = f.repairOne(ctx, id)
			if put {
				repaired++
			}
		}
	}
	return repaired, err
}

func (f *files) repairOne(ctx context.Context, id string) (put bool, err error) {
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
		_ = os.Remove(file.Name()) // the next start removes it if this fails
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
	case errors.Is(err, errDamaged) || isMissing(err):
		return &devices.Error{Code: devices.CodeUnavailable, Part: "nats", Detail: "the bytes of the image " + id[:Digits] + " are missing or damaged in the object store; add the same file again"}
	case err != nil:
		return err
	}
	return f.keep(file, id)
}

func isMissing(err error) bool {
	return errors.Is(err, jetstream.ErrObjectNotFound) || errors.Is(err, jetstream.ErrBucketNotFound)
}

// read copies an image of the object store to a writer, and compares it with its SHA-256. The client library's own digest is of what
// it sent, not of what arrived.
func (f *files) read(ctx context.Context, id string, to io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, transferTime) // without a deadline the library waits 5 s for the whole object
	defer cancel()
	objects, err := f.js.ObjectStore(ctx, f.bucket.Bucket)
	if err != nil {
		return f.wrap(err)
	}
	object, err := objects.Get(ctx, id)
	if err != nil {
		return f.wrap(err)
	}
	sum := sha256.New()
	from := &source{r: object}
	_, err = io.Copy(io.MultiWriter(sum, to), from)
	if from.err != nil && !errors.Is(from.err, jetstream.ErrDigestMismatch) {
		err = f.wrap(from.err)
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
// by then, and report success: the object counts when it was read back.
func (f *files) put(ctx context.Context, id string, content io.Reader) error {
	end, err := f.turn(ctx)
	if err != nil {
		return err
	}
	defer end()
	err = f.read(ctx, id, io.Discard)
	if err == nil || !errors.Is(err, errDamaged) && !isMissing(err) {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, transferTime)
	defer cancel()
	objects, err := f.js.ObjectStore(ctx, f.bucket.Bucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		objects, err = f.js.CreateOrUpdateObjectStore(ctx, f.bucket)
	}
	if err != nil {
		return noStore(err)
	}
	_, err = objects.Put(ctx, jetstream.ObjectMeta{Name: id, Opts: &jetstream.ObjectMetaOptions{ChunkSize: chunkSize}}, content)
	if err == nil {
		err = f.read(ctx, id, io.Discard)
	}
	if err == nil {
		return nil
	}
	f.deleteObject(ctx, objects, id)
	if isFull(err) {
		return &devices.Error{Code: devices.CodeLimitReached, Detail: "the NATS server has no room for the image; delete images, or raise its limit"}
	}
	if e, ok := errors.AsType[*devices.Error](err); ok {
		return e
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

// remove deletes the bytes of an image. What is left if this fails is removed by clean, and an object without an image is replaced
// when the image comes again.
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

func (f *files) deleteObject(ctx context.Context, objects jetstream.ObjectStore, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepTime)
	defer cancel()
	_ = objects.Delete(ctx, id) // if this fails, a damaged object is left, which read refuses
}

// IsID reports whether text is the SHA-256 of an image, or the beginning of one that is long enough to name it.
func IsID(text string) bool {
	return len(text) >= Digits && len(text) <= 2*sha256.Size && strings.Trim(text, "0123456789abcdef") == ""
}
