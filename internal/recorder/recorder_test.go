package recorder

import (
	"bytes"
	"fmt"
	"math"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"fleetd/internal/devices"
	"fleetd/internal/racetest"
)

func id(n int) devices.ID {
	return devices.ID(fmt.Sprintf("02:00:00:%02x:%02x:%02x", n>>16&255, n>>8&255, n&255))
}

// steps returns the steps of a device, proven or not, newest first.
func steps(r *Recorder, id devices.ID, kind devices.StepKind, limit int) []devices.Step {
	all := append(r.Steps(id, true, kind, devices.LogPosition{}, limit), r.Steps(id, false, kind, devices.LogPosition{}, limit)...)
	slices.SortFunc(all, func(a, b devices.Step) int { return a.Position().Compare(b.Position()) })
	return all
}

var address = netip.MustParseAddr("192.0.2.44")

// connected and closed are the two records of a good connection.
func connected(n int) devices.Step {
	return devices.Step{Kind: devices.StepConnected, Device: id(n), Transport: devices.TransportMQTT, Epoch: 1_790_000_000_000_000, Remote: address, Text: "2.4.2", Proven: true,
		Took: 400 * time.Millisecond, Generation: 3}
}

func closed(n int) devices.Step {
	return devices.Step{Kind: devices.StepClosed, Device: id(n), Cause: devices.StepCause(devices.CloseGone), Took: 3 * time.Hour, Transport: devices.TransportMQTT, Proven: true}
}

// What is recorded is read back, newest first.
func TestStepsAreKept(t *testing.T) {
	r := New("a", MinMemory)
	want := []devices.Step{closed(1), connected(1),
		{Kind: devices.StepRefused, Device: id(1), Cause: devices.CauseWrongToken, Remote: netip.MustParseAddr("2001:db8::7"), Transport: devices.TransportWebSocket, Text: "why", Image: "0a1b2c3d"}}
	for i := len(want) - 1; i >= 0; i-- {
		r.Step(want[i])
		r.Step(connected(2)) // between them
	}
	got := steps(r, id(1), "", 10)
	if len(got) != len(want) {
		t.Fatalf("%d steps, want %d", len(got), len(want))
	}
	for i, s := range got {
		if time.Since(s.At) > time.Minute || s.Count != 1 || s.Node != "a" {
			t.Errorf("step %d: %+v", i, s)
		}
		s.At, s.Count, s.Node, s.Seq = time.Time{}, 0, "", 0
		if s != want[i] {
			t.Errorf("step %d is\n%+v, want\n%+v", i, s, want[i])
		}
	}
	if got := steps(r, id(1), devices.StepClosed, 10); len(got) != 1 || got[0].Kind != devices.StepClosed {
		t.Errorf("of one kind: %+v", got)
	}
	if got := r.Steps(id(1), false, "", got[2].Position(), 10); len(got) != 0 {
		t.Errorf("before the first: %+v", got)
	}
	if got := steps(r, id(3), "", 10); len(got) != 0 {
		t.Errorf("of another device: %+v", got)
	}
}

// Every kind and every cause is read back: the record has their index.
func TestWordsAreKept(t *testing.T) {
	r := New("a", MinMemory)
	for i, kind := range devices.StepKinds {
		for j, cause := range devices.StepCauses {
			n := i*len(devices.StepCauses) + j
			r.Step(devices.Step{Kind: kind, Device: id(n), Cause: cause})
			if got := steps(r, id(n), "", 1); len(got) != 1 || got[0].Kind != kind || got[0].Cause != cause {
				t.Fatalf("%s %s: %+v", kind, cause, got)
			}
		}
	}
}

