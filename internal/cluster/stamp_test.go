package cluster

import (
	"encoding/json"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/access"
	"fleetd/internal/audit"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

// counted is a device that counts the runs of its tool.
func (f *testFleet) counted(t *testing.T) *atomic.Int64 {
	t.Helper()
	n := &atomic.Int64{}
	s := devicetest.NewScript()
	s.Call = func(string, json.RawMessage) string { n.Add(1); return devicetest.True }
	f.connect(t, s)
	return n
}

// listen records all requests between nodes about devices.
func (f *testFleet) listen(t *testing.T) *nats.Subscription {
	t.Helper()
	messages, err := f.client.SubscribeSync("test.v1.cmd.>")
	if err == nil {
		err = f.client.Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
	return messages
}

func (f *testFleet) call(t *testing.T) error {
	t.Helper()
	_, err := f.fwd.CallTool(t.Context(), devices.ToolCall{Principal: devicetest.Admin, Device: id, Tool: "self.audio_speaker.set_volume", Arguments: json.RawMessage(`{"volume":5}`)})
	return err
}

func next(t *testing.T, s *nats.Subscription) *nats.Msg {
	t.Helper()
	msg, err := s.NextMsg(5 * time.Second)
	if err != nil {
		t.Fatal(err)
	}
	return msg
}

// A client of NATS that records requests between nodes can replay none of them,
// neither to the node that accepted it nor to one that has no record of it.
func TestHopsCannotBeRepeated(t *testing.T) {
	f := newFleet(t)
	ran := f.counted(t)
	messages := f.listen(t)
	for range 3 {
		if err := f.call(t); err != nil {
			t.Fatal(err)
		}
	}
	first, resent := next(t, messages), next(t, messages) // the first hop is sent again, with the holder's nonce
	if first.Reply != resent.Reply || !strings.HasPrefix(first.Header.Get(HeaderStamp), noNonce+" ") || !strings.HasPrefix(resent.Header.Get(HeaderStamp), f.holder.nonce+" ") {
		t.Fatalf("%q, then %q", first.Header, resent.Header)
	}
	second := next(t, messages)
	if second.Reply == resent.Reply || !strings.HasPrefix(second.Header.Get(HeaderStamp), noNonce+" ") {
		t.Errorf("the second hop: %q", second.Header)
	}
	answers, err := f.client.SubscribeSync(resent.Reply[:strings.LastIndexByte(resent.Reply, '.')] + ".*")
	if err != nil {
		t.Fatal(err)
	}
	elsewhere := func(msg *nats.Msg) *nats.Msg {
		other := *msg
		other.Header = nats.Header{HeaderCaller: msg.Header[HeaderCaller], HeaderStamp: {strings.Replace(msg.Header.Get(HeaderStamp), msg.Reply, msg.Reply+"0", 1)}}
		return &other
	}
	bare := &nats.Msg{Subject: second.Subject, Reply: second.Reply, Data: second.Data, Header: nats.Header{HeaderCaller: second.Header[HeaderCaller]}}
	for name, msg := range map[string]*nats.Msg{"as it was": second, "with the nonce": resent, "with another number": elsewhere(second), "without its stamp": bare} {
		if err := f.client.PublishMsg(msg); err != nil {
			t.Fatal(err)
		}
		// security: N2
		if p, ok := devices.ParseProblem(next(t, answers).Data); !ok || p.Code != devices.CodeUnauthorized {
			t.Errorf("%s: %+v", name, p)
		}
	}
	// security: N2
	if n := len(slices.DeleteFunc(f.ports.Recorded(), func(e audit.Entry) bool {
		return e.Kind != audit.KindRefusal || e.Device != string(id) || e.Outcome != string(devices.CodeUnauthorized)
	})); n != 4 {
		t.Errorf("%d of 4 repetitions are in the audit log", n)
	}
	f.holder.replays = replayFilter{} // as if it had just started
	if err := f.client.PublishMsg(second); err != nil {
		t.Fatal(err)
	}
	// security: N2
	if got := next(t, answers); got.Header.Get(HeaderAgain) != f.holder.nonce {
		t.Errorf("a node without a record: %q", got.Data)
	}
	// security: N2
	if err := f.call(t); err != nil || ran.Load() != 4 {
		t.Errorf("the tool ran %d times of 4; %v", ran.Load(), err)
	}
}

// Servers between two clusters rewrite the reply subject of a message.
func TestHopWithAnotherReply(t *testing.T) {
	f := newFleet(t)
	ran := f.counted(t)
	body, caller := []byte(`{"tool":"self.audio_speaker.set_volume","arguments":{"volume":5},"timeout":"5s"}`), string(access.AppendPrincipal(nil, devicetest.Admin))
	msg := &nats.Msg{Subject: "test.v1.cmd." + id.Token() + ".call", Data: body, Header: nats.Header{HeaderCaller: {caller},
		HeaderStamp: {f.far.stamp(id, "call", f.holder.nonce, "_INBOX.far.1", caller, body)}}}
	answer, err := f.client.RequestMsg(msg, 5*time.Second)
	if err != nil || ran.Load() != 1 {
		t.Fatalf("%v, %v, ran %d times", answer, err, ran.Load())
	}
	answer, err = f.client.RequestMsg(msg, 5*time.Second)
	if p, ok := devices.ParseProblem(answer.Data); err != nil || !ok || p.Code != devices.CodeUnauthorized || ran.Load() != 1 {
		t.Errorf("the same hop again: %s, %v, ran %d times", answer.Data, err, ran.Load())
	}
}

// A forged request to send a call again does not run it twice.
func TestForgedAgain(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	ran := f.counted(t)
	messages := f.listen(t)
	ended := make(chan struct{})
	defer func() { <-ended }()
	go func() {
		defer close(ended)
		for {
			msg, err := messages.NextMsg(time.Second)
			if err != nil {
				return
			}
			for _, nonce := range []string{f.holder.nonce, "other"} {
				_ = f.client.PublishMsg(&nats.Msg{Subject: msg.Reply, Header: nats.Header{HeaderAgain: {nonce}}}) // fails at most at the end of the test
			}
		}
	}()
	for range 20 {
		if err := f.call(t); err != nil && devices.AsError(err).Code != devices.CodeUnauthorized { // the answer to the repeated hop
			t.Error(err)
		}
	}
	// security: N2
	if ran.Load() > 20 {
		t.Errorf("20 calls ran %d times", ran.Load())
	}
}

// The form of a stamp is part of the wire: nodes of two versions read it.
func TestStampOnTheWire(t *testing.T) {
	f := newFleet(t)
	const want = "NONCE _INBOX.abc.1 4Hv5rv7kDckpOSAwtE0sGLsYv5jyCpyAKQRP1u5Ynwo"
	if got := f.far.stamp(id, "call", "NONCE", "_INBOX.abc.1", `{"via":"rest"}`, []byte(`{"tool":"x"}`)); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestReplayFilter(t *testing.T) {
	var all replayFilter
	take := func(sender string, n uint64, fresh bool, want error) {
		t.Helper()
		if err := all.accept("_INBOX."+sender+"."+strconv.FormatUint(n, 36), fresh); !errors.Is(err, want) {
			t.Errorf("%s %d: %v, want %v", sender, n, err, want)
		}
	}
	take("a", 10, false, errNonceRequired)
	take("a", 10, true, nil)
	take("a", 10, true, errReplayed)
	take("a", 10, false, errReplayed)
	take("a", 9, false, errNonceRequired) // perhaps accepted by the process before this one
	take("a", 9, true, nil)
	take("a", 9, true, errReplayed)
	take("a", 12, false, nil)
	take("a", 11, false, nil)
	take("a", 11, false, errReplayed)
	take("b", 1, false, errNonceRequired)
	take("a", 12+hopWindow, false, nil)
	take("a", 12, false, errReplayed) // out of the window
	take("a", 13, false, nil)         // still in it, at the bit where 13+hopWindow will be
	take("a", 13+hopWindow, false, nil)
	take("a", 13+hopWindow, false, errReplayed)
	take("a", 1e9, false, nil)
	take("a", 1e9-1, false, nil)
	take("a", 1e9-hopWindow+1, false, nil)
	take("a", 1e9-hopWindow, false, errReplayed)
	for _, odd := range []string{"", "x", "_INBOX.a.", "_INBOX.a.0b", "_INBOX.a.B", "_INBOX.a.-1"} {
		if err := all.accept(odd, true); !errors.Is(err, access.ErrToken) {
			t.Errorf("%q: %v", odd, err)
		}
	}
	for i := range maxSenders {
		take("many"+strconv.Itoa(i), 5, true, nil)
	}
	if len(all.from) != maxSenders {
		t.Errorf("%d senders are remembered", len(all.from))
	}
	take("a", 2e9, false, errNonceRequired) // it was forgotten
	take("many1", 6, false, nil)
}

// Concurrent hops are all accepted, also the first ones between two nodes.
func TestHopsAtOnce(t *testing.T) {
	f := newFleetWith(t, fleet.Config{CallsPerDevice: 64, Handshakes: 4})
	ran := f.counted(t)
	const callers, each = 16, 20
	failed := make(chan error, callers)
	for range callers {
		go func() {
			var err error
			for range each {
				err = errors.Join(err, f.call(t))
			}
			failed <- err
		}()
	}
	for range callers {
		if err := <-failed; err != nil {
			t.Error(err)
		}
	}
	// security: N2
	if n := ran.Load(); n != callers*each {
		t.Errorf("%d of %d calls ran", n, callers*each)
	}
	if n := f.holder.Refused.Get(devices.CodeUnauthorized); n != 0 {
		t.Errorf("%d were refused", n)
	}
}
