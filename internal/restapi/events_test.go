package restapi

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/connlimit"
	"fleetd/internal/devices"
)

// follow opens a stream and returns its lines.
func (f *testFleet) follow(t *testing.T, ctx context.Context, query string, headers ...string) (lines *bufio.Scanner, header http.Header) {
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, f.url+"/v1/events"+query, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+f.token)
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = answer.Body.Close() })
	if answer.StatusCode != 200 {
		t.Fatalf("status %d", answer.StatusCode)
	}
	return bufio.NewScanner(answer.Body), answer.Header
}

func TestEvents(t *testing.T) {
	f := newFleet(t)
	f.events.queue = make(chan devices.StreamEvent, 8)
	f.events.ended = make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	f.events.queue <- devices.StreamEvent{Gap: true, ID: devices.EventPosition{41}, Data: []byte(`{"from":8,"to":41}`)}
	f.events.queue <- devices.StreamEvent{ID: devices.EventPosition{42, 7}, Kind: devices.EventOnline, Data: []byte("{\"a\":\n1,\r\n\"b\":\"\\n\"}")}
	f.events.queue <- devices.StreamEvent{Kind: devices.EventPhoto, Data: []byte(`{}`)}
	lines, header := f.follow(t, ctx, "?device=AABBCCDDEEFF&type=online", "Last-Event-ID", "7")
	if header.Get("Content-Type") != "text/event-stream; charset=utf-8" || header.Get("Cache-Control") != "no-store" {
		t.Errorf("%v", header)
	}
	want := []string{"id: 41", "event: gap", `data: {"from":8,"to":41}`, "", "id: 42.7", "event: online", `data: {"a": 1,  "b":"\n"}`, "", "event: photo", "data: {}", ""}
	for _, line := range want {
		for lines.Scan() && lines.Text() == ":" { // a heartbeat may come between
			lines.Scan()
		}
		if lines.Text() != line {
			t.Errorf("got %q, want %q", lines.Text(), line)
		}
	}
	f.events.mu.Lock()
	asked := slices.Clone(f.events.asked)
	f.events.mu.Unlock()
	if !reflect.DeepEqual(asked, []devices.EventQuery{{Device: robot, Kind: devices.EventOnline, After: devices.EventPosition{7}}}) {
		t.Errorf("%+v", asked)
	}
	cancel()
	if err := <-f.events.ended; !errors.Is(err, context.Canceled) {
		t.Errorf("follower ended with %v", err)
	}
}

func TestEventQueries(t *testing.T) {
	for _, tc := range []struct {
		query, header string
		want          devices.EventQuery
		bad           bool
	}{
		{"", "", devices.EventQuery{}, false},
		{"?last_event_id=9", "", devices.EventQuery{After: devices.EventPosition{9}}, false},
		{"?last_event_id=9", "10", devices.EventQuery{After: devices.EventPosition{10}}, false},
		{"", "10.77", devices.EventQuery{After: devices.EventPosition{10, 77}}, false},
		{"", "10.77.1", devices.EventQuery{After: devices.EventPosition{10, 77, 1}}, false},
		{"", "10.77.1.1", devices.EventQuery{}, true},
		{"?type=job.halted", "", devices.EventQuery{Kind: devices.EventJobHalted}, false},
		{"?type=task&device=robot-1", "", devices.EventQuery{Kind: devices.EventTask, Device: "robot-1"}, false},
		{"?type=job.halted&device=robot-1", "", devices.EventQuery{}, true},
		{"?type=job", "", devices.EventQuery{}, true},
		{"", "0", devices.EventQuery{FromStart: true}, false},
		{"?last_event_id=0.0", "", devices.EventQuery{FromStart: true}, false},
		{"?since=2026-03-01T12:00:00Z", "7", devices.EventQuery{After: devices.EventPosition{7}, Since: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)}, false},
		{"?since=soon", "", devices.EventQuery{}, true},
		{"?type=notifications", "", devices.EventQuery{Kind: devices.EventNotification}, false},
		{"?device=robot-1", "", devices.EventQuery{Device: "robot-1"}, false},
		{"?type=messages", "", devices.EventQuery{}, true},
		{"?type=>", "", devices.EventQuery{}, true},
		{"?device=a.b", "", devices.EventQuery{}, true},
		{"", "x", devices.EventQuery{}, true},
		{"", "-1", devices.EventQuery{}, true},
		{"", "99999999999999999999", devices.EventQuery{}, true},
	} {
		values, err := url.ParseQuery(strings.TrimPrefix(tc.query, "?"))
		if err != nil {
			t.Fatal(err)
		}
		in := followInput{Device: values.Get("device"), Kind: eventKind(values.Get("type")), Last: tc.header, LastID: values.Get("last_event_id"), Since: values.Get("since")}
		q, err := in.query(time.Now())
		if (err != nil) != tc.bad || err == nil && q != tc.want {
			t.Errorf("%s %s: %+v, %v", tc.query, tc.header, q, err)
		}
	}
	f := newFleet(t)
	f.do(t, "GET", "/v1/events?type=x", "").problem(t, 400, devices.CodeBadRequest)
	f.events.err = &devices.Error{Code: devices.CodeUnavailable, Part: "nats", Detail: "away"}
	if p := f.do(t, "GET", "/v1/events", "").problem(t, 503, devices.CodeUnavailable); p.Part != "nats" {
		t.Errorf("%+v", p)
	}
	f.draining.Store(true)
	f.do(t, "GET", "/v1/events", "").problem(t, 503, devices.CodeUnavailable)
}

