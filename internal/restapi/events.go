package restapi

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/tasks"
)

// Timing of event streams.
const (
	streamTick  = 250 * time.Millisecond // looks for the start, a drain, the end of the key, and a heartbeat that is due
	heartbeat   = 15 * time.Second
	streamWrite = 10 * time.Second // a reader this slow is let go; it can resume
	// flushEvery is how long an event waits at most for others to be sent with it. One
	// that comes alone is sent at once.
	flushEvery = 5 * time.Millisecond
	// streamsOfKey are the streams of events and traces that one key may have open at one node.
	streamsOfKey = 64
)

const pathEvents = "/v1/events"

type followInput struct {
	Device string    `query:"device" doc:"The stream has only events of this device, and of its tasks."`
	Kind   eventKind `query:"type" doc:"The stream has only events of this kind; those of jobs have no device."`
	Batch  string    `query:"batch" doc:"It is an interval from 100ms to 5s, such as 500ms, for pages: instead of single events, the stream has one event 'changes' with {events: [{type, data}], replaced, omitted} in each interval. Of online and offline, and of catalog, only a device's last one is in it (replaced counts the others). Of more than 500 events the newest are in it, and omitted counts the others."`
	Last   string    `header:"Last-Event-ID" doc:"The id of the last event that was received, or 0."`
	LastID string    `query:"last_event_id" doc:"It is the same as the header, which wins."`
	Since  string    `query:"since" doc:"The stream begins with the events of then. It is RFC 3339, or a duration before now, such as 1h. An id to resume after wins."`
}

// eventKind is a kind of stored events.
type eventKind string

// Schema implements huma.SchemaProvider.
func (eventKind) Schema(huma.Registry) *huma.Schema {
	schema := &huma.Schema{Type: huma.TypeString}
	for _, kind := range devices.StoredKinds() {
		schema.Enum = append(schema.Enum, string(kind))
	}
	schema.PrecomputeMessages()
	return schema
}

func (s *Server) eventRoutes() {
	plain(s, withAnswer(s.operation(http.MethodGet, pathEvents, about{id: "followEvents", scope: access.ScopeEvents, tag: tagEvents, summary: "Follow events",
		text: "Server-sent events: id is the position in the streams, event the kind, data the payload on one line. With Last-Event-ID the answer " +
			"resumes after that event, with 0 at the first there is; if some after it are gone already, it begins with one `gap` event for each stream. A key that is limited to devices receives events of these. Of jobs and their tasks, a key that is limited to devices or tools receives only those of the jobs that it created. A comment every 15 s keeps proxies patient.",
		answer: "Events until the client goes away, reads too slowly, its key ends, or the node stops.", codes: []devices.Code{devices.CodeUnavailable}}),
		"text/event-stream", &huma.Schema{Type: huma.TypeString}), s.events)
}

func (s *Server) events(w http.ResponseWriter, r *http.Request, in *followInput) {
	by := s.by(r, access.ViaREST)
	q, err := in.query(clock.Now())
	batch, batchErr := in.interval()
	if err == nil {
		err = batchErr
	}
	if err == nil && q.Device != "" {
		err = s.permitDevice(r.Context(), by, access.ScopeEvents, "followEvents", q.Device)
	}
	if err == nil {
		err = s.draining()
	}
	if err == nil {
		err = s.enterStream(by.Caller)
	}
	if err != nil {
		s.fail(w, r, err)
		return
	}
	defer s.streams.Release(by.Caller.Key)
	out, ctx := s.eventStream(w, r, func(context.Context) bool { return s.opt.Service.Keys().Valid(by.Caller, clock.Now()) != nil })
	deliver := out.event
	if batch > 0 {
		batches := &eventBatch{out: out}
		deliver = batches.add
		out.do(func() { batches.run(ctx, batch) })
	}
	err = s.opt.Events.Follow(ctx, q, func(e devices.StreamEvent) error {
		switch err := s.opt.Service.PermitEvent(ctx, by, &e); { // labels may change while it lasts
		case isUnavailable(err): // its labels: the client resumes here
			return err
		case err != nil:
			return nil
		}
		return deliver(e)
	})
	out.stop()
	switch {
	case out.started:
		out.end()
	case err != nil && r.Context().Err() == nil:
		if ended := s.opt.Service.Keys().Valid(by.Caller, clock.Now()); ended != nil { // before the first event was there
			err = &devices.Error{Code: devices.CodeUnauthorized, Detail: ended.Error()}
		}
		s.fail(w, r, err)
	}
}

// enterStream takes a place for a stream of a caller, and counts refusals.
func (s *Server) enterStream(caller *access.Caller) error {
	switch {
	case caller == nil: // the key ended after the request was checked
		return errKeyEnded
	case s.streams.Acquire(caller.Key):
		return nil
	case s.opt.Work != nil:
		s.opt.Work.Streams.Add(1)
	}
	return errStreams
}

var errStreams = devices.Errorf(devices.CodeRateLimited, "this key has %d streams open at this node, as many as it may; close some, or give each program a key of its own", streamsOfKey)

// interval returns the interval of batches; 0: single events.
func (in *followInput) interval() (time.Duration, error) {
	if in.Batch == "" {
		return 0, nil
	}
	d, err := time.ParseDuration(in.Batch)
	if err != nil || d < minBatch || d > maxBatch {
		return 0, badRequest("batch must be a duration from 100ms to 5s, such as 500ms")
	}
	return d, nil
}

