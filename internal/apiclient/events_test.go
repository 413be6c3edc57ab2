package apiclient

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"
	"time"
)

func TestEventFormat(t *testing.T) {
	cases := []struct {
		name, stream string
		want         []Event
	}{
		{"one", "id: 7\nevent: online\ndata: {\"a\":1}\n\n", []Event{{"7", "online", []byte(`{"a":1}`)}}},
		{"carriage returns", "id:7\r\nevent:online\r\ndata:x\r\n\r\nid:8\r\ndata:y\r\n\r\n", []Event{{"7", "online", []byte("x")}, {"8", "message", []byte("y")}}},
		{"comments and unknown fields", ": ping\n\nfoo: bar\nbaz\ndata: x\n\n", []Event{{"", "message", []byte("x")}}},
		{"lines of data", "data: a\ndata:\ndata:  b\n\n", []Event{{"", "message", []byte("a\n\n b")}}},
		{"type without data", "event: online\n\ndata: x\n\n", []Event{{"", "message", []byte("x")}}},
		{"cut off", "data: x\n\nid: 9\ndata: y\n", []Event{{"", "message", []byte("x")}}},
		{"empty data", "data\n\n", []Event{{"", "message", nil}}},
	}
	for _, tc := range cases {
		for _, how := range []struct {
			name string
			wrap func(io.Reader) io.Reader
		}{{"whole", func(r io.Reader) io.Reader { return r }}, {"bytewise", iotest.OneByteReader}} {
			r := newEventReader(how.wrap(strings.NewReader(tc.stream)), "", maxEventLine)
			var got []Event
			for {
				event, err := r.next()
				if err != nil {
					if !errors.Is(err, io.EOF) {
						t.Errorf("%s, %s: %v", tc.name, how.name, err)
					}
					break
				}
				got = append(got, event)
			}
			if !reflect.DeepEqual(got, tc.want) {
				t.Errorf("%s, %s:\n got %q\nwant %q", tc.name, how.name, got, tc.want)
			}
		}
	}
	r := newEventReader(strings.NewReader("retry: 1500\nretry: soon\nid: a\x00b\nid: 5\ndata: x\n\n"), "4", maxEventLine)
	if event, err := r.next(); err != nil || event.ID != "5" || r.id != "5" || r.retry != 1500*time.Millisecond {
		t.Errorf("%+v, %v, id %q, retry %v", event, err, r.id, r.retry)
	}
	long := newEventReader(strings.NewReader("data: "+strings.Repeat("x", maxEventLine+1)), "", maxEventLine)
	if _, err := long.next(); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("an endless line: %v", err)
	}
}

// TestEventsResume breaks the stream, sends 503, and checks that each attempt requests what is missing.
func TestEventsResume(t *testing.T) {
	attempt := 0
	var asked []string
	c := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		attempt++
		asked = append(asked, r.Header.Get("Last-Event-ID"))
		if r.URL.RequestURI() != "/v1/events?device=d&type=online" || r.Header.Get("Accept") != "text/event-stream" {
			t.Errorf("asked %s for %s", r.URL.RequestURI(), r.Header.Get("Accept"))
		}
		switch attempt {
		case 1:
			w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
			fmt.Fprint(w, "retry: 1\n\nid: 11\nevent: online\ndata: {\"n\":1}\n\nid: 12\ndata: cut of")
		case 2:
			w.WriteHeader(http.StatusServiceUnavailable)
		case 3:
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "event: messages.listen\ndata: {\"n\":2}\n\nid: 12\nevent: offline\ndata: {\"n\":3}\n\n")
		default:
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "event: gap\ndata: {}\n\n")
		}
	})
	var got []string
	var retries int
	options := EventOptions{Device: "d", Type: "online", After: "10", OnRetry: func(cause error, wait time.Duration) {
		retries++
		if cause == nil || wait <= 0 {
			t.Errorf("retry for %v after %v", cause, wait)
		}
	}}
	for event, err := range c.Events(t.Context(), options) {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, event.ID+" "+event.Type+" "+string(event.Data))
		if event.Type == "gap" {
			break
		}
	}
	want := []string{`11 online {"n":1}`, ` messages.listen {"n":2}`, `12 offline {"n":3}`, ` gap {}`}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if !reflect.DeepEqual(asked, []string{"10", "11", "11", "12"}) || retries != 3 {
		t.Errorf("asked after %q with %d retries", asked, retries)
	}
}

