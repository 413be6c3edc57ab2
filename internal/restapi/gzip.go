package restapi

import (
	"compress/gzip"
	"net/http"
	"strings"
	"sync"
)

// minGzip is the least an answer has that is compressed: below, it would be as long.
const minGzip = 1 << 10

var gzips = sync.Pool{New: func() any { return gzip.NewWriter(nil) }}

// gzipped are the beginnings of the types that shrink. Streams of events do not
// count: each event leaves at once.
var gzipped = []string{"application/json", "application/problem+json", "application/x-ndjson", "text/csv", "text/html"}

// gzipAnswer compresses an answer that is long enough and of a type that shrinks.
// It is used by one goroutine.
type gzipAnswer struct {
	http.ResponseWriter
	status int          // as set by the handler; 0: not yet
	held   []byte       // of an answer that may be short
	gz     *gzip.Writer // once it compresses
	plain  bool
}

// Unwrap is for http.ResponseController.
func (a *gzipAnswer) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// WriteHeader notes the status, which is sent when it is known whether the answer
// is compressed.
func (a *gzipAnswer) WriteHeader(status int) {
	if a.status != 0 || status < http.StatusOK {
		return
	}
	a.status = status
	h := a.Header()
	if h.Get("Content-Encoding") == "" {
		for _, kind := range gzipped {
			if strings.HasPrefix(h.Get("Content-Type"), kind) {
				h.Add("Vary", "Accept-Encoding")
				return
			}
		}
	}
	a.pass()
}

// pass sends the answer as it is from here on.
func (a *gzipAnswer) pass() {
	a.plain = true
	a.ResponseWriter.WriteHeader(a.status)
}

// Write sends bytes of the answer.
func (a *gzipAnswer) Write(b []byte) (int, error) {
	if a.status == 0 {
		a.WriteHeader(http.StatusOK)
	}
	switch {
	case a.plain:
		return a.ResponseWriter.Write(b)
	case a.gz != nil:
		return a.gz.Write(b)
	case len(a.held)+len(b) < minGzip:
		a.held = append(a.held, b...)
		return len(b), nil
	}
	if err := a.compress(); err != nil {
		return 0, err
	}
	return a.gz.Write(b)
}

func (a *gzipAnswer) compress() error {
	h := a.Header()
	h.Set("Content-Encoding", "gzip")
	h.Del("Content-Length")
	a.ResponseWriter.WriteHeader(a.status)
	a.gz = gzips.Get().(*gzip.Writer)
	a.gz.Reset(a.ResponseWriter)
	_, err := a.gz.Write(a.held)
	a.held = nil
	return err
}

// FlushError sends what was written, for http.ResponseController.
func (a *gzipAnswer) FlushError() error {
	if a.status == 0 {
		a.WriteHeader(http.StatusOK)
	}
	if !a.plain && a.gz == nil {
		if err := a.compress(); err != nil {
			return err
		}
	}
	if a.gz != nil {
		if err := a.gz.Flush(); err != nil {
			return err
		}
	}
	return http.NewResponseController(a.ResponseWriter).Flush()
}

// end completes the answer. It is not called for one that was aborted, whose
// reader must not take it for the whole.
func (a *gzipAnswer) end() {
	if a.gz != nil {
		_ = a.gz.Close() // the client is gone if this fails
		a.gz.Reset(nil)
		gzips.Put(a.gz)
		return
	}
	if a.status != 0 && !a.plain {
		a.pass()
		_, _ = a.ResponseWriter.Write(a.held)
	}
}
