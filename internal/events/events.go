// Package events publishes events of devices and jobs on NATS: every event on its public subject
// `<prefix>.devices.<device>.<kind>` or, of jobs and tasks, `<prefix>.jobs.<job>.<kind>`. Stored kinds are also kept in
// JetStream streams, from which they can be read again.
//
// Publishing never blocks its caller, and queues are limited: an event beyond them is dropped and
// counted by reason.
package events

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/clock"
	"fleetd/internal/counters"
	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
	"fleetd/internal/tasks"
)

const (
	queueLimit = 16_384 // events that wait for the publisher
	// If their stream is slower than the devices, notifications and the ends of tasks wait for it,
	// and must not displace other events. There is one queue to keep the order.
	frequentQueue = queueLimit / 2

	jobsLimit = 256 << 20 // bytes of the stream of jobs

	eventsWindow = 10 * time.Minute
	// JetStream stores every id of its deduplication window, at about 480 bytes: ten minutes
	// of a fleet that sends many notifications would be gigabytes.
	frequentWindow = 30 * time.Second

	lookEvery    = 5 * time.Second        // check of the streams
	retryEvery   = 2 * time.Second        // while events cannot be stored
	lookPause    = 500 * time.Millisecond // between checks, however many events are lost
	flushTimeout = 3 * time.Second
)

// Drop reasons.
const (
	DropQueue     = "queue_full"
	DropAway      = "nats_away"
	DropStream    = "stream_refused"
	DropNoStream  = "no_stream"   // not accepted: there is neither stream nor subscriber
	DropNoAck     = "ack_timeout" // the stream did not confirm it; subscribers received it
	DropOversized = "too_large"
	DropAudio     = "audio_queue_full"
)

// Options of a Bus.
type Options struct {
	Conn      *nats.Conn
	Prefix    string // root of all subjects
	Node      string
	Retention time.Duration
	// Limit and NotificationLimit are the maximum sizes of two of the streams, in bytes.
	Limit, NotificationLimit int64
	Replicas                 int // of each stream; 0 means 1
	// FirstSequence returns the sequence of the first event of a stream that is created now; nil means 1. See SequenceOfTime.
	FirstSequence func() uint64
	Log           *slog.Logger
}

// Bus is the fleet.Publisher and speech.AudioBus of a node. It is safe for concurrent use.
type Bus struct {
	opt     Options
	streams [devices.EventStreams]*stream
	queue   chan queued
	live    chan *frame
	mu      sync.RWMutex // protects closed against Publish
	closed  bool
	stop    context.CancelFunc
	ctx     context.Context
	tasks   sync.WaitGroup
	wake    chan struct{}                        // capacity 1: requests a check of the streams
	others  atomic.Pointer[devices.OthersLimits] // nil: Open was not called

	// Published counts events by kind, Dropped by reason.
	Published counters.Map[devices.EventKind]
	Dropped   counters.Map[string]
}

// queued is an event on its way to a stream.
type queued struct {
	to  *stream
	msg *nats.Msg
}