func TestEventsEnd(t *testing.T) {
	t.Run("context", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		c := newServer(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "data: x\n\n")
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		})
		count := 0
		for _, err := range c.Events(ctx, EventOptions{}) {
			if err != nil {
				t.Fatal(err)
			}
			count++
			cancel()
		}
		if count != 1 {
			t.Errorf("%d events", count)
		}
	})
	refusals := []struct {
		name    string
		handler http.HandlerFunc
		want    string
	}{
		{"unauthorized", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) }, "Unauthorized; this command sent the token of --token or FLEETD_TOKEN (HTTP 401)"},
		{"unavailable from the start", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) }, "Service Unavailable (HTTP 503)"},
		{"something else", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") }, "instead of an event stream"},
	}
	for _, tc := range refusals {
		t.Run(tc.name, func(t *testing.T) {
			c := newServer(t, tc.handler)
			_, err := Collect(c.Events(t.Context(), EventOptions{}))
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v, want %q", err, tc.want)
			}
		})
	}
	t.Run("refused later", func(t *testing.T) {
		attempt := 0
		c := newServer(t, func(w http.ResponseWriter, _ *http.Request) {
			if attempt++; attempt > 1 {
				w.WriteHeader(http.StatusForbidden)
				return
			}
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "retry: 1\n\ndata: x\n\n")
		})
		if _, err := Collect(c.Events(t.Context(), EventOptions{})); err == nil || attempt != 2 {
			t.Errorf("%v after %d attempts", err, attempt)
		}
	})
}

// FuzzEventReader checks that the reader ends on every input and gives the same events however the bytes are cut.
func FuzzEventReader(f *testing.F) {
	f.Add("id: 7\r\nevent: online\r\ndata: {}\r\n\r\n")
	f.Add(": c\ndata\r\ndata: x\r\r\n\r\nretry: 5\n\n")
	f.Add("data:a\ndata: b\ndata\nid\n\nid:1\x00\nevent:x\ndata:\n\ndata:cut off")
	f.Fuzz(func(t *testing.T, stream string) {
		read := func(r io.Reader) (events []Event) {
			reader := newEventReader(r, "", maxEventLine)
			for {
				event, err := reader.next()
				if err != nil {
					return events
				}
				events = append(events, event)
			}
		}
		whole, pieces := read(strings.NewReader(stream)), read(iotest.OneByteReader(strings.NewReader(stream)))
		if !reflect.DeepEqual(whole, pieces) {
			t.Errorf("whole %q, in pieces %q", whole, pieces)
		}
		if want := readEvents(stream); !reflect.DeepEqual(whole, want) {
			t.Errorf("%q is %q, want %q", stream, whole, want)
		}
	})
}

// readEvents reads a whole stream as the HTML standard puts it (9.2.6), with
// the differences that a carriage return alone ends no line, that an event has
// an id only if it brings one, and that a byte order mark is none.
func readEvents(stream string) (events []Event) {
	var data []string
	kind, id, hasID := "", "", false
	for line := range strings.Lines(stream) {
		line = strings.TrimSuffix(strings.TrimSuffix(line, "\n"), "\r")
		name, value, _ := strings.Cut(line, ":")
		value = strings.TrimPrefix(value, " ")
		switch {
		case line == "":
			if data != nil {
				e := Event{Type: "message", Data: append([]byte(nil), strings.Join(data, "\n")...)}
				if kind != "" {
					e.Type = kind
				}
				if hasID {
					e.ID = id
				}
				events = append(events, e)
			}
			data, kind, id, hasID = nil, "", "", false
		case name == "data":
			data = append(data, value)
		case name == "event":
			kind = value
		case name == "id" && !strings.Contains(value, "\x00"):
			id, hasID = value, true
		}
	}
	return events
}
