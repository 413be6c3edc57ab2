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

// bucket is the object store of the photos. Reading goes through the client's
// own object store; writing does not, because that cannot create only what is
// not there yet, and asks for the metadata before the first byte is known. The
// format is that of NATS' ADR-20: chunks under `$O.<bucket>.C.<object>`, then
// one message under `$O.<bucket>.M.<name>` that makes them an object.
type bucket struct {
	js     jetstream.JetStream
	config jetstream.ObjectStoreConfig
	// open holds the store once it is made; whoever takes the value puts one back.
	open chan *opened
	// evicting lets one upload at a time make room, which owns oldest: where the
	// search for the oldest photo begins.
	evicting chan struct{}
	oldest   uint64
	// fault is why the store could not be made when that was tried last.
	fault atomic.Pointer[error]
	// evicted hears of each photo that made room.
	evicted func(ctx context.Context, id string)
}

type opened struct {
	objects jetstream.ObjectStore
	stream  jetstream.Stream
}

func newBucket(opt Options) *bucket {
	b := &bucket{js: opt.JetStream, evicted: func(ctx context.Context, id string) {
		_ = opt.Index.Remove(ctx, id) // else it is removed when it is not found
	}, open: make(chan *opened, 1), evicting: make(chan struct{}, 1),
		config: jetstream.ObjectStoreConfig{Bucket: opt.Bucket, Description: "photos of fleetd's devices", TTL: opt.Retention,
			MaxBytes: opt.Limit, Replicas: max(opt.Replicas, 1), Storage: jetstream.FileStorage}}
	b.open <- nil
	return b
}

var errNotConnected = errors.New("NATS is not connected")

// store returns the object store, made on first use: NATS may come up later
// than the node.
func (b *bucket) store(ctx context.Context) (*opened, error) {
	var o *opened
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
	objects, err := b.js.CreateOrUpdateObjectStore(ctx, b.config)
	if err != nil {
		err = fmt.Errorf("object store %s cannot be made or changed: %w; see --photo-limit, --nats-replicas, and the log and disk of the NATS server", b.config.Bucket, err)
		if ctx.Err() == nil {
			b.fault.Store(&err)
		}
		return nil, err
	}
	b.fault.Store(nil)
	stream, err := b.js.Stream(ctx, b.streamName())
	if err != nil {
		return nil, fmt.Errorf("object store %s: %w", b.config.Bucket, err)
	}
	o = &opened{objects, stream}
	return o, nil
}

// forget makes the next use create the store again, if somebody deleted it.
func (b *bucket) forget() {
	<-b.open
	b.open <- nil
}

func (b *bucket) streamName() string { return "OBJ_" + b.config.Bucket }

func (b *bucket) chunkSubject(object string) string { return "$O." + b.config.Bucket + ".C." + object }

func (b *bucket) metaSubject(name string) string {
	return "$O." + b.config.Bucket + ".M." + base64.URLEncoding.EncodeToString([]byte(name))
}

// codeStoreFailed is JetStream's refusal of a message it has no room for.
const codeStoreFailed jetstream.ErrorCode = 10077

// publish stores one message, making room once if there is none.
func (b *bucket) publish(ctx context.Context, msg *nats.Msg, opts ...jetstream.PublishOpt) error {
	ctx, cancel := context.WithTimeout(ctx, storeTime)
	defer cancel()
	if _, err := b.store(ctx); err != nil {
		return unavailable(err)
	}
	opts = append(opts, jetstream.WithExpectStream(b.streamName()))
	_, err := b.js.PublishMsg(ctx, msg, opts...)
	if api := (*jetstream.APIError)(nil); errors.As(err, &api) && api.ErrorCode == codeStoreFailed {
		if err := b.evict(ctx); err != nil {
			return unavailable(fmt.Errorf("make room for a photo: %w", err))
		}
		_, err = b.js.PublishMsg(ctx, msg, opts...)
	}
	if errors.Is(err, jetstream.ErrNoStreamResponse) {
		b.forget()
	}
	return err
}

