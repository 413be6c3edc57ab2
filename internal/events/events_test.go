package events

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/natstest"
)

// natsServer runs a real server with JetStream for one test.
func natsServer(t *testing.T, dir string, port int) *server.Server {
	t.Helper()
	return natstest.Start(t, server.Options{Port: port, JetStream: true, StoreDir: dir})
}

// natsServerAt runs a server without files where another one was.
func natsServerAt(t *testing.T, at string) *server.Server {
	t.Helper()
	u, err := url.Parse(at)
	if err != nil {
		t.Fatal(err)
	}
	port, err := strconv.Atoi(u.Port())
	if err != nil {
		t.Fatal(err)
	}
	return natsServer(t, t.TempDir(), port)
}

func connect(t *testing.T, url string) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect(url, nats.ReconnectBufSize(-1), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

func newBus(t *testing.T, nc *nats.Conn) *Bus {
	t.Helper()
	return newBusWith(t, nc, Options{})
}

func newBusWith(t *testing.T, nc *nats.Conn, opt Options) *Bus {
	t.Helper()
	opt.Conn, opt.Prefix, opt.Node, opt.Log = nc, cmp.Or(opt.Prefix, "test.v1"), "n1", slog.New(slog.DiscardHandler)
	opt.Retention, opt.Limit, opt.NotificationLimit = time.Hour, 10<<20, 20<<20
	b, err := New(opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	b.Open(devices.Alone)
	devicetest.Eventually(t, "the streams exist", func() bool {
		for _, s := range b.streams {
			if _, err := s.js.Stream(t.Context(), s.cfg.Name); err != nil {
				return false
			}
		}
		return true
	})
	return b
}

const dev = devices.ID("aa:bb:cc:dd:ee:ff")

func online(seq int64) devices.Event {
	return devices.Event{Kind: devices.EventOnline, Device: dev, Session: "s", Epoch: 7, Seq: seq, Time: time.UnixMilli(1_800_000_000_123),
		MsgID: "aabbccddeeff-7-" + string(rune('0'+seq)), Fields: json.RawMessage(`"transport":"websocket","client":"c"`)}
}

func TestPayloadAndSubject(t *testing.T) {
	nc := connect(t, natsServer(t, t.TempDir(), -1).ClientURL())
	b := newBus(t, nc)
	watcher, err := nc.SubscribeSync("test.v1.devices.>")
	if err != nil {
		t.Fatal(err)
	}
	b.Publish(online(1))
	b.Publish(devices.Event{Kind: devices.EventNotification, Subject: "button.up", Device: dev, Seq: 2, Time: time.Now(), MsgID: "x", Fields: json.RawMessage(`"method":"m"`)})
	msg, err := watcher.NextMsg(5 * time.Second)
	if err != nil {
		t.Fatal(err)
	}
	want := `{"device":"aa:bb:cc:dd:ee:ff","node":"n1","session":"s","epoch":7,"seq":1,"time":"2027-01-15T08:00:00.123Z","transport":"websocket","client":"c"}`
	if msg.Subject != "test.v1.devices.aabbccddeeff.online" || string(msg.Data) != want {
		t.Errorf("%s %s", msg.Subject, msg.Data)
	}
	if msg, err = watcher.NextMsg(5 * time.Second); err != nil || msg.Subject != "test.v1.devices.aabbccddeeff.notifications.button.up" {
		t.Errorf("%v %v", msg, err)
	}
}

func TestStreamKeepsLastingKindsOnce(t *testing.T) {
	nc := connect(t, natsServer(t, t.TempDir(), -1).ClientURL())
	b := newBus(t, nc)
	for range 3 {
		b.Publish(online(1)) // the same message id
	}
	b.Publish(devices.Event{Kind: devices.EventMessage, Subject: "listen", Device: dev, Time: time.Now()})
	b.Publish(online(2))
	b.Close()
	stream, err := streams(t, nc).Stream(t.Context(), "TEST_V1_EVENTS")
	if err != nil {
		t.Fatal(err)
	}
	if n := stream.CachedInfo().State.Msgs; n != 2 {
		t.Errorf("%d messages stored, want 2", n)
	}
	// A request on a subject of the root must not be answered by the stream.
	if _, err := nc.Request("test.v1.cmd.aabbccddeeff.call", nil, time.Second); !errors.Is(err, nats.ErrNoResponders) {
		t.Errorf("request: %v", err)
	}
}

func TestFollowResumesAndTellsOfGaps(t *testing.T) {
	nc := connect(t, natsServer(t, t.TempDir(), -1).ClientURL())
	b := newBus(t, nc)
	for seq := range int64(5) {
		b.Publish(online(seq + 1))
	}
	stream, err := streams(t, nc).Stream(t.Context(), "TEST_V1_EVENTS")
	if err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "five are stored", func() bool {
		info, err := stream.Info(t.Context())
		return err == nil && info.State.Msgs == 5
	})
	read := func(q devices.EventQuery, n int) []devices.StreamEvent { return follow(t, b, q, n) }
	at := func(seq uint64) devices.EventPosition { return devices.EventPosition{seq} }
	kind := devices.EventOnline // which needs one stream only
	if got := read(devices.EventQuery{After: at(3), Kind: kind}, 2); got[0].ID != at(4) || got[1].ID != at(5) || got[0].Device != dev || got[0].Kind != kind {
		t.Errorf("%+v", got)
	}
	if err := stream.Purge(t.Context(), jetstream.WithPurgeSequence(4)); err != nil {
		t.Fatal(err)
	}
	if got := read(devices.EventQuery{After: at(1), Device: dev}, 2); !got[0].Gap || got[0].ID != at(3) || string(got[0].Data) != `{"stream":"events","from":2,"to":3}` || got[1].ID != at(4) {
		t.Errorf("%+v", got)
	}
	if got := read(devices.EventQuery{After: at(3), Device: dev, Kind: kind}, 1); got[0].Gap || got[0].ID != at(4) {
		t.Errorf("where nothing is missing: %+v", got)
	}
	if got := read(devices.EventQuery{After: at(2), Device: dev, Kind: kind}, 1); !got[0].Gap || string(got[0].Data) != `{"stream":"events","from":3,"to":3}` {
		t.Errorf("where one is missing: %+v", got)
	}
	if got := read(devices.EventQuery{FromStart: true, Device: dev, Kind: kind}, 2); !got[0].Gap || string(got[0].Data) != `{"stream":"events","from":1,"to":3}` || got[1].ID != at(4) {
		t.Errorf("from the start, which is gone: %+v", got)
	}
	// A sequence ahead is of a stream that was lost: all of the new one is news.
	if got := read(devices.EventQuery{After: at(99)}, 2); !got[0].Gap || got[1].ID != at(4) {
		t.Errorf("a sequence of another stream: %+v", got)
	}
}

// A position in a stream that was lost, as after a restore, is not taken for one in its successor.
func TestPositionInALostStream(t *testing.T) {
	nc := connect(t, natsServer(t, t.TempDir(), -1).ClientURL())
	var created atomic.Uint64
	opt := Options{FirstSequence: func() uint64 { return 100 * created.Add(1) }}
	b := newBusWith(t, nc, opt)
	kind := devices.EventOnline
	stored := func(n uint64) {
		devicetest.Eventually(t, "the events are stored", func() bool {
			s, err := streams(t, nc).Stream(t.Context(), "TEST_V1_EVENTS")
			return err == nil && s.CachedInfo().State.Msgs == n
		})
	}
	b.Publish(online(1))
	b.Publish(online(2))
	stored(2)
	before := follow(t, b, devices.EventQuery{FromStart: true, Kind: kind}, 2)
	if before[0].Gap {
		t.Errorf("nothing is missing at the start of a stream: %+v", before[0])
	}
	b.Close()
	if err := streams(t, nc).DeleteStream(t.Context(), "TEST_V1_EVENTS"); err != nil {
		t.Fatal(err)
	}
	b = newBusWith(t, nc, opt)
	for seq := range int64(5) {
		b.Publish(online(seq + 3))
	}
	stored(5)
	got := follow(t, b, devices.EventQuery{After: before[1].ID, Kind: kind}, 6)
	if !got[0].Gap || got[1].ID[0] != got[0].ID[0]+1 || got[5].ID[0] != got[0].ID[0]+5 {
		t.Errorf("after the last event of the lost stream: %+v", got)
	}
}

// The last events come once each, oldest first, however far back they lie.
func TestRecent(t *testing.T) {
	nc := connect(t, natsServer(t, t.TempDir(), -1).ClientURL())
	b := newBus(t, nc)
	const stored = recentWindow + 50 // two looks back
	for seq := range int64(stored) {
		e := online(seq + 1)
		e.MsgID = fmt.Sprint("m", seq)
		if seq%100 == 0 {
			e.Device = "02:00:00:00:00:01"
		}
		b.Publish(e)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "all are stored", func() bool {
		s, err := js.Stream(t.Context(), StreamName(b.opt.Prefix, "EVENTS"))
		return err == nil && s.CachedInfo().State.Msgs == stored
	})
	for name, c := range map[string]struct {
		q     devices.EventQuery
		limit int
		want  []uint64
	}{
		"the last":     {devices.EventQuery{}, 3, []uint64{stored - 2, stored - 1, stored}},
		"of a device":  {devices.EventQuery{Device: "02:00:00:00:00:01"}, 10, []uint64{1, 101, 201, 301}},
		"its last two": {devices.EventQuery{Device: "02:00:00:00:00:01"}, 2, []uint64{201, 301}},
		"another kind": {devices.EventQuery{Kind: devices.EventOffline}, 2, nil},
	} {
		got, err := b.Recent(t.Context(), c.q, c.limit, func(*devices.StreamEvent) bool { return true })
		var numbers []uint64
		for _, e := range got {
			numbers = append(numbers, e.ID[devices.EventsStream])
		}
		if err != nil || !slices.Equal(numbers, c.want) {
			t.Errorf("%s: %v, %v", name, numbers, err)
		}
	}
	all, err := b.Recent(t.Context(), devices.EventQuery{}, 2*stored, func(*devices.StreamEvent) bool { return true })
	if err != nil || len(all) != stored || !slices.IsSortedFunc(all, func(x, y devices.StreamEvent) int {
		return cmp.Compare(x.ID[devices.EventsStream], y.ID[devices.EventsStream])
	}) {
		t.Errorf("%d of %d events, %v", len(all), stored, err)
	}
}

// follow reads n events.
func follow(t *testing.T, b *Bus, q devices.EventQuery, n int) (got []devices.StreamEvent) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	enough := errors.New("enough")
	if err := b.Follow(ctx, q, func(e devices.StreamEvent) error {
		if got = append(got, e); len(got) == n {
			return enough
		}
		return nil
	}); !errors.Is(err, enough) {
		t.Fatalf("%+v: %v after %d events", q, err, len(got))
	}
	return got
}

func TestAwayIsCountedAndNeverBlocks(t *testing.T) {
	dir := t.TempDir()
	s := natsServer(t, dir, -1)
	nc := connect(t, s.ClientURL())
	b := newBus(t, nc)
	s.Shutdown()
	devicetest.Eventually(t, "the connection is lost", func() bool { return !nc.IsConnected() })
	for seq := range int64(5) {
		b.Publish(online(seq))
	}
	devicetest.Eventually(t, "five drops are counted", func() bool { return b.Dropped.Get(DropAway) == 5 })
	if err := b.Follow(t.Context(), devices.EventQuery{}, nil); devices.AsError(err).Code != devices.CodeUnavailable {
		t.Errorf("follow: %v", err)
	}
}
