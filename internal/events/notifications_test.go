package events

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

func notification(n int) devices.Event {
	return devices.Event{Kind: devices.EventNotification, Device: dev, Subject: "button", Time: time.Now(), MsgID: fmt.Sprintf("aabbccddeeff-7-%d", n),
		Fields: fmt.Appendf(nil, `"n":%d`, n)}
}

// A stream that has other subjects gets its own: here that of the events has those of notifications.
func TestNotificationsGetTheirOwnStream(t *testing.T) {
	t.Parallel()
	nc := connect(t, natsServer(t, t.TempDir(), -1).ClientURL())
	js := streams(t, nc)
	kinds := []string{"online", "offline", "catalog", "notifications.>", "photo", "pending", "contested"}
	old := jetstream.StreamConfig{Name: "TEST_V1_EVENTS", MaxAge: time.Hour, MaxBytes: 10 << 20, Duplicates: 10 * time.Minute, Storage: jetstream.FileStorage}
	for _, kind := range kinds {
		old.Subjects = append(old.Subjects, "test.v1.devices.*."+kind)
	}
	if _, err := js.CreateStream(t.Context(), old); err != nil {
		t.Fatal(err)
	}
	b := newBus(t, nc)
	var notifications *jetstream.StreamInfo
	devicetest.Eventually(t, "there is a stream of notifications", func() bool {
		stream, err := js.Stream(t.Context(), "TEST_V1_NOTIFICATIONS")
		if err != nil {
			return false
		}
		notifications = stream.CachedInfo()
		return true
	})
	cfg := notifications.Config
	if !slices.Equal(cfg.Subjects, []string{"test.v1.devices.*.notifications.>"}) || cfg.Duplicates != 30*time.Second || cfg.MaxAge != time.Hour || cfg.MaxBytes != 20<<20 {
		t.Errorf("%+v", cfg)
	}
	events, err := js.Stream(t.Context(), "TEST_V1_EVENTS")
	if err != nil {
		t.Fatal(err)
	}
	cfg = events.CachedInfo().Config
	if slices.Contains(cfg.Subjects, old.Subjects[3]) || len(cfg.Subjects) != 8 || cfg.Duplicates != 10*time.Minute {
		t.Errorf("%+v", cfg)
	}
	b.Publish(notification(1))
	b.Publish(notification(1))
	b.Publish(online(2))
	b.Close()
	for name, want := range map[string]uint64{"TEST_V1_EVENTS": 1, "TEST_V1_NOTIFICATIONS": 1} {
		if stream, err := js.Stream(t.Context(), name); err != nil || stream.CachedInfo().State.Msgs != want {
			t.Errorf("%s: %+v, %v", name, stream.CachedInfo().State, err)
		}
	}
}