func (b *bucket) putChunk(ctx context.Context, object string, chunk []byte) error {
	if err := b.publish(ctx, &nats.Msg{Subject: b.chunkSubject(object), Data: chunk}); err != nil {
		return storeFault(err)
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
		return storeFault(err)
	}
	return nil
}

// undo deletes a photo of which is not known whether it was stored.
func (b *bucket) undo(ctx context.Context, photo, object string) {
	ctx, cancel := context.WithTimeout(ctx, storeTime)
	defer cancel()
	o, err := b.store(ctx)
	if err != nil {
		return // it will show, whole, or never arrived
	}
	if info, err := o.objects.GetInfo(ctx, photo); err == nil && info.NUID == object {
		_ = o.objects.Delete(ctx, photo) // as above
	}
}

var errUsed = refuse(http.StatusConflict, reasonUsed, "this address was used already")

// mustBeNew spares the device an upload that could only be refused.
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
		return storeFault(err)
	}
	return nil
}

// discard removes the chunks of an upload that came to nothing.
func (b *bucket) discard(ctx context.Context, object string) {
	ctx, cancel := context.WithTimeout(ctx, storeTime)
	defer cancel()
	if o, err := b.store(ctx); err == nil {
		_ = o.stream.Purge(ctx, jetstream.WithPurgeSubject(b.chunkSubject(object))) // else they age out
	}
}

func storeFault(err error) error {
	if no := (*refusal)(nil); errors.As(err, &no) {
		return no
	}
	return unavailable(err)
}

// evictBytes is how much room is made at once.
const evictBytes = 4 * MaxUpload

// evict deletes the oldest photos. Uploads that find the store full meanwhile
// wait for it.
func (b *bucket) evict(ctx context.Context) error {
	select {
	case b.evicting <- struct{}{}:
		defer func() { <-b.evicting }()
	case <-ctx.Done():
		return ctx.Err()
	}
	o, err := b.store(ctx)
	if err != nil {
		return err
	}
	status, err := o.stream.Info(ctx)
	if err != nil {
		return err
	}
	if status.State.Bytes+2*chunkSize <= uint64(b.config.MaxBytes) {
		return nil // another one made room while this one waited
	}
	if b.oldest > status.State.LastSeq {
		b.oldest = 0 // it is another stream
	}
	room := min(evictBytes, uint64(b.config.MaxBytes)/2)
	for seq, freed := max(b.oldest, status.State.FirstSeq), uint64(0); freed < room; {
		// The oldest photo is the first that was completed.
		msg, err := o.stream.GetMsg(ctx, seq, jetstream.WithGetMsgSubject(b.metaSubjects()))
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			b.oldest = 0
			return nil // what fills the store is not ours, or not complete and ages out
		}
		if err != nil {
			return err
		}
		seq, b.oldest = msg.Sequence+1, msg.Sequence
		var info jetstream.ObjectInfo
		if json.Unmarshal(msg.Data, &info) != nil {
			continue // not ours
		}
		if info.Deleted {
			if time.Since(msg.Time) > SnapshotLife { // nobody can use its name again
				_ = o.stream.DeleteMsg(ctx, msg.Sequence) // else it ages out
			}
			continue
		}
		if info.Metadata[metaDevice] == "" {
			continue // not ours
		}
		if err := o.objects.Delete(ctx, info.Name); err != nil && !errors.Is(err, jetstream.ErrObjectNotFound) {
			return err
		}
		b.evicted(ctx, info.Name)
		freed += info.Size
	}
	return nil
}

func (b *bucket) metaSubjects() string { return "$O." + b.config.Bucket + ".M.>" }

// scan calls f for every photo there is, in no order.
func (b *bucket) scan(ctx context.Context, o *opened, f func(*jetstream.ObjectInfo)) error {
	watcher, err := o.objects.Watch(ctx, jetstream.IgnoreDeletes())
	if err != nil {
		return err
	}
	defer func() {
		_ = watcher.Stop() // of a subscription that ends with its context anyway
		for range watcher.Updates() {
		} // whoever delivers may be waiting to hand over one more
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
			case info.Metadata[metaDevice] != "": // else not ours
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
