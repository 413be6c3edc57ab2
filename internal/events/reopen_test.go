package events

import (
	"context"
	"errors"
	"testing"
	"time"

	"fleetd/internal/devices"
)

// A reader that leaves leaves nothing behind at the NATS server, which keeps goroutines for each consumer.
func TestFollowLeavesNoConsumers(t *testing.T) {
	nc := connect(t, natsServer(t, t.TempDir(), -1).ClientURL())
	b := newBus(t, nc)
	b.Publish(online(1))
	for range 5 {
		ctx, cancel := context.WithCancel(t.Context())
		err := b.Follow(ctx, devices.EventQuery{FromStart: true}, func(devices.StreamEvent) error { cancel(); return nil })
		if !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for _, s := range b.streams {
		stream, err := s.js.Stream(ctx, s.cfg.Name)
		if err != nil {
			t.Fatal(err)
		}
		if n := stream.CachedInfo().State.Consumers; n != 0 {
			t.Errorf("stream %s has %d consumers of readers that left", s.cfg.Name, n)
		}
	}
}