// Readers get both streams in order of time, and take up where they were.
func TestFollowReadsBothStreams(t *testing.T) {
	t.Parallel()
	nc := connect(t, natsServer(t, t.TempDir(), -1).ClientURL())
	b := newBus(t, nc)
	js := streams(t, nc)
	last := func(name string) uint64 {
		stream, err := js.Stream(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		return stream.CachedInfo().State.LastSeq
	}
	// Two notifications and one other event, ten times; each is stored before
	// the next is published, so that their order is known.
	var order []devices.EventPosition
	var want devices.EventPosition
	for n := range 30 {
		e, which := notification(n), 1
		if n%3 == 0 {
			e, which = numbered(n), 0
		}
		b.Publish(e)
		want[which]++
		order = append(order, want)
		devicetest.Eventually(t, "the event is kept", func() bool {
			return last("TEST_V1_EVENTS") == want[0] && last("TEST_V1_NOTIFICATIONS") == want[1]
		})
	}
	ids := func(events []devices.StreamEvent) (ids []devices.EventPosition) {
		for _, e := range events {
			ids = append(ids, e.ID)
		}
		return ids
	}
	for begin := range order[:29] {
		if begin == 0 {
			continue // "1" alone is below
		}
		if got := ids(follow(t, b, devices.EventQuery{After: order[begin]}, 29-begin)); !slices.Equal(got, order[begin+1:]) {
			t.Fatalf("after %v: %v, want %v", order[begin], got, order[begin+1:])
		}
	}
	// A position in one stream is one in the other by its time.
	for _, tc := range []struct {
		after devices.EventPosition
		first int // index of the first event that follows
	}{{devices.EventPosition{1, 0}, 1}, {devices.EventPosition{5, 0}, 13}, {devices.EventPosition{0, 4}, 6}} {
		got := follow(t, b, devices.EventQuery{After: tc.after}, 30-tc.first)
		if got[0].Gap || got[len(got)-1].ID != order[29] {
			t.Errorf("after %v: %v", tc.after, ids(got))
		}
	}
	if got := ids(follow(t, b, devices.EventQuery{FromStart: true}, 30)); !slices.Equal(got, order) {
		t.Errorf("from the start: %v, want %v", got, order)
	}
	// From the time at which an event was stored on: that one, and all after it.
	for _, begin := range []int{1, 17} {
		which := 1
		if begin%3 == 0 {
			which = 0
		}
		stream, err := js.Stream(t.Context(), []string{"TEST_V1_EVENTS", "TEST_V1_NOTIFICATIONS"}[which])
		if err != nil {
			t.Fatal(err)
		}
		msg, err := stream.GetMsg(t.Context(), order[begin][which])
		if err != nil {
			t.Fatal(err)
		}
		got := follow(t, b, devices.EventQuery{Since: msg.Time}, 30-begin)
		if len(got) != 30-begin || got[len(got)-1].ID != order[29] || got[0].Gap {
			t.Errorf("since event %d: %v", begin, ids(got))
		}
		if again := ids(follow(t, b, devices.EventQuery{Since: msg.Time, After: got[2].ID}, 27-begin)); len(again) != 27-begin || again[0] != order[begin+3] {
			t.Errorf("resumed after %v: %v", got[2].ID, again)
		}
	}
	// A kind needs one stream.
	if got := ids(follow(t, b, devices.EventQuery{After: devices.EventPosition{8, 3}, Kind: devices.EventOnline}, 2)); got[0] != (devices.EventPosition{9, 3}) {
		t.Errorf("%v", got)
	}
	if got := ids(follow(t, b, devices.EventQuery{After: devices.EventPosition{8, 0}, Kind: devices.EventNotification}, 5)); got[0] != (devices.EventPosition{8, 15}) {
		t.Errorf("%v", got)
	}
	// A gap is in one stream, and reported once.
	stream, err := js.Stream(t.Context(), "TEST_V1_NOTIFICATIONS")
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Purge(t.Context(), jetstream.WithPurgeSequence(11)); err != nil {
		t.Fatal(err)
	}
	got := follow(t, b, devices.EventQuery{After: devices.EventPosition{2, 2}}, 2)
	if !got[0].Gap || got[1].Gap || string(got[0].Data) != `{"stream":"notifications","from":3,"to":10}` || got[1].ID != (devices.EventPosition{3, 10}) {
		t.Errorf("%+v", got)
	}
	if again := follow(t, b, devices.EventQuery{After: got[0].ID}, 1); again[0].Gap {
		t.Errorf("reported again: %+v", again)
	}
	recent, err := b.Recent(t.Context(), devices.EventQuery{}, 3, func(*devices.StreamEvent) bool { return true })
	if want := []devices.EventPosition{{10}, {0, 19}, {0, 20}}; err != nil || !slices.Equal(ids(recent), want) {
		t.Errorf("the last three: %v, %v", ids(recent), err)
	}
}

// A follower of a stream that is made anew would wait for sequences that are
// far away: it ends, and begins again.
func TestFollowEndsWithItsStream(t *testing.T) {
	t.Parallel()
	nc := connect(t, natsServer(t, t.TempDir(), -1).ClientURL())
	b := newBus(t, nc)
	b.Publish(notification(1))
	got := make(chan devices.StreamEvent, 1)
	ended := make(chan error, 1)
	go func() {
		ended <- b.Follow(t.Context(), devices.EventQuery{After: devices.EventPosition{9, 9}}, func(e devices.StreamEvent) error {
			if !e.Gap {
				got <- e
			}
			return nil
		})
	}()
	select {
	case <-got:
	case err := <-ended:
		t.Fatal(err)
	}
	if err := streams(t, nc).DeleteStream(t.Context(), "TEST_V1_NOTIFICATIONS"); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if devices.AsError(err).Code != devices.CodeUnavailable {
			t.Errorf("%v", err)
		}
	case <-time.After(recovery):
		t.Error("the follower waits for a stream that was lost")
	}
}

// A stream of notifications that is slower than the devices must not cost
// other events: notifications leave half of the queue to them.
func TestNotificationsLeaveRoom(t *testing.T) {
	t.Parallel()
	b := &Bus{queue: make(chan queued, queueLimit)} // nothing is published
	for n := range queueLimit {
		b.Publish(notification(n))
	}
	if dropped := b.Dropped.Get(DropQueue); dropped != queueLimit/2 {
		t.Errorf("%d notifications dropped", dropped)
	}
	for n := range queueLimit / 2 {
		b.Publish(numbered(n))
	}
	if dropped := b.Dropped.Get(DropQueue); dropped != queueLimit/2 {
		t.Errorf("%d other events dropped", dropped-queueLimit/2)
	}
}
