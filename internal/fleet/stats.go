package fleet

import (
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/mcpclient"
)

// Stats counts what the core does. A collector reads it at any time; it is
// plain atomics so that the core depends on no metrics library and a call pays
// nanoseconds.
type Stats struct {
	BadMessages atomic.Uint64 // envelopes refused
	AudioFrames atomic.Uint64 // received from devices
	AudioSent   atomic.Uint64 // sent to devices
	// MessageDrops counts messages of a conversation that found no connection.
	MessageDrops    atomic.Uint64
	SilentChannels  atomic.Uint64 // opened, and nothing came
	Conversations   atomic.Int64  // open now
	Notified        atomic.Uint64 // notifications and messages published
	NotifyDrops     atomic.Uint64 // over the per-device rate
	CatalogHits     atomic.Uint64 // lists known by their hash
	CatalogNew      atomic.Uint64 // lists parsed and stored
	CatalogsRefused atomic.Uint64 // lists that found no room in memory
	CatalogsEvicted atomic.Uint64 // lists dropped from memory to make room
	Unrecorded      atomic.Uint64 // changes of lists over their device's share of the database
	Handshakes      atomic.Int64  // in progress
	Waiting         atomic.Int64  // calls waiting for a device's slot
	InFlight        atomic.Int64  // calls on a device
	SharedCalls     atomic.Uint64 // calls of readers answered with another's answer

	Closed     CounterMap[devices.CloseReason]
	Calls      CounterMap[string] // by outcome: ok, tool_error or an error code
	Connects   CounterMap[devices.Transport]
	States     CounterMap[SessionState] // sessions now in this state (a gauge)
	Deviations CounterMap[DeviationKey]
	AudioDrops CounterMap[AudioDrop]
	Contested  CounterMap[devices.Dispute] // refusals because an id is contested

	HelloTime     Histogram
	HandshakeTime Histogram
	CallTime      Histogram
}

// SessionState is a session's transport and how far its tools are read.
type SessionState struct {
	Transport devices.Transport
	MCP       devices.MCPState
}

// DeviationKey names a deviation and the firmware version that shows it.
type DeviationKey struct {
	Kind     mcpclient.Deviation
	Firmware string
}

// MaxDeviationKeys bounds the label values that devices can cause; further
// firmware versions count as "other".
const MaxDeviationKeys = 256

// CounterMap is a set of counters by name, made when first used. The zero
// value is ready; it is safe for concurrent use.
type CounterMap[K comparable] struct {
	m sync.Map // K to *atomic.Int64
	n atomic.Int32
}

// Add adds n to the counter of key.
func (c *CounterMap[K]) Add(key K, n int64) {
	v, ok := c.m.Load(key)
	if !ok {
		var loaded bool
		if v, loaded = c.m.LoadOrStore(key, new(atomic.Int64)); !loaded {
			c.n.Add(1)
		}
	}
	v.(*atomic.Int64).Add(n)
}

// Len is the number of counters.
func (c *CounterMap[K]) Len() int { return int(c.n.Load()) }

// Each calls f with every counter's value.
func (c *CounterMap[K]) Each(f func(key K, value int64)) {
	c.m.Range(func(k, v any) bool {
		f(k.(K), v.(*atomic.Int64).Load())
		return true
	})
}

// Get is the value of one counter.
func (c *CounterMap[K]) Get(key K) int64 {
	if v, ok := c.m.Load(key); ok {
		return v.(*atomic.Int64).Load()
	}
	return 0
}

// Bounds are the upper bounds of a Histogram's buckets.
var Bounds = [...]time.Duration{time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond, 10 * time.Millisecond,
	25 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond,
	time.Second, 2500 * time.Millisecond, 5 * time.Second, 10 * time.Second, 30 * time.Second, 75 * time.Second}

// Histogram counts durations in fixed buckets. The zero value is ready; it is
// safe for concurrent use.
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
