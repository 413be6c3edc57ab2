package trace

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fleet connects the tracers of nodes.
type fleet struct {
	t     *testing.T
	mu    sync.Mutex
	nodes map[string]*Tracer
	cut   map[string]bool // nodes that receive nothing
	subs  map[int]func([]byte)
	next  int
	block chan struct{} // publishing waits for it; nil: does not wait
}

func newFleet(t *testing.T, names ...string) *fleet {
	f := &fleet{t: t, nodes: map[string]*Tracer{}, cut: map[string]bool{}, subs: map[int]func([]byte){}}
	for _, name := range names {
		f.nodes[name] = New(Options{Node: name, Log: slog.New(slog.DiscardHandler), Nodes: func() []string { return names },
			Holder: func(string) access.Holder { return access.Holder{Admin: true} },
			Gather: func(ctx context.Context, kind string, question []byte, nodes []string) (answers map[string][]byte, missing []string) {
				answers = map[string][]byte{}
				for _, other := range nodes {
					switch {
					case other == name:
					case f.isCut(other):
						missing = append(missing, other)
					default:
						answer, err := f.nodes[other].Answer(ctx, question)
						if err != nil || kind != Question {
							t.Errorf("%s: %v", kind, err)
						}
						answers[other] = answer
					}
				}
				return answers, missing
			},
			Publish: func(id devices.ID, entry []byte) error {
				if f.block != nil {
					<-f.block
				}
				f.mu.Lock()
				defer f.mu.Unlock()
				for _, deliver := range f.subs {
					deliver(entry)
				}
				return nil
			},
			Subscribe: func(id devices.ID, deliver func([]byte)) (func(), error) {
				f.mu.Lock()
				defer f.mu.Unlock()
				f.next++
				n := f.next
				f.subs[n] = deliver
				return func() {
					f.mu.Lock()
					defer f.mu.Unlock()
					delete(f.subs, n)
				}, nil
			}})
		t.Cleanup(f.nodes[name].Close)
	}
	return f
}

func (f *fleet) isCut(name string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.cut[name]
}

func (f *fleet) setCut(name string, cut bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cut[name] = cut
}

// reader reads the trace of a device on a node until the test ends it.
type reader struct {
	mu      sync.Mutex
	entries []api.TraceEntry
	stop    context.CancelFunc
	done    chan error
}

func (f *fleet) read(node string, device devices.ID) *reader {
	running, _, _ := f.nodes[node].Get(device)
	ctx, stop := context.WithCancel(f.t.Context())
	r := &reader{stop: stop, done: make(chan error, 1)}
	go func() {
		r.done <- f.nodes[node].Follow(ctx, running, func(entry []byte) error {
			var e api.TraceEntry
			if err := json.Unmarshal(entry, &e); err != nil {
				f.t.Error(err)
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			r.entries = append(r.entries, e)
			return nil
		})
	}()
	f.await("the reader is there", func() bool { f.mu.Lock(); defer f.mu.Unlock(); return len(f.subs) > 0 })
	return r
}

func (r *reader) got() []api.TraceEntry {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]api.TraceEntry(nil), r.entries...)
}

// await fails the test unless the condition is true once nothing more can happen at this time.
func (f *fleet) await(what string, done func() bool) {
	f.t.Helper()
	if synctest.Wait(); !done() {
		f.t.Fatal("not reached: " + what)
	}
}

const device = devices.ID("02:00:00:00:00:07")

var message = []byte(`{"session_id":"s","type":"mcp","payload":{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"x","arguments":{"password":"hunter2","v":1}}}}`)

