package events

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
)

// orderWait limits the wait for a stream with older events.
const orderWait = time.Second

// stopPatience is how long a stopping follower waits for its source before it stops it.
const stopPatience = time.Second

var errReplaced = errors.New("an event stream was recreated; resume from the last position")

// Follow calls deliver for every stored event that q selects, in order of time: those after q.After,
// then new ones, until ctx ends or deliver fails. If events after q.After were deleted, it starts with
// one Gap for each stream. It returns CodeUnavailable if NATS does not answer.
func (b *Bus) Follow(ctx context.Context, q devices.EventQuery, deliver func(devices.StreamEvent) error) error {
	if !b.opt.Conn.IsConnected() {
		return unavailable(errors.New("not connected"))
	}
	ctx, cancel := context.WithCancelCause(ctx)
	var tasks sync.WaitGroup
	defer tasks.Wait()
	defer cancel(nil)
	f := follower{bus: b, query: q, at: q.After, arrived: make(chan arrival)}
	gaps, err := f.open(ctx, q)
	if err != nil {
		return unavailable(err)
	}
	for _, s := range f.sources {
		received := make(chan struct{})
		tasks.Go(func() {
			select {
			case <-s.replaced:
				cancel(errReplaced)
			case <-ctx.Done():
			}
			select {
			case <-received:
			case <-time.After(stopPatience): // it recreates its consumer, which only Stop ends
			}
			s.messages.Stop()
			b.end(s.stream, s.consumer)
		})
		tasks.Go(func() {
			defer close(received)
			f.receive(ctx, s)
		})
	}
	for _, gap := range gaps {
		if err := deliver(gap); err != nil {
			return err
		}
	}
	err = f.merge(ctx, deliver)
	if cause := context.Cause(ctx); errors.Is(cause, errReplaced) {
		return unavailable(cause)
	}
	return err
}

// end deletes the consumer of a reader that is done with it. The server also deletes it, but later, and until then has
// goroutines for it.
func (b *Bus) end(stream jetstream.Stream, consumer jetstream.Consumer) {
	info := consumer.CachedInfo()
	if info == nil || !b.opt.Conn.IsConnected() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), stopPatience)
	defer cancel()
	_ = stream.DeleteConsumer(ctx, info.Name)
}

// follower merges the streams in order of time.
type follower struct {
	bus     *Bus
	query   devices.EventQuery
	at      devices.EventPosition
	sources []*source
	arrived chan arrival
}

// source is one stream that is read.
type source struct {
	which    devices.EventStream
	stream   jetstream.Stream
	replaced <-chan struct{}
	consumer jetstream.Consumer
	messages jetstream.MessagesContext
	head     *message
	taken    chan struct{} // head was delivered, the next message may follow
	backlog  bool          // older events will follow
}

// message is a stored event with its position.
type message struct {
	jetstream.Msg
	seq, pending uint64
	at           time.Time
}

type arrival struct {
	from *source
	msg  *message
	err  error
}

// receive passes on the messages of one source, one at a time.
func (f *follower) receive(ctx context.Context, s *source) {
	for {
		// With ctx, since Stop does not end a Next that recreates its consumer at that moment
		// (nats.go v1.55.0, ordered.go): it would block.
		msg, err := s.messages.Next(jetstream.NextContext(ctx))
		a := arrival{from: s, err: err}
		if err == nil {
			a.msg, a.err = placed(msg)
		}
		select {
		case f.arrived <- a:
		case <-ctx.Done():
			return
		}
		if a.err != nil {
			return
		}
		select {
		case <-s.taken:
		case <-ctx.Done():
			return
		}
	}
}

func placed(msg jetstream.Msg) (*message, error) {
	meta, err := msg.Metadata()
	if err != nil {
		return nil, err
	}
	return &message{msg, meta.Sequence.Stream, meta.NumPending, meta.Timestamp}, nil
}

