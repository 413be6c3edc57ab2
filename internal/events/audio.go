package events

import (
	"strconv"
	"sync"

	"github.com/nats-io/nats.go"

	"fleetd/internal/devices"
	"fleetd/internal/envelope"
)

// Headers of an audio frame on `<prefix>.devices.<device>.audio`; the payload is the Opus packet.
const (
	HeaderTimestamp = "Fleetd-Timestamp" // the device's, in ms; 0 except for server-AEC builds
	HeaderSeq       = "Fleetd-Seq"       // number of the frame in its conversation, from 1
	HeaderSession   = "Fleetd-Session"   // the session id that was sent to the device with its hello
)

// liveQueue is how many frames and messages wait for their publisher: about one second of 500
// conversations.
const liveQueue = 8_192

// frame is a queued frame, or a message of a device between its frames. Frames are pooled.
type frame struct {
	msg            *nats.Msg // the message; nil for a frame
	topic, session string
	seq            uint64
	timestamp      uint32
	opus           []byte
}

var frames = sync.Pool{New: func() any { return &frame{opus: make([]byte, 0, 256)} }}

func (f *frame) free() {
	f.msg = nil
	frames.Put(f)
}

// Topic returns the subject of a device's audio.
func (b *Bus) Topic(id devices.ID) string { return b.subject(id.Token(), "audio", "") }

// PublishAudio queues one frame for core NATS, which delivers it to subscribers and does not store
// it. It does not allocate.
func (b *Bus) PublishAudio(topic, session string, seq uint64, f envelope.Frame) bool {
	a := frames.Get().(*frame)
	a.topic, a.session, a.seq, a.timestamp = topic, session, seq, f.Timestamp
	a.opus = append(a.opus[:0], f.Opus...)
	b.mu.RLock()
	defer b.mu.RUnlock()
	if !b.closed {
		select {
		case b.live <- a:
			return true
		default:
			b.Dropped.Add(DropAudio, 1)
		}
	}
	a.free()
	return false
}

// publishLive sends the queue in order. It uses one message and header for all frames: the connection
// copies them before Publish returns.
func (b *Bus) publishLive() {
	timestamp, seq, session := []string{""}, []string{""}, []string{""}
	audio := &nats.Msg{Header: nats.Header{HeaderTimestamp: timestamp, HeaderSeq: seq, HeaderSession: session}}
	for f := range b.live {
		msg := f.msg
		if msg == nil {
			msg = audio
			msg.Subject, msg.Data = f.topic, f.opus
			session[0] = f.session
			seq[0] = strconv.FormatUint(f.seq, 10)
			timestamp[0] = strconv.FormatUint(uint64(f.timestamp), 10)
		}
		if b.opt.Conn.IsConnected() {
			b.count(b.opt.Conn.PublishMsg(msg))
		} else {
			b.Dropped.Add(DropAway, 1)
		}
		f.free()
	}
}