// A trace that was started on one node shows on another what passes on a third; with payloads, which have no secrets.
func TestTrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, "a", "b", "c")
		f.nodes["c"].Message(device, true, message) // nobody reads: dropped
		if _, err := f.nodes["a"].Start(t.Context(), device, "", "", false, time.Minute); err != nil {
			t.Fatal(err)
		}
		r := f.read("b", device)
		holder := f.nodes["c"]
		holder.Message(device, true, message)
		holder.Message(device, false, []byte(`{"type":`))
		holder.Message("02:00:00:00:00:08", true, message)
		f.await("two messages", func() bool { return len(r.got()) == 2 })
		first, second := r.got()[0], r.got()[1]
		if first.Kind != KindReceived || first.Node != "c" || first.Type != "mcp" || first.Method != "tools/call" || first.RPC != "7" || first.Bytes != len(message) || first.Payload != "" {
			t.Errorf("%+v", first)
		}
		if second.Kind != KindSent || second.Text == "" || second.Type != "" {
			t.Errorf("%+v", second)
		}
		// Another trace of the device ends the first.
		before, _, _ := f.nodes["b"].Get(device)
		if _, err := f.nodes["b"].Start(t.Context(), device, before.ID, "", true, time.Minute); err != nil {
			t.Fatal(err)
		}
		if err := <-r.done; err != nil {
			t.Error(err)
		}
		r = f.read("a", device)
		holder.Message(device, true, message)
		f.await("a payload", func() bool { return len(r.got()) == 1 })
		// security: N51
		if p := r.got()[0].Payload; !strings.Contains(p, `"v":1`) || strings.Contains(p, "hunter2") {
			t.Errorf("payload %s", p)
		}
		holder.Message(device, true, []byte(`{"type":"x","text":"`+strings.Repeat("ü", 2000)+`"}`))
		f.await("a long one", func() bool { return len(r.got()) == 2 })
		if p := r.got()[1].Payload; len(p) > MaxPayload {
			t.Errorf("%d bytes of payload", len(p))
		}
		running, _, _ := f.nodes["c"].Get(device)
		if !f.nodes["c"].End(t.Context(), running) || f.nodes["c"].End(t.Context(), running) {
			t.Error("it does not end, or twice")
		}
		if err := <-r.done; err != nil {
			t.Error(err)
		}
		for name, node := range f.nodes {
			if _, _, ok := node.Get(device); ok || node.active.Load() != nil {
				t.Errorf("node %s has a trace", name)
			}
		}
	})
}

// A trace goes on while it is read, also on a node that did not hear of it at its start, and ends on all nodes without
// a reader.
func TestLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, "a", "b")
		f.setCut("b", true)
		started, err := f.nodes["a"].Start(t.Context(), device, "", "", false, time.Hour)
		if err != nil || len(started.Missing) != 1 {
			t.Fatalf("%+v, %v", started, err)
		}
		r := f.read("a", device)
		f.setCut("b", false)
		time.Sleep(renewTime)
		f.await("the other node has it", func() bool { _, _, ok := f.nodes["b"].Get(device); return ok })
		time.Sleep(3 * leaseTime)
		f.nodes["b"].Message(device, true, message)
		f.await("an entry", func() bool { return len(r.got()) > 0 })
		r.stop()
		<-r.done
		time.Sleep(leaseTime)
		f.await("no trace is left", func() bool { return f.nodes["a"].active.Load() == nil && f.nodes["b"].active.Load() == nil })
		var gone *devices.Error
		if err := f.nodes["a"].Follow(t.Context(), started, nil); !errors.As(err, &gone) || gone.Code != devices.CodeNotFound {
			t.Errorf("%v", err)
		}
	})
}

// A trace ends at its time though it is read.
func TestTimeOfATrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, "a")
		if _, err := f.nodes["a"].Start(t.Context(), device, "", "", false, time.Second); err != nil {
			t.Fatal(err)
		}
		r := f.read("a", device)
		if err := <-r.done; err != nil {
			t.Error(err)
		}
		for _, lasts := range []time.Duration{0, time.Millisecond, 25 * time.Hour} {
			if _, err := f.nodes["a"].Start(t.Context(), device, "", "", false, lasts); devices.AsError(err).Code != devices.CodeBadRequest {
				t.Errorf("%v: %v", lasts, err)
			}
		}
	})
}

// A node whose clock is an hour ahead of the one that starts a trace takes part in it.
func TestNodesWithOtherClocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, "a", "b")
		var sent []byte
		f.nodes["a"].opt.Gather = func(_ context.Context, _ string, question []byte, _ []string) (map[string][]byte, []string) {
			sent = question
			return nil, nil
		}
		if _, err := f.nodes["a"].Start(t.Context(), device, "", "", false, time.Minute); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		if _, err := f.nodes["b"].Answer(t.Context(), sent); err != nil {
			t.Fatal(err)
		}
		running, _, ok := f.nodes["b"].Get(device)
		if want := time.Now().Add(time.Minute); !ok || !running.ExpiresAt.Equal(want) {
			t.Errorf("%+v, want a trace until %v", running, want)
		}
	})
}