// A quiet stream opens by itself and ends when the node drains.
func TestEventsDrain(t *testing.T) {
	f := newFleet(t)
	f.events.ended = make(chan error, 1)
	lines, _ := f.follow(t, t.Context(), "")
	if !lines.Scan() || lines.Text() != ":" {
		t.Errorf("first line %q", lines.Text())
	}
	f.draining.Store(true)
	for lines.Scan() {
	}
	if err := lines.Err(); err != nil {
		t.Errorf("the stream broke off: %v", err)
	}
	if err := <-f.events.ended; !errors.Is(err, context.Canceled) {
		t.Errorf("follower ended with %v", err)
	}
}

// A reader that stops reading is let go: nothing piles up for it.
func TestEventsSlowReader(t *testing.T) {
	f := newFleet(t)
	f.api.patience = 200 * time.Millisecond
	f.events.queue = make(chan devices.StreamEvent)
	f.events.ended = make(chan error, 1)
	conn, err := net.Dial("tcp", strings.TrimPrefix(f.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.(*net.TCPConn).SetReadBuffer(4096); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(conn, "GET /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "+f.token+"\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	event := devices.StreamEvent{ID: devices.EventPosition{1}, Kind: devices.EventNotification, Data: []byte(`"` + strings.Repeat("x", 1<<20) + `"`)}
	sent := 0
	for ended := false; !ended; {
		select {
		case f.events.queue <- event:
			if sent++; sent > 64 {
				t.Fatal("64 MiB were taken for a reader that does not read")
			}
		case err := <-f.events.ended:
			if !errors.Is(err, errSlowReader) {
				t.Errorf("follower ended with %v", err)
			}
			ended = true
		}
	}
}

// beats is a response that notes when something was written.
type beats struct {
	quiet
	start time.Time
	at    []time.Duration
}

func (b *beats) Write(p []byte) (int, error) {
	b.at = append(b.at, time.Since(b.start))
	return len(p), nil
}
func (b *beats) Flush()                           {}
func (b *beats) SetWriteDeadline(time.Time) error { return nil }

func TestHeartbeat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &beats{quiet: quiet{header: http.Header{}}, start: time.Now()}
		e := newEventStream(b, streamWrite)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		go func() {
			time.Sleep(20 * time.Second)
			if err := e.event(devices.StreamEvent{ID: devices.EventPosition{1}, Kind: devices.EventOnline, Data: []byte("{}")}); err != nil {
				t.Error(err)
			}
		}()
		e.keep(ctx, func() bool { return false })
		var seconds []int
		for _, at := range b.at {
			seconds = append(seconds, int(at.Round(time.Second)/time.Second))
		}
		// The start, one heartbeat, the event, and 15 s after each the next.
		if !slices.Equal(seconds, []int{0, 15, 20, 35, 50}) {
			t.Errorf("written at %v", b.at)
		}
	})
}

