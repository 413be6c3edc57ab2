package restapi

import (
	"compress/gzip"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"fleetd/internal/racetest"
)

// Long answers are compressed for clients that take it, whole; others, short ones
// and pictures are not.
func TestGzip(t *testing.T) {
	f := newFleet(t)
	plain := f.do(t, "GET", "/openapi.json", "")
	for _, tc := range []struct {
		name, path, accept string
		gzipped            bool
	}{
		{"long", "/openapi.json", "gzip", true},
		{"page", "/docs", "br;q=1.0, gzip;q=0.8", true},
		{"not taken", "/openapi.json", "br", false},
		{"refused", "/openapi.json", "gzip;q=0", false},
		{"short", "/v1/self", "gzip", false},
		{"problem", "/v1/devices/none", "gzip", false},
		{"picture", "/v1/photos/photo9", "gzip", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := f.do(t, "GET", tc.path, "", "Accept-Encoding", tc.accept)
			if got := r.header.Get("Content-Encoding") == "gzip"; got != tc.gzipped {
				t.Fatalf("compressed: %v, %v", got, r.header)
			}
			if !tc.gzipped {
				return
			}
			in, err := gzip.NewReader(strings.NewReader(r.body))
			if err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(in)
			if err != nil || r.header.Get("Content-Length") != "" || r.header.Get("Vary") != "Accept-Encoding" {
				t.Errorf("%v, %v", err, r.header)
			}
			if tc.path == "/openapi.json" && string(text) != plain.body {
				t.Error("it is another document")
			}
		})
	}
}

// The document names its server, and the bare address lists where to go.
func TestRootAndServers(t *testing.T) {
	f := newFleet(t)
	var document struct{ Servers []struct{ URL string } }
	f.do(t, "GET", "/openapi.json", "").json(t, &document)
	if len(document.Servers) != 1 || document.Servers[0].URL != "/" {
		t.Errorf("%+v", document.Servers)
	}
	r := f.do(t, "GET", "/", "", "Authorization", "")
	if r.status != http.StatusOK || !strings.Contains(r.body, "/docs") {
		t.Errorf("%d %s", r.status, r.body)
	}
}

// What anybody may request and never changes is not compressed for each request.
func TestDocumentsAreCompressedOnce(t *testing.T) {
	racetest.Skip(t, "a share of time")
	f := newFleet(t)
	plain := []byte(f.do(t, "GET", "/openapi.json", "").body)
	// least is the time of the fastest of many: what another program takes meanwhile is in neither.
	least := func(do func()) time.Duration {
		best := time.Hour
		for range 50 {
			begun := time.Now()
			do()
			best = min(best, time.Since(begun))
		}
		return best
	}
	each := least(func() {
		gz := gzip.NewWriter(io.Discard)
		_, _ = gz.Write(plain) // io.Discard takes everything
		_ = gz.Close()
	})
	for _, path := range []string{"/openapi.json", "/docs"} {
		took := least(func() {
			r := httptest.NewRequest("GET", path, nil)
			r.Header.Set("Accept-Encoding", "gzip")
			w := httptest.NewRecorder()
			f.api.ServeHTTP(w, r)
			if w.Code != http.StatusOK || w.Header().Get("Content-Encoding") != "gzip" {
				t.Fatal(w.Code, w.Header())
			}
		})
		// security: N42
		if took > each/2 {
			t.Errorf("%s takes %v, and compressing the document %v", path, took, each)
		}
	}
}
