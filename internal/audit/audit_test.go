package audit

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"fleetd/internal/api"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// memory is a store that can be away.
type memory struct {
	mu     sync.Mutex
	away   bool
	blocks []Block
}

func (m *memory) SaveAuditBlock(ctx context.Context, b *Block) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.away || ctx.Err() != nil {
		return errors.New("away")
	}
	if !slices.ContainsFunc(m.blocks, func(o Block) bool { return o.Run == b.Run && o.FirstSeq == b.FirstSeq }) {
		m.blocks = append(m.blocks, *b)
	}
	return nil
}

func (m *memory) set(away bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.away = away
}

func (m *memory) verify() (api.AuditReport, []Line) { return m.verifyWith(Verifier{}) }

func (m *memory) verifyWith(v Verifier) (api.AuditReport, []Line) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var lines []Line
	for i := range m.blocks {
		v.Add(&m.blocks[i])
		for text := range bytes.Lines(m.blocks[i].Entries) {
			var line Line
			if err := json.Unmarshal(text, &line); err != nil {
				panic(err)
			}
			lines = append(lines, line)
		}
	}
	return v.Report(), lines
}

func open(m Store) *Log {
	return New(Options{Node: "n-1", Version: "1", Store: m, Log: slog.New(slog.DiscardHandler)})
}

func call(n int) Entry {
	return Entry{At: time.Now(), Kind: KindCall, Action: fmt.Sprint("tool-", n), Device: "aa:bb:cc:dd:ee:ff", Key: "abcdefgh", Name: "desk", Via: "rest",
		From: "192.0.2.1:1", Outcome: "ok", Digest: Hash{1}, Duration: time.Millisecond}
}

func TestEverythingIsWritten(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := &memory{}
		l := open(m)
		const callers, each = 8, 1500
		var done sync.WaitGroup
		for range callers {
			done.Go(func() {
				for i := range each {
					l.Record(call(i))
				}
			})
		}
		done.Wait()
		time.Sleep(2 * flushEvery)
		if n := l.Waiting(); n != 0 {
			t.Errorf("%d bytes wait", n)
		}
		l.Record(call(1)) // moments before the end
		if err := l.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		r, lines := m.verify()
		// security: R5
		if !r.Intact || r.Entries != callers*each+3 || len(r.Unended) != 0 || r.Runs != 1 {
			t.Errorf("%+v", r)
		}
		if first, last := lines[0], lines[len(lines)-1]; first.Kind != KindRun || first.Action != "start" || last.Kind != KindRun || last.Action != "stop" {
			t.Errorf("from %+v to %+v", first, last)
		}
		// security: R5
		if l.Record(call(1)); l.Dropped.Load() != 1 {
			t.Error("an entry after the end is not counted")
		}
	})
}

func TestRecordWhileTheDatabaseIsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &memory{away: true}
		l := open(m)
		const limit = 1 << 20
		l.limit = limit
		big := call(0)
		big.Detail = strings.Repeat("x", maxText)
		n := 0
		for ; l.Dropped.Load() < 5; n++ {
			l.Record(big)
		}
		if waiting := l.Waiting(); waiting < limit || waiting > limit+4096 {
			t.Errorf("%d bytes wait", waiting)
		}
		time.Sleep(time.Minute)
		m.set(false)
		time.Sleep(2 * lastRetry)
		l.Record(call(1))
		if err := l.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		r, lines := m.verify()
		// security: R5
		if !r.Intact || r.Dropped != 5 || r.Entries != int64(n-5)+4 { // start, gap, the last call, stop
			t.Errorf("%+v", r)
		}
		gap := lines[len(lines)-3]
		// security: R5
		if gap.Action != "gap" || gap.Count != 5 || gap.Seq != lines[len(lines)-4].Seq+6 {
			t.Errorf("%+v", gap)
		}
	})
}

// What the database does not take at the end is handed over, chained.
func TestSpill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &memory{}
		var spilled []Block
		l := New(Options{Node: "n-1", Store: m, Log: slog.New(slog.DiscardHandler), Spill: func(b []Block) error {
			spilled = slices.Clone(b)
			return nil
		}})
		l.Record(call(1))
		time.Sleep(2 * flushEvery)
		m.set(true)
		for i := range 3 * maxGroup {
			l.Record(call(i))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := l.Close(ctx); err != nil {
			t.Fatal(err)
		}
		m.blocks = append(m.blocks, spilled...)
		// security: R5
		if r, _ := m.verify(); !r.Intact || r.Entries != 3*maxGroup+3 || len(r.Unended) != 0 || len(spilled) != 4 {
			t.Errorf("%+v, %d blocks", r, len(spilled))
		}
	})
}

