package events

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

// recovery is how long events may take to be kept again once NATS allows it.
const recovery = 10 * time.Second

func numbered(n int) devices.Event {
	e := online(int64(n))
	e.MsgID = fmt.Sprintf("aabbccddeeff-%d-online", n)
	return e
}

func streams(t *testing.T, nc *nats.Conn) jetstream.JetStream {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return js
}

// keptWithin checks that an event that is published now is in the stream before the limit.
func keptWithin(t *testing.T, b *Bus, js jetstream.JetStream, limit time.Duration) {
	t.Helper()
	begun, n := time.Now(), 1_000_000
	var err error
	defer func() {
		if took := time.Since(begun); t.Failed() || took > limit {
			t.Errorf("an event is kept after %v, not within %v: %v; dropped: %d without an ack, %d refused, %d away",
				took, limit, err, b.Dropped.Get("ack_timeout"), b.Dropped.Get(DropStream), b.Dropped.Get(DropAway))
		}
	}()
	devicetest.Eventually(t, "an event is kept", func() bool {
		b.Publish(numbered(n))
		n++
		var stream jetstream.Stream
		stream, err = js.Stream(t.Context(), "TEST_V1_EVENTS")
		return err == nil && stream.CachedInfo().State.Msgs > 0
	})
}

// With a subscriber and without a stream nobody acknowledges an event. That
// must not keep later ones from the subscriber, nor from the stream once it is
// there again.
func TestLostAcksDoNotStopEvents(t *testing.T) {
	t.Parallel()
	s := natsServer(t, t.TempDir(), -1)
	nc := connect(t, s.ClientURL())
	b := newBus(t, nc)
	watcher, err := connect(t, s.ClientURL()).SubscribeSync("test.v1.devices.>")
	if err != nil {
		t.Fatal(err)
	}
	if err := watcher.SetPendingLimits(-1, -1); err != nil {
		t.Fatal(err)
	}
	js := streams(t, nc)
	if err := js.DeleteStream(t.Context(), "TEST_V1_EVENTS"); err != nil {
		t.Fatal(err)
	}
	const count = 3 * maxPending
	for n := range count {
		b.Publish(numbered(n))
	}
	for n := range count {
		msg, err := watcher.NextMsg(recovery)
		if err != nil {
			t.Fatalf("event %d of %d does not reach a subscriber: %v", n, count, err)
		}
		if msg.Subject != "test.v1.devices.aabbccddeeff.online" {
			t.Fatalf("event %d came on %s", n, msg.Subject)
		}
	}
	devicetest.Eventually(t, "lost acks are counted", func() bool { return b.Dropped.Get("ack_timeout") > 0 })
	keptWithin(t, b, js, recovery)
}

// A NATS that comes back without its files has no stream until this node makes
// it.
func TestStreamIsMadeAgain(t *testing.T) {
	t.Parallel()
	s := natsServer(t, t.TempDir(), -1)
	nc := connect(t, s.ClientURL())
	b := newBus(t, nc)
	url := s.ClientURL()
	s.Shutdown()
	s.WaitForShutdown()
	devicetest.Eventually(t, "the connection is lost", func() bool { return !nc.IsConnected() })
	natsServerAt(t, url)
	devicetest.Eventually(t, "the connection is back", nc.IsConnected)
	keptWithin(t, b, streams(t, nc), recovery)
}

// An operator, or another version, may change the stream's subjects.
func TestStreamIsBroughtInLine(t *testing.T) {
	t.Parallel()
	s := natsServer(t, t.TempDir(), -1)
	nc := connect(t, s.ClientURL())
	newBus(t, nc)
	js := streams(t, nc)
	stream, err := js.Stream(t.Context(), "TEST_V1_EVENTS")
	if err != nil {
		t.Fatal(err)
	}
	cfg := stream.CachedInfo().Config
	want := len(cfg.Subjects)
	cfg.Subjects = cfg.Subjects[:1]
	if _, err := js.UpdateStream(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "the subjects are back", func() bool {
		info, err := stream.Info(t.Context())
		return err == nil && len(info.Config.Subjects) == want
	})
}

// Prefixes that differ in case, or in dots and underscores, lead to one name of a stream. It stays with the fleet that made it.
func TestStreamOfAnotherFleet(t *testing.T) {
	t.Parallel()
	s := natsServer(t, t.TempDir(), -1)
	nc := connect(t, s.ClientURL())
	first := newBus(t, nc)
	for _, prefix := range []string{"test_v1", "Test.V1"} {
		other := newBusWith(t, nc, Options{Prefix: prefix})
		devicetest.Eventually(t, "the reason is given", func() bool {
			err := other.Ready()
			return err != nil && strings.Contains(err.Error(), "another --nats-prefix")
		})
	}
	keptWithin(t, first, streams(t, nc), recovery)
	if err := first.Ready(); err != nil {
		t.Errorf("the first fleet: %v", err)
	}
}

// While events cannot be kept, subscribers have them, and Ready has the reason.
func TestReady(t *testing.T) {
	t.Parallel()
	s := natsServer(t, t.TempDir(), -1)
	nc := connect(t, s.ClientURL())
	b := newBus(t, nc)
	watcher, err := nc.SubscribeSync("test.v1.devices.>")
	if err != nil {
		t.Fatal(err)
	}
	keptWithin(t, b, streams(t, nc), recovery)
	if err := b.Ready(); err != nil {
		t.Errorf("while events are kept: %v", err)
	}
	if err := s.ShutdownJetStream(); err != nil {
		t.Fatal(err)
	}
	var reason error
	devicetest.Eventually(t, "the reason is given", func() bool {
		b.Publish(numbered(1))
		reason = b.Ready()
		return reason != nil
	})
	if text := reason.Error(); !strings.Contains(text, "see the log of the NATS server") {
		t.Errorf("the reason does not help: %s", text)
	}
	b.Publish(numbered(-1))
	devicetest.Eventually(t, "a subscriber has the last event", func() bool {
		msg, err := watcher.NextMsg(time.Second)
		return err == nil && msg.Header.Get(jetstream.MsgIDHeader) == "aabbccddeeff--1-online"
	})
	s.Shutdown()
	s.WaitForShutdown()
	natsServerAt(t, s.ClientURL())
	devicetest.Eventually(t, "the connection is back", nc.IsConnected)
	keptWithin(t, b, streams(t, nc), recovery)
	devicetest.Eventually(t, "events are ready again", func() bool { return b.Ready() == nil })
}

// Without stream and subscriber NATS itself reports that nobody took an event.
func TestNobodyTookIt(t *testing.T) {
	t.Parallel()
	s := natsServer(t, t.TempDir(), -1)
	b := newBus(t, connect(t, s.ClientURL()))
	if err := s.ShutdownJetStream(); err != nil {
		t.Fatal(err)
	}
	b.Publish(numbered(1))
	devicetest.Eventually(t, "the drop has its reason", func() bool { return b.Dropped.Get("no_stream") == 1 })
}
