package stats

import (
	"context"
	"math"
	"slices"
	"testing"
	"time"
	"unsafe"

	"fleetd/internal/counters"
)

// fake are metrics of a node that a test sets.
type fake struct {
	registry counters.Registry
	closes   counters.Map[string]
	calls    counters.Map[string]
	online   counters.Map[string]
	call     counters.Histogram
}

func newFake() *fake {
	f := &fake{}
	counters.ByKey(f.registry.Counter("device_disconnects_total", "", "reason"), &f.closes)
	counters.ByKey(f.registry.Counter("calls_total", "", "outcome"), &f.calls)
	gauge := f.registry.Gauge("devices", "", "transport", "mcp_state")
	gauge.Read(func(emit counters.Emit) {
		f.online.Each(func(transport string, n int64) { emit(float64(n), transport, "ready"); emit(1, transport, "listing") })
	})
	f.registry.Histogram("call_seconds", "", &f.call)
	return f
}

// past is a time after which a test has samples, at a multiple of an hour.
var past = time.Now().Add(-6 * time.Hour).Truncate(time.Hour)

// begin sets the time of the sample before the first one of the test.
func (r *Recorder) begin(at time.Time) {
	r.fine, r.coarse = newRing(Interval, FineSpan), newRing(Coarse, Span)
	r.last = at
}

func value(t *testing.T, series []Series, name, value string) []float64 {
	t.Helper()
	i := slices.IndexFunc(series, func(s Series) bool { return s.Name == name && s.Value == value })
	if i < 0 {
		t.Fatalf("there is no series %s %s", name, value)
	}
	return series[i].Points
}

func near(got, want []float64) bool {
	return slices.EqualFunc(got, want, func(a, b float64) bool {
		return math.IsNaN(a) && math.IsNaN(b) || math.Abs(a-b) <= 1e-5*math.Abs(b)
	})
}

var nan = math.NaN()