// New returns a running Bus; Close flushes and stops it. It publishes at once, and leaves the streams alone until
// Open.
func New(opt Options) (*Bus, error) {
	b := &Bus{opt: opt, queue: make(chan queued, queueLimit), live: make(chan *frame, liveQueue), wake: make(chan struct{}, 1)}
	for _, reason := range []string{DropQueue, DropAway, DropStream, DropNoStream, DropNoAck, DropOversized, DropAudio} {
		b.Dropped.Add(reason, 0) // otherwise an alert on its increase would miss the first one
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

// Open has the bus create the streams and update them to the settings of the nodes, as soon as NATS is reachable: the
// node belongs to the fleet of these streams.
func (b *Bus) Open(others devices.OthersLimits) {
	b.others.Store(&others)
	b.requestLook()
}

// Limits returns the limits that this node asks for, by name of the stream.
func (b *Bus) Limits() map[string]devices.StreamLimits {
	out := map[string]devices.StreamLimits{}
	for _, s := range b.streams {
		out[s.cfg.Name] = limitsOf(&s.cfg)
	}
	return out
}

// StreamName returns the name of a fleet's JetStream object: its prefix in upper case with `_` for
// `.`, and a suffix such as EVENTS or PHOTOS.
func StreamName(prefix, what string) string {
	return strings.ToUpper(strings.ReplaceAll(prefix, ".", "_")) + "_" + what
}

// streamOf returns the stream that stores events of a kind.
func (b *Bus) streamOf(kind devices.EventKind) *stream {
	for _, k := range devices.EventKinds {
		if k.Kind == kind {
			return b.streams[k.Stream]
		}
	}
	return b.streams[devices.EventsStream]
}

// isFrequent reports whether a fleet may send so many events of a kind that they displace others.
func isFrequent(kind devices.EventKind) bool {
	return kind == devices.EventNotification || kind == devices.EventTask
}

// subjectOf returns the subject of an event of a device, or of a job or webhook, either may be `*`. That of a task has no device: NATS keeps
// something in memory for each subject of a stream, and a job may have a million tasks.
func (b *Bus) subjectOf(device, other string, kind devices.EventKind, rest string) string {
	if token, ok := kind.OfWebhook(); ok {
		return b.opt.Prefix + ".webhooks." + other + "." + token
	}
	if kind.HasOwner() {
		return b.opt.Prefix + ".jobs." + other + "." + kind.JobToken()
	}
	return b.subject(device, kind, rest)
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
		Replicas: max(b.opt.Replicas, 1), Duplicates: eventsWindow, Storage: jetstream.FileStorage, Discard: jetstream.DiscardOld}
	rest := ""
	switch which {
	case devices.NotificationsStream:
		cfg.Name, cfg.Description = StreamName(b.opt.Prefix, "NOTIFICATIONS"), "fleetd device notifications"
		cfg.MaxBytes, cfg.Duplicates = b.opt.NotificationLimit, frequentWindow
		rest = ">"
	case devices.JobsStream:
		cfg.Name, cfg.Description = StreamName(b.opt.Prefix, "JOBS"), "fleetd jobs and tasks"
		cfg.MaxBytes, cfg.Duplicates = jobsLimit, frequentWindow
	}
	// Subjects are listed individually: a stream over a request subject would answer requests.
	for _, kind := range devices.StoredKinds(which) {
		cfg.Subjects = append(cfg.Subjects, b.subjectOf("*", "*", kind, rest))
	}
	return cfg
}

// keep checks the streams: when they are opened, when NATS is back, when events are lost, and periodically. A
// stream may be lost with the files of a NATS server, or be deleted by an operator. They are checked in
// order: a stream that has the subjects of one after it releases them first.
func (b *Bus) keep() {
	back := b.opt.Conn.StatusChanged(nats.CONNECTED)
	defer b.opt.Conn.RemoveStatusListener(back)
	for {
		next, others := lookEvery, b.others.Load()
		if others == nil {
			select {
			case <-b.ctx.Done():
				return
			case <-b.wake: // the first look is at once, so that the streams exist when the node has started
			}
			continue
		}
		if !b.opt.Conn.IsConnected() {
			next = retryEvery // NATS itself is reported as unreachable
		} else {
			for _, s := range b.streams {
				if s.look(b.ctx, *others) != nil {
					next = retryEvery
				}
			}
		}
		if !clock.Sleep(b.ctx, lookPause) {
			return
		}
		select {
		case <-b.ctx.Done():
			return
		case <-back:
			for _, s := range b.streams {
				s.kept() // losses before the reconnect do not count against this connection
			}
		case <-b.wake:
		case <-time.After(next):
		}
	}
}

func (b *Bus) requestLook() {
	tasks.Signal(b.wake)
}

// Ready returns why events are not stored, and what to do; nil if they are, or if NATS is
// unreachable.
func (b *Bus) Ready() error {
	for _, s := range b.streams {
		if err := s.ready(); err != nil {
			return err
		}
	}
	return nil
}

// Publish queues an event.
func (b *Bus) Publish(e devices.Event) {
	msg := &nats.Msg{Subject: b.subjectOf(e.Device.Token(), cmp.Or(e.Job, e.Webhook), e.Kind, e.Subject), Data: b.payload(e)}
	if e.MsgID != "" {
		msg.Header = nats.Header{jetstream.MsgIDHeader: []string{e.MsgID}}
	}
	b.mu.RLock()
	defer b.mu.RUnlock()
	if b.closed {
		b.Dropped.Add(DropAway, 1)
		return
	}
	if e.MsgID == "" { // keeps its order with the frames of its device
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
	if isFrequent(e.Kind) && len(b.queue) >= frequentQueue {
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
	if e.Device == "" {
		if e.Webhook != "" {
			out = jsonspan.AppendString(append(out, `{"webhook":`...), e.Webhook)
		} else {
			out = jsonspan.AppendString(append(out, `{"job":`...), e.Job)
		}
		out = jsonspan.AppendString(append(out, `,"node":`...), b.opt.Node)
	} else {
		out = jsonspan.AppendString(append(out, `{"device":`...), string(e.Device))
		out = jsonspan.AppendString(append(out, `,"node":`...), b.opt.Node)
		out = jsonspan.AppendString(append(out, `,"session":`...), e.Session)
		out = strconv.AppendInt(append(out, `,"epoch":`...), int64(e.Epoch), 10)
	}
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

// count counts the outcome of one event.
func (b *Bus) count(err error) {
	switch {
	case errors.Is(err, nats.ErrMaxPayload):
		b.Dropped.Add(DropOversized, 1)
	case err != nil:
		b.Dropped.Add(DropAway, 1)
	}
}

// Depth returns the number of queued events.
func (b *Bus) Depth() int { return len(b.queue) + len(b.live) }

// Close publishes the queue and stops the bus.
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
			b.opt.Log.Warn("the event streams did not confirm the last events in time; they may be missing from the streams")
			return
		}
	}
}
