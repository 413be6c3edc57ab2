package cluster

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

func TestBacklogIsFirstInFirstOut(t *testing.T) {
	var b backlog
	put, taken := 0, 0
	for round := range 200 {
		for range round % 37 {
			if !b.put(&nats.Msg{Subject: fmt.Sprint(put)}) {
				t.Fatal("no room")
			}
			put++
		}
		for range round % 31 {
			msg := b.take()
			if msg == nil {
				break
			}
			if msg.Subject != fmt.Sprint(taken) {
				t.Fatalf("got %s, want %d", msg.Subject, taken)
			}
			taken++
		}
	}
	for b.take() != nil {
		taken++
	}
	if taken != put || b.bytes != 0 {
		t.Errorf("%d of %d came out, %d bytes are left", taken, put, b.bytes)
	}
	for n := range MaxBacklog {
		if !b.put(&nats.Msg{}) {
			t.Fatalf("only %d requests fit", n)
		}
	}
	if b.put(&nats.Msg{}) {
		t.Error("the backlog has no limit")
	}
	b = backlog{}
	long := &nats.Msg{Data: make([]byte, 60_000)}
	n := 0
	for ; b.put(long); n++ {
	}
	if bytes := n * len(long.Data); bytes > MaxBacklogBytes || bytes < MaxBacklogBytes*9/10 {
		t.Errorf("%d long requests fit", n)
	}
}

// Long requests that arrive faster than they are dispatched are refused beyond the
// limit of bytes; each caller gets an answer.
func TestFloodOfLongRequests(t *testing.T) {
	f := newFleet(t)
	conn, err := nats.Connect(f.client.ConnectedUrl())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	link := New(Options{Conn: conn, Prefix: "test.v1", Node: "flooded", Mint: f.mint, SingleNode: true, IsConnected: conn.IsConnected, Log: slog.New(slog.DiscardHandler)})
	const flooded = devices.ID("02:00:00:00:00:02")
	if err := link.Hold(flooded); err != nil {
		t.Fatal(err)
	}
	if err := conn.Flush(); err != nil {
		t.Fatal(err)
	}
	const n = 2000
	answers := make(chan *nats.Msg, n+1)
	replies := nats.NewInbox()
	sub, err := f.client.ChanSubscribe(replies, answers)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	body := make([]byte, 60_000)
	for i := range n {
		data := body
		if i == n/2 {
			data = make([]byte, maxHop+1)
		}
		if err := f.client.PublishRequest("test.v1.cmd."+flooded.Token()+".call", replies, data); err != nil {
			t.Fatal(err)
		}
	}
	devicetest.Eventually(t, "all have arrived", func() bool { return len(link.inbox) == n })
	if err := link.Attach(f.holding); err != nil { // it reads the inbox only now
		t.Fatal(err)
	}
	defer link.Close()
	for range n {
		select {
		case <-answers:
		case <-time.After(10 * time.Second):
			t.Fatal("a caller got no answer")
		}
	}
	const room = MaxBacklogBytes / (60_000 + requestCost)
	refused, dispatched, long := link.Refused.Get(devices.CodeUnavailable), link.Refused.Get(devices.CodeUnauthorized), link.Refused.Get(devices.CodeTooLarge)
	if dispatched < room*9/10 || dispatched > room+1 || refused != n-dispatched-long || long != 1 {
		t.Errorf("%d dispatched, %d refused, %d too large; there is room for %d", dispatched, refused, long, room)
	}
}
