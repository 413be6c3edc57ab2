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

// chunks holds the buffers of uploads; there are at most MaxUploads in use.
var chunks = sync.Pool{New: func() any { b := make([]byte, chunkSize); return &b }}

// draft is a photo on its way into the bucket: full chunks are there already,
// under a name that no object refers to before commit.
type draft struct {
	bucket *bucket
	object string // the chunks' name
	chunk  *[]byte
	fill   int
	size   int64
	stored int  // chunks
	begun  bool // a chunk may be in the bucket
	sum    hash.Hash
	tail   tail

	storing time.Duration // what the bucket took so far
}

func newDraft(b *bucket) *draft {
	return &draft{bucket: b, object: nuid.Next(), chunk: chunks.Get().(*[]byte), sum: sha256.New()}
}

// free gives the buffer back.
func (d *draft) free() { chunks.Put(d.chunk) }

// readFile takes the JPEG to its end and checks it.
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
			return readFault(err)
		}
	}
	if d.fill > 0 || d.size == 0 {
		if err := d.flush(ctx); err != nil {
			return err
		}
	}
	if !d.tail.complete {
		return refuse(http.StatusUnsupportedMediaType, reasonNotJPEG, "the photo has no end: it is not a whole JPEG")
	}
	return nil
}

// flush stores the chunk. The first one must show what the picture is.
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

// commit makes the photo an object, unless there is one of this name.
func (d *draft) commit(ctx context.Context, u upload) error {
	return d.bucket.putObject(ctx, d.object, d.stored, d.size, d.sum.Sum(nil), u)
}

// abort takes the chunks back. If the bucket cannot be reached they age out.
func (d *draft) abort(ctx context.Context) {
	if d.begun {
		d.bucket.discard(ctx, d.object)
	}
}

// checkHead refuses what does not begin as a JPEG of a sensible size. Cameras
// put the dimensions within the first hundreds of bytes.
func checkHead(b []byte) error {
	config, err := jpeg.DecodeConfig(bytes.NewReader(b))
	if err != nil {
		return refuse(http.StatusUnsupportedMediaType, reasonNotJPEG, "the photo is not a JPEG")
	}
	if config.Width < 1 || config.Height < 1 || config.Width > MaxSide || config.Height > MaxSide {
		return refuse(http.StatusUnsupportedMediaType, reasonNotJPEG, "the photo has %d by %d pixels; a side may have %d", config.Width, config.Height, MaxSide)
	}
	return nil
}

// tail looks for the end of a JPEG: the marker FF D9, and behind it nothing
// but zeros, with which some cameras fill their last block.
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
