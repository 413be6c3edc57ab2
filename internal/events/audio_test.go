package events

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/devices"
	"fleetd/internal/envelope"
)

// Frames and messages of a device reach a voice service in the order in which they were
// sent, each with its session and sequence number.
func TestAudioKeepsItsOrder(t *testing.T) {
	s := natsServer(t, t.TempDir(), -1)
	b := newBus(t, connect(t, s.ClientURL()))
	received := make(chan *nats.Msg, 300)
	listener := connect(t, s.ClientURL())
	if _, err := listener.ChanSubscribe("test.v1.devices.*.>", received); err != nil {
		t.Fatal(err)
	}
	if err := listener.Flush(); err != nil {
		t.Fatal(err)
	}
	topic := b.Topic(dev)
	const frames = 200
	for n := range frames {
		if n%50 == 0 {
			b.Publish(devices.Event{Kind: devices.EventMessage, Device: dev, Subject: "listen", Session: "s", Time: time.Now(), Fields: fmt.Appendf(nil, `"message":{"n":%d}`, n)})
		}
		if !b.PublishAudio(topic, "s-1", uint64(n+1), envelope.Frame{Timestamp: uint32(60 * n), Opus: []byte("frame " + strconv.Itoa(n))}) {
			t.Fatalf("frame %d was not taken", n)
		}
	}
	for n := range frames {
		if n%50 == 0 {
			if msg := <-received; msg.Subject != "test.v1.devices.aabbccddeeff.messages.listen" || !strings.Contains(string(msg.Data), fmt.Sprintf(`"message":{"n":%d}`, n)) {
				t.Fatalf("in front of frame %d came %s %s", n, msg.Subject, msg.Data)
			}
		}
		msg := <-received
		if msg.Subject != "test.v1.devices.aabbccddeeff.audio" || !bytes.Equal(msg.Data, []byte("frame "+strconv.Itoa(n))) ||
			msg.Header.Get(HeaderSeq) != strconv.Itoa(n+1) || msg.Header.Get(HeaderTimestamp) != strconv.Itoa(60*n) || msg.Header.Get(HeaderSession) != "s-1" {
			t.Fatalf("frame %d came as %s %q %v", n, msg.Subject, msg.Data, msg.Header)
		}
	}
}

// A frame that is used again holds nothing of the message it was.
func TestFramesAreClean(t *testing.T) {
	f := &frame{msg: &nats.Msg{Subject: "message"}}
	f.free()
	if f.msg != nil {
		t.Error("a frame in the pool still is a message")
	}
	b := &Bus{live: make(chan *frame, 1)}
	opus := []byte{1, 2, 3}
	b.PublishAudio("t", "s", 1, envelope.Frame{Opus: opus})
	opus[0] = 9 // the caller reads the next packet into it
	if f := <-b.live; !bytes.Equal(f.opus, []byte{1, 2, 3}) || f.msg != nil {
		t.Errorf("%+v", f)
	}
}

// Nobody who speaks waits for NATS: what does not fit is dropped and counted.
func TestAudioNeverBlocks(t *testing.T) {
	s := natsServer(t, t.TempDir(), -1)
	b := newBus(t, connect(t, s.ClientURL()))
	s.Shutdown()
	for n := range 3 * liveQueue {
		b.PublishAudio("test.v1.devices.x.audio", "s", uint64(n), envelope.Frame{Opus: []byte{1}})
	}
	b.Close()
	if b.PublishAudio("test.v1.devices.x.audio", "s", 1, envelope.Frame{Opus: []byte{1}}) {
		t.Error("a closed bus takes frames")
	}
	if away, full := b.Dropped.Get(DropAway), b.Dropped.Get(DropAudio); away+full == 0 {
		t.Errorf("%d dropped because NATS is away, %d because the queue was full", away, full)
	}
}

// A frame costs no allocation up to the publisher.
func TestAudioAllocates(t *testing.T) {
	b := &Bus{live: make(chan *frame, 1)}
	opus := bytes.Repeat([]byte{1}, 90)
	if n := testing.AllocsPerRun(1000, func() {
		b.PublishAudio("t", "s", 1, envelope.Frame{Opus: opus})
		(<-b.live).free()
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}