// Hostile text is cut and stays valid UTF-8; numbers out of range harm nothing else.
func TestHostileSteps(t *testing.T) {
	r := New("a", MinMemory)
	texts := []string{strings.Repeat("\x1b[31m\x00", 2000), strings.Repeat("語", 100), "\xff\xfe\x80"}
	for _, text := range texts {
		r.Step(devices.Step{Kind: devices.StepMCPFailed, Device: id(1), Cause: "not a cause", Transport: "no", Text: text, Epoch: -1, Generation: math.MinInt64, Took: math.MinInt64, Calls: -1})
		r.Step(devices.Step{Kind: "no kind", Device: devices.ID(text), Text: text})
		r.Call(devices.CallStep{Call: text, Device: id(1), Key: text, Tool: text, Detail: text, Outcome: text, Rule: text, Ahead: text, Held: text, Bytes: -1})
		r.Step(devices.Step{Device: id(1), Text: text, Unknown: true})
	}
	r.Step(connected(1))
	all, calls := steps(r, id(1), "", 100), r.Calls(id(1), devices.LogPosition{}, 100)
	if len(all) != len(texts)+1 || len(calls) != len(texts) {
		t.Fatalf("%d steps, %d calls", len(all), len(calls))
	}
	for _, text := range []string{all[1].Text, all[2].Text, all[3].Text, calls[0].Tool, calls[1].Detail, calls[2].Key, r.Refusals()[0].Text} {
		if !utf8.ValidString(text) || len(text) > 3*maxDetail {
			t.Errorf("kept %q", text)
		}
	}
	if all[0].Text != "2.4.2" {
		t.Errorf("the step after them is %+v", all[0])
	}
}

// 100,000 devices with three connections each stay within the memory and 5 %.
func TestMemory(t *testing.T) {
	racetest.Skip(t, "an amount of memory")
	const limit = 64 << 20
	before := heap()
	r := New("a", limit)
	if grown := heap() - before; grown > 1<<20 {
		t.Errorf("an empty recorder takes %d bytes", grown)
	}
	for range 3 {
		for n := range 100_000 {
			r.Step(connected(n))
			r.Step(closed(n))
		}
	}
	grown := heap() - before
	t.Logf("%.1f MiB in the heap, %.1f MiB counted, %d bytes a device", float64(grown)/(1<<20), float64(r.Memory.Load())/(1<<20), grown/100_000)
	if grown > limit*105/100 {
		t.Errorf("it takes %d bytes", grown)
	}
	if counted := r.Memory.Load(); counted > limit || counted < grown*9/10 {
		t.Errorf("it counts %d bytes of %d", counted, grown)
	}
	kept := 0
	for n := range 100_000 {
		if all := steps(r, id(n), "", 10); len(all) >= 2 && all[0].Kind == devices.StepClosed {
			kept++
		}
	}
	if kept != 100_000 {
		t.Errorf("the last connection of %d devices is kept", kept)
	}
	// However much follows, the limit holds.
	for n := range 200_000 {
		r.Step(connected(n))
		r.Call(devices.CallStep{Call: "aaaaaaaaaaaaaaaa", Device: id(n), Tool: "self.audio_speaker.set_volume", Outcome: "device_timeout", Detail: strings.Repeat("x", 200)})
		r.Call(devices.CallStep{Call: "aaaaaaaaaaaaaaaa", Device: id(n), Tool: "self.audio_speaker.set_volume", Outcome: "ok"})
	}
	grown = heap() - before
	t.Logf("full: %.1f MiB", float64(grown)/(1<<20))
	if grown > limit*105/100 || r.Memory.Load() > limit {
		t.Errorf("it takes %d bytes, counts %d", grown, r.Memory.Load())
	}
	runtime.KeepAlive(r)
}

func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// A device that reconnects 100 times a second for ten minutes drives out nobody's records,
// and how often it did so is known.
func TestFlapperEvictsNobody(t *testing.T) {
	r := New("a", 16<<20)
	const others = 500
	for n := range others {
		r.Step(connected(n))
	}
	const times = 100 * 60 * 10
	for range times {
		r.Step(connected(others))
		r.Step(closed(others))
		r.Call(devices.CallStep{Call: "aaaaaaaaaaaaaaaa", Device: id(others), Outcome: "device_offline"})
	}
	for n := range others {
		if len(steps(r, id(n), "", 10)) != 1 {
			t.Errorf("the record of device %d is gone", n)
		}
	}
	seen := map[devices.StepKind]int{}
	for _, s := range steps(r, id(others), "", 1000) {
		seen[s.Kind] += s.Count
	}
	if seen[devices.StepConnected] != times || seen[devices.StepClosed] != times || r.Combined.Load() != 2*times-stepBurst {
		t.Errorf("it counts %v, %d combined", seen, r.Combined.Load())
	}
	if n := len(r.Calls(id(others), devices.LogPosition{}, 10_000)); n != callBurst || r.Dropped.Load() != times-callBurst {
		t.Errorf("%d calls are kept, %d dropped", n, r.Dropped.Load())
	}
}