func TestVerifyFindsFaults(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := &memory{}
		l := open(m)
		for i := range 5 * maxGroup {
			l.Record(call(i))
		}
		if err := l.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		whole := m.blocks
		for name, tc := range map[string]struct {
			change func([]Block) []Block
			faults int
		}{
			"nothing":   {func(b []Block) []Block { return b }, 0},
			"beginning": {func(b []Block) []Block { return b[2:] }, 0}, // deleted for its age
			"missing":   {func(b []Block) []Block { return slices.Delete(b, 2, 3) }, 1},
			"changed": {func(b []Block) []Block {
				b[1].Entries = bytes.Replace(b[1].Entries, []byte("tool-1001"), []byte("tool-1002"), 1)
				return b
			}, 1},
			"changed and summed": {func(b []Block) []Block {
				b[1].Entries = bytes.Replace(b[1].Entries, []byte("tool-1001"), []byte("tool-1002"), 1)
				b[1].Hash = b[1].Sum(nil)
				return b
			}, 1},
			"line cut out": {func(b []Block) []Block {
				lines := bytes.SplitAfter(b[1].Entries, []byte("\n"))
				b[1].Entries = bytes.Join(slices.Delete(lines, 3, 4), nil)
				b[1].Hash = b[1].Sum(nil)
				return b[:2]
			}, 1},
			"other node": {func(b []Block) []Block { b[0].Node = "n-2"; return b }, 1},
			"other time": {func(b []Block) []Block { b[0].LastAt = b[0].LastAt.Add(time.Second); return b }, 1},
			"not the first": {func(b []Block) []Block {
				b[0].Previous = Hash{1}
				b[0].Hash = b[0].Sum(nil)
				return b[:1]
			}, 1},
			"last lines cut off": {func(b []Block) []Block {
				lines := bytes.SplitAfter(b[0].Entries, []byte("\n"))
				b[0].Entries = bytes.Join(lines[:len(lines)-3], nil)
				b[0].Hash = b[0].Sum(nil)
				return b[:1]
			}, 1},
			"goes on after its end": {func(b []Block) []Block {
				last := b[len(b)-1]
				more := Block{Run: last.Run, Node: last.Node, FirstSeq: last.LastSeq + 1, LastSeq: last.LastSeq + 1, FirstAt: last.LastAt, LastAt: last.LastAt, Previous: last.Hash}
				e := call(1)
				more.Entries = appendLine(nil, more.FirstSeq, &e)
				more.Hash = more.Sum(nil)
				return append(b, more)
			}, 1},
		} {
			var v Verifier
			for _, b := range tc.change(slices.Clone(whole)) {
				v.Add(&b)
			}
			// security: R4
			if r := v.Report(); len(r.Faults) != tc.faults || r.Intact != (tc.faults == 0) {
				t.Errorf("%s: %q", name, r.Faults)
			}
		}

		unended := Block{Run: "z", Node: "n-1", FirstSeq: 1, LastSeq: 1} // of a node that was killed
		e := call(1)
		unended.Entries = appendLine(nil, 1, &e)
		unended.Hash = unended.Sum(nil)
		var two Verifier
		for _, b := range append(slices.Clone(whole), unended) {
			two.Add(&b)
		}
		// security: R4
		if r := two.Report(); !r.Intact || r.Runs != 2 || len(r.Unended) != 1 || !strings.HasPrefix(r.Unended[0], "run z ") {
			t.Errorf("a run without an end after one with: %+v", r)
		}

		var export []byte
		for i := range whole {
			export = AppendExport(export, &whole[i])
		}
		var v Verifier
		if err := ReadExport(bytes.NewReader(export), func(b *Block) error { v.Add(b); return nil }); err != nil {
			t.Fatal(err)
		}
		if r := v.Report(); !r.Intact || r.Blocks != len(whole) || r.Entries != 5*maxGroup+2 {
			t.Errorf("an export: %+v", r)
		}
		for _, text := range []string{string(export[:len(export)-7]), string(export[:1000]), "{}\n", "x", string(export[200:])} {
			if err := ReadExport(strings.NewReader(text), func(*Block) error { return nil }); err == nil || errors.Is(err, io.EOF) && err.Error() == "EOF" {
				t.Errorf("%.20q: %v", text, err)
			}
		}
	})
}

func TestAnonymousRefusalsAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &memory{}
		l := open(m)
		for i := range 1000 {
			l.Record(Entry{At: time.Now(), Kind: KindRefusal, Action: "GET /v1/devices", Via: "rest", From: fmt.Sprintf("192.0.2.1:%d", i), Outcome: "unauthorized"})
		}
		for i := range 5000 { // each from elsewhere
			l.Record(Entry{At: time.Now(), Kind: KindRefusal, Via: "rest", From: fmt.Sprintf("[2001:db8:%x::1]:1", i), Outcome: "unauthorized"})
		}
		l.Record(call(1))
		time.Sleep(2 * anonymousWindow)
		if err := l.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		_, lines := m.verify()
		var total, one int64
		for _, line := range lines {
			if line.Kind != KindRefusal {
				continue
			}
			n := max(line.Count, 1)
			total += n
			if strings.HasPrefix(line.From, "192.0.2.1") {
				one += n
			}
		}
		// security: R6
		if total != 6000 || one != 1000 || len(lines) > anonymousAddresses+2*anonymousEntries+5 {
			t.Errorf("%d refusals, %d of one address, in %d lines", total, one, len(lines))
		}
	})
}

