// Package events puts what happens to devices on NATS: every event on its
// public subject `<prefix>.devices.<device>.<kind>`, the lasting kinds in a
// JetStream stream as well, where they are kept and can be read again.
//
// Publishing never blocks its caller and nothing piles up: an event that
// cannot be taken is dropped and counted by reason.
package events

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
)

const (
	queueLimit   = 16_384 // events waiting for the publisher
	maxPending   = 2_048  // unacknowledged in JetStream; it stalls at 4,000
	dedupeWindow = 10 * time.Minute
	retryEvery   = 2 * time.Second
	setupTimeout = 5 * time.Second
	flushTimeout = 3 * time.Second
)

// Drop reasons.
const (
	DropQueue     = "queue_full"
	DropAway      = "nats_away"
	DropStream    = "stream_refused"
	DropOversized = "too_large"
	DropAudio     = "audio_queue_full"
)

// Options of a Bus.
type Options struct {
	Conn      *nats.Conn
	Prefix    string // root of all subjects
	Node      string
	Retention time.Duration
	Limit     int64 // bytes of the stream
	Replicas  int   // of the stream; 0 means 1
	Log       *slog.Logger
}

// Bus is the devices.Publisher and devices.AudioBus of a node. It is safe for concurrent use.
type Bus struct {
	opt    Options
	js     jetstream.JetStream
	stream string
	queue  chan *nats.Msg
	live   chan *frame
	mu     sync.RWMutex // guards closed against Publish
	closed bool
	stop   context.CancelFunc
	ctx    context.Context
	tasks  sync.WaitGroup

	// Published counts events by kind, Dropped by reason.
	Published devices.CounterMap[devices.EventKind]
	Dropped   devices.CounterMap[string]
}

// New returns a running Bus; Close flushes and ends it. The stream is made, or
// brought to these options, as soon as NATS allows.
func New(opt Options) (*Bus, error) {
	b := &Bus{opt: opt, stream: StreamName(opt.Prefix, "EVENTS"), queue: make(chan *nats.Msg, queueLimit),
		live: make(chan *frame, liveQueue)}
	js, err := jetstream.New(opt.Conn, jetstream.WithPublishAsyncMaxPending(maxPending),
		jetstream.WithPublishAsyncErrHandler(func(jetstream.JetStream, *nats.Msg, error) { b.Dropped.Add(DropStream, 1) }))
	if err != nil {
		return nil, fmt.Errorf("events: %w", err)
	}
	b.js = js
	b.ctx, b.stop = context.WithCancel(context.Background())
	b.tasks.Go(b.publish)
	b.tasks.Go(b.publishLive)
	b.tasks.Go(b.setUp)
	return b, nil
}

// StreamName names what a fleet keeps in JetStream, after its prefix: upper
// case, `_` for `.`, and what it is, such as EVENTS or PHOTOS.
func StreamName(prefix, what string) string {
	return strings.ToUpper(strings.ReplaceAll(prefix, ".", "_")) + "_" + what
}

// storedKinds are the kinds the stream keeps. Its subjects are named singly: a
// stream over a request subject would answer requests itself.
var storedKinds = []devices.EventKind{devices.EventOnline, devices.EventOffline, devices.EventCatalog, devices.EventNotification,
	devices.EventPhoto, devices.EventPending, devices.EventContested}

func (b *Bus) subject(device string, kind devices.EventKind, rest string) string {
	subject := b.opt.Prefix + ".devices." + device + "." + string(kind)
	if rest != "" {
		subject += "." + rest
	}
	return subject
}

func (b *Bus) setUp() {
	cfg := jetstream.StreamConfig{Name: b.stream, Description: "fleetd device events", MaxAge: b.opt.Retention, MaxBytes: b.opt.Limit,
		Replicas: max(b.opt.Replicas, 1), Duplicates: min(dedupeWindow, b.opt.Retention), Storage: jetstream.FileStorage, Discard: jetstream.DiscardOld}
	for _, kind := range storedKinds {
		rest := ""
		if kind == devices.EventNotification {
			rest = ">"
		}
		cfg.Subjects = append(cfg.Subjects, b.subject("*", kind, rest))
	}
	warned := false
	for {
		ctx, cancel := context.WithTimeout(b.ctx, setupTimeout)
		_, err := b.js.CreateOrUpdateStream(ctx, cfg)
		cancel()
		if err == nil || b.ctx.Err() != nil {
			return
		}
		if !warned {
			warned = true
			b.opt.Log.Warn("event stream is not ready, events are not kept", "stream", b.stream, "error", err)
		}
		select {
		case <-b.ctx.Done():
			return
		case <-time.After(retryEvery):
		}
	}
}

// Publish queues the event.
func (b *Bus) Publish(e devices.Event) {
	msg := &nats.Msg{Subject: b.subject(e.Device.Token(), e.Kind, e.Subject), Data: b.payload(e)}
	if e.MsgID != "" {
		msg.Header = nats.Header{jetstream.MsgIDHeader: []string{e.MsgID}}
	}
	b.mu.RLock()
	defer b.mu.RUnlock()
	if b.closed {
		b.Dropped.Add(DropAway, 1)
		return
	}
	if e.MsgID == "" { // keeps its place between the frames of its device
		f := frames.Get().(*frame)
		f.msg = msg
		select {
		case b.live <- f:
			b.Published.Add(e.Kind, 1)
		default:
			b.Dropped.Add(DropQueue, 1)
			f.free()
		}
		return
	}
	select {
	case b.queue <- msg:
		b.Published.Add(e.Kind, 1)
	default:
		b.Dropped.Add(DropQueue, 1)
	}
}

func (b *Bus) payload(e devices.Event) []byte {
	out := make([]byte, 0, 192+len(e.Fields))
	out = jsonspan.AppendString(append(out, `{"device":`...), string(e.Device))
	out = jsonspan.AppendString(append(out, `,"node":`...), b.opt.Node)
	out = jsonspan.AppendString(append(out, `,"session":`...), e.Session)
	out = strconv.AppendInt(append(out, `,"epoch":`...), int64(e.Epoch), 10)
	out = strconv.AppendInt(append(out, `,"seq":`...), e.Seq, 10)
	out = e.Time.UTC().AppendFormat(append(out, `,"time":"`...), "2006-01-02T15:04:05.000Z07:00")
	out = append(out, '"')
	if len(e.Fields) > 0 {
		out = append(append(out, ','), e.Fields...)
	}
	return append(out, '}')
}

func (b *Bus) publish() {
	for msg := range b.queue {
		if !b.opt.Conn.IsConnected() {
			b.Dropped.Add(DropAway, 1)
			continue
		}
		_, err := b.js.PublishMsgAsync(msg)
		b.count(err)
	}
}

// count notes what became of one event.
func (b *Bus) count(err error) {
	switch {
	case errors.Is(err, nats.ErrMaxPayload):
		b.Dropped.Add(DropOversized, 1)
	case err != nil:
		b.Dropped.Add(DropAway, 1)
	}
}

// Depth is the number of events waiting.
func (b *Bus) Depth() int { return len(b.queue) + len(b.live) }

// Close publishes what waits and ends the bus.
func (b *Bus) Close() {
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return
	}
	b.closed = true
	close(b.queue)
	close(b.live)
	b.mu.Unlock()
	b.stop()
	b.tasks.Wait()
	if !b.opt.Conn.IsConnected() {
		return
	}
	select {
	case <-b.js.PublishAsyncComplete():
	case <-time.After(flushTimeout):
		b.opt.Log.Warn("event stream did not acknowledge the last events in time")
	}
}
