// Package events puts what happens to devices on NATS: every event on its
// public subject `<prefix>.devices.<device>.<kind>`, the lasting kinds in two
// JetStream streams as well, where they are kept and can be read again.
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

	"fleetd/internal/counters"
	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
)

const (
	queueLimit = 16_384 // events waiting for the publisher
	// While their stream is slower than the devices, notifications wait for it,
	// and must not cost other events. The one queue keeps the order.
	notificationsQueue = queueLimit / 2

	eventsWindow = 10 * time.Minute
	// JetStream remembers every id of its window, at some 480 bytes: ten
	// minutes of a fleet that sends many notifications would be gigabytes.
	notificationsWindow = 30 * time.Second

	lookEvery    = 5 * time.Second        // at the streams
	retryEvery   = 2 * time.Second        // while events cannot be kept
	lookPause    = 500 * time.Millisecond // between looks, however many events are lost
	flushTimeout = 3 * time.Second
)

// Drop reasons.
const (
	DropQueue     = "queue_full"
	DropAway      = "nats_away"
	DropStream    = "stream_refused"
	DropNoStream  = "no_stream"   // nobody took it: there is neither stream nor subscriber
	DropNoAck     = "ack_timeout" // the stream did not confirm it; subscribers have it
	DropOversized = "too_large"
	DropAudio     = "audio_queue_full"
)

// Options of a Bus.
type Options struct {
	Conn      *nats.Conn
	Prefix    string // root of all subjects
	Node      string
	Retention time.Duration
	// Limit and NotificationLimit are the bytes of the two streams.
	Limit, NotificationLimit int64
	Replicas                 int // of each stream; 0 means 1
	Log                      *slog.Logger
}

// Bus is the fleet.Publisher and speech.AudioBus of a node. It is safe for concurrent use.
type Bus struct {
	opt     Options
	streams [devices.EventStreams]*stream
	queue   chan queued
	live    chan *frame
	mu      sync.RWMutex // guards closed against Publish
	closed  bool
	stop    context.CancelFunc
	ctx     context.Context
	tasks   sync.WaitGroup
	wake    chan struct{} // capacity 1: look at the streams

	// Published counts events by kind, Dropped by reason.
	Published counters.Map[devices.EventKind]
	Dropped   counters.Map[string]
}

// queued is an event on its way to a stream.
type queued struct {
	to  *stream
	msg *nats.Msg
}

// New returns a running Bus; Close flushes and ends it. The streams are made, or
// brought to these options, as soon as NATS allows.
func New(opt Options) (*Bus, error) {
	b := &Bus{opt: opt, queue: make(chan queued, queueLimit), live: make(chan *frame, liveQueue), wake: make(chan struct{}, 1)}
	for _, reason := range []string{DropQueue, DropAway, DropStream, DropNoStream, DropNoAck, DropOversized, DropAudio} {
		b.Dropped.Add(reason, 0) // or an alert on its increase would miss the first one
	}
	for i := range b.streams {
		var err error
		if b.streams[i], err = newStream(b.config(devices.EventStream(i)), opt, &b.Dropped, b.requestLook); err != nil {
			return nil, fmt.Errorf("events: %w", err)
		}
	}
	b.ctx, b.stop = context.WithCancel(context.Background())
	b.tasks.Go(b.publish)
	b.tasks.Go(b.publishLive)
	b.tasks.Go(b.keep)
	return b, nil
}

// StreamName names what a fleet keeps in JetStream, after its prefix: upper
// case, `_` for `.`, and what it is, such as EVENTS or PHOTOS.
func StreamName(prefix, what string) string {
	return strings.ToUpper(strings.ReplaceAll(prefix, ".", "_")) + "_" + what
}

// storedKinds are the kinds the streams keep. Their subjects are named singly: a
// stream over a request subject would answer requests itself.
var storedKinds = [devices.EventStreams][]devices.EventKind{
	devices.EventsStream: {devices.EventOnline, devices.EventOffline, devices.EventCatalog, devices.EventPhoto,
		devices.EventPending, devices.EventContested},
	devices.NotificationsStream: {devices.EventNotification},
}

// streamOf is where events of a kind are kept.
func (b *Bus) streamOf(kind devices.EventKind) *stream {
	if kind == devices.EventNotification {
		return b.streams[devices.NotificationsStream]
	}
	return b.streams[devices.EventsStream]
}

func (b *Bus) subject(device string, kind devices.EventKind, rest string) string {
	subject := b.opt.Prefix + ".devices." + device + "." + string(kind)
	if rest != "" {
		subject += "." + rest
	}
	return subject
}

func (b *Bus) config(which devices.EventStream) jetstream.StreamConfig {
	cfg := jetstream.StreamConfig{Name: StreamName(b.opt.Prefix, "EVENTS"), Description: "fleetd device events", MaxAge: b.opt.Retention, MaxBytes: b.opt.Limit,
		Replicas: max(b.opt.Replicas, 1), Duplicates: min(eventsWindow, b.opt.Retention), Storage: jetstream.FileStorage, Discard: jetstream.DiscardOld}
	rest := ""
	if which == devices.NotificationsStream {
		cfg.Name, cfg.Description = StreamName(b.opt.Prefix, "NOTIFICATIONS"), "fleetd device notifications"
		cfg.MaxBytes, cfg.Duplicates = b.opt.NotificationLimit, min(notificationsWindow, b.opt.Retention)
		rest = ">"
	}
	for _, kind := range storedKinds[which] {
		cfg.Subjects = append(cfg.Subjects, b.subject("*", kind, rest))
	}
	return cfg
}

// keep looks after the streams: at the start, when NATS is back, when events
// are lost, and once in a while. A stream may vanish with the files of a NATS
// server, or by an operator's hand. The streams are looked at in their order:
// that of older versions has to give the subject of notifications up first.
func (b *Bus) keep() {
	back := b.opt.Conn.StatusChanged(nats.CONNECTED)
	defer b.opt.Conn.RemoveStatusListener(back)
	for {
		next := lookEvery
		if !b.opt.Conn.IsConnected() {
			next = retryEvery // NATS itself is reported as away
		} else {
			for _, s := range b.streams {
				if s.look(b.ctx) != nil {
					next = retryEvery
				}
			}
		}
		select {
		case <-b.ctx.Done():
			return
		case <-time.After(lookPause):
		}
		select {
		case <-b.ctx.Done():
			return
		case <-back:
			for _, s := range b.streams {
				s.kept() // losses of the connection before do not count against this one
			}
		case <-b.wake:
		case <-time.After(next):
		}
	}
}

func (b *Bus) requestLook() {
	select {
	case b.wake <- struct{}{}:
	default: // one wake-up is enough
	}
}

// Ready returns why events are not kept, and what to do; nil while they are.
// It has nothing to say about a NATS that is away.
func (b *Bus) Ready() error {
	for _, s := range b.streams {
		if err := s.ready(); err != nil {
			return err
		}
	}
	return nil
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
	if e.Kind == devices.EventNotification && len(b.queue) >= notificationsQueue {
		b.Dropped.Add(DropQueue, 1)
		return
	}
	select {
	case b.queue <- queued{b.streamOf(e.Kind), msg}:
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
	for e := range b.queue {
		if !b.opt.Conn.IsConnected() {
			b.Dropped.Add(DropAway, 1)
			continue
		}
		b.count(e.to.publish(e.msg))
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
	limit := time.After(flushTimeout)
	for _, s := range b.streams {
		select {
		case <-s.js.PublishAsyncComplete():
		case <-limit:
			b.opt.Log.Warn("event streams did not acknowledge the last events in time")
			return
		}
	}
}