// merge delivers the oldest message that has arrived. While a stream has a backlog and no message has
// arrived from it, the others wait for it to keep the order of time; but only shortly, since the backlog
// may have expired.
func (f *follower) merge(ctx context.Context, deliver func(devices.StreamEvent) error) error {
	patience := time.NewTimer(orderWait)
	defer patience.Stop()
	for {
		next, complete := f.oldest()
		for next != nil && complete {
			f.at[next.which] = next.head.seq
			event := f.bus.read(next.head)
			event.ID, event.Stream = f.at, next.which
			next.head = nil
			next.taken <- struct{}{} // capacity 1
			if selects(f.query, &event) {
				if err := deliver(event); err != nil {
					return err
				}
			}
			next, complete = f.oldest()
		}
		patience.Reset(orderWait)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case a := <-f.arrived:
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if a.err != nil {
				return unavailable(a.err)
			}
			a.from.head, a.from.backlog = a.msg, a.msg.pending > 0
		case <-patience.C:
			for _, s := range f.sources {
				s.backlog = s.backlog && s.head != nil
			}
		}
	}
}

// oldest returns the source with the oldest head, and whether no other source can have an older event in
// its backlog.
func (f *follower) oldest() (next *source, complete bool) {
	complete = true
	for _, s := range f.sources {
		switch {
		case s.head == nil:
			complete = complete && !s.backlog
		case next == nil || s.head.at.Before(next.head.at):
			next = s
		}
	}
	return next, complete
}

func unavailable(err error) error {
	return &devices.Error{Code: devices.CodeUnavailable, Part: "nats", Detail: "the event stream does not answer: " + err.Error()}
}

// selects reports whether q selects an event that filter let through: subjects of tasks do not contain the device.
func selects(q devices.EventQuery, e *devices.StreamEvent) bool {
	return q.Device == "" || q.Device == e.Device
}

// filter returns the subject of the events that q selects in a stream. It is a single one, since servers before 2.10
// support no more, and may be wider than the stream, which contains nothing else.
func (b *Bus) filter(which devices.EventStream, q devices.EventQuery) []string {
	if q.Kind == "" && q.Device != "" && which == devices.JobsStream {
		q.Kind = devices.EventTask
	}
	device := "*"
	if q.Device != "" {
		device = q.Device.Token()
	}
	switch {
	case q.Kind == "" && q.Device == "":
		return []string{b.opt.Prefix + ".>"}
	case q.Kind == "":
		return []string{b.opt.Prefix + ".devices." + device + ".>"}
	case q.Kind == devices.EventNotification:
		return []string{b.subject(device, q.Kind, ">")}
	}
	return []string{b.subjectOf(device, "*", q.Kind, "")}
}

// read returns the event of a stored message.
func (b *Bus) read(msg *message) devices.StreamEvent {
	e := devices.StreamEvent{Data: json.RawMessage(msg.Data())}
	if webhook, ok := strings.CutPrefix(msg.Subject(), b.opt.Prefix+".webhooks."); ok {
		_, token, _ := strings.Cut(webhook, ".")
		e.Kind = devices.WebhookEvent(token)
		e.Owner, _ = jsonspan.String(jsonspan.Member(e.Data, "owner"))
	} else if job, ok := strings.CutPrefix(msg.Subject(), b.opt.Prefix+".jobs."); ok {
		_, token, _ := strings.Cut(job, ".")
		if e.Kind = devices.JobEvent(token); e.Kind == devices.EventTask {
			device, _ := jsonspan.String(jsonspan.Member(e.Data, "device"))
			e.Device = devices.ID(device)
		}
	} else {
		tokens := strings.SplitN(strings.TrimPrefix(msg.Subject(), b.opt.Prefix+".devices."), ".", 3)
		if id, err := devices.ParseID(tokens[0]); err == nil {
			e.Device = id
		}
		if len(tokens) > 1 {
			e.Kind = devices.EventKind(tokens[1])
		}
	}
	if e.Kind.HasOwner() {
		e.Job, _ = jsonspan.String(jsonspan.Member(e.Data, "job"))
		e.Owner, _ = jsonspan.String(jsonspan.Member(e.Data, "owner"))
	}
	return e
}