// query returns the events that are wanted at this time.
func (in *followInput) query(now time.Time) (q devices.EventQuery, err error) {
	q.Kind = devices.EventKind(in.Kind)
	if in.Device != "" {
		if q.Device, err = parseDevice(in.Device); err != nil {
			return q, err
		}
	}
	if q.Kind != "" {
		if err := q.Check(); err != nil {
			return q, err
		}
	}
	if last := cmp.Or(in.Last, in.LastID); last != "" {
		if q.After, err = devices.ParseEventPosition(last); err != nil {
			return q, badRequest("Last-Event-ID must be an id that this stream sent, such as 1042.77.5, or 0 for all events there are")
		}
		q.FromStart = q.After == devices.EventPosition{}
	}
	q.Since, err = parseMoment("since", in.Since, now)
	return q, err
}

// eventStream writes one answer from two goroutines: the follower's and its
// keeper's. Nothing queues: a write that does not pass in time ends it.
type eventStream struct {
	control  *http.ResponseController
	patience time.Duration
	tasks    sync.WaitGroup
	cancel   context.CancelFunc

	hasMore chan struct{} // capacity 1: something was written that is not sent

	mu      sync.Mutex
	w       http.ResponseWriter
	started bool
	last    time.Time // of a write
	sent    time.Time // by the last flush
	buf     []byte
}

// eventStream returns the stream that answers a request, and its context, which ends with the request, with stop, and
// when the node drains or over reports so.
func (s *Server) eventStream(w http.ResponseWriter, r *http.Request, over func(context.Context) bool) (*eventStream, context.Context) {
	ctx, cancel := context.WithCancel(r.Context())
	e := newEventStream(w, s.patience)
	e.cancel = cancel
	e.do(func() { e.keep(ctx, func() bool { return s.opt.Draining() || over(ctx) }) })
	return e, ctx
}

func newEventStream(w http.ResponseWriter, patience time.Duration) *eventStream {
	return &eventStream{w: w, control: http.NewResponseController(w), patience: patience, hasMore: make(chan struct{}, 1)}
}

// do runs task, whose return ends the stream.
func (e *eventStream) do(task func()) {
	e.tasks.Go(func() {
		defer e.cancel()
		task()
	})
}

// stop ends the stream's context and waits for its tasks: the caller writes alone.
func (e *eventStream) stop() {
	e.cancel()
	e.tasks.Wait()
}

// end gives the connection back to the server, which closes it with the answer if that fails.
func (e *eventStream) end() { _ = e.control.SetWriteDeadline(time.Time{}) }

// keep starts the answer if the follower has not failed by the first tick,
// sends heartbeats and what event left, and returns once the stream has to end: the node stops, or
// the key has ended.
func (e *eventStream) keep(ctx context.Context, over func() bool) {
	ticker := time.NewTicker(streamTick)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-ticker.C:
			if over() || e.beat(now) != nil {
				return
			}
		case <-e.hasMore:
			select {
			case <-ctx.Done(): // net/http sends it
				return
			case <-time.After(flushEvery):
				if e.flush() != nil {
					return
				}
			}
		}
	}
}

// beat writes a comment if there is reason to.
func (e *eventStream) beat(now time.Time) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.started && now.Sub(e.last) < heartbeat {
		return nil
	}
	return e.writeLocked([]byte(":\n\n"))
}

// event writes one event.
func (e *eventStream) event(event devices.StreamEvent) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.buf = appendEvent(e.buf[:0], event)
	return e.writeLocked(e.buf)
}

var errSlowReader = errors.New("the reader of the event stream is gone or too slow")

func (e *eventStream) writeLocked(b []byte) error {
	if !e.started {
		e.started = true
		h := e.w.Header()
		h.Set("Content-Type", "text/event-stream; charset=utf-8")
		h.Set("Cache-Control", "no-store")
		h.Set("X-Accel-Buffering", "no") // or nginx holds events back
	}
	e.last = time.Now()
	if err := e.control.SetWriteDeadline(e.last.Add(e.patience)); err != nil {
		return err
	}
	if _, err := e.w.Write(b); err != nil {
		return errSlowReader
	}
	if e.last.Sub(e.sent) < flushEvery {
		tasks.Signal(e.hasMore)
		return nil
	}
	return e.flushLocked()
}

func (e *eventStream) flush() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.last = time.Now()
	if err := e.control.SetWriteDeadline(e.last.Add(e.patience)); err != nil {
		return err
	}
	return e.flushLocked()
}

func (e *eventStream) flushLocked() error {
	e.sent = e.last
	if err := e.control.Flush(); err != nil {
		return errSlowReader
	}
	return nil
}

// appendEvent writes an event in the format of the HTML standard, 9.2.6. A
// line break in a payload is white space of JSON: inside strings it is
// escaped.
func appendEvent(dst []byte, e devices.StreamEvent) []byte {
	if id := e.ID.String(); id != "" {
		dst = append(append(append(dst, "id: "...), id...), '\n')
	}
	kind := string(e.Kind)
	if e.Gap {
		kind = "gap"
	}
	dst = append(append(dst, "event: "...), kind...)
	dst = append(dst, "\ndata: "...)
	start := len(dst)
	dst = append(dst, e.Data...)
	for line := dst[start:]; ; {
		i := bytes.IndexAny(line, "\r\n")
		if i < 0 {
			break
		}
		line[i] = ' '
		line = line[i+1:]
	}
	return append(dst, "\n\n"...)
}
