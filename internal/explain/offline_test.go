package explain

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/recorder"
	"fleetd/internal/selector"
)

// Thousands of devices that are offline have the causes that they have one by one, whichever
// node saw them, however long a page is. Nodes that do not answer are named.
func TestOfflineGroups(t *testing.T) {
	const many = 5000
	c := &core{}
	x, a, b := pair(c, stream{})
	want := map[string]int{}
	for n := range many {
		id, seen := numbered(n), []*recorder.Recorder{a, b}[n%2]
		v := wentOffline(id, devices.CloseGone, fmt.Sprint("room-", n%10))
		cause := "gone"
		switch n % 5 {
		case 1:
			end(seen, id, devices.CloseGone, office)
			seen.Step(devices.Step{Kind: devices.StepRefused, Device: id, Cause: devices.CauseOldToken, Transport: devices.TransportMQTT})
			cause = "old_generation"
		case 2:
			seen.Call(devices.CallStep{Call: "aaaaaaaaaaaaaaaa", Device: id, Tool: "self.reboot", Outcome: outcomeRestarting, At: time.Now()})
			end(seen, id, devices.CloseGone, office)
			cause = "restarting"
		case 3:
			for range flapCount {
				end(seen, id, devices.CloseGone, office)
			}
			cause = "flapping"
		case 4:
			v.Presence = devices.Presence{}
			cause = "never_seen"
		}
		c.list = append(c.list, v)
		want[cause]++
		if n < 5 {
			c.view = v
			if e, err := x.Device(t.Context(), admin, id); err != nil || e.Cause != cause {
				t.Errorf("%s by itself: %+v, %v, want %s", id, e, err, cause)
			}
		}
	}
	for _, limit := range []int{0, 300, MaxOffline, 10 * MaxOffline} {
		c.short = 100_000
		got, pages, after := map[string]int{}, 0, ""
		ids := map[string]bool{}
		for {
			page, err := x.Offline(t.Context(), admin, selector.Selector{}, after, limit)
			if err != nil {
				t.Fatal(err)
			}
			n := 0
			for i, g := range page.Groups {
				if got[g.Cause] += g.Count; g.Count != len(g.Devices) || len(g.Next) == 0 || g.Well || i > 0 && g.Count > page.Groups[i-1].Count {
					t.Errorf("group %+v", g)
				}
				for _, id := range g.Devices {
					ids[id] = true
				}
				n += g.Count
			}
			if n != page.Explained || n > MaxOffline || !slices.Equal(page.Missing, []string{"c", "d"}) {
				t.Errorf("%d of %d devices, missing %v", n, page.Explained, page.Missing)
			}
			if pages++; page.NextCursor == "" || limit == 0 && pages == 10 {
				break
			}
			after = page.NextCursor
		}
		if limit > 0 && (fmt.Sprint(got) != fmt.Sprint(want) || len(ids) != many) {
			t.Errorf("pages of %d: %v of %d devices, want %v", limit, got, len(ids), want)
		}
	}
	page, err := x.Offline(t.Context(), limited(t, "events:read", "room=room-1"), selector.Selector{}, "", MaxOffline)
	if err != nil || len(page.Groups) != 1 || page.Groups[0].Cause != "old_generation" || page.Explained != many/10 {
		t.Errorf("under a limited key: %d, %v", page.Explained, err)
	}
	sel, err := selector.Parse("room=room-4")
	if err != nil {
		t.Fatal(err)
	}
	if page, err := x.Offline(t.Context(), admin, sel, "", MaxOffline); err != nil || len(page.Groups) != 1 || page.Groups[0].Cause != "never_seen" || page.Explained != many/10 {
		t.Errorf("of a selection: %d, %v", page.Explained, err)
	}
	c.err = devices.ErrDatabase
	if _, err := x.Offline(t.Context(), admin, selector.Selector{}, "~", MaxOffline); err == nil {
		t.Error("a list that failed is an answer")
	}
}

