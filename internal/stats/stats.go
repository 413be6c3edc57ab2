// Package stats keeps the figures of a node over time: every 10 s for a day, every 5 min for a week, in fixed
// memory whatever the number of devices. An answer adds up those of all nodes. A restart empties them;
// Prometheus is for more.
package stats

import (
	"context"
	"fmt"
	"sync"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/counters"
)

// Limits of the samples.
const (
	// Interval is that between two samples, and the smallest step.
	Interval = 10 * time.Second
	// FineSpan is how far back samples of Interval are kept.
	FineSpan = 24 * time.Hour
	// Coarse is the step of older samples, which are kept for Span.
	Coarse = 5 * time.Minute
	Span   = 7 * 24 * time.Hour

	// fresh is how old the last sample may be when a query comes.
	fresh = time.Second
)

// Recorder samples the metrics of a node. It is safe for concurrent use.
type Recorder struct {
	node    string
	started time.Time

	counts, gauges, times []probe

	mu           sync.Mutex // protects all below
	last         time.Time  // of a sample
	lastCounts   [numSummed]uint64
	fine, coarse ring
}

// New returns a Recorder of a node that started then. The registry must have all its metrics.
func New(node string, started time.Time, registry *counters.Registry) *Recorder {
	process := processMetrics()
	r := &Recorder{node: node, started: started, counts: probesOf(counted, registry, process), gauges: probesOf(gauged, registry, process), times: probesOf(timed, registry),
		fine: newRing(Interval, FineSpan), coarse: newRing(Coarse, Span)}
	if counts, gauges := widthOf(counted), widthOf(gauged); counts != numCounts || gauges != numGauges || len(timed) != numHistograms {
		panic(fmt.Sprintf("stats: a sample has %d counts and %d gauges, not %d and %d", numCounts, numGauges, counts, gauges)) // a bug, found by any test that starts a node
	}
	r.sample(time.Now())
	return r
}

func widthOf(sources []source) (n int) {
	for _, s := range sources {
		n += s.width()
	}
	return n
}

// Run takes a sample every Interval until ctx ends.
func (r *Recorder) Run(ctx context.Context) {
	for now := range clock.Ticks(ctx, Interval) {
		r.sample(now)
	}
}

// sample adds what happened since the last sample to the slot in which the middle of that time is.
func (r *Recorder) sample(now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var s sum
	counts := r.lastCounts
	read(r.counts, r.lastCounts[:numCounts])
	read(r.gauges, s.gauges[:])
	readTimes(r.times, r.lastCounts[numCounts:])
	elapsed := now.Sub(r.last)
	if r.last.IsZero() {
		r.last = now
		return
	}
	if elapsed < time.Millisecond {
		r.lastCounts = counts
		return
	}
	r.last = now
	s.covered = uint64(elapsed.Milliseconds())
	for i := range s.counts {
		s.counts[i] = r.lastCounts[i] - min(counts[i], r.lastCounts[i])
	}
	for i := range s.gauges {
		s.gauges[i] *= s.covered
	}
	middle := now.Add(-elapsed / 2).Unix()
	r.fine.add(middle/r.fine.seconds, &s)
	r.coarse.add(middle/r.coarse.seconds, &s)
}

// Part is what one node has of a range.
type Part struct {
	Node    string    `json:"node"`
	Started time.Time `json:"started"`
	// Covered is how much of each step the node has samples of, in milliseconds.
	Covered []uint64 `json:"covered"`
	// Series are counts, gauges multiplied with milliseconds, and buckets of histograms, by name. Those that are
	// always zero are left out.
	Series map[string][]uint64 `json:"series"`
}

// Part returns what this node has of a range, up to now.
func (r *Recorder) Part(q Range) Part {
	now := time.Now()
	r.mu.Lock()
	stale := now.Sub(r.last) >= fresh
	r.mu.Unlock()
	if stale {
		r.sample(now)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	tier := &r.fine
	if q.isCoarse(now) {
		tier = &r.coarse
	}
	p := Part{Node: r.node, Started: r.started, Covered: make([]uint64, q.Steps), Series: map[string][]uint64{}}
	set := func(key string, step int, n uint64) {
		if n == 0 {
			return
		}
		if p.Series[key] == nil {
			p.Series[key] = make([]uint64, q.Steps)
		}
		p.Series[key][step] = n
	}
	for step := range q.Steps {
		var total sum
		from := q.From + int64(step)*q.Step
		for slot := from / tier.seconds; slot < (from+q.Step)/tier.seconds; slot++ {
			if s := tier.at(slot); s != nil {
				total.addSample(s)
			}
		}
		p.Covered[step] = total.covered
		each(counted, func(i int, key string) { set(key, step, total.counts[i]) })
		each(gauged, func(i int, key string) { set(key, step, total.gauges[i]) })
		for i, s := range timed {
			for b := range numBuckets {
				set(bucketKey(s.name, b), step, total.counts[numCounts+i*numBuckets+b])
			}
		}
	}
	return p
}

// each calls f for every series of the sources, in order.
func each(sources []source, f func(i int, key string)) {
	at := 0
	for _, s := range sources {
		for i := range s.width() {
			f(at+i, s.key(i))
		}
		at += s.width()
	}
}

func bucketKey(name string, bucket int) string { return fmt.Sprintf("%s_seconds/%d", name, bucket) }
