package precompressed

import (
	"bytes"
	"compress/gzip"
	"io"
	"net/http/httptest"
	"strings"
	"testing"
)

func TestAnswer(t *testing.T) {
	text := strings.Repeat("export const a = 1;\n", 100)
	long, short := New("text/javascript", []byte(text)), New("text/plain", []byte("x"))
	tag := ask(long, "GET", "", "").Header().Get("ETag")
	if tag == "" || tag == ask(short, "GET", "", "").Header().Get("ETag") {
		t.Fatalf("tag %q", tag)
	}
	for _, tc := range []struct {
		name           string
		a              Answer
		accept, match  string
		status         int
		gzipped, empty bool
	}{
		{"plain", long, "", "", 200, false, false},
		{"gzip", long, "br, GZIP;q=0.5", "", 200, true, false},
		{"refused gzip", long, "gzip;q=0", "", 200, false, false},
		{"invalid quality", long, "gzip;q=x", "", 200, false, false},
		{"too short", short, "gzip", "", 200, false, false},
		{"has it", long, "gzip", tag, 304, false, true},
		{"has it among others", long, "", `"other", ` + tag, 304, false, true},
		{"compared without W/", long, "", strings.TrimPrefix(tag, "W/"), 304, false, true},
		{"any", long, "", "*", 304, false, true},
		{"has another", long, "", `W/"0000000000000000"`, 200, false, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := ask(tc.a, "GET", tc.accept, tc.match)
			h := w.Header()
			if w.Code != tc.status || h.Get("Vary") != "Accept-Encoding" || h.Get("ETag") == "" ||
				(h.Get("Content-Encoding") == "gzip") != tc.gzipped || (w.Body.Len() == 0) != tc.empty {
				t.Fatalf("%d %v, %d bytes", w.Code, h, w.Body.Len())
			}
			if tc.gzipped {
				in, err := gzip.NewReader(bytes.NewReader(w.Body.Bytes()))
				if err != nil {
					t.Fatal(err)
				}
				if got, err := io.ReadAll(in); err != nil || string(got) != text {
					t.Errorf("%v, %d bytes", err, len(got))
				}
			}
		})
	}
	if gzipped, plain := long.Size(); plain != len(text) || gzipped >= plain {
		t.Errorf("size %d of %d", gzipped, plain)
	}
}

func ask(a Answer, method, accept, match string) *httptest.ResponseRecorder {
	r, w := httptest.NewRequest(method, "/", nil), httptest.NewRecorder()
	r.Header.Set("Accept-Encoding", accept)
	r.Header.Set("If-None-Match", match)
	a.ServeHTTP(w, r)
	return w
}