// Whoever knows the id of a device and has no credentials of it spends none of its records: its own are kept, and so are
// those of others.
func TestUnprovenStepsSpendNothing(t *testing.T) {
	r := New("a", 16<<20)
	for n := range 500 {
		r.Step(connected(n))
	}
	for n := range 100_000 {
		r.Step(devices.Step{Kind: devices.StepCheck, Device: id(n % 500), Cause: devices.CausePending, Remote: address})
	}
	for n := range 500 {
		r.Step(closed(n))
	}
	for n := range 500 {
		if got := r.Steps(id(n), true, "", devices.LogPosition{}, 10); len(got) != 2 || got[0].Kind != devices.StepClosed || got[1].Kind != devices.StepConnected || got[1].Count != 1 {
			t.Fatalf("of device %d is left: %+v", n, got)
		}
	}
	if got := r.Steps(id(1), false, "", devices.LogPosition{}, 1000); len(got) == 0 || len(got) > stepBurst || got[0].Count < 100 {
		t.Errorf("of those who only knew the id %d steps are kept: %+v", len(got), got)
	}
}

// One address that invents devices drives out none of the refusals of others.
func TestRefusalsOfOneAddress(t *testing.T) {
	r := New("a", MinMemory)
	refuse := func(n int, from string) {
		r.Step(devices.Step{Kind: devices.StepRefused, Device: id(n), Cause: devices.CauseUnknownDevice, Remote: netip.MustParseAddr(from), Unknown: true})
	}
	for n := range 20 {
		refuse(n, "192.0.2.44")
	}
	for n := range 10_000 {
		refuse(1000+n, fmt.Sprintf("2001:db8::%x", n)) // of one network
	}
	kept := 0
	for _, s := range r.Refusals() {
		if s.Remote == address {
			kept++
		}
	}
	if n := len(r.Refusals()); n != maxRefusals || kept != 20 {
		t.Errorf("%d refusals, %d of the address that had 20", n, kept)
	}
	for n := range 500 {
		refuse(n, fmt.Sprintf("198.51.%d.%d", n>>8, n&255))
	}
	if n := len(r.Refusals()); n != maxRefusals || len(r.refusedBy) > maxRefusals {
		t.Errorf("%d refusals of %d addresses", n, len(r.refusedBy))
	}
}

// A page of records continues where the one before it ended, also within one millisecond.
func TestStepsContinue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := New("a", MinMemory)
		for range stepBurst {
			r.Step(connected(1))
			r.Step(devices.Step{Kind: devices.StepCheck, Device: id(1)})
			r.Call(devices.CallStep{Call: "aaaaaaaaaaaaaaaa", Device: id(1), Tool: "t", Outcome: "ok", At: time.Now()})
		}
		for _, read := range []func(devices.LogPosition) (devices.LogPosition, bool){
			func(at devices.LogPosition) (devices.LogPosition, bool) {
				s := r.Steps(id(1), true, "", at, 3)
				if len(s) == 0 {
					return at, false
				}
				return s[0].Position(), true
			},
			func(at devices.LogPosition) (devices.LogPosition, bool) {
				s := r.Steps(id(1), false, "", at, 3)
				if len(s) == 0 {
					return at, false
				}
				return s[0].Position(), true
			},
			func(at devices.LogPosition) (devices.LogPosition, bool) {
				c := r.Calls(id(1), at, 3)
				if len(c) == 0 {
					return at, false
				}
				return c[0].Position(), true
			},
		} {
			n, at, more := 0, devices.LogPosition{}, true
			for at, more = read(at); more; at, more = read(at) {
				again, err := devices.ParseLogPosition(at.String())
				if n++; err != nil || again.Compare(at) != 0 || n > stepBurst {
					t.Fatalf("%q, %v, %d records", at, err, n)
				}
				at = again
			}
			if n != stepBurst {
				t.Errorf("%d records in pages of one, of %d", n, stepBurst)
			}
		}
	})
	for _, text := range []string{"x", "1", "1 x", " 1 a"} {
		if _, err := devices.ParseLogPosition(text); err == nil {
			t.Errorf("%q is a position", text)
		}
	}
}