// A flood waits for nobody: what is too much is left out and counted, in the next entry, too.
func TestFloodOfATrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, "a")
		f.block = make(chan struct{})
		node := f.nodes["a"]
		if _, err := node.Start(t.Context(), device, "", "", true, time.Minute); err != nil {
			t.Fatal(err)
		}
		r := f.read("a", device)
		const flood = 5000
		for range flood {
			node.Message(device, true, message)
		}
		dropped := node.Dropped.Load()
		if dropped < flood-entryBurst-1 {
			t.Errorf("%d dropped", dropped)
		}
		close(f.block)
		f.await("those that were queued", func() bool { return node.Entries.Load()+dropped == flood })
		time.Sleep(3 * time.Second / entryRate)
		node.Message(device, true, message)
		f.await("the next entry", func() bool { return node.Entries.Load()+dropped == flood+1 })
		var noted uint64
		for _, e := range r.got() {
			noted += e.Dropped
		}
		if noted != dropped {
			t.Errorf("%d of %d dropped entries are in the others", noted, dropped)
		}
	})
}

// security: N51
func TestTracesAreLimited(t *testing.T) {
	f := newFleet(t, "a", "b")
	for i := range MaxTraces {
		if _, err := f.nodes["a"].Start(t.Context(), devices.ID(fmt.Sprint(i)), "", "", false, time.Minute); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := f.nodes["b"].Start(t.Context(), device, "", "", false, time.Minute); devices.AsError(err).Code != devices.CodeLimitReached {
		t.Errorf("%v", err)
	}
	if _, err := f.nodes["b"].Start(t.Context(), "0", "", "", true, time.Minute); devices.AsError(err).Code != devices.CodeConflict {
		t.Errorf("replacing one that was not looked up: %v", err)
	}
	first, _, _ := f.nodes["b"].Get("0")
	if _, err := f.nodes["b"].Start(t.Context(), "0", first.ID, "", true, time.Minute); err != nil {
		t.Errorf("replacing one: %v", err)
	}
	// A node that was cut off has room, and the others do not.
	late := newFleet(t, "a", "b")
	late.setCut("b", true)
	for i := range MaxTraces {
		if _, err := late.nodes["a"].Start(t.Context(), devices.ID(fmt.Sprint(i)), "", "", false, time.Minute); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := late.nodes["b"].Start(t.Context(), device, "", "", false, time.Minute); devices.AsError(err).Code != devices.CodeLimitReached {
		t.Errorf("one more on a node that was cut off: %v", err)
	}
	if _, _, ok := late.nodes["b"].Get(device); ok {
		t.Error("a trace that another node refused is running")
	}
}

// A reader has the trace that it was let into, and not the one with payloads that replaced it, of which its node does
// not know yet.
//
// security: N51
func TestReplacedTrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, "a", "b")
		first, err := f.nodes["a"].Start(t.Context(), device, "", "", false, time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		plain := f.read("b", device)
		f.setCut("b", true)
		if _, err := f.nodes["a"].Start(t.Context(), device, first.ID, "", true, time.Hour); err != nil {
			t.Fatal(err)
		}
		admin := f.read("a", device)
		f.await("the administrator's reader", func() bool { f.mu.Lock(); defer f.mu.Unlock(); return len(f.subs) == 2 })
		f.nodes["a"].Message(device, true, message)
		f.await("the payload", func() bool { return len(admin.got()) == 1 })
		if got := plain.got(); len(got) != 0 {
			t.Errorf("the other reader has %+v", got)
		}
		if err := f.nodes["b"].Follow(t.Context(), api.Trace{Device: string(device), ID: "other"}, nil); devices.AsError(err).Code != devices.CodeNotFound {
			t.Errorf("a trace that is over: %v", err)
		}
		// Its next renewal finds that the trace is over, though nobody renews the new one, and long after.
		admin.stop()
		<-admin.done
		replaced := time.Now()
		if err := <-plain.done; err != nil || time.Since(replaced) > renewTime {
			t.Errorf("the other reader ends after %v: %v", time.Since(replaced), err)
		}
		time.Sleep(2 * leaseTime)
		if _, _, ok := f.nodes["a"].Get(device); ok {
			t.Error("the reader that came back began its trace again")
		}
	})
}