func TestRatesGaugesAndGaps(t *testing.T) {
	f := newFake()
	r := New("a", past, &f.registry)
	r.begin(past)
	f.online.Add("mqtt", 4)
	f.closes.Add("gone", 30)
	f.closes.Add("a reason of a newer version", 10)
	f.calls.Add("ok", 20)
	f.calls.Add("device_offline", 5)
	f.calls.Add("device_timeout", 10)
	r.sample(past.Add(10 * time.Second))
	f.online.Add("mqtt", 4)
	r.sample(past.Add(20 * time.Second))
	// The process did not run for 40 s.
	f.closes.Add("gone", 40)
	r.sample(past.Add(60 * time.Second))
	r.last = time.Now() // no sample at the query
	q, err := NewRange(past, past.Add(80*time.Second), time.Now(), 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	got := Merge(q, []Part{r.Part(q)})
	for _, tc := range []struct {
		name, value string
		want        []float64
	}{
		{"online", "mqtt", []float64{5, 9, nan, nan, 9, nan, nan, nan}}, // four and eight ready, one listing
		{"online", "websocket", []float64{0, 0, nan, nan, 0, nan, nan, nan}},
		{"closes", "gone", []float64{3, 0, nan, nan, 1, nan, nan, nan}},
		{"closes", "other", []float64{1, 0, nan, nan, 0, nan, nan, nan}},
		{"calls", "ok", []float64{2, 0, nan, nan, 0, nan, nan, nan}},
		{"calls", "refused", []float64{0.5, 0, nan, nan, 0, nan, nan, nan}},
		{"calls", "timeout", []float64{1, 0, nan, nan, 0, nan, nan, nan}},
	} {
		if p := value(t, got, tc.name, tc.value); !near(p, tc.want) {
			t.Errorf("%s %s: %v, want %v", tc.name, tc.value, p, tc.want)
		}
	}
	// A step that has samples for some of its time has the rate of that time.
	if q, err = NewRange(past, past.Add(time.Minute), time.Now(), time.Minute); err != nil {
		t.Fatal(err)
	}
	got = Merge(q, []Part{r.Part(q)})
	if p := value(t, got, "closes", "gone"); !near(p, []float64{70.0 / 60}) {
		t.Errorf("closes in the minute: %v", p)
	}
	if p := value(t, got, "online", "mqtt"); !near(p, []float64{(5*10 + 9*50) / 60.0}) {
		t.Errorf("online in the minute: %v", p)
	}
}

// Percentiles of two nodes are those of all durations, not the mean of two percentiles.
func TestMergeOfTwoNodes(t *testing.T) {
	busy, quiet := newFake(), newFake()
	a, b := New("a", past, &busy.registry), New("b", past.Add(30*time.Second), &quiet.registry)
	a.begin(past)
	b.begin(past)
	for range 990 {
		busy.call.Observe(2 * time.Millisecond)
	}
	for range 10 {
		quiet.call.Observe(20 * time.Second)
	}
	busy.calls.Add("ok", 990)
	quiet.calls.Add("ok", 10)
	for _, r := range []*Recorder{a, b} {
		r.sample(past.Add(10 * time.Second))
		r.last = time.Now()
	}
	fleet := &Fleet{Recorder: a, Nodes: func() []string { return []string{"a", "b", "c", "d"} },
		Gather: func(ctx context.Context, kind string, question []byte, nodes []string) (map[string][]byte, []string) {
			content, err := b.Answer(ctx, question)
			if err != nil || kind != Question || !slices.Equal(nodes, []string{"a", "b", "c", "d"}) {
				t.Errorf("%v, %s, %v", err, kind, nodes)
			}
			return map[string][]byte{"b": content, "d": []byte("of a version that compresses otherwise")}, []string{"c"}
		}}
	q, err := NewRange(past, past.Add(time.Minute), time.Now(), time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	got, known, err := fleet.Query(t.Context(), q, "")
	if err != nil || !known || !slices.Equal(got.Nodes, []string{"a", "b"}) || !slices.Equal(got.Missing, []string{"c", "d"}) ||
		len(got.Starts) != 2 || got.Starts[1].Node != "b" || !got.Starts[1].At.Equal(past.Add(30*time.Second)) {
		t.Fatalf("%+v %v %v", got, known, err)
	}
	if p := value(t, got.Series, "calls", "ok"); !near(p, []float64{100}) {
		t.Errorf("calls: %v", p)
	}
	if p := value(t, got.Series, "call_p50", ""); p[0] < 0.001 || p[0] > 0.0025 {
		t.Errorf("p50 %v", p)
	}
	if p := value(t, got.Series, "call_p99", ""); p[0] != 0.0025 {
		t.Errorf("p99 of 990 calls in 2 ms and 10 in 20 s: %v", p)
	}
	if p := value(t, got.Series, "hello_p99", ""); !near(p, []float64{nan}) {
		t.Errorf("nothing to measure: %v", p)
	}
	if _, known, _ = fleet.Query(t.Context(), q, "e"); known {
		t.Error("there is no node e")
	}
}

// Samples of the last day are kept one by one, older ones in steps of five minutes, in fixed memory.
func TestDayAndWeek(t *testing.T) {
	f := newFake()
	now := time.Now().Truncate(time.Hour)
	r := New("a", now, &f.registry)
	began := now.Add(-8 * 24 * time.Hour)
	r.begin(began)
	for at := began.Add(Interval); !at.After(now); at = at.Add(Interval) {
		f.closes.Add("gone", 5)
		r.sample(at)
	}
	r.last = time.Now()
	ask := func(since, until time.Time, step time.Duration) []float64 {
		t.Helper()
		q, err := NewRange(since, until, time.Now(), step)
		if err != nil {
			t.Fatal(err)
		}
		return value(t, Merge(q, []Part{r.Part(q)}), "closes", "gone")
	}
	half := func(p float64) bool { return math.Abs(p-0.5) < 1e-6 }
	day := ask(now.Add(-4*time.Hour), now, Interval)
	if len(day) != 1440 || slices.ContainsFunc(day, func(p float64) bool { return !half(p) }) {
		t.Errorf("%d points of 4 h: %v", len(day), day[:5])
	}
	week := ask(now.Add(-6*24*time.Hour), now, Coarse*2)
	if len(week) != 6*144 || slices.ContainsFunc(week, func(p float64) bool { return !half(p) }) {
		t.Errorf("%d points of 6 days: %v", len(week), week[:5])
	}
	bytes := 0
	for _, tier := range []*ring{&r.fine, &r.coarse} {
		for _, chunk := range tier.chunks {
			if chunk != nil {
				bytes += int(unsafe.Sizeof(*chunk))
			}
		}
	}
	if bytes > 4<<20 {
		t.Errorf("%d bytes of samples", bytes)
	}
	t.Logf("%d bytes of samples in 8 days", bytes)
	if q, err := NewRange(now.Add(-8*24*time.Hour), now, time.Now(), Coarse*2); err != nil || q.Since().Before(time.Now().Add(-Span-Coarse*2)) {
		t.Errorf("eight days: %+v, %v", q, err)
	}
}

// A query does not wait for the next interval.
func TestQueryIsFresh(t *testing.T) {
	f := newFake()
	r := New("a", time.Now(), &f.registry)
	r.last = time.Now().Add(-2 * time.Second)
	f.closes.Add("gone", 4)
	q, err := NewRange(time.Now().Add(-time.Minute), time.Now(), time.Now(), time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	rates := value(t, Merge(q, []Part{r.Part(q)}), "closes", "gone")
	if sum := rates[len(rates)-1]; math.IsNaN(sum) || sum < 1.5 || sum > 2.1 {
		t.Errorf("4 in 2 s: %v", rates)
	}
	q.Steps = MaxPoints + 1
	if _, err := r.Answer(t.Context(), []byte(`{"from":0,"step":10,"steps":1501}`)); err == nil {
		t.Error("another node requests more points than there are")
	}
}

func TestRanges(t *testing.T) {
	now := time.Date(2026, 11, 24, 12, 0, 7, 0, time.UTC)
	for _, tc := range []struct {
		since, until time.Duration // before now
		step         time.Duration
		want         Range
		err          error
	}{
		{time.Hour, 0, 0, Range{now.Truncate(30 * time.Second).Add(-time.Hour).Unix(), 30, 121}, nil},
		{time.Hour, -time.Hour, 10 * time.Second, Range{now.Truncate(10 * time.Second).Add(-time.Hour).Unix(), 10, 361}, nil},
		// Until is in the step that began 10 ms before; at its begin, that step is not in the range.
		{17 * time.Second, 6990 * time.Millisecond, 10 * time.Second, Range{now.Add(-17 * time.Second).Unix(), 10, 2}, nil},
		{17 * time.Second, 7 * time.Second, 10 * time.Second, Range{now.Add(-17 * time.Second).Unix(), 10, 1}, nil},
		{24 * time.Hour, 0, 0, Range{now.Truncate(5 * time.Minute).Add(-24 * time.Hour).Unix(), 300, 289}, nil},
		{7 * 24 * time.Hour, 0, 0, Range{now.Truncate(time.Hour).Add(-7 * 24 * time.Hour).Unix(), 3600, 169}, nil},
		{30 * 24 * time.Hour, 0, 0, Range{now.Truncate(time.Hour).Add(-7 * 24 * time.Hour).Unix(), 3600, 169}, nil},
		{25 * time.Hour, 0, time.Minute, Range{}, errStep},
		{time.Hour, 0, 15 * time.Second, Range{}, errStep},
		{24 * time.Hour, 0, 10 * time.Second, Range{}, errPoints},
		{0, 0, 0, Range{}, errOrder},
		{time.Hour, 2 * time.Hour, 0, Range{}, errOrder},
		{30 * 24 * time.Hour, 20 * 24 * time.Hour, 0, Range{}, errOld},
	} {
		got, err := NewRange(now.Add(-tc.since), now.Add(-tc.until), now, tc.step)
		if got != tc.want || err != tc.err {
			t.Errorf("%v to %v by %v: %+v %v, want %+v %v", tc.since, tc.until, tc.step, got, err, tc.want, tc.err)
		}
	}
}

func TestQuantile(t *testing.T) {
	var buckets [numBuckets]uint64
	if got := quantile(buckets, 0.5); !math.IsNaN(got) {
		t.Error(got)
	}
	buckets[3] = 100 // 5 to 10 ms
	if got := quantile(buckets, 0.5); math.Abs(got-0.0075) > 1e-9 {
		t.Error(got)
	}
	buckets[numBuckets-1] = 900
	if got := quantile(buckets, 0.99); got != 75 {
		t.Error(got)
	}
}

func BenchmarkSample(b *testing.B) {
	f := newFake()
	r := New("a", past, &f.registry)
	r.begin(past)
	at := past
	for b.Loop() {
		at = at.Add(Interval)
		r.sample(at)
	}
}