// A text that is too long ends after a word.
func TestCutTexts(t *testing.T) {
	for text, want := range map[string]string{
		"short": "short",
		"the device did not answer tools/list within 10 s: it is connected": "the device did not answer tools/list within 10 s: it is…",
		strings.Repeat("x", 70): strings.Repeat("x", devices.MaxStepText-3) + "…",
		strings.Repeat("語", 30): strings.Repeat("語", 20) + "…",
	} {
		if got := cut(text, devices.MaxStepText); got != want {
			t.Errorf("%q is cut to %q, want %q", text, got, want)
		}
		r := New("a", MinMemory)
		if r.Step(devices.Step{Device: id(1), Text: text}); steps(r, id(1), "", 1)[0].Text != want {
			t.Errorf("%q is kept as %q", text, steps(r, id(1), "", 1)[0].Text)
		}
	}
}

// After its burst a device records again at its rate.
func TestRateRecovers(t *testing.T) {
	r := New("a", MinMemory)
	for range 2 * stepBurst {
		r.Step(closed(1))
	}
	r.started = r.started.Add(-(3*stepPause + 1) * time.Second)
	for range 5 {
		r.Step(connected(1))
	}
	if n := len(steps(r, id(1), devices.StepConnected, 100)); n != 3 {
		t.Errorf("%d records after the time of three", n)
	}
}

// Unknown devices share a ring of their own, where repetitions are one entry.
func TestRefusals(t *testing.T) {
	r := New("a", MinMemory)
	r.Step(connected(1))
	for n := range 10_000 {
		s := devices.Step{Kind: devices.StepRefused, Device: id(n + 10), Cause: devices.CauseUnknownDevice, Remote: address, Unknown: true}
		r.Step(s)
		r.Step(s)
	}
	list := r.Refusals()
	if len(list) != maxRefusals || list[0].Device != id(10_009) || list[0].Count != 2 || list[0].Node != "a" {
		t.Errorf("%d refusals, the first %+v", len(list), list[0])
	}
	if len(steps(r, id(1), "", 10)) != 1 || r.Memory.Load() > 64<<10 {
		t.Errorf("unknown devices take %d bytes", r.Memory.Load())
	}
}

// A failed call is kept when many good ones have followed, and so is its late answer.
func TestFailedCallsOutliveGoodOnes(t *testing.T) {
	r := New("a", MinMemory)
	begun := time.Now()
	lost := devices.CallStep{Call: "lostlostlostlost", Device: id(1), Key: "ops", Tool: "self.light.set", At: begun, Took: 30 * time.Second, Waited: 27 * time.Second, Ahead: "aheadaheadahead1",
		Sent: true, Holder: true, Outcome: "device_timeout", Detail: "the device did not answer in time", Rule: "r", Held: "b", Bytes: 17}
	r.Call(lost)
	late := lost
	late.Late, late.Outcome, late.Took = true, "ok", 34*time.Second
	r.Call(late)
	for n := range 20_000 {
		r.Call(devices.CallStep{Call: fmt.Sprintf("%016d", n), Device: id(n % 300), Tool: "self.light.set", At: begun, Outcome: "ok"})
	}
	got := r.CallsOf(lost.Call)
	if len(got) != 2 {
		t.Fatalf("%d records of the call", len(got))
	}
	for i, want := range []devices.CallStep{lost, late} {
		want.Node, want.Seq = "a", got[i].Seq
		if d := got[i].At.Sub(begun).Abs(); d > time.Second {
			t.Errorf("it began %v off", d)
		}
		if got[i].At = want.At; got[i] != want {
			t.Errorf("got %+v\nwant %+v", got[i], want)
		}
	}
	if r.CallsOf("") != nil || r.CallsOf("0000000000000000") != nil {
		t.Error("a call that was overwritten is found")
	}
	if r.CallsOf("0000000000019999") == nil {
		t.Error("the last call is not found")
	}
}

// Readers and writers run at the same time, while records are overwritten.
func TestConcurrentUse(t *testing.T) {
	r := New("a", MinMemory)
	var all sync.WaitGroup
	for w := range 4 {
		all.Go(func() {
			for n := range 20_000 {
				r.Step(connected(n%5000 + w))
				r.Call(devices.CallStep{Call: "cccccccccccccccc", Device: id(n % 50), Outcome: "ok"})
				if n%50 == 0 {
					for _, s := range steps(r, id(n%5000), "", 100) {
						if s.Kind != devices.StepConnected || s.Text != "2.4.2" {
							t.Errorf("read %+v", s)
							return
						}
					}
				}
			}
			r.Reach(id(w))
			r.CallsOf("cccccccccccccccc")
		})
	}
	all.Wait()
}