// flushes is a response that counts what was written, what of it was sent, and how often.
type flushes struct {
	quiet
	written, sent, times int
}

func (f *flushes) Write(p []byte) (int, error)      { f.written += len(p); return len(p), nil }
func (f *flushes) Flush()                           { f.sent, f.times = f.written, f.times+1 }
func (f *flushes) SetWriteDeadline(time.Time) error { return nil }

// An event that comes alone is sent at once, many that come together are sent together, soon.
func TestEventsAreSentTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &flushes{quiet: quiet{header: http.Header{}}}
		e := newEventStream(f, streamWrite)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go e.keep(ctx, func() bool { return false })
		time.Sleep(time.Second)
		synctest.Wait()
		send := func(n int) {
			for range n {
				if err := e.event(devices.StreamEvent{ID: devices.EventPosition{1}, Kind: devices.EventOnline, Data: []byte("{}")}); err != nil {
					t.Error(err)
				}
			}
		}
		check := func(when string, flushed int) {
			t.Helper()
			e.mu.Lock()
			defer e.mu.Unlock()
			if f.times != flushed {
				t.Errorf("%s: %d flushes, want %d", when, f.times, flushed)
			}
			f.times = 0
		}
		check("after the start", 1) // the heartbeat
		send(1)
		check("one event", 1)
		time.Sleep(time.Second)
		check("later", 0)
		send(1000)
		check("1000 events, while they come", 1)
		time.Sleep(flushEvery)
		synctest.Wait()
		check("soon after them", 1)
		if f.sent != f.written {
			t.Errorf("%d of %d bytes were sent", f.sent, f.written)
		}
	})
}

// A key has a bounded number of streams, and gets its place back when one ends.
func TestStreamsOfKey(t *testing.T) {
	f := newFleet(t)
	f.events.queue = make(chan devices.StreamEvent)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	f.follow(t, ctx, "")
	key := access.Admin.Key
	for range streamsOfKey - 1 {
		if err := f.api.enterStream(access.Admin); err != nil {
			t.Fatal(err)
		}
		defer f.api.streams.Release(key)
	}
	f.api.opt.Work = connlimit.NewWork()
	// security: N43
	f.do(t, "GET", "/v1/events", "").problem(t, 429, devices.CodeRateLimited)
	if n := f.api.opt.Work.Streams.Load(); n != 1 {
		t.Errorf("%d refusals are counted", n)
	}
	cancel()
	for deadline := time.Now().Add(10 * time.Second); !f.api.streams.Acquire(key); {
		if time.Now().After(deadline) {
			t.Fatal("the stream of a client that left is open after 10 s")
		}
		runtime.Gosched()
	}
	f.api.streams.Release(key)
	f.follow(t, t.Context(), "")
}

// A key may end after the check of its request and before the handler looks it up again: the stream is refused, as
// any request with a key that has ended.
func TestStreamsOfAKeyThatEnded(t *testing.T) {
	f := newFleet(t)
	f.put(robot, "board", "2.4.2", nil)
	if r := f.do(t, http.MethodPost, "/v1/devices/"+string(robot)+"/trace", `{"payload":true}`); r.status != http.StatusCreated {
		t.Fatalf("%d %s", r.status, r.body)
	}
	for name, handler := range map[string]http.HandlerFunc{
		"/v1/events": func(w http.ResponseWriter, r *http.Request) { f.api.events(w, r, &followInput{}) },
		"/v1/devices/" + string(robot) + "/trace": func(w http.ResponseWriter, r *http.Request) { f.api.followTrace(w, r, &DevicePath{string(robot)}) },
	} {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, name, nil)
		r.Header.Set("Authorization", "Bearer of-a-key-that-ended")
		w := httptest.NewRecorder()
		handler(w, r)
		if w.Code != http.StatusUnauthorized || !strings.Contains(w.Body.String(), string(devices.CodeUnauthorized)) {
			t.Errorf("%s: %d %s", name, w.Code, w.Body)
		}
	}
}
