package vision

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"hash"
	"image/jpeg"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/nats-io/nuid"
)

// chunks contains the buffers of uploads; at most MaxUploads are in use.
var chunks = sync.Pool{New: func() any { b := make([]byte, chunkSize); return &b }}

// draft is a photo that is being stored: full chunks are already in the bucket, under a
// name to which no object refers before commit.
type draft struct {
	bucket *bucket
	object string // name of the chunks
	chunk  *[]byte
	fill   int
	size   int64
	stored int  // number of chunks
	begun  bool // a chunk may be in the bucket
	sum    hash.Hash
	tail   tail

	storing time.Duration // time spent storing chunks
}

func newDraft(b *bucket) *draft {
	return &draft{bucket: b, object: nuid.Next(), chunk: chunks.Get().(*[]byte), sum: sha256.New()}
}

// free returns the buffer to the pool.
func (d *draft) free() { chunks.Put(d.chunk) }

// readFile reads the JPEG to its end and checks it.
func (d *draft) readFile(ctx context.Context, file io.Reader) error {
	for {
		n, err := file.Read((*d.chunk)[d.fill:])
		d.fill += n
		if d.size+int64(d.fill) > MaxUpload {
			return errPhotoTooLarge
		}
		if d.fill == chunkSize {
			if err := d.flush(ctx); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return readError(err)
		}
	}
	if d.fill > 0 || d.size == 0 {
		if err := d.flush(ctx); err != nil {
			return err
		}
	}
	if !d.tail.complete {
		return refuse(http.StatusUnsupportedMediaType, reasonNotJPEG, "the photo is not a complete JPEG")
	}
	return nil
}

// flush stores the chunk. It checks the header of the picture in the first one.
func (d *draft) flush(ctx context.Context) error {
	b := (*d.chunk)[:d.fill]
	if d.size == 0 {
		if err := checkHead(b); err != nil {
			return err
		}
	}
	d.tail.add(b)
	d.sum.Write(b)
	d.begun = true
	begun := time.Now()
	err := d.bucket.putChunk(ctx, d.object, b)
	d.storing += time.Since(begun)
	if err != nil {
		return err
	}
	d.size += int64(len(b))
	d.stored++
	d.fill = 0
	return nil
}

// commit makes the photo an object, unless its name was used.
func (d *draft) commit(ctx context.Context, u upload) error {
	return d.bucket.putObject(ctx, d.object, d.stored, d.size, d.sum.Sum(nil), u)
}

// abort removes the chunks. If the bucket cannot be reached, they age out.
func (d *draft) abort(ctx context.Context) {
	if d.begun {
		d.bucket.discard(ctx, d.object)
	}
}

// checkHead refuses data that do not begin as a JPEG of an allowed size. Cameras write the
// dimensions within the first hundreds of bytes.
func checkHead(b []byte) error {
	config, err := jpeg.DecodeConfig(bytes.NewReader(b))
	if err != nil {
		return refuse(http.StatusUnsupportedMediaType, reasonNotJPEG, "the photo is not a JPEG")
	}
	if config.Width < 1 || config.Height < 1 || config.Width > MaxSide || config.Height > MaxSide {
		return refuse(http.StatusUnsupportedMediaType, reasonNotJPEG, "the photo has %d by %d pixels; the limit for each side is %d", config.Width, config.Height, MaxSide)
	}
	return nil
}

// tail detects the end of a JPEG: the marker FF D9, followed only by zeros, with which some
// cameras fill their last block.
type tail struct{ marker, complete bool }

func (t *tail) add(b []byte) {
	for _, c := range b {
		if t.complete && c == 0 {
			continue
		}
		t.complete = t.marker && c == 0xD9
		t.marker = c == 0xFF
	}
}