// The age of records is that of the oldest one, once there are more than fit.
func TestReach(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := New("a", MinMemory)
		if !r.Reach(id(1)).Equal(r.started) {
			t.Error("an empty recorder reaches back to its start")
		}
		time.Sleep(time.Hour)
		for n := range 100_000 {
			r.Step(connected(n))
		}
		if since := r.Reach(id(1)).Sub(r.started); since != time.Hour {
			t.Errorf("it reaches back to %v after its start", since)
		}
	})
}

// A record costs no allocation.
func TestAllocations(t *testing.T) {
	r := New("a", MinMemory)
	step, call := connected(1), devices.CallStep{Call: "aaaaaaaaaaaaaaaa", Device: id(1), Key: "ops", Tool: "self.light.set", Outcome: "ok"}
	for n := range 10_000 { // every chunk is allocated
		r.Step(connected(n))
		call.Device = id(n)
		r.Call(call)
		call.Outcome = "ok"
	}
	ids := make([]devices.ID, 512)
	for n := range ids {
		ids[n] = id(n)
	}
	n := 0
	if got := testing.AllocsPerRun(1000, func() {
		n++
		step.Device, call.Device = ids[n%len(ids)], ids[n%len(ids)]
		r.Step(step)
		r.Call(call)
	}); got != 0 {
		t.Errorf("%v allocations", got)
	}
}

func BenchmarkStep(b *testing.B) {
	r := New("a", 64<<20)
	step := connected(1)
	ids := make([]devices.ID, 10_000)
	for n := range ids {
		ids[n] = id(n)
	}
	for n := range 600_000 { // every chunk is allocated
		step.Device = id(n % 100_000)
		r.Step(step)
	}
	cpu := cpuTime(b)
	b.ReportAllocs()
	n := 0
	for ; b.Loop(); n++ {
		if n%(stepBurst*len(ids)) == 0 { // so that none is combined
			r.started = r.started.Add(-stepBurst * stepPause * time.Second)
		}
		step.Device = ids[n%len(ids)]
		r.Step(step)
	}
	b.ReportMetric(float64(cpuTime(b)-cpu)/float64(n), "cpu-ns/op")
	if r.Combined.Load() > 0 {
		b.Error("steps were combined")
	}
}

func BenchmarkCall(b *testing.B) {
	r := New("a", 64<<20)
	c := devices.CallStep{Call: "aaaaaaaaaaaaaaaa", Device: id(1), Key: "ops", Tool: "self.audio_speaker.set_volume", At: time.Now(), Outcome: "ok", Holder: true}
	ids := make([]devices.ID, 10_000)
	for n := range ids {
		ids[n] = id(n)
	}
	for n := range 10 * len(ids) {
		c.Device = ids[n%len(ids)]
		r.Call(c)
	}
	cpu := cpuTime(b)
	b.ReportAllocs()
	n := 0
	for ; b.Loop(); n++ {
		c.Device = ids[n%len(ids)]
		r.Call(c)
	}
	b.ReportMetric(float64(cpuTime(b)-cpu)/float64(n), "cpu-ns/op")
}

