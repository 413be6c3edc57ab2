package apiclient

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"strconv"
	"strings"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/clock"
)

const (
	// maxEventLine bounds a line of the stream, and the data of one event; far above what a device may send.
	maxEventLine = 4 << 20
	// firstRetry doubles up to lastRetry while the server stays away.
	firstRetry = 250 * time.Millisecond
	lastRetry  = 10 * time.Second
)

// Event is one event of the stream.
type Event struct {
	// ID is the sequence in the stream, to resume after; empty for events that are not stored.
	ID string
	// Type is the kind, such as "online" or "notifications.robot.fell"; "gap": events are missing.
	Type string
	// Data is the payload, a JSON object.
	Data []byte
}

// EventOptions selects events; empty fields select all.
type EventOptions struct {
	Device, Type string
	// After is the ID after which to start; empty starts with Since, or if that is zero, with what happens next.
	After string
	Since time.Time
	// OnOpen is called, if set, whenever the server has accepted, before the first event.
	OnOpen func()
	// OnRetry is called, if set, before each wait for a server that went away.
	OnRetry func(cause error, wait time.Duration)
}

// Events follows live events until the context ends, which ends the sequence without an error. A stream that breaks is
// resumed after the last event with an ID. Only what trying again cannot repair ends the sequence with an error: an
// answer that refuses, or a server that was not there in the first place.
func (c *Client) Events(ctx context.Context, options EventOptions) iter.Seq2[Event, error] {
	return (&stream{client: c, path: pathOf("events"), options: options, after: options.After, wait: firstRetry}).all(ctx)
}

// TraceEvents yields the events of a device's trace, `trace` and at last `end`, until ctx ends. It connects again
// when the connection is lost, and calls onRetry before, if it is not nil.
func (c *Client) TraceEvents(ctx context.Context, device string, onRetry func(cause error, wait time.Duration)) iter.Seq2[Event, error] {
	s := &stream{client: c, path: pathOf("devices", device, "trace"), options: EventOptions{OnRetry: onRetry}, wait: firstRetry}
	return func(yield func(Event, error) bool) {
		for event, err := range s.all(ctx) {
			if s.after = ""; !yield(event, err) || event.Type == "end" {
				return
			}
		}
	}
}

// all yields the events of one connection after the other.
func (s *stream) all(ctx context.Context) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		for {
			err := s.follow(ctx, yield)
			if ctx.Err() != nil || errors.Is(err, errEnough) {
				return
			}
			if s.isFinal(err) {
				yield(Event{}, err)
				return
			}
			if s.options.OnRetry != nil {
				s.options.OnRetry(err, s.wait)
			}
			if !clock.Sleep(ctx, s.wait) {
				return
			}
			s.wait = min(2*s.wait, lastRetry)
		}
	}
}

// errEnough means that the consumer wants no more events.
var errEnough = errors.New("the consumer stopped")

// stream is the state that outlives one connection.
type stream struct {
	client  *Client
	path    string
	options EventOptions
	after   string
	wait    time.Duration
	opened  bool // whether the server ever accepted
}

// isFinal reports whether trying again is pointless.
func (s *stream) isFinal(err error) bool {
	if !s.opened {
		return true
	}
	var problem *Problem
	if !errors.As(err, &problem) {
		return false
	}
	return problem.Status < 500 && problem.Status != http.StatusTooManyRequests
}

// follow reads one connection to its end. It always returns an error.
func (s *stream) follow(ctx context.Context, yield func(Event, error) bool) error {
	query := Query{"device": s.options.Device, "type": s.options.Type}
	header := http.Header{"Accept": {"text/event-stream"}}
	switch {
	case s.after != "":
		header.Set("Last-Event-ID", s.after)
	case !s.options.Since.IsZero():
		query["since"] = s.options.Since.UTC().Format(time.RFC3339Nano)
	}
	resp, err := s.client.do(ctx, http.MethodGet, s.path, query, nil, header)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if kind := resp.Header.Get("Content-Type"); !strings.HasPrefix(kind, "text/event-stream") {
		return &Problem{Problem: api.Problem{Status: http.StatusNotAcceptable, Title: "Not Acceptable",
			Detail: fmt.Sprintf("%s answered %q instead of an event stream: is it the API of a fleetd node?", s.client.base, kind)}}
	}
	s.opened, s.wait = true, firstRetry
	if s.options.OnOpen != nil {
		s.options.OnOpen()
	}
	reader := newEventReader(resp.Body, s.after, maxEventLine)
	for {
		event, err := reader.next()
		if reader.retry > 0 {
			s.wait = min(reader.retry, lastRetry)
		}
		if err != nil {
			return fmt.Errorf("the event stream of %s ended: %w", s.client.base, err)
		}
		s.after = reader.id
		if !yield(event, nil) {
			return errEnough
		}
	}
}

// eventReader decodes the text/event-stream format of the HTML standard, section 9.2.6, as nodes write it: lines end in LF,
// and no byte order mark comes first.
type eventReader struct {
	lines *bufio.Scanner
	// longest is what the data of one event may have, in bytes.
	longest int
	// id is the last one seen; it holds until the server sends another.
	id string
	// retry is the waiting time the server asked for, or 0.
	retry time.Duration
}

func newEventReader(r io.Reader, id string, longest int) *eventReader {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, longest)
	return &eventReader{lines: lines, longest: longest, id: id}
}

// next returns the next complete event; one that the end of the stream cuts off is dropped.
func (r *eventReader) next() (Event, error) {
	var kind string
	var data []byte
	id, hasID, hasData := r.id, false, false
	for r.lines.Scan() {
		line := r.lines.Bytes()
		if len(line) == 0 {
			r.id = id
			if !hasData {
				kind, hasID = "", false
				continue
			}
			event := Event{Type: kind, Data: data}
			if hasID {
				event.ID = id
			}
			if kind == "" {
				event.Type = "message"
			}
			return event, nil
		}
		field, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimPrefix(value, []byte(" "))
		switch string(field) {
		case "event":
			kind = string(value)
		case "data":
			if hasData {
				data = append(data, '\n')
			}
			data, hasData = append(data, value...), true
			if len(data) > r.longest {
				return Event{}, bufio.ErrTooLong
			}
		case "id":
			if !bytes.ContainsRune(value, 0) {
				id, hasID = string(value), true
			}
		case "retry":
			if ms, err := strconv.ParseUint(string(value), 10, 31); err == nil {
				r.retry = time.Duration(ms) * time.Millisecond
			}
		}
	}
	if err := r.lines.Err(); err != nil {
		return Event{}, err
	}
	return Event{}, io.EOF
}
