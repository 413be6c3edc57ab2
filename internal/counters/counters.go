// Package counters counts without a metrics library: counting costs nanoseconds, and a collector may read at
// any time.
package counters

import (
	"sync"
	"sync/atomic"
	"time"
)

// Map is a set of counters by key, created when first used. The zero value is ready to use; it is safe for
// concurrent use.
type Map[K comparable] struct {
	m sync.Map // K to *atomic.Int64
	n atomic.Int32
}

// Add adds n to the counter of key.
func (c *Map[K]) Add(key K, n int64) {
	v, ok := c.m.Load(key)
	if !ok {
		var loaded bool
		if v, loaded = c.m.LoadOrStore(key, new(atomic.Int64)); !loaded {
			c.n.Add(1)
		}
	}
	v.(*atomic.Int64).Add(n)
}

// Len returns the number of counters.
func (c *Map[K]) Len() int { return int(c.n.Load()) }

// Each calls f with every counter's value.
func (c *Map[K]) Each(f func(key K, value int64)) {
	c.m.Range(func(k, v any) bool {
		f(k.(K), v.(*atomic.Int64).Load())
		return true
	})
}

// Get returns the value of one counter.
func (c *Map[K]) Get(key K) int64 {
	if v, ok := c.m.Load(key); ok {
		return v.(*atomic.Int64).Load()
	}
	return 0
}

// Bounds are the upper bounds of a Histogram's buckets.
var Bounds = [...]time.Duration{time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond, 10 * time.Millisecond,
	25 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond,
	time.Second, 2500 * time.Millisecond, 5 * time.Second, 10 * time.Second, 30 * time.Second, 75 * time.Second}

// Histogram counts durations in fixed buckets. The zero value is ready to use; it is safe for concurrent use.
type Histogram struct {
	buckets [len(Bounds) + 1]atomic.Uint64
	sum     atomic.Int64
}

// Observe counts one duration.
func (h *Histogram) Observe(d time.Duration) {
	i := 0
	for i < len(Bounds) && d > Bounds[i] {
		i++
	}
	h.buckets[i].Add(1)
	h.sum.Add(int64(d))
}

// Snapshot returns the number of observations, their sum in seconds, and the
// cumulative count per upper bound in seconds.
func (h *Histogram) Snapshot() (count uint64, sum float64, cumulative map[float64]uint64) {
	cumulative = make(map[float64]uint64, len(Bounds))
	for i, bound := range Bounds {
		count += h.buckets[i].Load()
		cumulative[bound.Seconds()] = count
	}
	count += h.buckets[len(Bounds)].Load()
	return count, time.Duration(h.sum.Load()).Seconds(), cumulative
}