// cpuTime is the time that the process has had a processor: other programs do not count.
func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// Ends of sessions are counted by device, address and period, also of records that have
// taken the place of older ones.
func TestEnded(t *testing.T) {
	r := New("a", MinMemory)
	there, elsewhere := netip.MustParseAddr("203.0.113.7"), netip.MustParseAddr("2001:db8::1")
	ends := func(from, to int, at netip.Addr) {
		for n := from; n < to; n++ {
			s := closed(n)
			s.Remote = at
			r.Step(s)
			r.Step(s)
			r.Step(connected(n))
		}
	}
	later := func(d time.Duration) { r.started = r.started.Add(-d) }
	period := func(from, to time.Duration) devices.Ends {
		return devices.Ends{Cause: devices.StepCause(devices.CloseGone), Transport: devices.TransportMQTT, From: time.Now().Add(-from), To: time.Now().Add(-to), Except: id(3)}
	}
	is := func(what string, q devices.Ends, all, from int) {
		t.Helper()
		if n, m := r.Ended(q, there); n != all || m != from {
			t.Errorf("%s: %d ends, %d from the address, want %d, %d", what, n, m, all, from)
		}
	}
	is("an empty recorder", period(time.Hour, 0), 0, 0)
	ends(0, 20_000, elsewhere) // many times what fits
	later(time.Minute)
	ends(0, 400, there)
	later(time.Minute)
	ends(390, 500, elsewhere)
	is("of now", period(30*time.Second, 0), 110, 0)
	is("of a minute ago", period(90*time.Second, 30*time.Second), 399, 399)
	is("of both", period(90*time.Second, 0), 499, 399) // a device counts once
	other := period(90*time.Second, 0)
	other.Cause = devices.StepCause(devices.CloseDead)
	is("another cause", other, 0, 0)
	other = period(90*time.Second, 0)
	other.Transport = devices.TransportWebSocket
	is("another transport", other, 0, 0)
	if all, from := r.EndedOf([]devices.ID{id(1), id(2), id(3), id(450), id(30_000)}, period(90*time.Second, 0), there); all != 3 || from != 2 {
		t.Errorf("of some devices: %d, %d from the address", all, from)
	}
	for i := range r.shards { // a period is found without reading what is older
		s := &r.shards[i]
		if pos := r.firstSince(&s.steps[ringProven], time.Now().Add(-30*time.Second)); s.steps[ringProven].next-pos > 2*chunkSlots {
			t.Errorf("reads %d of %d slots", s.steps[ringProven].next-pos, s.steps[ringProven].next-s.steps[ringProven].oldest)
		}
	}
}

// What is recorded of a forgotten device is gone; what is recorded of others stays, and the ring goes on.
func TestForget(t *testing.T) {
	r := New("n", MinMemory)
	const gone, stays = devices.ID("02:00:00:00:00:01"), devices.ID("02:00:00:00:00:02")
	note := func(n int) {
		for i := range n {
			for _, id := range []devices.ID{gone, stays} {
				r.Step(devices.Step{Kind: devices.StepRefused, Device: id, Proven: i%2 == 0, Cause: devices.CauseWrongToken, Remote: netip.MustParseAddr("192.0.2.7"), Text: "secret"})
				r.Step(devices.Step{Kind: devices.StepCheck, Device: id, Remote: netip.MustParseAddr("192.0.2.8"), Unknown: true})
				for _, outcome := range []string{"ok", "device_timeout"} {
					r.Call(devices.CallStep{Call: "call-" + string(id), Device: id, Tool: "tool", At: time.Now(), Outcome: outcome})
				}
			}
		}
	}
	count := func(id devices.ID) (steps, calls, refusals int) {
		for _, s := range r.Refusals() {
			if s.Device == id {
				refusals++
			}
		}
		steps = len(r.Steps(id, true, "", devices.LogPosition{}, 1000)) + len(r.Steps(id, false, "", devices.LogPosition{}, 1000))
		return steps, len(r.Calls(id, devices.LogPosition{}, 1000)), refusals
	}
	note(20)
	r.Forget(gone)
	r.Forget("02:00:00:00:00:03") // of which nothing is known
	// security: N36
	if steps, calls, refusals := count(gone); steps+calls+refusals > 0 || len(r.CallsOf("call-"+string(gone))) > 0 {
		t.Errorf("of the forgotten device: %d steps, %d calls, %d refusals", steps, calls, refusals)
	}
	if steps, calls, refusals := count(stays); steps != 20 || calls != 40 || refusals != 20 {
		t.Errorf("of the other one: %d steps, %d calls, %d refusals", steps, calls, refusals)
	}
	s, _ := r.shard(gone)
	for _, ring := range []*ring{&s.steps[ringProven], &s.steps[ringOther], &s.failed, &s.good} {
		for _, chunk := range ring.chunks {
			// security: N36
			if bytes.Contains(chunk, []byte(gone)) {
				t.Error("its id is still in memory")
			}
		}
	}
	note(5)
	if steps, calls, refusals := count(gone); steps != 5 || calls != 10 || refusals != 5 {
		t.Errorf("when it is back: %d steps, %d calls, %d refusals", steps, calls, refusals)
	}
	if all, _ := r.Ended(devices.Ends{Cause: devices.StepCause(devices.CloseGone), From: time.Now().Add(-time.Hour), To: time.Now()}, netip.Addr{}); all != 0 {
		t.Errorf("%d ends", all)
	}
}
