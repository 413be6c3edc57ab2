package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/devices"
)

func TestGather(t *testing.T) {
	f := newFleet(t)
	binary := []byte{0, 0xff, '"', '\n'}
	f.holder.OnGather("echo", func(_ context.Context, question []byte) ([]byte, error) {
		return append(bytes.Clone(question), binary...), nil
	})
	answers, missing := f.far.Gather(t.Context(), "echo", []byte(`{"n":1}`), []string{"far", "holder"})
	if len(missing) > 0 || len(answers) != 1 || !bytes.Equal(answers["holder"], append([]byte(`{"n":1}`), binary...)) {
		t.Fatalf("got %q, missing %q", answers, missing)
	}

	began := time.Now()
	if _, missing = f.far.Gather(t.Context(), "echo", []byte(`{}`), []string{"holder", "gone", "absent"}); !slices.Equal(missing, []string{"absent", "gone"}) {
		t.Errorf("missing %q, want the two that do not exist", missing)
	}
	if took := time.Since(began); took < gatherTime || took > gatherTime+2*time.Second {
		t.Errorf("waited %v for nodes that do not exist, want %v", took, gatherTime)
	}
	if _, missing = f.far.Gather(t.Context(), "other", []byte(`{}`), []string{"holder"}); !slices.Equal(missing, []string{"holder"}) {
		t.Errorf("a node that does not know the question: missing %q", missing)
	}
	f.holder.OnGather("panics", func(context.Context, []byte) ([]byte, error) { panic("a bug") })
	if _, missing = f.far.Gather(t.Context(), "panics", []byte(`{}`), []string{"holder"}); !slices.Equal(missing, []string{"holder"}) {
		t.Errorf("a node that panics: missing %q", missing)
	}
	if _, missing = f.far.Gather(t.Context(), "echo", []byte(`{}`), []string{"holder"}); len(missing) != 0 {
		t.Errorf("after that: missing %q", missing)
	}
}

// A node that does not know the sender yet refuses its first message, and gets a second.
func TestGatherBeforeNonce(t *testing.T) {
	f := newFleet(t)
	f.holder.OnGather("echo", func(_ context.Context, question []byte) ([]byte, error) { return question, nil })
	f.far.peers.mu.Lock()
	f.far.peers.nonces = nil
	f.far.peers.mu.Unlock()
	f.holder.replays.mu.Lock()
	clear(f.holder.replays.from)
	f.holder.replays.mu.Unlock()
	if _, missing := f.far.Gather(t.Context(), "echo", []byte(`{}`), []string{"holder"}); len(missing) != 0 {
		t.Errorf("missing %q", missing)
	}
}

// A sender without the secret of the fleet gets no answer, and its answers are dropped.
func TestGatherForged(t *testing.T) {
	f := newFleet(t)
	f.holder.OnGather("echo", func(context.Context, []byte) ([]byte, error) { return []byte("secret"), nil })
	inbox, err := f.client.SubscribeSync(nats.NewInbox())
	if err != nil {
		t.Fatal(err)
	}
	var recorded *nats.Msg
	watch, err := f.client.SubscribeSync("test.v1.gather.far")
	if err != nil {
		t.Fatal(err)
	}
	if err := f.client.Flush(); err != nil {
		t.Fatal(err)
	}
	if _, missing := f.far.Gather(t.Context(), "echo", []byte(`{}`), []string{"holder"}); len(missing) != 0 {
		t.Fatalf("missing %q", missing)
	}
	if recorded, err = watch.NextMsg(5 * time.Second); err != nil {
		t.Fatal(err)
	}
	var question gatherMessage
	if err := json.Unmarshal(recorded.Data, &question); err != nil {
		t.Fatal(err)
	}
	replies, err := f.client.SubscribeSync(question.Reply)
	if err != nil {
		t.Fatal(err)
	}
	forged, err := json.Marshal(gatherMessage{Node: "far", Kind: "echo", Reply: inbox.Subject})
	if err != nil {
		t.Fatal(err)
	}
	refused := f.holder.Refused.Get(devices.CodeUnauthorized)
	for _, msg := range []*nats.Msg{{Subject: recorded.Subject, Data: recorded.Data, Header: recorded.Header}, {Subject: recorded.Subject, Data: forged, Header: recorded.Header}, {Subject: recorded.Subject, Data: forged}} {
		if err := f.client.PublishMsg(msg); err != nil {
			t.Fatal(err)
		}
	}
	for _, sub := range []*nats.Subscription{inbox, replies} {
		if msg, err := sub.NextMsg(300 * time.Millisecond); err == nil {
			t.Errorf("answered on %s: %q", sub.Subject, msg.Data)
		}
	}
	if n := f.holder.Refused.Get(devices.CodeUnauthorized) - refused; n != 3 {
		t.Errorf("%d of 3 forged questions were refused", n)
	}

	forger, err := f.client.Subscribe("test.v1.gather.far", func(msg *nats.Msg) {
		var m gatherMessage
		if json.Unmarshal(msg.Data, &m) == nil {
			_ = f.client.Publish(m.Reply, []byte(`{"node":"absent","answer":"c2VjcmV0"}`)) // unsigned
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = forger.Unsubscribe() }()
	if err := f.client.Flush(); err != nil {
		t.Fatal(err)
	}
	if answers, missing := f.far.Gather(t.Context(), "echo", []byte(`{}`), []string{"absent"}); len(answers) != 0 || len(missing) != 1 {
		t.Errorf("a forged answer was taken: %q", answers)
	}
}
