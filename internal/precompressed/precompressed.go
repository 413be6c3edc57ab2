// Package precompressed serves HTTP answers that never change while the program runs. They are
// compressed once, so that clients without a token cannot make the node do it for each request.
package precompressed

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"strconv"
	"strings"
)

// Answer is a body with its type and entity tag. It is immutable, and an http.Handler for GET
// and HEAD; the caller sets all other headers.
type Answer struct {
	contentType, etag string
	plain, gzipped    []byte // gzipped is nil if it would not be shorter
}

// New compresses a body.
func New(contentType string, body []byte) Answer {
	sum := sha256.Sum256(body)
	a := Answer{contentType: contentType, etag: `W/"` + hex.EncodeToString(sum[:8]) + `"`, plain: body}
	var b bytes.Buffer
	gz, _ := gzip.NewWriterLevel(&b, gzip.BestCompression) // the level is valid
	_, _ = gz.Write(body)                                  // a bytes.Buffer takes everything
	_ = gz.Close()
	if b.Len() < len(body) {
		a.gzipped = b.Bytes()
	}
	return a
}

// ServeHTTP answers one request; with 304 if the client has the body already.
func (a Answer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("ETag", a.etag)
	h.Set("Vary", "Accept-Encoding")
	for tag := range strings.SplitSeq(r.Header.Get("If-None-Match"), ",") {
		if tag = strings.TrimSpace(tag); tag == "*" || tag != "" && strings.TrimPrefix(tag, "W/") == strings.TrimPrefix(a.etag, "W/") {
			w.WriteHeader(http.StatusNotModified)
			return
		}
	}
	h.Set("Content-Type", a.contentType)
	body := a.plain
	if a.gzipped != nil && AcceptsGzip(r) {
		h.Set("Content-Encoding", "gzip")
		body = a.gzipped
	}
	_, _ = w.Write(body) // the client is gone if this fails
}

// Size returns the bytes of the body as sent, with gzip and without.
func (a Answer) Size() (gzipped, plain int) {
	if a.gzipped == nil {
		return len(a.plain), len(a.plain)
	}
	return len(a.gzipped), len(a.plain)
}

// AcceptsGzip reports whether the client accepts an answer that is compressed with gzip.
func AcceptsGzip(r *http.Request) bool {
	for coding := range strings.SplitSeq(r.Header.Get("Accept-Encoding"), ",") {
		name, quality, _ := strings.Cut(strings.TrimSpace(coding), ";")
		if strings.EqualFold(strings.TrimSpace(name), "gzip") {
			value, found := strings.CutPrefix(strings.ReplaceAll(quality, " ", ""), "q=")
			q, err := strconv.ParseFloat(value, 64)
			return !found || err == nil && q > 0
		}
	}
	return false
}
