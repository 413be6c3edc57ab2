package vision

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/devices"
)

// bucket is the object store of the photos. Reads use the client library's object store.
// Writes do not, because the library cannot create an object only if its name was never
// used, and needs the metadata before the first byte. The format is that of NATS' ADR-20:
// chunks under `$O.<bucket>.C.<object>`, then one message under `$O.<bucket>.M.<name>`
// that makes them an object.
type bucket struct {
	js     jetstream.JetStream
	config jetstream.ObjectStoreConfig
	// open contains the store once it is created; code that receives it must put it back.
	open chan *openStore
	// evicting lets one upload at a time make room. It guards oldest, the sequence number
	// at which the search for the oldest photo begins.
	evicting chan struct{}
	oldest   uint64
	// lastError is why the store could not be created at the last attempt.
	lastError atomic.Pointer[error]
	others    atomic.Pointer[devices.OthersLimits] // nil: the node has not been accepted
	// onEvict is called for the photos that were removed to make room.
	onEvict func(ctx context.Context, ids []string)
}

type openStore struct {
	objects  jetstream.ObjectStore
	stream   jetstream.Stream
	maxBytes uint64
}

func newBucket(opt Options) *bucket {
	b := &bucket{js: opt.JetStream, onEvict: func(ctx context.Context, ids []string) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), indexTime) // the upload may have ended
		defer cancel()
		_ = opt.Index.Remove(ctx, ids...) // if this fails, each is removed when it is not found
	}, open: make(chan *openStore, 1), evicting: make(chan struct{}, 1),
		config: jetstream.ObjectStoreConfig{Bucket: opt.Bucket, Description: "photos of fleetd's devices", TTL: opt.Retention,
			MaxBytes: opt.Limit, Replicas: max(opt.Replicas, 1), Storage: jetstream.FileStorage}}
	b.open <- nil
	return b
}

var (
	errNotConnected = errors.New("NATS is not connected")
	errNotOpen      = errors.New("this node has not found out yet whether it belongs to the fleet of this object store")
)

// limits returns the limits that this node asks for.
func (b *bucket) limits() devices.StreamLimits {
	return devices.StreamLimits{MaxAge: b.config.TTL, MaxBytes: b.config.MaxBytes, Replicas: b.config.Replicas}
}