// A stop records what was only counted, and how many entries were dropped.
func TestStopCountsTheRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &memory{}
		l := open(m)
		for range 20 {
			l.Record(Entry{At: time.Now(), Kind: KindRefusal, Via: "rest", From: "192.0.2.1:1", Outcome: "unauthorized"})
		}
		if err := l.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		full := open(m)
		full.mu.Lock()
		full.limit = full.waiting
		full.mu.Unlock()
		full.Record(call(1))
		if err := full.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		slices.SortStableFunc(m.blocks, func(a, b Block) int { return strings.Compare(a.Run, b.Run) })
		r, lines := m.verify()
		counted := int64(0)
		for _, line := range lines {
			if line.Kind == KindRefusal {
				counted += max(line.Count, 1)
			}
		}
		// security: R5 R6
		if !r.Intact || counted != 20 || r.Dropped != 1 {
			t.Errorf("%d of 20 refusals, %+v", counted, r)
		}
	})
}

func TestRedact(t *testing.T) {
	for given, want := range map[string]string{
		`{"volume": 5}`: `{"volume":5}`,
		`{"Password":"x","a":[{"apiKey":{"deep":1},"b":"key"},{"wifi_SECRET":1}],"access-token":null}`: `{"Password":"[redacted]","a":[{"apiKey":"[redacted]","b":"key"},{"wifi_SECRET":"[redacted]"}],"access-token":"[redacted]"}`,
		`{"p\u0061ssword":"x"}`: `{"password":"[redacted]"}`,
		`[1, "two"]`:            `[1,"two"]`,
		`{"a":`:                 `null`,
		"{\"a\":\"\n\"}":        `null`,
	} {
		// security: R7
		if got := string(Redact(nil, json.RawMessage(given))); got != want {
			t.Errorf("%s: %s, want %s", given, got, want)
		}
	}
	e := call(1)
	e.Arguments = json.RawMessage(`{"ssid":"home","password":"hunter2"}`)
	// security: R7
	if line := string(appendLine(nil, 1, &e)); strings.Contains(line, "hunter2") || !strings.Contains(line, `"arguments":{"ssid":"home","password":"[redacted]"}`) {
		t.Error(line)
	}
	e.Arguments = json.RawMessage(`{"text":"` + strings.Repeat("x", maxArguments) + `"}`)
	if line := string(appendLine(nil, 1, &e)); len(line) > 1000 || !strings.Contains(line, `"arguments_cut":true`) {
		t.Error(line)
	}
}

// A line is read back as the entry that was given, whatever text is in it.
func TestTimeOfALine(t *testing.T) {
	for _, at := range []time.Time{{}, time.Unix(0, 0), time.Unix(1795324186, 1), time.Unix(1795324186, 999), time.Unix(1795324186, 999_999_999), time.Unix(-5, 123_456_789),
		time.Date(2026, 11, 22, 1, 2, 3, 40_500_600, time.FixedZone("", 3600))} {
		if got, want := string(appendTime([]byte("x"), at)), at.UTC().Format(`x"2006-01-02T15:04:05.000000Z"`); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

func TestLineRoundTrip(t *testing.T) {
	e := Entry{At: time.Date(2026, 3, 1, 2, 3, 4, 5000, time.UTC), Kind: KindCall, Action: "a\nb\x00<é\xff", Device: "d", Key: "k", Name: `"n"`, Via: "v", From: "f",
		Digest: Hash{1, 2}, Arguments: json.RawMessage(`{"a":1}`), Outcome: "o", Rule: "r", Detail: "d", Held: "h", Duration: 5, Count: 6}
	text := appendLine(nil, 7, &e)
	if bytes.Count(text, []byte("\n")) != 1 {
		t.Errorf("%q", text)
	}
	var line Line
	if err := json.Unmarshal(text, &line); err != nil {
		t.Fatal(err)
	}
	e.Action = "a\nb\x00<é\uFFFD"
	if line.Seq != 7 || fmt.Sprintf("%+v", line.Entry) != fmt.Sprintf("%+v", e) {
		t.Errorf("%+v, want %+v", line.Entry, e)
	}
}

func TestRecordAllocates(t *testing.T) {
	m := &memory{}
	l := open(m)
	defer l.Close(t.Context())
	e := call(1)
	if n := testing.AllocsPerRun(5000, func() { l.Record(e) }); n > 0 {
		t.Errorf("Record makes %v allocations", n)
	}
}

func BenchmarkRecord(b *testing.B) {
	l := open(&discard{})
	defer l.Close(b.Context())
	e := call(1)
	b.ReportAllocs()
	for b.Loop() {
		l.Record(e)
	}
}

type discard struct{}

func (discard) SaveAuditBlock(context.Context, *Block) error { return nil }
