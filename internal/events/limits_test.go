package events

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

// A node that has not been accepted by its fleet leaves the streams as they are, however small its own limits are; one that
// was accepted reduces them only to what the other nodes ask for.
func TestStreamsHaveTheLargestLimits(t *testing.T) {
	t.Parallel()
	nc := connect(t, natsServer(t, t.TempDir(), -1).ClientURL())
	first := newBus(t, nc)
	for i := range 60 {
		first.Publish(devices.Event{Kind: devices.EventOnline, Device: "aa:bb:cc:dd:ee:ff", Time: time.Now(), MsgID: fmt.Sprint("m-", i)})
	}
	config := func() jetstream.StreamConfig {
		s, err := first.streams[devices.EventsStream].js.Stream(t.Context(), "TEST_V1_EVENTS")
		if err != nil {
			t.Fatal(err)
		}
		return s.CachedInfo().Config
	}
	stored := func() uint64 {
		s, err := first.streams[devices.EventsStream].js.Stream(t.Context(), "TEST_V1_EVENTS")
		if err != nil {
			t.Fatal(err)
		}
		return s.CachedInfo().State.Msgs
	}
	devicetest.Eventually(t, "all events are stored", func() bool { return stored() == 60 })

	second, err := New(Options{Conn: nc, Prefix: "test.v1", Node: "n2", Retention: time.Second, Limit: 1 << 10, NotificationLimit: 1 << 10, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(second.Close)
	if err := second.Ready(); err == nil {
		t.Error("a node that was not accepted is ready")
	}
	asked := make(chan struct{}, 10)
	for _, s := range second.streams { // as the bus does
		err := s.look(t.Context(), func(context.Context) (map[string]devices.StreamLimits, bool) {
			asked <- struct{}{}
			return nil, false
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if c := config(); len(asked) == 0 || c.MaxBytes != 10<<20 || c.MaxAge != time.Hour || stored() != 60 {
		t.Errorf("while a node is silent: %d questions, %d bytes, %v, %d events", len(asked), c.MaxBytes, c.MaxAge, stored())
	}
	for _, s := range second.streams {
		s.asked = time.Time{} // as after limitsEvery
	}
	second.Open(func(context.Context) (map[string]devices.StreamLimits, bool) {
		asked <- struct{}{}
		return map[string]devices.StreamLimits{"TEST_V1_EVENTS": {MaxAge: 30 * time.Minute, MaxBytes: 5 << 20, Replicas: 1}}, true
	})
	devicetest.Eventually(t, "the stream has the limits of the other node", func() bool { c := config(); return c.MaxBytes == 5<<20 && c.MaxAge == 30*time.Minute })
	if stored() != 60 {
		t.Errorf("%d events are left", stored())
	}
}