// store returns the object store, which it creates on first use, because NATS may start later than the node, with the
// largest limits of the nodes.
func (b *bucket) store(ctx context.Context) (*openStore, error) {
	var o *openStore
	select {
	case o = <-b.open:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer func() { b.open <- o }()
	if !b.js.Conn().IsConnected() {
		return nil, errNotConnected
	}
	if o != nil {
		return o, nil
	}
	others := b.others.Load()
	if others == nil {
		return nil, errNotOpen
	}
	config := b.config
	present := devices.StreamLimits{}
	if stream, err := b.js.Stream(ctx, b.streamName()); err == nil {
		info := stream.CachedInfo().Config
		present = devices.StreamLimits{MaxAge: info.MaxAge, MaxBytes: info.MaxBytes, Replicas: info.Replicas}
	}
	want := others.Agreed(ctx, b.streamName(), b.limits(), present)
	config.TTL, config.MaxBytes, config.Replicas = want.MaxAge, want.MaxBytes, want.Replicas
	objects, err := b.js.CreateOrUpdateObjectStore(ctx, config)
	if err != nil {
		err = fmt.Errorf("cannot create or update the object store %s: %w; check --photo-limit, --nats-replicas, and the log and disk of the NATS server", b.config.Bucket, err)
		if ctx.Err() == nil {
			b.lastError.Store(&err)
		}
		return nil, err
	}
	b.lastError.Store(nil)
	stream, err := b.js.Stream(ctx, b.streamName())
	if err != nil {
		return nil, fmt.Errorf("object store %s: %w", b.config.Bucket, err)
	}
	o = &openStore{objects, stream, uint64(want.MaxBytes)}
	return o, nil
}

// forget makes the next use create the store again, in case it was deleted.
func (b *bucket) forget() {
	<-b.open
	b.open <- nil
}

func (b *bucket) streamName() string { return "OBJ_" + b.config.Bucket }

func (b *bucket) chunkSubject(object string) string { return "$O." + b.config.Bucket + ".C." + object }

func (b *bucket) metaSubject(name string) string {
	return "$O." + b.config.Bucket + ".M." + base64.URLEncoding.EncodeToString([]byte(name))
}

// codeStoreFailed is JetStream's error code for a message without room.
const codeStoreFailed jetstream.ErrorCode = 10077

// maxRoom is how often an upload makes room for one message: concurrent uploads may use
// the room that it made.
const maxRoom = 10

// publish stores one message, and makes room if there is none.
func (b *bucket) publish(ctx context.Context, msg *nats.Msg, opts ...jetstream.PublishOpt) error {
	ctx, cancel := context.WithTimeout(ctx, storeTime)
	defer cancel()
	if _, err := b.store(ctx); err != nil {
		return unavailable(err)
	}
	opts = append(opts, jetstream.WithExpectStream(b.streamName()))
	_, err := b.js.PublishMsg(ctx, msg, opts...)
	for tries := 0; isFull(err) && tries < maxRoom; tries++ {
		more, evictErr := b.evict(ctx)
		if evictErr != nil {
			return unavailable(fmt.Errorf("make room for a photo: %w", evictErr))
		}
		if _, err = b.js.PublishMsg(ctx, msg, opts...); !more {
			break
		}
	}
	if errors.Is(err, jetstream.ErrNoStreamResponse) {
		b.forget()
	}
	return err
}

// isFull recognizes JetStream's refusal of a message it has no room for.
func isFull(err error) bool {
	api := (*jetstream.APIError)(nil)
	return errors.As(err, &api) && api.ErrorCode == codeStoreFailed
}

func (b *bucket) putChunk(ctx context.Context, object string, chunk []byte) error {
	if err := b.publish(ctx, &nats.Msg{Subject: b.chunkSubject(object), Data: chunk}); err != nil {
		return storeError(err)
	}
	return nil
}

// Metadata of a photo's object.
const (
	metaDevice   = "device"
	metaQuestion = "question"
	metaSHA256   = "sha256"
	metaKind     = "kind"
	metaTaken    = "taken"
)

// putObject makes stored chunks a photo. It is the one step that counts, and
// the server does it only if the name was never used: an address of one use
// takes one upload, however many come at once.
func (b *bucket) putObject(ctx context.Context, object string, count int, size int64, sum []byte, u upload) error {
	info := jetstream.ObjectInfo{Bucket: b.config.Bucket, NUID: object, Size: uint64(size), Chunks: uint32(count),
		Digest: "SHA-256=" + base64.URLEncoding.EncodeToString(sum),
		ObjectMeta: jetstream.ObjectMeta{Name: u.photo, Description: u.kind + " of " + string(u.device),
			Opts: &jetstream.ObjectMetaOptions{ChunkSize: chunkSize},
			Metadata: map[string]string{metaDevice: string(u.device), metaQuestion: u.question, metaSHA256: hex.EncodeToString(sum),
				metaKind: u.kind, metaTaken: u.taken.UTC().Format(time.RFC3339Nano)}}}
	data, err := json.Marshal(info)
	if err != nil {
		return fmt.Errorf("describe photo: %w", err)
	}
	err = b.publish(ctx, &nats.Msg{Subject: b.metaSubject(u.photo), Data: data}, jetstream.WithExpectLastSequencePerSubject(0))
	api := (*jetstream.APIError)(nil)
	switch {
	case errors.As(err, &api) && (api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence ||
		api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequenceConstant):
		return errUsed
	case err != nil:
		b.undo(context.WithoutCancel(ctx), u.photo, object)
		return storeError(err)
	}
	return nil
}

// undo deletes a photo that may or may not have been stored.
func (b *bucket) undo(ctx context.Context, photo, object string) {
	ctx, cancel := context.WithTimeout(ctx, storeTime)
	defer cancel()
	o, err := b.store(ctx)
	if err != nil {
		return // the photo is visible and complete, or was not stored
	}
	if info, err := o.objects.GetInfo(ctx, photo); err == nil && info.NUID == object {
		_ = o.objects.Delete(ctx, photo) // if this fails, the same applies
	}
}

var errUsed = refuse(http.StatusConflict, reasonUsed, "this upload URL was already used")

// mustBeNew refuses an upload whose name was used, before the device sends it.
func (b *bucket) mustBeNew(ctx context.Context, photo string) error {
	ctx, cancel := context.WithTimeout(ctx, storeTime)
	defer cancel()
	o, err := b.store(ctx)
	if err != nil {
		return unavailable(err)
	}
	switch _, err := o.objects.GetInfo(ctx, photo, jetstream.GetObjectInfoShowDeleted()); {
	case err == nil:
		return errUsed
	case !errors.Is(err, jetstream.ErrObjectNotFound):
		return storeError(err)
	}
	return nil
}

// discard removes the chunks of a failed upload.
func (b *bucket) discard(ctx context.Context, object string) {
	ctx, cancel := context.WithTimeout(ctx, storeTime)
	defer cancel()
	if o, err := b.store(ctx); err == nil {
		_ = o.stream.Purge(ctx, jetstream.WithPurgeSubject(b.chunkSubject(object))) // if this fails, they age out
	}
}

func storeError(err error) error {
	if refused, ok := errors.AsType[*refusal](err); ok {
		return refused
	}
	return unavailable(err)
}

// evictBytes is how much room one eviction makes.
const evictBytes = 4 * MaxUpload

// evict deletes the oldest photos, and reports whether there may be more to delete.
// Uploads that meanwhile find the store full wait for it.
func (b *bucket) evict(ctx context.Context) (more bool, err error) {
	select {
	case b.evicting <- struct{}{}:
		defer func() { <-b.evicting }()
	case <-ctx.Done():
		return false, ctx.Err()
	}
	o, err := b.store(ctx)
	if err != nil {
		return false, err
	}
	status, err := o.stream.Info(ctx)
	if err != nil {
		return false, err
	}
	if status.State.Bytes+2*chunkSize <= o.maxBytes {
		return true, nil // another upload has made room
	}
	if b.oldest > status.State.LastSeq {
		b.oldest = 0 // the stream was created again
	}
	space := min(evictBytes, o.maxBytes/2)
	var evicted []string
	defer func() {
		if len(evicted) > 0 {
			b.onEvict(ctx, evicted)
		}
	}()
	for seq, freed := max(b.oldest, status.State.FirstSeq), uint64(0); freed < space; {
		// The oldest photo is the first that was completed.
		msg, err := o.stream.GetMsg(ctx, seq, jetstream.WithGetMsgSubject(b.metaSubjects()))
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			b.oldest = 0
			return false, nil // the store is full of foreign objects, or of incomplete ones, which age out
		}
		if err != nil {
			return false, err
		}
		seq, b.oldest = msg.Sequence+1, msg.Sequence
		var info jetstream.ObjectInfo
		if json.Unmarshal(msg.Data, &info) != nil {
			continue // a foreign object
		}
		if info.Deleted {
			if time.Since(msg.Time) > SnapshotLife { // its name cannot be used again
				_ = o.stream.DeleteMsg(ctx, msg.Sequence) // if this fails, it ages out
			}
			continue
		}
		if info.Metadata[metaDevice] == "" {
			continue // a foreign object
		}
		err = o.objects.Delete(ctx, info.Name)
		if isFull(err) { // there is no room for the deletion marker either
			if err := o.stream.Purge(ctx, jetstream.WithPurgeSubject(b.chunkSubject(info.NUID))); err != nil {
				return false, err
			}
			if err = o.objects.Delete(ctx, info.Name); isFull(err) {
				return true, nil // other uploads used that room; the next search begins here
			}
		}
		if err != nil && !errors.Is(err, jetstream.ErrObjectNotFound) {
			return false, err
		}
		evicted = append(evicted, info.Name)
		freed += info.Size
	}
	return true, nil
}