// The largest answers of a node can be sent: 700 KiB.
func TestAnswersAreBounded(t *testing.T) {
	b := recorder.New("b", 16<<20)
	noise := func() string { // that compresses badly
		text := make([]byte, devices.MaxStepText)
		for i := range text {
			text[i] = byte(' ' + rand.N(90))
		}
		return string(text)
	}
	q := question{Batch: &batch{Restarts: true}}
	for n := range offlineBatch {
		q.Batch.Devices = append(q.Batch.Devices, numbered(n))
		for range 2 * offlineSteps {
			b.Step(devices.Step{Kind: devices.StepDeviation, Device: numbered(n), Text: noise(), Proven: true})
		}
	}
	other := New(Options{Records: b, Node: "b", Compute: compute})
	for _, of := range []question{q, {Device: numbered(1), Limit: maxRecords}} {
		text, err := json.Marshal(of)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := other.Answer(t.Context(), text)
		if t.Logf("an answer of %d bytes", len(answer)); err != nil || len(answer) > 700<<10 {
			t.Errorf("an answer has %d bytes, %v", len(answer), err)
		}
		r, err := decode(answer)
		if want := other.own(of); err != nil || len(r.Steps) != len(want.Steps) || of.Batch != nil && len(r.Steps) != offlineBatch*offlineSteps {
			t.Errorf("%d steps of %d, %v", len(r.Steps), len(want.Steps), err)
		}
	}
	if got := other.ofBatch(&batch{Devices: slices.Repeat([]devices.ID{numbered(1)}, 10*offlineBatch)}); len(got.Steps) > offlineBatch*offlineSteps {
		t.Errorf("a question without end has %d steps", len(got.Steps))
	}
	for _, broken := range []string{"", "\x1f\x8b", "\x1f\x8bxxxx"} {
		if _, err := decode([]byte(broken)); err == nil {
			t.Errorf("%q is an answer", broken)
		}
	}
}

// watched counts the reads of steps, and those that are elsewhere than they should be.
type watched struct {
	Records
	isHere           func() bool
	reads, elsewhere int
}

func (w *watched) Steps(id devices.ID, proven bool, kind devices.StepKind, after devices.LogPosition, limit int) []devices.Step {
	if proven {
		w.reads++
		if !w.isHere() {
			w.elsewhere++
		}
	}
	return w.Records.Steps(id, proven, kind, after, limit)
}

// What a page computes runs where the request does, in the one slot of its key, and what it has other nodes compute in
// places of theirs.
func TestOfflineComputesInItsSlot(t *testing.T) {
	c := &core{short: MaxOffline}
	x, a, b := pair(c, stream{})
	for n := range MaxOffline {
		c.list = append(c.list, wentOffline(numbered(n), devices.CloseGone, "lab"))
	}
	var mu sync.Mutex // the place of the other node
	own := &watched{Records: a, isHere: func() bool { return strings.Contains(string(debug.Stack()), t.Name()) }}
	other := &watched{Records: b, isHere: func() bool { return !mu.TryLock() }}
	x.opt.Records = own
	peer := New(Options{Records: other, Node: "b", Compute: func(ctx context.Context) (leave func(), err error) {
		mu.Lock()
		return mu.Unlock, ctx.Err()
	}})
	x.opt.Gather = func(ctx context.Context, _ string, question []byte, _ []string) (map[string][]byte, []string) {
		answer, err := peer.Answer(ctx, question)
		if err != nil {
			t.Error(err)
		}
		return map[string][]byte{"b": answer}, nil
	}
	if page, err := x.Offline(t.Context(), admin, selector.Selector{}, "", MaxOffline); err != nil || page.Explained != MaxOffline || len(page.Missing) != 0 {
		t.Fatalf("%d devices, %v, %v", page.Explained, page.Missing, err)
	}
	for _, w := range []*watched{own, other} {
		// security: N43
		if w.reads != MaxOffline || w.elsewhere > 0 {
			t.Errorf("%d of %d reads are elsewhere", w.elsewhere, w.reads)
		}
	}
	if !mu.TryLock() {
		t.Fatal("the place is not given back")
	}
	mu.Unlock()
	gone, leave := context.WithCancel(t.Context())
	leave()
	peer.opt.Compute = func(ctx context.Context) (func(), error) { return nil, ctx.Err() }
	if _, err := peer.Answer(gone, []byte("{}")); err == nil || other.reads != MaxOffline {
		t.Errorf("an answer without a place: %v", err)
	}
}