// Without a trace a message costs nothing worth to measure.
func TestNoTraceAllocs(t *testing.T) {
	node := newFleet(t, "a").nodes["a"]
	if n := testing.AllocsPerRun(100, func() { node.Message(device, true, message) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// Records and calls are shown, and passed on.
func TestRecords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, "a")
		var next counting
		rec := f.nodes["a"].Recorder(&next)
		if _, err := f.nodes["a"].Start(t.Context(), device, "", "", false, time.Minute); err != nil {
			t.Fatal(err)
		}
		r := f.read("a", device)
		rec.Step(devices.Step{Device: device, Kind: devices.StepClosed, Cause: "gone", Text: "t"})
		rec.Call(devices.CallStep{Device: device, Call: "c1", Tool: "x", Outcome: "ok"})
		rec.Step(devices.Step{Device: "other"})
		f.await("two entries", func() bool { return len(r.got()) == 2 })
		if got := r.got(); got[0].Kind != KindRecord || got[0].Type != "closed" || got[0].Cause != "gone" || got[1].Kind != KindCall || got[1].Call != "c1" || got[1].Type != "x" || got[1].Cause != "ok" {
			t.Errorf("%+v", got)
		}
		if next != (counting{2, 1}) {
			t.Errorf("%+v", next)
		}
	})
}

type counting struct{ steps, calls int }

func (c *counting) Step(devices.Step)     { c.steps++ }
func (c *counting) Call(devices.CallStep) { c.calls++ }
func (c *counting) Forget(devices.ID)     {}

// Keys have shares of the traces of the fleet, wherever these were started; a trace ends with the key that started it.
func TestSharesOfTraces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ended atomic.Bool
		f := newFleet(t, "a", "b")
		for _, node := range f.nodes {
			node.opt.Holder = func(key string) access.Holder {
				return access.Holder{Admin: key == "admin", Ended: key == "key 1" && ended.Load()}
			}
		}
		fill := func(key string) (n int) {
			for {
				device := devices.ID(fmt.Sprint(key, " ", n))
				_, err := f.nodes[[]string{"a", "b"}[n%2]].Start(t.Context(), device, "", key, false, time.Hour)
				if err != nil && devices.AsError(err).Code == devices.CodeLimitReached {
					return n
				}
				if err != nil {
					t.Fatal(err)
				}
				n++
			}
		}
		// security: K40
		if one, two, admin := fill("key 1"), fill("key 2"), fill("admin"); one != 11 || two != 5 || admin != 14 {
			t.Errorf("%d, %d and %d traces", one, two, admin)
		}
		// A key replaces its own trace also when it has as many as it may.
		before, owner, _ := f.nodes["a"].Get("key 1 0")
		if _, err := f.nodes["a"].Start(t.Context(), "key 1 0", before.ID, "key 1", false, time.Hour); err != nil || owner != "key 1" {
			t.Errorf("%v, of %s", err, owner)
		}
		// A trace that cannot start leaves the one that it was to replace.
		for n, err := 2, error(nil); err == nil; n++ {
			device := devices.ID(fmt.Sprint("key 1 ", n))
			before, _, _ := f.nodes["a"].Get(device)
			if _, err = f.nodes["a"].Start(t.Context(), device, before.ID, "key 2", false, time.Hour); err == nil {
				continue
			}
			for name, node := range f.nodes {
				if still, _, _ := node.Get(device); before.ID == "" || still.ID != before.ID || devices.AsError(err).Code != devices.CodeLimitReached {
					t.Errorf("node %s has %+v after %v", name, still, err)
				}
			}
		}
		ended.Store(true)
		running, _, _ := f.nodes["b"].Get("key 1 1")
		// security: K40
		if err := f.nodes["b"].Follow(t.Context(), running, func([]byte) error { return nil }); err != nil {
			t.Errorf("the trace of an ended key: %v", err)
		}
		for name, node := range f.nodes {
			if _, _, ok := node.Get("key 1 1"); ok {
				t.Errorf("node %s has it", name)
			}
		}
	})
}