func (b *bucket) metaSubjects() string { return "$O." + b.config.Bucket + ".M.>" }

// scan calls f for every stored photo, in any order.
func (b *bucket) scan(ctx context.Context, o *openStore, f func(*jetstream.ObjectInfo)) error {
	watcher, err := o.objects.Watch(ctx, jetstream.IgnoreDeletes())
	if err != nil {
		return err
	}
	defer func() {
		_ = watcher.Stop() // its subscription ends with its context in any case
		for range watcher.Updates() {
		} // lets the delivering goroutine finish
	}()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case info, open := <-watcher.Updates():
			switch {
			case !open:
				return errNotConnected
			case info == nil:
				return nil
			case info.Metadata[metaDevice] != "": // otherwise a foreign object
				f(info)
			}
		}
	}
}

func photoOf(info *jetstream.ObjectInfo) devices.Photo {
	taken, err := time.Parse(time.RFC3339Nano, info.Metadata[metaTaken])
	if err != nil {
		taken = info.ModTime
	}
	return devices.Photo{ID: info.Name, Device: devices.ID(info.Metadata[metaDevice]), Question: info.Metadata[metaQuestion],
		Bytes: int64(info.Size), SHA256: info.Metadata[metaSHA256], Kind: info.Metadata[metaKind], TakenAt: taken}
}
